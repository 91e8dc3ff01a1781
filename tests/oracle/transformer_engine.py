"""A stand-in for Transformer Engine and Apex: the same names, and for each name the tensors that the original holds.

megatron-core wraps these names itself (extensions/transformer_engine.py), so its own classes, specifications and checks
run. `STAND_INS` lists each module and the names that megatron-core takes from it. Source: TransformerEngine 2.8.

Linear layers (module/{linear,layernorm_linear,grouped_linear}.py) keep their input before any gather. Linear layers
with a norm also keep the norm's input, statistics and output. For the weight gradient a layer gathers the input again,
and frees the gathered copy at once. With fused accumulation the weight gradient goes into `main_grad`, and the layer
returns an empty gradient. Transformer Engine keeps one such gradient for each shape (module/base.py, get_dummy_wgrad).

Attention (attention/dot_product_attention/{backends,context_parallel}.py): cuDNN's fused kernel takes (s, b, heads,
channels). FlashAttention needs (b, s, heads, channels), so with b > 1 it copies query, key, value and output. The
unfused attention core stores every attention score. With context parallelism keys and values travel around a ring of
ranks. Each step of the ring needs one buffer in the forward and two pairs of buffers in the backward.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from oracle import kernels
from oracle.kernels import Gradients, NotModelledError, kernel

from pipette_patches.storage_meter import under

VERSION = "2.8.0"
"""The release of Transformer Engine that this file imitates."""
_dummy_wgrads: dict[tuple[Any, ...], torch.Tensor] = {}


def get_dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
    """Return the shared empty gradient of a weight shape. megatron-core's own linear layers also call this function."""
    del zero
    key = (*shape, dtype)
    if key not in _dummy_wgrads:
        _dummy_wgrads[key] = under("buffers", torch.empty)(shape, dtype=dtype, device="cuda")
    return _dummy_wgrads[key].detach()


def _weight_gradient(weight: Any, *, fused: bool) -> torch.Tensor:
    if not (fused and hasattr(weight, "grad_added_to_main_grad")):
        return torch.empty_like(weight)
    weight.grad_added_to_main_grad = True
    return get_dummy_wgrad(list(weight.shape), weight.dtype)


def _parameter(shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device))


def _mark(parameter: Any, *, split: bool, dimension: int) -> None:
    parameter.tensor_model_parallel = split
    parameter.partition_dim = dimension if split else -1
    parameter.partition_stride = 1


def _norm_output(given: torch.Tensor, *, rms: bool) -> tuple[torch.Tensor, ...]:
    """Make a norm's output and fp32 statistics: one number for each token with RMSNorm, two with LayerNorm."""
    rows = given.numel() // given.shape[-1]
    statistics = (given.new_empty(rows, dtype=torch.float32) for _ in range(1 if rms else 2))
    return (torch.empty_like(given, memory_format=torch.contiguous_format), *statistics)


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
    """Give a layer the weight of a norm, and the bias unless the norm is an RMSNorm."""
    for name in ("weight", "bias"):
        parameter = None if name == "bias" and layer.rms else _parameter((width,), params_dtype, device)
        if parameter is not None:
            vars(parameter)["sequence_parallel"] = sequence_parallel
        layer.register_parameter(f"{prefix}{name}", parameter)


