"""torch and megatron-core as on a GPU, with abstract tensors: `cuda` means the `meta` device, messages go nowhere."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed
import torch.distributed.distributed_c10d
import torch.nn.functional

from pipette_patches.abstract.allocator import as_one_kernel, current, under
from pipette_patches.abstract.transformer_engine.fused_kernels import kernel
from pipette_patches.abstract.transformer_engine.linear import LayerNorm, RMSNorm
from pipette_patches.cpu.cpu_replacements import without_fp8
from pipette_patches.replacements import Replacement, answer, in_module, instead, nothing
from pipette_patches.without_cuda import torch_without_cuda

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

    is_completed = wait


def for_abstract(successor: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Call `successor` for an abstract tensor or storage, which has no values, and the original for any other."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(given: Any, *args: Any, **kwargs: Any) -> Any:
            return (successor if given.device.type == "meta" else original)(given, *args, **kwargs)

        return call

    return make


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


def _zeros(tensor: Any, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    """The values of an abstract tensor in host memory."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


def _scalar(tensor: Any) -> Any:
    """False, 0.0 or 1: no overflow was found, no norm is to be clipped, every count is one."""
    if tensor.dtype is torch.bool:
        return False
    return 0.0 if tensor.dtype.is_floating_point else 1


def _gather_own(objects: list[Any], own: Any, **_kwargs: Any) -> None:
    objects[:] = [own] * len(objects)


def no_coalescing(*_args: Any, **_kwargs: Any) -> contextlib.AbstractContextManager[FinishedWork]:
    """Let each message go by itself."""
    return contextlib.nullcontext(FinishedWork())


def _dropout(given: Any, p: float = 0.5, training: bool = True, *_inplace: bool, **_options: bool) -> Any:
    """Drop out as the CUDA kernel does it: an output and a mask of one byte each element."""
    if not training or p == 0.0:
        return given
    return kernel(lambda given: (torch.empty_like(given), (torch.empty_like(given, dtype=torch.bool),)), given)


