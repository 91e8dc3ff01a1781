"""torch and megatron-core without CUDA: what names a CUDA device means the CPU, `nccl` means gloo, kernels are off.

torch's Adam stands where a fused Adam stands on a GPU; the distributed optimizer saves and loads its state otherwise.
"""

import copy
import dataclasses
import functools
import importlib.util
import inspect
import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed
import torch.utils.data

from pipette_patches.cpu.collectives import COLLECTIVES
from pipette_patches.replacements import Replacement, in_module, instead
from pipette_patches.without_cuda import torch_without_cuda

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


def _norm_for_sequence_parallel(original: Callable[..., Any]) -> Any:
    """Give torch's norms to sequence-parallel models: mark their weights, for Megatron to sum the gradients over TP."""

    @functools.wraps(original)
    def make(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = original(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    return staticmethod(make)


def _uncompiled(_original: object) -> Callable[[Any], Any]:
    """Run fused functions as they are written: compiling them takes longer than a smoke run, and a C++ compiler."""
    return lambda function=None, **_options: function if function is not None else _uncompiled(None)


def without_fp8(original: Callable[..., None]) -> Callable[..., None]:
    """Recompute without asking Transformer Engine for its fp8 state: the original asks whenever it is told `False`."""

    @functools.wraps(original)
    def make(checkpoint: Any, *args: Any, **kwargs: Any) -> None:
        original(checkpoint, *args, **kwargs)
        checkpoint.fp8 = False

    return make


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


def _of_latent_attention(original: Callable[..., None]) -> Callable[..., None]:
    """Build the local attention core for heads whose values are not as wide as `kv_channels`, as latent attention asks.

    The original takes no widths (core_v0.16.1). All that it works out from `kv_channels` are the scale of the scores,
    which latent attention gives it, and the width of the context, which is set here.
    """
    if "v_channels" in inspect.signature(original).parameters:
        return original

    @functools.wraps(original)
    def make(
        core: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any
    ) -> None:
        if v_channels is not None and kwargs.get("softmax_scale") is None:
            kwargs["softmax_scale"] = (k_channels or v_channels) ** -0.5
        original(core, *args, **kwargs)
        if v_channels is not None:
            core.hidden_size_per_partition = v_channels * core.num_attention_heads_per_partition

    return make


def _made_on_cpu(original: Callable[..., None]) -> Callable[..., None]:
    """Make a table of angles on the CPU: the original makes CUDA the default device meanwhile."""

    @functools.wraps(original)
    def make(embedding: Any, *args: Any, **kwargs: Any) -> None:
        original(embedding, *args, **(kwargs | {"use_cpu_initialization": True}))

    return make


def _a_class(original: Any) -> Any:
    """Stand for a class of Transformer Engine where there is none: nothing is an instance of it."""
    return original if isinstance(original, type) else type("Absent", (), {})


def _has_engine(_original: bool) -> bool:
    """Say whether Transformer Engine itself is there."""
    return importlib.util.find_spec("transformer_engine") is not None


def hide_rng_warning(record: logging.LogRecord) -> bool:
    """Keep every log record but one warning: CPU and CUDA share a generator here, so the CPU's state does change."""
    return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


_RANDOM = "megatron.core.tensor_parallel.random"
RANDOM_LOGGER = logging.getLogger(_RANDOM)

WITHOUT_ENGINE = (
    *in_module("megatron.core.transformer.torch_norm", {"WrappedTorchNorm.__new__": _norm_for_sequence_parallel}),
    # Without Transformer Engine the name is used and not defined.
    Replacement(
        module="megatron.core.transformer.moe.moe_utils",
        path="te_general_gemm",
        make=instead(None),
        may_be_absent=True,
        versions="<0.17",
    ),
    *in_module(
        "megatron.core.transformer.dot_product_attention", {"DotProductAttention.__init__": _of_latent_attention}
    ),
    # Megatron-FSDP asks under TP which modules are of this class, which is none without the engine.
    Replacement(
        module="megatron.core.distributed.fsdp.mcore_fsdp_adapter",
        path="TELinear",
        make=_a_class,
        versions=">=0.16,<0.18",
    ),
    # Prediction depths ask from 0.20 on whether a layer is of these classes.
    *(
        Replacement(
            module="megatron.core.tensor_parallel.inference_layers", path=path, make=_a_class, versions=">=0.20"
        )
        for path in ("InferenceColumnParallelLinear", "InferenceLayerNormColumnParallelLinear")
    ),
    # It is true wherever Megatron's own wrappers are, and their classes are then None.
    Replacement(
        module="megatron.core.transformer.multi_latent_attention", path="HAVE_TE", make=_has_engine, versions="<0.17"
    ),
)
"""What local layers need where neither Transformer Engine nor Apex is, on a GPU too."""
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
