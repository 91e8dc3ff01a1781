"""Folded pipelines (V): each rank has two chunks, and rank 0 holds the first and the last stage of the model.

In Megatron's own placement of p ranks, chunk 1 of rank r is stage p + r. In a folded pipeline, chunk 1 of rank r is
stage 2p - 1 - r. So the patch makes Megatron treat the second chunk of rank r as a chunk of rank p - 1 - r. The last
stage is then on rank 0. Layers keep their numbers, so checkpoints are the same as in Megatron's own placement. The
results of a step travel from rank 0 to the last rank, where Megatron reads them.
"""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.serialization import default_restore_location

from pipette_patches.replacements import Replacement, in_module, instead, wrapping

SECOND = 1
"""`vp_stage` of the second chunk of a rank, in which the fold goes from the last rank back to rank 0."""
_TRAINING = "megatron.training"
_LAST_STAGE_USERS = (
    "megatron.core.pipeline_parallel.utils",
    "megatron.core.distributed.finalize_model_grads",
    "megatron.core.models.common.language_module.language_module",
)
_LAYER_OFFSET_USERS = (
    "megatron.core.transformer.transformer_layer",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.transformer.transformer_block",
)


@wrapping
def _is_pipeline_last_stage(
    original: Callable[..., bool], ignore_virtual: bool = True, vp_stage: int | None = None
) -> bool:
    """Return True for the second chunk of rank 0. Without virtual stages, return True on the last rank."""
    if ignore_virtual:
        return original(ignore_virtual, vp_stage)
    from megatron.core import parallel_state

    return vp_stage == SECOND and parallel_state.get_pipeline_model_parallel_rank() == 0


def _is_pp_last_stage(group: Any) -> bool:
    # Megatron calls this function only for the last virtual stage.
    return bool(group.rank() == 0)


@wrapping
def _layer_offset(
    original: Callable[..., int], config: Any, vp_stage: int | None = None, pp_rank: int | None = None
) -> int:
    """Return the number of layers before a chunk. The second chunk of rank r has the offset of rank p - 1 - r."""
    if vp_stage == SECOND:
        from megatron.core import parallel_state

        rank = parallel_state.get_pipeline_model_parallel_rank() if pp_rank is None else pp_rank
        pp_rank = config.pipeline_model_parallel_size - 1 - rank
    return original(config, vp_stage, pp_rank)


@wrapping
def _with_ends_on_the_first_rank(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Initialise process groups in which only rank 0 has embeddings, so that no ranks exchange embedding gradients."""
    given = inspect.signature(original).bind(*args, **kwargs)
    given.arguments["get_embedding_ranks"] = lambda pp_ranks: pp_ranks[:1]
    original(*given.args, **given.kwargs)


@wrapping
def _whole_batch(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Give rank 0 the labels too, as Megatron does for a rank with multi-token prediction."""
    from megatron.core import parallel_state

    given = inspect.signature(original).bind(*args, **kwargs)
    if parallel_state.get_pipeline_model_parallel_rank() == 0:
        given.arguments["mtp_on_this_rank"] = True
    return original(*given.args, **given.kwargs)


class _Built:
    """State that is used while a trainer builds the model."""

    weight: Any = None
    """Weights of the embedding that was built last. Megatron builds the second chunk of the same rank next."""
    now = False
    """True while a trainer builds a model."""


def _in_model_alone(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return rank 0 as the last stage while a model is built. From 0.19 on, trainers also look up the loss rank."""
    return lambda group: _is_pp_last_stage(group) if _Built.now else original(group)


@wrapping
def _noting(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Set `_Built.now` while a trainer builds its model."""
    _Built.now = True
    try:
        return original(*args, **kwargs)
    finally:
        _Built.now = False


@wrapping
def _set_up_ends(original: Callable[[Any], None], model: Any) -> None:
    """Copy the embedding's weights to a tied head. Megatron would receive the weights from the first stage's rank."""
    original(model)
    if not model.share_embeddings_and_output_weights:
        return
    if model.pre_process:
        _Built.weight = model.shared_embedding_or_output_weight()
    elif model.post_process:
        model.shared_embedding_or_output_weight().data.copy_(_Built.weight.data)


REPLACEMENTS = (
    Replacement(
        module="megatron.core.models.common.language_module.language_module",
        path="LanguageModule.setup_embeddings_and_output_layer",
        make=_set_up_ends,
    ),
    Replacement(module="megatron.core.parallel_state", path="is_pipeline_last_stage", make=_is_pipeline_last_stage),
    Replacement(
        module="megatron.core.parallel_state", path="initialize_model_parallel", make=_with_ends_on_the_first_rank
    ),
    Replacement(module=f"{_TRAINING}.utils", path="get_batch_on_this_tp_rank", make=_whole_batch, versions="<0.18"),
    Replacement(module="megatron.core.utils", path="get_batch_on_this_tp_rank", make=_whole_batch, versions=">=0.18"),
    *in_module(f"{_TRAINING}.training", {"is_pp_last_stage": _in_model_alone, "get_model": _noting}),
    *(
        Replacement(module=module, path="is_pp_last_stage", make=instead(_is_pp_last_stage))
        for module in _LAST_STAGE_USERS
    ),
    *(
        Replacement(module=module, path="get_transformer_layer_offset", make=_layer_offset)
        for module in _LAYER_OFFSET_USERS
    ),
)


def carry(results: Any, group: Any, source: int) -> Any:
    """Move results from one pipeline rank to the last rank. The last rank returns the results, other ranks return None.

    Only the rank `source` of the pipeline's `group` reads `results`, which torch must be able to save. Tensors on a GPU
    arrive on the receiver's own GPU. (A pickled CUDA tensor would return to the number of the sender's device.)
    """
    peers, rank, last = dist.get_process_group_ranks(group), group.rank(), group.size() - 1
    if rank == source:
        content = io.BytesIO()
        torch.save(results, content)
        dist.send_object_list([content.getvalue()], peers[last], group)
    elif rank == last:
        received: list[Any] = [None]
        dist.recv_object_list(received, peers[source], group)
        return torch.load(io.BytesIO(received[0]), map_location=_on_own_device, weights_only=False)
    return None


def _on_own_device(storage: Any, location: str) -> Any:
    # Without a number, torch restores a storage on the current device.
    here = "cuda" if location.startswith("cuda") else location
    return default_restore_location(storage, here)  # type: ignore[no-untyped-call]