def recounting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Resize a storage, and let the meter in force count it as it is then."""

    @functools.wraps(original)
    def resize(storage: Any, size: int) -> Any:
        done = original(storage, size)
        meter = current()
        if meter is not None:
            meter.recount(storage)
        return done

    return resize


_PROPERTIES = SimpleNamespace(
    name="abstract", major=9, minor=0, multi_processor_count=132, total_memory=1 << 40, gcnArchName=""
)
_NO_RNG_STATE = torch.zeros(16, dtype=torch.uint8)
_DISTRIBUTED = {
    **dict.fromkeys(_MESSAGES, answer(FinishedWork())),
    "P2POp": instead(lambda _operation, tensor, *_peer, **_group: tensor),
    "batch_isend_irecv": instead(lambda _operations: []),
    "barrier": nothing,
    "all_gather_object": instead(_gather_own),
    "_coalescing_manager": instead(no_coalescing),
}
# Optimizers step on lists of tensors, as torch's do on CUDA and not on other devices.
_STEP_ON_LISTS = {
    "_default_to_fused_or_foreach": instead(lambda _params, differentiable, **_fused: (False, not differentiable))
}
TORCH = (
    *torch_without_cuda(
        DEVICE,
        properties=_PROPERTIES,
        functions={
            "current_device": lambda: DEVICE,
            "device_count": lambda: 1,
            "is_current_stream_capturing": lambda: False,
            "manual_seed": lambda *_, **__: None,
            "get_rng_state": lambda *_, **__: _NO_RNG_STATE,
            "random.get_rng_state": lambda *_, **__: _NO_RNG_STATE,
            "set_rng_state": lambda *_, **__: None,
        },
    ),
    *in_module(
        "torch",
        {
            "Tensor.cpu": for_abstract(_zeros),
            # An abstract tensor is asked for its value.
            "Tensor.item": for_abstract(_scalar),
            "Tensor.tolist": for_abstract(lambda tensor: torch.ones(tensor.shape, dtype=tensor.dtype).tolist()),
            "Tensor.__bool__": for_abstract(lambda _: False),
            "Tensor.__int__": for_abstract(lambda _: 1),
            "Tensor.__float__": for_abstract(lambda _: 0.0),
            "Tensor.is_cuda": instead(property(lambda tensor: tensor.device.type == "meta")),
            "UntypedStorage.resize_": recounting,
            "UntypedStorage.copy_": for_abstract(lambda storage, *_source: storage),
        },
    ),
    Replacement(module="torch.nn", path="Module.cuda", make=_cuda_module),
    Replacement(module="torch.nn.functional", path="dropout", make=for_abstract(_dropout)),
    *in_module("torch.optim.adam", _STEP_ON_LISTS),
    *in_module("torch.optim.sgd", _STEP_ON_LISTS),
    *in_module("torch.distributed", _DISTRIBUTED),
    *in_module("torch.distributed.distributed_c10d", _DISTRIBUTED),
)
"""Replacements in torch, for a process that only executes abstractly."""


class _OfDtype(type):
    dtype: torch.dtype

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Tensor) and instance.dtype is cls.dtype


def _tensors_of(dtype: torch.dtype) -> Callable[[object], Any]:
    """Put in the place of a tuple of tensor types one class: the tensors of a dtype, as `isinstance` sees them."""
    return instead((_OfDtype(f"Tensor of {dtype}", (), {"dtype": dtype}),))


def _one_kernel(_original: object) -> Callable[[Any], Any]:
    """Let a compiled function hold no intermediates, as on a GPU; compiling is not needed to count its outputs."""
    return lambda function=None, **_options: _one_kernel(None) if function is None else as_one_kernel(function)


def _counted_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Count a backward pass under its label, and mark its beginning and its end."""
    labelled = under("backward", original)

    def run(*args: Any, **kwargs: Any) -> Any:
        meter = current()
        if meter is None:
            return original(*args, **kwargs)
        meter.mark()
        result = labelled(*args, **kwargs)
        meter.mark()
        return result

    return run


def _local_norm(_original: object) -> Any:
    """Apex's and torch's norms keep what Transformer Engine's keep: input and fp32 statistics."""

    def make(_cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, **_options: Any) -> Any:
        norm = RMSNorm if config.normalization == "RMSNorm" else LayerNorm
        return norm(hidden_size, eps, sequence_parallel=config.sequence_parallel, params_dtype=config.params_dtype)

    return staticmethod(make)


CORE = (
    *in_module(
        "megatron.core.transformer.module",
        {
            "_FLOAT_TYPES": _tensors_of(torch.float32),
            "_HALF_TYPES": _tensors_of(torch.float16),
            "_BF16_TYPES": _tensors_of(torch.bfloat16),
        },
    ),
    *in_module("megatron.core.jit", {"jit_fuser": _one_kernel}),
    *in_module("megatron.core.transformer.torch_norm", {"WrappedTorchNorm.__new__": _local_norm}),
    *in_module(
        "megatron.core.tensor_parallel.random",
        {
            "CudaRNGStatesTracker.fork": instead(lambda *_name: contextlib.nullcontext()),
            "_get_cuda_rng_state": instead(lambda *_args, **_kwargs: torch.zeros(16)),
            "_set_cuda_rng_state": nothing,
            "CheckpointWithoutOutput.__init__": without_fp8,
        },
    ),
    *in_module("megatron.core.pipeline_parallel.schedules", {"backward_step": _counted_backward}),
    *in_module(
        "megatron.core.pipeline_parallel.p2p_communication",
        {"P2PCommunicator._communicate": functools.partial(under, "buffers")},
    ),
    *in_module("megatron.core.utils", {"GlobalMemoryBuffer.get_tensor": functools.partial(under, "buffers")}),
)
"""Replacements in megatron-core for abstract execution."""
