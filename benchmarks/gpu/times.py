"""Compare times of layers over a grid of shapes, measured as in a warm-up, with the device model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks.gpu import figures
from benchmarks.gpu.jobs import DeviceKind
from benchmarks.gpu.memory import spread
from benchmarks.gpu.notebook import Notebook, Record, of_kind
from benchmarks.gpu.shapes import (
    Shape,
    has_transformer_engine,
    job_of,
    layer_of,
    without_engine,
)
from pipette_launch.cost.compute.device_model import modelled_compute, optimizer_s_per_parameter
from pipette_launch.facts import ComputeCase, ComputeTime, Job, Layout
from pipette_launch.facts.accelerators import DeviceSpec
from pipette_launch.facts.known_devices import device_named, device_of_driver
from pipette_launch.probe.compute.timing import HABITS, Habits, time_calls, time_part
from pipette_launch.probe.instruments import Stopwatch, stopwatch_for
from pipette_launch.text import seconds_text
from pipette_patches import workload
from pipette_patches.workload import optimizer_step

CASE_S = 6.0
"""Less time is not enough for one more shape."""
HASTE = 2.0
"""Divisor of the warm-up's number of time samples, because there are more layers here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One shape of a layer."""

    shape: Shape
    tp: int
    micro_batch_size: int

    @property
    def layout(self) -> Layout:
        """The layout whose ranks compute it."""
        return Layout(
            tp=self.tp,
            micro_batch_size=self.micro_batch_size,
            sequence_parallel=self.tp > 1,
        )

    @property
    def words(self) -> str:
        """As people write it."""
        one = self.shape
        experts = f" {one.experts} experts" if one.experts else ""
        return f"h{one.hidden} s{one.seq_length}{experts} tp{self.tp} mbs{self.micro_batch_size}"


