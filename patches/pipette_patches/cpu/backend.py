"""Train stock megatron-core, and NVIDIA's own training scripts, on CPUs over gloo: a smoke test that CI can afford.

Without CUDA kernels the numbers are those of the unfused functions; speed means nothing here. Not possible on a CPU,
and refused by Megatron itself: context parallelism, fp8 and fp4, CUDA graphs, anything of Transformer Engine.

Megatron-LM's training programs need three things more: other flags, no CUDA check, and no fused kernels to compile.
"""

import functools
import importlib
import importlib.util
import os
import sysconfig
from collections.abc import Callable
from typing import Any

from packaging.specifiers import SpecifierSet

from pipette_patches.cpu.cpu_replacements import CORE, RANDOM_LOGGER, TORCH, hide_rng_warning, say_once
from pipette_patches.registry import megatron_core_version
from pipette_patches.replacements import Replacement, Replacements, nothing

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
        before = os.environ.get("MAKEFLAGS")
        flags = f"LIBEXT={sysconfig.get_config_var('EXT_SUFFIX')} "
        flags += f"CPPFLAGS=-I{include}\\ -I{sysconfig.get_path('include')}"
        os.environ["MAKEFLAGS"] = f"{before or ''} -- {flags}"
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


class CpuBackend:
    """What names a CUDA device means the CPU, and what needs a CUDA kernel is off."""

    name = "cpu_backend"
    supports = SpecifierSet(">=0.14,<0.21")

    def __init__(self) -> None:
        self._replacements = Replacements(())

    def apply(self) -> None:
        """Replace torch's CUDA calls now, and Megatron's own as its modules are imported."""
        version = megatron_core_version()
        self._replacements = Replacements([r for r in (*TORCH, *CORE, *TRAINING) if r.fits(version)])
        self._replacements.apply()
        RANDOM_LOGGER.addFilter(hide_rng_warning)

    def revert(self) -> None:
        """Put every original object back."""
        self._replacements.revert()
        RANDOM_LOGGER.removeFilter(hide_rng_warning)


PATCH = CpuBackend()
