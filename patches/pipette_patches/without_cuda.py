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

from pipette_patches.replacements import Replacement, answer, instead, nothing

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


class Event:
    """A CUDA event where work is done by the time it is recorded."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        self._recorded_s = 0.0

    def record(self, _stream: object = None) -> None:
        """Note the time."""
        self._recorded_s = time.perf_counter()

    def wait(self, _stream: object = None) -> None:
        """Return at once: nothing is under way."""

    def synchronize(self) -> None:
        """Return at once: nothing is under way."""

    def query(self) -> bool:
        """Say that all work is done."""
        return True

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds between two recorded events, as CUDA counts them."""
        return (end._recorded_s - self._recorded_s) * 1e3


class Stream(contextlib.AbstractContextManager["Stream"]):
    """A CUDA stream where work is done by the time it is issued."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        self.device = torch.device("cpu")

    def __exit__(self, *_error: object) -> None:
        """Leave the block; there is no other stream to return to."""

    def wait_stream(self, _stream: object) -> None:
        """Return at once: nothing is under way."""

    def wait_event(self, _event: object) -> None:
        """Return at once: nothing is under way."""

    def synchronize(self) -> None:
        """Return at once: nothing is under way."""

    def query(self) -> bool:
        """Say that all work is done."""
        return True

    def record_event(self, event: Event | None = None) -> Event:
        """Note the time in an event."""
        event = event or Event()
        event.record(self)
        return event


_ONLY_STREAM = Stream()


def factories(target: torch.device) -> tuple[Replacement, ...]:
    """Make tensors on `target` where a CUDA device is named, in ordinary memory (only CUDA can pin it)."""

    def factory(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def make(*args: Any, **kwargs: Any) -> Any:
            if "device" in kwargs:
                kwargs["device"] = elsewhere(kwargs["device"], target)
            kwargs.pop("pin_memory", None)
            return original(*args, **kwargs)

        return make

    return tuple(Replacement(module="torch", path=path, make=factory) for path in _FACTORIES)


def type_as_on_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    """Name a tensor's type as the optimizers compare it, `torch.cuda.FloatTensor`; convert to such a name too."""

    @functools.wraps(original)
    def type_of(tensor: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return str(original(tensor)).replace("torch.meta.", "torch.", 1).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str) and dtype.startswith("torch.cuda."):
            dtype = getattr(torch, dtype.removeprefix("torch.cuda.")).dtype
        return original(tensor, dtype, *args, **kwargs)

    return type_of


def cuda_calls(
    *,
    current_device: Callable[..., Any],
    device_count: Callable[..., int],
    properties: SimpleNamespace,
    manual_seed: Callable[..., Any],
    get_rng_state: Callable[..., torch.Tensor],
    set_rng_state: Callable[..., None],
) -> tuple[Replacement, ...]:
    """Replace the functions of torch.cuda.

    Args:
        current_device: what answers for `torch.cuda.current_device`.
        device_count: what answers for `torch.cuda.device_count`.
        properties: the properties of every device; its compute capability is their `major` and `minor`.
        manual_seed: what seeds the generator that stands for CUDA's.
        get_rng_state: reads that generator's state.
        set_rng_state: sets that generator's state.

    """
    stream = answer(Stream())
    makers = {
        "is_available": answer(False),
        "current_device": instead(current_device),
        "device_count": instead(device_count),
        "get_device_properties": answer(properties),
        "get_device_capability": answer((properties.major, properties.minor)),
        **dict.fromkeys(_WITHOUT_EFFECT, nothing),
        "Stream": instead(Stream),
        "Event": instead(Event),
        "stream": stream,
        "current_stream": stream,
        "default_stream": stream,
        "manual_seed": instead(manual_seed),
        "get_rng_state": instead(get_rng_state),
        "random.get_rng_state": instead(get_rng_state),
        "set_rng_state": instead(set_rng_state),
    }
    return tuple(Replacement(module="torch.cuda", path=path, make=make) for path, make in makers.items())
