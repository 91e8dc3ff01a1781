"""Transformer Engine's linear layers and norms: their parameters, what they keep for backward, and their temporaries.

Read in TransformerEngine 2.8, module/{linear,layernorm_linear,grouped_linear}.py: the first two keep their own input
(the norm's input, statistics and output too) before any gather, gather it again for the weight gradient, and free the
gathered copy at once. With fused accumulation the weight gradient goes into `main_grad`; the layer returns an empty
gradient in its place, which is made once for each shape and kept (module/base.py, get_dummy_wgrad).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pipette_patches.abstract.allocator import under

_dummy_gradients: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}


@dataclass(frozen=True, slots=True)
class Cut:
    """How a linear layer is cut over tensor-parallel ranks."""

    mode: str | None
    """`column`, `row`, or None where it is whole."""
    ranks: int
    sequence_parallel: bool

    @property
    def gathers_input(self) -> bool:
        """Whether the input is a slice of the sequence, to be gathered first."""
        return self.mode == "column" and self.sequence_parallel and self.ranks > 1

    @property
    def scatters_output(self) -> bool:
        """Whether the output is summed over ranks and cut along the sequence."""
        return self.mode == "row" and self.sequence_parallel and self.ranks > 1


def forget_gradients() -> None:
    """Drop the kept empty gradients, as a new process would have none."""
    _dummy_gradients.clear()


def norm_output(given: torch.Tensor, *, rms: bool) -> tuple[torch.Tensor, ...]:
    """Make a norm's output and its fp32 statistics: one or two numbers for each row."""
    rows = given.numel() // given.shape[-1]
    statistics = (given.new_empty(rows, dtype=torch.float32) for _ in range(1 if rms else 2))
    return (torch.empty_like(given, memory_format=torch.contiguous_format), *statistics)


class NormFunction(torch.autograd.Function):
    """A norm that keeps its input and statistics."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rms: bool) -> Any:
        """Make the output."""
        out, *statistics = norm_output(given, rms=rms)
        ctx.save_for_backward(given, weight, *statistics)
        ctx.bias = bias
        return out

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor) -> Any:
        """Make the gradients of input and parameters."""
        given, weight, *_ = ctx.saved_tensors
        bias_gradient = None if ctx.bias is None else torch.empty_like(ctx.bias)
        return torch.empty_like(given), torch.empty_like(weight), bias_gradient, None


def matmul(given: torch.Tensor, width: int, *, rows: int | None = None) -> torch.Tensor:
    """Make the output of a matrix product over the last dimension."""
    first = given.shape[0] if rows is None else rows
    return given.new_empty((first, *given.shape[1:-1], width))


def gathered(given: torch.Tensor, cut: Cut) -> torch.Tensor:
    """Make the whole sequence from this rank's slice."""
    return given.new_empty((given.shape[0] * cut.ranks, *given.shape[1:]))


def weight_gradient(weight: Any, *, fused: bool) -> torch.Tensor:
    """Make a weight's gradient, or, where it goes into `main_grad`, find the empty one of its shape."""
    if not (fused and hasattr(weight, "grad_added_to_main_grad")):
        return torch.empty_like(weight)
    weight.grad_added_to_main_grad = True
    return get_dummy_wgrad(list(weight.shape), weight.dtype)


def get_dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
    """Find the empty gradient of a shape; megatron-core's own linear layers ask for it too."""
    del zero
    rows, columns = shape
    key = (rows, columns, dtype)
    if key not in _dummy_gradients:
        _dummy_gradients[key] = under("buffers", torch.empty)(rows, columns, dtype=dtype, device="cuda")
    return _dummy_gradients[key].detach()


