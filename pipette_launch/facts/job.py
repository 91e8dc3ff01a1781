"""What the user asked for: the model, the batch, and the configuration that torchrun would have run."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipette_launch.facts.checks import check_numbers
from pipette_launch.facts.files import ADDED_LATER
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.model import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Samples of one optimizer step, the same whatever the layout."""

    global_batch_size: int

    def __post_init__(self) -> None:
        check_numbers(self, "global_batch_size")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A Megatron training job, read from its command line for a given world size."""

    model: ModelSpec
    batch: Batch
    own: Layout
    """The user's own configuration, or what stands in for it."""
    pinned: tuple[str, ...]
    """Layout fields that no plan may change, `--pipette-fix` and a checkpoint's demands together, sorted."""
    notes: tuple[str, ...]
    """Why something is pinned or assumed, one sentence each, for the screen and the plan file."""
    megatron_version: str
    """The release whose flags the script takes, as `0.16.1`."""
    grad_reduce_in_bf16: bool
    optimizer: str
    log_interval: int
    train_iters: int | None
    performance_flags: tuple[str, ...]
    """Flags that change time or memory and have no field of their own here, sorted, as `--flag value`.

    `megatron.performance.performance_options` reads them."""
    cublas_workspace_config: str = field(default="", metadata=ADDED_LATER)
    """CUBLAS_WORKSPACE_CONFIG of the workers, which sizes cuBLAS's buffers; empty where it is not set."""

    allocator_config: str = field(default="", metadata=ADDED_LATER)
    """Options of torch's CUDA allocator in the workers' environment (`megatron.allocator`); empty without any."""
    own_refusal: str = field(default="", metadata=ADDED_LATER)
    """Why Megatron refuses the user's own configuration; `own` then stands in for it. Empty where it does not."""

    @property
    def release(self) -> tuple[int, ...]:
        """`0.16.1` -> (0, 16)."""
        return tuple(int(part) for part in self.megatron_version.split(".")[:2] if part.isdigit())