class _Product(torch.nn.Module):
    """The common base of linear and grouped layers, with parameters, fused accumulation and an optional bias."""

    save_original_input = False
    """Megatron sets this attribute, but without FP8 a layer keeps the original input in any case."""

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
        # Height and width of this rank's slice of a weight.
        outputs = out_features // (tp_size if parallel_mode == "column" else 1)
        inputs = in_features // (tp_size if parallel_mode == "row" else 1)
        for suffix in suffixes:
            self.register_parameter(f"weight{suffix}", _parameter((outputs, inputs), params_dtype, device))
            if bias:
                self.register_parameter(f"bias{suffix}", _parameter((outputs,), params_dtype, device))

    def backward_dw(self) -> None:
        """Do nothing, because these layers defer no weight gradient."""


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
        """`column` if the layer gathers the sequence before the product, `row` if it scatters the output; else None.

        Megatron removes the parallel mode from layers whose exchanges Megatron does itself.
        """
        return self.parallel_mode if self._sequence_parallel and self._ranks > 1 else None

    def forward(self, inp: torch.Tensor, **_options: Any) -> Any:
        """Normalise if the layer has a norm, then multiply. If the caller adds the bias, return output and bias."""
        added = None if self.returns_bias else self.bias
        norm = (getattr(self, name, None) for name in ("layer_norm_weight", "layer_norm_bias"))
        out = kernel(self._product, inp, self.weight, added, *norm, backward=self._gradients)
        return (out, self.bias) if self.returns_bias else out

    def _gathered(self, given: torch.Tensor) -> torch.Tensor:
        return given.new_empty((given.shape[0] * self._ranks, *given.shape[1:]))

    def _product(self, source: torch.Tensor, weight: torch.Tensor, _bias: Any, norm_weight: Any, _: Any) -> Any:
        given, statistics = source, ()
        if norm_weight is not None:
            given, *statistics = _norm_output(source, rms=self.rms)  # type: ignore[assignment]
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
        own = _weight_gradient(weight, fused=self.fuses_accumulation) if weight.requires_grad else None
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

    def __init__(self, normalized_shape: int = 0, eps: float = 1e-5, hidden_size: int = 0, **options: Any) -> None:
        super().__init__()
        self.eps = eps
        # megatron-core names the width `hidden_size` before 0.19, and `normalized_shape` from then on.
        _add_norm(self, normalized_shape or hidden_size, **options)

    def forward(self, inp: torch.Tensor) -> Any:
        """Normalise the input. Keep the input, the weight and the statistics for the backward."""

        def run(given: torch.Tensor, weight: torch.Tensor, _bias: torch.Tensor | None) -> Any:
            out, *statistics = _norm_output(given, rms=self.rms)
            return out, (given, weight, *statistics)

        return kernel(run, inp, self.weight, self.bias)


class RMSNorm(LayerNorm):
    """Transformer Engine's `RMSNorm`."""

    rms = True


class GroupedLinear(_Product):
    """Transformer Engine's `GroupedLinear`: one kernel multiplies for all experts and keeps its input."""

    def __init__(self, num_gemms: int, in_features: int, out_features: int, **options: Any) -> None:
        super().__init__(in_features, out_features, suffixes=range(num_gemms), **options)
        self.num_gemms = num_gemms

    def forward(self, inp: torch.Tensor, m_splits: list[int], **_options: Any) -> Any:
        """Multiply the token rows of each expert. If the caller adds the biases, return output and biases."""
        if sum(m_splits) != inp.shape[0]:
            raise ValueError(f"{sum(m_splits)} rows of experts for {inp.shape[0]} rows given")
        weights = [getattr(self, f"weight{index}") for index in range(self.num_gemms)]
        biases = [getattr(self, f"bias{index}") for index in range(self.num_gemms)] if self.use_bias else []
        added = [] if self.returns_bias else biases

        def backward(kept: Any, gradient: torch.Tensor) -> Gradients:
            given, *weights = kept
            gradient.contiguous()
            input_gradient = torch.empty_like(given)
            own = [_weight_gradient(weight, fused=self.fuses_accumulation) for weight in weights]
            return input_gradient, *own, *(torch.empty_like(bias) for bias in added)

        def run(given: torch.Tensor, *_weights_and_biases: Any) -> Any:
            return given.new_empty((*given.shape[:-1], weights[0].shape[0])), (given, *weights)

        out = kernel(run, inp, *weights, *added, backward=backward)
        return (out, biases) if self.returns_bias else out


_BACKENDS = ("flash", "fused", "unfused")
_backend = ["fused"]


def choose_attention(backend: str) -> None:
    """Set the backend of attention cores that are made from now on."""
    if backend not in _BACKENDS:
        raise NotModelledError(f"attention backend {backend!r} is not modelled; known are {', '.join(_BACKENDS)}")
    _backend[0] = backend


