"""The benchmarks of single devices cover what they claim, and their sums are right."""

import sys
from pathlib import Path

import pytest

from benchmarks import bench_layers, bench_memory
from benchmarks.dense import FULL, MICRO_BATCHES, SHAPES, WITHOUT_KERNELS, cases, dense_job, refusal, report
from pipette_launch.facts import ComputeCase, ComputeTime, Device, Layout, Samples
from pipette_launch.facts.device import device_named
from pipette_launch.facts.executed import ExecutedMemory, ExecutedParts
from pipette_launch.probe.memory import Peak
from pipette_launch.units import MIB


def device(name: str) -> Device:
    """A GPU of some type."""
    return Device(kind="cuda", uuid="GPU", name=name, memory_total_bytes=1, memory_free_bytes=1)


@pytest.mark.parametrize("has_te", [False, True])
def test_a_gpu_runs_1b_to_7b_at_three_micro_batches_with_and_without_recompute(has_te: bool) -> None:
    """Each model has its name's parameters; without Transformer Engine the jobs ask for nothing that needs it."""
    found = list(cases("cuda", has_te=has_te))
    for name, billions in (("1B", 1), ("3B", 3), ("7B", 7)):
        mine = [case for case in found if case.name == name and case.layout.pp == 1]
        model = mine[0].job.model
        layer = model.attention_parameters() + model.mlp_parameters()
        count = model.num_layers * layer + 2 * model.vocab_size * model.hidden_size

        assert pytest.approx(billions, rel=0.08) == count / 1e9
        assert {(size, again) for size in MICRO_BATCHES for again in ("none", "full")} == {
            (case.layout.micro_batch_size, case.layout.recompute.granularity) for case in mine
        }
        assert {() if has_te else WITHOUT_KERNELS} == {case.job.performance_flags for case in mine}
    assert [(4, 0), (4, 3)] == [(case.layout.pp, case.pp_rank) for case in found if case.layout.pp > 1]


def row(micro_batch_size: int, allocated: int, abstract: int) -> bench_memory.Row:
    """A stage of so many bytes."""
    executed = ExecutedMemory(
        pp_rank=0,
        weights=4 * MIB,
        gradients=4 * MIB,
        optimizer=2 * MIB,
        allocated_after_step=0,
        first_peak=0,
        peak=abstract,
        parts=ExecutedParts(),
        notes=(),
    )
    job = dense_job("cpu", "tiny", Layout(micro_batch_size=micro_batch_size), has_te=False)
    (name,) = SHAPES["cpu"]
    return bench_memory.Row(
        case=bench_memory.Case(name=name, job=job),
        peak=Peak(2 * allocated, 3 * allocated),
        allocated=allocated,
        states=8 * MIB,
        abstract=executed,
        closed=allocated,
        expected_on_device=0,
    )


def test_errors_are_of_the_prediction() -> None:
    """A tenth too little is -10 %; a sample more keeps 10 MiB and 9 by abstract execution; states are a quarter off."""
    rows = [row(size, size * 10 * MIB, size * 9 * MIB) for size in MICRO_BATCHES]
    lines = list(bench_memory.table(rows, "cpu"))
    said = "\n".join(bench_memory.summary(rows, "cpu"))

    assert (
        "| tiny | tp1 pp1 dp1 mbs1 | 0 | 10.0 MiB | 9.0 MiB | -10.00% | 10.0 MiB | +0.00% | 20.0 MiB | - |" == lines[2]
    )
    assert "Abstract execution: median 10.00%, largest 10.00% of 3 stages; target 1%." in said
    assert "tiny: one sample more in a micro-batch keeps 10.0 MiB, abstractly 9.0 MiB (-10.0%)." in said
    assert "abstract against counted: median 25.00%" in said
    assert "grew by 2.00 to 2.00 times" in said


def test_the_data_sheet_is_found_by_the_drivers_name() -> None:
    """Names of the driver are longer than ours; what is unknown has no peak."""
    for full, short in (
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
    ):
        assert device_named(short).flops_per_s["bf16"] == bench_layers.sheet_flops_per_s(device(full))
    assert bench_layers.sheet_flops_per_s(device("NVIDIA RTX A6000")) is None


def test_a_layers_rate_counts_its_backward_twice() -> None:
    """Three times the forward's products, in the time of both passes."""

    def seconds(value: float) -> Samples:
        return Samples(values_s=(value,))

    time = ComputeTime(
        case=ComputeCase(tp=1, cp=1, micro_batch_size=1),
        part="layer",
        slot=0,
        forward=seconds(1.0),
        input_grad=seconds(1.5),
        weight_grad=seconds(0.5),
    )

    assert 100.0 == bench_layers.Row(name="x", micro_batch_size=1, flops=100.0, time=time).flops_per_s
    assert "full" == FULL.granularity


def test_a_report_says_where_it_comes_from_and_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Title, circumstances, figures, refusals in their first line; printed and filed alike."""
    words = ["bench_layers", "--device", "cpu", "--only", "tiny", "--out", str(tmp_path / "out.md")]
    monkeypatch.setattr(sys, "argv", words)

    def measure(device: Device, only: str) -> tuple[list[str], list[str]]:
        return [f"{device.kind} {only}"], [refusal("huge", RuntimeError("too large\nby far"))]

    report("bench_layers", "Doc.", title="Layers", reason="none was lent", measure=measure)
    text = (tmp_path / "out.md").read_text()

    assert text.startswith("# Layers\n\n`python -m benchmarks.bench_layers --device cpu`, ")
    assert "not run on a GPU**: none was lent\n\ncpu tiny\n\nNot measured:\n\n- huge: too large\n" in text
    assert f"{text}\n" == capsys.readouterr().out


def test_a_benchmark_that_measured_nothing_says_so_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no report of nothing."""
    monkeypatch.setattr(sys, "argv", ["bench_memory", "--device", "cpu"])

    with pytest.raises(SystemExit, match=r"^bench_memory: nothing could be measured\n- huge: ValueError$"):
        report("bench_memory", "", title="", reason="", measure=lambda _, __: ([], [refusal("huge", ValueError())]))
