"""What a running job says of itself at one moment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from pipette_launch.facts.health.verdict import Verdict

STALE_S = 60.0
"""A launcher writes every 10 s; one that has not written for so long is gone, or its file system is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveJob:
    """Figures of a job as its files have them; None and empty are not known. Moments are seconds since 1970."""

    KIND: ClassVar[str] = "live-job"
    SCHEMA_VERSION: ClassVar[int] = 1

    read_s: float
    """When this was read."""
    written_s: float
    """When the launcher last wrote it."""
    script: str = ""
    host: str = ""
    """The first of those that run ranks."""
    nodes: int = 0
    began_s: float | None = None
    phase: str = ""
    """`warmup`, `trials`, `training`, `succeeded` or `failed`."""
    phase_began_s: float | None = None
    warmup_phase: str = ""
    """What a warm-up measures at present."""
    warmup_done: int = 0
    warmup_total: int = 0
    """Steps of that; 0 where they are not counted."""
    warmup_phase_s: dict[str, float] = field(default_factory=dict)
    """What the phases of the warm-up took that have ended."""
    key: str = ""
    """Of the plan."""
    layout: str = ""
    schedule: str = ""
    restarts: int = 0
    lost_nodes: int = 0
    predicted_step_s: float | None = None
    own_predicted_step_s: float | None = None
    """Of the user's own configuration."""
    step_s: float | None = None
    """As the training printed it last."""
    predicted_tokens_per_s: float | None = None
    tokens_per_s: float | None = None
    iteration: int | None = None
    iterations: int | None = None
    """How many there are to be."""
    printed_s: float | None = None
    """When the last iteration was printed."""
    memory_need_bytes: int | None = None
    memory_limit_bytes: int | None = None
    measured_memory_bytes: int | None = None
    verdicts: tuple[Verdict, ...] = ()
    """What is amiss with the machines, by the measurements that the plan rests on."""

    @property
    def age_s(self) -> float:
        """How long ago it was written; clocks of two machines may differ."""
        return max(self.read_s - self.written_s, 0.0)

    @property
    def is_over(self) -> bool:
        """Whether the job has ended."""
        return self.phase in ("succeeded", "failed")

    @property
    def is_stale(self) -> bool:
        """Whether a job that should go on has not been heard of for too long."""
        return not self.is_over and self.age_s > STALE_S
