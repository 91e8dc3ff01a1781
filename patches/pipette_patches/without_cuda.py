"""Replacements for torch without CUDA and for megatron-core without Transformer Engine.

Another device stands for every CUDA device: the CPU in the patch `cpu_backend`, torch's `meta` device in the tests'
oracle. No call waits.
"""

import contextlib
import copy
import functools
import importlib
import importlib.util
import inspect
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from pipette_patches.replacements import Replacement, answer, in_module, instead, nothing, wrapping

# fmt: off
_FACTORIES = (
    "arange", "as_tensor", "asarray", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace",
    "ones", "ones_like", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm",
    "scalar_tensor", "tensor", "zeros", "zeros_like",
    "Tensor.new_empty", "Tensor.new_full", "Tensor.new_ones", "Tensor.new_tensor", "Tensor.new_zeros",
)
_WITHOUT_EFFECT = (
    "set_device", "synchronize", "empty_cache", "ipc_collect", "set_stream", "reset_peak_memory_stats",
    "nvtx.range_push", "nvtx.range_pop", "nvtx.mark",
)
# fmt: on


def elsewhere(device: Any, target: torch.device) -> Any:
    """Return `target` if `device` names a CUDA device (`cuda`, `cuda:1`, 1), otherwise `device`."""
    if isinstance(device, torch.device):
        return target if device.type == "cuda" else device
    if isinstance(device, str):
        return target if device.startswith("cuda") else device
    return target if isinstance(device, int) and not isinstance(device, bool) else device


def _is_done(*_args: object) -> bool:
    return True


class Event:
    """A CUDA event on a device that finishes each operation before the call returns."""

    wait = synchronize = query = _is_done

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        self._recorded_s = 0.0

    def record(self, _stream: object = None) -> None:
        """Store the current time."""
        self._recorded_s = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        """Return the milliseconds between this event and `end`."""
        return (end._recorded_s - self._recorded_s) * 1e3


class Stream(contextlib.AbstractContextManager["Stream"]):
    """A CUDA stream on a device that finishes work before the call returns."""

    wait_stream = wait_event = synchronize = query = _is_done

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        self.device = torch.device("cpu")

    def __exit__(self, *_error: object) -> None:
        """Do nothing at the end of a block."""

    def record_event(self, event: Event | None = None) -> Event:
        """Record the event, or a new event if `event` is None. Return the recorded event."""
        event = event or Event()
        event.record(self)
        return event


class FinishedWork:
    """The handle of a collective that has finished before its call returns."""

    wait = is_completed = _is_done


def no_coalescing(*_args: Any, **_kwargs: Any) -> contextlib.AbstractContextManager[FinishedWork]:
    """Replace torch's coalescing manager: send each message of the block alone."""
    return contextlib.nullcontext(FinishedWork())


def _on_target(original: Callable[..., Any], target: torch.device) -> Callable[..., Any]:
    """Make tensors on `target` instead of a CUDA device. Ignore `pin_memory`, because only CUDA can pin memory."""

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = elsewhere(kwargs["device"], target)
        kwargs.pop("pin_memory", None)
        return original(*args, **kwargs)

    return make


