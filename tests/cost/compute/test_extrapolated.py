"""Tests of carrying measured compute times over to cases that were not measured."""

from dataclasses import replace

import pytest
from facts_for_tests import tiny_cluster, tiny_job, tiny_measurements, tiny_model

from pipette_launch.cost.compute.extrapolated import GENERIC, spec_of, with_extrapolated_times
from pipette_launch.cost.compute.imagined_device import modelled_compute
from pipette_launch.cost.compute.stages import ComputeTable
from pipette_launch.facts import ComputeCase, ComputeTime, Device, Layout, Measurements, Samples

ONE = ComputeCase(tp=1, cp=1, micro_batch_size=1)
TP2 = ComputeCase(tp=2, cp=1, micro_batch_size=1)
MBS4 = ComputeCase(tp=1, cp=1, micro_batch_size=4)
CP2 = ComputeCase(tp=1, cp=2, micro_batch_size=1)
JOB = replace(tiny_job(4), model=tiny_model(hidden_size=1024, ffn_hidden_size=4096, seq_length=1024))


def measured(*cases: ComputeCase, **changes: object) -> Measurements:
    """Two hosts of two, and these cases on them."""
    return replace(tiny_measurements(tiny_cluster(2, 2), cases), **changes)  # type: ignore[arg-type]


def layer(measurements: Measurements, case: ComputeCase) -> ComputeTime:
    """The layer's times in a case."""
    return next(time for time in measurements.compute if (time.case, time.part) == (case, "layer"))


def test_twice_the_tensor_ranks_take_about_half() -> None:
    """A case of another tp gets times, marked as modelled, between half and all of the measured ones."""
    found = with_extrapolated_times(JOB, measured(ONE, unmeasured=(TP2,)))
    ratio = layer(found, TP2).forward.median_s / layer(found, ONE).forward.median_s

    assert "modelled" == layer(found, TP2).source
    assert 0.5 < ratio < 0.7
    assert "tp2 cp1 mbs1 were not measured" in found.notes[-1]
    assert "model of the device" in (ComputeTable(JOB, found).note(TP2) or "")
    assert ComputeTable(JOB, found).note(ONE) is None


def test_recompute_is_carried_over_with_the_forward() -> None:
    """What a measured layer took to run again, in forwards, it takes in the other case too."""
    one = measured(ONE, unmeasured=(MBS4,))
    again = tuple(replace(time, recompute=Samples(values_s=(1.25 * time.forward.median_s,))) for time in one.compute)
    found = layer(with_extrapolated_times(JOB, replace(one, compute=again)), MBS4)

    assert found.recompute is not None
    assert pytest.approx(1.25) == found.recompute.median_s / found.forward.median_s


def test_machines_that_are_the_model_get_its_times_back() -> None:
    """If what was measured is the model's own, so is what is carried over."""
    layouts = [Layout(tp=tp, micro_batch_size=size, sequence_parallel=tp > 1) for tp in (1, 2) for size in (1, 4)]
    truth = modelled_compute(JOB, GENERIC, layouts)
    known = tuple(time for time in truth if time.case == ONE)
    others = tuple({time.case: None for time in truth if time.case != ONE})
    found = with_extrapolated_times(JOB, measured(ONE, compute=known, unmeasured=others))
    times = {(time.case, time.part): time.forward.median_s for time in found.compute}

    assert pytest.approx({(time.case, time.part): time.forward.median_s for time in truth}) == times


def test_nothing_is_added_to_what_is_complete() -> None:
    """Measured cases stay as they are, and nothing is said."""
    whole = measured(ONE, TP2)

    assert whole is with_extrapolated_times(JOB, whole)


@pytest.mark.parametrize(
    ("refused", "wanted", "added"),
    [
        (CP2, ComputeCase(tp=2, cp=2, micro_batch_size=1), False),
        (MBS4, ComputeCase(tp=1, cp=1, micro_batch_size=8), False),
        (MBS4, ComputeCase(tp=1, cp=1, micro_batch_size=2), True),
        (MBS4, ComputeCase(tp=2, cp=1, micro_batch_size=4), True),
    ],
)
def test_what_was_refused_is_not_made_up(refused: ComputeCase, wanted: ComputeCase, added: bool) -> None:
    """Neither a context parallelism that nobody could run, nor what needs more memory than what ran out of it."""
    found = with_extrapolated_times(JOB, measured(ONE, refused=(refused,), unmeasured=(wanted,)))

    assert added == (wanted in found.compute_cases())
    assert refused not in found.compute_cases()


@pytest.mark.parametrize(
    ("name", "gib", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 80, "H100-SXM"),
        ("NVIDIA A100-SXM4-40GB", 40, "A100-40GB"),
        ("NVIDIA H200", 141, "H200"),
        ("AMD EPYC 9000", 64, "any"),
    ],
)
def test_devices_are_known_by_their_drivers_names(name: str, gib: int, expected: str) -> None:
    """The type is in the name, the memory tells the variant; anything else is any device."""
    device = Device(kind="cuda", uuid="u", name=name, memory_total_bytes=gib << 30, memory_free_bytes=gib << 30)

    assert expected == spec_of(device).name
