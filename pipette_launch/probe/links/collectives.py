"""Times collectives on the groups of slots that plans use.

All groups of a dimension run at the same time, as in training, so the times contain contention between groups. On CPUs
every collective directly follows some computing, as in training. On a CPU the same core sends, adds and computes, so a
busy rank waits for its core and for its peers. On GPUs several calls run in a row between two CUDA events, because
training hides launches and waits of the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeAlias

import torch
import torch.distributed as dist

from pipette_launch.errors import ProbeError
from pipette_launch.facts import Samples
from pipette_launch.facts.measurements import CollectiveKind
from pipette_launch.facts.messages import Dimension
from pipette_launch.probe.instruments import QueuedCalls, await_device
from pipette_launch.probe.lockstep import Budget, Clock, Lockstep
from pipette_launch.probe.messages import GroupSamples, WarmupOrder, WorkerResult

COLLECTIVES_SHARE = 0.9  # After this share of the budget, no timing of another dimension (set of equal groups) begins
ELEMENT_BYTES = 4
COMPUTED_S = 2e-3
"""Processor time (s) spent before each collective on CPUs. On hosts with 0.45 of a core, a message of 164 kB took
1.7 ms from an idle rank, 4.3 to 5.1 ms after computing, and about 6 ms in training."""
SMALL_BYTES, MORE_REPEATS = 256 << 10, 2
"""On CPUs, collectives up to 256 KiB are repeated twice as often, because short collectives scatter most."""
MOST_CALLS, CALLS_S = 16, 10e-3  # One value on a GPU is the mean of up to 16 calls, together at most 10 ms
DEADLINE_SHARE = 0.8
"""A worker stops waiting for a collective after this share of the time limit. At the full limit, NCCL's watchdog would
end the worker without an error message."""
REACH_REPEATS, REACH_S, REACH_SHARE = 3, 1.5, 0.5
"""The largest tensors of plans, above all gradients, may be many times the largest message between stages. So
collectives are timed at one larger size too. Three repeats of this size must fit into 1.5 s and into half of the time
left. (Without a larger size, predictions for an all-gather of 20 MB on links of 100 MB/s were 110 to 171 ms. The
all-gather took 169 ms.)"""
REACH_LIMIT_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}
REACH_LEAST = 2  # The larger size is timed only if it is at least this multiple of the largest size so far
Call: TypeAlias = Callable[[], object]


def padded_bytes(size_bytes: int, group_size: int) -> int:
    """Round a tensor size up, so that every member's share is a whole number of elements."""
    step = ELEMENT_BYTES * group_size
    return -(-size_bytes // step) * step


def measure(
    options: WarmupOrder, dimensions: Sequence[Dimension], *, first: int = 0, lockstep: Lockstep, budget: Budget
) -> tuple[WorkerResult, int]:
    """Time collectives on each dimension (set of equal groups); every rank calls this, even a rank in no group.

    The most important dimensions come first, and the first dimension is timed even without time left. The samples count
    dimensions from `first`. Returns samples, with notes on what could not be measured, and the number of groups that
    this worker opened. Process groups stay open until the group of all ranks is closed.
    """
    found: list[GroupSamples] = []
    notes: list[str] = []
    rank, num_groups = lockstep.rank, 0
    queued = QueuedCalls(time.perf_counter) if options.device_kind == "cuda" else None
    for index, dimension in enumerate(dimensions):
        if index and not lockstep.agree(lambda: budget.allows(COLLECTIVES_SHARE)):
            skipped = ", ".join(skipped.name for skipped in dimensions[index:])
            notes.append(f"collectives: groups of {skipped} were skipped, because the budget was spent")
            break
        members = next((group for group in dimension.groups if rank in group), ())
        lockstep.progress.step(index, len(dimensions), f"opening the groups of {dimension.name}")
        opened = _open(members or (rank,), options)
        group = opened if members else None
        num_groups += group is not None and group is not dist.group.WORLD
        for kind in dimension.kinds:
            place = f"{kind} of {dimension.name}"
            lockstep.progress.step(index, len(dimensions), place)
            timer = _Timer(options=options, kind=kind, size=len(members), group=group, queued=queued, place=place)
            for asked_bytes in options.message_sizes_bytes:
                timer.time(asked_bytes)
            reach_bytes = int(lockstep.broadcast(str(timer.reach_bytes(dimension.most_bytes, budget))))
            if reach_bytes:
                timer.time(reach_bytes, repeats=REACH_REPEATS)
            if timer.refused:
                notes.append(f"collectives: {kind} was not measured on groups of {dimension.name}: {timer.refused}")
            elif timer.timed:
                sizes, samples = tuple(timer.timed), tuple(timer.timed.values())
                found.append(GroupSamples(kind=kind, dimension=first + index, sizes_bytes=sizes, samples=samples))
    return WorkerResult(slot=rank, collectives=tuple(found), notes=tuple(notes)), num_groups


def _open(members: tuple[int, ...], options: WarmupOrder) -> dist.ProcessGroup:
    """Open this rank's process group of a dimension; a rank without peers opens a group of its own. Groups stay open.

    With local synchronisation torch names a group by its members and by the number of groups that this process has
    open. So all ranks must have opened the same number of groups, or members would wait under different names. A closed
    group would leave its name, and stale addresses in the store, to the next group of the same members.
    """
    if len(members) == options.num_slots:
        world = dist.group.WORLD
        assert world is not None
        return world
    # With local synchronisation only members make the call, so all groups of a dimension open at the same time.
    group = dist.new_group(list(members), timeout=timedelta(seconds=options.wait_s()), use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


@dataclass(kw_only=True)
class _Timer:
    """Times one kind of collective on this rank's group; a rank without a group only waits for other ranks."""

    options: WarmupOrder
    kind: CollectiveKind
    size: int
    group: dist.ProcessGroup | None
    queued: QueuedCalls | None = None
    place: str = ""
    timed: dict[int, Samples] = field(default_factory=dict)
    """Times of the collective, by the size of the full tensor in bytes."""
    refused: str = ""
    """Error text if the backend lacks this collective, the same on all members; else empty."""

    def __post_init__(self) -> None:
        self._limit_s = DEADLINE_SHARE * self.options.wait_s()

    def time(self, asked_bytes: int, repeats: int | None = None) -> None:
        """Time the collective with one size; all ranks make this call with the same size.

        If `repeats` is given, only the first call is a warm-up; None = the numbers in the warm-up order.
        """
        size_bytes = padded_bytes(asked_bytes, max(self.size, 1))
        device, action = self.options.device_kind, None
        if self.group is not None and not self.refused:
            action = _action(self.kind, size_bytes // ELEMENT_BYTES, self.size, group=self.group, device=device)
            self.refused = _first_try(action)
        action = None if self.refused else action
        try:
            # Ranks without a group, or with a refused collective, make this call too: other groups wait for all ranks.
            slowest_of_all(0.0, device, self._limit_s)
            value_s = _on_cpu if self.queued is None else self._on_gpu(action, self.queued)
            if action is not None:
                warmups = 0 if repeats else self.options.warmups
                is_small = device == "cpu" and asked_bytes <= SMALL_BYTES
                repeats = repeats or self.options.repeats * (MORE_REPEATS if is_small else 1)
                times = [value_s(action) for _ in range(warmups + repeats)]
                self.timed[size_bytes] = Samples(values_s=tuple(times[warmups:]), warmup_s=tuple(times[:warmups]))
        except TimeoutError as error:
            raise ProbeError(f"collectives: {self.place} did not end ({error})") from error

    def _on_gpu(self, action: Call | None, queued: QueuedCalls) -> Callable[[Call], float]:
        """Return a function that times several calls in a row by CUDA events; all ranks use the same number of calls.

        The time of a single call on the slowest rank decides the number of calls. Untimed calls in a row then show how
        long other work must keep the devices busy.
        """
        before_s = time.perf_counter()
        if action is not None:
            action()
            await_device(self._limit_s, time.perf_counter)
        call_s = slowest_of_all(time.perf_counter() - before_s, "cuda", self._limit_s)
        number = max(1, min(MOST_CALLS, int(CALLS_S / max(call_s, 1e-9))))
        if action is not None:
            queued.seconds(action, number, timeout_s=self._limit_s)
        # Groups that share links must begin at the same time.
        queued.passes = int(slowest_of_all(queued.wanted, "cuda", self._limit_s))
        return lambda call: queued.seconds(call, number, timeout_s=self._limit_s)

    def reach_bytes(self, most_bytes: int, budget: Budget) -> int:
        """Return the size (bytes) of a larger tensor that fits into the time left; 0 = no further size is timed."""
        if not self.timed:
            return 0
        known_bytes, samples = list(self.timed.items())[-1]
        # On GPUs two test calls come before the values, and an untimed call before each test call and value.
        calls = REACH_REPEATS + 1 if self.queued is None else 2 * (REACH_REPEATS + 2)
        allowed_s = min(REACH_S, REACH_SHARE * budget.left_s(COLLECTIVES_SHARE)) / calls
        affordable = int(known_bytes * allowed_s / samples.median_s)
        reach = min(most_bytes, affordable, REACH_LIMIT_BYTES[self.options.device_kind])
        return reach if reach >= REACH_LEAST * known_bytes else 0


def slowest_of_all(seconds: float, device_kind: str, timeout_s: float, clock: Clock = time.perf_counter) -> float:
    """Return the largest of all ranks' numbers, by an all-reduce; on a GPU, raises TimeoutError at the deadline."""
    largest = torch.tensor([seconds], dtype=torch.float64, device=device_kind)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    if device_kind == "cuda":
        await_device(timeout_s, clock)
    return float(largest)


def _action(kind: CollectiveKind, elements: int, size: int, *, group: dist.ProcessGroup, device: str) -> Call:
    full = torch.zeros(elements, device=device)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(full, group=group)
    if kind == "all_to_all":
        other = torch.zeros(elements, device=device)
        return lambda: dist.all_to_all_single(other, full, group=group)
    share = torch.zeros(elements // size, device=device)
    if kind == "all_gather":
        return lambda: dist.all_gather_into_tensor(full, share, group=group)
    return lambda: dist.reduce_scatter_tensor(share, full, group=group)


def _first_try(action: Call) -> str:
    """Run a first collective, which opens connections; returns the error if the backend lacks it, else ''."""
    try:
        action()
    except (NotImplementedError, RuntimeError, ValueError) as error:
        text = str(error).splitlines()[0]
        # Backends write "does not support", "unsupported" or "not implemented"; anything else is a real failure.
        if isinstance(error, NotImplementedError) or "support" in text or "not implemented" in text:
            return text
        raise
    return ""


def _on_cpu(action: Call) -> float:
    # Keep this thread's processor busy for COMPUTED_S of processor time.
    end_s = time.thread_time() + COMPUTED_S
    while time.thread_time() < end_s:
        pass
    before = time.perf_counter()
    action()
    return time.perf_counter() - before
