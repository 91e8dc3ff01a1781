"""Tests of carrying measured compute times over to cases that were not measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from facts_for_tests import tiny_cluster, tiny_job, tiny_measurements, tiny_model
from search.worlds import named, on_gpus

from pipette_launch.cost.compute.carried_over import GENERIC, spec_of, with_extrapolated_times
from pipette_launch.cost.compute.device_model import modelled_compute
from pipette_launch.cost.compute.stages import ComputeTable
from pipette_launch.cost.step.predictor import Predictor
from pipette_launch.facts import ComputeCase, ComputeTime, Device, Job, Layout, Measurements, Samples
from pipette_launch.facts.devices import device_named

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
    """The recompute time of a layer, in forwards, is the same in the other case."""
    one = measured(ONE, unmeasured=(MBS4,))
    again = tuple(replace(time, recompute=Samples(values_s=(1.25 * time.forward.median_s,))) for time in one.compute)
    found = layer(with_extrapolated_times(JOB, replace(one, compute=again)), MBS4)

    assert found.recompute is not None
    assert pytest.approx(1.25) == found.recompute.median_s / found.forward.median_s


def test_machines_that_are_the_model_get_its_times_back() -> None:
    """If the measured times are the model's, the carried times are the model's too."""
    layouts = [Layout(tp=tp, micro_batch_size=size, sequence_parallel=tp > 1) for tp in (1, 2) for size in (1, 4)]
    truth = modelled_compute(JOB, GENERIC, layouts)
    known = tuple(time for time in truth if time.case == ONE)
    others = tuple({time.case: None for time in truth if time.case != ONE})
    found = with_extrapolated_times(JOB, measured(ONE, compute=known, unmeasured=others))
    times = {(time.case, time.part): time.forward.median_s for time in found.compute}

    assert pytest.approx({(time.case, time.part): time.forward.median_s for time in truth}) == times


def test_nothing_is_added_to_what_is_complete() -> None:
    """Measured cases do not change, and there is no note."""
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


H100 = "NVIDIA H100 80GB HBM3"
FP8 = "--fp8-format hybrid"
LLAMA = {
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "num_attention_heads": 32,
    "kv_channels": 128,
    "num_query_groups": 8,
    "seq_length": 8192,
    "max_position_embeddings": 8192,
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "params_dtype": "bf16",
    "transformer_impl": "transformer_engine",
    "attention_backend": "auto",
}


def job_with(*flags: str, **changes: object) -> Job:
    """Layers of Llama-3 8B, and these flags."""
    return tiny_job(4, model=tiny_model(**(LLAMA | changes)), performance_flags=flags)


def bf16_measurements(device: str = H100, *cases: ComputeCase) -> Measurements:
    """Two hosts of two such devices; a layer takes 1 ms for each pass of one sample."""
    return tiny_measurements(named(on_gpus(tiny_cluster(2, 2)), device), cases or (ONE,))


def layer_s(job: Job, measurements: Measurements, case: ComputeCase = ONE) -> float:
    """Forward and backward of a layer, as plans price it."""
    return (ComputeTable(job, measurements).part_seconds(case) or {})["layer"]


def by_model(job: Job, *cases: ComputeCase) -> tuple[ComputeTime, ...]:
    """Return the times of an H100 by the device model alone."""
    layouts = [Layout(tp=case.tp, cp=case.cp, micro_batch_size=case.micro_batch_size) for case in cases]
    return modelled_compute(job, device_named("H100-SXM"), layouts)


def test_fp8_shortens_a_measured_layer_as_the_device_model_has_it() -> None:
    """A layer timed in BF16 is priced at the model's ratio of FP8 to BF16; head and embedding stay as measured."""
    plain, fp8 = job_with(), job_with(FP8, "--fp8-recipe tensorwise")
    factor = layer_s(fp8, bf16_measurements()) / layer_s(plain, bf16_measurements())

    assert 0.55 < factor < 0.85
    parts = ComputeTable(fp8, bf16_measurements()).part_seconds(ONE)
    assert parts is not None
    assert pytest.approx((3e-4, 1.5e-3)) == (parts["embedding"], parts["head"])


