"""Verdicts about a job of many launchers."""

from __future__ import annotations

import random
from typing import Any

import pytest

from benchmarks.bench_launchers import is_well, late
from benchmarks.launchers.faults import CASES, ENDS_S, Case

KILLED, CUT, TOLD = (next(case for case in CASES if name in case.name) for name in ("5 % killed", "halves", "all told"))


@pytest.mark.parametrize(
    ("case", "found", "expected"),
    [
        (KILLED, {"recovered_s": 3.5}, False),
        (KILLED, {"recovered_s": 60.0}, True),
        (KILLED, {"recovered_s": 60.0, "last_worker_s": 59.5}, True),
        (KILLED, {"recovered_s": None, "last_worker_s": None}, True),
        (KILLED, {"recovered_s": 3.5, "ends_s": ENDS_S + 1}, True),
        (KILLED, {"recovered_s": 3.5, "reached": False}, True),
        (CUT, {"recovered_s": 20.5, "last_worker_s": 20.0, "hit_ends_s": 45.0}, False),
        (CUT, {"recovered_s": 20.5, "last_worker_s": 20.0, "hit_ends_s": 400.0}, True),
        (TOLD, {"recovered_s": None, "last_worker_s": None}, False),
    ],
)
def test_a_run_that_misses_a_deadline_is_late(case: Case, found: dict[str, Any], expected: bool) -> None:
    """A recovery, an end, or the end of the smaller part of a cut network."""
    usual = {"size": 64, "last_worker_s": 3.0, "ends_s": 1.0, "hit_ends_s": 5.0, "reached": True}

    assert expected == late(case, usual | found)


def test_a_fault_of_any_kind_makes_a_run_bad() -> None:
    """A run whose verdict is missing is bad too."""
    well: dict[str, Any] = {"late": False, "false": [], "hung": [], "left": [], "trouble": []}

    assert is_well(well)
    assert not any(is_well(well | {name: ["h001"]}) for name in well)
    assert not is_well({})


def test_hosts_that_are_hit_are_as_many_as_the_case_says() -> None:
    """At least one; the first host only if the case names it."""
    draw = random.Random(0)
    hit = {case.name: case.hosts(64, draw) for case in CASES}

    assert (1, 3, 13, 4, 32) == tuple(
        len(hit[name])
        for name in (
            "1 % killed",
            "5 % killed",
            "20 % killed",
            "first host and 5 % killed",
            "the network cut into halves",
        )
    )
    assert all((0 in hit[case.name]) == (case.first or case.share == 1) for case in CASES)
