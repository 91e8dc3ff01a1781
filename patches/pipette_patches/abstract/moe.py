"""Experts with abstract tensors, which have no values to route by: routing is balanced, and every shape is fixed.

Megatron's own router, dispatchers and experts run; only what asks for a value is answered with the balanced one: which
entries of a mask are set, how many tokens each expert gets, how many rows go to each rank.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from pipette_launch.facts import Job
from pipette_patches.abstract.gpu_replacements import for_abstract
from pipette_patches.abstract.transformer_engine.fused_kernels import kernel
from pipette_patches.replacements import in_module, instead
from pipette_patches.workload.config import expert_fields, flags, latent_fields

_FP8_ROWS = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Routing:
    """How many rows of so many tokens go to so many experts, when every expert gets as many."""

    num_experts: int = 1
    topk: int = 1
    capacity_factor: float | None = None
    pads_for_fp8: bool = False

    def rows(self, tokens: int, experts: int) -> int:
        """Rows that `experts` of the model's experts get of `tokens` tokens."""
        each = tokens * self.topk / self.num_experts
        if self.capacity_factor is not None:
            each = min(each, math.ceil(each * self.capacity_factor))
        if self.pads_for_fp8:
            each = math.ceil(each / _FP8_ROWS) * _FP8_ROWS
        return round(each * experts)


_routing = [Routing()]


def choose(job: Job) -> None:
    """Route as this job does from now on, and drop the losses that Megatron keeps of an earlier job."""
    from megatron.core.transformer import multi_token_prediction
    from megatron.core.transformer.moe import moe_utils

    moe_utils.get_moe_layer_wise_logging_tracker().clear()
    multi_token_prediction.MTPLossLoggingHelper.tracker = {}
    words = flags(job)
    factor = words.get("--moe-expert-capacity-factor")
    _routing[0] = Routing(
        num_experts=job.model.num_experts or 1,
        topk=job.model.moe_router_topk,
        capacity_factor=float(factor) if factor and float(factor) >= 0 else None,
        pads_for_fp8=bool({"--moe-router-padding-for-fp8", "--moe-router-padding-for-quantization"} & set(words)),
    )


def balanced(rows: int, parts: int) -> list[int]:
    """Cut a number of rows into parts that differ by one at most."""
    each, more = divmod(rows, parts)
    return [each + (part < more) for part in range(parts)]


NOT_MODELLED = ("--moe-router-fusion", "--moe-use-legacy-grouped-gemm")
"""Flags that change a few bytes, and are left out with a note."""


def fields(job: Job) -> dict[str, Any]:
    """Fields of the configuration for experts, latent attention and token prediction, beside those that flags set."""
    model = job.model
    found: dict[str, Any] = {}
    if model.num_experts:
        dispatcher = flags(job).get("--moe-token-dispatcher-type", "allgather")
        found |= {
            **expert_fields(model),
            "num_moe_experts": model.num_experts,
            "moe_token_dispatcher_type": dispatcher if dispatcher == "allgather" else "alltoall",
        }
        if dispatcher == "flex":
            found["moe_permute_fusion"] = True
    found |= latent_fields(model)
    if model.mtp_num_layers:
        # Megatron-LM's default, which megatron-core itself has from 0.16 on.
        found |= {"mtp_num_layers": model.mtp_num_layers, "mtp_loss_scaling_factor": 0.1}
    return found


def notes(job: Job) -> tuple[str, ...]:
    """In what the executed experts differ from the user's, one sentence each."""
    if not job.model.num_experts:
        return ()
    found = ["routing was taken as balanced: every expert gets as many tokens"]
    words = flags(job)
    left_out = [flag for flag in NOT_MODELLED if flag in words]
    if left_out:
        found.append(f"experts were executed without {', '.join(left_out)}")
    if words.get("--moe-token-dispatcher-type") == "flex":
        found.append("the flex dispatcher was executed as alltoall with fused permutation")
    return tuple(found)


def _masked_select(given: torch.Tensor, mask: torch.Tensor) -> Any:
    """Select as many entries of each row of a mask as balanced routing sets; keeps what torch's own keeps.

    Rows of the mask are experts, its columns tokens.
    """
    experts, tokens = mask.shape
    return kernel(lambda given: (given.new_empty(_routing[0].rows(tokens, experts)), (given, mask)), given)


def _with_balanced_counts(original: Callable[..., Any]) -> Callable[..., Any]:
    """Run experts with as many tokens for each as balanced routing gives."""

    @functools.wraps(original)
    def forward(experts: Any, rows: torch.Tensor, _counts: Any, probabilities: torch.Tensor) -> Any:
        counts = torch.tensor(balanced(rows.shape[0], experts.num_local_experts))
        return original(experts, rows, counts, probabilities)

    return forward


