"""Measurements of the warm-up on all or some hosts: times, memory, links and device conditions."""

# Array axes: H = hosts (row = sender, column = receiver), D = devices of a host, S = slots (all devices, by host).

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pipette_launch.errors import FactError
from pipette_launch.facts import files
from pipette_launch.facts.cluster import Cluster, Links
from pipette_launch.facts.files import check_numbers
from pipette_launch.facts.health import DeviceCondition, Verdict
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.model import BLOCKS, LayerKind, ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceOverhead:
    """Memory of a warm-up worker's GPU outside the model, measured while no tensor of the model existed."""

    alone_bytes: int
    """NVML's used bytes minus the allocator's reserve before any communicator: CUDA's context and library code."""
    together_bytes: int
    """NVML's used bytes minus the allocator's reserve, while all communicators were open."""
    num_communicators: int
    workspace_bytes: int
    """Workspaces in torch's allocator, which a library allocates at its first use and keeps."""

    def __post_init__(self) -> None:
        check_numbers(self, "alone_bytes", "together_bytes", "num_communicators", "workspace_bytes", limit=0)

    @property
    def total_bytes(self) -> int:
        """Largest memory in bytes outside torch's allocator."""
        return max(self.alone_bytes, self.together_bytes)

    @property
    def communicator_bytes(self) -> int:
        """Average memory in bytes of one communicator. 0 = no communicator was open."""
        return max(self.together_bytes - self.alone_bytes, 0) // max(self.num_communicators, 1)


