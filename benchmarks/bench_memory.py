"""What whole stages really hold, against abstract execution, the closed form and the driver.

`python -m benchmarks.bench_memory [--device auto|cuda|cpu] [--only NAME] [--out FILE]` trains one rank of a job of many
on this device, under a fake process group, with all micro-batches in flight and the optimizer; prints Markdown.
On a CPU, tensors are counted one by one in the place of CUDA's allocator, and the resident set in the place of NVML.
"""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.dense import Case, DeviceKind, cases, has_transformer_engine, refusal, report
from pipette_launch.cost.executed import Executor
from pipette_launch.cost.memory import peak_memory_bytes
from pipette_launch.cost.overhead import overhead_of
from pipette_launch.errors import PipetteError
from pipette_launch.facts import Device
from pipette_launch.facts.executed import ExecutedMemory
from pipette_launch.probe.memory import MemoryMeter, Peak, meter
from pipette_launch.units import MIB
from pipette_patches import workload, workload_stage

TARGET = 0.01
CPU_REASON = (
    "no GPU was lent. On a CPU, torch's RMSNorm keeps several tensors where a GPU's kernel keeps one (the same model "
    "with LayerNorm is there to compare), and a pipeline's outputs are not freed once they are sent. The resident set "
    "is that of a process that ran other stages before."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One stage: what it held and what was foretold, in bytes."""

    case: Case
    peak: Peak
    allocated: int
    """Of the model: without workspaces on CUDA; counted tensors on CPU."""
    states: int
    """Weights, gradients and optimizer, counted on CPU; 0 on CUDA, whose allocator knows no names."""
    abstract: ExecutedMemory
    closed: int
    expected_on_device: int
    """By the closed form, with all overhead, and no communicators: none is open."""

    @property
    def error(self) -> float:
        """Of abstract execution, relative to what was measured."""
        return self.abstract.peak / self.allocated - 1


def measured(case: Case, device: Device, reads: MemoryMeter, executor: Executor) -> Row:
    """Run one stage here and abstractly."""
    runs: list[workload_stage.StageRun] = []

    def work() -> None:
        runs.append(workload_stage.run_stage(case.job, case.layout, case.pp_rank, device_kind=device.kind))

    peak = reads.peak(work)
    job = workload_stage.as_run_here(case.job, device.kind)[0]
    overhead = overhead_of(job, case.layout, device_kind=device.kind, device_name=device.name)
    closed = peak_memory_bytes(job, case.layout)[case.pp_rank].total
    (abstract,) = executor.execute(job, case.layout, (case.pp_rank,))
    on_cuda = peak.allocator_bytes + peak.idle_bytes - int(overhead.workspace.value)
    return Row(
        case=case,
        peak=peak,
        allocated=runs[0].tally_bytes if device.kind == "cpu" else on_cuda,
        states=sum(runs[0].parts.get(name, 0) for name in ("weights", "gradients", "optimizer")),
        abstract=abstract,
        closed=closed,
        expected_on_device=overhead.device_peak_bytes(closed) - int(overhead.communicators.value),
    )


def table(rows: Sequence[Row], device_kind: DeviceKind) -> Iterator[str]:
    """One line a stage."""
    on_cpu = device_kind == "cpu"
    counted, held = ("tensors", "resident set grew") if on_cpu else ("allocator", "NVML")
    yield f"| model | layout | stage | {counted} | abstract | error | closed form | error | {held} | foretold |"
    yield "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|"
    for row in rows:
        closed_error = row.closed / row.allocated - 1
        held_bytes = row.peak.allocator_bytes if on_cpu else row.peak.device_bytes
        foretold = "-" if on_cpu else _mib(row.expected_on_device)
        yield (
            f"| {row.case.name} | {row.case.layout.words()} | {row.case.pp_rank} | {_mib(row.allocated)} "
            f"| {_mib(row.abstract.peak)} | {row.error:+.2%} | {_mib(row.closed)} | {closed_error:+.2%} "
            f"| {_mib(held_bytes)} | {foretold} |"
        )


def summary(rows: Sequence[Row], device_kind: DeviceKind) -> Iterator[str]:
    """The errors in one sentence each."""
    errors = [abs(row.error) for row in rows]
    closed = [abs(row.closed / row.allocated - 1) for row in rows]
    yield f"Abstract execution: {_spread(errors)}; target {TARGET:.0%}. Closed form: {_spread(closed)}."
    if device_kind == "cpu":
        states = [abs(row.abstract.static / row.states - 1) for row in rows if row.states]
        yield f"Weights, gradients and optimizer alone, abstract against counted: {_spread(states)}."
        grown = [row.peak.allocator_bytes / row.allocated for row in rows]
        yield f"The resident set grew by {min(grown):.2f} to {max(grown):.2f} times what the tensors held."
    yield from _slopes(rows)


def _slopes(rows: Sequence[Row]) -> Iterator[str]:
    """What one sample more in each micro-batch keeps, of stages whose peak lies in their passes."""
    by_size = {(row.case.name, row.case.layout.recompute, row.case.layout.micro_batch_size): row for row in rows}
    for name, recompute, size in by_size:
        small, large = by_size.get((name, recompute, 2)), by_size.get((name, recompute, 4))
        if size == 1 and small and large and recompute.granularity == "none":
            real = (large.allocated - small.allocated) / 2
            abstract = (large.abstract.peak - small.abstract.peak) / 2
            yield (
                f"{name}: one sample more in a micro-batch keeps {_mib(int(real))}, abstractly {_mib(int(abstract))} "
                f"({abstract / real - 1:+.1%})."
            )


def _spread(errors: Sequence[float]) -> str:
    return f"median {statistics.median(errors):.2%}, largest {max(errors):.2%} of {len(errors)} stages"


def _mib(size: int) -> str:
    return f"{size / MIB:,.1f} MiB"


def run(device: Device, only: str) -> tuple[list[str], list[str]]:
    """Measure every case; return the report's lines, and what could not be measured."""
    reads = meter(device.kind, device.uuid)
    workload.load(device.kind)
    workload_stage.load()
    gc.freeze()
    rows, refused = [], []
    with Executor() as executor:
        for case in cases(device.kind, has_te=has_transformer_engine(device.kind)):
            if only not in case.name:
                continue
            try:
                rows.append(measured(case, device, reads, executor))
                sys.stderr.write(f"{case.name} {case.layout.words()} {case.pp_rank}: {rows[-1].error:+.2%}\n")
            except (PipetteError, RuntimeError) as error:
                refused.append(refusal(f"{case.name} {case.layout.words()}, stage {case.pp_rank}", error))
    return [*table(rows, device.kind), "", *summary(rows, device.kind)] if rows else [], refused


if __name__ == "__main__":
    title = "Peak memory of whole stages, measured and foretold"
    report("bench_memory", __doc__, title=title, reason=CPU_REASON, measure=run)
