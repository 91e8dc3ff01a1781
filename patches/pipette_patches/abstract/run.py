"""Execute a rank of a training job with abstract tensors: `load` once, then `run_rank` as often as wanted."""

from __future__ import annotations

import functools
import gc
import warnings

from pipette_launch.facts import Job, Layout
from pipette_launch.facts.messages import ExecutedMemory, ExecutedParts
from pipette_patches.abstract import megatron_config, moe, offloading
from pipette_patches.abstract.allocator import metered
from pipette_patches.abstract.gpu_replacements import CORE, TORCH
from pipette_patches.abstract.scale_up import full_size, scaled
from pipette_patches.abstract.trainer import Size, Trace, Trainer
from pipette_patches.abstract.transformer_engine import attention, fused_kernels, linear, stand_in
from pipette_patches.replacements import Replacements
from pipette_patches.workload.process_groups import one_rank

_PART_OF = {"backward": "working", "head": "logits"}
"""Labels of the meter that ExecutedParts names otherwise."""


@functools.cache
def load() -> None:
    """Make this process one that executes abstractly, and import megatron-core; there is no way back."""
    stand_in.install()
    Replacements((*TORCH, *CORE, *moe.MOE, *offloading.OFFLOADING)).apply()
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
        linear.forget_gradients()
        backend = job.model.attention_backend
        attention.choose("fused" if backend in ("auto", "local") else backend)
        # A job with Megatron's own layers is taken to have no Transformer Engine, and so no fused optimizer.
        fused_kernels.choose_optimizers(fused=job.model.transformer_impl == "transformer_engine")
        moe.choose(job)
        offloading.forget()
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
        notes=megatron_config.notes(job),
    )