class LinearFunction(torch.autograd.Function):
    """A matrix product, with a norm before it where `norm_weight` is given."""

    @staticmethod
    def forward(
        ctx: Any,
        given: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        norm_weight: torch.Tensor | None,
        norm_bias: torch.Tensor | None,
        layer: Linear,
    ) -> torch.Tensor:
        """Make the output."""
        cut, statistics, source = layer.cut, (), given
        if norm_weight is not None:
            given, *statistics = norm_output(given, rms=layer.rms)  # type: ignore[assignment]
        whole = gathered(given, cut) if cut.gathers_input else given
        out = matmul(whole, weight.shape[0])
        del whole
        if cut.scatters_output:
            out = matmul(given, weight.shape[0], rows=given.shape[0] // cut.ranks)
        ctx.save_for_backward(source, given, weight, norm_weight, *statistics)
        ctx.bias, ctx.norm_bias, ctx.layer = bias, norm_bias, layer
        ctx.needs_weight = weight.requires_grad
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Make the gradients of input and parameters."""
        source, given, weight, norm_weight, *_ = ctx.saved_tensors
        layer, cut = ctx.layer, ctx.layer.cut
        gradient = gathered(gradients[0], cut) if cut.scatters_output else gradients[0]
        whole = gathered(given, cut) if cut.gathers_input and ctx.needs_weight else given
        input_gradient = matmul(gradient, weight.shape[1])
        if cut.gathers_input:
            input_gradient = torch.empty_like(given)
        own = weight_gradient(weight, fused=layer.fuses_accumulation) if ctx.needs_weight else None
        bias_gradient = None if ctx.bias is None else torch.empty_like(ctx.bias)
        del gradient, whole
        norm_gradients: list[torch.Tensor | None] = [None, None]
        if norm_weight is not None:
            input_gradient = torch.empty_like(source)
            norm_gradients = [None if one is None else torch.empty_like(one) for one in (norm_weight, ctx.norm_bias)]
        return input_gradient, own, bias_gradient, *norm_gradients, None


class _Product(torch.nn.Module):
    """What a linear layer and a grouped one share: fused accumulation, and a bias that the caller may add."""

    def __init__(self, *, return_bias: bool, fuse_wgrad_accumulation: bool) -> None:
        super().__init__()
        self.fuses_accumulation = fuse_wgrad_accumulation
        self.returns_bias = return_bias

    def backward_dw(self) -> None:
        """Do nothing: no weight gradient is deferred here."""


class Linear(_Product):
    """Transformer Engine's `Linear`."""

    rms = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        return_bias: bool = False,
        parallel_mode: str | None = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype = torch.float32,
        device: Any = "cuda",
        **_kernel_options: Any,
    ) -> None:
        super().__init__(return_bias=return_bias, fuse_wgrad_accumulation=fuse_wgrad_accumulation)
        self.parallel_mode = parallel_mode
        self._ranks, self._sequence_parallel = tp_size, sequence_parallel
        shape = _own_shape(in_features, out_features, parallel_mode, tp_size)
        self.weight = _parameter(shape, params_dtype, device)
        self.register_parameter("bias", _parameter(shape[:1], params_dtype, device) if bias else None)
        _mark(self.weight, split=parallel_mode is not None, dimension=1 if parallel_mode == "row" else 0)
        if self.bias is not None and parallel_mode == "column":
            _mark(self.bias, split=True, dimension=0)
        if self.bias is not None and parallel_mode == "row":
            vars(self.bias)["sequence_parallel"] = sequence_parallel

    @property
    def cut(self) -> Cut:
        """How it is cut now: Megatron takes the mode away from layers whose exchanges it does itself."""
        return Cut(mode=self.parallel_mode, ranks=self._ranks, sequence_parallel=self._sequence_parallel)

    def forward(self, inp: torch.Tensor, **_options: Any) -> Any:
        """Normalise where there is a norm, and multiply; return the bias too where the caller adds it."""
        added = None if self.returns_bias else self.bias
        norm = (getattr(self, name, None) for name in ("layer_norm_weight", "layer_norm_bias"))
        out = LinearFunction.apply(inp, self.weight, added, *norm, self)  # type: ignore[no-untyped-call]
        return (out, self.bias) if self.returns_bias else out


