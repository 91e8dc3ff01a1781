"""The weights' gradients of Megatron's own linear layers, put off until the W of their schedule.

torch's own split of a backward would make them twice: Megatron's linear layers are autograd functions that make both
gradients at once (pytorch issues 166577, 174017). So the backward of that function is wrapped. It runs as ever, with
its communication, but for the product that makes the weights' gradient: Megatron can leave out that of the vocabulary
(`--defer-embedding-wgrad-compute`), and the same switch serves every layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from pipette_patches.replacements import Replacement

LAYERS = "megatron.core.tensor_parallel.layers"
FUNCTION = "LinearWithGradAccumulationAndAsyncCommunication"
OF_BIAS = 2
"""Place of the bias among the gradients: behind those of input and weight."""

Deferred = list[Callable[[], None]]
"""The products that a backward left out, in its order."""


class _Open:
    """Where the backward that now runs leaves its products; a backward of torch may run on a thread of its own."""

    products: Deferred | None = None
    weights: list[Any] | None = None


_open = _Open()


@contextlib.contextmanager
def deferred() -> Iterator[Deferred]:
    """Collect the weights' gradients of the backward that runs in this block instead of making them."""
    products: Deferred = []
    weights: list[Any] = []
    _open.products, _open.weights = products, weights
    try:
        yield products
    finally:
        _open.products = _open.weights = None
        for weight in weights:
            # It kept the hooks of this backward from adding a gradient that is none; a whole backward may come next.
            weight.grad_added_to_main_grad = False


def _splitting(original: Any) -> Any:
    """Make the successor of Megatron's function: the same forward, a backward that can leave out one product."""

    class Splitting(original):  # type: ignore[misc]
        @staticmethod
        def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
            total_input, weight = ctx.saved_tensors
            # Where Megatron itself defers, as for the vocabulary on request, it goes on doing so; from 0.19 on a weight
            # may be in parts, which are put together for the backward alone.
            defers = ctx.grad_output_buffer is not None or getattr(ctx, "gtp_remat_size", 1) > 1
            # The head's product would keep the gradients of its logits, which are larger than all else of a layer.
            is_head = getattr(weight, "is_embedding_or_output_parameter", False)
            if _open.products is None or defers or is_head or not hasattr(weight, "main_grad"):
                return original.backward(ctx, grad_output)
            product = partial(_fused_product if ctx.gradient_accumulation_fusion else _product, weight)
            gather = ctx.tp_group if ctx.sequence_parallel else None
            _open.products.append(partial(_add, product, total_input, grad_output, gather))
            _open.weights.append(weight)  # type: ignore[union-attr]
            ctx.grad_output_buffer, ctx.wgrad_deferral_limit = [], 0
            ctx.gradient_accumulation_fusion, ctx.main_grad = True, weight.main_grad
            has_bias, ctx.use_bias = ctx.use_bias, False
            gradients = list(original.backward(ctx, grad_output))
            if has_bias:
                # Left to itself it would add up the tokens in two steps, which BF16 rounds otherwise.
                gradients[OF_BIAS] = grad_output.reshape(-1, grad_output.shape[-1]).sum(dim=0)
            return tuple(gradients)

    return Splitting


@torch.no_grad()
def _add(
    product: Callable[[torch.Tensor, torch.Tensor], None],
    layer_input: torch.Tensor,
    grad_output: torch.Tensor,
    gather: Any,
) -> None:
    """Add the weights' gradient of one layer and micro-batch, as the original's backward would.

    Args:
        product: adds the product of an output's gradient and an input to a weight's gradient.
        layer_input: what the layer took in, the part of this rank under sequence parallelism.
        grad_output: the gradient of what it put out.
        gather: the ranks that hold the other parts of the input; None without sequence parallelism.

    """
    from megatron.core.tensor_parallel.layers import dist_all_gather_func
    from megatron.core.utils import prepare_input_tensors_for_wgrad_compute

    if gather is not None:
        shape = [layer_input.size(0) * gather.size(), *layer_input.shape[1:]]
        whole = torch.empty(shape, dtype=layer_input.dtype, device=layer_input.device)
        dist_all_gather_func(whole, layer_input, group=gather)
        layer_input = whole
    product(*prepare_input_tensors_for_wgrad_compute(grad_output, layer_input))


def _product(weight: Any, grad_output: torch.Tensor, layer_input: torch.Tensor) -> None:
    weight.main_grad.add_(grad_output.t().matmul(layer_input))


def _fused_product(weight: Any, grad_output: torch.Tensor, layer_input: torch.Tensor) -> None:
    from megatron.core.tensor_parallel.layers import fused_weight_gradient_mlp_cuda as kernels

    is_wide = weight.main_grad.dtype == torch.float32
    add = kernels.wgrad_gemm_accum_fp32 if is_wide else kernels.wgrad_gemm_accum_fp16
    add(layer_input, grad_output, weight.main_grad)


REPLACEMENTS = (Replacement(module=LAYERS, path=FUNCTION, make=_splitting),)
