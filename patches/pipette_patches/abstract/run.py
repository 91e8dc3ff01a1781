"""Execute a rank of a training job with abstract tensors: `load` once, then `run_rank` as often as wanted."""

from __future__ import annotations

import gc
import warnings
from typing import Any

from pipette_launch.facts import Job, Layout
from pipette_patches.abstract import moe
from pipette_patches.abstract.allocator import metered
from pipette_patches.abstract.core_replacements import CORE
from pipette_patches.abstract.process_groups import one_rank
from pipette_patches.abstract.scale_up import full_size, scaled
from pipette_patches.abstract.torch_replacements import TORCH
from pipette_patches.abstract.trainer import Size, Trace, Trainer
from pipette_patches.abstract.transformer_engine import attention, fused_adam, linear, stand_in
from pipette_patches.replacements import Replacements

_loaded: list[Replacements] = []
FIRST = ("setup", "first", "first step")
"""Phases up to the end of the first iteration's backward."""


def load() -> None:
    """Make this process one that executes abstractly, and import megatron-core; there is no way back."""
    if _loaded:
        return
    stand_in.install()
    replacements = Replacements((*TORCH, *CORE, *moe.MOE))
    replacements.apply()
    _loaded.append(replacements)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import megatron.core.distributed
        import megatron.core.models.gpt.gpt_layer_specs
        import megatron.core.models.gpt.gpt_model
        import megatron.core.optimizer
        import megatron.core.pipeline_parallel.schedules  # noqa: F401
    # What is loaded stays: looking for cycles in it after each rank takes longer than the rank.
    gc.freeze()


def run_rank(job: Job, layout: Layout, pp_rank: int, *, whole: bool = False) -> dict[str, Any]:
    """Train one rank for two steps.

    Args:
        job: the job.
        layout: how it is cut.
        pp_rank: the pipeline rank; the first of its ranks is executed.
        whole: run every layer and micro-batch, even where fewer tell the same.

    Returns:
        bytes: `weights`, `gradients`, `optimizer`, `allocated_after_step`, `first_peak` (of the first iteration,
        its optimizer step too), `peak`, and `parts`: the peak by label.

    """

    def run(size: Size, forward_and_backward: bool) -> Trace:
        linear.forget_gradients()
        attention.choose(_backend(job))
        # Whoever runs Megatron's own layers has no Transformer Engine, and so no fused optimizer (memory.md 4).
        fused_adam.choose(fused=job.model.transformer_impl == "transformer_engine")
        moe.choose(job)
        with metered() as meter:
            trainer = Trainer(job, layout, pp_rank, meter=meter, size=size)
            trace = trainer.train(forward_and_backward=forward_and_backward)
            del trainer
        return trace

    with one_rank(job, layout, pp_rank):
        trace = run(full_size(job, layout), True) if whole else scaled(job, layout, pp_rank, run)
    gc.collect()
    return _result(trace)


def _result(trace: Trace) -> dict[str, Any]:
    peak = max(trace.stretches, key=lambda stretch: stretch.total).at_peak
    return {
        **{name: trace.left.get(name, 0) for name in ("weights", "gradients", "optimizer")},
        "allocated_after_step": sum(trace.left.values()),
        "first_peak": max(stretch.total for stretch in trace.stretches if stretch.phase in FIRST),
        "peak": sum(peak.values()),
        "parts": peak,
    }


def _backend(job: Job) -> str:
    backend = job.model.attention_backend
    return "fused" if backend in ("auto", "local") else backend
