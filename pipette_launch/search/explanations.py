"""Reasons for a plan, and notes on its predictions, one sentence each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from pipette_launch.cost.learned import LEARNED
from pipette_launch.cost.memory.overhead import has_expandable_segments, measured_overhead, uncounted
from pipette_launch.cost.memory.peak import NO_MASK, mask_notes, without_mask
from pipette_launch.cost.step.predictor import NOT_MODELLED
from pipette_launch.errors import PlanError
from pipette_launch.facts import Choice, Job, Layout
from pipette_launch.facts.cluster import in_device_order, shared_order
from pipette_launch.search.candidates import NOT_MEASURED, OVER_MEMORY, SearchInputs, doublings_apart, limits_N
from pipette_launch.search.choose import EQUAL, Chosen
from pipette_launch.search.layouts import Cuts, cuts
from pipette_launch.search.slots import IsLate
from pipette_launch.text import bytes_text, plural, seconds_text

PART_NAMES = {
    "compute": "compute",
    "recompute": "recompute",
    "tensor_parallel": "tensor-parallel communication",
    "context_parallel": "context-parallel communication",
    "expert_parallel": "expert-parallel communication",
    "pipeline_transfer": "transfers between stages",
    "bubble": "the pipeline bubble",
    "data_parallel": "gradient reduction",
    "embedding_gradients": "the reduction of tied embedding gradients",
    "optimizer": "the optimizer",
    "parameter_gather": "gathering parameters",
    LEARNED: "the learned correction",
}
DRIVERS_SHARE = 0.03
"""A GPU whose used memory is no larger part than this is free."""
_ROUNDING = 1e-9
_NOTHING = 0.0005
"""Less than this part of a step prints as 0.0 %."""


def reasons(inputs: SearchInputs, chosen: Chosen, *, floor_s: float, margin: float) -> tuple[str, ...]:
    """Say why this plan was chosen and not another, and how much faster any other could be.

    Args:
        inputs: the job and the machines.
        chosen: the decision.
        floor_s: seconds; no legal layout that fits is faster.
        margin: part of the user's own step that another plan had to save.

    """
    why = _why_own(chosen, margin) if chosen.keeps_own else _why_other(inputs, chosen)
    return (*why, *_runner_up(chosen), _bound(chosen), _floor(chosen, floor_s))


def notes(inputs: SearchInputs, chosen: Chosen) -> tuple[str, ...]:
    """Say what was measured badly, assumed, pinned, or is not modelled."""
    found = [*inputs.job.notes, *inputs.measurements.notes, *inputs.predictor.notes(chosen.priced_layout)]
    own = chosen.own
    if inputs.own_fault is not None and not inputs.job.own_refusal:
        found.append(f"The user's own layout {own.layout.words()} is ruled out: {inputs.own_fault}.")
    elif chosen.own_basis is not None:
        found.append(
            f"The user's own layout could not be priced; the step time of {chosen.own_basis.words()}, the nearest that "
            f"could, stands for it."
        )
    found += [block.sentence for block in inputs.blocks(chosen.choice.layout)]
    if inputs.own_split is not None:
        found.append(f"The user's own configuration, {own.layout.words()}, is not kept: {inputs.own_split}.")
    found += _taken(inputs)
    found += [
        f"{len(host.devices)} slots share the {host.cores} cores of {host.name}: steps may be slower than predicted."
        for host in inputs.cluster.hosts
        if host.shares_cores
    ][:1]
    layouts = [chosen.choice.layout] if own.fits else [chosen.choice.layout, own.layout]
    found += next(filter(None, (mask_notes(inputs.job, layout) for layout in layouts)), ())
    found += _reserve(inputs, chosen)
    found += uncounted(inputs.job)
    found += _learning(inputs, chosen)
    found += [f"Not modelled: {sentence[0].lower()}{sentence[1:]}" for sentence in NOT_MODELLED]
    return tuple(dict.fromkeys(found))


def cut_short(num_seen: int, budget_s: float) -> str:
    """Say that the budget ended the search."""
    layouts = "one layout" if num_seen == 1 else f"{num_seen} layouts"
    return (
        f"The search stopped at its budget of {seconds_text(budget_s)}, with {layouts} looked at; more time might find "
        f"a better plan."
    )


def scheduled(choice: Choice, stock: Choice) -> str:
    """Say what a schedule that Megatron lacks saves of the best plan under Megatron's own."""
    gain = 1 - choice.step_time_s / stock.step_time_s
    return (
        f"{choice.layout.words()} under the schedule {choice.schedule} takes {seconds_text(choice.step_time_s)} a "
        f"step, {gain:.1%} less than the best under Megatron's own schedules, {stock.layout.words()}; why that one:"
    )


