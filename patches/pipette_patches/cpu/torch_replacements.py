"""torch as Megatron uses it, on a machine without CUDA: what names a CUDA device means the CPU, `nccl` means gloo."""

import functools
import inspect
import logging
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed
import torch.utils.data

from pipette_patches.replacements import Replacement, nothing
from pipette_patches.without_cuda import cuda_calls, elsewhere, factories, type_as_on_cuda

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")


@functools.cache
def say_once(sentence: str) -> None:
    """Warn once for the whole job: only rank 0 warns, and only the first time."""
    if os.environ.get("RANK", "0") == "0":
        logger.warning("cpu_backend: %s", sentence)


def _to(original: Callable[..., Any]) -> Callable[..., Any]:
    """Move tensors to the CPU when they should go to a CUDA device."""

    @functools.wraps(original)
    def to(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = elsewhere(kwargs["device"], _CPU)
        return original(tensor, *(elsewhere(arg, _CPU) for arg in args[:1]), *args[1:], **kwargs)

    return to


def _same_tensor(_original: object) -> Callable[..., Any]:
    return lambda tensor, *_args, **_kwargs: tensor


def _local_rank(*_args: object) -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def _num_local_processes(*_args: object) -> int:
    """One device for each process of this node, as on a GPU machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


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


# The newest generation's capability: of older ones Megatron demands a CUDA_DEVICE_MAX_CONNECTIONS, which has no effect
# here.
_PROPERTIES = SimpleNamespace(name="CPU", major=10, minor=0, multi_processor_count=os.cpu_count(), total_memory=0)

TORCH = (
    *cuda_calls(
        current_device=_local_rank,
        device_count=_num_local_processes,
        properties=_PROPERTIES,
        manual_seed=torch.default_generator.manual_seed,
        get_rng_state=rng_state,
        set_rng_state=set_rng_state,
    ),
    *factories(_CPU),
    Replacement(module="torch", path="Tensor.to", make=_to),
    Replacement(module="torch", path="Tensor.type", make=type_as_on_cuda),
    Replacement(module="torch", path="Tensor.cuda", make=_same_tensor),
    Replacement(module="torch", path="Tensor.pin_memory", make=_same_tensor),
    Replacement(module="torch", path="Tensor.record_stream", make=nothing),
    Replacement(module="torch.distributed", path="all_reduce", make=_alone),
    Replacement(module="torch.distributed", path="broadcast", make=_alone),
    Replacement(module="torch.distributed", path="init_process_group", make=_gloo),
    Replacement(module="torch.distributed", path="new_group", make=_gloo),
)