def _all_to_all(original: Callable[..., Any]) -> Callable[..., Any]:
    """Send as many rows as come back."""
    return lambda group, rows, *_splits, **_more: original(group, rows)


def _in_equal_parts(original: Callable[..., Any]) -> Callable[..., Any]:
    """Gather from, or scatter to, each rank as many rows: leave out the sizes of the parts."""

    def exchange(rows: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes = ("input_split_sizes", "output_split_sizes")
        return original(rows, *args, **{name: value for name, value in kwargs.items() if name not in sizes})

    return exchange


def _sort_chunks(original: Callable[..., Any]) -> Callable[..., Any]:
    """Sort equal chunks."""

    def sort(rows: torch.Tensor, _sizes: Any, order: Any, *args: Any, **kwargs: Any) -> Any:
        return original(
            rows, torch.tensor(balanced(rows.shape[0], len(order))), torch.arange(len(order)), *args, **kwargs
        )

    return sort


def _rope_for_key_value(
    both: Any, shared: Any, _cos: Any, _sin: Any, rope_width: int, width: int, value_width: int, *_: Any
) -> Any:
    """Make keys and values of latent attention in one kernel: two new tensors."""
    shapes = [(*both.shape[:-1], channels) for channels in (width + rope_width, value_width)]
    return kernel(lambda both, _: (tuple(both.new_empty(shape) for shape in shapes), ()), both, shared)


def moe_permute_with_probs(
    tokens: torch.Tensor, probs: torch.Tensor | None, routing_map: torch.Tensor, **_options: Any
) -> Any:
    """Put rows of tokens, and their probabilities, into the order of experts.

    Keeps and returns a map of 2 * experts + 1 entries for each token.
    """

    def run(tokens: torch.Tensor, probs: torch.Tensor | None) -> Any:
        num_tokens, experts = routing_map.shape
        rows = _routing[0].rows(num_tokens, experts)
        row_map = routing_map.new_empty((num_tokens, 2 * experts + 1), dtype=torch.int32)
        permuted = None if probs is None else probs.new_empty(rows)
        return (tokens.new_empty((rows, tokens.shape[1])), permuted, row_map), (row_map,)

    return kernel(run, tokens, probs)


def moe_permute(tokens: torch.Tensor, routing_map: torch.Tensor, **_options: Any) -> Any:
    """Permute tokens: returns them and the map for the way back."""
    permuted, _, row_map = moe_permute_with_probs(tokens, None, routing_map)
    return permuted, row_map


def moe_unpermute(
    permuted: torch.Tensor, row_map: torch.Tensor, *_probs: Any, restore_shape: Any, **_options: Any
) -> Any:
    """Add each token's rows up; keeps the map."""
    return kernel(lambda given: (given.new_empty(tuple(restore_shape)), (row_map,)), permuted)


def moe_sort_chunks_by_index_with_probs(rows: torch.Tensor, probs: Any, _sizes: Any, _order: Any) -> Any:
    """Sort chunks of rows and of their probabilities; keeps a map."""
    row_map = rows.new_empty(rows.shape[0], dtype=torch.int32)
    return tuple(kernel(lambda given: (given.new_empty(given.shape), (row_map,)), given) for given in (rows, probs))


def moe_sort_chunks_by_index(rows: torch.Tensor, _sizes: Any, _order: Any) -> Any:
    """Sort chunks of rows; keeps a map."""
    row_map = rows.new_empty(rows.shape[0], dtype=torch.int32)
    return kernel(lambda given: (given.new_empty(given.shape), (row_map,)), rows)


MOE = (
    *in_module("torch", {"Tensor.masked_select": for_abstract(_masked_select)}),
    *in_module(
        "megatron.core.transformer.moe.experts",
        {"SequentialMLP.forward": _with_balanced_counts, "TEGroupedMLP.forward": _with_balanced_counts},
    ),
    *in_module(
        "megatron.core.transformer.moe.token_dispatcher",
        {
            "all_to_all": _all_to_all,
            "gather_from_sequence_parallel_region": _in_equal_parts,
            "reduce_scatter_to_sequence_parallel_region": _in_equal_parts,
            "sort_chunks_by_idxs": _sort_chunks,
            "pad_routing_map": instead(lambda mapped, _multiple: mapped),
        },
    ),
    *in_module(
        "megatron.core.transformer.multi_latent_attention",
        {
            # The kernel rotates queries in place.
            "fused_apply_mla_rope_for_q": instead(lambda query, *_, **_options: query),
            "fused_apply_mla_rope_for_kv": instead(_rope_for_key_value),
        },
    ),
)
"""Replacements in megatron-core, and one in torch, where the value of a tensor is asked for."""
