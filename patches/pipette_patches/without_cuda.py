"""torch's CUDA calls in a process without CUDA: what names a CUDA device means another one, and nothing waits.

The patch `cpu_backend` puts the CPU in CUDA's place, abstract execution the `meta` device.
"""

import contextlib
import functools
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
