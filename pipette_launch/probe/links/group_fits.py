"""From the members' timings of collectives to one line for each kind and dimension. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipette_launch.facts import CollectiveTime
from pipette_launch.facts.messages.measuring_advice import Dimension
from pipette_launch.probe.harness import fit_line
from pipette_launch.probe.options import GroupSamples, WorkerResult


def group_times(dimensions: Sequence[Dimension], results: Sequence[WorkerResult]) -> tuple[CollectiveTime, ...]:
    """One entry for each kind and dimension: the group that is in the middle by its largest message."""
    seen: dict[tuple[str, int], dict[int, GroupSamples]] = {}
    for result in results:
        for samples in result.collectives:
            seen.setdefault((samples.kind, samples.dimension), {})[result.slot] = samples
    return tuple(_group_time(dimensions[index], by_slot) for (_, index), by_slot in seen.items())


def _group_time(dimension: Dimension, by_slot: Mapping[int, GroupSamples]) -> CollectiveTime:
    timed = sorted(
        (_group_seconds([by_slot[slot] for slot in group]), group)
        for group in dimension.groups
        if all(slot in by_slot for slot in group)
    )
    timed.sort(key=lambda entry: entry[0][-1])
    seconds, slots = timed[(len(timed) - 1) // 2]
    sample = by_slot[slots[0]]
    line = fit_line(sample.sizes_bytes, seconds)
    return CollectiveTime(
        kind=sample.kind,
        slots=slots,
        latency_s=line.latency_s,
        seconds_per_byte=line.seconds_per_byte,
        spread=max(by_slot[slot].samples[-1].spread for slot in slots),
        sizes_bytes=sample.sizes_bytes,
    )


def _group_seconds(members: Sequence[GroupSamples]) -> tuple[float, ...]:
    """A collective is done when its last member is: for each size the largest of the members' medians."""
    sizes = range(len(members[0].sizes_bytes))
    return tuple(max(member.samples[size].median_s for member in members) for size in sizes)