@pytest.mark.parametrize("flags", [(FP8,), (FP8, "--fp8-recipe tensorwise", "--cuda-graph-impl local")])
def test_an_h100_that_is_the_model_gets_its_times_back(flags: tuple[str, ...]) -> None:
    """If the timed layers are the model's BF16, the times with all flags are the model's, also in carried cases."""
    timed = replace(bf16_measurements(), compute=by_model(job_with(), ONE), unmeasured=(MBS4,))
    job = job_with(*flags)
    whole = with_extrapolated_times(job, timed)
    truth = replace(timed, compute=by_model(job, ONE, MBS4), versions={})

    assert ["measured", "modelled"] == [time.source for time in whole.compute if time.part == "layer"]
    for case in (ONE, MBS4):
        assert pytest.approx(layer_s(job, truth, case)) == layer_s(job, whole, case)


def test_graphs_shorten_a_measured_layer_and_windows_do_not() -> None:
    """A short layer without launches takes less than as timed. Timed layers have their windows, so their time stays."""
    graphs = job_with("--cuda-graph-impl local", "--cuda-graph-scope full_iteration", seq_length=128)
    windows = job_with("--window-size 512,0", attention_windows=(512, 0, 512, 0))

    assert 0.9 * layer_s(job_with(seq_length=128), bf16_measurements()) > layer_s(graphs, bf16_measurements())
    assert layer_s(job_with(), bf16_measurements()) == layer_s(windows, bf16_measurements())


def test_layers_timed_in_fp8_are_corrected_for_edges_in_bf16() -> None:
    """Single timed layers are in FP8. With two of four layers in BF16 the mean layer is slower than as timed."""
    timed = replace(bf16_measurements(), timed_flags=(FP8,))

    assert layer_s(job_with(FP8), timed) < 0.95 * layer_s(job_with(FP8, "--first-last-layers-bf16"), timed)


def test_the_factor_stands_beside_the_plan() -> None:
    """The note names flags, device and factor; on a device that no model knows it says that nothing was changed."""
    job = job_with("--cuda-graph-impl local", FP8)
    known, unknown = (Predictor(job, bf16_measurements(name)).notes(Layout(dp=4)) for name in (H100, "Gaudi 3"))

    (scaled,), (left,) = ([note for note in notes if "Layers were timed" in note] for notes in (known, unknown))
    factor = f"{layer_s(job, bf16_measurements()) / 3e-3:.2f}"
    flags = f"--cuda-graph-impl local, {FP8}"
    assert f"Layers were timed without {flags}. A model of H100-SXM multiplies their time by {factor}." == scaled
    assert f"Layers were timed and priced without {flags}: no figures of Gaudi 3 are known." == left
    assert pytest.approx(3e-3) == layer_s(job, bf16_measurements("Gaudi 3"))


def test_a_device_without_the_format_is_left_as_it_is() -> None:
    """An A100 has no FP8: the note has the reason of the device's table."""
    job = job_with(FP8)
    (note,) = (
        one for one in Predictor(job, bf16_measurements("NVIDIA A100-SXM4-80GB")).notes(Layout(dp=4)) if "timed" in one
    )

    assert "priced without --fp8-format hybrid: A100-80GB has no known peak for fp8" in note
    assert pytest.approx(3e-3) == layer_s(job, bf16_measurements("NVIDIA A100-SXM4-80GB"))


def test_imagined_times_hold_all_flags_already() -> None:
    """Without a warm-up no factor is applied, and there is no note."""
    job, imagined = job_with(FP8), replace(bf16_measurements(), versions={})

    assert pytest.approx(3e-3) == layer_s(job, imagined)
    assert not [note for note in Predictor(job, imagined).notes(Layout(dp=4)) if "timed" in note]


def test_another_exchange_of_context_parallelism_is_named() -> None:
    """Context parallelism by all-to-all is timed and priced as a ring, and the plan says so where it has any."""
    predictor = Predictor(job_with("--cp-comm-type a2a"), bf16_measurements(H100, ONE, replace(ONE, cp=2)))
    notes = predictor.notes(Layout(dp=2, cp=2))

    assert "Context parallelism is priced as a ring, not with --cp-comm-type a2a." in notes
    assert not [note for note in predictor.notes(Layout(dp=4)) if "ring," in note]
