"""Collectives over gloo where what Megatron expects of NCCL's would be slow or go wrong."""

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

from pipette_patches.replacements import Replacement, Replacements, in_module, instead, megatron_core_version, nothing
from pipette_patches.without_cuda import WITHOUT_ENGINE, torch_without_cuda, without_fp8


def _alone(original: Callable[..., Any]) -> Callable[..., Any]:
    """Do nothing where one rank all-reduces or broadcasts.

    Without TP Megatron's loss all-reduces three times, and its trainer broadcasts up to seven tensors of each batch.
    gloo would hand each to another thread and wait for that: up to 3 ms where a process has 0.4 of a core.
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
    """Start gathers one by one that nobody waits for at once.

    Two coalesced gathers under way in one group of gloo's write over freed memory (torch 2.13), and Megatron-FSDP
    gathers the next layers' weights while it waits for a layer's own.
    """

    @contextlib.contextmanager
    def coalesce(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Any]:
        gathers = []
        with original(group, device, async_ops) as manager:
            yield manager
            group = group or torch.distributed.group.WORLD
            recorded = torch.distributed.distributed_c10d._world.pg_coalesce_state[group]
            # Of the recorded calls, all of one kind, those of gathers alone reduce nothing.
            if async_ops and recorded and recorded[0].redop is None:
                gathers, recorded[:] = recorded[:], []
        for gather in gathers:
            manager.append(gather.op(gather.dst_tensor, gather.tensor, group=group, async_op=True))

    return coalesce


COLLECTIVES = in_module(
    "torch.distributed", {"all_reduce": _alone, "broadcast": _alone, "_coalescing_manager": _one_by_one}
)
"""Replacements in torch."""


logger = logging.getLogger(__name__)

EMULATED_BF16 = "this CPU has no bf16 instructions and emulates them: without --bf16 a step is several times faster"
"""Warning for a bf16 job."""


@functools.cache
def say_once(sentence: str) -> None:
    """Warn once for the whole job: only rank 0 warns, and only the first time."""
    if os.environ.get("RANK", "0") == "0":
        logger.warning("cpu_backend: %s", sentence)


@functools.cache
def has_bf16_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether the CPU multiplies bf16 numbers itself (x86: AVX512-BF16 or AMX; Arm: bf16)."""
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(cpuinfo.read_text(encoding="utf-8").split())


def rng_state(*_args: object, **_kwargs: object) -> torch.Tensor:
    """The state of the CPU's generator, which CUDA's random numbers come from too."""
    return torch.default_generator.get_state()


def set_rng_state(state: torch.Tensor, *_args: object, **_kwargs: object) -> None:
    """Set the state of the CPU's generator."""
    torch.default_generator.set_state(state)


