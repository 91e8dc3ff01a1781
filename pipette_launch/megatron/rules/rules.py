"""Facts beside the layout that rules depend on."""

from __future__ import annotations

from dataclasses import dataclass

from pipette_launch.facts import Job
from pipette_launch.facts.co_location import Rooms
from pipette_launch.facts.job import PerformanceOptions
from pipette_launch.megatron.performance import performance_options


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """One job on one kind of device; `judge` applies the rules to its layouts.

    Sources: `validate_args` (megatron/training/arguments.py) and TransformerConfig of core_v0.14.0 to v0.19.0, with
    line numbers of v0.16.1, and what fails only at run time.
    """

    job: Job
    release: tuple[int, ...]
    """Megatron's release, read once from the job."""
    device_kind: str
    options: PerformanceOptions
    rooms: Rooms | None = None
    """Hosts and domains that must hold the ranks that flags demand together; None on CPU and for Megatron's rules."""

    @property
    def ramps_up(self) -> bool:
        """True if the batch grows; from 0.18 on Megatron ignores the flag (num_microbatches_calculator.py)."""
        return bool(self.options.rampup_batch_size) and self.release < (0, 18)

    @classmethod
    def of(cls, job: Job, *, device_kind: str, rooms: Rooms | None = None) -> Rules:
        """Read the options that a job's own flags set."""
        rooms = rooms if device_kind == "cuda" else None
        options = performance_options(job)
        return cls(job=job, release=job.release, device_kind=device_kind, options=options, rooms=rooms)
