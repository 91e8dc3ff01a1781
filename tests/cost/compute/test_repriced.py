"""Measured times of layers for a job whose flags the measured layers did not have."""

from __future__ import annotations

from dataclasses import replace

import pytest
from facts_for_tests import tiny_cluster, tiny_job, tiny_measurements, tiny_model
from search.worlds import named, on_gpus

from pipette_launch.cost.compute.extrapolated import with_extrapolated_times
from pipette_launch.cost.compute.imagined_device import modelled_compute
from pipette_launch.cost.compute.stages import ComputeTable
from pipette_launch.cost.step.predictor import Predictor
from pipette_launch.facts import ComputeCase, ComputeTime, Job, Layout, Measurements
from pipette_launch.facts.known_devices import device_named

ONE = ComputeCase(tp=1, cp=1, micro_batch_size=1)
MBS4 = ComputeCase(tp=1, cp=1, micro_batch_size=4)
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


def measured(device: str = H100, *cases: ComputeCase) -> Measurements:
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
    factor = layer_s(fp8, measured()) / layer_s(plain, measured())

    assert 0.55 < factor < 0.85
    parts = ComputeTable(fp8, measured()).part_seconds(ONE)
    assert parts is not None
    assert pytest.approx((3e-4, 1.5e-3)) == (parts["embedding"], parts["head"])


@pytest.mark.parametrize("flags", [(FP8,), (FP8, "--fp8-recipe tensorwise", "--cuda-graph-impl local")])
def test_an_h100_that_is_the_model_gets_its_times_back(flags: tuple[str, ...]) -> None:
    """If what was timed is the model's BF16, times of all flags are the model's, also of cases carried over."""
    timed = replace(measured(), compute=by_model(job_with(), ONE), unmeasured=(MBS4,))
    job = job_with(*flags)
    whole = with_extrapolated_times(job, timed)
    truth = replace(timed, compute=by_model(job, ONE, MBS4), versions={})

    assert ["measured", "modelled"] == [time.source for time in whole.compute if time.part == "layer"]
    for case in (ONE, MBS4):
        assert pytest.approx(layer_s(job, truth, case)) == layer_s(job, whole, case)


@pytest.mark.parametrize(
    ("flags", "changes"),
    [
        (("--cuda-graph-impl local", "--cuda-graph-scope full_iteration"), {"seq_length": 128}),
        (("--window-size 512,0",), {"attention_windows": (512, 512, 512, 512)}),
    ],
)
def test_graphs_and_windows_shorten_a_measured_layer(flags: tuple[str, ...], changes: dict[str, object]) -> None:
    """A short layer without launches, and one whose tokens attend to few others, take less than as timed."""
    kept = {name: value for name, value in changes.items() if name == "seq_length"}

    assert 0.9 * layer_s(job_with(**kept), measured()) > layer_s(job_with(*flags, **changes), measured())


def test_the_factor_stands_beside_the_plan() -> None:
    """The note names flags, device and factor; on a device that no model knows it says that nothing was changed."""
    job = job_with("--cuda-graph-impl local", FP8)
    known, unknown = (Predictor(job, measured(name)).notes(Layout(dp=4)) for name in (H100, "Gaudi 3"))

    (scaled,), (left,) = ([note for note in notes if "Layers were timed" in note] for notes in (known, unknown))
    factor = f"{layer_s(job, measured()) / 3e-3:.2f}"
    flags = f"--cuda-graph-impl local, {FP8}"
    assert f"Layers were timed without {flags}, and priced at {factor} of that by a model of H100-SXM." == scaled
    assert f"Layers were timed and priced without {flags}: no figures of Gaudi 3 are known." == left
    assert pytest.approx(3e-3) == layer_s(job, measured("Gaudi 3"))


def test_a_device_without_the_format_is_left_as_it_is() -> None:
    """An A100 has no FP8: the reason is that of the device's table."""
    job = job_with(FP8)
    (note,) = (one for one in Predictor(job, measured("NVIDIA A100-SXM4-80GB")).notes(Layout(dp=4)) if "timed" in one)

    assert "priced without --fp8-format hybrid: A100-80GB has no known peak for fp8" in note
    assert pytest.approx(3e-3) == layer_s(job, measured("NVIDIA A100-SXM4-80GB"))


def test_imagined_times_hold_all_flags_already() -> None:
    """Where no warm-up measured, no factor is applied, and no note is made."""
    job, imagined = job_with(FP8), replace(measured(), versions={})

    assert pytest.approx(3e-3) == layer_s(job, imagined)
    assert not [note for note in Predictor(job, imagined).notes(Layout(dp=4)) if "timed" in note]


def test_another_exchange_of_context_parallelism_is_named() -> None:
    """Context parallelism by all-to-all is timed and priced as a ring, and the plan says so where it has any."""
    predictor = Predictor(job_with("--cp-comm-type a2a"), measured(H100, ONE, replace(ONE, cp=2)))
    notes = predictor.notes(Layout(dp=2, cp=2))

    assert "Context parallelism is priced as a ring, not with --cp-comm-type a2a." in notes
    assert not [note for note in predictor.notes(Layout(dp=4)) if "ring," in note]
