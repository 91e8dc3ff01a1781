"""Tests of using an earlier warm-up's compute times."""

from dataclasses import replace

import pytest
from facts_for_tests import tiny_cluster, tiny_measurements

from pipette_launch.cost.compute.cached import with_cached_times
from pipette_launch.facts import ComputeCase, Measurements, Samples

ONE, TWO = (ComputeCase(tp=tp, cp=1, micro_batch_size=1) for tp in (1, 2))


def measured(*cases: ComputeCase, factor: float = 1.0, **changes: object) -> Measurements:
    """These cases, with all times multiplied."""
    found = tiny_measurements(tiny_cluster(2, 1), cases)
    times = tuple(replace(time, forward=Samples(values_s=(time.forward.median_s * factor,))) for time in found.compute)
    return replace(found, compute=times, model_digest="m", **changes)  # type: ignore[arg-type]


def test_a_case_of_an_earlier_warm_up_is_brought_to_todays_pace() -> None:
    """The reference takes 10 % longer than then, so the other case is taken to take 10 % longer, too."""
    now, then = measured(ONE, factor=1.1, unmeasured=(TWO,)), measured(ONE, TWO)
    found = with_cached_times(now, then)
    added = [time for time in found.compute if time.case == TWO]

    assert {"cached"} == {time.source for time in added}
    assert pytest.approx(0.55e-3) == next(time for time in added if time.part == "layer").forward.median_s
    assert () == found.unmeasured
    assert "times of 1 more cases are those of the warm-up at 2026-11-21T00:00:00Z, times 1.10" in found.notes[-1]


@pytest.mark.parametrize(
    ("now", "then"),
    [
        (measured(ONE), None),
        (measured(ONE), replace(measured(ONE, TWO), model_digest="another")),
        (measured(ONE, factor=2.0), measured(ONE, TWO)),
        (measured(ONE), measured(TWO)),
        (measured(ONE, refused=(TWO,)), measured(ONE, TWO)),
        (measured(ONE, TWO), measured(ONE, TWO)),
    ],
)
def test_what_cannot_be_compared_is_not_used(now: Measurements, then: Measurements | None) -> None:
    """No file, another model, another pace, nothing in common, refused now, or nothing missing."""
    assert now is with_cached_times(now, then)
