"""How long collectives take on the groups that plans use.

All groups of a dimension run at the same time, as they do in training, so contention between them is in the figures.
On CPUs every collective comes right after some computing, as in training, too: there the processor that sends and adds
is the one that computes, so a rank that was busy waits for its turn and then for its peers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias

import torch
import torch.distributed as dist

from pipette_launch.facts import Samples
from pipette_launch.facts.advice import CollectiveKind, Dimension
from pipette_launch.probe.harness import Budget, Conductor
from pipette_launch.probe.links import align
from pipette_launch.probe.options import GroupSamples, ProbeOptions

COLLECTIVES_SHARE = 0.9
"""Of the budget, counted from the meeting of all workers."""
ELEMENT_BYTES = 4
COMPUTED_S = 2e-3
"""Of processor time before each collective on CPUs. Hosts of 0.45 cores, 164 kB between two of them: 1.7 ms with none,
4.3 to 5.1 ms after 2, 5 or 15 ms; in training about 6."""
SMALL_BYTES, MORE_REPEATS = 256 << 10, 2
"""Up to this size collectives on CPUs are repeated so many times more often: they cost little and scatter most."""

Timed: TypeAlias = tuple[tuple[int, ...], tuple[Samples, ...]]
"""Sizes in bytes, and the times of each."""


@dataclass(frozen=True, kw_only=True)
class CollectiveResult:
    """What one worker saw, and what could not be measured."""

    groups: tuple[GroupSamples, ...]
    notes: tuple[str, ...]


def padded_bytes(size_bytes: int, group_size: int) -> int:
    """Round up so that every member's share is a whole number of elements."""
    step = ELEMENT_BYTES * group_size
    return -(-size_bytes // step) * step


def measure(
    options: ProbeOptions, dimensions: Sequence[Dimension], *, rank: int, conductor: Conductor, budget: Budget
) -> CollectiveResult:
    """Time each kind of each dimension; every rank calls this, whether or not it is in a group."""
    found: list[GroupSamples] = []
    notes: list[str] = []
    for index, dimension in enumerate(dimensions):
        if index and not conductor.agree(lambda: budget.allows(COLLECTIVES_SHARE)):
            skipped = ", ".join(skipped.name for skipped in dimensions[index:])
            notes.append(f"collectives: groups of {skipped} were skipped, the budget was spent")
            break
        members = next((group for group in dimension.groups if rank in group), ())
        group = _open(members, options) if members else None
        for kind in dimension.kinds:
            conductor.step(index, len(dimensions), f"{kind} of {dimension.name}")
            measured = _time_kind(options, kind=kind, size=len(members), group=group)
            if isinstance(measured, str):
                notes.append(f"collectives: {kind} was not measured on groups of {dimension.name}: {measured}")
            elif measured is not None:
                sizes, samples = measured
                found.append(GroupSamples(kind=kind, dimension=index, sizes_bytes=sizes, samples=samples))
        if group is not None and group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    return CollectiveResult(groups=tuple(found), notes=tuple(notes))


def _open(members: tuple[int, ...], options: ProbeOptions) -> dist.ProcessGroup:
    if len(members) == options.num_slots:
        world = dist.group.WORLD
        assert world is not None
        return world
    # Local synchronisation: only members call, so all groups of a shape open at the same time.
    group = dist.new_group(list(members), timeout=timedelta(seconds=options.timeout_s), use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _time_kind(
    options: ProbeOptions, *, kind: CollectiveKind, size: int, group: dist.ProcessGroup | None
) -> Timed | str | None:
    """Time one kind on one group; where the backend has no such collective, which every member finds alike, say so.

    A rank without a group only keeps step with the others.
    """
    is_cpu = options.device_kind == "cpu"
    timed: dict[int, Samples] = {}
    refused: str | None = None
    for asked_bytes in options.sizes_bytes():
        size_bytes = padded_bytes(asked_bytes, max(size, 1))
        action = None
        if group is not None and refused is None:
            action = _action(kind, size_bytes // ELEMENT_BYTES, size, group=group, device=options.device_kind)
            refused = _try_once(action)
        # Also after a refusal and without a group: the dimension's other groups count on everyone.
        align(options.device_kind)
        if action is not None and refused is None:
            repeats = options.repeats * (MORE_REPEATS if is_cpu and asked_bytes <= SMALL_BYTES else 1)
            times = [_timed(action, options.device_kind) for _ in range(options.warmups + repeats)]
            timed[size_bytes] = Samples(
                values_s=tuple(times[options.warmups :]), warmup_s=tuple(times[: options.warmups])
            )
    if refused is not None:
        return refused
    return (tuple(timed), tuple(timed.values())) if timed else None


def _action(
    kind: CollectiveKind, elements: int, size: int, *, group: dist.ProcessGroup, device: str
) -> Callable[[], object]:
    """Prepare one collective whose full tensor has so many elements."""
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


def _try_once(action: Callable[[], object]) -> str | None:
    """Run an untimed first collective, which opens connections; returns why the backend cannot do it at all."""
    try:
        action()
    except (NotImplementedError, RuntimeError, ValueError) as error:
        text = str(error).splitlines()[0]
        # Backends say "does not support", "unsupported" or "not implemented"; anything else is a real failure.
        if isinstance(error, NotImplementedError) or "support" in text or "not implemented" in text:
            return text
        raise
    return None


def _timed(action: Callable[[], object], device_kind: str) -> float:
    if device_kind == "cpu":
        _compute(COMPUTED_S)
    before = time.perf_counter()
    action()
    if device_kind == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - before


def _compute(seconds: float) -> None:
    """Keep this thread's processor busy for so long, however long that takes on the wall."""
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass
