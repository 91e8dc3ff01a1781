"""Stand-ins for fused kernels of Transformer Engine and Apex, which make and keep the same tensors without values.

Abstract tensors have no values from which a router could choose, so all experts get the same number of tokens.
FusedAdam follows TransformerEngine 2.8, optimizers/fused_adam.py, and makes its states at the first step. For states in
reduced precision, FusedAdam makes fp32 copies of all states of a parameter group at once. FusedAdam may keep 16-bit
remainders instead of fp32 master weights, and needs no copy of these remainders.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from pipette_launch.facts import Job

Gradients = tuple[Any, ...]
_FP8_ROWS = 16


class NotModelledError(Exception):
    """The job uses a feature whose memory abstract execution cannot count."""


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], backward: Any, *given: Any) -> Any:
        out, kept = run(*given)
        ctx.save_for_backward(*kept)
        ctx.run_backward = backward
        ctx.given = [(one.shape, one.dtype) if isinstance(one, torch.Tensor) else None for one in given]
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        kept = ctx.saved_tensors
        if ctx.run_backward is not None:
            return None, None, *ctx.run_backward(kept, *gradients)
        needed = zip(ctx.given, ctx.needs_input_grad[2:], strict=True)
        made = [gradients[0].new_empty(one[0], dtype=one[1]) if needs else None for one, needs in needed]
        return None, None, *made


def kernel(
    run: Callable[..., tuple[Any, tuple[Any, ...]]], *given: Any, backward: Callable[..., Gradients] | None = None
) -> Any:
    """Run a fused kernel. autograd records only the kernel's outputs and the tensors that the kernel keeps.

    `run` receives `given` and returns the outputs and the tensors that are kept for backward. `backward` receives the
    kept tensors and the output gradients, and returns one gradient per object in `given`. None makes a new gradient for
    each tensor that needs a gradient. `backward` must not refer to tensors other than parameters, because such tensors
    would live as long as the graph.
    """
    return _Kernel.apply(run, backward, *given)  # type: ignore[no-untyped-call]


def apply_rotary_pos_emb(given: torch.Tensor, angles: torch.Tensor, **_options: Any) -> Any:
    """Rotate queries or keys into a new tensor. The backward keeps only the rotation angles."""
    return kernel(lambda given: (given.new_empty(given.shape), (angles,)), given)


def apply_fused_qkv_rotary_pos_emb(*_args: Any, **_kwargs: Any) -> Any:
    """Raise an error: a rotation of queries, keys and values in one unsplit tensor is not modelled."""
    raise NotModelledError("--fused-single-qkv-rope is not modelled")


def split_along_dim(given: torch.Tensor, dim: int, sections: Any, _squeeze: bool = False) -> Any:
    """Split a tensor into views. The backward copies the gradients of the views into one tensor."""
    return kernel(
        lambda given: (torch.split(given, sections, dim=dim), ()),
        given,
        backward=lambda _kept, *gradients: (torch.cat(gradients, dim=dim),),
    )


def parallel_cross_entropy(logits: torch.Tensor, _labels: torch.Tensor, *_options: Any) -> Any:
    """Make one loss for each token. The gradient overwrites the logits, in the type of the logits."""

    def run(logits: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor]]:
        loss = logits.new_empty(logits.shape[:2], dtype=torch.float32)
        logits.new_empty((logits.shape[0] * logits.shape[1] * 3,), dtype=torch.float32)
        return loss, (logits.detach(),)

    return kernel(run, logits, backward=lambda kept, _gradient: kept)


def checkpoint(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Recompute a function in the backward. autograd keeps only the function's tensor arguments."""
    import torch.utils.checkpoint as torch_checkpoint

    ours = ("distribute_saved_activations", "get_rng_state_tracker", "tp_group")
    given = {name: value for name, value in options.items() if name not in ours}
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=True, **given)


def multi_tensor_applier(operation: Any, overflow: Any, lists: Any, *args: Any) -> Any:
    """Apply one kernel to lists of tensors."""
    return operation(2048 * 32, overflow, lists, *args)


def multi_tensor_l2norm(_chunk: int, _overflow: Any, lists: Any, per_tensor: bool = False) -> Any:
    """Make one common norm of all tensors. If `per_tensor` is True, also make one norm for each tensor."""
    count = len(lists[0]) if per_tensor else 0
    return lists[0][0].new_empty(1, dtype=torch.float32), lists[0][0].new_empty(count, dtype=torch.float32)


