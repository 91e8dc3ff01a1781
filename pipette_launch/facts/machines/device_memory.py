"""What a device holds beside the model's own tensors, and what whole stages of the model held on it, as measured."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipette_launch.errors import FactError
from pipette_launch.facts import files
from pipette_launch.facts.checks import check_numbers
from pipette_launch.facts.files import ADDED_LATER
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceOverhead:
    """What a warm-up worker's GPU held while no tensor of the model was there."""

    alone_bytes: int
    """NVML's used bytes less the allocator's reserve, before any communicator was open: CUDA, its libraries' code."""
    together_bytes: int
    """The same while the communicators were open."""
    num_communicators: int
    """How many communicators were open."""
    workspace_bytes: int
    """Inside the allocator: workspaces that libraries keep from their first use."""

    def __post_init__(self) -> None:
        check_numbers(self, "alone_bytes", "together_bytes", "num_communicators", "workspace_bytes", limit=0)

    @property
    def total_bytes(self) -> int:
        """The most that the device held outside the allocator."""
        return max(self.alone_bytes, self.together_bytes)

    @property
    def communicator_bytes(self) -> int:
        """What one communicator takes, the average of those that were open; 0 where none was."""
        return max(self.together_bytes - self.alone_bytes, 0) // max(self.num_communicators, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryNeed:
    """What a layout's ranks need of their devices, and what they may have: the figures that every screen shows."""

    need_bytes: tuple[int, ...]
    """On each pipeline rank: the model's tensors at their peak, and all that the device holds beside them."""
    free_bytes: int
    """What is free on the fullest device before the job; 0 where an earlier release did not write it down."""
    limit_bytes: int
    """What a rank may hold: what is free less the margin."""

    @property
    def fits(self) -> bool:
        """Whether every stage stays below the limit."""
        return max(self.need_bytes) <= self.limit_bytes

    @property
    def margin(self) -> float:
        """The part of what is free that stays free."""
        return 1 - self.limit_bytes / self.free_bytes if self.free_bytes else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StageReading:
    """The peak of one rank's whole training step: all micro-batches in flight, gradients, optimizer and its step."""

    job_digest: str
    """`memory_digest` of the job; the reading holds for jobs with the same digest only."""
    layout: Layout
    pp_rank: int
    slot: int
    """The slot that measured it; another slot would give the same bytes."""
    allocator_peak_bytes: int
    """Torch's allocations on CUDA, workspaces included; on CPU the model's tensors, counted one by one."""
    reserved_peak_bytes: int
    """What torch's allocator took from the device for them; 0 on CPU."""
    device_peak_bytes: int
    """NVML's used bytes on CUDA, without communicators; the process's resident set on CPU."""
    ran_out: bool = False
    """Whether the device ran out of memory during the step; the peaks are those up to that moment."""
    allocator_config: str = field(default="", metadata=ADDED_LATER)
    """`Job.allocator_config` of the job that was run: the bytes that the allocator reserves depend on it."""

    def __post_init__(self) -> None:
        if not 0 <= self.pp_rank < self.layout.pp:
            raise FactError(f"pp_rank={self.pp_rank} is not one of the layout's {self.layout.pp}")
        check_numbers(self, "slot", "allocator_peak_bytes", "reserved_peak_bytes", "device_peak_bytes", limit=0)


def memory_digest(job: Job) -> str:
    """Digest of all of a job, its layout apart, that a stage's bytes depend on."""
    return files.digest(job.model, job.batch, job.grad_reduce_in_bf16, job.optimizer, job.performance_flags)
