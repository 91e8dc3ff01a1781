"""Bytes of one rank, as abstract execution counts them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Bytes on a rank at its memory peak, by origin. The bytes of all origins sum to the peak."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    """Bytes of master weights and optimizer states."""
    activations: int = 0
    """Bytes of outputs of the layers' forward that the backward needs."""
    working: int = 0
    """Bytes allocated during a backward: gradients of activations, and activations that recompute restores."""
    embedding: int = 0
    """Bytes of micro-batches from the data loader, and of outputs of the embedding."""
    logits: int = 0
    buffers: int = 0
    """Bytes of pipeline messages, and of buffers that all layers share."""
    optimizer_step: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Bytes of tensors on one rank, rounded up as in torch's caching allocator for CUDA.

    Workspaces of libraries, the CUDA context, communicators and fragmentation are not included.
    """

    pp_rank: int
    weights: int
    gradients: int
    optimizer: int
    allocated_after_step: int
    first_peak: int
    """Peak in bytes of the first iteration, in which the optimizer step allocates the optimizer's states."""
    peak: int
    """Peak in bytes of later iterations, with the optimizer's states."""
    parts: Parts
