"""What one warm-up worker is asked to measure, and what it sends to rank 0."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import ClassVar, Literal

from pipette_launch.errors import FactError
from pipette_launch.facts import (
    ComputeCase,
    ComputeTime,
    DeviceOverhead,
    Host,
    Job,
    LoadingTime,
    MemoryReading,
    Samples,
    StageReading,
)
from pipette_launch.facts.health.condition import DeviceCondition
from pipette_launch.facts.messages.measuring_advice import CollectiveKind, Dimension

FULL_HOSTS = 64
"""Up to so many hosts every pair is measured, in one round less."""
BLIND_ROUNDS = 8
"""Of more, a sample is measured in so many rounds before the first plans."""
MIN_SIZES = 3
DEFAULT_SIZES_BYTES = {"cpu": (8, 64 << 10, 512 << 10, 2 << 20), "cuda": (8, 1 << 20, 16 << 20, 64 << 20)}


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class GroupShape:
    """Equal groups that cover all slots: each holds `size` slots, `stride` apart."""

    size: int
    stride: int

    def __post_init__(self) -> None:
        if self.size < 2 or self.stride < 1:
            raise FactError(f"a group needs size >= 2 and stride >= 1, got size={self.size}, stride={self.stride}")

    def groups(self, num_slots: int) -> tuple[tuple[int, ...], ...]:
        """Cut the slots into groups of this shape; each slot is in exactly one."""
        block = self.size * self.stride
        if num_slots % block:
            raise FactError(f"groups of {self.size} slots, {self.stride} apart, do not divide {num_slots} slots")
        return tuple(
            tuple(range(start + offset, start + block, self.stride))
            for start in range(0, num_slots, block)
            for offset in range(self.stride)
        )


def group_shapes(*, num_hosts: int, devices_per_host: int) -> tuple[GroupShape, ...]:
    """Shapes that plans use: neighbours within a host, one device of each of several hosts, and everyone."""
    within = [GroupShape(size=size, stride=1) for size in divisors(devices_per_host) if size > 1]
    across = [GroupShape(size=size, stride=devices_per_host) for size in divisors(num_hosts) if size > 1]
    world = num_hosts * devices_per_host
    everyone = [GroupShape(size=world, stride=1)] if world > 1 else []
    # Largest first: they carry the gradients, and a budget that runs out must not cost them.
    return tuple(sorted({*within, *across, *everyone}, key=lambda shape: (-shape.size, shape.stride)))


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    return tuple(candidate for candidate in range(1, number + 1) if number % candidate == 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeOptions:
    """The order that the agent writes for its warm-up workers; ranks are slots, host by host."""

    KIND: ClassVar[str] = "probe-options"
    SCHEMA_VERSION: ClassVar[int] = 1

    job: Job
    hosts: tuple[Host, ...]
    """In the order of torchrun's ranks, with equally many devices each."""
    cases: tuple[ComputeCase, ...]
    """Most promising first; the first is the reference that every slot measures."""
    output: str
    """Where rank 0 writes its Measurements."""
    progress_dir: str
    """Each worker keeps the name of its phase in the file `<progress_dir>/<local rank>`."""
    full_hosts: int = FULL_HOSTS
    """Up to so many hosts the links of all pairs are measured, of more those that plans would use."""
    blind_rounds: int = BLIND_ROUNDS
    """In so many rounds a sample of links is measured before the first plans."""
    known: str = ""
    """The file of an earlier warm-up of these hosts, where rank 0 can read it: its links are believed until those that
    plans use are measured again; empty = there is none."""
    adviser: tuple[str, ...] = ()
    """The words of a command that reads what was measured so far and writes an Advice; empty = nobody is asked."""
    message_sizes_bytes: tuple[int, ...] = ()
    """At least three, ascending; empty = the device kind's own."""
    budget_s: float = 60.0
    """No phase begins another case once this has passed since all workers had met; the least is measured anyway."""
    timeout_s: float = 60.0
    """Longest wait for another worker beyond what the budget explains."""
    repeats: int = 5
    """Timed messages or collectives of each size."""
    warmups: int = 1
    conditions: tuple[DeviceCondition, ...] = ()
    """What the driver told of each slot's device, in slot order; empty = nobody asked."""
    python_path: tuple[str, ...] = ()
    """Folders that the script's own interpreter would search first: a megatron checkout beside the script counts."""

    def __post_init__(self) -> None:
        if not self.hosts or len({len(host.devices) for host in self.hosts}) != 1:
            counts = ", ".join(f"{host.name}: {len(host.devices)}" for host in self.hosts)
            raise FactError(f"the warm-up needs hosts with equally many devices, got {counts or 'no hosts'}")
        if self.conditions and len(self.conditions) != self.num_slots:
            raise FactError(f"{len(self.conditions)} conditions of {self.num_slots} slots")
        if not self.cases:
            raise FactError("the warm-up needs at least one compute case, its reference")
        sizes = self.message_sizes_bytes
        if sizes and (len(set(sizes)) < MIN_SIZES or list(sizes) != sorted(sizes) or sizes[0] < 1):
            raise FactError(f"message_sizes_bytes needs at least {MIN_SIZES} sizes, ascending, got {sizes}")
        if not (self.budget_s > 0 and self.timeout_s > 0 and self.repeats > 0 and self.warmups >= 0):
            raise FactError(
                f"budget_s={self.budget_s}, timeout_s={self.timeout_s}, repeats={self.repeats} must be above 0 "
                f"and warmups={self.warmups} not below"
            )

    @property
    def devices_per_host(self) -> int:
        """D: how many devices each host lends."""
        return len(self.hosts[0].devices)

    @property
    def num_slots(self) -> int:
        """S: one worker each."""
        return len(self.hosts) * self.devices_per_host

    @property
    def device_kind(self) -> Literal["cuda", "cpu"]:
        """What the slots are."""
        return self.hosts[0].devices[0].kind

    def conditions_of_hosts(self) -> tuple[tuple[DeviceCondition, ...], ...]:
        """The conditions of each host's devices."""
        size = self.devices_per_host
        return tuple(self.conditions[host * size : (host + 1) * size] for host in range(len(self.hosts)))

    def sizes_bytes(self) -> tuple[int, ...]:
        """Message sizes to time."""
        return self.message_sizes_bytes or DEFAULT_SIZES_BYTES[self.device_kind]

    def dimensions(self) -> tuple[Dimension, ...]:
        """Groups whose collectives are timed where nobody advises better ones."""
        kinds: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter")
        return tuple(
            Dimension(
                name=f"{shape.size} x stride {shape.stride}",
                kinds=(*kinds, "all_to_all") if self.job.model.num_experts else kinds,
                groups=shape.groups(self.num_slots),
            )
            for shape in group_shapes(num_hosts=len(self.hosts), devices_per_host=self.devices_per_host)
        )

    def slot_name(self, slot: int) -> str:
        """A slot as people write it: `node17:3`."""
        host, local = divmod(slot, self.devices_per_host)
        return f"{self.hosts[host].name}:{local}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkSamples:
    """One-way times from one slot to another, one entry of `samples` for each size."""

    source: int
    target: int
    sizes_bytes: tuple[int, ...]
    samples: tuple[Samples, ...]
    together: tuple[Samples, ...] = ()
    """Between hosts of several devices, which all send at once: until the last of them was through."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSamples:
    """Times of one collective as one member of a group saw them, one entry of `samples` for each size."""

    kind: CollectiveKind
    dimension: int
    """Index of the dimension whose group this worker is in."""
    sizes_bytes: tuple[int, ...]
    samples: tuple[Samples, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How long one slot took for a chain of layers while others worked beside it."""

    turn: int
    """0 = with all others, then beside a few."""
    seconds: float
    """On the wall, forward and backward; the mean over a window."""

    def words(self) -> str:
        """Two numbers; see `of`."""
        return f"{self.turn} {self.seconds!r}"

    @classmethod
    def of(cls, words: str) -> Pace:
        """Read what `words` wrote."""
        turn, seconds = words.split()
        return cls(turn=int(turn), seconds=float(seconds))


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerResult:
    """What one worker found out, all of it or since it last told."""

    KIND: ClassVar[str] = "probe-result"
    SCHEMA_VERSION: ClassVar[int] = 1

    slot: int
    links: tuple[LinkSamples, ...] = ()
    """What it sent; first measurements before second ones."""
    link_rounds: tuple[int, ...] = ()
    """Rounds between hosts, an entry for each time that links were looked for."""
    link_rounds_again: tuple[int, ...] = ()
    """Rounds in which suspects were measured a second time, likewise."""
    collectives: tuple[GroupSamples, ...] = ()
    compute: tuple[ComputeTime, ...] = ()
    """On CPU without the time that others took from this worker; `stretch` says how much that was."""
    stretch: float = 1.0
    """Wall time over computing time while all slots worked; 1 on CUDA."""
    paces: tuple[Pace, ...] = ()
    """Turn after turn, as far as this slot was asked to."""
    refused: tuple[ComputeCase, ...] = ()
    """Cases that megatron-core refused here, or that ran out of memory."""
    memory: tuple[MemoryReading, ...] = ()
    overhead: DeviceOverhead | None = None
    stages: tuple[StageReading, ...] = ()
    optimizer_s_per_parameter: float | None = None
    wake_s: float | None = None
    loading: LoadingTime | None = None
    phase_s: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def joined(before: WorkerResult, after: WorkerResult) -> WorkerResult:
    """Put two parts of a worker's result together: lists are joined, of single figures the later one counts."""

    def both(name: str) -> object:
        first, second = getattr(before, name), getattr(after, name)
        if isinstance(first, tuple):
            return (*first, *second)
        return {**first, **second} if isinstance(first, dict) else second

    return WorkerResult(**{field.name: both(field.name) for field in fields(WorkerResult)})  # type: ignore[arg-type]
