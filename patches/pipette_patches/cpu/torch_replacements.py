"""torch as Megatron uses it, on a machine without CUDA: what names a CUDA device means the CPU, `nccl` means gloo."""

import contextlib
import functools
import inspect
import logging
import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed
import torch.utils.data

from pipette_patches.replacements import Replacement

logger = logging.getLogger(__name__)

# fmt: off
_FACTORIES = (
    "arange", "as_tensor", "asarray", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace",
    "ones", "ones_like", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm",
    "scalar_tensor", "tensor", "zeros", "zeros_like",
    "Tensor.new_empty", "Tensor.new_full", "Tensor.new_ones", "Tensor.new_tensor", "Tensor.new_zeros",
)
# fmt: on


@functools.cache
def say_once(sentence: str) -> None:
    """Warn once for the whole job: in the process of rank 0, the first time only."""
    if os.environ.get("RANK", "0") == "0":
        logger.warning("cpu_backend: %s", sentence)


def on_cpu(device: Any) -> Any:
    """The CPU for whatever names a CUDA device (`cuda`, `cuda:1`, 1), the device itself otherwise."""
    if isinstance(device, bool):
        return device
    if isinstance(device, int) or (isinstance(device, str) and device.startswith("cuda")):
        return "cpu"
    return torch.device("cpu") if isinstance(device, torch.device) and device.type == "cuda" else device


class Event:
    """A CUDA event where work is done by the time it is recorded."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        self._recorded_s = 0.0

    def record(self, _stream: object = None) -> None:
        """Note the time."""
        self._recorded_s = time.perf_counter()

    def wait(self, _stream: object = None) -> None:
        """Nothing is under way."""

    def synchronize(self) -> None:
        """Nothing is under way."""

    def query(self) -> bool:
        """All work is done."""
        return True

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds between two recorded events, as CUDA counts them."""
        return (end._recorded_s - self._recorded_s) * 1e3


class Stream(contextlib.AbstractContextManager["Stream"]):
    """A CUDA stream where work is done by the time it is issued."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        self.device = torch.device("cpu")

    def __exit__(self, *_error: object) -> None:
        """Go back to the stream before, which is as empty as this one."""

    def wait_stream(self, _stream: object) -> None:
        """Nothing is under way."""

    def wait_event(self, _event: object) -> None:
        """Nothing is under way."""

    def synchronize(self) -> None:
        """Nothing is under way."""

    def query(self) -> bool:
        """All work is done."""
        return True

    def record_event(self, event: Event | None = None) -> Event:
        """Note the time in an event."""
        event = event or Event()
        event.record(self)
        return event


_ONLY_STREAM = Stream()


def _factory(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make tensors on the CPU, in ordinary memory (only CUDA can pin it)."""

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        kwargs.pop("pin_memory", None)
        return original(*args, **kwargs)

    return make


def _to(original: Callable[..., Any]) -> Callable[..., Any]:
    """Move tensors to the CPU when they should go to a CUDA device."""

    @functools.wraps(original)
    def to(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        return original(tensor, *(on_cpu(arg) for arg in args[:1]), *args[1:], **kwargs)

    return to


def _type(original: Callable[..., Any]) -> Callable[..., Any]:
    """Name a CPU tensor's type as the optimizers compare it: `torch.cuda.FloatTensor`; take such a name back."""

    @functools.wraps(original)
    def type_of(tensor: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return str(original(tensor)).replace("torch.", "torch.cuda.", 1)
        known = dtype.replace("torch.cuda.", "torch.", 1) if isinstance(dtype, str) else dtype
        return original(tensor, known, *args, **kwargs)

    return type_of


def _same_tensor(_original: object) -> Callable[..., Any]:
    return lambda tensor, *_args, **_kwargs: tensor


def _nothing(_original: object) -> Callable[..., None]:
    return lambda *_args, **_kwargs: None


def _answer(value: Any) -> Callable[[object], Callable[..., Any]]:
    return lambda _original: lambda *_args, **_kwargs: value


def instead(successor: Any) -> Callable[[object], Any]:
    """Put something of our own in an original's place."""
    return lambda _original: successor


def _local_rank(*_args: object) -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def _num_local_processes(*_args: object) -> int:
    """One device for each process of this node, as on a GPU machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def rng_state(*_args: object, **_kwargs: object) -> torch.Tensor:
    """The state of the one generator, which stands for the CUDA generator too."""
    return torch.default_generator.get_state()


def set_rng_state(state: torch.Tensor, *_args: object, **_kwargs: object) -> None:
    """Put the one generator into a state that it had."""
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


def _cuda(path: str, make: Callable[[Any], Any]) -> Replacement:
    return Replacement(module="torch.cuda", path=path, make=make)


# The newest generation's answer: of older ones Megatron demands a CUDA_DEVICE_MAX_CONNECTIONS that means nothing here.
_CAPABILITY = (10, 0)
_PROPERTIES = SimpleNamespace(name="CPU", major=10, minor=0, multi_processor_count=os.cpu_count(), total_memory=0)

TORCH = (
    _cuda("is_available", _answer(False)),
    _cuda("current_device", instead(_local_rank)),
    _cuda("device_count", instead(_num_local_processes)),
    _cuda("get_device_properties", _answer(_PROPERTIES)),
    _cuda("get_device_capability", _answer(_CAPABILITY)),
    *(_cuda(path, _nothing) for path in ("set_device", "synchronize", "empty_cache", "ipc_collect", "set_stream")),
    *(_cuda(path, _nothing) for path in ("reset_peak_memory_stats", "nvtx.range_push", "nvtx.range_pop", "nvtx.mark")),
    _cuda("Stream", instead(Stream)),
    _cuda("Event", instead(Event)),
    _cuda("stream", _answer(_ONLY_STREAM)),
    _cuda("current_stream", _answer(_ONLY_STREAM)),
    _cuda("default_stream", _answer(_ONLY_STREAM)),
    _cuda("manual_seed", instead(torch.default_generator.manual_seed)),
    _cuda("get_rng_state", instead(rng_state)),
    _cuda("set_rng_state", instead(set_rng_state)),
    _cuda("random.get_rng_state", instead(rng_state)),
    *(Replacement(module="torch", path=path, make=_factory) for path in _FACTORIES),
    Replacement(module="torch", path="Tensor.to", make=_to),
    Replacement(module="torch", path="Tensor.type", make=_type),
    Replacement(module="torch", path="Tensor.cuda", make=_same_tensor),
    Replacement(module="torch", path="Tensor.pin_memory", make=_same_tensor),
    Replacement(module="torch", path="Tensor.record_stream", make=_nothing),
    Replacement(module="torch.distributed", path="all_reduce", make=_alone),
    Replacement(module="torch.distributed", path="broadcast", make=_alone),
    Replacement(module="torch.distributed", path="init_process_group", make=_gloo),
    Replacement(module="torch.distributed", path="new_group", make=_gloo),
)