class LayerNormLinear(Linear):
    """Transformer Engine's `LayerNormLinear`: a norm and a column-parallel product."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        normalization: str = "LayerNorm",
        return_layernorm_output: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, **options)
        if return_layernorm_output:
            raise NotImplementedError("LayerNormLinear that returns its norm's output is not modelled")
        self.rms = normalization == "RMSNorm"
        _add_norm(self, in_features, prefix="layer_norm_", **options)


class _Norm(torch.nn.Module):
    rms = False

    def __init__(self, hidden_size: int, eps: float = 1e-5, **options: Any) -> None:
        super().__init__()
        self.eps = eps
        _add_norm(self, hidden_size, **options)

    def forward(self, inp: torch.Tensor) -> Any:
        """Normalise."""
        return NormFunction.apply(inp, self.weight, self.bias, self.rms)  # type: ignore[no-untyped-call]


class LayerNorm(_Norm):
    """Transformer Engine's `LayerNorm`."""


class RMSNorm(_Norm):
    """Transformer Engine's `RMSNorm`."""

    rms = True


class GroupedLinearFunction(torch.autograd.Function):
    """One matrix product for each expert, in one kernel."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, layer: GroupedLinear, *weights_and_biases: Any) -> torch.Tensor:
        """Make the output of all experts; the input is kept."""
        weights = weights_and_biases[: layer.num_gemms]
        ctx.save_for_backward(given, *weights)
        ctx.layer, ctx.biases = layer, weights_and_biases[layer.num_gemms :]
        return matmul(given, weights[0].shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Make the gradients of input, weights and biases."""
        given, *weights = ctx.saved_tensors
        gradients[0].contiguous()
        input_gradient = torch.empty_like(given)
        own = [weight_gradient(weight, fused=ctx.layer.fuses_accumulation) for weight in weights]
        return input_gradient, None, *own, *(torch.empty_like(bias) for bias in ctx.biases)


class GroupedLinear(_Product):
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
        super().__init__(return_bias=return_bias, fuse_wgrad_accumulation=fuse_wgrad_accumulation)
        self.num_gemms, self.use_bias = num_gemms, bias
        shape = _own_shape(in_features, out_features, parallel_mode, tp_size)
        for index in range(num_gemms):
            self.register_parameter(f"weight{index}", _parameter(shape, params_dtype, device))
            if bias:
                self.register_parameter(f"bias{index}", _parameter(shape[:1], params_dtype, device))

    def forward(self, inp: torch.Tensor, m_splits: list[int], **_options: Any) -> Any:
        """Multiply each expert's rows; return the biases too where the caller adds them."""
        if sum(m_splits) != inp.shape[0]:
            raise ValueError(f"{sum(m_splits)} rows of experts for {inp.shape[0]} rows given")
        weights = [getattr(self, f"weight{index}") for index in range(self.num_gemms)]
        biases = [getattr(self, f"bias{index}") for index in range(self.num_gemms)] if self.use_bias else []
        added = [] if self.returns_bias else biases
        out = GroupedLinearFunction.apply(inp, self, *weights, *added)  # type: ignore[no-untyped-call]
        return (out, biases) if self.returns_bias else out


def _own_shape(in_features: int, out_features: int, parallel_mode: str | None, tp_size: int) -> tuple[int, int]:
    """The shape (outputs, inputs) of this rank's slice of a weight."""
    return (
        out_features // (tp_size if parallel_mode == "column" else 1),
        in_features // (tp_size if parallel_mode == "row" else 1),
    )


def _parameter(shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device))


def _add_norm(
    layer: Any,
    width: int,
    *,
    prefix: str = "",
    sequence_parallel: bool = False,
    params_dtype: torch.dtype = torch.float32,
    device: Any = "cuda",
    **_kernel_options: Any,
) -> None:
    """Give a layer the weight of a norm and, unless it is an RMSNorm, the bias."""
    for name in ("weight", "bias"):
        parameter = None if name == "bias" and layer.rms else _parameter((width,), params_dtype, device)
        if parameter is not None:
            vars(parameter)["sequence_parallel"] = sequence_parallel
        layer.register_parameter(f"{prefix}{name}", parameter)


def _mark(parameter: Any, *, split: bool, dimension: int) -> None:
    parameter.tensor_model_parallel = split
    parameter.partition_dim = dimension if split else -1
    parameter.partition_stride = 1
