"""What the warm-up measured, with the samples, their spread and the conditions of the devices."""

# H = hosts, row sends to column.
# H = hosts, D = devices of one host, S = slots (all devices of all hosts, host by host); kept ones come in their order.

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pipette_launch.errors import FactError
from pipette_launch.facts import files
from pipette_launch.facts.cluster import Cluster, Links
from pipette_launch.facts.files import ADDED_LATER, check_numbers, to_plain
from pipette_launch.facts.health import DeviceCondition, Verdict
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.model import LETTERS, TRANSFORMER_KINDS, ModelSpec


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


Origin = Literal["measured", "again", "estimated", "cached"]
ORIGINS: dict[str, Origin] = {"m": "measured", "a": "again", "e": "estimated", "c": "cached"}
"""`again`: the link looked slow and was measured twice; the better value counts."""
UNSTABLE_SPREAD = 0.10
"""A spread above this makes a value unstable (pyperf's rule)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RailRates:
    """What each device of a host got, all of them sending to their counterparts of another host at once."""

    source: int
    target: int
    bytes_per_s: tuple[float, ...]
    """D numbers; 0 = not measured."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LinkSurvey:
    """Where each entry of `Cluster.between_hosts` comes from."""

    spread_HH: NDArray[np.float64]
    """Median absolute deviation over the median, of the largest message; 0 where nothing was measured."""
    origin_HH: tuple[str, ...]
    """H rows of H letters, see `ORIGINS`; `-` on the diagonal."""
    rails: tuple[RailRates, ...] = ()
    """Of hosts with several devices; among very many pairs only those whose rails differ."""
    rounds: int = 0
    """Rounds between hosts in which everything was first measured."""
    rounds_again: int = 0
    """Rounds in which suspects were measured a second time."""

    def __post_init__(self) -> None:
        size = len(self.origin_HH)
        spread = np.array(self.spread_HH, dtype=np.float64)
        if spread.shape != (size, size) or not (spread >= 0).all():
            raise FactError(f"survey: spread_HH must be {size} x {size} numbers and none below 0")
        spread.flags.writeable = False
        object.__setattr__(self, "spread_HH", spread)
        for host, row in enumerate(self.origin_HH):
            links = row[:host] + row[host + 1 :]
            if len(row) != size or row[host] != "-" or not set(links) <= set(ORIGINS):
                raise FactError(
                    f"survey: origin_HH[{host}] must be {size} letters, '-' at {host} and else of {''.join(ORIGINS)}, "
                    f"got {row!r}"
                )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LinkSurvey) and to_plain(self) == to_plain(other)

    def __hash__(self) -> int:
        return hash(self.origin_HH)

    def origin(self, source: int, target: int) -> Origin:
        """Where the figure of the link from host `source` to host `target` comes from."""
        return ORIGINS[self.origin_HH[source][target]]


ERROR_OF_MEDIAN = 1.4826 * 1.2533
"""Standard error of a median, times the root of the count, over the median absolute deviation (normal scatter)."""
LAYERS: tuple[str, ...] = (*TRANSFORMER_KINDS, *LETTERS.values())
"""The parts of a model that are layers."""