def _gloo(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make a gloo group where an NCCL group was asked for, and without NCCL's own options."""
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
    """Make a mesh of CPUs where Megatron's FSDP asks for one of CUDA devices: tensors of its shards lie there."""

    @functools.wraps(original)
    def from_group(group: Any, device_type: str, *args: Any, **kwargs: Any) -> Any:
        return original(group, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    return staticmethod(from_group)


def _scaled_beforehand(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let Megatron-FSDP scale gradients before they are reduced: only NCCL scales them while it sums."""

    @functools.wraps(original)
    def prepare(gradients: Any, factor: float | None, config: Any) -> Any:
        return original(gradients, factor, dataclasses.replace(config, gradient_reduce_div_fusion=False))

    return prepare


# The newest generation's capability: of older ones Megatron demands a CUDA_DEVICE_MAX_CONNECTIONS, which has no effect
# here.
_PROPERTIES = SimpleNamespace(name="CPU", major=10, minor=0, multi_processor_count=os.cpu_count(), total_memory=0)

TORCH = (
    *torch_without_cuda(
        torch.device("cpu"),
        properties=_PROPERTIES,
        functions={
            # One device for each process of this node, as on a GPU machine.
            "current_device": lambda *_: int(os.environ.get("LOCAL_RANK", "0")),
            "device_count": lambda *_: int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            "manual_seed": torch.default_generator.manual_seed,
            "get_rng_state": rng_state,
            "random.get_rng_state": rng_state,
            "set_rng_state": set_rng_state,
        },
    ),
    *in_module("torch.distributed", {"init_process_group": _gloo, "new_group": _gloo}),
    *COLLECTIVES,
    *in_module("torch.distributed.device_mesh", {"DeviceMesh.from_group": _mesh_of_cpus}),
)
"""Replacements in torch."""
# What needs a CUDA kernel or Transformer Engine, and how to do without. Only fp8 and fp4 change what is computed.
_WITHOUT_CUDA = {
    "apply_rope_fusion": False,
    "defer_embedding_wgrad_compute": False,
    "fp4": None,
    "fp8": None,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "memory_efficient_layer_norm": False,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "persist_layer_norm": False,
    "tp_comm_overlap": False,
}


def _without_kernels(original: Callable[..., None]) -> Callable[..., None]:
    """Switch off what needs CUDA kernels before a configuration checks itself."""

    @functools.wraps(original)
    def check(config: Any) -> None:
        off = {name: value for name, value in _WITHOUT_CUDA.items() if getattr(config, name, value) != value}
        if getattr(config, "num_moe_experts", None) and config.bias_activation_fusion and not config.gated_linear_unit:
            # Experts computed one by one, as on a CPU, refuse it; only grouped ones, which need CUDA, go without.
            off["bias_activation_fusion"] = False
        for name, value in off.items():
            setattr(config, name, value)
        if off:
            say_once(f"switched off, as they need CUDA kernels: {', '.join(off)}")
        if config.params_dtype == torch.bfloat16 and not has_bf16_instructions():
            say_once(EMULATED_BF16)
        # gloo still reads a sent tensor when interleaved stages free it: the receiver would get garbage.
        config.deallocate_pipeline_outputs = False
        original(config)

    return check


def _uncompiled(_original: object) -> Callable[[Any], Any]:
    """Run fused functions as they are written: compiling them takes longer than a smoke run, and a C++ compiler."""
    return lambda function=None, **_options: function if function is not None else _uncompiled(None)


def _split_sizes_as_numbers(original: Callable[..., Any]) -> Callable[..., Any]:
    """Give an all-to-all its split sizes as numbers, which the original does for tensors that come from a GPU."""

    @functools.wraps(original)
    def move(tensor: Any, as_numpy: bool = False, *args: Any, **kwargs: Any) -> Any:
        moved = original(tensor, as_numpy, *args, **kwargs)
        return moved.numpy() if as_numpy and hasattr(moved, "numpy") else moved

    return move


def _with_first_state(original: Callable[..., Any]) -> Callable[..., Any]:
    """Give Adam its state before the first step: the original counts the steps in it, even to load a checkpoint."""

    @functools.wraps(original)
    def state_dict(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        adam = optimizer.optimizer
        if isinstance(adam, (torch.optim.Adam, torch.optim.AdamW)):
            for parameter in (each for group in adam.param_groups for each in group["params"]):
                if not adam.state[parameter]:
                    moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                    adam.state[parameter] = {"step": torch.tensor(0.0), **moments}
        return original(optimizer, *args, **kwargs)

    return state_dict


def _with_own_steps(original: Callable[..., Any]) -> Callable[..., Any]:
    """Give each parameter a step counter of its own: the original makes one for all, and each advances it."""

    @functools.wraps(original)
    def load_state_dict(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        done = original(optimizer, *args, **kwargs)
        for state in optimizer.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].detach().clone()
        return done

    return load_state_dict


def _keeping_steps(original: Callable[..., None]) -> Callable[..., None]:
    """Keep the step counter that was loaded with the parameter groups: a shard's state has none, or a stale one."""

    @functools.wraps(original)
    def set_states(optimizer: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        group, order = optimizer.model_param_group_index_map[model_param]
        state = optimizer.optimizer.state[optimizer.optimizer.param_groups[group]["params"][order]]
        original(optimizer, model_param, tensors | {"step": state["step"]} if "step" in state else tensors)

    return set_states


def _made_on_cpu(original: Callable[..., None]) -> Callable[..., None]:
    """Make a table of angles on the CPU: the original makes CUDA the default device meanwhile."""

    @functools.wraps(original)
    def make(embedding: Any, *args: Any, **kwargs: Any) -> None:
        original(embedding, *args, **(kwargs | {"use_cpu_initialization": True}))

    return make


def hide_rng_warning(record: logging.LogRecord) -> bool:
    """Keep every log record but one warning: CPU and CUDA share a generator here, so the CPU's state does change."""
    return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


_RANDOM = "megatron.core.tensor_parallel.random"
RANDOM_LOGGER = logging.getLogger(_RANDOM)

CORE = (
    *WITHOUT_ENGINE,
    *in_module("megatron.core.model_parallel_config", {"ModelParallelConfig.__post_init__": _without_kernels}),
    *in_module(
        _RANDOM,
        {
            "_get_cuda_rng_state": instead(rng_state),
            "_set_cuda_rng_state": instead(set_rng_state),
            "CheckpointWithoutOutput.__init__": without_fp8,
        },
    ),
    *in_module(
        "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding",
        {"YarnRotaryEmbedding.__init__": _made_on_cpu},
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