def kept_order(inputs: SearchInputs, choice: Choice) -> tuple[str, ...]:
    """Say what another order of devices than their own saves, in one sentence; nothing where devices are in order."""
    devices = inputs.cluster.devices_per_host
    order_D = shared_order(choice.placement, devices)
    if order_D is None or order_D == tuple(range(devices)):
        return ()
    schedule = choice.order.schedule() if choice.order else None
    in_order = tuple(in_device_order(choice.placement, devices).tolist())
    in_order_s = inputs.predictor.step_time(choice.layout, in_order, schedule).total_s
    gain = 1 - choice.step_time_s / in_order_s
    taken = f"On every host ranks take the devices in the order {','.join(map(str, order_D))}"
    return (f"{taken}: links inside hosts differ, and this order alone saves {gain:.1%} of the step.",)


def _why_own(chosen: Chosen, margin: float) -> list[str]:
    best, own = chosen.best, chosen.own
    kept = f"The user's own configuration stays: {own.layout.words()}, {seconds_text(own.step_time_s)} a step"
    gain = 1 - best.placed.cost_s / own.step_time_s
    if gain < _NOTHING:
        return [f"{kept}; no other layout or placement is predicted to be faster."]
    where = " with other places" if best.layout == own.layout else ""
    other = f"{best.layout.words()}{where}"
    least = chosen.least_gain_s / own.step_time_s
    short_of = f"the margin of {margin:.1%}"
    if least > margin + _ROUNDING:
        short_of = f"the {least:.1%} by which the two predictions may be off (--pipette-trials would measure both)"
    return [f"{kept}; the best other, {other}, would save {gain:.1%}, less than {short_of}."]


def _why_other(inputs: SearchInputs, chosen: Chosen) -> list[str]:
    choice, own = chosen.choice, chosen.own
    found = []
    if inputs.own_cannot_run:
        found.append(f"{choice.layout.words()} takes {seconds_text(choice.step_time_s)} a step.")
    elif not own.fits:
        shown = own.memory_shown
        worst = max(shown.need_bytes)
        stage = shown.need_bytes.index(worst)
        limit = bytes_text(shown.limit_bytes)
        found.append(
            f"The user's own layout {own.layout.words()} is predicted to need {bytes_text(worst)} on stage {stage}, "
            f"more than the limit of {limit}."
        )
        found.append(f"{choice.layout.words()} fits, and takes {seconds_text(choice.step_time_s)} a step.")
    else:
        found.append(_gain(choice, own))
        found += _saving(choice, own)
    return found + _equal(chosen) + _placement(chosen)


def _equal(chosen: Chosen) -> list[str]:
    """Say that another plan is predicted slightly faster, and why this one is chosen."""
    other = chosen.passed_over
    if other is None:
        return []
    gain = 1 - other.placed.cost_s / chosen.choice.step_time_s
    faster = f"{other.layout.words()} is predicted {gain:.2%} faster"
    if other.layout == chosen.choice.layout:
        return [
            f"Placed by the links it is predicted {gain:.2%} faster; that counts as equal, and torchrun's order stays."
        ]
    if gain <= EQUAL:
        return [f"{faster}; steps within {EQUAL:.1%} count as equal, and the simpler layout wins."]
    off = seconds_text(chosen.passed_over_for_s)
    why = "its degrees are other than yours, or less of its step was measured"
    return [f"{faster}, but it may be off by {off} more: {why} (--pipette-trials would measure both)."]


def _gain(choice: Choice, own: Choice) -> str:
    gain = 1 - choice.step_time_s / own.step_time_s
    same = choice.layout == own.layout
    theirs = "in torchrun's order" if same else f"{own.layout.words()}, the user's own,"
    ours = f"{choice.layout.words()}{', placed by the links,' if same else ''}"
    times = seconds_text(choice.step_time_s), seconds_text(own.step_time_s)
    return f"{ours} takes {times[0]} a step, {gain:.1%} less than {theirs} with {times[1]}."


def _saving(choice: Choice, own: Choice) -> list[str]:
    """Name the part of the step that shrinks most."""
    parts = sorted(set(own.breakdown_s) | set(choice.breakdown_s))
    saved_s = {part: own.breakdown_s.get(part, 0.0) - choice.breakdown_s.get(part, 0.0) for part in parts}
    part = max(parts, key=lambda name: saved_s[name], default="")
    if not part or saved_s[part] <= 0:
        return []
    times = [seconds_text(which.breakdown_s.get(part, 0.0)) for which in (choice, own)]
    return [f"It saves most on {PART_NAMES.get(part, part.replace('_', ' '))}: {times[0]} in place of {times[1]}."]


