"""Megatron-LM's own training programs without CUDA: their flags, their CUDA check and their fused kernels."""

import functools
import importlib
import importlib.util
import os
import sysconfig
from collections.abc import Callable
from typing import Any

from pipette_patches.cpu.torch_replacements import say_once
from pipette_patches.replacements import Replacement, nothing

# dest of a flag -> the value with which it runs on a CPU. Other kernels compute the same, except where fp8, fp4 or a
# reduced optimizer precision was asked for.
_ON_CPU = {
    "distributed_backend": "gloo",
    "transformer_impl": "local",
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "no_persist_layer_norm": True,
    "apply_rope_fusion": False,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "tp_comm_overlap": False,
    "fp8": None,
    "fp4": None,
    "fp8_param_gather": False,
    "use_precision_aware_optimizer": False,
    "optimizer_cpu_offload": False,
    "te_rng_tracker": False,
    "cuda_graph_impl": "none",
    "enable_cuda_graph": False,
    "external_cuda_graph": False,
    "nccl_ub": False,
    "use_sharp": False,
}


def _for_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """Change the flags that need CUDA, one line of warning for each, before Megatron checks them."""

    @functools.wraps(original)
    def validate(args: Any, *more: Any, **kwargs: Any) -> Any:
        for name, value in _ON_CPU.items():
            asked = getattr(args, name, value)
            if asked != value:
                say_once(f"{name} {asked} -> {value}")
                setattr(args, name, value)
        return original(args, *more, **kwargs)

    return validate


def _allow_no_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    """Start without CUDA, by Megatron's own switch."""

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **(kwargs | {"allow_no_cuda": True}))

    return initialize


def _compile_for_this_python(original: Callable[[], None]) -> Callable[[], None]:
    """Compile the dataset helpers once, for the running Python; Megatron's makefile asks whichever is first on PATH."""

    @functools.wraps(original)
    def compile_helpers() -> None:
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
            return
        include = importlib.import_module("pybind11").get_include()
        settings = {
            "LIBEXT": sysconfig.get_config_var("EXT_SUFFIX"),
            "CPPFLAGS": f"-I{include}\\ -I{sysconfig.get_path('include')}",
        }
        before = os.environ.get("MAKEFLAGS")
        os.environ["MAKEFLAGS"] = f"{before or ''} -- " + " ".join(
            f"{name}={value}" for name, value in settings.items()
        )
        try:
            original()
        finally:
            os.environ.pop("MAKEFLAGS")
            if before is not None:
                os.environ["MAKEFLAGS"] = before
        importlib.invalidate_caches()

    return compile_helpers


TRAINING = (
    Replacement(module="megatron.training.arguments", path="validate_args", make=_for_cpu),
    Replacement(module="megatron.training.initialize", path="validate_args", make=_for_cpu, versions="<0.18"),
    Replacement(module="megatron.training.initialize", path="initialize_megatron", make=_allow_no_cuda),
    Replacement(module="megatron.training.training", path="initialize_megatron", make=_allow_no_cuda),
    Replacement(module="megatron.core.datasets.utils", path="compile_helpers", make=_compile_for_this_python),
    Replacement(module="megatron.legacy.fused_kernels", path="load", make=nothing, versions="<0.17"),
)
