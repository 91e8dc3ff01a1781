"""Execute a rank of a training job with abstract tensors: `load` once, then `run_rank` for each rank.

The memory of a large job follows exactly from runs with fewer layers and micro-batches. A run is divided into
stretches: each forward, each backward (of the layers, then of the embedding) and each step. Two runs that differ only
in their number of layers have the same stretches, and the peak of each stretch grows by the same bytes for each layer.
So each stretch is extrapolated alone, and the largest extrapolated stretch is the peak of the job. The padding of
weights, gradients and optimizer is not linear in the layers, so their bytes come from a full-size run without forward
and backward. After its warm-up a pipeline schedule repeats itself, so a further micro-batch adds only its loss.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from oracle import kernels, transformer_engine
from oracle.gpu_replacements import CORE, EXPERTS, OFFLOADING, TORCH
from oracle.memory import Parts, RankMemory
from oracle.meter import AbstractMeter
from oracle.one_rank import train_from_flags

from pipette_launch.facts import Job, Layout
from pipette_patches.play import Play, Step, Stop, played
from pipette_patches.replacements import Replacements
from pipette_patches.storage_meter import Stretch, metered
from pipette_patches.whole_stage import enough_microbatches, first_rank
from pipette_patches.workload import import_megatron


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Live bytes during a run, divided into stretches: each forward, each backward and each step."""

    stretches: tuple[Stretch, ...]
    left: dict[str, int]
    """Live bytes by label at the end of the run."""
    report_bytes: int
    """Bytes that the loss of each micro-batch keeps until its step ends."""


Run = Callable[[tuple[int, ...], int], Trace]
"""Runs a job with some layers in each chunk, and some micro-batches or none, and returns the trace of the run."""
_STEPS = 2
_STATIC = ("weights", "gradients", "optimizer")
_FEW_PASSES = 48
"""If layers times micro-batches of a rank are at most 48, the rank runs at full size."""
_PART_OF = {"backward": "working", "head": "logits"}
"""Field of Parts for each label of the meter, if the field and the label have different names."""


@functools.cache
def load() -> None:
    """Import megatron-core with stand-ins for CUDA and Transformer Engine. The process then runs only abstract jobs."""
    transformer_engine.install()
    Replacements((*TORCH, *CORE, *EXPERTS, *OFFLOADING)).apply()
    import_megatron()
    # Exclude imported objects from garbage collection, because collecting them takes longer than a rank's run.
    gc.freeze()


def run_rank(job: Job, layout: Layout, pp_rank: int) -> RankMemory:
    """Train the first rank of a pipeline stage of any layout for two steps, and return the bytes that it needs."""

    def run(layers_per_chunk: tuple[int, ...], num_microbatches: int) -> Trace:
        report_bytes = 0

        def on_step(play: Play, step: Step) -> Any:
            nonlocal report_bytes
            if play.num_steps > _STEPS:
                raise Stop
            reports = step.run(num_microbatches=num_microbatches) if num_microbatches else None
            if reports:
                report_bytes = meter.by_label.get("head", 0) // num_microbatches
            return reports

        with metered(AbstractMeter()) as meter:
            train = functools.partial(train_from_flags, job, layout, pp_rank, meter=meter)
            program = functools.partial(train, layers_per_chunk=layers_per_chunk)
            rank = first_rank(layout, pp_rank)
            with played(program, rank=rank, world_size=layout.world_size, on_step=on_step):
                # The stretch that `Stop` ended began with the bytes that two whole steps have left.
                return Trace(stretches=tuple(meter.stretches), left=meter.at_peak, report_bytes=report_bytes)

    backend = job.model.attention_backend
    transformer_engine.choose_attention("fused" if backend in ("auto", "local") else backend)
    # Jobs with Megatron's own layers are assumed to have no Transformer Engine, and so no fused optimizer.
    kernels.choose_optimizers(fused=job.model.transformer_impl == "transformer_engine")
    kernels.choose_routing(job)
    trace = scaled(job, layout, pp_rank, run)
    first_iteration = ("setup", "step 1", "update 1")
    peak = max(trace.stretches, key=lambda stretch: stretch.total)
    return RankMemory(
        pp_rank=pp_rank,
        weights=trace.left.get("weights", 0),
        gradients=trace.left.get("gradients", 0),
        optimizer=trace.left.get("optimizer", 0),
        allocated_after_step=sum(trace.left.values()),
        first_peak=max(stretch.total for stretch in trace.stretches if stretch.phase in first_iteration),
        peak=peak.total,
        parts=Parts(**{_PART_OF.get(label, label): size for label, size in peak.at_peak.items()}),
    )


