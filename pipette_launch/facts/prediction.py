"""Predictions for one configuration, and the answers of `pipette explain`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from pipette_launch.errors import FactError
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.measurements import MemoryVerdict
from pipette_launch.facts.plan import Rate

PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "overhead")
"""Kinds of a stage's memory, in the order on screens."""

MemoryFit = Literal[MemoryVerdict, "unknown"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """Predicted memory peak of the devices of one pipeline rank."""

    pp_rank: int
    num_layers: int
    """Transformer layers in all chunks of the stage."""
    parts_bytes: dict[str, int]
    """Bytes at the peak by kind of memory. The values sum to `peak_bytes`."""
    model_peak_bytes: int
    """Peak of torch's allocations for the model's own tensors."""
    peak_bytes: int
    """Memory peak of the device: tensors of the model and all overhead, with the allocator's cache."""
    least_bytes: int = 0
    """`peak_bytes` without the allocator's cache."""

    def __post_init__(self) -> None:
        if tuple(self.parts_bytes) != PARTS:
            raise FactError(f"a stage's memory has the parts {', '.join(PARTS)}, got {', '.join(self.parts_bytes)}")
        if sum(self.parts_bytes.values()) != self.peak_bytes:
            raise FactError(f"parts of {sum(self.parts_bytes.values())} bytes for a peak of {self.peak_bytes}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The document that `pipette predict --json` prints."""

    KIND: ClassVar[str] = "prediction"

    script: str
    layout: Layout
    schedule: str
    world_size: int
    num_hosts: int
    devices_per_host: int
    device_kind: Literal["cuda", "cpu"]
    device_name: str
    """The text is empty if the machines are unknown."""
    machines: str
    """Origin of the machines' figures, in a few words."""
    global_batch_size: int
    num_microbatches: int
    num_parameters: int
    tokens_per_step: int
    stages: tuple[StageMemory, ...]
    capacity_bytes: int | None
    """Free memory of the fullest device. The value is `None` if the machines are unknown."""
    memory_margin: float
    fits: bool | None
    """True if all shown stages leave the memory margin free. The value is `None` if the machines are unknown."""
    verdict: MemoryFit
    """Verdict of `MemoryNeed.verdict` on the shown stages, or `unknown` for unknown machines."""
    step_time_s: float | None
    """None = the machines are unknown, or the job's times cannot be predicted. A note gives the reason."""
    breakdown_s: dict[str, float]
    """Parts of the step time by name. All parts sum to the step time."""
    notes: tuple[str, ...]
    """All assumptions and omissions, one sentence each."""
    megatron_version: str
    rate: Rate | None = None
    """Tokens and FLOPs per second of the predicted step. The rate is `None` if there is no predicted step time."""
    limit_bytes: int | None = None
    """Memory that a rank may use: `capacity_bytes` minus the margin. The limit is `None` for unknown machines."""
    remedies: tuple[str, ...] = ()
    """Flags or environment variables, each of which would make the configuration fit by itself."""
    expandable_peak_bytes: int | None = None
    """Peak of the fullest stage with expandable segments of torch's allocator. None = they would change nothing."""

    @property
    def fullest(self) -> StageMemory:
        """First of the stages with the highest memory peak."""
        return max(self.stages, key=lambda stage: stage.peak_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """One entry of the glossary, with the value in a plan."""

    key: str
    what: str
    unit: str
    how: str
    source: str
    value: str
    """Value of the glossary's number in the plan, with a unit. Empty = no plan, or the plan lacks this number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Explained:
    """The document that `pipette explain --json` prints."""

    KIND: ClassVar[str] = "explained"

    keys: tuple[Explanation, ...]
