"""Tests of the pace test: on a simulated clock, and with real processes that are stopped or starved."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from probe.pace_worker import FolderStore
from probe.workers import OneRankStore, tiny_options

from pipette_launch.facts import files
from pipette_launch.probe.compute import slot_speeds
from pipette_launch.probe.compute.slot_speeds import PaceTest, Speeds, queued_s, speeds
from pipette_launch.probe.lockstep import Lockstep
from pipette_launch.probe.messages import Pace, WarmupOrder

ROOT = Path(__file__).parents[3]
WORKER = Path(__file__).parents[1] / "pace_worker.py"
LIMIT_S = 120
SLOTS = 4
VICTIM = 2


def alone(tmp_path: Path) -> tuple[PaceTest, Lockstep, list[float], Callable[[], None]]:
    """Return the test of a single slot; each work moves the clock by an eighth of a second."""
    now = [0.0]

    def work() -> None:
        now[0] += 0.125

    options = tiny_options(tmp_path, hosts=1, devices=1)
    test = PaceTest(options=options, slot=0, clock=lambda: now[0])
    return test, Lockstep(store=OneRankStore(), rank=0, world_size=1, timeout_s=1), now, work


def test_a_window_counts_whole_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of half a second has four works of an eighth; a single slot differs from nobody."""
    monkeypatch.setattr(slot_speeds, "queued_s", lambda: 0.0)
    test, lockstep, now, work = alone(tmp_path)
    test.first(work, lockstep, 0.0)
    test.again(work, lockstep, 0.0)

    assert [Pace(turn=0, seconds=0.125)] == test.paces
    assert 0.5 == now[0]


def test_who_had_to_wait_for_a_core_began_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others began three eighths of a second before, so the window has one work, of the whole time."""
    waited = iter((1.0, 1.375))
    monkeypatch.setattr(slot_speeds, "queued_s", lambda: next(waited))
    test, lockstep, _, work = alone(tmp_path)
    test.first(work, lockstep, 0.0)

    assert [Pace(turn=0, seconds=0.5)] == test.paces


def test_a_slot_without_work_stays_in_step(tmp_path: Path) -> None:
    """A slot without work has no pace, and takes part in the same meetings."""
    test, lockstep, _, _ = alone(tmp_path)
    test.first(None, lockstep, 0.0)
    test.again(None, lockstep, 0.0)

    assert [] == test.paces


def test_waiting_for_a_core_is_counted() -> None:
    """The kernel's counter never decreases; it is 0 if the kernel has none."""
    before_s = queued_s()

    assert 0 <= before_s <= queued_s()


@contextmanager
def stopping(worker: subprocess.Popen[bytes], share: float) -> Iterator[None]:
    """Let a process run for a share of every tenth of a second."""
    done = threading.Event()

    def brake() -> None:
        while not done.is_set():
            worker.send_signal(signal.SIGSTOP)
            done.wait(0.1 * (1 - share))
            worker.send_signal(signal.SIGCONT)
            time.sleep(0.1 * share)

    thread = threading.Thread(target=brake)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextmanager
def undisturbed(worker: subprocess.Popen[bytes]) -> Iterator[None]:
    """Do nothing."""
    assert worker.pid
    yield


Disturbance = Callable[[subprocess.Popen[bytes]], AbstractContextManager[None]]


def order(folder: Path) -> WarmupOrder:
    """Return an order for hosts of one slot each, which share this machine's cores."""
    options = tiny_options(folder, hosts=SLOTS, devices=1)
    return replace(options, hosts=tuple(replace(host, cores=os.cpu_count() or 1) for host in options.hosts))


def crowd(
    folder: Path, runs: int, disturbance: Callable[[subprocess.Popen[bytes]], AbstractContextManager[None]]
) -> list[Speeds]:
    """Run the pace test several times with real processes, one of them disturbed."""
    options = order(folder)
    files.write(folder / "options.json", options)
    path = os.pathsep.join(str(ROOT / part) for part in (".", "patches", "tests"))
    workers = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(folder), str(slot), str(runs)],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        for slot in range(SLOTS)
    ]
    try:
        with disturbance(workers[VICTIM]):
            for slot, worker in enumerate(workers):
                if slot != VICTIM:
                    assert 0 == worker.wait(LIMIT_S)
        assert 0 == workers[VICTIM].wait(LIMIT_S)
    finally:
        for worker in workers:
            worker.kill()
    told = [json.loads((folder / f"{slot}.json").read_text()) for slot in range(SLOTS)]
    return [
        speeds(options, [[Pace(turn=turn, seconds=seconds) for turn, seconds in mine[run]] for mine in told])
        for run in range(runs)
    ]


@pytest.mark.processes
def test_a_slot_that_is_stopped_most_of_the_time_is_found(tmp_path: Path) -> None:
    """A slot stopped for nine tenths of the time is named in at least one of three runs; no other slot is."""
    found = crowd(tmp_path, 3, lambda worker: stopping(worker, 0.1))

    assert any([VICTIM] == [slow.slot for slow in run.slow] for run in found)
    assert not any(slow.slot != VICTIM for run in found for slow in run.slow)


@pytest.mark.processes
def test_healthy_slots_are_not_called_slow(tmp_path: Path) -> None:
    """Four processes share the cores of this machine, and no slot is named."""
    found = crowd(tmp_path, 3, undisturbed)

    assert [()] * 3 == [run.slow for run in found]


def test_a_store_of_files_is_a_store(tmp_path: Path) -> None:
    """The store of these workers behaves like torch's."""
    store = FolderStore(tmp_path)
    store.set("a/1", "x")

    assert [b"x"] == store.multi_get(["a/1"])
    assert [1, 2] == [store.add("n", 1), store.add("n", 1)]
    assert not store.check(["b"])
