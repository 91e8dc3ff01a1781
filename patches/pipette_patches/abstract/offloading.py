"""Fine-grained activation offloading with abstract tensors: Megatron decides what leaves and when it comes back.

Read in megatron-core 0.16.1, pipeline_parallel/fine_grained_activation_offload.py. Tensors in host memory are not
counted; only the copies to and from the host are replaced, and the table that is printed after the first step.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from pipette_patches.replacements import Replacement, instead, nothing

_MODULE = "megatron.core.pipeline_parallel.fine_grained_activation_offload"


def forget() -> None:
    """Drop what the last job has offloaded, as a new process would have nothing."""
    module = sys.modules.get(_MODULE)
    if module is not None:
        module.PipelineOffloadManager.OFFLOAD_MGR = None


def _to_host(_handler: Any, tensor: torch.Tensor, **_options: bool) -> tuple[Any, ...]:
    """Say what lies in host memory; a tensor that is not contiguous is copied on the device first.

    Megatron knows a tensor that has left by the tuple in its place.
    """
    tensor.contiguous()
    return tensor.shape, tensor.dtype, tensor.device


def _from_host(_handler: Any, state: tuple[Any, ...], **_options: bool) -> torch.Tensor:
    """Make a new tensor on the device for one that had left."""
    shape, dtype, device = state
    return torch.empty(shape, dtype=dtype, device=device)


OFFLOADING = tuple(
    # A release may lack one: then only jobs that offload cannot be executed.
    Replacement(module=_MODULE, path=path, make=make, may_be_absent=True)
    for path, make in {
        "ChunkOffloadHandler.offload": instead(_to_host),
        "ChunkOffloadHandler.reload": instead(_from_host),
        "print_offload_summary_table": nothing,
    }.items()
)
"""Replacements in megatron-core."""