def cases(device_kind: DeviceKind) -> Iterator[Case]:
    """Every hidden size at several micro-batches, shares and lengths; the most usual ones first."""
    hiddens, length = ((4096, 2048, 8192, 1024), 2048) if device_kind == "cuda" else ((64, 32), 32)

    def shape(hidden: int, times: int = 1, **changes: Any) -> Shape:
        heads = hidden // (128 if device_kind == "cuda" else 8)
        ffn = -(-8 * hidden // 3 // 32) * 32
        base = Shape(layers=1, hidden=hidden, ffn=ffn, heads=heads, groups=heads, seq_length=length * times, vocab=1024)
        return replace(base, **changes)

    for hidden in hiddens:
        for tp, size in ((1, 1), (1, 4), (4, 1)):
            yield Case(shape=shape(hidden), tp=tp, micro_batch_size=size)
        yield Case(shape=shape(hidden, 2), tp=1, micro_batch_size=1)
    largest = shape(hiddens[0])
    for tp, size in ((1, 2), (2, 1), (8, 1), (8, 4)):
        yield Case(shape=largest, tp=tp, micro_batch_size=size)
    yield Case(shape=shape(hiddens[0], groups=largest.heads // 4), tp=1, micro_batch_size=2)
    yield Case(shape=shape(hiddens[1], experts=8), tp=1, micro_batch_size=2)
    yield Case(shape=shape(hiddens[0], 4), tp=4, micro_batch_size=1)


def measure(book: Notebook) -> None:
    """Time the device's own figures first, then as many layers as time allows."""
    workload.load(book.kind)
    watch = stopwatch_for(book.kind)
    habits = HABITS[book.kind].hastier(HASTE if book.kind == "cuda" else 8 * HASTE)
    book.attempt("matrix products", partial(figures.products, book, watch, habits))
    book.attempt("flash attention", partial(figures.flash, book, watch, habits))
    book.attempt("memory bandwidth", partial(figures.bandwidth, book, watch, habits))
    spec = _spec(book)
    has_te = has_transformer_engine(book.kind)
    with without_engine(book.kind):
        book.attempt("a layer that waits for the host", partial(figures.host_bound, book, watch, habits, has_te))
        for case in cases(book.kind):
            book.attempt(case.words, partial(_layer, book, case, spec, watch, habits, has_te), needs_s=CASE_S)


def _spec(book: Notebook) -> DeviceSpec:
    """Return the device's figures; for an unknown device, its own peak and bandwidth as just measured."""
    known = device_of_driver(book.device.name)
    if known is not None:
        return known
    book.miss("the data sheet's figures", f"{book.device.name} is not a known device; what was measured stands in")
    products, copies = of_kind(book.records, "product"), of_kind(book.records, "copy")
    stand_in = device_named("H100-SXM")
    return replace(
        stand_in,
        name=book.device.name,
        flops_per_s={"bf16": max(one["flops"] / one["seconds"] for one in products)},
        memory_bytes_per_s=max(one["bytes"] / one["seconds"] for one in copies),
    )


def _layer(book: Notebook, case: Case, spec: DeviceSpec, watch: Stopwatch, habits: Habits, has_te: bool) -> None:
    """Time one layer as a warm-up does, then an optimizer step on its weights, and ask the device model for both."""
    job = job_of(case.shape, case.layout, has_te=has_te)
    compute = ComputeCase(tp=case.tp, cp=1, micro_batch_size=case.micro_batch_size)
    name = "moe_layer" if case.shape.experts else "layer"
    before_s = time.perf_counter()
    with workload.workload(job, compute, device_kind=book.kind) as work:
        layer = layer_of(work)
        with layer.accumulating():
            layer.backward(layer.forward(1))
        watch.settle()
        # Building it, and compiling what torch compiles at the first call.
        begun_s = time.perf_counter() - before_s
        found = time_part(layer, compute, slot=0, stopwatch=watch, habits=habits)
        step = optimizer_step(work)
        stepped, few = (
            time_calls(run, stopwatch=watch, habits=habits) for run in (step.run, step.run_on_single_elements)
        )
    said = _said(job, case, spec, name)
    book.add(
        "layer",
        words=case.words,
        begun_s=begun_s,
        flops=3 * job.model.kind_flops_per_token("layer") * case.shape.seq_length * case.micro_batch_size / case.tp,
        peak=spec.flops_per_s["bf16"],
        spread=found.forward.spread,
        recompute_s=found.recompute.median_s if found.recompute else None,
        optimizer_s_per_parameter=stepped.median_s / step.num_parameters,
        optimizer_on_single_elements=few.median_s / stepped.median_s,
        said_optimizer_s_per_parameter=optimizer_s_per_parameter(spec, job),
        **{f"{pass_}_s": getattr(found, pass_).median_s for pass_ in PASSES},
        **{f"said_{pass_}_s": getattr(said, pass_).median_s for pass_ in PASSES},
    )


PASSES = ("forward", "input_grad", "weight_grad")


def _said(job: Job, case: Case, spec: DeviceSpec, name: str) -> ComputeTime:
    return next(one for one in modelled_compute(job, spec, [case.layout]) if one.part == name)


def lines(records: Sequence[Record]) -> Iterator[str]:
    """Layers beside the model, then the model's own figures as they would have to be."""
    layers = of_kind(records, "layer")
    if layers:
        yield "| layer | forward | said | input gradient | said | weight gradient | said | recompute | of the peak |"
        yield "|---|--:|--:|--:|--:|--:|--:|--:|--:|"
    for one in layers:
        whole_s = sum(one[f"{pass_}_s"] for pass_ in PASSES)
        cells = [text for pass_ in PASSES for text in (seconds_text(one[f"{pass_}_s"]), _off(one, pass_))]
        again = seconds_text(one["recompute_s"]) if one["recompute_s"] is not None else "-"
        share = one["flops"] / whole_s / one["peak"]
        yield f"| {one['words']} | {' | '.join(cells)} | {again} | {share:.1%} |"
    if layers:
        yield ""
    for pass_ in PASSES:
        errors = [one[f"said_{pass_}_s"] / one[f"{pass_}_s"] - 1 for one in layers if one[f"{pass_}_s"] > 0]
        if errors:
            yield f"The device model's {pass_.replace('_', ' ')}: {spread(errors)}."
    if layers:
        ours = statistics.median(one["optimizer_s_per_parameter"] for one in layers)
        said = layers[0]["said_optimizer_s_per_parameter"]
        begun = [one["begun_s"] for one in layers]
        yield (
            f"Until a shape's first pass was over: {seconds_text(begun[0])} for the first, then "
            f"{seconds_text(statistics.median(begun[1:] or begun))} in the median, {seconds_text(max(begun))} at most."
        )
        yield f"An optimizer step takes {ours * 1e12:.0f} ps a parameter; the device model says {said * 1e12:.0f}."
    yield from figures.lines(records)


def _off(one: Record, pass_: str) -> str:
    real = one[f"{pass_}_s"]
    return f"{one[f'said_{pass_}_s'] / real - 1:+.0%}" if real > 0 else "-"
