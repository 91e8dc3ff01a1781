"""Warm-ups that time only links: real workers over gloo, without Megatron."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from facts_for_tests import tiny_cluster
from probe.workers import environment

from pipette_launch.facts import Measurements, files
from pipette_launch.probe.messages import LinksOrder, last_sign

pytestmark = pytest.mark.processes


def test_three_hosts_are_measured_without_megatron(tmp_path: Path) -> None:
    """Every link is measured, nothing else is, and no worker can import megatron-core or our patches."""
    order = LinksOrder(
        hosts=tiny_cluster(3, 1).hosts,
        output=str(tmp_path / "cluster.json"),
        progress_dir=str(tmp_path / "progress"),
        message_sizes_bytes=(8, 4096, 65536),
        repeats=3,
        timeout_s=30.0,
    )
    files.write(tmp_path / "order.json", order)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30), wait_for_workers=False)
    program = (
        "import runpy, sys; sys.modules['megatron'] = sys.modules['pipette_patches'] = None; "
        "runpy.run_module('pipette_launch.probe.run', run_name='__main__')"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "order.json"), LinksOrder.KIND]
    places = [{**os.environ, **environment(rank, order, store.port)} for rank in range(3)]
    workers = [subprocess.Popen(command, env=place, stderr=subprocess.PIPE, text=True) for place in places]
    errors = [worker.communicate(timeout=200)[1] for worker in workers]
    assert [0, 0, 0] == [worker.returncode for worker in workers], errors

    found = files.read(Path(order.output), Measurements)
    assert order.hosts == found.cluster.hosts
    assert () == found.compute
    assert found.survey
    assert {"-mm", "m-m", "mm-"} == {row.replace("a", "m") for row in found.survey.origin_HH}
    sign = last_sign(tmp_path / "progress", 0)
    assert sign
    assert ["start", "links"] == [one.phase for one in sign.ended]
