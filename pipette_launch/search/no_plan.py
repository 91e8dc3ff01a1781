"""Explain why there is no plan: the constraint that rules all layouts out, and the nearest change that would help."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from pipette_launch.cost.memory.overhead import measured_overhead
from pipette_launch.cost.memory.peak import NO_MASK, without_mask
from pipette_launch.errors import PlanError
from pipette_launch.facts import Job, Layout
from pipette_launch.search.candidates import NOT_MEASURED, OVER_MEMORY, SearchInputs, limits_N
from pipette_launch.search.layouts.enumerate import Cuts, cuts
from pipette_launch.search.placement.slots import IsLate
from pipette_launch.text import bytes_text, plural

MOST_HOSTS_MORE = 8
"""A larger allocation is proposed up to so many times its hosts."""


def nothing_left(
    inputs: SearchInputs, *, dropped: Mapping[str, int], memory_margin: float, is_late: IsLate
) -> PlanError:
    """Explain why no legal layout is left to price; what would help is looked for until `is_late`."""
    if dropped.get(OVER_MEMORY):
        return _nothing_fits(inputs, memory_margin, is_late)
    if dropped.get(NOT_MEASURED):
        cases = ", ".join(
            f"tp{case.tp} cp{case.cp} mbs{case.micro_batch_size}" for case in inputs.measurements.compute_cases()
        )
        return PlanError(
            f"no layout can be priced: compute was measured for {cases or 'nothing'}, which no legal layout uses; "
            f"measure again with more time"
        )
    return _nothing_legal(inputs, is_late)


def _nothing_legal(inputs: SearchInputs, is_late: IsLate) -> PlanError:
    job, slots = inputs.job, inputs.cluster.num_slots
    pins = f" with {', '.join(job.pinned)} fixed" if job.pinned else ""
    broken = f"; the user's own {job.own.words()} breaks: {inputs.own_fault}" if inputs.own_fault else ""
    if job.own_refusal:
        broken = f"; the user's own configuration is refused: {job.own_refusal}"
    ways = [*_released(inputs, must_fit=False, is_late=is_late), *_other_sizes(inputs)]
    return PlanError(f"no layout is legal for {slots} ranks{pins}{broken}. {_help(ways)}")


def _nothing_fits(inputs: SearchInputs, memory_margin: float, is_late: IsLate) -> PlanError:
    cluster = inputs.cluster
    found = _legal(inputs.job, inputs, cluster.num_slots)
    lean = found.tables.leanest(found.columns)
    fullest_N = inputs.predictor.fullest_N(lean)
    legal = [] if inputs.own_fault else [inputs.job.own]
    if len(lean):
        legal.append(lean.layout(int(np.argmin(fullest_N - limits_N(inputs.job, lean, inputs.limit_bytes)))))
    peaks = {layout: inputs.predictor.peaks(layout) for layout in legal}
    leanest = min(legal, key=lambda layout: max(peaks[layout]) - inputs.limit_bytes(layout))
    need, shown = max(peaks[leanest]), inputs.memory_need(leanest, peaks[leanest])
    ways = [
        *_without_mask(inputs),
        *_released(inputs, must_fit=True, is_late=is_late),
        *_more_hosts(inputs, is_late),
        *_less_margin(inputs, leanest, need),
        f"use devices with {bytes_text(_more_memory(inputs, leanest, need))} more memory each",
    ]
    late = ". The budget ended before all ways to help were tried" if is_late() else ""
    return PlanError(
        f"no layout fits in memory: the leanest of {found.num_layouts}, {leanest.words()}, is predicted to need "
        f"{bytes_text(max(shown.need_bytes))} on stage {peaks[leanest].index(need)}, but only "
        f"{bytes_text(shown.limit_bytes)} is available (free on the fullest device "
        f"{bytes_text(cluster.memory_bytes)}, margin {memory_margin:.0%}). {_help(ways)}{late}"
    )


def _without_mask(inputs: SearchInputs) -> Iterator[str]:
    """Propose to leave the data loader's mask out, where layouts fit without it."""
    bare = without_mask(inputs.job)
    if bare is None:
        return
    changed = SearchInputs.of(bare, inputs.measurements, memory_margin=inputs.memory_margin)
    count = _num_fitting(changed, _legal(bare, changed, inputs.cluster.num_slots))
    if count:
        yield f"pass {NO_MASK} ({count} {plural('layout', count)})"


