"""Transformer Engine's linear layers and norms: their parameters, what they keep for backward, and their temporaries.

Read in TransformerEngine 2.8, module/{linear,layernorm_linear,grouped_linear}.py: the first two keep their own input
(the norm's input, statistics and output too) before any gather, gather it again for the weight gradient, and free the
gathered copy at once. With fused accumulation the weight gradient goes into `main_grad`; the layer returns an empty
gradient in its place, which is made once for each shape and kept (module/base.py, get_dummy_wgrad).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from pipette_patches.abstract.allocator import under
from pipette_patches.abstract.transformer_engine.fused_kernels import Gradients, kernel

_dummy_gradients: dict[tuple[Any, ...], torch.Tensor] = {}


def forget_gradients() -> None:
    """Drop the kept empty gradients, as a new process would have none."""
    _dummy_gradients.clear()


def norm_output(given: torch.Tensor, *, rms: bool) -> tuple[torch.Tensor, ...]:
    """Make a norm's output and its fp32 statistics: one or two numbers for each row."""
    rows = given.numel() // given.shape[-1]
    statistics = (given.new_empty(rows, dtype=torch.float32) for _ in range(1 if rms else 2))
    return (torch.empty_like(given, memory_format=torch.contiguous_format), *statistics)


def weight_gradient(weight: Any, *, fused: bool) -> torch.Tensor:
    """Make a weight's gradient, or, where it goes into `main_grad`, find the empty one of its shape."""
    if not (fused and hasattr(weight, "grad_added_to_main_grad")):
        return torch.empty_like(weight)
    weight.grad_added_to_main_grad = True
    return get_dummy_wgrad(list(weight.shape), weight.dtype)


def get_dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
    """Find the empty gradient of a shape; megatron-core's own linear layers ask for it too."""
    del zero
    key = (*shape, dtype)
    if key not in _dummy_gradients:
        _dummy_gradients[key] = under("buffers", torch.empty)(shape, dtype=dtype, device="cuda")
    return _dummy_gradients[key].detach()


