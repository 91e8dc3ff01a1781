"""Waits of warm-up workers for each other: one formula of ranks and remaining time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import ClassVar

from pipette_launch.defaults import WARMUP_BUDGET_S
from pipette_launch.errors import FactError, PipetteError
from pipette_launch.facts import (
    ComputeCase,
    ComputeTime,
    Device,
    DeviceOverhead,
    Host,
    Job,
    LoadingTime,
    MemoryReading,
    Samples,
    StageReading,
    files,
)
from pipette_launch.facts.cluster import HostsOfJob
from pipette_launch.facts.health import DeviceCondition
from pipette_launch.facts.messages import CollectiveKind, Dimension
from pipette_launch.probe.health.nvml import LoadReading

LEAST_S = 60.0
RANKS_PER_S = 20.0
"""Number of ranks that lengthen every wait by one second: a cold file system serves them one after the other."""
START_S = 120.0
"""Time for imports, compilation and the first lap of a worker, which the budget does not cover."""


def wait_s(num_ranks: int, left_s: float = 0.0, *, least_s: float = LEAST_S) -> float:
    """Return the longest wait for another worker, in seconds.

    Args:
        num_ranks: number of workers.
        left_s: time that the phase of the other worker may still take; below 0 counts as 0.
        least_s: wait for a worker of a small job whose phase is over.

    """
    return least_s + num_ranks / RANKS_PER_S + max(left_s, 0.0)


FULL_HOSTS = 64
"""Up to so many hosts every pair is measured, in one round less than there are hosts."""
BLIND_ROUNDS = 8
"""Where hosts are more, a sample is measured in so many rounds before the first plans."""
TINY_BYTES = 8
"""A message that tells the latency; as large as an acknowledgement."""
MIN_SIZES = 3
"""A line needs so many message sizes at least."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupOrder(HostsOfJob):
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
    """Each worker keeps its progress message in the file `<progress_dir>/<local rank>.sign`."""
    message_sizes_bytes: tuple[int, ...]
    """Sizes of the messages and collectives that are timed; at least three, ascending."""
    full_hosts: int = FULL_HOSTS
    """Up to so many hosts the links of all pairs are measured; of more hosts those links that plans would use."""
    blind_rounds: int = BLIND_ROUNDS
    """In so many rounds a sample of links is measured before the first plans."""
    known: str = ""
    """The file of an earlier warm-up of these hosts, where rank 0 can read it; empty = there is none. Its links are
    believed until those that plans use are measured again."""
    adviser: tuple[str, ...] = ()
    """The words of a command that reads what was measured so far and writes an Advice; empty = there is none."""
    budget_s: float = WARMUP_BUDGET_S
    """Once so many seconds have passed since all workers were ready, no phase begins another case; the least is
    measured anyway."""
    timeout_s: float = LEAST_S
    """Longest wait for another worker in a small job, in seconds, once its phase is over."""
    start_s: float = START_S
    """Time that a worker may take to start, in seconds: imports, compilation and the first lap."""
    repeats: int = 5
    """Number of timed messages or collectives of each size."""
    warmups: int = 1
    """Number of messages or collectives of each size before those that are timed."""
    conditions: tuple[DeviceCondition, ...] = ()
    """What the driver reports of each slot's device, in slot order; empty = not known."""
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
        if len(set(sizes)) < MIN_SIZES or list(sizes) != sorted(sizes) or sizes[0] < 1:
            raise FactError(f"message_sizes_bytes needs at least {MIN_SIZES} sizes, ascending, got {sizes}")
        if not (self.budget_s > 0 and self.timeout_s > 0 and self.repeats > 0 and self.warmups >= 0):
            raise FactError(
                f"budget_s={self.budget_s}, timeout_s={self.timeout_s}, repeats={self.repeats} must be above 0 "
                f"and warmups={self.warmups} not below"
            )

    def dimensions(self) -> tuple[Dimension, ...]:
        """Groups of slots whose collectives are timed where no adviser names others.

        Neighbours within a host, one device of each of several hosts, and all slots; groups of one dimension are
        equally large and cover all slots.
        """
        num_hosts, devices = len(self.hosts), self.devices_per_host
        within = {(size, 1) for size in range(2, devices + 1) if devices % size == 0}
        across = {(size, devices) for size in range(2, num_hosts + 1) if num_hosts % size == 0}
        world = {(self.num_slots, 1)} if self.num_slots > 1 else set()
        kinds: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter")
        return tuple(
            Dimension(
                name=f"{size} x stride {stride}",
                kinds=(*kinds, "all_to_all") if self.job.model.num_experts else kinds,
                groups=tuple(
                    tuple(range(first, first + size * stride, stride))
                    for block in range(0, self.num_slots, size * stride)
                    for first in range(block, block + stride)
                ),
            )
            # Largest first: they carry the gradients, and must be timed even if the budget runs out.
            for size, stride in sorted(within | across | world, key=lambda shape: (-shape[0], shape[1]))
        )

    def wait_s(self, left_s: float = 0.0) -> float:
        """Return the longest wait for another worker whose phase may still take `left_s` seconds."""
        return wait_s(self.num_slots, left_s, least_s=self.timeout_s)

    def slot_name(self, slot: int) -> str:
        """A slot as people write it: `node17:3`."""
        host, local = divmod(slot, self.devices_per_host)
        return f"{self.hosts[host].name}:{local}"

    def device(self, slot: int) -> Device:
        """The device of a slot."""
        host, local = divmod(slot, self.devices_per_host)
        return self.hosts[host].devices[local]


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkSamples:
    """One-way times from one slot to another, one entry of `samples` for each size."""

    source: int
    target: int
    sizes_bytes: tuple[int, ...]
    samples: tuple[Samples, ...]
    together: tuple[Samples, ...] = ()
    """Between hosts of several devices, which all send at once: times until the last of them had finished."""


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
    """0 = while all other slots worked, later turns = while a few others did."""
    seconds: float
    """Wall time of forward and backward; the mean over a window."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerResult:
    """What one worker measured: everything, or what is new since it last sent its results."""

    KIND: ClassVar[str] = "probe-result"
    SCHEMA_VERSION: ClassVar[int] = 1

    slot: int
    links: tuple[LinkSamples, ...] = ()
    """Links from this slot; first measurements before second ones."""
    link_rounds: tuple[int, ...] = ()
    """Number of rounds between hosts, an entry for each time that links were measured."""
    link_rounds_again: tuple[int, ...] = ()
    """Number of rounds in which suspects were measured a second time, likewise."""
    collectives: tuple[GroupSamples, ...] = ()
    compute: tuple[ComputeTime, ...] = ()
    """On CPU without the time that other processes took from this worker; `stretch` says how much that was."""
    stretch: float = 1.0
    """Wall time over computing time while all slots worked; 1 on CUDA."""
    paces: tuple[Pace, ...] = ()
    """One for each turn in which this slot took part."""
    refused: tuple[ComputeCase, ...] = ()
    """Cases that megatron-core refused here, or that ran out of memory."""
    under_load: LoadReading | None = None
    memory: tuple[MemoryReading, ...] = ()
    overhead: DeviceOverhead | None = None
    stages: tuple[StageReading, ...] = ()
    optimizer_s_per_parameter: float | None = None
    gradient_s_per_byte: float | None = None
    wake_s: float | None = None
    loading: LoadingTime | None = None
    phase_s: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def joined(before: WorkerResult, after: WorkerResult) -> WorkerResult:
    """Put two parts of a worker's result together: lists are joined, and the later of single figures counts."""

    def both(name: str, unmeasured: object) -> object:
        first, second = getattr(before, name), getattr(after, name)
        if isinstance(first, tuple):
            return (*first, *second)
        if isinstance(first, dict):
            return {**first, **second}
        return first if second == unmeasured else second

    return WorkerResult(**{each.name: both(each.name, each.default) for each in fields(WorkerResult)})  # type: ignore[arg-type]


