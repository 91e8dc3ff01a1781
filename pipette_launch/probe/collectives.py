"""How long all-reduce, all-gather and reduce-scatter take on the groups that plans use, all groups at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from pipette_launch.facts import Samples
from pipette_launch.probe.harness import Budget, Conductor
from pipette_launch.probe.links import align
from pipette_launch.probe.options import CollectiveKind, GroupSamples, GroupShape, ProbeOptions

COLLECTIVES_SHARE = 0.6
"""Of the budget, counted from the meeting of all workers."""
ELEMENT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class CollectiveResult:
    """What one worker saw, and what could not be measured."""

    groups: tuple[GroupSamples, ...]
    notes: tuple[str, ...]


def kinds(options: ProbeOptions) -> tuple[CollectiveKind, ...]:
    """The collectives that plans of this job use."""
    usual: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter")
    return (*usual, "all_to_all") if options.job.model.num_experts else usual


def padded_sizes(options: ProbeOptions, group_size: int) -> tuple[int, ...]:
    """Sizes rounded up so that every member's share is a whole number of elements."""
    step = ELEMENT_BYTES * group_size
    return tuple(dict.fromkeys(-(-size // step) * step for size in options.sizes_bytes()))


def measure(options: ProbeOptions, *, rank: int, conductor: Conductor, budget: Budget) -> CollectiveResult:
    """Time each kind on each shape; every rank calls this."""
    found: list[GroupSamples] = []
    notes: list[str] = []
    shapes = options.all_shapes()
    for index, shape in enumerate(shapes):
        if index and not conductor.agree(lambda: budget.allows(COLLECTIVES_SHARE)):
            skipped = ", ".join(f"{shape.size} x stride {shape.stride}" for shape in shapes[index:])
            notes.append(f"collectives: groups of {skipped} were skipped, the budget was spent")
            break
        members = next(group for group in shape.groups(options.num_slots) if rank in group)
        group = _open(members, options)
        for kind in kinds(options):
            measured = _time_kind(options, kind=kind, shape=shape, group=group)
            if isinstance(measured, GroupSamples):
                found.append(measured)
            else:
                notes.append(f"collectives: {kind} was not measured on groups of {shape.size}: {measured}")
        if group is not dist.group.WORLD:
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
    options: ProbeOptions, *, kind: CollectiveKind, shape: GroupShape, group: dist.ProcessGroup
) -> GroupSamples | str:
    """Time one kind on one group; where the backend has no such collective, which every rank finds alike, say so."""
    sizes = padded_sizes(options, shape.size)
    samples = []
    for size in sizes:
        action = _action(kind, size // ELEMENT_BYTES, shape.size, group=group, device=options.device_kind)
        unsupported = _try_once(action)
        if unsupported:
            return unsupported
        align(options.device_kind)
        times = [_timed(action, options.device_kind) for _ in range(options.warmups + options.repeats)]
        samples.append(Samples(values_s=tuple(times[options.warmups :]), warmup_s=tuple(times[: options.warmups])))
    return GroupSamples(kind=kind, shape=shape, sizes_bytes=sizes, samples=tuple(samples))


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
    before = time.perf_counter()
    action()
    if device_kind == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - before
