"""megatron-core with abstract tensors: replacements of what runs there otherwise than on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from pipette_patches.abstract.allocator import as_one_kernel, current, under
from pipette_patches.abstract.transformer_engine.linear import LayerNorm, RMSNorm
from pipette_patches.cpu.core_replacements import without_fp8
from pipette_patches.replacements import Replacement, instead, nothing


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


def _pass(label: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Count a forward or backward pass under its label, and mark its beginning and its end."""

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


@contextlib.contextmanager
def _fork_nothing(_tracker: Any, _name: str = "") -> Iterator[None]:
    yield


def _local_norm(_original: object) -> Any:
    """Apex's and torch's norms keep what Transformer Engine's keep: input and fp32 statistics."""

    def make(_cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, **_options: Any) -> Any:
        norm = RMSNorm if config.normalization == "RMSNorm" else LayerNorm
        return norm(hidden_size, eps, sequence_parallel=config.sequence_parallel, params_dtype=config.params_dtype)

    return staticmethod(make)


_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_P2P = "megatron.core.pipeline_parallel.p2p_communication"
_RANDOM = "megatron.core.tensor_parallel.random"
CORE = (
    Replacement(module="megatron.core.transformer.module", path="_FLOAT_TYPES", make=_tensors_of(torch.float32)),
    Replacement(module="megatron.core.transformer.module", path="_HALF_TYPES", make=_tensors_of(torch.float16)),
    Replacement(module="megatron.core.transformer.module", path="_BF16_TYPES", make=_tensors_of(torch.bfloat16)),
    Replacement(module="megatron.core.jit", path="jit_fuser", make=_one_kernel),
    Replacement(module="megatron.core.transformer.torch_norm", path="WrappedTorchNorm.__new__", make=_local_norm),
    Replacement(module=_RANDOM, path="CudaRNGStatesTracker.fork", make=instead(_fork_nothing)),
    Replacement(module=_RANDOM, path="_get_cuda_rng_state", make=instead(lambda *_args, **_kwargs: torch.zeros(16))),
    Replacement(module=_RANDOM, path="_set_cuda_rng_state", make=nothing),
    Replacement(module=_RANDOM, path="CheckpointWithoutOutput.__init__", make=without_fp8),
    Replacement(module=_SCHEDULES, path="backward_step", make=_pass("backward")),
    Replacement(module=_P2P, path="P2PCommunicator._communicate", make=partial(under, "buffers")),
    Replacement(module="megatron.core.utils", path="GlobalMemoryBuffer.get_tensor", make=partial(under, "buffers")),
)
"""Replacements in megatron-core for abstract execution."""