def scaled(job: Job, layout: Layout, pp_rank: int, run: Run) -> Trace:
    """Return the trace of a rank at full size, computed from the smallest runs that give exact results."""
    chunks, every = layout.chunk_layers(job.model.num_layers), layout.num_microbatches(job.batch.global_batch_size)
    # With deferred weight gradients the output layer keeps tensors of every micro-batch, so no schedule repeats.
    repeats = not job.options.defer_embedding_wgrad_compute
    enough = enough_microbatches(layout, pp_rank, every) if repeats else every
    own = chunks[pp_rank :: layout.pp]
    period, wanted = layer_period(job, layout), max(own)
    small = smallest(layout, period, wanted)
    few = sum(own) * enough <= _FEW_PASSES
    if not period or len(set(own)) > 1 or few or wanted <= 2 * small + period:
        trace = run(chunks, enough)
    else:
        first, second = (run((layers,) * len(chunks), enough) for layers in (small, small + period))
        trace = _extrapolated(first, second, (wanted - small) // period, bare=run(chunks, 0))
    return _with_reports(trace, every - enough)


def layer_period(job: Job, layout: Layout) -> int:
    """Return the number of layers after which the kinds of layers in a chunk repeat; 0 = the kinds do not repeat."""
    recompute = layout.recompute
    if recompute.granularity == "full":
        return recompute.num_layers if recompute.method == "uniform" else 1
    if len(set(job.model.moe_layer_freq)) > 1:
        return 0
    return 1


def smallest(layout: Layout, period: int, wanted: int) -> int:
    """Return the number of layers in a chunk from which each further period adds the same bytes.

    The result differs from `wanted` by a whole number of periods. The result is at least two layers, because the first
    backward makes buffers that all later layers share.
    """
    recompute = layout.recompute
    if recompute.granularity == "full" and recompute.method == "block":
        # Megatron recomputes only the first `num_layers` layers of a chunk.
        return recompute.num_layers + 2
    return 2 * period + wanted % period if period else wanted


def _extrapolated(first: Trace, second: Trace, steps: int, *, bare: Trace) -> Trace:
    """Add `steps` times the difference of two runs to the first run. A `bare` run without passes has static bytes."""
    if [one.phase for one in first.stretches] != [one.phase for one in second.stretches]:
        raise RuntimeError("runs of different sizes have different stretches")

    def grown(a: dict[str, int], b: dict[str, int], static: dict[str, int], names: tuple[str, ...]) -> dict[str, int]:
        by_label = {name: a.get(name, 0) + steps * (b.get(name, 0) - a.get(name, 0)) for name in {*a, *b} - set(names)}
        return by_label | {name: static.get(name, 0) for name in names}

    statics = {stretch.phase: stretch.at_peak for stretch in bare.stretches}
    of_step = (*_STATIC, "optimizer_step")
    setup = [stretch for stretch in bare.stretches if stretch.phase == "setup"]
    stretches = [
        Stretch(a.phase, grown(a.at_peak, b.at_peak, statics[a.phase], of_step if "update" in a.phase else _STATIC))
        for a, b in zip(first.stretches, second.stretches, strict=True)
        if a.phase != "setup"
    ]
    left = grown(first.left, second.left, bare.left, of_step)
    return replace(second, stretches=(*setup, *stretches), left=left)


def _with_reports(trace: Trace, missing: int) -> Trace:
    """Add the bytes of losses of micro-batches that were not run, to each stretch of a step."""
    if not missing or not trace.report_bytes:
        return trace
    more = missing * trace.report_bytes
    return replace(
        trace,
        stretches=tuple(
            Stretch(phase=one.phase, at_peak={**one.at_peak, "head": one.at_peak.get("head", 0) + more})
            if one.phase != "setup"
            else one
            for one in trace.stretches
        ),
    )
