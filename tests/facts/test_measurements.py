"""What a warm-up's file says of its own completeness."""

from __future__ import annotations

from dataclasses import replace

import pytest
from facts_for_tests import tiny_cluster, tiny_measurements

from pipette_launch.facts import ComputeCase

TIMED = "combinations of tp, cp and micro-batch timed"
CASES = tuple(ComputeCase(tp=1, cp=1, micro_batch_size=size) for size in range(1, 6))


@pytest.mark.parametrize(
    ("num_timed", "num_modelled", "expected"),
    [
        (5, 0, f"5 of 5 {TIMED}"),
        (3, 2, f"3 of 5 {TIMED}"),
        (2, 1, f"2 of 5 {TIMED}, fewer than half: the plan rests on a device model"),
    ],
)
def test_timed_cases_are_counted(num_timed: int, num_modelled: int, expected: str) -> None:
    """A case that a model priced, or that nobody came to, is wanted and not timed; fewer than half is a warning."""
    known = CASES[: num_timed + num_modelled]
    measured = tiny_measurements(tiny_cluster(1, 1), known)
    compute = tuple(
        replace(time, source="modelled") if time.case in known[num_timed:] else time for time in measured.compute
    )

    assert expected == replace(measured, compute=compute, unmeasured=CASES[num_timed:]).coverage().words()
