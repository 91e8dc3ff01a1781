"""Messages between an agent and its warm-up workers: orders and results; and the longest wait of workers.

This module imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import ClassVar

from pipette_launch.defaults import START_S, WARMUP_BUDGET_S, WORKER_WAIT_S
from pipette_launch.errors import FactError
from pipette_launch.facts import ComputeCase, ComputeTime, Device, Host, Job, LoadingTime, Samples, StageReading
from pipette_launch.facts.cluster import HostsOfJob
from pipette_launch.facts.measurements import LINK_REPEATS, CollectiveKind, DeviceOverhead, MemoryReading
from pipette_launch.facts.messages import Dimension
from pipette_launch.probe.health.nvml import LoadReading

FULL_HOSTS = 64
"""Up to this number of hosts, every pair of hosts is measured."""
BLIND_ROUNDS = 4
"""Jobs with more hosts below unknown switches measure this number of rounds of random pairs before scouting."""
TINY_BYTES = 8
"""Bytes of an acknowledgement, and of the message from which the latency is computed."""
MIN_SIZES = 3
"""A line (latency and bandwidth) needs at least this number of message sizes."""


def wait_s(num_ranks: int, left_s: float = 0.0, *, least_s: float = WORKER_WAIT_S) -> float:
    """Return the longest wait for another worker, in seconds.

    In a small job a wait takes at most `least_s` after the end of the phase. The phase may still take `left_s` seconds;
    values below 0 count as 0.
    """
    return least_s + num_ranks / WORKER_WAIT_S.ranks_per_s + max(left_s, 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupOrder(HostsOfJob):
    """The agent's order for its warm-up workers; ranks are slots (devices), numbered host by host."""

    KIND: ClassVar[str] = "probe-options"

    hosts: tuple[Host, ...]
    """Hosts in the order of torchrun's ranks, with the same number of devices each."""
    message_sizes_bytes: tuple[int, ...]
    """Sizes of timed messages and collectives; at least three, ascending."""
    job: Job | None = None
    """Job whose layers, collectives and stages are timed. With None, only links are timed."""
    cases: tuple[ComputeCase, ...] = ()
    """Compute cases of the job, most promising first. The first case is the reference case, which every slot measures.
    """
    output: str = ""
    """File in which rank 0 writes the Measurements. The decision leaves it empty, and each node names its own."""
    progress_dir: str = ""
    """Each worker keeps its progress message in the file `<progress_dir>/<local rank>.sign`. Named by each node too."""
    full_hosts: int = FULL_HOSTS
    """Largest number of hosts of which all pairs are measured. With more hosts, a sample of pairs is measured."""
    blind_rounds: int = BLIND_ROUNDS
    budget_s: float = WARMUP_BUDGET_S
    """Seconds after which no phase begins another case, counted from the time when all workers are ready. Each phase
    measures its minimum in any case."""
    timeout_s: float = WORKER_WAIT_S
    """Longest wait for another worker of a small job after the end of its phase, in seconds."""
    start_s: float = START_S
    """Time that a worker of a small job may take to start, in seconds."""
    repeats: int = LINK_REPEATS
    """Number of timed messages or collectives of each size."""
    warmups: int = 1
    """Number of untimed messages or collectives of each size, sent first."""
    known: str = ""
    """File of an earlier warm-up of these hosts, readable by rank 0; empty = none. If a sample of its links has not
    changed, the links come from this file."""
    has_adviser: bool = False
    """True if the launcher of rank 0's node answers questions about the groups and stages to time."""
    script: tuple[str, ...] = ()
    """The job's script, which builds the measured models, as Python's arguments: a file, or `-m` and a module. Empty
    without a job."""
    script_arguments: tuple[str, ...] = ()
    python_path: tuple[str, ...] = ()
    """Folders that the script's interpreter searches first, such as one with a megatron checkout."""

    def __post_init__(self) -> None:
        if not self.hosts or len({len(host.devices) for host in self.hosts}) != 1:
            counts = ", ".join(f"{host.name}: {len(host.devices)}" for host in self.hosts)
            raise FactError(f"the warm-up needs hosts with equally many devices, got {counts or 'no hosts'}")
        if self.job is not None and not self.cases:
            raise FactError("a warm-up that times layers needs at least one compute case, its reference")
        if self.job is not None and not self.script:
            raise FactError("a warm-up that times layers needs the job's script")

    def wait_s(self, left_s: float = 0.0) -> float:
        """Return the longest wait for another worker whose phase may still take `left_s` seconds."""
        return wait_s(self.num_slots, left_s, least_s=self.timeout_s)

    def start_left_s(self, elapsed_s: float = 0.0) -> float:
        """Return the seconds in which a worker may still start."""
        return self.start_s + self.num_slots / START_S.ranks_per_s - elapsed_s

    def slot_name(self, slot: int) -> str:
        """Return host and device of a slot: `node17:3`."""
        host, local = divmod(slot, self.devices_per_host)
        return f"{self.hosts[host].name}:{local}"

    def device(self, slot: int) -> Device:
        """Return the device of a slot."""
        host, local = divmod(slot, self.devices_per_host)
        return self.hosts[host].devices[local]

    def dimensions(self) -> tuple[Dimension, ...]:
        """Return the groups of slots whose collectives are timed without an adviser.

        These groups are neighbours within a host, one device of each of several hosts, and all slots. The groups of one
        dimension have the same size and cover all slots.
        """
        num_hosts, devices = len(self.hosts), self.devices_per_host
        within = {(size, 1) for size in range(2, devices + 1) if devices % size == 0}
        across = {(size, devices) for size in range(2, num_hosts + 1) if num_hosts % size == 0}
        world = {(self.num_slots, 1)} if self.num_slots > 1 else set()
        kinds: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter")
        has_experts = self.job is not None and self.job.model.num_experts
        return tuple(
            Dimension(
                name=f"{size} x stride {stride}",
                kinds=(*kinds, "all_to_all") if has_experts else kinds,
                groups=tuple(
                    tuple(range(first, first + size * stride, stride))
                    for block in range(0, self.num_slots, size * stride)
                    for first in range(block, block + stride)
                ),
            )
            # Large groups come first: they carry the gradients, and are timed even if the budget runs out.
            for size, stride in sorted(within | across | world, key=lambda shape: (-shape[0], shape[1]))
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkSamples:
    """One-way times from one slot to another, one entry of `samples` for each size."""

    source: int
    target: int
    sizes_bytes: tuple[int, ...]
    samples: tuple[Samples, ...]
    together: tuple[Samples, ...] = ()
    """Times until the last device of the sending host had finished; empty if only one device sends at a time."""
    is_again: bool = False
    """True if the link was measured because its first measurement looked slow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSamples:
    """Times of one collective on one member of a group, one entry of `samples` for each size."""

    kind: CollectiveKind
    dimension: int
    """Index of the dimension with this worker's group."""
    sizes_bytes: tuple[int, ...]
    samples: tuple[Samples, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """Time of a chain of layers on one slot while other slots worked too."""

    turn: int
    """Number of the turn. In turn 0 all other slots worked too; in later turns only a few other slots worked."""
    seconds: float
    """Wall time of forward and backward, as the mean over a window."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerResult:
    """Measurements of one worker: all measurements, or the measurements since the worker last sent its results."""

    KIND: ClassVar[str] = "probe-result"

    slot: int
    links: tuple[LinkSamples, ...] = ()
    """Samples of links from this slot."""
    link_rounds: tuple[int, ...] = ()
    """Number of measured rounds between hosts, with one entry for each time that links were measured."""
    link_rounds_again: tuple[int, ...] = ()
    """Number of rounds between hosts in which links that looked slow were measured again, one entry each time."""
    collectives: tuple[GroupSamples, ...] = ()
    compute: tuple[ComputeTime, ...] = ()
    """Times of parts of the model. On a CPU the times of parts are processor times, without the time of other processes
    (see `stretch`)."""
    timed_flags: tuple[str, ...] = ()
    """Flags of precision and CUDA graphs that the timed layers had."""
    stretch: float = 1.0
    """Wall time divided by processor time while all slots worked; 1 on CUDA."""
    paces: tuple[Pace, ...] = ()
    refused: tuple[ComputeCase, ...] = ()
    """Cases that megatron-core refused on this slot, or that ran out of memory."""
    under_load: LoadReading | None = None
    memory: tuple[MemoryReading, ...] = ()
    overhead: DeviceOverhead | None = None
    stages: tuple[StageReading, ...] = ()
    optimizer_s_per_parameter: float | None = None
    gradient_s_per_byte: float | None = None
    loading: LoadingTime | None = None
    phase_s: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def plus(self, **found: object) -> WorkerResult:
        """Return this result with more measurements of the same worker."""
        return joined(self, WorkerResult(slot=self.slot, **found))  # type: ignore[arg-type]


def joined(before: WorkerResult, after: WorkerResult) -> WorkerResult:
    """Join two results of one worker: tuples and dicts are joined, and for single values the later value counts."""

    def both(name: str, unmeasured: object) -> object:
        first, second = getattr(before, name), getattr(after, name)
        if isinstance(first, tuple):
            return (*first, *second)
        if isinstance(first, dict):
            return {**first, **second}
        return first if second == unmeasured else second

    return WorkerResult(**{each.name: both(each.name, each.default) for each in fields(WorkerResult)})  # type: ignore[arg-type]
