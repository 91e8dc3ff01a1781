"""torch as Megatron uses it on a GPU, with abstract tensors: `cuda` means the `meta` device, messages go nowhere."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed
import torch.distributed.distributed_c10d
import torch.nn.functional

from pipette_patches.abstract import allocator
from pipette_patches.replacements import Replacement, answer, instead, nothing
from pipette_patches.without_cuda import cuda_calls, elsewhere, factories, type_as_on_cuda

DEVICE = torch.device("meta")
# fmt: off
_MESSAGES = (
    "_all_gather_base", "_reduce_scatter_base", "all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all",
    "all_to_all_single", "broadcast", "gather", "irecv", "isend", "recv", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "scatter", "send",
)
# fmt: on


class FinishedWork:
    """A collective that is done as soon as it is issued."""

    def wait(self, _timeout: object = None) -> bool:
        """Return at once: nothing is under way."""
        return True

    def is_completed(self) -> bool:
        """Nothing is under way."""
        return True


class DropOut(torch.autograd.Function):
    """Dropout as its CUDA kernel does it: an output and a mask of one byte each element."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        """Make output and mask."""
        ctx.save_for_backward(torch.empty_like(given, dtype=torch.bool))
        return torch.empty_like(given)

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """Make the input's gradient."""
        return torch.empty_like(gradients[0])