class _Product(torch.nn.Module):
    """What a linear layer and a grouped one share: parameters, fused accumulation, a bias that the caller may add."""

    save_original_input = False
    """Megatron sets it; without FP8 the input is kept as it is anyway."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        suffixes: Iterable[object] = ("",),
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
        super().__init__()
        self.use_bias, self.returns_bias, self.fuses_accumulation = bias, return_bias, fuse_wgrad_accumulation
        self.parallel_mode, self._ranks, self._sequence_parallel = parallel_mode, tp_size, sequence_parallel
        # Outputs and inputs of this rank's slice of a weight.
        outputs = out_features // (tp_size if parallel_mode == "column" else 1)
        inputs = in_features // (tp_size if parallel_mode == "row" else 1)
        for suffix in suffixes:
            self.register_parameter(f"weight{suffix}", _parameter((outputs, inputs), params_dtype, device))
            if bias:
                self.register_parameter(f"bias{suffix}", _parameter((outputs,), params_dtype, device))

    def backward_dw(self) -> None:
        """Do nothing: no weight gradient is deferred here."""


class Linear(_Product):
    """Transformer Engine's `Linear`."""

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    rms = False

    def __init__(self, in_features: int, out_features: int, **options: Any) -> None:
        super().__init__(in_features, out_features, **options)
        if not self.use_bias:
            self.register_parameter("bias", None)
        _mark(self.weight, split=self.parallel_mode is not None, dimension=1 if self.parallel_mode == "row" else 0)
        if self.bias is not None and self.parallel_mode == "column":
            _mark(self.bias, split=True, dimension=0)
        if self.bias is not None and self.parallel_mode == "row":
            vars(self.bias)["sequence_parallel"] = self._sequence_parallel

    @property
    def _exchange(self) -> str | None:
        """`column`: the input is a slice of the sequence, to be gathered first; `row`: the output becomes such a slice.

        Megatron takes the mode away from layers whose exchanges it does itself.
        """
        return self.parallel_mode if self._sequence_parallel and self._ranks > 1 else None

    def forward(self, inp: torch.Tensor, **_options: Any) -> Any:
        """Normalise where there is a norm, and multiply; return the bias too where the caller adds it."""
        added = None if self.returns_bias else self.bias
        norm = (getattr(self, name, None) for name in ("layer_norm_weight", "layer_norm_bias"))
        out = kernel(self._product, inp, self.weight, added, *norm, backward=self._gradients)
        return (out, self.bias) if self.returns_bias else out

    def _gathered(self, given: torch.Tensor) -> torch.Tensor:
        """Make the whole sequence from this rank's slice."""
        return given.new_empty((given.shape[0] * self._ranks, *given.shape[1:]))

    def _product(self, source: torch.Tensor, weight: torch.Tensor, _bias: Any, norm_weight: Any, _: Any) -> Any:
        given, statistics = source, ()
        if norm_weight is not None:
            given, *statistics = norm_output(source, rms=self.rms)  # type: ignore[assignment]
        whole = self._gathered(given) if self._exchange == "column" else given
        out = whole.new_empty((*whole.shape[:-1], weight.shape[0]))
        del whole
        if self._exchange == "row":
            out = out.new_empty((out.shape[0] // self._ranks, *out.shape[1:]))
        return out, (source, given, weight, norm_weight, *statistics)

    def _gradients(self, kept: Any, gradient: torch.Tensor) -> Gradients:
        source, given, weight, norm_weight, *_ = kept
        gathers = self._exchange == "column"
        gradient = self._gathered(gradient) if self._exchange == "row" else gradient
        whole = self._gathered(given) if gathers and weight.requires_grad else given
        input_gradient = gradient.new_empty((*gradient.shape[:-1], weight.shape[1]))
        if gathers:
            input_gradient = torch.empty_like(given)
        own = weight_gradient(weight, fused=self.fuses_accumulation) if weight.requires_grad else None
        bias_gradient = None if self.returns_bias or self.bias is None else torch.empty_like(self.bias)
        del gradient, whole
        norm_gradients: list[torch.Tensor | None] = [None, None]
        if norm_weight is not None:
            input_gradient = torch.empty_like(source)
            norm = (norm_weight, getattr(self, "layer_norm_bias", None))
            norm_gradients = [None if one is None else torch.empty_like(one) for one in norm]
        return input_gradient, own, bias_gradient, *norm_gradients


class LayerNormLinear(Linear):
    """Transformer Engine's `LayerNormLinear`: a norm and a column-parallel product."""

    def __init__(
        self, in_features: int, out_features: int, *, normalization: str = "LayerNorm", **options: Any
    ) -> None:
        super().__init__(in_features, out_features, **options)
        if options.get("return_layernorm_output"):
            raise NotImplementedError("LayerNormLinear that returns its norm's output is not modelled")
        self.rms = normalization == "RMSNorm"
        _add_norm(self, in_features, prefix="layer_norm_", **options)


class LayerNorm(torch.nn.Module):
    """Transformer Engine's `LayerNorm`."""

    rms = False

    def __init__(self, hidden_size: int, eps: float = 1e-5, **options: Any) -> None:
        super().__init__()
        self.eps = eps
        _add_norm(self, hidden_size, **options)

    def forward(self, inp: torch.Tensor) -> Any:
        """Normalise."""

        def run(given: torch.Tensor, weight: torch.Tensor, _bias: torch.Tensor | None) -> Any:
            out, *statistics = norm_output(given, rms=self.rms)
            return out, (given, weight, *statistics)

        return kernel(run, inp, self.weight, self.bias)


class RMSNorm(LayerNorm):
    """Transformer Engine's `RMSNorm`."""

    rms = True


class GroupedLinear(_Product):
    """Transformer Engine's `GroupedLinear`: one product for each expert, in one kernel; its input is kept."""

    def __init__(self, num_gemms: int, in_features: int, out_features: int, **options: Any) -> None:
        super().__init__(in_features, out_features, suffixes=range(num_gemms), **options)
        self.num_gemms = num_gemms

    def forward(self, inp: torch.Tensor, m_splits: list[int], **_options: Any) -> Any:
        """Multiply each expert's rows; return the biases too where the caller adds them."""
        if sum(m_splits) != inp.shape[0]:
            raise ValueError(f"{sum(m_splits)} rows of experts for {inp.shape[0]} rows given")
        weights = [getattr(self, f"weight{index}") for index in range(self.num_gemms)]
        biases = [getattr(self, f"bias{index}") for index in range(self.num_gemms)] if self.use_bias else []
        added = [] if self.returns_bias else biases

        def backward(kept: Any, gradient: torch.Tensor) -> Gradients:
            given, *weights = kept
            gradient.contiguous()
            input_gradient = torch.empty_like(given)
            own = [weight_gradient(weight, fused=self.fuses_accumulation) for weight in weights]
            return input_gradient, *own, *(torch.empty_like(bias) for bias in added)

        def run(given: torch.Tensor, *_weights_and_biases: Any) -> Any:
            return given.new_empty((*given.shape[:-1], weights[0].shape[0])), (given, *weights)

        out = kernel(run, inp, *weights, *added, backward=backward)
        return (out, biases) if self.returns_bias else out


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
