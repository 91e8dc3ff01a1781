"""The patch `cpu_backend`: train with stock megatron-core and NVIDIA's own scripts on CPUs over gloo.

The patch is meant for smoke tests. The speed of a patched job says nothing about the speed on GPUs. The CPU replaces
CUDA devices, gloo replaces `nccl`, and CUDA kernels are off. torch's Adam replaces the fused Adam, also in saved
optimizer states. Megatron itself refuses context parallelism, fp8, fp4, CUDA graphs and Transformer Engine on a CPU.
"""

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import logging
import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed
import torch.utils.data
from packaging.specifiers import SpecifierSet

from pipette_patches.replacements import Patch, Replacement, in_module, instead, nothing, wrapping
from pipette_patches.without_cuda import LOCAL_LAYERS, WITHOUT_ENGINE, torch_without_cuda, without_fp8

logger = logging.getLogger(__name__)

EMULATED_BF16 = "this CPU has no bf16 instructions and emulates them: without --bf16 a step is several times faster"
"""Warning for a bf16 job on a CPU without bf16 instructions."""


@functools.cache
def say_once(sentence: str) -> None:
    """Log a warning once for the whole job: RANK 0 logs each sentence the first time, other ranks log nothing."""
    if os.environ.get("RANK", "0") == "0":
        logger.warning("cpu_backend: %s", sentence)