def _less_margin(inputs: SearchInputs, leanest: Layout, need: int) -> Iterator[str]:
    """Propose to leave less memory free, where the leanest layout fits without any margin."""
    if inputs.memory_margin > 0 and need <= replace(inputs, memory_margin=0.0).limit_bytes(leanest):
        yield f"leave less memory free than {inputs.memory_margin:.0%}"


def _more_memory(inputs: SearchInputs, layout: Layout, need: int) -> int:
    """Bytes by which every device would have to be larger for a layout to fit, with margin and overhead."""
    overhead = measured_overhead(inputs.job, layout, inputs.measurements)
    free = inputs.cluster.memory_bytes
    low, high = 0, 1 << 50
    while low < high:
        middle = (low + high) // 2
        if overhead.limit_bytes(free + middle, memory_margin=inputs.memory_margin) >= need:
            high = middle
        else:
            low = middle + 1
    return low


def _help(ways: list[str]) -> str:
    if not ways:
        return "No single released flag and no smaller number of hosts would help"
    return f"What would help: {', or '.join(ways)}"


def _released(inputs: SearchInputs, *, must_fit: bool, is_late: IsLate) -> Iterator[str]:
    """Name the pinned flags of which each alone, if released, would allow a plan; as far as there is time."""
    job = inputs.job
    for pin in job.pinned:
        if is_late():
            return
        freed = replace(job, pinned=tuple(name for name in job.pinned if name != pin))
        others = _legal(freed, inputs, inputs.cluster.num_slots)
        count = _num_fitting(inputs, others) if must_fit else others.num_layouts
        if count:
            yield f"let {pin} change ({count} {plural('layout', count)})"


def _other_sizes(inputs: SearchInputs) -> Iterator[str]:
    """Name the nearest smaller number of whole hosts that has a legal layout."""
    devices = inputs.cluster.devices_per_host
    for hosts in range(len(inputs.cluster.hosts) - 1, 0, -1):
        if len(_legal(inputs.job, inputs, hosts * devices)):
            yield f"use {hosts} {plural('host', hosts)} ({hosts * devices} ranks)"
            return


def _more_hosts(inputs: SearchInputs, is_late: IsLate) -> Iterator[str]:
    """Name the nearest multiple of the hosts on which a layout fits, as far as there is time to look."""
    hosts = len(inputs.cluster.hosts)
    for times in range(2, MOST_HOSTS_MORE + 1):
        if is_late():
            return
        ranks = times * inputs.cluster.num_slots
        if _num_fitting(inputs, _legal(inputs.job, inputs, ranks)):
            yield f"use {times * hosts} hosts ({ranks} ranks)"
            return


def _num_fitting(inputs: SearchInputs, found: Cuts) -> int:
    """How many cuts fit in the variant that should need the least memory."""
    lean = found.tables.leanest(found.columns)
    return int((inputs.predictor.fullest_N(lean) <= limits_N(inputs.job, lean, inputs.limit_bytes)).sum())


def _legal(job: Job, inputs: SearchInputs, world_size: int) -> Cuts:
    """The legal cuts for another number of ranks or with other pins."""
    return cuts(
        job,
        world_size=world_size,
        devices_per_host=inputs.cluster.devices_per_host,
        device_kind=inputs.cluster.device_kind,
        rooms=inputs.rooms.first(world_size // inputs.cluster.devices_per_host),
    )
