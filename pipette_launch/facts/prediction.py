"""What is predicted of one configuration on one kind of machine: memory of every stage, and the step's time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pipette_launch.errors import FactError
from pipette_launch.facts.files import ADDED_LATER
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.plan import Choice, Rate

PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "overhead")
"""The kinds into which a stage's memory is split, in the order in which they are shown."""

MemoryFit = Literal["fits", "tight", "too large", "unknown"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """The peak of one pipeline rank's device, on each of its ranks alike."""

    pp_rank: int
    num_layers: int
    """Transformer layers, all chunks together."""
    parts_bytes: dict[str, int]
    """The split by kind at the peak; the values sum to `peak_bytes`."""
    model_peak_bytes: int
    """What torch has allocated for the model's own tensors at its peak."""
    peak_bytes: int
    """What the device holds: the model's tensors and all overhead."""

    def __post_init__(self) -> None:
        if tuple(self.parts_bytes) != PARTS:
            raise FactError(f"a stage's memory has the parts {', '.join(PARTS)}, got {', '.join(self.parts_bytes)}")
        if sum(self.parts_bytes.values()) != self.peak_bytes:
            raise FactError(f"parts of {sum(self.parts_bytes.values())} bytes for a peak of {self.peak_bytes}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The document that `pipette predict --json` writes."""

    KIND: ClassVar[str] = "prediction"
    SCHEMA_VERSION: ClassVar[int] = 1

    script: str
    layout: Layout
    schedule: str
    world_size: int
    num_hosts: int
    devices_per_host: int
    device_kind: Literal["cuda", "cpu"]
    device_name: str
    """Empty where nothing was said of the machines."""
    machines: str
    """Where the machines' figures come from, in a few words."""
    global_batch_size: int
    num_microbatches: int
    num_parameters: int
    """Of the whole model."""
    tokens_per_step: int
    method: Literal["closed", "abstract"]
    """How the model's tensors were counted."""
    stages: tuple[StageMemory, ...]
    """Those that were asked for, in the order of the pipeline."""
    capacity_bytes: int | None
    """Free memory of the fullest device; None where nothing was said of the machines."""
    memory_margin: float
    fits: bool | None
    """Whether every stage shown leaves the margin free; None without a capacity."""
    verdict: MemoryFit
    """`fits`; `tight` leaves less than the margin free, and the planner would not take it; `too large`."""
    step_time_s: float | None
    """None where the machines are unknown or cannot be priced; a note says why."""
    breakdown_s: dict[str, float]
    """Parts of the step by name; they sum to it."""
    notes: tuple[str, ...]
    """Every assumption and everything left out, one sentence each."""
    megatron_version: str
    rate: Rate | None = field(default=None, metadata=ADDED_LATER)
    """What the step comes to in tokens and FLOPs a second; None without a step time."""
    limit_bytes: int | None = field(default=None, metadata=ADDED_LATER)
    """What a rank may hold: `capacity_bytes` less the margin; None without a capacity."""
    remedies: tuple[str, ...] = field(default=(), metadata=ADDED_LATER)
    """Flags of which each alone would make the configuration fit."""

    @property
    def fullest(self) -> StageMemory:
        """The stage with the highest peak, the first of equals."""
        return max(self.stages, key=lambda stage: stage.peak_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """One of `facts.meanings`, with its value in a plan."""

    key: str
    what: str
    unit: str
    """Empty where it is no number."""
    how: str
    source: str
    value: str
    """With its unit; empty without a plan, and where the plan holds none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Explained:
    """The answer of `pipette explain`."""

    KIND: ClassVar[str] = "explained"
    SCHEMA_VERSION: ClassVar[int] = 1

    keys: tuple[Explanation, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One of the plans: a file's, or a planner's pick."""

    name: str
    choice: Choice | None
    """None where there is no plan, or nothing prices it."""
    gap: float | None
    """Of the step time over what was proven for all layouts; None where nothing was."""
    num_moved: int | None
    """Ranks that sit on another device than under the first entry; None where the machines are others."""
    faults: tuple[str, ...]
    """Why it cannot run, one sentence each; empty where it can."""
    remarks: tuple[str, ...]
    """What else to know, one sentence each."""

    @property
    def runs(self) -> bool:
        """Whether it can be compared with others that can."""
        return self.choice is not None and not self.faults


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What `pipette compare --json` prints; the others are compared with the first entry."""

    KIND: ClassVar[str] = "comparison"
    SCHEMA_VERSION: ClassVar[int] = 1

    entries: tuple[Entry, ...]
    notes: tuple[str, ...]
    """What makes the entries unlike in more than their plans, and what their prices rest on."""

    def __post_init__(self) -> None:
        if not self.entries:
            raise FactError("a comparison needs at least one entry")
