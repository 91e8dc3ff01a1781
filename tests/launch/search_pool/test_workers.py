"""Processes that help with a search find what this one would, and may die."""

from __future__ import annotations

import io
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from facts_for_tests import drawn_cluster, tiny_job, tiny_measurements
from search.worlds import PROVENANCE, still

from pipette_launch.facts import Layout, Plan, files
from pipette_launch.launch.search_pool import crew, worker
from pipette_launch.launch.search_pool.crew import SharedCrew
from pipette_launch.launch.search_pool.messages import Batch, Done, SearchOrder, as_line
from pipette_launch.launch.search_pool.workers import Hands, processes_of
from pipette_launch.search.solve import SolveOptions, solve
from pipette_launch.search.tasks import Task, alone

ORDER = SearchOrder(
    job=tiny_job(4),
    measurements=tiny_measurements(drawn_cluster(random.Random(5), hosts=2, devices=2)),
    outcomes=(),
    memory_margin=0.08,
    seed=3,
)
TASKS = [Task(stage="price", layout=layout) for layout in (Layout(dp=4), Layout(tp=2, dp=2), Layout(pp=2, dp=2))]
OWN = alone(ORDER.field(), seed=ORDER.seed, clock=still, deadline_s=1.0)


@contextmanager
def hired(folder: Path, count: int) -> Iterator[Hands]:
    """Processes that are ready."""
    files.write(folder / "order.json", ORDER)
    hands = Hands(folder / "order.json", count)
    try:
        wait(lambda: hands.size() == count)
        yield hands
    finally:
        hands.close()


def wait(is_so: Callable[[], bool]) -> None:
    """Wait for another process."""
    end_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def answered(hands: Hands) -> Done:
    """What came of a batch."""
    answers: list[str] = []
    wait(lambda: bool(answers) or ((answer := hands.answer()) is not None and not answers.append(answer)))
    return files.loads(Done, answers[0], "answer")


def plan(make_crew: Callable[[], SharedCrew] | None = None) -> Plan:
    """Plan with all the time in the world."""
    made = solve(
        ORDER.job,
        ORDER.measurements,
        options=SolveOptions(seed=ORDER.seed),
        clock=still,
        provenance=PROVENANCE,
        make_crew=make_crew and (lambda field: make_crew()),
    )
    return replace(made, solve_s=0.0)


def test_a_process_does_what_it_is_told(tmp_path: Path) -> None:
    """Ready, then a line for each batch, to the digit what is found here."""
    files.write(tmp_path / "order.json", ORDER)
    out = io.StringIO()
    lines = [as_line(Batch.of(TASKS, left_s=9.0)), as_line(Batch.of(TASKS[1:], left_s=0.0))]

    assert 0 == worker.main([str(tmp_path / "order.json")], lines, out, still)
    ready, all_three, too_late = (files.loads(Done, line, "out") for line in out.getvalue().splitlines())
    assert Done(tried=()) == ready
    assert OWN(TASKS) == all_three.read()
    assert [None, None] == too_late.read()


def test_a_process_says_why_it_ends(tmp_path: Path) -> None:
    """An order that cannot be read is named in its last line."""
    out = io.StringIO()

    assert 1 == worker.main([str(tmp_path / "no.json")], [], out, still)
    assert "no.json: cannot be read" in files.loads(Done, out.getvalue(), "out").trouble


def test_the_plan_is_the_same_with_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two real ones share every batch with this one; then one of them dies, and nothing is lost."""
    monkeypatch.setattr(crew, "HELP_AFTER_S", 0.0)
    monkeypatch.setattr(crew, "WORTH_SHARING_S", 0.0)
    expected = plan()
    with hired(tmp_path, 2) as hands:
        for _ in range(2):
            shared = SharedCrew(OWN, lambda: [hands], clock=still, deadline_s=1.0, sleep=time.sleep)

            assert expected == plan(lambda: shared)  # noqa: B023
            assert "the search was shared by 3 processes: 3 on this node" == shared.words
            assert () == shared.troubles

        os.kill(hands._hands[0]._process.pid, signal.SIGKILL)
        hands.give(files.dumps(Batch.of(TASKS, left_s=9.0)))
        done = answered(hands)

        found = OWN(TASKS)
        assert [None, found[1], None] == done.read()
        assert "a helping process" in done.trouble
        assert 1 == hands.size()


def test_a_process_that_hangs_holds_up_nobody(tmp_path: Path) -> None:
    """No call waits for it, and it is ended with the rest."""
    with hired(tmp_path, 1) as hands:
        os.kill(hands._hands[0]._process.pid, signal.SIGSTOP)
        hands.give(files.dumps(Batch.of(TASKS, left_s=9.0)))

        assert hands.answer() is None
    assert -signal.SIGKILL == hands._hands[0]._process.returncode


def test_a_node_lends_a_process_for_each_rank() -> None:
    """As far as its cores go, and never none."""
    cores = len(os.sched_getaffinity(0))

    assert (1, 1, cores) == (processes_of(0), processes_of(1), processes_of(10**6))
