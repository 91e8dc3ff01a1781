"""Collectives over gloo where what Megatron expects of NCCL's would be slow or go wrong."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed

from pipette_patches.replacements import in_module


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


def _one_by_one(original: Callable[..., Any]) -> Callable[..., Any]:
    """Start gathers one by one that nobody waits for at once.

    Two coalesced gathers under way in one group of gloo's write over freed memory (torch 2.13), and Megatron-FSDP
    gathers the next layers' weights while it waits for a layer's own.
    """

    @contextlib.contextmanager
    def coalesce(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Any]:
        gathers = []
        with original(group, device, async_ops) as manager:
            yield manager
            group = group or torch.distributed.group.WORLD
            recorded = torch.distributed.distributed_c10d._world.pg_coalesce_state[group]
            # Of the recorded calls, all of one kind, those of gathers alone reduce nothing.
            if async_ops and recorded and recorded[0].redop is None:
                gathers, recorded[:] = recorded[:], []
        for gather in gathers:
            manager.append(gather.op(gather.dst_tensor, gather.tensor, group=group, async_op=True))

    return coalesce


COLLECTIVES = in_module(
    "torch.distributed", {"all_reduce": _alone, "broadcast": _alone, "_coalescing_manager": _one_by_one}
)
"""Replacements in torch."""
