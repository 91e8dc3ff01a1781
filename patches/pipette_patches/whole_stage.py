"""One whole stage of a training job on a real device, with no peer: what one rank of any world size really holds.

The model, its gradient buffers, optimizer and schedule are set up as in abstract execution, by the same code, but with
real tensors: warm-up, steady state and cooldown run with as many micro-batches in flight as the rank has in the job,
and then the optimizer steps. A fake process group of the full world size cuts weights, activations and optimizer.
Messages are not sent; each tensor that one would have brought is noise of the same shape.
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
from pipette_patches.replacements import Replacement, Replacements, instead, nothing
from pipette_patches.storage_meter import StorageMeter, metered, recounting, under
from pipette_patches.without_cuda import no_coalescing
from pipette_patches.workload import forget_dummy_gradients, refusals_named


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRun:
    """What one stage held."""

    tally_bytes: int
    """Bytes of all tensors at their peak, each rounded up as CUDA's allocator does; 0 on CUDA, where that one counts.

    Temporaries inside an operation are not among them.
    """
    parts: dict[str, int]
    """The tally, split as in abstract execution."""
    notes: tuple[str, ...]
    """In what this differs from the real job, one sentence each."""


def run_stage(job: Job, layout: Layout, pp_rank: int, *, device_kind: str) -> StageRun:
    """Train the first rank of a stage for a step or two, and take everything down.

    No process group may exist in this process, and `workload.load` came before. On CUDA two iterations run, as the
    second is the first that has the optimizer's states; on CPU the first is a bare optimizer step, which makes them,
    but not under Megatron-FSDP, where parameters have no gradients before a backward.

    Raises:
        WorkloadError: megatron-core refuses the stage; running out of memory is left as torch raises it.

    """
    real, changes, notes = as_run_here(job, device_kind)
    try:
        with (
            refusals_named(stage_words(layout, pp_rank)),
            Replacements(_WITHOUT_PEERS),
            one_rank(layout, pp_rank, num_optimizer_instances=megatron_config.optimizer_instances(real)),
            # On a GPU torch's allocator counts, and what kernels allocate for themselves too.
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


def as_run_here(job: Job, device_kind: str) -> tuple[Job, dict[str, Any], tuple[str, ...]]:
    """The job as it can run here, fields of TransformerConfig to set beside, and a sentence on each difference."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.enums import AttnBackend

    # Values count here: experts are chosen by them.
    changes: dict[str, Any] = {"perform_initialization": True}
    if device_kind == "cuda":
        # As layers were timed in this process: megatron-core keeps the choice in the environment and allows no other.
        changes["attention_backend"] = AttnBackend[job.model.attention_backend]
    without = megatron_config.left_out(job)
    notes = [f"stages were measured without {without}"] if without else []
    wants_te = job.model.transformer_impl == "transformer_engine"
    if wants_te and device_kind == "cuda" and getattr(gpt_layer_specs, "HAVE_TE", False):
        return job, changes, tuple(notes)
    if wants_te:
        notes.append("stages were measured with megatron-core's local layers: transformer-engine is not there")
    local = replace(job.model, transformer_impl="local", attention_backend="local")
    return replace(job, model=local), changes, tuple(notes)


def stage_words(layout: Layout, pp_rank: int) -> str:
    """A stage as people write it."""
    return f"stage {pp_rank} of {layout.words()}"


def _never_skips(optimizer: Any) -> None:
    """Let fp16 step on whatever the gradients are: a step that is skipped makes no states."""
    name = "_unscale_main_grads_and_check_for_nan"
    unscale: Callable[[], bool] | None = getattr(optimizer, name, None)
    if unscale is not None:
        setattr(optimizer, name, lambda: bool(unscale()) and False)


def _noise(original: Callable[..., Any]) -> Callable[..., Any]:
    """Fill received tensors with noise: zeros would make all tokens choose the same experts."""

    def communicate(*args: Any, **kwargs: Any) -> Any:
        received = original(*args, **kwargs)
        with torch.no_grad():
            for tensor in received[:2]:
                if isinstance(tensor, torch.Tensor):
                    tensor.normal_()
        return received

    return communicate


_P2P = "megatron.core.pipeline_parallel.p2p_communication"
_BUFFER = "megatron.core.distributed.param_and_grad_buffer"
_FSDP_BUFFER = "megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer"
_WITHOUT_PEERS = (
    Replacement(module=_P2P, path="P2PCommunicator._communicate", make=_noise),
    # A fake group knows no coalesced collectives.
    Replacement(module=_BUFFER, path="_coalescing_manager", make=instead(no_coalescing)),
    Replacement(module=_FSDP_BUFFER, path="_coalescing_manager", make=instead(no_coalescing)),
    # Megatron-FSDP compares its shard with those of ranks that are not there.
    Replacement(module=_FSDP_BUFFER, path="validate_uneven_dtensor", make=nothing),
    # Of weights it gathers and of gradients before their reduction; it frees them behind the backs of tensors.
    Replacement(module=_FSDP_BUFFER, path="DataParallelBuffer.fetch_bucket", make=functools.partial(under, "whole")),
    Replacement(module="torch", path="UntypedStorage.resize_", make=recounting),
)