def _placement(chosen: Chosen) -> list[str]:
    best = chosen.best
    saved = 1 - best.placed.cost_s / best.host_order_s
    if chosen.choice.is_host_order or best.layout == chosen.own.layout or saved < _NOTHING:
        return []
    before = seconds_text(best.host_order_s)
    return [f"Placing its ranks by the links saves {saved:.1%}; in torchrun's order it would take {before}."]


def _runner_up(chosen: Chosen) -> list[str]:
    if chosen.keeps_own or not chosen.alternatives:
        return []
    second = chosen.alternatives[0]
    behind = second.step_time_s / chosen.choice.step_time_s - 1
    if behind < -_NOTHING:
        if chosen.passed_over and chosen.passed_over.layout == second.layout:
            return []
        within = "which is within what the two predictions may be off (--pipette-trials would measure both)"
        return [f"The runner-up, {second.layout.words()}, is predicted {-behind:.1%} faster, {within}."]
    if behind < _NOTHING:
        return [f"The runner-up, {second.layout.words()}, is predicted to be as fast."]
    return [f"The runner-up, {second.layout.words()}, takes {seconds_text(second.step_time_s)}, {behind:.1%} more."]


def _bound(chosen: Chosen) -> str:
    choice, best = chosen.choice, chosen.best
    gap = choice.step_time_s / choice.bound_s - 1 if choice.bound_s > 0 else 0.0
    if gap <= _ROUNDING:
        return "No placement of this layout can be faster: it meets the bound."
    proven = best.placed.is_optimal and best.placed.placement == choice.placement and best.layout == choice.layout
    tried = (
        "All placements of this layout were tried, this is the fastest; a bound is"
        if proven
        else "No placement can be faster than"
    )
    why = choice.bound_reason or "it takes so long over the best links that there are"
    return f"{tried} {seconds_text(choice.bound_s)}, a gap of {gap:.1%}: {why}."


def _floor(chosen: Chosen, floor_s: float) -> str:
    gap = chosen.choice.step_time_s / floor_s - 1 if floor_s > 0 else float("inf")
    if gap <= _ROUNDING:
        return "No legal layout that fits is predicted to be faster in any placement: proven."
    if gap == float("inf"):
        return "How much faster another layout could be is not known."
    return f"No legal layout that fits takes less than {seconds_text(floor_s)} in any placement: a gap of {gap:.1%}."


def _taken(inputs: SearchInputs) -> list[str]:
    """Name the GPU on which others hold most memory, where that is more than a driver's own share."""
    devices = [(host.name, device) for host in inputs.cluster.hosts for device in host.devices]
    name, fullest = min(devices, key=lambda pair: pair[1].memory_free_bytes)
    if fullest.kind != "cuda" or fullest.memory_free_bytes >= (1 - DRIVERS_SHARE) * fullest.memory_total_bytes:
        return []
    free, total = bytes_text(fullest.memory_free_bytes), bytes_text(fullest.memory_total_bytes)
    return [f"Only {free} of {total} are free on {fullest.uuid} of {name}; every rank is planned for that."]


def _reserve(inputs: SearchInputs, chosen: Chosen) -> tuple[str, ...]:
    """Say what expandable segments reserve, as they are not the allocator's default."""
    if inputs.cluster.device_kind != "cuda" or not has_expandable_segments(inputs.job):
        return ()
    reserve = measured_overhead(inputs.job, chosen.choice.layout, inputs.measurements).reserve
    return (f"The allocator's reserve: {reserve.value:g} x what it allocates, {reserve.source}.",)


def _learning(inputs: SearchInputs, chosen: Chosen) -> list[str]:
    """Say how a change of layout changes the numbers of a fresh run (Megatron's own seeds and padding)."""
    new, old = chosen.choice.layout, chosen.own.layout
    if new == old or doublings_apart(new, old) == 0:
        return []
    model = inputs.job.model
    found = []
    if (new.tp, new.pp, new.ep) != (old.tp, old.pp, old.ep):
        found.append(
            "Initial weights are drawn rank by rank, so a fresh run starts from other random numbers than under the "
            "user's own layout."
        )
    elif max(model.attention_dropout, model.hidden_dropout) > 0:
        found.append("Dropout masks are drawn rank by rank, so they differ from those of the user's own layout.")
    rows = model.padded_vocab_size(old.tp)
    if rows % new.tp and rows != model.padded_vocab_size(new.tp):
        # Where it divides, `megatron.write_arguments` keeps the user's own padding.
        found.append(f"tp{new.tp} pads the vocabulary to {model.padded_vocab_size(new.tp)} rows in place of {rows}.")
    if model.num_experts and new.micro_batch_size != old.micro_batch_size:
        found.append("The router's auxiliary loss and capacity act on each micro-batch, whose size changes.")
    return found


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