def get_batch_per_block(_rows: int, columns: int, _batch: int, _heads: int) -> int:
    """Return the number of score rows in one block of the softmax kernel (fused_kernels/scaled_masked_softmax.h)."""
    power = 1 << math.ceil(math.log2(columns))
    return (128 // min(power, 32)) * (2 if power <= 128 else 1)


class FusedAdam(torch.optim.Optimizer):
    """Adam whose step is a few kernels over lists of tensors."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        **_kernel_options: Any,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": True}
        super().__init__(params, defaults)
        self.dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        if master_weights:
            self.dtypes["master_param"] = master_weight_dtype
        self.use_decoupled_grad = use_decoupled_grad
        self.master_weights = master_weights
        self.store_param_remainders = store_param_remainders and master_weights and master_weight_dtype is torch.float32
        self.overflow = torch.empty(1, dtype=torch.int32, device="cuda")

    def initialize_state(self, parameter: Any, _store_param_remainders: bool = False) -> None:
        """Make the optimizer states of one parameter."""
        for name, dtype in self.dtypes.items():
            has_remainder = name == "master_param" and self.store_param_remainders and parameter.dtype is torch.bfloat16
            self.state[parameter][name] = torch.empty_like(parameter, dtype=torch.int16 if has_remainder else dtype)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the gradients."""
        for parameter in (one for group in self.param_groups for one in group["params"]):
            if self.use_decoupled_grad:
                parameter.decoupled_grad = None
            elif set_to_none:
                parameter.grad = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make the optimizer states that are missing, and fp32 copies of states in reduced precision."""
        del closure
        for group in self.param_groups:
            copies = []
            for parameter in group["params"]:
                gradient = parameter.decoupled_grad if self.use_decoupled_grad else parameter.grad
                if gradient is None:
                    continue
                if not self.state[parameter]:
                    self.initialize_state(parameter)
                copies += [
                    torch.empty_like(state, dtype=torch.float32)
                    for state in self.state[parameter].values()
                    if state.dtype not in (torch.float32, torch.int16)
                ]
            del copies


class FusedSGD(torch.optim.SGD):
    """Stochastic gradient descent over lists of tensors, which makes the momentum at the first step."""

    def __init__(self, params: Any, lr: float = 1e-3, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay, foreach=True)


def choose_optimizers(*, fused: bool) -> None:
    """Let megatron-core build fused optimizers if `fused` is True, otherwise torch's optimizers."""
    from megatron.core import optimizer

    optimizer.USING_PYTORCH_OPTIMIZER = not fused
    optimizer.Adam = FusedAdam if fused else torch.optim.AdamW
    optimizer.SGD = FusedSGD if fused else torch.optim.SGD


@dataclasses.dataclass(frozen=True, slots=True)
class Routing:
    """Balanced routing: every expert gets the same number of tokens."""

    num_experts: int = 1
    topk: int = 1
    capacity_factor: float | None = None
    pads_for_fp8: bool = False

    def rows(self, tokens: int, experts: int) -> int:
        """Return the number of token rows that `experts` of the model's experts get from `tokens` tokens."""
        each = tokens * self.topk / self.num_experts
        if self.capacity_factor is not None:
            each = min(each, math.ceil(each * self.capacity_factor))
        if self.pads_for_fp8:
            each = math.ceil(each / _FP8_ROWS) * _FP8_ROWS
        return round(each * experts)


_routing = [Routing()]


def routed_rows(tokens: int, experts: int) -> int:
    """Return the number of token rows that `experts` experts of the current job get from `tokens` tokens."""
    return _routing[0].rows(tokens, experts)


def choose_routing(job: Job) -> None:
    """Route tokens as in `job` from now on."""
    options = job.options
    factor = options.moe_expert_capacity_factor
    _routing[0] = Routing(
        num_experts=job.model.num_experts or 1,
        topk=job.model.moe_router_topk,
        capacity_factor=factor if factor is not None and factor >= 0 else None,
        pads_for_fp8=options.moe_router_padding_for_fp8 or options.moe_router_padding_for_quantization,
    )


def balanced(rows: int, parts: int) -> list[int]:
    """Split a number of rows into parts whose sizes differ by at most one row."""
    each, more = divmod(rows, parts)
    return [each + (part < more) for part in range(parts)]


def moe_permute_with_probs(
    tokens: torch.Tensor, probs: torch.Tensor | None, routing_map: torch.Tensor, **_options: Any
) -> Any:
    """Sort token rows and probabilities by expert. The backward keeps 2 * experts + 1 numbers for each token."""

    def run(tokens: torch.Tensor, probs: torch.Tensor | None) -> Any:
        num_tokens, experts = routing_map.shape
        rows = routed_rows(num_tokens, experts)
        row_map = routing_map.new_empty((num_tokens, 2 * experts + 1), dtype=torch.int32)
        permuted = None if probs is None else probs.new_empty(rows)
        return (tokens.new_empty((rows, tokens.shape[1])), permuted, row_map), (row_map,)

    return kernel(run, tokens, probs)


def moe_permute(tokens: torch.Tensor, routing_map: torch.Tensor, **_options: Any) -> Any:
    """Sort token rows by expert. Return the sorted rows and the map that restores the order of tokens."""
    permuted, _, row_map = moe_permute_with_probs(tokens, None, routing_map)
    return permuted, row_map


def moe_unpermute(
    permuted: torch.Tensor, row_map: torch.Tensor, *_probs: Any, restore_shape: Any, **_options: Any
) -> Any:
    """Sum the expert outputs of each token. The backward keeps the map from tokens to experts."""
    return kernel(lambda given: (given.new_empty(tuple(restore_shape)), (row_map,)), permuted)


def moe_sort_chunks_by_index_with_probs(rows: torch.Tensor, probs: Any, _sizes: Any, _order: Any) -> Any:
    """Sort chunks of token rows and of their probabilities. The backward keeps a map from old to new rows."""
    row_map = rows.new_empty(rows.shape[0], dtype=torch.int32)
    return tuple(kernel(lambda given: (given.new_empty(given.shape), (row_map,)), given) for given in (rows, probs))


def moe_sort_chunks_by_index(rows: torch.Tensor, _sizes: Any, _order: Any) -> Any:
    """Sort chunks of token rows. The backward keeps a map from old to new rows."""
    row_map = rows.new_empty(rows.shape[0], dtype=torch.int32)
    return kernel(lambda given: (given.new_empty(given.shape), (row_map,)), rows)