Part: TypeAlias = Literal[
    "layer",
    "moe_layer",
    "mamba_layer",
    "attention_layer",
    "mlp_layer",
    "expert_layer",
    "embedding",
    "head",
    "core_attention",
    "prediction",
]
"""What is timed by itself: `LAYERS`, the model's ends, the core within an attention, a depth of prediction."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """Repeated timings of one thing; warm-ups are kept, and kept apart."""

    values_s: tuple[float, ...]
    warmup_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.values_s or not all(value >= 0 for value in self.values_s):
            raise FactError(f"samples need at least one value and none below 0, got {self.values_s}")

    @property
    def median_s(self) -> float:
        """The median."""
        return self.values_s[0] if len(self.values_s) == 1 else statistics.median(self.values_s)

    @property
    def spread(self) -> float:
        """Median absolute deviation over the median; 0 for a single value."""
        middle = self.median_s
        return statistics.median(abs(value - middle) for value in self.values_s) / middle if middle else 0.0

    @property
    def median_error_s(self) -> float:
        """Standard error of the median, were the scatter normal; 0 for a single value, of which nothing is known."""
        return ERROR_OF_MEDIAN * self.spread * self.median_s / math.sqrt(len(self.values_s))

    @property
    def is_unstable(self) -> bool:
        """Whether the spread is too large to trust the median."""
        return self.spread > UNSTABLE_SPREAD

    def times(self, factor: float) -> Samples:
        """All timings multiplied."""
        return Samples(
            values_s=tuple(value * factor for value in self.values_s),
            warmup_s=tuple(value * factor for value in self.warmup_s),
        )

    def joined(self, other: Samples) -> Samples:
        """These timings and later ones of the same thing."""
        return Samples(values_s=self.values_s + other.values_s, warmup_s=self.warmup_s + other.warmup_s)


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class ComputeCase:
    """One shape of computation that a layout would run on a slot."""

    tp: int
    cp: int
    micro_batch_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeTime:
    """How long one part of the model takes on one slot, for one micro-batch, without communication."""

    case: ComputeCase
    part: Part
    """`core_attention` lies within the layer; where it is known, selective recompute costs what it took.

    `prediction` is one depth of multi-token prediction: embedding, projection, layers, and a head and loss of its own.
    """
    slot: int
    forward: Samples
    input_grad: Samples
    """Backward with respect to the input only."""
    weight_grad: Samples
    """What the full backward takes beyond `input_grad`."""
    forward_idle_s: float = field(default=0.0, metadata=ADDED_LATER)
    """Of the forward, seconds in which the device waits for the host: collectives pass in them at no cost."""
    backward_idle_s: float = field(default=0.0, metadata=ADDED_LATER)
    """The same of the two passes of the backward."""
    source: Literal["measured", "modelled", "cached"] = field(default="measured", metadata=ADDED_LATER)
    """`modelled` was carried over from another case by the device model, `cached` comes from an earlier warm-up."""
    recompute: Samples | None = field(default=None, metadata=ADDED_LATER)
    """What forward and backward take longer where full recompute runs a layer again; None = not measured."""

    ep: int = field(default=0, metadata=ADDED_LATER)
    """Expert parallelism under which a part with experts takes so long; 0 = the same for all, or no experts."""
    etp: int = field(default=0, metadata=ADDED_LATER)
    """The same of the experts' tensor parallelism."""

    def __post_init__(self) -> None:
        check_numbers(self, "forward_idle_s", "backward_idle_s", "ep", "etp", limit=0)

    def times(self, factor: float) -> ComputeTime:
        """All passes multiplied; the idle part of them is left as it is."""
        return replace(
            self,
            forward=self.forward.times(factor),
            input_grad=self.input_grad.times(factor),
            weight_grad=self.weight_grad.times(factor),
            recompute=self.recompute and self.recompute.times(factor),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveTime:
    """Seconds = latency_s + bytes * seconds_per_byte, fitted over several sizes on one kind of group.

    `bytes` is the size of the full tensor on one rank (before a reduce-scatter, after an all-gather).
    """

    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
    slots: tuple[int, ...]
    """One group for which this was measured; groups of equal shape were measured at the same time."""
    latency_s: float
    seconds_per_byte: float
    spread: float
    sizes_bytes: tuple[int, ...]

    def __post_init__(self) -> None:
        check_numbers(self, "latency_s", "seconds_per_byte", limit=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReading:
    """Peak memory of one layer's forward and backward on one slot."""

    case: ComputeCase
    slot: int
    allocator_peak_bytes: int
    """Growth over the idle model: of torch's allocations on CUDA, of the resident set on CPU."""
    device_peak_bytes: int
    """NVML's used bytes on CUDA; the resident set on CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadingTime:
    """Seconds that a stage which needs tokens or labels takes to load a micro-batch."""

    batch_s: float
    """However many samples it has."""
    sample_s: float
    """For each sample."""

    def __post_init__(self) -> None:
        check_numbers(self, "batch_s", "sample_s", limit=0)

    def seconds(self, micro_batch_size: int) -> float:
        """Of one micro-batch."""
        return self.batch_s + self.sample_s * micro_batch_size


class Coverage(NamedTuple):
    """Number of cases that all slots of a warm-up timed, and number of cases in its orders."""

    num_timed: int
    num_wanted: int

    def words(self) -> str:
        """Return the count as a phrase, with a warning if fewer than half of the cases were timed."""
        said = f"{self.num_timed} of {self.num_wanted} combinations of tp, cp and micro-batch timed"
        if 2 * self.num_timed >= self.num_wanted:
            return said
        return f"{said}, fewer than half: the plan rests on a device model"


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurements:
    """The file cluster.json: the allocation and everything that was measured on it."""

    KIND: ClassVar[str] = "cluster"
    SCHEMA_VERSION: ClassVar[int] = 1

    cluster: Cluster
    compute: tuple[ComputeTime, ...]
    collectives: tuple[CollectiveTime, ...]
    memory: tuple[MemoryReading, ...]
    overhead_bytes: int
    """Device memory outside the allocator (context, communicators, workspaces), the largest slot's; 0 on CPU."""
    versions: dict[str, str]
    taken_at: str
    """UTC, ISO 8601."""
    phase_s: dict[str, float]
    """Seconds that each phase of the warm-up took."""
    notes: tuple[str, ...]
    """What was skipped, looks unstable, or was assumed, one sentence each."""
    optimizer_s_per_parameter: float | None = None
    """Seconds of an optimizer step for each parameter whose state a slot holds; None = not measured."""
    wake_s: float = field(default=0.0, metadata=ADDED_LATER)
    """Seconds that forward and backward of a chunk together take longer where each comes after a wait, as in pipelines.

    0 where it was not measured, as on GPUs.
    """
    loading: LoadingTime | None = field(default=None, metadata=ADDED_LATER)
    """Under Megatron-LM's own trainer on CPUs; None where it was not measured."""
    gradient_s_per_byte: float = field(default=0.0, metadata=ADDED_LATER)
    """Seconds once a step for each byte of gradients that a slot holds, whoever steps them; 0 = not measured.

    Gradients are cleared, checked and scaled; on CPUs it is mostly the calls that the optimizer makes for each tensor.
    """
    step_s: float = field(default=0.0, metadata=ADDED_LATER)
    """Seconds of the host once a step, while the device waits; 0 where it was not measured."""
    host_bytes_per_s: float = field(default=0.0, metadata=ADDED_LATER)
    """Of a slot to its host's memory, and as fast back; 0 where it was not measured, as by warm-ups."""
    refused: tuple[ComputeCase, ...] = field(default=(), metadata=ADDED_LATER)
    """Cases that megatron-core refuses, or that ran out of memory."""
    unmeasured: tuple[ComputeCase, ...] = field(default=(), metadata=ADDED_LATER)
    """Cases that the budget did not reach, most promising first."""
    model_digest: str = field(default="", metadata=ADDED_LATER)
    """Of the model whose layers were timed, see `layers_digest`; empty where an earlier release did not say."""
    conditions: tuple[DeviceCondition, ...] = field(default=(), metadata=ADDED_LATER)
    """What the driver reported of each slot's device before the warm-up, in slot order; empty = it was not asked."""
    verdicts: tuple[Verdict, ...] = field(default=(), metadata=ADDED_LATER)
    """Problems of hosts, devices and links, those that are bad enough to act upon first."""
    survey: LinkSurvey | None = field(default=None, metadata=ADDED_LATER)
    """Where the figures of links between hosts come from; None with one host, and in files that do not say."""
    overhead: DeviceOverhead | None = field(default=None, metadata=ADDED_LATER)
    """What `overhead_bytes` is made of, on the slot where it is largest; None = not measured apart, or no GPU."""
    stages: tuple[StageReading, ...] = field(default=(), metadata=ADDED_LATER)
    """Whole stages of layouts that may win, run on single devices."""

    def compute_cases(self) -> tuple[ComputeCase, ...]:
        """The cases that were measured, sorted."""
        return tuple(sorted({time.case for time in self.compute}))

    def coverage(self) -> Coverage:
        """Count the cases that this warm-up timed, and those in its orders that megatron-core runs."""
        known = {time.case: time.source for time in self.compute}
        num_timed = sum(source == "measured" for source in known.values())
        return Coverage(num_timed, len({*known, *self.unmeasured}))


def layers_digest(model: ModelSpec) -> str:
    """Digest what makes the layers of two models alike, however many they have."""
    plain = files.to_plain(model)
    # The warm-up times every layer without a window.
    of_all_layers = ("num_layers", "moe_layer_freq", "attention_windows")
    return files.digest({name: value for name, value in plain.items() if name not in of_all_layers})


def without_hosts(measurements: Measurements, names: Collection[str]) -> Measurements:
    """Leave out hosts, as if the job had never had them; slots are numbered anew.

    A shape of computation that only a host left out has timed is kept, as that slot of the remaining hosts would have
    taken that is nearest to it in speed: the times of the warm-up are dealt out over all slots.

    Args:
        measurements: of all hosts.
        names: the hosts to leave out; at least one other must remain.

    Raises:
        FactError: a name is none of a host, or no host remains.

    """
    cluster = measurements.cluster
    unknown = sorted(set(names) - {host.name for host in cluster.hosts})
    if unknown:
        raise FactError(f"{', '.join(unknown)}: no such host among {', '.join(host.name for host in cluster.hosts)}")
    kept_H = [index for index, host in enumerate(cluster.hosts) if host.name not in names]
    if not kept_H:
        raise FactError("no host remains")
    if len(kept_H) == len(cluster.hosts):
        return measurements
    size = cluster.devices_per_host
    kept_HH = np.ix_(kept_H, kept_H)
    links, survey = cluster.between_hosts, measurements.survey
    slots = {host * size + local: new * size + local for new, host in enumerate(kept_H) for local in range(size)}
    read = {reading.case for reading in measurements.memory if reading.slot in slots}
    speeds = [cluster.slot_speed[slot] for slot in slots]
    middle = statistics.median(speeds)
    return replace(
        measurements,
        cluster=Cluster(
            hosts=tuple(cluster.hosts[host] for host in kept_H),
            between_hosts=Links(
                latency_s=links.latency_s[kept_HH], bandwidth_bytes_per_s=links.bandwidth_bytes_per_s[kept_HH]
            ),
            within_host=tuple(cluster.within_host[host] for host in kept_H),
            # 1.0 is the median slot, of those that are left.
            slot_speed=tuple(speed / middle for speed in speeds),
            imagined=cluster.imagined,
        ),
        compute=_compute(measurements, slots),
        collectives=tuple(
            replace(time, slots=tuple(slots[slot] for slot in time.slots))
            for time in measurements.collectives
            if slots.keys() >= set(time.slots)
        ),
        # Memory is the same on any device, so readings of slots left out count where there are no others of a case.
        memory=tuple(
            replace(reading, slot=slots.get(reading.slot, 0))
            for reading in measurements.memory
            if reading.slot in slots or reading.case not in read
        ),
        stages=tuple(replace(reading, slot=slots.get(reading.slot, 0)) for reading in measurements.stages),
        conditions=tuple(measurements.conditions[slot] for slot in slots) if measurements.conditions else (),
        verdicts=tuple(one for one in measurements.verdicts if one.host not in names and one.other_host not in names),
        survey=_survey(survey, kept_H) if survey else None,
        notes=(*measurements.notes, f"measured with {', '.join(sorted(names))}, and planned without"),
    )


def _survey(survey: LinkSurvey, kept_H: Sequence[int]) -> LinkSurvey:
    new = {host: index for index, host in enumerate(kept_H)}
    return replace(
        survey,
        spread_HH=survey.spread_HH[np.ix_(kept_H, kept_H)],
        origin_HH=tuple("".join(survey.origin_HH[host][other] for other in kept_H) for host in kept_H),
        rails=tuple(
            replace(rail, source=new[rail.source], target=new[rail.target])
            for rail in survey.rails
            if {rail.source, rail.target} <= new.keys()
        ),
    )


def _compute(measurements: Measurements, slots: dict[int, int]) -> tuple[ComputeTime, ...]:
    """Times of the slots that are left, and of others what was timed nowhere else, as one of those would have it."""
    speed = measurements.cluster.slot_speed
    timed = {(time.case, time.part) for time in measurements.compute if time.slot in slots}
    times = []
    for time in measurements.compute:
        if time.slot in slots:
            times.append(replace(time, slot=slots[time.slot]))
        elif (time.case, time.part) not in timed:
            # Speed times seconds is what a slot of speed 1 would take.
            stand_in = min(slots, key=lambda slot: abs(speed[slot] - speed[time.slot]))
            factor = speed[time.slot] / speed[stand_in]
            idle = {name: factor * getattr(time, name) for name in ("forward_idle_s", "backward_idle_s")}
            times.append(replace(time.times(factor), slot=slots[stand_in], **idle))
    return tuple(times)
