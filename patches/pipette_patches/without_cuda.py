"""torch's CUDA calls in a process without CUDA: what names a CUDA device means another one, and nothing waits.

The patch `cpu_backend` puts the CPU in CUDA's place, abstract execution the `meta` device.
"""

import contextlib
import copy
import functools
import importlib.util
import inspect
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from pipette_patches.replacements import Replacement, answer, in_module, instead, nothing

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
    """`target` for whatever names a CUDA device (`cuda`, `cuda:1`, 1), the device itself otherwise."""
    if isinstance(device, torch.device):
        return target if device.type == "cuda" else device
    if isinstance(device, str):
        return target if device.startswith("cuda") else device
    return target if isinstance(device, int) and not isinstance(device, bool) else device


def _at_once(*_args: object) -> None:
    """Return at once: nothing is under way."""


def _done(*_args: object) -> bool:
    """Say that all work is done."""
    return True


class Event:
    """A CUDA event where work is done by the time it is recorded."""

    wait = synchronize = _at_once
    query = _done

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        self._recorded_s = 0.0

    def record(self, _stream: object = None) -> None:
        """Note the time."""
        self._recorded_s = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds between two recorded events, as CUDA counts them."""
        return (end._recorded_s - self._recorded_s) * 1e3


class Stream(contextlib.AbstractContextManager["Stream"]):
    """A CUDA stream where work is done by the time it is issued."""

    wait_stream = wait_event = synchronize = _at_once
    query = _done

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        self.device = torch.device("cpu")

    def __exit__(self, *_error: object) -> None:
        """Leave the block; there is no other stream to return to."""

    def record_event(self, event: Event | None = None) -> Event:
        """Note the time in an event."""
        event = event or Event()
        event.record(self)
        return event


def _on_target(original: Callable[..., Any], target: torch.device) -> Callable[..., Any]:
    """Make tensors on `target` where a CUDA device is named, in ordinary memory (only CUDA can pin it)."""

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = elsewhere(kwargs["device"], target)
        kwargs.pop("pin_memory", None)
        return original(*args, **kwargs)

    return make


def _to_target(original: Callable[..., Any], target: torch.device) -> Callable[..., Any]:
    """Move tensors to `target` when they should go to a CUDA device; an abstract tensor's values are zeros."""

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


def _type_as_on_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    """Name a tensor's type as the optimizers compare it, `torch.cuda.FloatTensor`; convert to such a name too."""

    @functools.wraps(original)
    def type_of(tensor: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return str(original(tensor)).replace("torch.meta.", "torch.", 1).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str) and dtype.startswith("torch.cuda."):
            dtype = getattr(torch, dtype.removeprefix("torch.cuda.")).dtype
        return original(tensor, dtype, *args, **kwargs)

    return type_of


def torch_without_cuda(
    target: torch.device, *, properties: SimpleNamespace, functions: dict[str, Callable[..., Any]]
) -> tuple[Replacement, ...]:
    """Replace the functions of torch.cuda, and what makes and moves tensors.

    Args:
        target: the device that stands for every CUDA device.
        properties: the properties of every device; its compute capability is their `major` and `minor`.
        functions: what stands for functions of `torch.cuda`, by their names.

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


class FinishedWork:
    """A collective that is done as soon as it is issued."""

    def wait(self, _timeout: object = None) -> bool:
        """Return at once: nothing is under way."""
        return True

    is_completed = wait


def no_coalescing(*_args: Any, **_kwargs: Any) -> contextlib.AbstractContextManager[FinishedWork]:
    """Let each message go by itself."""
    return contextlib.nullcontext(FinishedWork())


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


def without_fp8(original: Callable[..., None]) -> Callable[..., None]:
    """Recompute without asking Transformer Engine for its fp8 state: the original asks whenever it is told `False`."""

    @functools.wraps(original)
    def make(checkpoint: Any, *args: Any, **kwargs: Any) -> None:
        original(checkpoint, *args, **kwargs)
        checkpoint.fp8 = False

    return make


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


def _a_class(original: Any) -> Any:
    """Stand for a class of Transformer Engine where there is none: nothing is an instance of it."""
    return original if isinstance(original, type) else type("Absent", (), {})


def _has_engine(_original: bool) -> bool:
    """Say whether Transformer Engine itself is there."""
    return importlib.util.find_spec("transformer_engine") is not None


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