def _attention_output(query: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the output of attention and its softmax statistics: one fp32 number for each query and head."""
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32)


def _fused_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
    """Run one fused attention kernel, which keeps its inputs, output, statistics and random state for the backward."""
    out, statistics = _attention_output(query, value)
    return out, (query, key, value, out, statistics, query.new_empty(2, dtype=torch.int64))


def _ring_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ranks: int, sequence: int) -> Any:
    """Pass keys and values around a ring of ranks.

    The backward keeps query, last received keys and values, output and statistics. `sequence` is the dimension of the
    query tensor that context parallelism splits.
    """
    key_shape, value_shape = key.shape, value.shape

    def forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        # The results of all ring steps stay until the last step corrects them.
        pairs, outs = [key.new_empty(key.numel() + value.numel())], []
        for step in range(ranks):
            if step < ranks - 1:
                pairs.append(torch.empty_like(pairs[0]))
            part = query
            if step:
                # With causal attention, later ring steps need half of the queries (as assumed here) or of the keys.
                part = query.new_empty([size // 2 if at == sequence else size for at, size in enumerate(query.shape)])
                outs.append(part)
            outs += _attention_output(part, value)
        statistics = query.new_empty(query.shape[:-1], dtype=torch.float32)
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        states = [query.new_empty(2, dtype=torch.int64) for _ in range(ranks)]
        return out, (query, pairs[-1], out, statistics, *states)

    def backward(kept: Any, _gradient: torch.Tensor) -> Any:
        # Keys and values travel around the ring with their gradients, in two buffers.
        query, pair, *_ = kept
        query_gradient = query.new_empty(query.shape)
        buffers = [pair.new_empty((2, *pair.shape)) for _ in range(2)]
        for _ in range(ranks):
            part = query.new_empty(query.shape)
            keys, values, both = pair.new_empty(key_shape), pair.new_empty(value_shape), torch.empty_like(pair)
            del part, keys, values, both
        last = buffers[-1][1]
        del buffers
        split = key_shape.numel()
        return query_gradient, last[:split].view(key_shape), last[split:].view(value_shape)

    return kernel(forward, query, key, value, backward=backward)


def _unfused_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float) -> torch.Tensor:
    """Run unfused attention, which stores the scores, the probabilities and the probabilities after dropout."""
    (rows, batch, heads, _), columns = query.shape, key.shape[0]
    if key.shape[2] != heads:
        repeats = heads // key.shape[2]
        key, value = (one.repeat_interleave(repeats, dim=2) for one in (key, value))
    flat_query = query.reshape(rows, batch * heads, -1)
    flat_key = key.reshape(columns, batch * heads, -1)
    scores = query.new_empty(batch * heads, rows, columns)
    scores = torch.baddbmm(scores, flat_query.transpose(0, 1), flat_key.permute(1, 2, 0), beta=0.0)

    def softmax(scores: torch.Tensor) -> Any:
        out = torch.empty_like(scores)
        return out, (out,)

    # The softmax keeps its result, and the softmax's backward overwrites the incoming gradient.
    scores = kernel(softmax, scores, backward=lambda _kept, gradient: (gradient,))
    scores = torch.nn.functional.dropout(scores, dropout, training=True)
    flat_value = value.reshape(columns, batch * heads, -1)
    out = torch.bmm(scores, flat_value.transpose(0, 1)).view(batch, heads, rows, -1)
    return out.permute(2, 0, 1, 3).contiguous().flatten(2)


class DotProductAttention(torch.nn.Module):
    """Transformer Engine's `DotProductAttention` for causal self-attention on (s, b, heads, channels)."""

    def __init__(
        self, *, attention_dropout: float = 0.0, cp_group: Any = None, cp_comm_type: str = "p2p", **_kernel_options: Any
    ) -> None:
        super().__init__()
        self.backend = _backend[0]
        self.ring = cp_group.size() if cp_group is not None and not isinstance(cp_group, (list, tuple)) else 1
        self.attention_dropout = attention_dropout
        if cp_group is not None and cp_comm_type != "p2p":
            raise NotModelledError(f"context parallelism by {cp_comm_type} is not modelled, only p2p")

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_mask: Any, **_options: Any
    ) -> torch.Tensor:
        """Return the output of attention with the shape (s, b, heads * channels)."""
        query, key, value = (one.contiguous() for one in (query, key, value))
        # Transformer Engine has context parallelism only for its kernels, not for the unfused core.
        if self.ring == 1 and self.backend == "unfused":
            return _unfused_attention(query, key, value, self.attention_dropout)
        batch_first = self.backend == "flash"
        if batch_first:
            query, key, value = (one.transpose(0, 1).contiguous() for one in (query, key, value))
        if self.ring > 1:
            out = _ring_attention(query, key, value, self.ring, 1 if batch_first else 0)
        else:
            out = kernel(_fused_attention, query, key, value)
        flat: torch.Tensor = out.flatten(2)
        return flat.transpose(0, 1).contiguous() if batch_first else flat


