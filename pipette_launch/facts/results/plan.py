"""The result file: layout, placement, predictions, evidence and provenance."""

# schema_version history of plan.json
# 1  2026-11-21  first version

from __future__ import annotations

import reprlib
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pipette_launch.errors import FactError
from pipette_launch.facts.checks import check_numbers
from pipette_launch.facts.files import ADDED_LATER
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.machines.device_memory import MemoryNeed
from pipette_launch.facts.results.rate import Rate
from pipette_launch.facts.results.trials import Trials
from pipette_launch.facts.schedule_file import ScheduleFile


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One way to run the job, with what was predicted for it."""

    layout: Layout
    placement: tuple[int, ...]
    """RANK of each slot, slots host by host as in `Plan.hosts`."""
    schedule: str
    """Name of the pipeline schedule: Megatron's own are `1f1b`, `interleaved-1f1b` and `no-pipelining`."""
    step_time_s: float
    breakdown_s: dict[str, float]
    """Parts of the step time by name; they sum to it."""
    peak_memory_bytes: tuple[int, ...]
    """Predicted peak of the model's own tensors on each pipeline rank."""
    memory_limit_bytes: int
    """What these may need: of the device's free memory less the margin, what all else on the device leaves."""
    bound_s: float
    """No placement of this layout can be faster than this under the same model."""
    step_correction: float = field(default=1.0, metadata=ADDED_LATER)
    """What earlier outcomes on these machines made of the step time: it is this times the model's."""
    memory_correction: float = field(default=1.0, metadata=ADDED_LATER)
    """The same for the peaks."""
    device_peak_bytes: tuple[int, ...] = field(default=(), metadata=ADDED_LATER)
    """Peak on each pipeline rank with all overhead, uncorrected: what the driver should show."""
    features: dict[str, float] = field(default_factory=dict, metadata=ADDED_LATER)
    """Of layout and model, by which outcomes of several jobs are compared."""
    bound_reason: str = field(default="", metadata=ADDED_LATER)
    """What `bound_s` rests on, a sentence without its end; empty where it is the best link everywhere."""
    rate: Rate | None = field(default=None, metadata=ADDED_LATER)
    """What the predicted step comes to in tokens and FLOPs a second; None in files of earlier releases."""
    memory: MemoryNeed | None = field(default=None, metadata=ADDED_LATER)
    """Peaks and limit of the whole device; None in files of earlier releases."""
    order: ScheduleFile | None = field(default=None, metadata=ADDED_LATER)
    """What each pipeline rank does, where the schedule is none of Megatron's own and the patch `schedules` runs it."""
    is_order_checked: bool = field(default=False, metadata=ADDED_LATER)
    """NCCL returned every value in its place on these hosts' GPUs in the order of `placement`."""

    def __post_init__(self) -> None:
        size = self.layout.world_size
        if len(self.placement) != size or sorted(self.placement) != list(range(size)):
            raise FactError(
                f"placement must hold every rank from 0 to {size - 1} once, got {reprlib.repr(self.placement)}"
            )
        check_numbers(self, "step_time_s", "step_correction", "memory_correction", limit=0, above=True)
        check_numbers(self, "bound_s", limit=0)
        if min(self.peak_memory_bytes, default=0) <= 0:
            raise FactError(f"peak_memory_bytes must be above 0 on each stage, got {self.peak_memory_bytes}")

    @property
    def fits(self) -> bool:
        """Whether every stage stays below the limit."""
        return max(self.peak_memory_bytes) <= self.memory_limit_bytes

    @property
    def memory_shown(self) -> MemoryNeed:
        """What screens show: the whole device's figures, or from files of earlier releases the model's tensors'."""
        peaks, limit = self.peak_memory_bytes, self.memory_limit_bytes
        return self.memory or MemoryNeed(need_bytes=peaks, free_bytes=0, limit_bytes=limit)

    @property
    def is_host_order(self) -> bool:
        """Whether the placement is torchrun's own."""
        return self.placement == tuple(range(len(self.placement)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """Where a plan comes from, and to which job it belongs."""

    key: str
    """Digest of hosts, devices, model, batch, pins and versions; a plan is reused only where it agrees."""
    made_at: str
    versions: dict[str, str]
    source: Literal["measured", "cached", "file", "imagined"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The job and the machines of a plan, in words and sizes; nothing is computed from them."""

    script: str
    arguments: tuple[str, ...]
    """Behind the script's name, as the user gave them."""
    new_arguments: tuple[str, ...]
    """The same with the plan's layout written in."""
    num_parameters: int
    global_batch_size: int
    seq_length: int
    device_name: str
    device_memory_bytes: int
    machines: str
    """Where the machines' figures come from."""
    network: str
    """What lies between imagined hosts; empty where it was measured or there is one host."""

    def __post_init__(self) -> None:
        check_numbers(self, "num_parameters", "global_batch_size", "seq_length", "device_memory_bytes")

    @property
    def tokens_per_step(self) -> int:
        """Tokens that an optimizer step sees."""
        return self.global_batch_size * self.seq_length


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The choice, the runners-up in the order to try them, and the last resort: the user's own configuration."""

    KIND: ClassVar[str] = "plan"
    SCHEMA_VERSION: ClassVar[int] = 1

    hosts: tuple[str, ...]
    devices_per_host: int
    device_kind: Literal["cuda", "cpu"]
    chosen: Choice
    alternatives: tuple[Choice, ...]
    own: Choice
    """The user's own configuration; or what stands in for it, if `own_fault` says that it cannot run."""
    keeps_own: bool
    """The chosen one is the user's own: nothing else was better by the margin."""
    reasons: tuple[str, ...]
    """Why this was chosen, one sentence each."""
    notes: tuple[str, ...]
    """What was measured badly, assumed, pinned or not modelled, one sentence each."""
    num_layouts: int
    """Legal layouts that were looked at."""
    dropped: dict[str, int]
    """Layouts that fell out, by reason."""
    solve_s: float
    provenance: Provenance
    floor_s: float = field(default=0.0, metadata=ADDED_LATER)
    """No legal layout that fits is faster than this in any placement, under the same model; 0 = nothing was proven."""
    setting: Setting | None = field(default=None, metadata=ADDED_LATER)
    """The job and the machines it was made for, for readers of the file alone."""
    trials: Trials | None = field(default=None, metadata=ADDED_LATER)
    """Measured runs that decided the choice; None without trials."""
    num_in_line: int | None = field(default=None, metadata=ADDED_LATER)
    """So many of the alternatives, from the first, are better than the user's own; None: all of them, as predicted."""

    own_fault: str = field(default="", metadata=ADDED_LATER)
    """Why the user's own configuration cannot run; empty where it can.

    Where Megatron refuses it, `own` is a stand-in, or has the step time of another layout."""
    templates: tuple[Plan, ...] = field(default=(), metadata=ADDED_LATER)
    """Plans of the whole job for other numbers of hosts, the most hosts first; none has templates of its own."""
    other_hosts: tuple[str, ...] = field(default=(), metadata=ADDED_LATER)
    """Hosts that run no ranks of this plan and may take the place of those that do: spares, and those that were lost
    and may come back."""

    def __post_init__(self) -> None:
        slots = len(self.hosts) * self.devices_per_host
        for choice in (self.chosen, *self.alternatives, self.own):
            if choice.layout.world_size != slots:
                raise FactError(f"a layout of {choice.layout.world_size} ranks for {slots} slots")
        sizes = [len(one.hosts) for one in (self, *self.templates)]
        if len(set(sizes)) < len(sizes):
            raise FactError(f"a plan and its templates are for different numbers of hosts, got {sizes}")
        if any(one.templates or one.devices_per_host != self.devices_per_host for one in self.templates):
            raise FactError("a template has no templates of its own, and as many devices a host as its plan")
        if set(self.hosts) & set(self.other_hosts):
            raise FactError(f"a host runs ranks of the plan or none, got {self.hosts} and {self.other_hosts}")

    @property
    def known_hosts(self) -> tuple[str, ...]:
        """All hosts that the plan or one of its templates may run on."""
        named = (host for one in (self, *self.templates) for host in (*one.hosts, *one.other_hosts))
        return tuple(dict.fromkeys(named))

    @property
    def gap(self) -> float | None:
        """By how much of the floor the chosen step time exceeds it, at most; None where nothing was proven."""
        return max(self.chosen.step_time_s / self.floor_s - 1, 0.0) if self.floor_s > 0 else None

    def candidates(self) -> tuple[Choice, ...]:
        """What to try, in order, before the user's own configuration."""
        return () if self.keeps_own else (self.chosen, *self.alternatives[: self.num_in_line])

    def contenders(self) -> tuple[Choice, ...]:
        """What trials may set beside the user's own configuration, the most promising first."""
        listed = (*(() if self.keeps_own else (self.chosen,)), *self.alternatives)
        own = (self.own.layout, self.own.placement)
        return tuple(choice for choice in listed if (choice.layout, choice.placement) != own)
