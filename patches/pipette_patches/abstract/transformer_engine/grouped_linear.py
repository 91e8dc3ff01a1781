"""Transformer Engine's grouped linear layer and permutation kernels: what they keep for backward, and make.

Read in TransformerEngine 2.8, module/grouped_linear.py and permutation.py.
"""

from __future__ import annotations

from typing import Any

import torch

from pipette_patches.abstract.moe import current_routing
from pipette_patches.abstract.transformer_engine.linear import weight_gradient

_ROW_MAP_DTYPE = torch.int32


class GroupedLinearFunction(torch.autograd.Function):
    """One matrix product for each expert, in one kernel."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, layer: GroupedLinear, *weights_and_biases: Any) -> torch.Tensor:
        """Make the output of all experts; the input is kept."""
        weights = weights_and_biases[: layer.num_gemms]
        ctx.save_for_backward(given, *weights)
        ctx.layer, ctx.biases = layer, weights_and_biases[layer.num_gemms :]
        return given.new_empty((*given.shape[:-1], weights[0].shape[0]))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Make the gradients of input, weights and biases."""
        given, *weights = ctx.saved_tensors
        gradients[0].contiguous()
        input_gradient = torch.empty_like(given)
        own = [weight_gradient(weight, fused=ctx.layer.fuses_accumulation) for weight in weights]
        return input_gradient, None, *own, *(torch.empty_like(bias) for bias in ctx.biases)


class GroupedLinear(torch.nn.Module):
    """Transformer Engine's `GroupedLinear`."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        return_bias: bool = False,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype = torch.float32,
        parallel_mode: str | None = None,
        tp_size: int = 1,
        device: Any = "cuda",
        **_kernel_options: Any,
    ) -> None:
        super().__init__()
        self.num_gemms, self.use_bias = num_gemms, bias
        self.fuses_accumulation = fuse_wgrad_accumulation
        self.returns_bias = return_bias
        out_features //= tp_size if parallel_mode == "column" else 1
        in_features //= tp_size if parallel_mode == "row" else 1
        for index in range(num_gemms):
            empty = torch.empty(out_features, in_features, dtype=params_dtype, device=device)
            self.register_parameter(f"weight{index}", torch.nn.Parameter(empty))
            if bias:
                empty = torch.empty(out_features, dtype=params_dtype, device=device)
                self.register_parameter(f"bias{index}", torch.nn.Parameter(empty))

    def forward(self, inp: torch.Tensor, m_splits: list[int], **_options: Any) -> Any:
        """Multiply each expert's rows; hand the biases out where the caller adds them."""
        if sum(m_splits) != inp.shape[0]:
            raise ValueError(f"{sum(m_splits)} rows of experts for {inp.shape[0]} rows given")
        weights = [getattr(self, f"weight{index}") for index in range(self.num_gemms)]
        biases = [getattr(self, f"bias{index}") for index in range(self.num_gemms)] if self.use_bias else []
        added = [] if self.returns_bias else biases
        out = GroupedLinearFunction.apply(inp, self, *weights, *added)  # type: ignore[no-untyped-call]
        return (out, biases) if self.returns_bias else out

    def backward_dw(self) -> None:
        """Weight gradients are never put off here."""


class PermuteFunction(torch.autograd.Function):
    """Rows of tokens put in the order of experts; keeps a map of two entries for each token and expert, and one."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, routing_map: torch.Tensor, probabilities: Any) -> Any:
        """Make permuted tokens, the map, and permuted probabilities."""
        num_tokens, experts = routing_map.shape
        rows = current_routing().rows(num_tokens, experts)
        row_map = routing_map.new_empty((num_tokens, 2 * experts + 1), dtype=_ROW_MAP_DTYPE)
        ctx.save_for_backward(row_map)
        ctx.mark_non_differentiable(row_map)
        permuted = None if probabilities is None else probabilities.new_empty(rows)
        ctx.probabilities = None if probabilities is None else (probabilities.shape, probabilities.dtype)
        ctx.shapes = (tokens.shape, tokens.dtype)
        return tokens.new_empty((rows, tokens.shape[1])), row_map, permuted

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Add the gradients of a token's rows up."""
        shape, dtype = ctx.shapes
        back = None
        if ctx.probabilities is not None:
            back = gradients[0].new_empty(ctx.probabilities[0], dtype=ctx.probabilities[1])
        return gradients[0].new_empty(shape, dtype=dtype), None, back


class ReorderFunction(torch.autograd.Function):
    """As many rows in another order, or added up into fewer; keeps a map."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, row_map: torch.Tensor, shape: Any) -> torch.Tensor:
        """Make the rows."""
        ctx.save_for_backward(row_map)
        ctx.shape = given.shape
        return given.new_empty(shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Put the gradients back in the order they came from."""
        return gradients[0].new_empty(ctx.shape), None, None


def moe_permute(tokens: torch.Tensor, routing_map: torch.Tensor, **_options: Any) -> Any:
    """Permute tokens: returns them and the map that leads back."""
    permuted, row_map, _ = PermuteFunction.apply(tokens, routing_map, None)  # type: ignore[no-untyped-call]
    return permuted, row_map


def moe_permute_with_probs(
    tokens: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor, **_options: Any
) -> Any:
    """Permute tokens and their probabilities."""
    permuted, row_map, probabilities = PermuteFunction.apply(tokens, routing_map, probs)  # type: ignore[no-untyped-call]
    return permuted, probabilities, row_map


def moe_unpermute(
    permuted: torch.Tensor, row_map: torch.Tensor, *_probs: Any, restore_shape: Any, **_options: Any
) -> Any:
    """Add each token's rows up."""
    return ReorderFunction.apply(permuted, row_map, tuple(restore_shape))  # type: ignore[no-untyped-call]


def moe_sort_chunks_by_index(rows: torch.Tensor, _sizes: Any, _order: Any) -> Any:
    """Sort chunks of rows."""
    return ReorderFunction.apply(rows, rows.new_empty(rows.shape[0], dtype=_ROW_MAP_DTYPE), rows.shape)  # type: ignore[no-untyped-call]


def moe_sort_chunks_by_index_with_probs(rows: torch.Tensor, probs: torch.Tensor, _sizes: Any, _order: Any) -> Any:
    """Sort chunks of rows and of their probabilities."""
    row_map = rows.new_empty(rows.shape[0], dtype=_ROW_MAP_DTYPE)
    sorted_rows = ReorderFunction.apply(rows, row_map, rows.shape)  # type: ignore[no-untyped-call]
    return sorted_rows, ReorderFunction.apply(probs, row_map, probs.shape)  # type: ignore[no-untyped-call]
