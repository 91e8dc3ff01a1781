"""Two chunks on each rank, folded: the first goes down the ranks and the second back up, so rank 0 holds both ends.

Under Megatron's own placement chunk 1 of rank r is stage p + r; here it is stage 2p - 1 - r. So what Megatron asks of
the rank of a second chunk is answered for rank p - 1 - r, and the last stage is where rank 0 is. Layers keep their
numbers, so checkpoints are the same as under Megatron's own placement.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from pipette_patches.replacements import Replacement, instead

SECOND = 1
"""`vp_stage` of the chunk that goes back up."""
STAGES = "megatron.core.parallel_state"
LAYERS = "megatron.core.transformer.transformer_layer"
GROUPS = "megatron.core.pipeline_parallel.utils"
COPIES = {
    "is_pp_last_stage": (
        "megatron.core.distributed.finalize_model_grads",
        "megatron.core.models.common.language_module.language_module",
        "megatron.training.training",
    ),
    "get_transformer_layer_offset": (
        "megatron.core.models.gpt.gpt_layer_specs",
        "megatron.core.transformer.transformer_block",
    ),
}
"""Modules that may have imported these by name before they were replaced."""


def _is_pipeline_last_stage(original: Callable[..., bool]) -> Callable[..., bool]:
    """Of the virtual stages the last is rank 0's second chunk; without them the last rank stays the last."""

    @functools.wraps(original)
    def is_last(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
        if ignore_virtual:
            return original(ignore_virtual, vp_stage)
        from megatron.core import parallel_state

        return vp_stage == SECOND and parallel_state.get_pipeline_model_parallel_rank() == 0

    return is_last


def _is_pp_last_stage(group: Any) -> bool:
    """Megatron asks it of a last virtual stage."""
    return bool(group.rank() == 0)


def _layer_offset(original: Callable[..., int]) -> Callable[..., int]:
    """The layers before a second chunk are those before the same chunk of the rank on the other side of the fold."""

    @functools.wraps(original)
    def offset(config: Any, vp_stage: int | None = None, pp_rank: int | None = None) -> int:
        if vp_stage == SECOND:
            from megatron.core import parallel_state

            rank = parallel_state.get_pipeline_model_parallel_rank() if pp_rank is None else pp_rank
            pp_rank = config.pipeline_model_parallel_size - 1 - rank
        return original(config, vp_stage, pp_rank)

    return offset


def _with_ends_on_the_first_rank(original: Callable[..., None]) -> Callable[..., None]:
    """Embedding and head are on one rank, so nobody exchanges their gradients; scripts may name other ranks."""

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> None:
        given = inspect.signature(original).bind(*args, **kwargs)
        given.arguments["get_embedding_ranks"] = _first_rank
        original(*given.args, **given.kwargs)

    return initialize


def _first_rank(pp_ranks: list[int]) -> list[int]:
    return pp_ranks[:1]


def _whole_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    """The first rank needs the labels too: give it all, as where it predicts several tokens."""

    @functools.wraps(original)
    def batch(data_iterator: Any, mtp_on_this_rank: bool = False) -> Any:
        from megatron.core import parallel_state

        is_first = parallel_state.get_pipeline_model_parallel_rank() == 0
        return original(data_iterator, mtp_on_this_rank or is_first)

    return batch


class _Built:
    """The embedding that was built last: the second chunk of its rank is built next."""

    weight: Any = None


def _set_up_ends(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Give a tied head the weights of the embedding: Megatron would ask the rank of the first stage for them."""

    @functools.wraps(original)
    def set_up(model: Any) -> None:
        original(model)
        if not model.share_embeddings_and_output_weights:
            return
        if model.pre_process:
            _Built.weight = model.shared_embedding_or_output_weight()
        elif model.post_process:
            model.shared_embedding_or_output_weight().data.copy_(_Built.weight.data)

    return set_up


REPLACEMENTS = (
    Replacement(
        module="megatron.core.models.common.language_module.language_module",
        path="LanguageModule.setup_embeddings_and_output_layer",
        make=_set_up_ends,
    ),
    Replacement(module=STAGES, path="is_pipeline_last_stage", make=_is_pipeline_last_stage),
    Replacement(module=STAGES, path="initialize_model_parallel", make=_with_ends_on_the_first_rank),
    Replacement(module="megatron.training.utils", path="get_batch_on_this_tp_rank", make=_whole_batch),
    *(
        Replacement(module=module, path="is_pp_last_stage", make=instead(_is_pp_last_stage))
        for module in (GROUPS, *COPIES["is_pp_last_stage"])
    ),
    *(
        Replacement(module=module, path="get_transformer_layer_offset", make=_layer_offset)
        for module in (LAYERS, *COPIES["get_transformer_layer_offset"])
    ),
)
