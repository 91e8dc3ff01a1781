"""Experts with abstract tensors: routing is balanced, since no tensor has values to route by, and every shape is fixed.

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
from pipette_patches.cpu.torch_replacements import instead
from pipette_patches.replacements import Replacement

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
    """Route as this job does from now on, and forget the losses that Megatron keeps of an earlier one."""
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


def current_routing() -> Routing:
    """The routing in force."""
    return _routing[0]


def flags(job: Job) -> dict[str, str]:
    """The job's other flags by name."""
    return dict(flag.partition(" ")[::2] for flag in job.performance_flags)


def balanced(rows: int, parts: int) -> list[int]:
    """Cut a number of rows into parts that differ by one at most."""
    each, more = divmod(rows, parts)
    return [each + (part < more) for part in range(parts)]


def _one_or_all(value: str) -> Any:
    words = value.split()
    return words[0] if len(words) == 1 else words


def _coefficients(value: str) -> Any:
    numbers = [float(word) for word in value.split()]
    return numbers[0] if len(numbers) == 1 else numbers


FLAGS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "--moe-aux-loss-coeff": ("moe_aux_loss_coeff", _coefficients),
    "--moe-apply-probs-on-input": ("moe_apply_probs_on_input", lambda _: True),
    "--moe-expert-capacity-factor": ("moe_expert_capacity_factor", float),
    "--moe-grouped-gemm": ("moe_grouped_gemm", lambda _: True),
    "--moe-input-jitter-eps": ("moe_input_jitter_eps", float),
    "--moe-pad-expert-input-to-capacity": ("moe_pad_expert_input_to_capacity", lambda _: True),
    "--moe-permute-fusion": ("moe_permute_fusion", lambda _: True),
    "--moe-router-dtype": ("moe_router_dtype", str),
    "--moe-router-enable-expert-bias": ("moe_router_enable_expert_bias", lambda _: True),
    "--moe-router-group-topk": ("moe_router_group_topk", int),
    "--moe-router-load-balancing-type": ("moe_router_load_balancing_type", _one_or_all),
    "--moe-router-num-groups": ("moe_router_num_groups", int),
    "--moe-router-padding-for-fp8": ("moe_router_padding_for_quantization", lambda _: True),
    "--moe-router-padding-for-quantization": ("moe_router_padding_for_quantization", lambda _: True),
    "--moe-router-pre-softmax": ("moe_router_pre_softmax", lambda _: True),
    "--moe-router-score-function": ("moe_router_score_function", str),
    "--moe-router-topk-scaling-factor": ("moe_router_topk_scaling_factor", float),
    "--moe-shared-expert-gate": ("moe_shared_expert_gate", lambda _: True),
    "--moe-shared-expert-overlap": ("moe_shared_expert_overlap", lambda _: True),
    "--moe-token-drop-policy": ("moe_token_drop_policy", str),
    "--moe-z-loss-coeff": ("moe_z_loss_coeff", float),
    "--overlap-moe-expert-parallel-comm": ("overlap_moe_expert_parallel_comm", lambda _: True),
}
"""Flags of experts: the field of TransformerConfig that each sets, and how its value is read."""
NOT_MODELLED = ("--moe-router-fusion", "--moe-use-legacy-grouped-gemm")
"""Flags that change a few bytes, and are left out with a note."""


def fields(job: Job) -> dict[str, Any]:
    """Fields of the configuration for experts, latent attention and token prediction, beside those of `FLAGS`."""
    model = job.model
    found: dict[str, Any] = {}
    if model.num_experts:
        dispatcher = flags(job).get("--moe-token-dispatcher-type", "allgather")
        found |= {
            "num_moe_experts": model.num_experts,
            "moe_layer_freq": list(model.moe_layer_freq),
            "moe_router_topk": model.moe_router_topk,
            "moe_ffn_hidden_size": model.moe_ffn_hidden_size,
            "moe_shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size or None,
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


def _gather(original: Callable[..., Any]) -> Callable[..., Any]:
    """Gather as many rows from each rank."""

    def gather(rows: torch.Tensor, *args: Any, output_split_sizes: object = None, **kwargs: Any) -> Any:
        del output_split_sizes
        return original(rows, *args, **kwargs)

    return gather


def _scatter(original: Callable[..., Any]) -> Callable[..., Any]:
    """Give as many rows to each rank."""

    def scatter(rows: torch.Tensor, *args: Any, input_split_sizes: object = None, **kwargs: Any) -> Any:
        del input_split_sizes
        return original(rows, *args, **kwargs)

    return scatter


def _sort_chunks(original: Callable[..., Any]) -> Callable[..., Any]:
    """Sort equal chunks."""

    def sort(rows: torch.Tensor, sizes: Any, order: Any, *args: Any, **kwargs: Any) -> Any:
        del sizes
        return original(
            rows, torch.tensor(balanced(rows.shape[0], len(order))), torch.arange(len(order)), *args, **kwargs
        )

    return sort


def _rope_for_query(_original: object) -> Callable[..., Any]:
    """Rotate queries in place, as the kernel does."""
    return lambda query, *_angles, **_options: query


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
    Replacement(module=_DISPATCHER, path="gather_from_sequence_parallel_region", make=_gather),
    Replacement(module=_DISPATCHER, path="reduce_scatter_to_sequence_parallel_region", make=_scatter),
    Replacement(module=_DISPATCHER, path="sort_chunks_by_idxs", make=_sort_chunks),
    Replacement(module=_DISPATCHER, path="pad_routing_map", make=instead(lambda mapped, _multiple: mapped)),
    Replacement(module=_LATENT, path="fused_apply_mla_rope_for_q", make=_rope_for_query),
    Replacement(module=_LATENT, path="fused_apply_mla_rope_for_kv", make=_rope_for_key_value),
)
"""What stands for megatron-core's own, and one of torch's, where a value is asked for."""
