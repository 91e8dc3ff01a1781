"""Warm-ups whose real workers are killed or stopped: who is named, what becomes of the job, and what is left of it."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from end_to_end import jobs
from end_to_end.jobs import ECHO, HOST, MODEL, TRAINER, pipette, warm_pipette

pytestmark = [pytest.mark.timeout(420), pytest.mark.processes]
ONE_STEP = [*MODEL, "--train-iters", "1"]
FAULTS = f"{Path(__file__).parent / 'faults'}:{jobs.ROOT}:{jobs.ROOT / 'patches'}"


def temporary_files(folder: Path) -> list[str]:
    """What the launcher or its warm-up left in the folder for temporary files, beside the output of what failed."""
    return [path.name for path in folder.glob("pipette*") if not path.name.startswith("pipette_warmup_")]


def test_a_worker_killed_while_it_computes_costs_only_the_plan(tmp_path: Path) -> None:
    """It is named by slot, pid, signal and phase, and training has a healthy process group of its own."""
    fault = f"compute {signal.SIGKILL:d}"
    words = ["--nproc-per-node=2", "--pipette-budget=5", TRAINER, *ONE_STEP]
    done = warm_pipette(tmp_path, *words, PYTHONPATH=FAULTS, FAULT=fault)

    assert 0 == done.code, done.err
    named = rf"the warm-up failed after \S+ s: {HOST}:1 \(pid \d+\) was killed by signal 9 in phase compute"
    assert re.search(named, done.err), done.err
    assert 1 == len(done.losses), done.out
    assert [] == jobs.left_behind(str(tmp_path))
    assert [] == temporary_files(tmp_path)


def test_a_worker_stopped_between_messages_is_found_long_before_the_deadline(tmp_path: Path) -> None:
    """Its peer waits in vain and is not accused; with `fail` the job ends there, and the stopped one with it."""
    fault = f"links {signal.SIGSTOP:d}"
    words = ["--nproc-per-node=2", "--pipette-budget=200", "--pipette-on-error=fail", ECHO, *ONE_STEP]
    done = pipette(tmp_path, *words, PYTHONPATH=FAULTS, FAULT=fault)

    assert (1, {}) == (done.code, done.workers), done.err
    named = (
        rf"failed after (\S+) s: {HOST}:1 \(pid \d+\) is stopped, as by SIGSTOP or a debugger, in phase links, 0 of 1"
    )
    found = re.search(named, done.err)
    assert found, done.err
    assert 150 > float(found[1])
    assert 1 == done.err.count("(pid ")
    # What was over by then is in the log.
    assert re.search(r"pipette-launch: .*compute \S+ s: \d+ of \d+ combinations", done.err), done.err
    assert [] == jobs.left_behind(str(tmp_path))
    assert [] == temporary_files(tmp_path)
