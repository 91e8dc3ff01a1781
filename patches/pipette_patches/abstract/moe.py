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
from pipette_patches.replacements import Replacement, instead
from pipette_patches.workload.config import expert_fields, flags

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


def routing() -> Routing:
    """The routing in force."""
    return _routing[0]


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
            "moe_layer_freq": list(model.moe_layer_freq),
            "moe_token_dispatcher_type": dispatcher if dispatcher == "allgather" else "alltoall",
        }
        if dispatcher == "flex":
            found["moe_permute_fusion"] = True
    if model.latent_attention:
        found |= {"multi_latent_attention": True, **dataclasses.asdict(model.latent_attention)}
    if model.mtp_num_layers:
        found["mtp_num_layers"] = model.mtp_num_layers
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


class MaskedSelect(torch.autograd.Function):
    """Select as many entries of each row of a mask as balanced routing sets; keeps what torch's own keeps."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Make the selection; rows of the mask are experts, its columns tokens."""
        ctx.save_for_backward(given, mask)
        experts, tokens = mask.shape
        return given.new_empty(_routing[0].rows(tokens, experts))

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor) -> Any:
        """Put the gradients back in place."""
        given, _ = ctx.saved_tensors
        return torch.empty_like(given), None


def _masked_select(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def select(given: Any, mask: Any) -> Any:
        if given.device.type != "meta":
            return original(given, mask)
        return MaskedSelect.apply(given, mask)  # type: ignore[no-untyped-call]

    return select


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


class _KeyValueFunction(torch.autograd.Function):
    """Keys and values of latent attention in one kernel: two new tensors."""

    @staticmethod
    def forward(ctx: Any, both: torch.Tensor, shared: torch.Tensor, key_width: int, value_width: int) -> Any:
        """Make keys and values."""
        ctx.shapes = (both.shape, shared.shape)
        return both.new_empty((*both.shape[:-1], key_width)), both.new_empty((*both.shape[:-1], value_width))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Make the gradients of both sources."""
        both, shared = ctx.shapes
        return gradients[0].new_empty(both), gradients[0].new_empty(shared), None, None


def _rope_for_key_value(_original: object) -> Callable[..., Any]:
    def rotate(
        both: Any, shared: Any, _cos: Any, _sin: Any, rope_width: int, width: int, value_width: int, *_: Any
    ) -> Any:
        return _KeyValueFunction.apply(both, shared, width + rope_width, value_width)  # type: ignore[no-untyped-call]

    return rotate


_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"
_EXPERTS = "megatron.core.transformer.moe.experts"
_LATENT = "megatron.core.transformer.multi_latent_attention"
MOE = (
    Replacement(module="torch", path="Tensor.masked_select", make=_masked_select),
    Replacement(module=_EXPERTS, path="SequentialMLP.forward", make=_with_balanced_counts),
    Replacement(module=_EXPERTS, path="TEGroupedMLP.forward", make=_with_balanced_counts),
    Replacement(module=_DISPATCHER, path="all_to_all", make=_all_to_all),
    Replacement(module=_DISPATCHER, path="gather_from_sequence_parallel_region", make=_in_equal_parts),
    Replacement(module=_DISPATCHER, path="reduce_scatter_to_sequence_parallel_region", make=_in_equal_parts),
    Replacement(module=_DISPATCHER, path="sort_chunks_by_idxs", make=_sort_chunks),
    Replacement(module=_DISPATCHER, path="pad_routing_map", make=instead(lambda mapped, _multiple: mapped)),
    # The kernel rotates queries in place.
    Replacement(module=_LATENT, path="fused_apply_mla_rope_for_q", make=instead(lambda query, *_, **_options: query)),
    Replacement(module=_LATENT, path="fused_apply_mla_rope_for_kv", make=_rope_for_key_value),
)
"""Replacements in megatron-core, and one in torch, where the value of a tensor is asked for."""
