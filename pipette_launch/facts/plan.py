"""How fast a step is, in tokens and in FLOPs, and what part of the devices' peak that is."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from pipette_launch.errors import FactError
from pipette_launch.facts.cluster import Cluster
from pipette_launch.facts.files import ADDED_LATER, check_numbers
from pipette_launch.facts.job import Job
from pipette_launch.facts.known_devices import spec_of_cluster
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.measurements import MemoryNeed, Samples
from pipette_launch.facts.schedule import ScheduleFile
from pipette_launch.text import bytes_text


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """What a job does in a second."""

    tokens_per_s: float
    """Of the whole job."""
    flops_per_s: float
    """Of each rank, by Megatron's count of the model's FLOPs: its `TFLOP/s/GPU`."""
    mfu: float | None
    """Part of the device's dense peak in the format of the weights (FP8 does not count); None where it is unknown."""

    @classmethod
    def of(cls, job: Job, layout: Layout, step_time_s: float, cluster: Cluster) -> Rate | None:
        """Return the rate of a job under a layout whose step takes so long; None without a time above 0.

        Args:
            job: model and batch.
            layout: what runs.
            step_time_s: of one optimizer step.
            cluster: whose devices' peak counts, if they are of one type.

        """
        if step_time_s <= 0:
            return None
        model, samples = job.model, job.batch.global_batch_size
        flops_per_s = model.step_flops(samples, tp=layout.tp) / step_time_s / layout.world_size
        names = {device.name for host in cluster.hosts for device in host.devices}
        device = spec_of_cluster(cluster) if len(names) == 1 else None
        peak = device.flops_per_s.get(model.params_dtype, 0.0) if device else 0.0
        return cls(
            tokens_per_s=samples * model.seq_length / step_time_s,
            flops_per_s=flops_per_s,
            mfu=flops_per_s / peak if peak else None,
        )

    def times(self, factor: float) -> Rate:
        """Return the rate of a step that is so many times as fast."""
        return replace(
            self,
            tokens_per_s=self.tokens_per_s * factor,
            flops_per_s=self.flops_per_s * factor,
            mfu=None if self.mfu is None else self.mfu * factor,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One configuration that was tried."""

    layout: Layout
    placement: tuple[int, ...]
    is_own: bool
    """The user's own configuration in torchrun's order."""
    predicted_step_s: float
    step: Samples | None
    """None where it did not come to enough iterations; `failure` then says why."""
    failure: str
    took_s: float
    """From the start of the workers until their devices were free again."""

    @property
    def median_s(self) -> float:
        """The step time that was measured; infinite where none was."""
        return math.inf if self.step is None else self.step.median_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Trials:
    """Measured runs of the best plans and of the user's own configuration, before the training."""

    asked: int
    """How many plans were to be tried (`--pipette-trials`); there may have been fewer."""
    iterations: int
    """How many step times of each count, behind its warm-ups."""
    runs: tuple[Trial, ...]
    """In the order in which they ran."""

    @property
    def took_s(self) -> float:
        """All of them together."""
        return sum(run.took_s for run in self.runs)


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


def refit(plan: Plan, hosts: Sequence[str]) -> Plan | None:
    """Fit the quickest of a plan and its templates that the hosts that are there suffice for.

    Hosts that it names keep their places, and with them the ranks that it gives them. The place of each host that is
    not there goes to one that is left over: first to those that ran ranks before, then in torchrun's order. The others
    stand by. Of plans that are equally quick the one with the most hosts is taken. The others become its templates.

    Args:
        plan: what was run before.
        hosts: names of those that are there, in torchrun's order.

    Returns:
        None where even the smallest plan needs more hosts, or one of the hosts is unknown to the plan.

    """
    known, plans = plan.known_hosts, (plan, *plan.templates)
    fitting = [one for one in plans if len(one.hosts) <= len(hosts)]
    if not fitting or not set(hosts) <= set(known):
        return None
    taken = min(fitting, key=lambda one: (one.chosen.step_time_s, -len(one.hosts)))
    left_over = [host for host in hosts if host not in taken.hosts]
    left_over.sort(key=lambda host: host not in plan.hosts)
    stand_ins = iter(left_over)
    placed = tuple(host if host in hosts else next(stand_ins) for host in taken.hosts)
    return replace(
        taken if placed == taken.hosts else _unchecked(taken),
        hosts=placed,
        templates=by_size(one for one in plans if one is not taken),
        other_hosts=tuple(host for host in known if host not in placed),
    )


def _unchecked(plan: Plan) -> Plan:
    """Forget which device orders were checked, as the hosts are others."""
    chosen, *others = (replace(one, is_order_checked=False) for one in (plan.chosen, *plan.alternatives))
    return replace(plan, chosen=chosen, alternatives=tuple(others))


def from_candidate(plan: Plan, attempt: int) -> Plan:
    """Leave out the candidates that could not start: the first of the plan is then the one that ran.

    Args:
        plan: what was run.
        attempt: which of its candidates ran; past the last, the user's own configuration.

    """
    candidates = plan.candidates()
    if attempt == 0:
        return plan
    if attempt >= len(candidates):
        return replace(plan, chosen=plan.own, alternatives=(), keeps_own=True, num_in_line=None)
    in_line = None if plan.num_in_line is None else plan.num_in_line - attempt
    return replace(plan, chosen=candidates[attempt], alternatives=plan.alternatives[attempt:], num_in_line=in_line)


def by_size(plans: Iterable[Plan]) -> tuple[Plan, ...]:
    """Make templates of plans: the most hosts first, and none with templates of its own."""
    bare = (replace(one, templates=(), other_hosts=()) for one in plans)
    return tuple(sorted(bare, key=lambda one: -len(one.hosts)))


def in_order_of(plan: Plan, hosts: Sequence[str]) -> Plan:
    """List a plan's hosts in another order; every host keeps the ranks that it has, in each candidate.

    The user's own configuration runs in torchrun's order, whatever the plan lists first.
    """
    size = plan.devices_per_host
    places = [plan.hosts.index(host) for host in hosts]

    def moved(choice: Choice) -> Choice:
        slots = (place * size + local for place in places for local in range(size))
        return replace(choice, placement=tuple(choice.placement[slot] for slot in slots))

    return replace(
        plan, hosts=tuple(hosts), chosen=moved(plan.chosen), alternatives=tuple(map(moved, plan.alternatives))
    )


MOST_CHARACTERS = 1000
"""Of a cause or a moment."""
LEAST_SHARE = 0.5
"""Of what was free: a plan that was to need less is not to blame, as no prediction is wrong by half."""
MOST_MARGIN = 1 - 2**-50
"""Of memory that has to stay free: all of it is no margin that a planner takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortage:
    """The file shortage.json: of the plans that ran out of memory the one that was predicted to need the least."""

    KIND: ClassVar[str] = "shortage"
    SCHEMA_VERSION: ClassVar[int] = 1

    layout: Layout
    need_bytes: int
    """Predicted for the fullest device, all overhead included."""
    free_bytes: int
    """What was free on the fullest device before the job."""
    cause: str
    """How it ended."""
    noticed_at: str

    def __post_init__(self) -> None:
        check_numbers(self, "need_bytes")
        if self.need_bytes > self.free_bytes:
            raise FactError(f"need_bytes={self.need_bytes} is more than free_bytes={self.free_bytes}: it never fitted")
        longest = max(len(self.cause), len(self.noticed_at))
        if longest > MOST_CHARACTERS:
            raise FactError(f"a cause or a moment has at most {MOST_CHARACTERS} characters, got {longest}")

    @classmethod
    def of(cls, choice: Choice, *, cause: str, noticed_at: str) -> Shortage | None:
        """Return what a plan that ran out of memory teaches; None where that is nothing: it was not to fit, or easily.

        Args:
            choice: what ran.
            cause: how it ended, for the user.
            noticed_at: when.

        """
        memory = choice.memory
        if memory is None or not memory.fits:
            return None
        if not LEAST_SHARE * memory.free_bytes <= max(memory.need_bytes) <= memory.free_bytes:
            return None
        return cls(
            layout=choice.layout,
            need_bytes=max(memory.need_bytes),
            free_bytes=memory.free_bytes,
            cause=cause[:MOST_CHARACTERS],
            noticed_at=noticed_at,
        )

    @property
    def share(self) -> float:
        """The part of what was free that was not enough, as predicted."""
        return self.need_bytes / self.free_bytes

    def margin(self, memory_margin: float) -> float:
        """The part of a device's memory that a new plan must leave free, where else it would have to leave this much.

        What was predicted to need `share` of what was free needed more than all of it. So predictions are taken to be
        too low by 1 / share at least, and the margin stands beside that: need / share <= (1 - margin) free.
        """
        # One byte less: where no margin is asked for, the same plan must not fit again.
        share = (self.need_bytes - 1) / self.free_bytes
        return max(memory_margin, min(1 - (1 - memory_margin) * share, MOST_MARGIN))

    def rules_out(self, choice: Choice) -> bool:
        """Whether a plan is predicted to need as large a part of what is free as the one that ran out of memory."""
        memory = choice.memory
        return memory is not None and max(memory.need_bytes) * self.free_bytes >= self.need_bytes * memory.free_bytes

    def leaner(self, plan: Plan) -> Plan | None:
        """Leave out the candidates of a plan that are ruled out; None where none is left."""
        if plan.keeps_own:
            return None if self.rules_out(plan.own) else plan
        left = [choice for choice in plan.candidates() if not self.rules_out(choice)]
        if not left:
            return None
        if len(left) == len(plan.candidates()):
            return plan
        num_in_line = None if plan.num_in_line is None else len(left) - 1
        return replace(plan, chosen=left[0], alternatives=tuple(left[1:]), num_in_line=num_in_line)

    @property
    def sentence(self) -> str:
        """Say which plan ran out of memory, when, how, and what had been predicted."""
        return (
            f"the plan {self.layout.words()} ran out of memory at {self.noticed_at} ({self.cause}), though only "
            f"{bytes_text(self.need_bytes)} of {bytes_text(self.free_bytes)} were predicted to be needed"
        )


def lower(one: Shortage | None, other: Shortage | None) -> Shortage | None:
    """Return the shortage that rules out more; the first where they are alike."""
    return min(filter(None, (one, other)), key=lambda shortage: shortage.share, default=None)
