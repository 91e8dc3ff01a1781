"""How long one layer takes, against the bound that its matrix products set.

`python -m benchmarks.bench_layers [--device auto|cuda|cpu] [--only NAME] [--out FILE]` times the layers of the models
of `benchmarks.dense` at three micro-batches, and what recomputing one takes; prints Markdown. Two bounds: the data
sheet's peak, where the device is known, and the best rate that one square product of the same type reaches here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.dense import MICRO_BATCHES, SHAPES, dense_job, has_transformer_engine, refusal, report
from pipette_launch.errors import PipetteError
from pipette_launch.facts import ComputeCase, ComputeTime, Device, Job, Layout
from pipette_launch.facts.device import known_devices
from pipette_launch.probe.timing import HABITS, Stopwatch, stopwatch_for, time_calls, time_part
from pipette_launch.units import seconds_text
from pipette_patches import workload

CPU_REASON = "no GPU was lent. Layers run unfused and in one thread; the figures show that the path works, no more."
SQUARE = {"cuda": 8192, "cpu": 512}
BACKWARD = 2
"""A backward has two products for each of the forward's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One model at one micro-batch."""

    name: str
    micro_batch_size: int
    flops: float
    """Of the forward."""
    time: ComputeTime

    @property
    def forward_s(self) -> float:
        """Median."""
        return self.time.forward.median_s

    @property
    def backward_s(self) -> float:
        """Median, weight gradients included."""
        return self.time.input_grad.median_s + self.time.weight_grad.median_s

    @property
    def flops_per_s(self) -> float:
        """Of forward and backward together."""
        return (1 + BACKWARD) * self.flops / (self.forward_s + self.backward_s)


def measured(job: Job, name: str, size: int, device: Device, watch: Stopwatch) -> Row:
    """Time one layer."""
    case = ComputeCase(tp=1, cp=1, micro_batch_size=size)
    with workload.workload(job, case, device_kind=device.kind) as work:
        layer = next(part for part in work.parts if part.chains)
        time = time_part(layer, case, slot=0, stopwatch=watch, habits=HABITS[device.kind])
    flops = job.model.forward_flops_per_token() * job.model.seq_length * size
    return Row(name=name, micro_batch_size=size, flops=flops, time=time)


def product_flops_per_s(device: Device, watch: Stopwatch) -> float:
    """The rate of one large square product in bf16, the better of both orders in which the second matrix may lie."""
    size = SQUARE[device.kind]
    left, right, out = (torch.randn(size, size, dtype=torch.bfloat16, device=device.kind) for _ in range(3))

    def multiply(second: torch.Tensor) -> Callable[[], None]:
        def run() -> None:
            torch.mm(left, second, out=out)

        return run

    # As weights lie, row by row of the output, libraries may take another way.
    taken = [time_calls(multiply(one), stopwatch=watch, habits=HABITS[device.kind]) for one in (right, right.t())]
    return 2 * size**3 / min(value for samples in taken for value in samples.values_s)


def table(rows: Sequence[Row], product: float, peak: float | None) -> Iterator[str]:
    """One line a case."""
    yield "| model | micro-batch | forward | backward | spread | recompute | of a square product | of the data sheet |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|"
    for row in rows:
        again = row.time.recompute
        yield (
            f"| {row.name} | {row.micro_batch_size} | {seconds_text(row.forward_s)} | {seconds_text(row.backward_s)} "
            f"| {row.time.forward.spread:.1%} | {seconds_text(again.median_s) if again else '-'} "
            f"| {row.flops_per_s / product:.1%} | {f'{row.flops_per_s / peak:.1%}' if peak else '-'} |"
        )


def sheet_flops_per_s(device: Device) -> float | None:
    """The data sheet's peak in bf16; None where the device is not known."""
    words = device.name.replace("-", " ").split()
    types = {
        next(word for word in name.split("-") if word.strip("ABCDEFGHIJKLMNOPQRSTUVWXYZ")): spec
        for name, spec in reversed(known_devices().items())
    }
    found = [spec for kind, spec in types.items() if kind in words]
    return found[0].flops_per_s.get("bf16") if found else None


def run(device: Device, only: str) -> tuple[list[str], list[str]]:
    """Time every case; return the report's lines, and what could not be timed."""
    workload.load(device.kind)
    has_te = has_transformer_engine(device.kind)
    watch = stopwatch_for(device.kind)
    product = product_flops_per_s(device, watch)
    rows, refused = [], []
    for name in (name for name in SHAPES[device.kind] if only in name):
        for size in MICRO_BATCHES:
            job = dense_job(device.kind, name, Layout(micro_batch_size=size), has_te=has_te)
            try:
                rows.append(measured(job, name, size, device, watch))
            except (PipetteError, RuntimeError) as error:
                refused.append(refusal(f"{name}, micro-batch {size}", error))
    return list(lines(rows, product, device)) if rows else [], refused


def lines(rows: Sequence[Row], product: float, device: Device) -> Iterator[str]:
    """The table, and what its bounds are."""
    peak = sheet_flops_per_s(device)
    yield from table(rows, product, peak)
    yield ""
    said = f"A square product of {SQUARE[device.kind]} in bf16 runs at {product / 1e12:,.3f} TFLOP/s here"
    yield said + (f", the data sheet says {peak / 1e12:,.0f}." if peak else "; no data sheet is known.")


if __name__ == "__main__":
    title = "Times of one layer against the bound of its products"
    report("bench_layers", __doc__, title=title, reason=CPU_REASON, measure=run)
