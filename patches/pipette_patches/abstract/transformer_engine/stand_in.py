"""A stand-in for Transformer Engine (and the kernels of Apex): the same names, and for each the bytes it holds.

megatron-core wraps these by itself (extensions/transformer_engine.py), so that its own classes, specifications and
checks run. `STAND_INS` is the place for more: a module's dotted name, and what megatron-core takes from it.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from pipette_patches.abstract.transformer_engine import attention, fused_adam, fused_kernels, linear
from pipette_patches.errors import NotModelledError

VERSION = "2.8.0"
"""The Transformer Engine whose code was read."""


def not_modelled(name: str) -> type:
    """Make a class that cannot be built, only named and subclassed."""

    def refuse(_self: Any, *_args: Any, **_kwargs: Any) -> None:
        raise NotModelledError(f"{name} of Transformer Engine is not modelled")

    return type(name, (torch.nn.Module,), {"__init__": refuse})


STAND_INS: dict[str, dict[str, Any]] = {
    "transformer_engine": {"__version__": VERSION},
    "transformer_engine.common": {},
    "transformer_engine.common.recipe": {
        name: type(name, (SimpleNamespace,), {})
        for name in ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "Format")
    },
    "transformer_engine.pytorch": {
        "Linear": linear.Linear,
        "LayerNormLinear": linear.LayerNormLinear,
        "LayerNorm": linear.LayerNorm,
        "RMSNorm": linear.RMSNorm,
        "DotProductAttention": attention.DotProductAttention,
        "GroupedLinear": linear.GroupedLinear,
        "Fp8Padding": not_modelled("Fp8Padding"),
        "Fp8Unpadding": not_modelled("Fp8Unpadding"),
        "ops": SimpleNamespace(
            **{name: not_modelled(f"ops.{name}") for name in ("Sequential", "FusibleOperation")},
        ),
    },
    "transformer_engine.pytorch.attention": {"_SplitAlongDim": fused_kernels.SplitAlongDim},
    "transformer_engine.pytorch.attention.rope": {
        "apply_rotary_pos_emb": fused_kernels.apply_rotary_pos_emb,
        "apply_fused_qkv_rotary_pos_emb": fused_kernels.apply_fused_qkv_rotary_pos_emb,
    },
    "transformer_engine.pytorch.cross_entropy": {"parallel_cross_entropy": fused_kernels.parallel_cross_entropy},
    "transformer_engine.pytorch.distributed": {
        "activation_recompute_forward": fused_kernels.no_quantization,
        "checkpoint": fused_kernels.checkpoint,
        "CudaRNGStatesTracker": type("CudaRNGStatesTracker", (), {}),
    },
    "transformer_engine.pytorch.fp8": {
        "FP8GlobalStateManager": fused_kernels.NoQuantization,
        "fp8_autocast": fused_kernels.no_quantization,
    },
    "transformer_engine.pytorch.module": {},
    "transformer_engine.pytorch.module.base": {"get_dummy_wgrad": linear.get_dummy_wgrad},
    "transformer_engine.pytorch.optimizers": {
        "FusedAdam": fused_adam.FusedAdam,
        "FusedSGD": fused_adam.FusedSGD,
        "multi_tensor_applier": fused_kernels.multi_tensor_applier,
        "multi_tensor_l2norm": fused_kernels.multi_tensor_l2norm,
        "multi_tensor_scale": fused_kernels.nothing,
    },
    "transformer_engine.pytorch.permutation": {
        name: getattr(fused_kernels, name)
        for name in (
            "moe_permute",
            "moe_permute_with_probs",
            "moe_sort_chunks_by_index",
            "moe_sort_chunks_by_index_with_probs",
            "moe_unpermute",
        )
    },
    "transformer_engine.pytorch.router": dict.fromkeys(
        ("fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss", "fused_topk_with_score_function")
    ),
    "transformer_engine.pytorch.tensor": {"QuantizedTensor": type("QuantizedTensor", (), {})},
    "transformer_engine.pytorch.float8_tensor": {"Float8Tensor": type("Float8Tensor", (), {})},
    "fused_weight_gradient_mlp_cuda": {
        "wgrad_gemm_accum_fp16": fused_kernels.nothing,
        "wgrad_gemm_accum_fp32": fused_kernels.nothing,
    },
    "scaled_masked_softmax_cuda": {
        "get_batch_per_block": fused_kernels.get_batch_per_block,
        "forward": fused_kernels.softmax_forward,
        "backward": fused_kernels.softmax_backward,
    },
    "scaled_upper_triang_masked_softmax_cuda": {
        "forward": fused_kernels.softmax_forward,
        "backward": fused_kernels.softmax_backward,
    },
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
