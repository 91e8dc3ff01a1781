"""Tests of the worker that checks a device order."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from probe.workers import LIMIT_S

from pipette_launch.probe import order_check
from pipette_launch.probe.links import rank_codes
from pipette_launch.probe.links.rank_codes import Mismatch


@pytest.fixture
def port() -> Iterator[int]:
    """A store as an agent hosts it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


@pytest.fixture
def alone(port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The environment of rank 3 of four, on a host of its own."""
    told = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in {**told, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_wrong_value_is_the_last_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The agent tells the user that line, and the worker fails."""
    wrong = Mismatch(collective="all_gather", size_bytes=8 << 20, position=0, expected=0, found=16)
    monkeypatch.setattr(rank_codes, "check_order", lambda *_, **__: wrong)

    assert 1 == order_check.main(["cpu", "3"])
    assert "all_gather of 8 MiB returned 16 instead of 0 at element 0 on rank 3\n" == capsys.readouterr().err


@pytest.mark.usefixtures("alone")
def test_whatever_breaks_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A communicator that cannot be opened fails the check too."""

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("NCCL error\nin ring.cc")

    monkeypatch.setattr(rank_codes, "check_order", broken)

    assert 1 == order_check.main(["cpu", "3"])
    assert "RuntimeError: NCCL error in ring.cc\n" == capsys.readouterr().err


@pytest.mark.processes
def test_each_host_is_checked_by_itself(port: int) -> None:
    """Two hosts of two workers each over gloo, one with its ranks in another order."""
    workers = []
    for rank, ranks in enumerate((("0", "2"), ("3", "1"), ("0", "2"), ("3", "1"))):
        told = {"RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environment = {**told, "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
        words = [sys.executable, "-m", "pipette_launch.probe.order_check", "cpu", *ranks]
        workers.append(subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True))

    assert [""] * 4 == [worker.communicate(timeout=LIMIT_S)[1] for worker in workers]
    assert [0] * 4 == [worker.returncode for worker in workers]