def _with_arguments(**arguments: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a value for `Replacement.make`: the replacement calls the original with these keyword arguments."""
    return wrapping(lambda original, *args, **kwargs: original(*args, **(kwargs | arguments)))


# Collectives, process groups and random numbers of torch.


def _alone(original: Callable[..., Any]) -> Callable[..., Any]:
    """Skip all-reduces and broadcasts of a group with one rank.

    Without TP, Megatron's loss still all-reduces three times, and Megatron's trainer broadcasts up to seven tensors of
    each batch. gloo would run each call on another thread: up to 3 ms a call if the process has 0.4 of a core.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        if not given.get("async_op") and torch.distributed.get_world_size(given.get("group")) == 1:
            return None
        return original(*args, **kwargs)

    return collective


def _one_by_one(original: Callable[..., Any]) -> Callable[..., Any]:
    """Start the asynchronous gathers of a coalescing block one by one.

    Two coalesced gathers that run at the same time in one gloo group write over freed memory (torch 2.13).
    Megatron-FSDP starts the gather of the next layers' weights while it waits for the weights of a layer.
    """

    @contextlib.contextmanager
    def coalesce(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Any]:
        gathers = []
        with original(group, device, async_ops) as manager:
            yield manager
            group = group or torch.distributed.group.WORLD
            recorded = torch.distributed.distributed_c10d._world.pg_coalesce_state[group]
            # All recorded calls of a block are of one kind, and only gathers have no reduction operator.
            if async_ops and recorded and recorded[0].redop is None:
                gathers, recorded[:] = recorded[:], []
        for gather in gathers:
            manager.append(gather.op(gather.dst_tensor, gather.tensor, group=group, async_op=True))

    return coalesce


def _gloo(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make a gloo process group instead of an NCCL process group, without NCCL's options."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        if "nccl" in str(given.get("backend")):
            say_once("backend nccl -> gloo")
            given["backend"] = "gloo"
            given.pop("pg_options", None)
        given.pop("device_id", None)
        return original(**given)

    return make


def _mesh_of_cpus(original: Callable[..., Any]) -> Any:
    """Make a device mesh of CPUs for Megatron-FSDP, whose shards lie in CPU memory."""

    def from_group(group: Any, device_type: str, *args: Any, **kwargs: Any) -> Any:
        return original(group, device_type.replace("cuda", "cpu"), *args, **kwargs)

    return staticmethod(from_group)


def _rng_state(*_args: object, **_kwargs: object) -> torch.Tensor:
    """Return the state of the CPU's random generator, which also replaces CUDA's generator."""
    return torch.default_generator.get_state()


def _set_rng_state(state: torch.Tensor, *_args: object, **_kwargs: object) -> None:
    torch.default_generator.set_state(state)


# Properties with the compute capability of the newest GPUs. For older GPUs, Megatron requires
# CUDA_DEVICE_MAX_CONNECTIONS, which has no effect on a CPU.
_PROPERTIES = SimpleNamespace(name="CPU", major=10, minor=0, multi_processor_count=os.cpu_count(), total_memory=0)

TORCH = (
    *torch_without_cuda(
        torch.device("cpu"),
        properties=_PROPERTIES,
        functions={
            # Each process of a node has its own device number, as on a GPU machine.
            "current_device": lambda *_: int(os.environ.get("LOCAL_RANK", "0")),
            "device_count": lambda *_: int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            "manual_seed": torch.default_generator.manual_seed,
            "get_rng_state": _rng_state,
            "random.get_rng_state": _rng_state,
            "set_rng_state": _set_rng_state,
        },
    ),
    *in_module(
        "torch.distributed",
        {
            "init_process_group": _gloo,
            "new_group": _gloo,
            "all_reduce": _alone,
            "broadcast": _alone,
            "_coalescing_manager": _one_by_one,
        },
    ),
    *in_module("torch.distributed.device_mesh", {"DeviceMesh.from_group": _mesh_of_cpus}),
)
"""Replacements in torch."""

# Fields of TransformerConfig that need a CUDA kernel or Transformer Engine, and the value of each field on a CPU. Only
# switching off fp8 or fp4 changes the results of a training.
_WITHOUT_CUDA: dict[str, bool | None] = {
    **dict.fromkeys(
        """
        apply_rope_fusion defer_embedding_wgrad_compute gradient_accumulation_fusion masked_softmax_fusion
        memory_efficient_layer_norm moe_permute_fusion moe_router_fusion persist_layer_norm tp_comm_overlap
        """.split(),
        False,
    ),
    **dict.fromkeys(("fp4", "fp8"), None),
}


@functools.cache
def has_bf16_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether the CPU multiplies bf16 numbers itself (x86: AVX512-BF16 or AMX; Arm: bf16)."""
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(cpuinfo.read_text(encoding="utf-8").split())


@wrapping
def _without_kernels(original: Callable[..., None], config: Any) -> None:
    """Switch off the fields that need CUDA kernels before a configuration checks its fields."""
    off = {name: value for name, value in _WITHOUT_CUDA.items() if getattr(config, name, value) != value}
    if getattr(config, "num_moe_experts", None) and config.bias_activation_fusion and not config.gated_linear_unit:
        # Grouped experts need CUDA, and experts that are computed one by one refuse bias_activation_fusion.
        off["bias_activation_fusion"] = False
    for name, value in off.items():
        setattr(config, name, value)
    if off:
        say_once(f"switched off, as they need CUDA kernels: {', '.join(off)}")
    if config.params_dtype == torch.bfloat16 and not has_bf16_instructions():
        say_once(EMULATED_BF16)
    # gloo may still read a tensor when interleaved stages free the tensor: the receiver would get wrong values.
    config.deallocate_pipeline_outputs = False
    original(config)


def _uncompiled(_original: object) -> Callable[[Any], Any]:
    """Run fused functions uncompiled, because compiling takes longer than a smoke test and needs a C++ compiler."""
    return lambda function=None, **_options: function if function is not None else _uncompiled(None)


@wrapping
def _scaled_beforehand(original: Callable[..., Any], gradients: Any, factor: float | None, config: Any) -> Any:
    """Let Megatron-FSDP scale gradients before a reduction, because only NCCL can scale while reducing gradients."""
    return original(gradients, factor, dataclasses.replace(config, gradient_reduce_div_fusion=False))


@wrapping
def _split_sizes_as_numbers(
    original: Callable[..., Any], tensor: Any, as_numpy: bool = False, *args: Any, **kwargs: Any
) -> Any:
    """Return the split sizes of an all-to-all as numbers, as Megatron's function does for tensors on a GPU."""
    moved = original(tensor, as_numpy, *args, **kwargs)
    return moved.numpy() if as_numpy and hasattr(moved, "numpy") else moved


def _single_experts(_provider: object, _grouped: bool, *more: Any) -> Any:
    """Compute experts one by one. Specs of hybrid models request grouped experts, which need a CUDA kernel."""
    local = importlib.import_module("megatron.core.models.backends").LocalSpecProvider()
    return local.grouped_mlp_modules(False, *more)


@wrapping
def _with_first_state(original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Make Adam's state before the first step, because Megatron reads the step counter before loading Adam's state."""
    adam = optimizer.optimizer
    if isinstance(adam, (torch.optim.Adam, torch.optim.AdamW)):
        for parameter in (each for group in adam.param_groups for each in group["params"]):
            if not adam.state[parameter]:
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                adam.state[parameter] = {"step": torch.tensor(0.0), **moments}
    return original(optimizer, *args, **kwargs)


@wrapping
def _with_own_steps(original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Give each parameter its own step counter after loading. A shared counter would advance once per parameter."""
    done = original(optimizer, *args, **kwargs)
    for state in optimizer.optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].detach().clone()
    return done


@wrapping
def _keeping_steps(original: Callable[..., None], optimizer: Any, model_param: Any, tensors: dict[str, Any]) -> None:
    """Keep the parameter groups' step counter, because the step counter of a loaded shard may be missing or old."""
    group, order = optimizer.model_param_group_index_map[model_param]
    state = optimizer.optimizer.state[optimizer.optimizer.param_groups[group]["params"][order]]
    original(optimizer, model_param, tensors | {"step": state["step"]} if "step" in state else tensors)


_RANDOM = "megatron.core.tensor_parallel.random"
CORE = (
    *WITHOUT_ENGINE,
    *(() if importlib.util.find_spec("transformer_engine") else LOCAL_LAYERS),
    *in_module("megatron.core.model_parallel_config", {"ModelParallelConfig.__post_init__": _without_kernels}),
    *in_module(
        _RANDOM,
        {
            "_get_cuda_rng_state": instead(_rng_state),
            "_set_cuda_rng_state": instead(_set_rng_state),
            "CheckpointWithoutOutput.__init__": without_fp8,
        },
    ),
    *in_module(
        "megatron.core.extensions.transformer_engine_spec_provider",
        {"TESpecProvider.grouped_mlp_modules": instead(_single_experts)},
    ),
    # Megatron's rotary embedding makes CUDA the default device to compute the table of angles.
    *in_module(
        "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding",
        {"YarnRotaryEmbedding.__init__": _with_arguments(use_cpu_initialization=True)},
    ),
    *in_module("megatron.core.transformer.moe.token_dispatcher", {"maybe_move_tensor_to_cpu": _split_sizes_as_numbers}),
    *in_module("megatron.core.jit", {"jit_fuser": _uncompiled}),
    *in_module("megatron.core.parallel_state", {"get_nccl_options": instead(lambda *_of_nccl: None)}),
    *in_module(
        "megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer",
        {"gradient_reduce_preprocessing": _scaled_beforehand},
    ),
    *in_module(
        "megatron.core.optimizer.distrib_optimizer",
        {
            "DistributedOptimizer.state_dict": _with_first_state,
            "DistributedOptimizer.load_state_dict": _with_own_steps,
            "DistributedOptimizer._set_main_param_and_optimizer_states": _keeping_steps,
        },
    ),
)
"""Replacements in megatron-core."""

# Megatron-LM's training programs: their flags, their check for CUDA, and the kernels that they compile.

# Flags by their argparse `dest`, and the values that run on a CPU. The results of a training change only for a job with
# fp8, fp4 or reduced optimizer precision.
_FLAGS_ON_CPU: dict[str, object] = {
    "distributed_backend": "gloo",
    "transformer_impl": "local",
    "no_persist_layer_norm": True,
    "cuda_graph_impl": "none",
    **_WITHOUT_CUDA,
    **dict.fromkeys(
        """
        moe_grouped_gemm fp8_param_gather use_precision_aware_optimizer optimizer_cpu_offload te_rng_tracker
        enable_cuda_graph external_cuda_graph nccl_ub use_sharp
        """.split(),
        False,
    ),
}


@wrapping
def _for_cpu(original: Callable[..., Any], args: Any, *more: Any, **kwargs: Any) -> Any:
    """Change the flags that need CUDA before Megatron checks the flags, with one warning for each changed flag."""
    for name, value in _FLAGS_ON_CPU.items():
        asked = getattr(args, name, value)
        if asked != value:
            say_once(f"{name} {asked} -> {value}")
            setattr(args, name, value)
    return original(args, *more, **kwargs)


@wrapping
def _compile_for_this_python(original: Callable[[], None]) -> None:
    """Compile the dataset helpers once for the running Python. Megatron's makefile uses the first Python on PATH."""
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


_allow_no_cuda = _with_arguments(allow_no_cuda=True)
TRAINING = (
    Replacement(module="megatron.training.arguments", path="validate_args", make=_for_cpu),
    Replacement(module="megatron.training.initialize", path="validate_args", make=_for_cpu, versions="<0.18"),
    Replacement(module="megatron.training.initialize", path="initialize_megatron", make=_allow_no_cuda),
    Replacement(module="megatron.training.training", path="initialize_megatron", make=_allow_no_cuda),
    Replacement(module="megatron.core.datasets.utils", path="compile_helpers", make=_compile_for_this_python),
    Replacement(module="megatron.legacy.fused_kernels", path="load", make=nothing, versions="<0.17"),
)
"""Replacements in Megatron-LM's training programs."""


def _replacements() -> tuple[Replacement, ...]:
    # CPU and CUDA share one generator under this patch, so drop the warning that the CPU's random state changed.
    warning = "CPU RNG state changed within GPU RNG context"
    logging.getLogger(_RANDOM).addFilter(lambda record: warning not in record.getMessage())
    return (*TORCH, *CORE, *TRAINING)


PATCH = Patch(name="cpu_backend", supports=SpecifierSet(">=0.16,<0.21"), replacements=_replacements)
