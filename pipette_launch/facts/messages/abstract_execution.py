"""What abstract execution is asked, and what it answers: the bytes of one rank of each pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass, fields

from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionRequest:
    """Ranks to execute: one for each pipeline rank named."""

    job: Job
    layout: Layout
    pp_ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutedParts:
    """Bytes on a rank at the moment of its peak, by what made them; together they are the peak."""

    weights: int = 0
    gradients: int = 0
    """Gradient buffers, with the padding of their buckets."""
    optimizer: int = 0
    """Master weights and states."""
    activations: int = 0
    """Made by the layers' forward, and kept for backward."""
    working: int = 0
    """Made during a backward: gradients of activations, and what recompute brings back."""
    embedding: int = 0
    """Micro-batches read from the data loader, and what the embedding makes."""
    logits: int = 0
    """Made by output layer and loss."""
    buffers: int = 0
    """Pipeline messages, and buffers that all layers share."""
    optimizer_step: int = 0
    """Temporaries of the optimizer step."""

    @property
    def total(self) -> int:
        """The peak."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutedMemory:
    """Bytes of tensors on one rank, each rounded up as CUDA's caching allocator does.

    Not in it: workspaces of libraries, context, communicators, fragmentation.
    """

    pp_rank: int
    weights: int
    gradients: int
    optimizer: int
    allocated_after_step: int
    """What is left when a step is over."""
    first_peak: int
    """The peak of the first iteration: its passes lack the optimizer's states, its step makes them."""
    peak: int
    """The most, the optimizer's states and its step included."""
    parts: ExecutedParts
    """The peak, split."""
    notes: tuple[str, ...]
    """In what the executed job differs from the real one, one sentence each."""

    @property
    def static(self) -> int:
        """What is there all the time."""
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionAnswer:
    """The ranks, as they were asked for; or why not."""

    ranks: tuple[ExecutedMemory, ...] = ()
    error: str | None = None
