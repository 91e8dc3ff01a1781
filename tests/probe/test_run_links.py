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
from pipette_launch.probe.messages import WarmupOrder
from pipette_launch.probe.progress import last_sign

pytestmark = pytest.mark.processes


def timed(folder: Path, hosts: int, **options: int) -> Measurements:
    """Run links-only workers that cannot import megatron-core; above 3 hosts they sample."""
    order = WarmupOrder(
        hosts=tiny_cluster(hosts, 1).hosts,
        output=str(folder / "cluster.json"),
        progress_dir=str(folder / "progress"),
        message_sizes_bytes=(8, 4096, 65536),
        repeats=3,
        timeout_s=30.0,
        full_hosts=3,
        **options,
    )
    files.write(folder / "order.json", order)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30), wait_for_workers=False)
    program = (
        "import runpy, sys; sys.modules['megatron'] = None; "
        "from pipette_launch.probe.links import selection; selection.FULL_HOSTS = 3; "
        "runpy.run_module('pipette_launch.probe.run', run_name='__main__')"
    )
    command = [sys.executable, "-c", program, str(folder / "order.json")]
    places = [{**os.environ, **environment(rank, order, store.port)} for rank in range(hosts)]
    workers = [subprocess.Popen(command, env=place, stderr=subprocess.PIPE, text=True) for place in places]
    errors = [worker.communicate(timeout=200)[1] for worker in workers]
    assert [0] * hosts == [worker.returncode for worker in workers], errors
    return files.read(Path(order.output), Measurements)


def test_three_hosts_are_measured_without_megatron(tmp_path: Path) -> None:
    """Every link is measured, nothing else is, and no worker can import megatron-core."""
    found = timed(tmp_path, 3)

    assert tiny_cluster(3, 1).hosts == found.cluster.hosts
    assert () == found.compute
    assert found.survey
    assert {"-mm", "m-m", "mm-"} == {row.replace("a", "m") for row in found.survey.origin_HH}
    sign = last_sign(tmp_path / "progress", 0)
    assert sign
    assert ["start", "links"] == [one.phase for one in sign.ended] == list(found.phase_s)


def test_many_hosts_below_unknown_switches_are_scouted(tmp_path: Path) -> None:
    """After one blind round, four hosts measure the other two rounds, and a note reports these rounds."""
    found = timed(tmp_path, 4, blind_rounds=1)

    assert found.survey
    assert 3 == found.survey.rounds
    assert 12 == sum(row.count("m") + row.count("a") for row in found.survey.origin_HH)
    assert "links: 2 more rounds to find hosts near each other" in found.notes
