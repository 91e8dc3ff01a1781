"""What the warm-up measured, with the samples, their spread and the conditions of the devices."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, NamedTuple, TypeAlias

from pipette_launch.errors import FactError
from pipette_launch.facts import files
from pipette_launch.facts.checks import check_numbers
from pipette_launch.facts.files import ADDED_LATER
from pipette_launch.facts.health.condition import DeviceCondition
from pipette_launch.facts.health.verdict import Verdict
from pipette_launch.facts.machines.cluster import Cluster
from pipette_launch.facts.machines.device_memory import DeviceOverhead, StageReading
from pipette_launch.facts.machines.link_survey import UNSTABLE_SPREAD, LinkSurvey
from pipette_launch.facts.model import LETTERS, TRANSFORMER_KINDS, ModelSpec

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