START = "start"
"""The phase before and between the others: imports, rendezvous, gathering."""
SIGN_S = 60.0
"""A worker writes a message at least so often while no phase has set another limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseEnd:
    """A phase that has ended."""

    phase: str
    seconds: float
    words: str
    """Its summary, for example `8 hosts in 7 rounds`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sign:
    """The last progress message of a worker."""

    KIND: ClassVar[str] = "sign"
    SCHEMA_VERSION: ClassVar[int] = 1

    phase: str
    at_s: float
    """By this machine's monotonic clock, which its processes share."""
    limit_s: float
    """The next message is due after so many seconds."""
    done: int = 0
    total: int = 0
    """Number of steps of the phase; 0 where they are not counted."""
    words: str = ""
    waits_for: str = ""
    """What the worker waits for, in words; empty while it works."""
    peers: tuple[int, ...] = ()
    """Slots that it waits for, or exchanges messages with."""
    ended: tuple[PhaseEnd, ...] = ()
    """The phases that have ended, in order."""

    def where(self) -> str:
        """Phase and position: `links, 3 of 7`."""
        counted = f", {self.done} of {self.total}" if self.total else ""
        return f"{self.phase}{counted}" + (f", {self.words}" if self.words else "")


@dataclass(kw_only=True)
class Progress:
    """Writes for the agent which phase this worker is in and how far, and measures how long each phase takes."""

    folder: Path | None = None
    """None = nothing is written."""
    local_rank: int = 0
    clock: Callable[[], float] = time.perf_counter
    phase: str = START
    limit_s: float = SIGN_S
    phase_s: dict[str, float] = field(default_factory=dict)
    _summary: str = field(default="", init=False)
    _sign: Sign = field(default=Sign(phase=START, at_s=0.0, limit_s=SIGN_S), init=False)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Announce a phase and add its duration to `phase_s`; an inner phase does not count in the outer."""
        outer = self.phase
        self.announce(phase)
        before = self.clock()
        yield
        elapsed_s = self.clock() - before
        self.phase_s[phase] = self.phase_s.get(phase, 0.0) + elapsed_s
        if outer == START:
            first = PhaseEnd(phase=START, seconds=self.phase_s.get(START, 0.0), words="")
            ended = PhaseEnd(phase=phase, seconds=elapsed_s, words=self._summary)
            self._sign = replace(self._sign, ended=(*(self._sign.ended or (first,)), ended), words="")
            self._summary = ""
        else:
            self.phase_s[outer] = self.phase_s.get(outer, 0.0) - elapsed_s
        # Not after a failure: the message must keep the phase that failed.
        self.announce(outer)

    def announce(self, phase: str) -> None:
        """Write which phase begins, or continues."""
        self.phase = phase
        # A phase within a phase keeps the count of the outer one.
        kept = self._sign if phase != START else Sign(phase=phase, at_s=0.0, limit_s=0.0, ended=self._sign.ended)
        self._show(replace(kept, phase=phase, limit_s=self.limit_s, waits_for="", peers=()))

    def step(self, done: int, total: int, words: str = "", *, peers: Iterable[int] = (), limit_s: float = 0.0) -> None:
        """Write a progress message.

        Args:
            done: number of steps of the phase that have ended.
            total: number of all its steps.
            words: what is being done.
            peers: slots without which this step cannot end.
            limit_s: longest time of this step, in seconds, if it is more than the usual limit.

        """
        self._show(
            replace(
                self._sign,
                done=done,
                total=total,
                words=words,
                waits_for="",
                peers=tuple(peers),
                limit_s=max(limit_s, self.limit_s),
            )
        )

    def sum_up(self, words: str) -> None:
        """Set the summary of the phase, for the log."""
        self._summary = words

    def waits(self, what: str, *, limit_s: float, peers: Iterable[int] = ()) -> None:
        """Write that the worker waits: for what, at most how many seconds, and for which slots."""
        self._show(replace(self._sign, waits_for=what, peers=tuple(peers), limit_s=limit_s))

    def goes_on(self) -> None:
        """Write that a wait has ended."""
        self._show(replace(self._sign, waits_for="", peers=(), limit_s=self.limit_s))

    def fail(self, reason: str) -> None:
        """Write the reason of a failure, one line."""
        self._write(f"{self.local_rank}.error", reason)

    def _show(self, sign: Sign) -> None:
        self._sign = replace(sign, at_s=time.monotonic())
        self._write(f"{self.local_rank}.sign", files.dumps(self._sign))

    def _write(self, name: str, text: str) -> None:
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / f".{name}.{os.getpid()}"
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(self.folder / name)


def last_sign(folder: Path, local_rank: int) -> Sign | None:
    """Read the last progress message of a worker of this node; None while there is none."""
    try:
        return files.read(folder / f"{local_rank}.sign", Sign)
    except PipetteError:
        return None


def last_error(folder: Path, local_rank: int) -> str:
    """Read the reason that a failed worker wrote; empty where it wrote none."""
    try:
        return (folder / f"{local_rank}.error").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
