"""One whole stage of a training job on a real device: the memory that one rank really uses.

`play` runs the job's own script, or a program that builds the model from flags, as one rank of the full world size with
real tensors. Warm-up, steady state and cooldown run with as many micro-batches in flight as in the job. The optimizer
step follows. No message is sent to other ranks. Random noise of the same shape replaces each received tensor.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pipette_launch.facts import Job, Layout
from pipette_patches import megatron_config
from pipette_patches.one_rank import enough_microbatches, first_rank, inner_optimizers
from pipette_patches.play import Play, Step, Stop, played
from pipette_patches.replacements import Replacement, Replacements, instead, nothing, wrapping
from pipette_patches.storage_meter import StorageMeter, metered, recounting, under
from pipette_patches.without_cuda import no_coalescing
from pipette_patches.workload import (
    MakeProgram,
    as_run_here,
    forget_dummy_gradients,
    from_flags,
    refusals_named,
)

_STEPS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRun:
    """The memory that one stage used during its run."""

    tally_bytes: int
    """Peak bytes of all tensors, each rounded up as CUDA's allocator does, without temporaries inside an operation.

    On CUDA this field is 0, because torch's own allocator counts the bytes.
    """
    parts: dict[str, int]
    """`tally_bytes` by label, with the labels of abstract execution."""
    notes: tuple[str, ...]
    """One sentence for each difference from the real job."""


def run_stage(
    job: Job, layout: Layout, pp_rank: int, *, device_kind: str, program: MakeProgram | None = None
) -> StageRun:
    """Train the first rank of a stage for two steps, and free everything.

    `workload.load` must have run, and no process group may exist. Two training steps run, because the optimizer's
    states exist from the end of the first step on. On a CPU the first step of a model from flags runs only the
    optimizer. With Megatron-FSDP the first step runs forward and backward too, because parameters have no gradients
    before a backward.

    `program` is the job's own script; None builds the model from the job's flags. A WorkloadError says that Megatron or
    the script refuses the stage. Out-of-memory errors of torch are raised unchanged.
    """
    meter = StorageMeter()
    num_microbatches = enough_microbatches(layout, pp_rank, layout.num_microbatches(job.batch.global_batch_size))
    real, changes, notes = (job, {}, ()) if program else as_run_here(job, device_kind)
    skips_first = program is None and device_kind == "cpu" and not megatron_config.is_sharded(real)

    def start() -> None:
        nonlocal meter
        # On a GPU torch's allocator counts, including the memory that kernels allocate for themselves.
        with metered("cpu") if device_kind == "cpu" else contextlib.nullcontext(StorageMeter()) as meter:
            if program is not None:
                program(job, layout)()
                return
            from_flags(
                real,
                layout,
                pp_rank,
                changes=changes,
                meter=meter,
                num_microbatches=num_microbatches,
                num_optimizer_instances=megatron_config.optimizer_instances(real),
            )

    def on_step(play: Play, step: Step) -> Any:
        for _, optimizer in play.optimizers:
            _never_skips(optimizer)
        if play.num_steps > _STEPS:
            meter.mark()
            raise Stop
        if play.num_steps == 1:
            # The first step makes the optimizer's states. Interleaved stages take micro-batches in groups.
            few = 1 if layout.vpp == 1 else layout.microbatch_group_size or layout.pp
            return None if skips_first else step.run(num_microbatches=min(few, num_microbatches))
        return step.run(num_microbatches=num_microbatches)

    rank = first_rank(layout, pp_rank)
    try:
        with (
            refusals_named(stage_words(layout, pp_rank), program),
            Replacements(_WITHOUT_PEERS),
            played(start, rank=rank, world_size=layout.world_size, on_step=on_step),
        ):
            peak = max(meter.stretches, key=lambda stretch: stretch.total)
    finally:
        forget_dummy_gradients()
        gc.collect()
    parts = {name: size for name, size in peak.at_peak.items() if size}
    return StageRun(tally_bytes=peak.total, parts=parts, notes=notes)


def stage_words(layout: Layout, pp_rank: int) -> str:
    """Return the name of a stage for messages."""
    return f"stage {pp_rank} of {layout.words()}"


def _never_skips(optimizer: Any) -> None:
    """Let an fp16 optimizer step even if gradients are not finite, because a skipped step makes no states."""
    name = "_unscale_main_grads_and_check_for_nan"
    for inner in inner_optimizers(optimizer):
        unscale: Callable[[], bool] | None = getattr(inner, name, None)
        if unscale is not None:
            setattr(inner, name, lambda unscale=unscale: bool(unscale()) and False)


@wrapping
def _noise(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Fill received tensors with noise, because with zeros all tokens would choose the same experts."""
    received = original(*args, **kwargs)
    with torch.no_grad():
        for tensor in received[:2]:
            if isinstance(tensor, torch.Tensor):
                tensor.normal_()
    return received


_BUFFER = "megatron.core.distributed.param_and_grad_buffer"
_FSDP_BUFFER = "megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer"
_WITHOUT_PEERS = (
    Replacement(
        module="megatron.core.pipeline_parallel.p2p_communication", path="P2PCommunicator._communicate", make=_noise
    ),
    # The fake process group has no coalesced collectives.
    Replacement(module=_BUFFER, path="_coalescing_manager", make=instead(no_coalescing)),
    Replacement(module=_FSDP_BUFFER, path="_coalescing_manager", make=instead(no_coalescing)),
    # Megatron-FSDP would compare this rank's shard with the shards of ranks that do not exist.
    Replacement(module=_FSDP_BUFFER, path="validate_uneven_dtensor", make=nothing),
    # Gathered weights and unreduced gradients count as "whole". Megatron-FSDP frees them by resizing their storages.
    Replacement(module=_FSDP_BUFFER, path="DataParallelBuffer.fetch_bucket", make=functools.partial(under, "whole")),
    Replacement(module="torch", path="UntypedStorage.resize_", make=recounting),
)
