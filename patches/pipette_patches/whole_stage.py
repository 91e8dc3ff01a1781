"""One whole stage of a training job on a real device: the memory that one rank really uses.

`one_rank` sets up the model, gradient buffers and optimizer with real tensors and a fake process group of the full
world size. Warm-up, steady state and cooldown run with as many micro-batches in flight as in the job, and then the
optimizer steps. No message is sent. Random noise of the same shape replaces each received tensor.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from pipette_launch.facts import Job, Layout
from pipette_patches import megatron_config
from pipette_patches.one_rank import Trainer, enough_microbatches, full_size, inner_optimizers, one_rank
from pipette_patches.replacements import Replacement, Replacements, instead, nothing, wrapping
from pipette_patches.storage_meter import StorageMeter, metered, recounting, under
from pipette_patches.without_cuda import no_coalescing
from pipette_patches.workload import forget_dummy_gradients, refusals_named


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRun:
    """The memory that one stage used during its run."""

    tally_bytes: int
    """Peak bytes of all tensors, each rounded up as CUDA's allocator does, without temporaries inside an operation.

    0 on CUDA, because torch's own allocator counts the bytes there.
    """
    parts: dict[str, int]
    """`tally_bytes` by label, with the labels of abstract execution."""
    notes: tuple[str, ...]
    """One sentence for each difference from the real job."""


def run_stage(job: Job, layout: Layout, pp_rank: int, *, device_kind: str) -> StageRun:
    """Train the first rank of a stage for one or two steps, and free everything.

    `workload.load` must have run, and no process group may exist. On CUDA two iterations run, because the optimizer's
    states exist from the second iteration on. On a CPU an optimizer step without gradients makes the states, and then
    one iteration runs. With Megatron-FSDP two iterations run, because parameters have no gradients before a backward.

    Raises:
        WorkloadError: megatron-core refuses the stage. Out-of-memory errors are raised as torch raises them.

    """
    real, changes, notes = _as_run_here(job, device_kind)
    try:
        with (
            refusals_named(stage_words(layout, pp_rank)),
            Replacements(_WITHOUT_PEERS),
            one_rank(layout, pp_rank, num_optimizer_instances=megatron_config.optimizer_instances(real)),
            # On a GPU torch's allocator counts, including the memory that kernels allocate for themselves.
            metered("cpu") if device_kind == "cpu" else contextlib.nullcontext(StorageMeter()) as meter,
        ):
            size = full_size(real, layout)
            size = replace(size, num_microbatches=enough_microbatches(layout, pp_rank, size.num_microbatches))
            trainer = Trainer(real, layout, pp_rank, meter=meter, size=size, changes=changes)
            for optimizer in inner_optimizers(trainer.optimizer):
                _never_skips(optimizer)
            is_sharded = megatron_config.is_sharded(real)
            trainer.step("first", forward_and_backward=device_kind == "cuda" or is_sharded)
            trainer.step("second")
            meter.mark()
            del trainer
            peak = max(meter.stretches, key=lambda stretch: stretch.total)
    finally:
        forget_dummy_gradients()
        gc.collect()
    parts = {name: size for name, size in peak.at_peak.items() if size}
    return StageRun(tally_bytes=peak.total, parts=parts, notes=notes)


def _as_run_here(job: Job, device_kind: str) -> tuple[Job, dict[str, Any], tuple[str, ...]]:
    """Return a job that this device can run, changed fields of TransformerConfig, and notes on each difference."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.enums import AttnBackend

    # Initialise the weights, because the router chooses experts by the values of the weights.
    changes: dict[str, Any] = {"perform_initialization": True}
    if device_kind == "cuda":
        # megatron-core keeps the backend in the environment and allows no second choice in this process.
        changes["attention_backend"] = AttnBackend[job.model.attention_backend]
    without = megatron_config.left_out(job)
    notes = [f"stages were measured without {without}"] if without else []
    if job.model.transformer_impl == "transformer_engine":
        if device_kind == "cuda" and getattr(gpt_layer_specs, "HAVE_TE", False):
            return job, changes, tuple(notes)
        notes.append("stages were measured with megatron-core's local layers: transformer-engine is not there")
    local = replace(job.model, transformer_impl="local", attention_backend="local")
    return replace(job, model=local), changes, tuple(notes)


def stage_words(layout: Layout, pp_rank: int) -> str:
    """Return the name of a stage for messages."""
    return f"stage {pp_rank} of {layout.words()}"


def _never_skips(optimizer: Any) -> None:
    """Let an fp16 optimizer step even if gradients are not finite, because a skipped step makes no states."""
    name = "_unscale_main_grads_and_check_for_nan"
    unscale: Callable[[], bool] | None = getattr(optimizer, name, None)
    if unscale is not None:
        setattr(optimizer, name, lambda: bool(unscale()) and False)


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
