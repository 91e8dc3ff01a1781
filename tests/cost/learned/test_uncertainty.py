"""By how much two predicted steps may differ by chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from facts_for_tests import tiny_cluster, tiny_job, tiny_measurements

from pipette_launch.cost.compute.stages import ComputeTable
from pipette_launch.cost.learned.uncertainty import CARRIED_ERROR, ERRORS_APART, MODELLED_ERROR, Uncertainty
from pipette_launch.facts import CollectiveTime, ComputeCase, Layout, Measurements, Samples
from pipette_launch.facts.measurements import ERROR_OF_MEDIAN

OWN, OTHER, PLACED = Layout(dp=4), Layout(dp=4, micro_batch_size=2), Layout(pp=4)
PARTS_S = {"compute": 0.6, "bubble": 0.3, "recompute": 0.1, "data_parallel": 5.0}


def chance_between(measurements: Measurements, one: Layout, other: Layout) -> float:
    """Of two steps with the same parts."""
    doubt = Uncertainty(tiny_job(4), ComputeTable(tiny_job(4), measurements), measurements)
    return doubt.chance_s((one, PARTS_S), (other, PARTS_S))


def scattered(measurements: Measurements, micro_batch_size: int, factors: Sequence[float]) -> Measurements:
    """Let the layer of a case, without tensor parallelism, scatter around what it was."""
    case = ComputeCase(tp=1, cp=1, micro_batch_size=micro_batch_size)

    def spread(samples: Samples) -> Samples:
        return Samples(values_s=tuple(samples.median_s * factor for factor in factors))

    compute = [
        replace(time, forward=spread(time.forward), input_grad=spread(time.input_grad))
        if (time.case, time.part) == (case, "layer")
        else time
        for time in measurements.compute
    ]
    return replace(measurements, compute=tuple(compute))


def test_the_same_compute_times_cannot_feign_a_gain() -> None:
    """Layouts and placements that rest on one case share its error, however large."""
    measurements = scattered(tiny_measurements(tiny_cluster()), 1, (0.5, 1.0, 2.0))

    assert chance_between(measurements, OWN, PLACED) == 0.0


def test_single_looks_say_nothing_of_chance() -> None:
    """What is not known is not doubted."""
    assert chance_between(tiny_measurements(tiny_cluster()), OWN, OTHER) == 0.0


def test_chance_grows_with_scatter_and_falls_with_looks() -> None:
    """Two of three passes scatter by a tenth: root 2 over 3 of the standard error of their medians."""
    steady = tiny_measurements(tiny_cluster())
    few = chance_between(scattered(steady, 2, (0.9, 1.0, 1.1)), OWN, OTHER)
    many = chance_between(scattered(steady, 2, (0.9, 1.0, 1.1) * 4), OWN, OTHER)

    assert few == pytest.approx(ERRORS_APART * ERROR_OF_MEDIAN * 0.1 / 3**0.5 * 2**0.5 / 3)
    assert many == pytest.approx(few / 2)


def test_a_time_that_was_carried_over_is_in_doubt_beside_a_measured_one() -> None:
    """Beside another that was carried over, too, the model's error is common to both."""
    measurements = tiny_measurements(tiny_cluster())
    modelled = tuple(replace(time, source="modelled") for time in measurements.compute)
    mixed = tuple(time if time.case.micro_batch_size == 1 else replace(time, source="modelled") for time in modelled)
    own = tuple(time for time in measurements.compute if time.case.micro_batch_size == 1)
    others = tuple(time for time in mixed if time.case.micro_batch_size > 1)

    assert chance_between(replace(measurements, compute=modelled), OWN, OTHER) == 0.0
    assert chance_between(replace(measurements, compute=(*own, *others)), OWN, OTHER) == pytest.approx(
        ERRORS_APART * MODELLED_ERROR
    )


def test_a_time_in_proportion_to_tokens_is_carried_over() -> None:
    """Twice the micro-batch, of which nothing is known, counts as modelled; the case that stands for it is its own."""
    one = tiny_measurements(tiny_cluster(), (ComputeCase(tp=1, cp=1, micro_batch_size=1),))

    assert chance_between(one, OWN, OTHER) == 0.0
    both = tiny_measurements(
        tiny_cluster(), (ComputeCase(tp=1, cp=1, micro_batch_size=1), ComputeCase(tp=1, cp=1, micro_batch_size=4))
    )
    eight = Layout(dp=4, micro_batch_size=8)

    assert chance_between(both, OWN, eight) == pytest.approx(ERRORS_APART * MODELLED_ERROR)


def test_a_collective_of_another_shape_may_be_off() -> None:
    """Groups of four hosts are in doubt beside a measured pair, and not where they or no group at all was measured."""
    nothing = tiny_measurements(tiny_cluster(4, 1))

    def carried_s(*slots: tuple[int, ...]) -> float:
        collectives = tuple(
            CollectiveTime(
                kind="all_reduce", slots=each, latency_s=1e-3, seconds_per_byte=1e-8, spread=0.0, sizes_bytes=(1,)
            )
            for each in slots
        )
        measurements = replace(nothing, collectives=collectives)
        doubt = Uncertainty(tiny_job(4), ComputeTable(tiny_job(4), measurements), measurements)
        return doubt.carried_s(OWN, (0, 1, 2, 3), PARTS_S)

    assert carried_s() == 0.0
    assert carried_s((0, 1)) == pytest.approx(CARRIED_ERROR * PARTS_S["data_parallel"])
    assert carried_s((0, 1), (3, 2, 1, 0)) == 0.0


def test_compute_times_of_another_case_may_be_off() -> None:
    """Twice the micro-batch that was measured is in doubt; where no case was measured, all are equally so."""
    one = tiny_measurements(tiny_cluster(4, 1), (ComputeCase(tp=1, cp=1, micro_batch_size=1),))
    none = replace(one, compute=tuple(replace(time, source="modelled") for time in one.compute))

    def carried_s(layout: Layout, measurements: Measurements) -> float:
        doubt = Uncertainty(tiny_job(4), ComputeTable(tiny_job(4), measurements), measurements)
        return doubt.carried_s(layout, (0, 1, 2, 3), PARTS_S)

    assert carried_s(OWN, one) == carried_s(OTHER, none) == 0.0
    assert carried_s(OTHER, one) == pytest.approx(MODELLED_ERROR)
