"""The plan with predictions, fallback plans for fewer hosts, trials, and memory shortages of earlier plans."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from pipette_launch.errors import FactError
from pipette_launch.facts.cluster import Cluster, in_device_order
from pipette_launch.facts.files import check_numbers
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.measurements import MemoryNeed, MemoryVerdict, Samples
from pipette_launch.facts.schedule import ScheduleFile
from pipette_launch.text import bytes_text

MOST_RANKED = 200
"""Largest number of layouts in the ranked list of a plan, and of layouts on its front."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """Speed of a job in tokens and FLOPs per second."""

    tokens_per_s: float
    flops_per_s: float
    """FLOP/s of each rank, by Megatron's count of the model's FLOPs. Megatron's log calls it `TFLOP/s/GPU`."""
    mfu: float | None
    """Share of the device's dense peak in the format `peak_dtype`. None = the peak is unknown."""
    peak_dtype: str = ""
    """Format in which the layers' matrices are multiplied, such as `bf16` or `fp8`."""

    @classmethod
    def of(cls, job: Job, layout: Layout, step_time_s: float, cluster: Cluster, *, dtype: str) -> Rate | None:
        """Return the rate of a job whose optimizer step takes `step_time_s`; None if the step time is not above 0.

        The layers multiply their matrices in the format `dtype`. The peak of the devices is known only if all devices
        of the cluster have one type.
        """
        if step_time_s <= 0:
            return None
        model, samples = job.model, job.batch.global_batch_size
        flops_per_s = model.step_flops(samples, tp=layout.tp) / step_time_s / layout.world_size
        names = {device.name for host in cluster.hosts for device in host.devices}
        device = cluster.spec if len(names) == 1 else None
        peak = device.flops_per_s.get(dtype, 0.0) if device else 0.0
        return cls(
            tokens_per_s=samples * model.seq_length / step_time_s,
            flops_per_s=flops_per_s,
            mfu=flops_per_s / peak if peak else None,
            peak_dtype=dtype,
        )

    def times(self, factor: float) -> Rate:
        """Return the rate of a step that is `factor` times as fast."""
        return replace(
            self,
            tokens_per_s=self.tokens_per_s * factor,
            flops_per_s=self.flops_per_s * factor,
            mfu=None if self.mfu is None else self.mfu * factor,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One configuration that ran for a few iterations before the training."""

    layout: Layout
    placement: tuple[int, ...]
    is_own: bool
    """True for the user's own configuration in torchrun's order."""
    predicted_step_s: float
    step: Samples | None
    """Measured step times. The times are `None` after too few iterations, and `failure` gives the reason."""
    failure: str
    took_s: float
    """Seconds from the start of the workers until the workers' devices were free again."""

    @property
    def median_s(self) -> float:
        """Median of the measured step times. Infinite = no step time was measured."""
        return math.inf if self.step is None else self.step.median_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Trials:
    """Trials of the best plans and of the user's own configuration."""

    asked: int
    """Requested number of plans in trials (`--pipette-trials`). Fewer plans may have run."""
    iterations: int
    """Number of measured step times of each trial, without warm-up iterations."""
    runs: tuple[Trial, ...]

    @property
    def took_s(self) -> float:
        """Duration of all trials in seconds."""
        return sum(run.took_s for run in self.runs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One way to run the job, with predictions of time and memory."""

    layout: Layout
    placement: tuple[int, ...]
    """RANK of each slot, host by host in the order of `Plan.hosts`."""
    schedule: str
    """Name of the pipeline schedule. Megatron's own schedules are `1f1b`, `interleaved-1f1b` and `no-pipelining`."""
    step_time_s: float
    breakdown_s: dict[str, float]
    """Parts of the step time by name. All parts sum to the step time."""
    memory: MemoryNeed
    """Memory peaks and memory limit of the devices. A substitute (`Plan.own`) has the memory of another layout."""
    bound_s: float
    """Lower bound of the step time for all placements of this layout, in the same cost model."""
    step_correction: float = 1.0
    """Factor from earlier outcomes on these machines that is included in the step time."""
    configuration_digest: str = ""
    """Digest of model, batch and layout, by which later jobs compare outcomes. Empty = later jobs learn nothing."""
    rate: Rate | None = None
    """Tokens and FLOPs per second of the predicted step. None = unknown."""
    order: ScheduleFile | None = None
    """Passes of each pipeline rank, for schedules that the patch `schedules` runs."""
    new_arguments: tuple[str, ...] = ()
    """Arguments of the script with this layout, for alternatives. `Setting` has the chosen and the user's own ones."""

    def __post_init__(self) -> None:
        size = self.layout.world_size
        # A damaged file may name billions of ranks, so compare the length before making a list of ranks.
        if len(self.placement) != size or sorted(self.placement) != list(range(size)):
            shown = reprlib.repr(self.placement)
            raise FactError(f"placement must hold every rank from 0 to {size - 1} once, got {shown}")
        check_numbers(self, "step_time_s", "step_correction", limit=0, above=True)
        check_numbers(self, "bound_s", limit=0)

    @property
    def verdict(self) -> MemoryVerdict:
        """Result of the memory check."""
        return self.memory.verdict

    @property
    def fits(self) -> bool:
        """True if the memory of all pipeline ranks stays below the limit."""
        return self.verdict == "fits"

    @property
    def is_host_order(self) -> bool:
        """True if the placement is torchrun's order of ranks."""
        return self.placement == tuple(range(len(self.placement)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranked:
    """One layout of the ranked list or of the front, without a placement."""

    layout: Layout
    step_time_s: float
    """Predicted step time in the best placement that the search found."""
    need_bytes: int
    """Memory of the fullest device with all overhead."""
    rate: Rate | None
    """Speed at `step_time_s`."""
    breakdown_s: dict[str, float]
    """Parts of the step time by name."""
    new_arguments: tuple[str, ...] = ()
    """Arguments of the script with this layout."""

    def __post_init__(self) -> None:
        check_numbers(self, "step_time_s", limit=0, above=True)
        check_numbers(self, "need_bytes")

    @classmethod
    def of(cls, choice: Choice) -> Ranked:
        """Return the figures of a choice."""
        return cls(
            layout=choice.layout,
            step_time_s=choice.step_time_s,
            need_bytes=max(choice.memory.need_bytes),
            rate=choice.rate,
            breakdown_s=choice.breakdown_s,
            new_arguments=choice.new_arguments,
        )

    @property
    def lost_to(self) -> tuple[str, float] | None:
        """Longest part of the step beside compute, and its share of the step. None = the parts are unknown."""
        parts_s = {name: part_s for name, part_s in self.breakdown_s.items() if name != "compute"}
        if not parts_s:
            return None
        name = max(parts_s, key=lambda one: parts_s[one])
        return name.replace("_", " "), parts_s[name] / self.step_time_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """Origin of a plan, and the job to which the plan belongs."""

    key: str
    """Digest of hosts, devices, model, batch, fixed layout fields and versions. Plans with equal keys are reused."""
    made_at: str
    versions: dict[str, str]
    source: Literal["measured", "cached", "file", "imagined"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Job and machines of a plan, for people who read the plan file."""

    script: str
    arguments: tuple[str, ...]
    new_arguments: tuple[str, ...]
    """Arguments of the script with the plan's layout."""
    num_parameters: int
    global_batch_size: int
    seq_length: int
    device_name: str
    device_memory_bytes: int
    machines: str
    """Origin of the machines' figures."""
    network: str
    """Network between hosts that the user described. The text is empty for one host, or if the network was measured."""
    megatron_flags: tuple[str, ...] = ()
    """Megatron's flags that describe the same job as `arguments`; empty if `arguments` are Megatron's flags."""

    def __post_init__(self) -> None:
        check_numbers(self, "num_parameters", "global_batch_size", "seq_length", "device_memory_bytes")

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        return self.global_batch_size * self.seq_length


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The chosen configuration, the alternatives in order, and the user's own configuration, which is tried last."""

    KIND: ClassVar[str] = "plan"

    hosts: tuple[str, ...]
    devices_per_host: int
    device_kind: Literal["cuda", "cpu"]
    chosen: Choice
    alternatives: tuple[Choice, ...]
    own: Choice
    """The user's own configuration. With `own_fault`, `own` may be a substitute, or have another layout's step time."""
    keeps_own: bool
    """True if the chosen configuration is the user's own, because no other plan was better by the margin."""
    reasons: tuple[str, ...]
    """Reasons for the choice, one sentence each."""
    notes: tuple[str, ...]
    """Notes on poor measurements and assumptions, one sentence each."""
    num_layouts: int
    """Number of legal layouts that the search considered."""
    dropped: dict[str, int]
    solve_s: float
    provenance: Provenance
    floor_s: float = 0.0
    """Proven lower bound of the step time of all plans that fit, in the same cost model. 0 = no bound."""
    setting: Setting | None = None
    trials: Trials | None = None
    """Trials that decided the choice. The field is `None` if no trials ran."""
    num_in_line: int | None = None
    """Number of first alternatives that are better than the user's own configuration. None = all alternatives."""
    advice: tuple[str, ...] = ()
    """Notes on which the user can act: on flags, the own configuration, memory, hosts and files, one sentence each."""
    own_fault: str = ""
    """Reason why the user's own configuration cannot run. Empty = the configuration can run. If Megatron refuses the
    configuration, `own` is a substitute. If the search rules the configuration out, `own` has another layout's step
    time."""
    templates: tuple[Plan, ...] = ()
    """Fallback plans, which have no fallback plans themselves, beginning with the most hosts."""
    other_hosts: tuple[str, ...] = ()
    """Hosts without ranks in this plan that may replace a lost host: spares, and lost hosts that may return."""
    ranked: tuple[Ranked, ...] = ()
    """Best layout found for each of the fastest sets of parallel degrees: the chosen layout, then by step time."""
    front: tuple[Ranked, ...] = ()
    """Layouts by rising memory, each faster than all priced layouts with less memory."""

    def __post_init__(self) -> None:
        slots = len(self.hosts) * self.devices_per_host
        choices = (self.chosen, *self.alternatives, self.own)
        for layout in (*(one.layout for one in choices), *(one.layout for one in (*self.ranked, *self.front))):
            if layout.world_size != slots:
                raise FactError(f"a layout of {layout.world_size} ranks for {slots} slots")
        for one in choices if self.device_kind == "cuda" else ():
            # With permuted GPUs, NCCL may return slices in the order of devices, without an error (NVIDIA/nccl#1906).
            if list(one.placement) != in_device_order(one.placement, self.devices_per_host).tolist():
                shown = reprlib.repr(one.placement)
                raise FactError(f"on each host a GPU with a higher number needs a higher rank, got placement {shown}")
        if max(len(self.ranked), len(self.front)) > MOST_RANKED:
            raise FactError(f"ranked and front have at most {MOST_RANKED} layouts each")
        sizes = [len(one.hosts) for one in (self, *self.templates)]
        if len(set(sizes)) < len(sizes):
            raise FactError(f"a plan and its fallback plans need different numbers of hosts, got {sizes}")
        if any(one.templates or one.devices_per_host != self.devices_per_host for one in self.templates):
            raise FactError("a fallback plan has no fallback plans, and as many devices per host as its plan")
        if set(self.hosts) & set(self.other_hosts):
            raise FactError(f"hosts and other_hosts must not overlap, got {self.hosts} and {self.other_hosts}")

    @property
    def known_hosts(self) -> tuple[str, ...]:
        """Names of all hosts of the plan and of the fallback plans."""
        named = (host for one in (self, *self.templates) for host in (*one.hosts, *one.other_hosts))
        return tuple(dict.fromkeys(named))

    @property
    def gap(self) -> float | None:
        """Largest share by which the step time can exceed the best step time. None = no lower bound was proven."""
        return max(self.chosen.step_time_s / self.floor_s - 1, 0.0) if self.floor_s > 0 else None

    def candidates(self) -> tuple[Choice, ...]:
        """Return the choices in the order in which to try them before the user's own configuration."""
        return () if self.keeps_own else (self.chosen, *self.alternatives[: self.num_in_line])

    def contenders(self) -> tuple[Choice, ...]:
        """Return choices for trials beside the user's own configuration, beginning with the most promising choice."""
        listed = (*(() if self.keeps_own else (self.chosen,)), *self.alternatives)
        own = (self.own.layout, self.own.placement)
        return tuple(choice for choice in listed if (choice.layout, choice.placement) != own)


def refit(plan: Plan, hosts: Sequence[str]) -> Plan | None:
    """Choose the fastest among a plan and its fallback plans that the present hosts can run.

    A host in the chosen plan keeps its ranks. The ranks of a missing host go to a remaining host: first to hosts that
    had ranks before, then in torchrun's order (the order of `hosts`). If several plans are equally fast, the plan for
    the most hosts is taken. The other plans become fallback plans. Return None if even the smallest plan needs more
    hosts, or if the plan does not know one of the hosts.
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
    not_taken = fallback_plans(one for one in plans if one is not taken)
    return replace(
        taken, hosts=placed, templates=not_taken, other_hosts=tuple(host for host in known if host not in placed)
    )


def from_candidate(plan: Plan, attempt: int) -> Plan:
    """Remove the candidates that could not start, so that the result begins with the candidate that ran."""
    candidates = plan.candidates()
    if attempt == 0:
        return plan
    if attempt >= len(candidates):
        return replace(plan, chosen=plan.own, alternatives=(), keeps_own=True, num_in_line=None)
    in_line = None if plan.num_in_line is None else plan.num_in_line - attempt
    return replace(plan, chosen=candidates[attempt], alternatives=plan.alternatives[attempt:], num_in_line=in_line)


def fallback_plans(plans: Iterable[Plan]) -> tuple[Plan, ...]:
    """Remove the plans' own fallback plans, and sort the plans by number of hosts, most hosts first."""
    bare = (replace(one, templates=(), other_hosts=()) for one in plans)
    return tuple(sorted(bare, key=lambda one: -len(one.hosts)))


def in_order_of(plan: Plan, hosts: Sequence[str]) -> Plan:
    """List the plan's hosts in another order. In each candidate, each host keeps its ranks.

    The user's own configuration still runs in torchrun's order.
    """
    size = plan.devices_per_host
    places = [plan.hosts.index(host) for host in hosts]

    def moved(choice: Choice) -> Choice:
        slots = (place * size + local for place in places for local in range(size))
        return replace(choice, placement=tuple(choice.placement[slot] for slot in slots))

    alternatives = tuple(map(moved, plan.alternatives))
    return replace(plan, hosts=tuple(hosts), chosen=moved(plan.chosen), alternatives=alternatives)


MOST_CHARACTERS = 1000
"""Largest number of characters of the fields `cause` and `noticed_at` of a shortage."""
LEAST_SHARE = 0.5
"""A plan whose predicted need was below this share of the free memory did not cause the shortage."""
MOST_MARGIN = 1 - 2**-50
"""Upper limit of the memory margin, because a margin of 1 is not legal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortage:
    """The file shortage.json: among the plans that ran out of memory, the plan with the least predicted need."""

    KIND: ClassVar[str] = "shortage"

    layout: Layout
    need_bytes: int
    """Predicted memory of the fullest device, with all overhead."""
    free_bytes: int
    """Free memory of the fullest device before the job."""
    cause: str
    """Cause of the failed plan's end, in one sentence."""
    noticed_at: str

    def __post_init__(self) -> None:
        check_numbers(self, "need_bytes")
        if self.need_bytes > self.free_bytes:
            raise FactError(f"need_bytes={self.need_bytes} is above free_bytes={self.free_bytes}")
        longest = max(len(self.cause), len(self.noticed_at))
        if longest > MOST_CHARACTERS:
            raise FactError(f"cause and noticed_at have at most {MOST_CHARACTERS} characters, got {longest}")

    @classmethod
    def of(cls, choice: Choice, *, cause: str, noticed_at: str) -> Shortage | None:
        """Return the shortage of a plan.

        Return None if the plan was not predicted to fit, or if the plan's predicted need was small. `cause` is a
        sentence for the user on the end of the plan.
        """
        memory = choice.memory
        if not memory.fits:
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
        """Predicted need of the failed plan divided by free memory."""
        return self.need_bytes / self.free_bytes

    def margin(self, memory_margin: float) -> float:
        """Return the memory margin for new plans of a job that once ran out of memory, at least `memory_margin`.

        A plan with a predicted need of `share` of the free memory needed more than all free memory. So the real need is
        assumed to be 1 / share times the prediction. A new plan fits if need / share <= (1 - memory_margin) * free
        memory.
        """
        # Subtract one byte, so that the same plan does not fit again under a margin of 0.
        share = (self.need_bytes - 1) / self.free_bytes
        return max(memory_margin, min(1 - (1 - memory_margin) * share, MOST_MARGIN))

    def rules_out(self, choice: Choice) -> bool:
        """Return True if a plan is predicted to need at least as large a share of memory as the failed plan."""
        memory = choice.memory
        return max(memory.need_bytes) * self.free_bytes >= self.need_bytes * memory.free_bytes

    def leaner(self, plan: Plan) -> Plan | None:
        """Return the plan from its first candidate on that the shortage does not rule out, or None."""
        candidates = plan.candidates() or (plan.own,)
        attempts = (attempt for attempt, choice in enumerate(candidates) if not self.rules_out(choice))
        attempt = next(attempts, None)
        return None if attempt is None else from_candidate(plan, attempt)

    @property
    def sentence(self) -> str:
        """Sentence for the user with the failed plan, the time, the cause and the prediction."""
        return (
            f"the plan {self.layout.words()} ran out of memory at {self.noticed_at} ({self.cause}), although it was "
            f"predicted to need only {bytes_text(self.need_bytes)} of {bytes_text(self.free_bytes)}"
        )


def lower(one: Shortage | None, other: Shortage | None) -> Shortage | None:
    """Return the shortage that rules out more plans. If both shortages are equal, return the first shortage."""
    return min(filter(None, (one, other)), key=lambda shortage: shortage.share, default=None)