def _not_modelled(name: str) -> type:
    """Make a class that megatron-core can import and subclass, but not instantiate."""

    def refuse(_self: Any, *_args: Any, **_kwargs: Any) -> None:
        raise NotModelledError(f"{name} of Transformer Engine is not modelled")

    return type(name, (torch.nn.Module,), {"__init__": refuse})


def _named(*objects: Any) -> dict[str, Any]:
    return {one.__name__: one for one in objects}


def _empty_classes(names: str) -> dict[str, type]:
    return {name: type(name, (SimpleNamespace,), {}) for name in names.split()}


def _no_quantization(*_args: Any, **_kwargs: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """Do nothing, because the original kernel writes into tensors that exist already."""


_SOFTMAX = {
    "forward": lambda scores, *_options: torch.empty_like(scores),
    # The backward kernel overwrites the incoming gradient.
    "backward": lambda gradient, *_options: gradient,
}
_TE = "transformer_engine.pytorch"
STAND_INS: dict[str, dict[str, Any]] = {
    "transformer_engine": {"__version__": VERSION},
    "transformer_engine.common": {},
    "transformer_engine.common.recipe": _empty_classes(
        "DelayedScaling Float8CurrentScaling Float8BlockScaling MXFP8BlockScaling Format"
    ),
    _TE: {
        **_named(Linear, LayerNormLinear, LayerNorm, RMSNorm, GroupedLinear, DotProductAttention),
        **{name: _not_modelled(name) for name in ("Fp8Padding", "Fp8Unpadding")},
        "ops": SimpleNamespace(**{name: _not_modelled(f"ops.{name}") for name in ("Sequential", "FusibleOperation")}),
    },
    f"{_TE}.attention": {"_SplitAlongDim": SimpleNamespace(apply=kernels.split_along_dim)},
    f"{_TE}.attention.rope": _named(kernels.apply_rotary_pos_emb, kernels.apply_fused_qkv_rotary_pos_emb),
    f"{_TE}.cpu_offload": {"CPUOffloadEnabled": False},
    f"{_TE}.cross_entropy": _named(kernels.parallel_cross_entropy),
    f"{_TE}.distributed": {
        "activation_recompute_forward": _no_quantization,
        "checkpoint": kernels.checkpoint,
        **_empty_classes("CudaRNGStatesTracker"),
    },
    f"{_TE}.fp8": {
        "FP8GlobalStateManager": SimpleNamespace(is_fp8_enabled=lambda: False, reset=_nothing),
        "fp8_autocast": _no_quantization,
        "fp8_model_init": _no_quantization,
    },
    f"{_TE}.module": {},
    f"{_TE}.module.base": {**_named(get_dummy_wgrad), "_dummy_wgrads": _dummy_wgrads},
    f"{_TE}.optimizers": {
        **_named(kernels.FusedAdam, kernels.FusedSGD, kernels.multi_tensor_applier, kernels.multi_tensor_l2norm),
        "multi_tensor_scale": _nothing,
    },
    f"{_TE}.permutation": _named(
        *(kernels.moe_permute, kernels.moe_permute_with_probs, kernels.moe_unpermute),
        *(kernels.moe_sort_chunks_by_index, kernels.moe_sort_chunks_by_index_with_probs),
    ),
    f"{_TE}.router": dict.fromkeys(
        ("fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss", "fused_topk_with_score_function")
    ),
    f"{_TE}.tensor": _empty_classes("QuantizedTensor"),
    f"{_TE}.float8_tensor": _empty_classes("Float8Tensor"),
    "fused_weight_gradient_mlp_cuda": dict.fromkeys(("wgrad_gemm_accum_fp16", "wgrad_gemm_accum_fp32"), _nothing),
    "scaled_masked_softmax_cuda": {**_named(kernels.get_batch_per_block), **_SOFTMAX},
    "scaled_upper_triang_masked_softmax_cuda": _SOFTMAX,
}
"""Modules that only a GPU machine has, and the stand-ins for the names in each module."""


def install() -> None:
    """Put the stand-ins into sys.modules. megatron-core must not be imported yet."""
    for name, contents in STAND_INS.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, loader=None, is_package=True)
        module.__path__ = []
        vars(module).update(contents)
        sys.modules[name] = module
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], leaf, module)
