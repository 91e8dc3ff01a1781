"""From a small run to the job's own size, exactly: layers and micro-batches beyond a few bring nothing new.

A run is cut into stretches by its schedule: each forward, each backward (of the layers, then of the embedding), each
step. Two runs that differ in layers alone have the same stretches, and in each the bytes at its peak grow by the same
amount for each layer; so every stretch is carried on by itself, and the largest is the peak at full size, whichever it
was at a small one. Weights, gradients and optimizer, whose padding is not linear, come from a run of full size that
skips forward and backward. Micro-batches: past its warm-up a schedule repeats itself, and only the reports of the
losses add up.
"""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Callable
from dataclasses import replace

from pipette_launch.facts import Job, Layout
from pipette_launch.facts.messages import ExecutedMemory, ExecutedParts
from pipette_patches import megatron_config
from pipette_patches.abstract import gpu_replacements, kernels, transformer_engine
from pipette_patches.abstract.gpu_replacements import CORE, TORCH
from pipette_patches.megatron_config import flags
from pipette_patches.one_rank import Size, Trace, Trainer, enough_microbatches, full_size, one_rank
from pipette_patches.replacements import Replacements
from pipette_patches.storage_meter import Stretch, metered

Run = Callable[[Size, bool], Trace]
"""Runs a size, with or without forward and backward."""
STATIC = ("weights", "gradients", "optimizer")
FEW_PASSES = 48
"""A rank with at most so many layers times micro-batches is run as it is."""


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


_PART_OF = {"backward": "working", "head": "logits"}
"""Labels of the meter that ExecutedParts names otherwise."""


@functools.cache
def load() -> None:
    """Make this process one that executes abstractly, and import megatron-core; there is no way back."""
    transformer_engine.install()
    Replacements((*TORCH, *CORE, *gpu_replacements.EXPERTS, *gpu_replacements.OFFLOADING)).apply()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import megatron.core.distributed
        import megatron.core.models.gpt.gpt_layer_specs
        import megatron.core.models.gpt.gpt_model
        import megatron.core.optimizer
        import megatron.core.pipeline_parallel.schedules  # noqa: F401
    # What is loaded stays: looking for cycles in it after each rank takes longer than the rank.
    gc.freeze()


def run_rank(job: Job, layout: Layout, pp_rank: int, *, whole: bool = False) -> ExecutedMemory:
    """Train one rank for two steps.

    Args:
        job: the job.
        layout: how it is cut.
        pp_rank: the pipeline rank; the first of its ranks is executed.
        whole: run every layer and micro-batch, even where fewer tell the same.

    """

    def run(size: Size, forward_and_backward: bool) -> Trace:
        transformer_engine.forget_gradients()
        backend = job.model.attention_backend
        transformer_engine.choose("fused" if backend in ("auto", "local") else backend)
        # A job with Megatron's own layers is taken to have no Transformer Engine, and so no fused optimizer.
        kernels.choose_optimizers(fused=job.model.transformer_impl == "transformer_engine")
        kernels.choose(job)
        gpu_replacements.forget()
        with metered() as meter:
            trainer = Trainer(job, layout, pp_rank, meter=meter, size=size)
            trace = trainer.train(forward_and_backward=forward_and_backward)
            del trainer
        return trace

    with one_rank(layout, pp_rank, num_optimizer_instances=megatron_config.optimizer_instances(job)):
        trace = run(full_size(job, layout), True) if whole else scaled(job, layout, pp_rank, run)
    gc.collect()
    first_iteration = ("setup", "first", "first step")
    peak = max(trace.stretches, key=lambda stretch: stretch.total)
    return ExecutedMemory(
        pp_rank=pp_rank,
        weights=trace.left.get("weights", 0),
        gradients=trace.left.get("gradients", 0),
        optimizer=trace.left.get("optimizer", 0),
        allocated_after_step=sum(trace.left.values()),
        first_peak=max(stretch.total for stretch in trace.stretches if stretch.phase in first_iteration),
        peak=peak.total,
        parts=ExecutedParts(**{_PART_OF.get(label, label): size for label, size in peak.at_peak.items()}),
        notes=megatron_config.differences(job),
    )