MemoryVerdict = Literal["fits", "tight", "too large"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryNeed:
    """Memory that a layout needs on each pipeline rank, and the memory limit, as all screens show these numbers."""

    need_bytes: tuple[int, ...]
    """Memory peak of each pipeline rank: tensors of the model and all overhead, with the allocator's cache."""
    free_bytes: int
    """Free memory of the fullest device before the job."""
    limit_bytes: int
    """Largest memory that a pipeline rank may need: free memory minus the memory margin."""
    least_bytes: tuple[int, ...]
    """`need_bytes` without the allocator's cache."""
    model_bytes: tuple[int, ...]
    """Peak of the model's own tensors on each pipeline rank."""
    correction: float = 1.0
    """Factor from earlier outcomes on these machines that is included in all peaks."""

    def __post_init__(self) -> None:
        check_numbers(self, "correction", limit=0, above=True)
        if min(self.model_bytes, default=0) <= 0:
            raise FactError(f"model_bytes must be above 0 on each stage, got {self.model_bytes}")
        if not len(self.need_bytes) == len(self.least_bytes) == len(self.model_bytes):
            raise FactError("need_bytes, least_bytes and model_bytes must have one number for each stage")

    @property
    def verdict(self) -> MemoryVerdict:
        """Result of the memory check: `fits`, `tight` or `too large`.

        A layout fits if all pipeline ranks stay below the limit. A tight layout exceeds the limit, but its device could
        hold everything except the allocator's cache. torch's allocator frees its cache before a job runs out of memory,
        so a tight layout may run. The planner chooses only layouts that fit.
        """
        if max(self.need_bytes) <= self.limit_bytes:
            return "fits"
        return "tight" if max(self.least_bytes) <= self.free_bytes else "too large"

    @property
    def fits(self) -> bool:
        """True if the memory of all pipeline ranks stays below the limit."""
        return self.verdict == "fits"

    @property
    def margin(self) -> float:
        """Share of the free memory that must stay free."""
        return 1 - self.limit_bytes / self.free_bytes if self.free_bytes else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StageReading:
    """Measured memory peak and seconds of one rank in a training step with micro-batches, gradients and optimizer."""

    job_digest: str
    """`memory_digest` of the job. The reading is valid only for jobs with the same digest."""
    layout: Layout
    pp_rank: int
    slot: int
    """Slot (host and device) of the measurement. The peak does not depend on the slot, but the seconds do."""
    allocator_peak_bytes: int
    """Peak of torch's allocations on CUDA, with workspaces. On CPU, the peak is the sum of the model's tensors."""
    reserved_peak_bytes: int
    """Peak of the memory that torch's allocator took from the device. 0 on CPU."""
    device_peak_bytes: int
    """Peak of NVML's used bytes on CUDA, without communicators. On CPU, the peak is the process's resident set."""
    ran_out: bool = False
    """True if the device ran out of memory during the step. All peaks then cover only the time before the failure."""
    allocator_config: str = ""
    """Value of `Job.allocator_config`, which affects `reserved_peak_bytes`."""
    num_microbatches: int = 0
    """Micro-batches in `schedule_s`. 0 = the step was not timed."""
    schedule_s: float = 0.0
    """Seconds of forward and backward of the micro-batches, without waits for batches and for other ranks."""
    update_s: float = 0.0
    """Seconds from the last backward to the end of the optimizer's step, without waits for other ranks."""

    def __post_init__(self) -> None:
        if not 0 <= self.pp_rank < self.layout.pp:
            raise FactError(f"pp_rank={self.pp_rank} is not one of the layout's {self.layout.pp}")
        check_numbers(self, "slot", "allocator_peak_bytes", "reserved_peak_bytes", "device_peak_bytes", limit=0)
        check_numbers(self, "num_microbatches", "schedule_s", "update_s", limit=0)

    def times(self, factor: float) -> StageReading:
        """Return the reading with its seconds multiplied by a factor."""
        return replace(self, schedule_s=self.schedule_s * factor, update_s=self.update_s * factor)


def memory_digest(job: Job) -> str:
    """Return a digest of all properties of a job, except the layout, that affect memory or seconds of a stage."""
    job_facts = (job.model, job.batch, job.grad_reduce_in_bf16, job.optimizer, job.performance_flags)
    return files.digest(*job_facts, job.megatron_version)


Origin = Literal["measured", "again", "estimated", "cached"]
ORIGINS: dict[str, Origin] = {"m": "measured", "a": "again", "e": "estimated", "c": "cached"}
"""Origins by letter. `again`: the link looked slow, so it was measured twice, and the better value counts."""
UNSTABLE_SPREAD = 0.10
"""Largest spread of a stable measurement, as in pyperf."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RailRates:
    """Bandwidth of each device of a host while each device exchanges messages with the same device of another host."""

    source: int
    target: int
    bytes_per_s: tuple[float, ...]
    """Bandwidth of each of the D devices of a host. 0 = not measured."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LinkSurvey:
    """Origin and spread of each measured link between hosts."""

    spread_HH: NDArray[np.float64]
    """Median absolute deviation divided by the median, for the largest message. 0 = not measured."""
    origin_HH: tuple[str, ...]
    """H rows with one letter of `ORIGINS` for each link. A host's link to itself has `-`."""
    rails: tuple[RailRates, ...] = ()
    """Bandwidth of each device for pairs of hosts. Large clusters list only pairs whose devices differ."""
    rounds: int = 0
    """Number of rounds of the first measurement between hosts."""
    rounds_again: int = 0
    """Number of rounds in which links that looked slow were measured a second time."""

    def __post_init__(self) -> None:
        size = len(self.origin_HH)
        spread = np.array(self.spread_HH, dtype=np.float64)
        if spread.shape != (size, size) or not (spread >= 0).all():
            raise FactError(f"survey: spread_HH must be {size} x {size} numbers, all at least 0")
        spread.flags.writeable = False
        object.__setattr__(self, "spread_HH", spread)
        for host, row in enumerate(self.origin_HH):
            links = row[:host] + row[host + 1 :]
            if len(row) != size or row[host] != "-" or not set(links) <= set(ORIGINS):
                wanted = f"'-' at {host}, the others of {''.join(ORIGINS)}"
                raise FactError(f"survey: origin_HH[{host}] must be {size} letters: {wanted}; got {row!r}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LinkSurvey):
            return False
        rest = ("origin_HH", "rails", "rounds", "rounds_again")
        is_same = all(getattr(self, name) == getattr(other, name) for name in rest)
        return is_same and np.array_equal(self.spread_HH, other.spread_HH)

    def __hash__(self) -> int:
        return hash(self.origin_HH)

    def origin(self, source: int, target: int) -> Origin:
        """Return the origin of the measured link from host `source` to host `target`."""
        return ORIGINS[self.origin_HH[source][target]]


ERROR_OF_MEDIAN = 1.4826 * 1.2533
"""Standard error of a median divided by (median absolute deviation / sqrt(count)), for normal scatter."""
LINK_REPEATS = 5
"""Number of timed messages behind each measured link, and of timed collectives of each size."""
LAYERS: tuple[str, ...] = tuple(BLOCKS)

CollectiveKind: TypeAlias = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
"""Collectives that the warm-up times."""

Part: TypeAlias = Literal[LayerKind, "embedding", "head", "core_attention", "prediction"]
"""Parts of a model that are measured separately: `LAYERS`, embedding, head, core attention, multi-token prediction."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """Repeated timings of one operation. Warm-up runs are stored separately."""

    values_s: tuple[float, ...]
    warmup_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.values_s or not all(value >= 0 for value in self.values_s):
            raise FactError(f"samples need at least one value, and all at least 0, got {self.values_s}")

    @property
    def median_s(self) -> float:
        """Median of the timings in seconds."""
        return self.values_s[0] if len(self.values_s) == 1 else statistics.median(self.values_s)

    @property
    def spread(self) -> float:
        """Median absolute deviation of the timings divided by the median. 0 for a single timing."""
        middle = self.median_s
        return statistics.median(abs(value - middle) for value in self.values_s) / middle if middle else 0.0

    @property
    def median_error_s(self) -> float:
        """Standard error of the median in seconds for normal scatter. 0 for a single timing."""
        return ERROR_OF_MEDIAN * self.spread * self.median_s / math.sqrt(len(self.values_s))

    @property
    def is_unstable(self) -> bool:
        """True if the spread is too large to trust the median."""
        return self.spread > UNSTABLE_SPREAD

    def times(self, factor: float) -> Samples:
        """Return the samples with all timings multiplied by a factor."""
        values, warmup = (tuple(value * factor for value in times) for times in (self.values_s, self.warmup_s))
        return Samples(values_s=values, warmup_s=warmup)

    def joined(self, other: Samples) -> Samples:
        """Append later timings of the same operation."""
        return Samples(values_s=self.values_s + other.values_s, warmup_s=self.warmup_s + other.warmup_s)


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class ComputeCase:
    """Options of a layout that decide the time of one layer on one device."""

    tp: int
    cp: int
    micro_batch_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeTime:
    """Time of one part of the model on one slot, for one micro-batch, without communication."""

    case: ComputeCase
    part: Part
    """`core_attention` is inside the layer: selective recompute costs the time of `core_attention`. `prediction` is one
    depth of multi-token prediction: embedding, projection, layers, head and loss."""
    slot: int
    forward: Samples
    input_grad: Samples
    """Time of the backward with respect to the input only."""
    weight_grad: Samples
    """Time of the full backward minus the time of `input_grad`."""
    forward_idle_s: float = 0.0
    """Seconds of the forward in which the device waits for the host. Collectives during this idle time cost nothing."""
    backward_idle_s: float = 0.0
    """Seconds of both backward passes in which the device waits for the host."""
    source: Literal["measured", "modelled"] = "measured"
    """`modelled`: converted by the device model from a time with other options."""
    recompute: Samples | None = None
    """Additional time if full recompute runs the layer's forward again in the backward. None = not measured."""

    ep: int = 0
    """Expert parallel size. 0 = the part has no experts, or the time does not depend on this size."""
    etp: int = 0
    """Expert tensor parallel size. 0 = the part has no experts, or the time does not depend on this size."""

    def __post_init__(self) -> None:
        check_numbers(self, "forward_idle_s", "backward_idle_s", "ep", "etp", limit=0)

    def times(self, factor: float) -> ComputeTime:
        """Return the time with all passes multiplied by a factor. Idle times do not change."""
        passes = {name: getattr(self, name).times(factor) for name in ("forward", "input_grad", "weight_grad")}
        return replace(self, **passes, recompute=self.recompute and self.recompute.times(factor))


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveTime:
    """Fitted time of a collective on a kind of group: seconds = latency_s + bytes * seconds_per_byte.

    `bytes` is the size of the full tensor on one rank (before a reduce-scatter, after an all-gather).
    """

    kind: Literal[CollectiveKind, "send"]
    slots: tuple[int, ...]
    """Slots of one measured group. Groups with equally many hosts and devices were measured at the same time."""
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
    """Memory peak minus the idle model's memory: torch's allocations on CUDA, the resident set on CPU."""
    device_peak_bytes: int
    """Peak of NVML's used bytes on CUDA, or of the resident set on CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadingTime:
    """Time to load a micro-batch on a stage that needs tokens or labels."""

    batch_s: float
    """Seconds of each micro-batch, independent of the number of samples."""
    sample_s: float
    """Additional seconds for each sample of the micro-batch."""

    def __post_init__(self) -> None:
        check_numbers(self, "batch_s", "sample_s", limit=0)

    def seconds(self, micro_batch_size: int) -> float:
        """Return the loading time of one micro-batch in seconds."""
        return self.batch_s + self.sample_s * micro_batch_size


class Coverage(NamedTuple):
    """Number of cases that all slots of a warm-up measured, and number of cases that the warm-up should measure."""

    num_timed: int
    num_wanted: int

    def words(self) -> str:
        """Return the numbers of measured and wanted cases, with a warning if fewer than half of them were measured."""
        count = f"{self.num_timed} of {self.num_wanted} combinations of tp, cp and micro-batch timed"
        if 2 * self.num_timed >= self.num_wanted:
            return count
        return f"{count}, fewer than half: the plan rests on a device model"


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurements:
    """The file cluster.json: the machines and all measurements on these machines."""

    KIND: ClassVar[str] = "cluster"

    cluster: Cluster
    compute: tuple[ComputeTime, ...]
    collectives: tuple[CollectiveTime, ...]
    """Times of collectives, and of messages between two slots (kind `send`)."""
    memory: tuple[MemoryReading, ...]
    overhead_bytes: int
    """Device memory outside the allocator (context, communicators, workspaces) on the slot with the most. 0 on CPU."""
    versions: dict[str, str]
    taken_at: str
    """Time of the warm-up, UTC, ISO 8601."""
    phase_s: dict[str, float]
    notes: tuple[str, ...]
    """Sentences on skipped, unstable and assumed values."""
    optimizer_s_per_parameter: float | None = None
    """Seconds of an optimizer step for each parameter whose state a slot holds. None = not measured."""
    loading: LoadingTime | None = None
    """Time to load batches with Megatron-LM's own trainer on CPUs. The time is `None` if it was not measured."""
    gradient_s_per_byte: float = 0.0
    """Seconds of a step to clear, check and scale gradients, for each byte of gradients that a slot holds. 0 = not
    measured. On CPUs most of the time goes into the optimizer's calls for each tensor."""
    step_s: float = 0.0
    """Seconds in each step in which the device waits for the host. 0 = not measured."""
    host_bytes_per_s: float = 0.0
    """Bandwidth between a slot and its host's memory, in each direction. 0 = not measured, as in all warm-ups."""
    refused: tuple[ComputeCase, ...] = ()
    """Compute cases that megatron-core refuses, or that ran out of memory."""
    unmeasured: tuple[ComputeCase, ...] = ()
    """Compute cases that the warm-up had no time to measure, beginning with the most promising case."""
    model_digest: str = ""
    """`layers_digest` of the model whose layers were measured. Empty = unknown."""
    timed_flags: tuple[str, ...] = ()
    """Flags of the job's precision that the timed layers had."""
    conditions: tuple[DeviceCondition, ...] = ()
    """Reports of the driver on each slot's device before the warm-up, in slot order. Empty = no driver reported."""
    verdicts: tuple[Verdict, ...] = ()
    """Problems of hosts, devices and links. Problems that may exclude a host come first."""
    survey: LinkSurvey | None = None
    """Origin of the links between hosts. None for one host."""
    overhead: DeviceOverhead | None = None
    """Parts of `overhead_bytes` on the slot with the largest value. None = not measured separately, or no GPU."""
    stages: tuple[StageReading, ...] = ()
    """Measured memory of whole pipeline stages of promising layouts, each run on a single device."""

    @property
    def group_times(self) -> tuple[CollectiveTime, ...]:
        """Times of collectives, without messages between two slots."""
        return tuple(time for time in self.collectives if time.kind != "send")

    def stages_of(self, job: Job) -> tuple[StageReading, ...]:
        """Return the readings of whole stages that are valid for a job."""
        digest = memory_digest(job) if self.stages else ""
        return tuple(reading for reading in self.stages if reading.job_digest == digest)

    def timed_stages_of(self, job: Job) -> tuple[StageReading, ...]:
        """Return the readings for a job that have the seconds of a step."""
        return tuple(reading for reading in self.stages_of(job) if reading.num_microbatches and reading.schedule_s)

    def compute_cases(self) -> tuple[ComputeCase, ...]:
        """Return all compute cases that were measured, sorted."""
        return tuple(sorted({time.case for time in self.compute}))

    def coverage(self) -> Coverage:
        """Count the measured cases, and the cases that the warm-up should measure and megatron-core can run."""
        known = {time.case: time.source for time in self.compute}
        num_timed = sum(source == "measured" for source in known.values())
        return Coverage(num_timed, len({*known, *self.unmeasured}))


def layers_digest(model: ModelSpec) -> str:
    """Return a digest of everything that affects a layer of the model, except the number of layers."""
    plain = files.to_plain(model)
    of_all_layers = ("num_layers", "moe_layer_freq", "linear_layers")
    return files.digest({name: value for name, value in plain.items() if name not in of_all_layers})


def without_hosts(measurements: Measurements, names: Collection[str]) -> Measurements:
    """Return the measurements as if some hosts had never been in the job. The remaining slots are numbered again.

    A case that was measured only on removed hosts gets its time converted to the remaining slot of the nearest speed.
    Raise FactError if a name is unknown, or if no host remains.
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
            # The speeds are relative to the median of the remaining slots.
            slot_speed=tuple(speed / middle for speed in speeds),
            imagined=cluster.imagined,
        ),
        compute=_compute(measurements, slots),
        collectives=tuple(
            replace(time, slots=tuple(slots[slot] for slot in time.slots))
            for time in measurements.collectives
            if slots.keys() >= set(time.slots)
        ),
        # All devices need equal memory, so a removed slot's memory reading is kept if its case has no other reading.
        memory=tuple(
            replace(reading, slot=slots.get(reading.slot, 0))
            for reading in measurements.memory
            if reading.slot in slots or reading.case not in read
        ),
        stages=tuple(
            replace(reading.times(factor), slot=slots[slot])
            for reading in measurements.stages
            for slot, factor in [_stand_in(cluster.slot_speed, slots, reading.slot)]
        ),
        conditions=tuple(measurements.conditions[slot] for slot in slots) if measurements.conditions else (),
        verdicts=tuple(one for one in measurements.verdicts if one.host not in names and one.other_host not in names),
        survey=_survey(survey, kept_H) if survey else None,
        notes=(*measurements.notes, f"measured with {', '.join(sorted(names))}, but planned without these hosts"),
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


def _stand_in(speed: Sequence[float], slots: Collection[int], slot: int) -> tuple[int, float]:
    """Return the slot itself, or the remaining slot of the nearest speed; and the factor on the times of the slot."""
    # A slot's speed times its seconds is the time of a slot with speed 1.
    nearest = slot if slot in slots else min(slots, key=lambda other: abs(speed[other] - speed[slot]))
    return nearest, speed[slot] / speed[nearest]


def _compute(measurements: Measurements, slots: dict[int, int]) -> tuple[ComputeTime, ...]:
    speed = measurements.cluster.slot_speed
    timed = {(time.case, time.part) for time in measurements.compute if time.slot in slots}
    times = []
    for time in measurements.compute:
        if time.slot in slots or (time.case, time.part) not in timed:
            stand_in, factor = _stand_in(speed, slots, time.slot)
            idle = {name: factor * getattr(time, name) for name in ("forward_idle_s", "backward_idle_s")}
            times.append(replace(time.times(factor), slot=slots[stand_in], **idle))
    return tuple(times)