def _to(original: Callable[..., Any]) -> Callable[..., Any]:
    """Move tensors to the abstract device, and from there to a CPU where their values are zeros."""

    @functools.wraps(original)
    def to(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = elsewhere(kwargs["device"], DEVICE)
        args = (*(elsewhere(arg, DEVICE) for arg in args[:1]), *args[1:])
        target = kwargs.get("device", args[0] if args else None)
        if tensor.device.type == "meta" and str(target) == "cpu":
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        return original(tensor, *args, **kwargs)

    return to


def _cuda_tensor(_original: object) -> Callable[..., Any]:
    return lambda tensor, *_args, **_kwargs: tensor if tensor.device.type == "meta" else tensor.to(DEVICE)


def _cuda_module(_original: object) -> Callable[..., Any]:
    """Move what a module made in host memory; a moved parameter keeps its marks."""

    def move(module: Any, *_args: object) -> Any:
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None and parameter.device.type != "meta":
                    moved = torch.nn.Parameter(parameter.detach().to(DEVICE), requires_grad=parameter.requires_grad)
                    vars(moved).update(vars(parameter))
                    part._parameters[name] = moved
            for name, buffer in part._buffers.items():
                part._buffers[name] = None if buffer is None else buffer.cuda()
        return module

    return move


def _cpu_tensor(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda tensor, *args, **kwargs: (
        torch.zeros(tensor.shape, dtype=tensor.dtype)
        if tensor.device.type == "meta"
        else original(tensor, *args, **kwargs)
    )


def _value(answer: Callable[[Any], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a fixed answer where the value of an abstract tensor is asked for: it has none."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def read(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            return answer(tensor) if tensor.device.type == "meta" else original(tensor, *args, **kwargs)

        return read

    return make


def _scalar(tensor: Any) -> Any:
    """False, 0.0 or 1: no overflow was found, no norm is to be clipped, every count is one."""
    if tensor.dtype is torch.bool:
        return False
    return 0.0 if tensor.dtype.is_floating_point else 1


def _nested(tensor: Any) -> Any:
    return torch.ones(tensor.shape, dtype=tensor.dtype).tolist()


def _message(original: Callable[..., Any]) -> Callable[..., FinishedWork]:
    return functools.wraps(original)(lambda *_args, **_kwargs: FinishedWork())


def _own_object(_original: object) -> Callable[..., None]:
    def gather(objects: list[Any], own: Any, **_kwargs: Any) -> None:
        objects[:] = [own] * len(objects)

    return gather


@contextlib.contextmanager
def no_coalescing(*_args: Any, **_kwargs: Any) -> Iterator[FinishedWork]:
    """Let each message go by itself."""
    yield FinishedWork()


def _dropout(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def dropout(given: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if given.device.type != "meta" or not training or p == 0.0:
            return original(given, p, training, inplace)
        return DropOut.apply(given)  # type: ignore[no-untyped-call]

    return dropout


def _resize(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def resize(storage: Any, size: int) -> Any:
        done = original(storage, size)
        meter = allocator.current()
        if meter is not None:
            meter.resized(storage)
        return done

    return resize


def _copy_nothing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def copy(storage: Any, source: Any, *args: Any) -> Any:
        return storage if storage.device.type == "meta" else original(storage, source, *args)

    return copy


def _foreach(original: Callable[..., Any]) -> Callable[..., Any]:
    """Step on lists of tensors, as torch does on CUDA and not on other devices."""

    @functools.wraps(original)
    def default(params: Any, differentiable: bool, use_fused: bool = False) -> tuple[bool, bool]:
        del params, use_fused
        return False, not differentiable

    return default


_PROPERTIES = SimpleNamespace(
    name="abstract", major=9, minor=0, multi_processor_count=132, total_memory=1 << 40, gcnArchName=""
)
_RNG_STATE = torch.zeros(16, dtype=torch.uint8)


def _distributed(path: str, make: Callable[[Any], Any]) -> tuple[Replacement, ...]:
    return tuple(
        Replacement(module=module, path=path, make=make)
        for module in ("torch.distributed", "torch.distributed.distributed_c10d")
    )


def _tensor(path: str, make: Callable[[Any], Any]) -> Replacement:
    return Replacement(module="torch", path=f"Tensor.{path}", make=make)


TORCH = (
    *cuda_calls(
        current_device=lambda: DEVICE,
        device_count=lambda: 1,
        properties=_PROPERTIES,
        manual_seed=lambda *_args, **_kwargs: None,
        get_rng_state=lambda *_args, **_kwargs: _RNG_STATE,
        set_rng_state=lambda *_args, **_kwargs: None,
    ),
    Replacement(module="torch.cuda", path="is_current_stream_capturing", make=answer(False)),
    *factories(DEVICE),
    _tensor("to", _to),
    _tensor("type", type_as_on_cuda),
    _tensor("cuda", _cuda_tensor),
    _tensor("cpu", _cpu_tensor),
    _tensor("pin_memory", lambda _original: lambda tensor, *_args, **_kwargs: tensor),
    _tensor("record_stream", nothing),
    _tensor("item", _value(_scalar)),
    _tensor("tolist", _value(_nested)),
    _tensor("__bool__", _value(lambda _: False)),
    _tensor("__int__", _value(lambda _: 1)),
    _tensor("__float__", _value(lambda _: 0.0)),
    _tensor("is_cuda", lambda _original: property(lambda tensor: tensor.device.type == "meta")),
    Replacement(module="torch.nn", path="Module.cuda", make=_cuda_module),
    Replacement(module="torch.nn.functional", path="dropout", make=_dropout),
    Replacement(module="torch", path="UntypedStorage.resize_", make=_resize),
    Replacement(module="torch", path="UntypedStorage.copy_", make=_copy_nothing),
    *(
        Replacement(module=module, path="_default_to_fused_or_foreach", make=_foreach)
        for module in ("torch.optim.adam", "torch.optim.sgd")
    ),
    *(replacement for path in _MESSAGES for replacement in _distributed(path, _message)),
    *_distributed("P2POp", lambda _original: lambda _operation, tensor, *_peer, **_group: tensor),
    *_distributed("batch_isend_irecv", lambda _original: lambda _ops: []),
    *_distributed("barrier", nothing),
    *_distributed("all_gather_object", _own_object),
    *_distributed("_coalescing_manager", instead(no_coalescing)),
)
"""Replacements in torch, for a process that only executes abstractly."""
