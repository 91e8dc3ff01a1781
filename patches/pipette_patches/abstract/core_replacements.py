"""megatron-core with abstract tensors: what its own code does differently from how it runs on a GPU, put right."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pipette_patches.abstract.allocator import as_one_kernel, current, under
from pipette_patches.abstract.transformer_engine.linear import LayerNorm, RMSNorm
from pipette_patches.cpu.torch_replacements import instead
from pipette_patches.replacements import Replacement


class _OfDtype(type):
    dtype: torch.dtype

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Tensor) and instance.dtype is cls.dtype


class Fp32Tensor(metaclass=_OfDtype):
    """Any tensor of fp32, as `isinstance` sees it."""

    dtype = torch.float32


class Fp16Tensor(metaclass=_OfDtype):
    """Any tensor of fp16, as `isinstance` sees it."""

    dtype = torch.float16


class Bf16Tensor(metaclass=_OfDtype):
    """Any tensor of bf16, as `isinstance` sees it."""

    dtype = torch.bfloat16


def _one_kernel(_original: object) -> Callable[[Any], Any]:
    """Let a compiled function hold no intermediates, as on a GPU; compiling is not needed to count its outputs."""
    return lambda function=None, **_options: _one_kernel(None) if function is None else as_one_kernel(function)


def _pass(label: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Count a pass under its label, as a stretch of its own."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        labelled = under(label, original)

        def run(*args: Any, **kwargs: Any) -> Any:
            meter = current()
            if meter is None:
                return original(*args, **kwargs)
            meter.mark()
            result = labelled(*args, **kwargs)
            meter.mark()
            return result

        return run

    return make


def _labelled(label: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return lambda original: under(label, original)


@contextlib.contextmanager
def _fork_nothing(_tracker: Any, _name: str = "") -> Iterator[None]:
    yield


def _local_norm(_original: object) -> Any:
    """Apex's and torch's norms keep what Transformer Engine's keep: input and fp32 statistics."""

    def make(_cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, **_options: Any) -> Any:
        norm = RMSNorm if config.normalization == "RMSNorm" else LayerNorm
        return norm(hidden_size, eps, sequence_parallel=config.sequence_parallel, params_dtype=config.params_dtype)

    return staticmethod(make)


def _without_fp8(original: Callable[..., None]) -> Callable[..., None]:
    """Recompute without asking for an fp8 state: the original asks whenever it is told `False`."""

    def make(checkpoint: Any, *args: Any, **kwargs: Any) -> None:
        original(checkpoint, *args, **kwargs)
        checkpoint.fp8 = False

    return make


_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_P2P = "megatron.core.pipeline_parallel.p2p_communication"
_RANDOM = "megatron.core.tensor_parallel.random"
CORE = (
    Replacement(module="megatron.core.transformer.module", path="_FLOAT_TYPES", make=instead((Fp32Tensor,))),
    Replacement(module="megatron.core.transformer.module", path="_HALF_TYPES", make=instead((Fp16Tensor,))),
    Replacement(module="megatron.core.transformer.module", path="_BF16_TYPES", make=instead((Bf16Tensor,))),
    Replacement(module="megatron.core.jit", path="jit_fuser", make=_one_kernel),
    Replacement(module="megatron.core.transformer.torch_norm", path="WrappedTorchNorm.__new__", make=_local_norm),
    Replacement(module=_RANDOM, path="CudaRNGStatesTracker.fork", make=instead(_fork_nothing)),
    Replacement(module=_RANDOM, path="_get_cuda_rng_state", make=lambda _: lambda *_a, **_k: torch.zeros(16)),
    Replacement(module=_RANDOM, path="_set_cuda_rng_state", make=lambda _: lambda *_a, **_k: None),
    Replacement(module=_RANDOM, path="CheckpointWithoutOutput.__init__", make=_without_fp8),
    Replacement(module=_SCHEDULES, path="backward_step", make=_pass("backward")),
    Replacement(module=_P2P, path="P2PCommunicator._communicate", make=_labelled("buffers")),
    Replacement(module="megatron.core.utils", path="GlobalMemoryBuffer.get_tensor", make=_labelled("buffers")),
)
"""What stands for megatron-core's own in abstract execution."""
