"""From a small run to the job's own size, exactly: layers and micro-batches beyond a few bring nothing new.

A run is cut into stretches by its schedule: each forward, each backward (of the layers, then of the embedding), each
step. Two runs that differ in layers alone have the same stretches, and in each the bytes at its peak grow by the same
amount for each layer; so every stretch is carried on by itself, and the largest is the peak at full size, whichever it
was at a small one. Weights, gradients and optimizer, whose padding is not linear, come from a run of full size that
skips forward and backward. Micro-batches: past its warm-up a schedule repeats itself, and only the reports of the
losses add up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pipette_launch.facts import Job, Layout
from pipette_launch.facts.known_schedules import num_warmup
from pipette_patches.abstract.allocator import Stretch
from pipette_patches.abstract.trainer import Size, Trace
from pipette_patches.workload.config import flags

Run = Callable[[Size, bool], Trace]
"""Runs a size, with or without forward and backward."""
STATIC = ("weights", "gradients", "optimizer")
FEW_PASSES = 48
"""A rank with at most so many layers times micro-batches is run as it is."""


def full_size(job: Job, layout: Layout) -> Size:
    """The job as it is."""
    return Size(
        chunks=layout.chunk_layers(job.model.num_layers),
        num_microbatches=layout.num_microbatches(job.batch.global_batch_size),
    )


def scaled(job: Job, layout: Layout, pp_rank: int, run: Run) -> Trace:
    """Trace a rank at full size, from as small runs as are exact."""
    full = full_size(job, layout)
    # Deferred weight gradients of the output layer keep something of every micro-batch.
    repeats = "--defer-embedding-wgrad-compute" not in flags(job)
    enough = enough_microbatches(layout, pp_rank, full.num_microbatches) if repeats else full.num_microbatches
    size = replace(full, num_microbatches=enough)
    own = size.chunks[pp_rank :: layout.pp]
    period, wanted = layer_period(job, layout), max(own)
    small = smallest(layout, period, wanted)
    few = sum(own) * size.num_microbatches <= FEW_PASSES
    if not period or len(set(own)) > 1 or few or wanted <= 2 * small + period:
        return _with_reports(run(size, True), full.num_microbatches - size.num_microbatches)
    first, second = (
        run(replace(size, chunks=(layers,) * len(size.chunks)), True) for layers in (small, small + period)
    )
    carried = _carried_on(first, second, (wanted - small) // period, bare=run(size, False))
    return _with_reports(carried, full.num_microbatches - size.num_microbatches)


def enough_microbatches(layout: Layout, pp_rank: int, num_microbatches: int) -> int:
    """Micro-batches after which nothing new happens on a rank.

    1F1B: its warm-up, and one forward and backward in turn, twice. Interleaved: the warm-up and two rounds of a group
    through all chunks, in whole groups.
    """
    if layout.vpp == 1:
        return min(num_microbatches, layout.pp - pp_rank - 1 + 2)
    group = layout.microbatch_group_size or layout.pp
    ahead = num_warmup(layout.pp, layout.vpp, group, pp_rank)
    groups = -(-ahead // (group * layout.vpp)) + 2
    # A last group that is not full changes the order of its passes: then all are run.
    return min(num_microbatches, groups * group) if num_microbatches % group == 0 else num_microbatches


def layer_period(job: Job, layout: Layout) -> int:
    """Layers after which the layers of a chunk repeat; 0 where they do not."""
    recompute = layout.recompute
    if recompute.granularity == "full":
        return recompute.num_layers if recompute.method == "uniform" else 1
    if len(set(job.model.moe_layer_freq)) > 1 or "--window-attn-skip-freq" in flags(job):
        return 0
    return 1


def smallest(layout: Layout, period: int, wanted: int) -> int:
    """Layers of a chunk from which every period more is like the last, and so many that whole periods are missing.

    Two at least: what is made once in the first backward (shared buffers) is there from the second layer on.
    """
    recompute = layout.recompute
    if recompute.granularity == "full" and recompute.method == "block":
        # The first layers of a chunk are recomputed, the rest is not.
        return recompute.num_layers + 2
    return 2 * period + wanted % period if period else wanted


def _carried_on(first: Trace, second: Trace, steps: int, *, bare: Trace) -> Trace:
    """Go on from two sizes to the one that is as many steps beyond the first; static bytes are the bare run's own."""
    if [one.phase for one in first.stretches] != [one.phase for one in second.stretches]:
        raise RuntimeError("runs of different sizes went different ways")

    def carried(a: dict[str, int], b: dict[str, int], static: dict[str, int], names: tuple[str, ...]) -> dict[str, int]:
        grown = {name: a.get(name, 0) + steps * (b.get(name, 0) - a.get(name, 0)) for name in {*a, *b} - set(names)}
        return grown | {name: static.get(name, 0) for name in names}

    statics = {stretch.phase: stretch.at_peak for stretch in bare.stretches}
    of_step = (*STATIC, "optimizer_step")
    setup = [stretch for stretch in bare.stretches if stretch.phase == "setup"]
    stretches = [
        Stretch(a.phase, carried(a.at_peak, b.at_peak, statics[a.phase], of_step if "step" in a.phase else STATIC))
        for a, b in zip(first.stretches, second.stretches, strict=True)
        if a.phase != "setup"
    ]
    left = carried(first.left, second.left, bare.left, of_step)
    return replace(second, stretches=(*setup, *stretches), left=left)


def _with_reports(trace: Trace, missing: int) -> Trace:
    """Add the reports of micro-batches that were not run; each stretch has them, as the last ones do."""
    if not missing or not trace.report_bytes:
        return trace
    more = missing * trace.report_bytes
    return replace(
        trace,
        stretches=tuple(
            Stretch(phase=one.phase, at_peak={**one.at_peak, "head": one.at_peak.get("head", 0) + more})
            if one.phase not in ("setup", "end")
            else one
            for one in trace.stretches
        ),
    )
