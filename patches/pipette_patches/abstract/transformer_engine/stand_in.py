"""A stand-in for Transformer Engine (and the kernels of Apex): the same names, and for each the bytes it holds.

megatron-core wraps these by itself (extensions/transformer_engine.py), so that its own classes, specifications and
checks run. `STAND_INS` is the place for more: a module's dotted name, and what megatron-core takes from it.
"""

from __future__ import annotations

import contextlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from pipette_patches.abstract import moe
from pipette_patches.abstract.transformer_engine import attention, fused_kernels, linear
from pipette_patches.errors import NotModelledError

VERSION = "2.8.0"
"""The Transformer Engine whose code was read."""


def not_modelled(name: str) -> type:
    """Make a class that cannot be built, only named and subclassed."""

    def refuse(_self: Any, *_args: Any, **_kwargs: Any) -> None:
        raise NotModelledError(f"{name} of Transformer Engine is not modelled")

    return type(name, (torch.nn.Module,), {"__init__": refuse})


def _of(module: Any, names: str) -> dict[str, Any]:
    return {name: getattr(module, name) for name in names.split()}


def _empty_classes(names: str) -> dict[str, type]:
    return {name: type(name, (SimpleNamespace,), {}) for name in names.split()}


def _no_quantization(*_args: Any, **_kwargs: Any) -> contextlib.AbstractContextManager[None]:
    """Leave everything in its own type."""
    return contextlib.nullcontext()


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """Do nothing: the kernel writes into tensors that it was given."""


_SOFTMAX = {
    "forward": lambda scores, *_options: torch.empty_like(scores),
    # It overwrites the gradient.
    "backward": lambda gradient, *_options: gradient,
}
STAND_INS: dict[str, dict[str, Any]] = {
    "transformer_engine": {"__version__": VERSION},
    "transformer_engine.common": {},
    "transformer_engine.common.recipe": _empty_classes(
        "DelayedScaling Float8CurrentScaling Float8BlockScaling MXFP8BlockScaling Format"
    ),
    "transformer_engine.pytorch": {
        **_of(linear, "Linear LayerNormLinear LayerNorm RMSNorm GroupedLinear"),
        "DotProductAttention": attention.DotProductAttention,
        **{name: not_modelled(name) for name in ("Fp8Padding", "Fp8Unpadding")},
        "ops": SimpleNamespace(**{name: not_modelled(f"ops.{name}") for name in ("Sequential", "FusibleOperation")}),
    },
    "transformer_engine.pytorch.attention": {"_SplitAlongDim": SimpleNamespace(apply=fused_kernels.split_along_dim)},
    "transformer_engine.pytorch.attention.rope": _of(
        fused_kernels, "apply_rotary_pos_emb apply_fused_qkv_rotary_pos_emb"
    ),
    "transformer_engine.pytorch.cpu_offload": {"CPUOffloadEnabled": False},
    "transformer_engine.pytorch.cross_entropy": _of(fused_kernels, "parallel_cross_entropy"),
    "transformer_engine.pytorch.distributed": {
        "activation_recompute_forward": _no_quantization,
        "checkpoint": fused_kernels.checkpoint,
        **_empty_classes("CudaRNGStatesTracker"),
    },
    "transformer_engine.pytorch.fp8": {
        # FP8 is off.
        "FP8GlobalStateManager": SimpleNamespace(is_fp8_enabled=lambda: False, reset=_nothing),
        "fp8_autocast": _no_quantization,
    },
    "transformer_engine.pytorch.module": {},
    "transformer_engine.pytorch.module.base": _of(linear, "get_dummy_wgrad"),
    "transformer_engine.pytorch.optimizers": {
        **_of(fused_kernels, "FusedAdam FusedSGD multi_tensor_applier multi_tensor_l2norm"),
        "multi_tensor_scale": _nothing,
    },
    "transformer_engine.pytorch.permutation": _of(
        moe,
        """
        moe_permute moe_permute_with_probs moe_sort_chunks_by_index moe_sort_chunks_by_index_with_probs moe_unpermute
        """,
    ),
    "transformer_engine.pytorch.router": dict.fromkeys(
        ("fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss", "fused_topk_with_score_function")
    ),
    "transformer_engine.pytorch.tensor": _empty_classes("QuantizedTensor"),
    "transformer_engine.pytorch.float8_tensor": _empty_classes("Float8Tensor"),
    "fused_weight_gradient_mlp_cuda": dict.fromkeys(("wgrad_gemm_accum_fp16", "wgrad_gemm_accum_fp32"), _nothing),
    "scaled_masked_softmax_cuda": {**_of(fused_kernels, "get_batch_per_block"), **_SOFTMAX},
    "scaled_upper_triang_masked_softmax_cuda": _SOFTMAX,
}
"""Modules that exist on a GPU machine, and what of them is imitated."""


def install() -> None:
    """Put the stand-ins where imports find them; megatron-core must not be imported yet."""
    for name, contents in STAND_INS.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, loader=None, is_package=True)
        module.__path__ = []
        vars(module).update(contents)
        sys.modules[name] = module
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], leaf, module)