def _to_target(original: Callable[..., Any], target: torch.device) -> Callable[..., Any]:
    """Move tensors to `target` instead of a CUDA device. A tensor that leaves the meta device becomes zeros."""

    @functools.wraps(original)
    def to(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = elsewhere(kwargs["device"], target)
        args = (*(elsewhere(arg, target) for arg in args[:1]), *args[1:])
        device = kwargs.get("device", args[0] if args else None)
        if target.type == tensor.device.type == "meta" and str(device) == "cpu":
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        return original(tensor, *args, **kwargs)

    return to


@wrapping
def _type_as_on_cuda(original: Callable[..., Any], tensor: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Let `Tensor.type` return and accept CUDA's names (`torch.cuda.FloatTensor`), because optimizers compare names."""
    if dtype is None:
        return str(original(tensor)).replace("torch.meta.", "torch.", 1).replace("torch.", "torch.cuda.", 1)
    if isinstance(dtype, str) and dtype.startswith("torch.cuda."):
        dtype = getattr(torch, dtype.removeprefix("torch.cuda.")).dtype
    return original(tensor, dtype, *args, **kwargs)


def torch_without_cuda(
    target: torch.device, *, properties: SimpleNamespace, functions: dict[str, Callable[..., Any]]
) -> tuple[Replacement, ...]:
    """Return replacements of torch.cuda and of the functions that make and move tensors.

    `target` replaces every CUDA device, and `properties` is the result of `get_device_properties`. `functions` are more
    functions of `torch.cuda` by name.
    """
    stream = answer(Stream())
    return (
        *in_module(
            "torch.cuda",
            {
                "is_available": answer(False),
                "get_device_properties": answer(properties),
                "get_device_capability": answer((properties.major, properties.minor)),
                **dict.fromkeys(_WITHOUT_EFFECT, nothing),
                "Stream": instead(Stream),
                "Event": instead(Event),
                **dict.fromkeys(("stream", "current_stream", "default_stream"), stream),
                **{path: instead(function) for path, function in functions.items()},
            },
        ),
        *in_module(
            "torch",
            {
                **dict.fromkeys(_FACTORIES, functools.partial(_on_target, target=target)),
                "Tensor.to": functools.partial(_to_target, target=target),
                "Tensor.type": _type_as_on_cuda,
                "Tensor.cuda": instead(lambda tensor, *_, **__: tensor.to(target) if tensor.is_cpu else tensor),
                "Tensor.pin_memory": instead(lambda tensor, *_, **__: tensor),
                "Tensor.record_stream": nothing,
            },
        ),
    )


@wrapping
def without_fp8(original: Callable[..., None], checkpoint: Any, *args: Any, **kwargs: Any) -> None:
    """Set `fp8` of a recomputation to False, so that the recomputation reads no fp8 state of Transformer Engine."""
    original(checkpoint, *args, **kwargs)
    checkpoint.fp8 = False


def _norm_for_sequence_parallel(original: Callable[..., Any]) -> Any:
    """Mark the weights of torch's norms under sequence parallelism, because Megatron sums marked gradients over TP."""

    @functools.wraps(original)
    def make(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = original(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    return staticmethod(make)


def _with_head_widths(original: Callable[..., None]) -> Callable[..., None]:
    """Let the local attention core accept the two head widths of latent attention.

    Megatron's local core has no arguments for head widths (core_v0.16.1). The local core derives two values from
    `kv_channels`. Latent attention passes the scale of the scores, and this wrapper sets the width of the context.
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


def _a_class(original: Any) -> Any:
    """Return an unused class instead of None if Transformer Engine is missing, because `isinstance` needs a class."""
    return original if isinstance(original, type) else type("Absent", (), {})


def _local(module: str, name: str, *, after_norm: bool = False) -> Callable[[Any], Any]:
    """Replace a class of Transformer Engine by Megatron's own class, with a norm before it if `after_norm`."""

    def make(_original: Any) -> Any:
        def new(_cls: type, *args: Any, **kwargs: Any) -> Any:
            layer = getattr(importlib.import_module(module), name)(*args, **kwargs)
            if not after_norm:
                return layer
            norm = importlib.import_module(_NORM).WrappedTorchNorm
            config = kwargs["config"]
            return _NormedLinear(norm(config, args[0], config.layernorm_epsilon), layer)

        return type(name, (), {"__new__": new})

    return make


class _NormedLinear(torch.nn.Module):
    """A norm and a linear layer, like Transformer Engine's LayerNormLinear."""

    def __init__(self, norm: torch.nn.Module, linear: torch.nn.Module) -> None:
        super().__init__()
        self.norm, self.linear = norm, linear

    def forward(self, hidden: torch.Tensor) -> Any:
        """Return the output and the bias of the linear layer."""
        return self.linear(self.norm(hidden))


def _local_encoder() -> Any:
    return importlib.import_module(_BERT).bert_layer_local_spec


@wrapping
def _with_torch_norms(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Give a vision model norms that take Megatron's arguments."""
    norm = importlib.import_module(_NORM).WrappedTorchNorm
    original(*args, **{"ln_pre_impl": norm, "ln_post_impl": norm} | kwargs)


_BERT, _MOE = "megatron.core.models.bert.bert_layer_specs", "megatron.core.transformer.moe"
_NORM, _LINEAR = "megatron.core.transformer.torch_norm", "megatron.core.tensor_parallel.layers"
LOCAL_LAYERS = in_module(
    "megatron.core.extensions.transformer_engine",
    {
        "TENorm": _local(_NORM, "WrappedTorchNorm"),
        "TEColumnParallelLinear": _local(_LINEAR, "ColumnParallelLinear"),
        "TERowParallelLinear": _local(_LINEAR, "RowParallelLinear"),
        "TELayerNormColumnParallelLinear": _local(_LINEAR, "ColumnParallelLinear", after_norm=True),
        # Latent attention accepts this class itself for its projections to latents.
        "TELinear": lambda _original: importlib.import_module(_LINEAR).ColumnParallelLinear,
        "TEDotProductAttention": _local("megatron.core.transformer.dot_product_attention", "DotProductAttention"),
    },
)
# NVIDIA's script imports a name that the module refuses without Transformer Engine.
LOCAL_LAYERS += in_module(_BERT, {"get_bert_layer_with_transformer_engine_spec": instead(_local_encoder)})
LOCAL_LAYERS += in_module("megatron.core.models.vision.clip_vit_model", {"CLIPViTModel.__init__": _with_torch_norms})
"""Megatron's own layers, which replace the Transformer Engine layers in Megatron's specs of layers."""
WITHOUT_ENGINE = (
    *in_module(_NORM, {"WrappedTorchNorm.__new__": _norm_for_sequence_parallel}),
    # Without Transformer Engine, Megatron reads the name below but never defines the name.
    *in_module(f"{_MOE}.moe_utils", {"te_general_gemm": instead(None)}, may_be_absent=True, versions="<0.17"),
    *in_module("megatron.core.transformer.dot_product_attention", {"DotProductAttention.__init__": _with_head_widths}),
    # Megatron-FSDP with TP checks modules against a class that is None without Transformer Engine.
    *in_module("megatron.core.distributed.fsdp.mcore_fsdp_adapter", {"TELinear": _a_class}, versions="<0.18"),
    # From 0.20 on, multi-token prediction checks layers against the classes of Transformer Engine below.
    *in_module(
        "megatron.core.tensor_parallel.inference_layers",
        dict.fromkeys(("InferenceColumnParallelLinear", "InferenceLayerNormColumnParallelLinear"), _a_class),
        versions=">=0.20",
    ),
    # Before 0.17, latent attention takes this name as Transformer Engine's class although the engine is missing.
    *in_module(
        "megatron.core.transformer.multi_latent_attention",
        {"TELinear": lambda original: original if importlib.util.find_spec("transformer_engine") else _a_class(None)},
        versions="<0.17",
    ),
)
"""Replacements for local layers if Transformer Engine and Apex are missing, also on a GPU."""
