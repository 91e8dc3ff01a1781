"""Sentences about a plan: reasons for the plan, notes on its predictions, and errors if no plan exists."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from pipette_launch.cost.compute.device_model import published
from pipette_launch.cost.learned import LEARNED
from pipette_launch.cost.memory.overhead import (
    has_expandable_segments,
    measured_overhead,
    uncounted,
    with_expandable_segments,
)
from pipette_launch.cost.memory.peak import NO_MASK, mask_notes, peak_memory_bytes, without_mask
from pipette_launch.cost.step.assemble import LAUNCHING
from pipette_launch.cost.step.predictor import launching_notes
from pipette_launch.errors import PlanError
from pipette_launch.facts import Choice, Job, Layout
from pipette_launch.facts.job import EXPANDABLE_SEGMENTS
from pipette_launch.facts.measurements import MemoryNeed
from pipette_launch.megatron.performance import plannable_offload
from pipette_launch.search.candidates import NOT_MEASURED, OVER_MEMORY, SearchInputs, doublings_apart, limits_N
from pipette_launch.search.choose import EQUAL, Chosen
from pipette_launch.search.layouts import BaseLayouts, base_layouts
from pipette_launch.search.slots import IsLate
from pipette_launch.text import bytes_text, counted, plural, seconds_text

PART_NAMES = {
    LAUNCHING: "waiting until the host has launched kernels",
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
"""A GPU counts as free if at most this share of its memory is in use."""
MOST_HOSTS_MORE = 8
"""If no layout fits, the error proposes more hosts: at most this multiple of the present number."""
MEASURE_BOTH = "--pipette-trials would measure both"
_ROUNDING = 1e-9
_PRINTS_AS_ZERO = 0.0005


def reasons(inputs: SearchInputs, chosen: Chosen, *, floor_s: float, margin: float) -> tuple[str, ...]:
    """Explain the choice of this plan, and how much faster any other plan could be.

    `floor_s` is the lower bound over all legal layouts that fit, and `margin` the share of the user's own step that
    another plan had to save.
    """
    why = _why_own(chosen, margin) if chosen.keeps_own else _why_other(inputs, chosen)
    return (*why, *_runner_up(chosen), *_doubt(inputs, chosen), _bound(chosen), _floor(inputs, chosen, floor_s))


def advice(inputs: SearchInputs, chosen: Chosen) -> tuple[str, ...]:
    """Name what became of the user's own configuration, and flags that fix fields or that are not fully priced."""
    own, found = chosen.own, []
    priced = (chosen.own_basis if chosen.keeps_own else None) or chosen.choice.layout
    if inputs.own_fault is not None and not inputs.job.own_refusal:
        found.append(f"The user's own layout {own.layout.words()} is ruled out: {inputs.own_fault}.")
    elif chosen.own_basis is not None:
        found.append(
            f"The user's own layout could not be priced. The step time of the nearest priced layout, "
            f"{chosen.own_basis.words()}, replaces it."
        )
    if inputs.own_split is not None:
        found.append(f"The user's own configuration, {own.layout.words()}, is not kept: {inputs.own_split}.")
    return tuple(dict.fromkeys((*found, *inputs.job.notes, *inputs.predictor.notes(priced))))


def notes(inputs: SearchInputs, chosen: Chosen) -> tuple[str, ...]:
    """Name doubtful measurements and assumptions."""
    own, found = chosen.own, [*inputs.measurements.notes]
    found += [block.sentence for block in inputs.blocks(chosen.choice.layout)]
    devices = [(host.name, device) for host in inputs.cluster.hosts for device in host.devices]
    name, fullest = min(devices, key=lambda pair: pair[1].memory_free_bytes)
    if fullest.kind == "cuda" and fullest.memory_free_bytes < (1 - DRIVERS_SHARE) * fullest.memory_total_bytes:
        free, total = bytes_text(fullest.memory_free_bytes), bytes_text(fullest.memory_total_bytes)
        found.append(f"Only {free} of {total} are free on {fullest.uuid} of {name}; every rank is planned for that.")
    found += [
        f"{len(host.devices)} slots share the {counted(host.cores, 'core')} of {host.name}: steps may be slower than "
        f"predicted."
        for host in inputs.cluster.hosts
        if host.shares_cores
    ][:1]
    layouts = [chosen.choice.layout] if own.fits else [chosen.choice.layout, own.layout]
    found += next(filter(None, (mask_notes(inputs.job, layout) for layout in layouts)), ())
    found += _host_memory(inputs.job, chosen.choice.layout)
    if inputs.cluster.device_kind == "cuda" and has_expandable_segments(inputs.job):
        # State the allocator's reserve, which was estimated for expandable segments instead of PyTorch's default.
        reserve = measured_overhead(inputs.job, chosen.choice.layout, inputs.measurements).reserve
        found.append(f"The allocator's reserve: {reserve.value:g} x what it allocates, {reserve.source}.")
    found += uncounted(inputs.job)
    shown = chosen.choice
    found += launching_notes(inputs.job, shown.layout, shown.breakdown_s, shown.step_time_s)
    found += _changed_numbers(inputs, chosen)
    return tuple(dict.fromkeys(found))


def _host_memory(job: Job, layout: Layout) -> list[str]:
    """State the host memory for activations that a plan offloads."""
    kept = replace(layout, recompute=replace(layout.recompute, offload_modules=(), offload_share=0.0))
    stages = zip(peak_memory_bytes(job, kept), peak_memory_bytes(job, layout), strict=True)
    most = max(one.activations - other.activations for one, other in stages) if kept != layout else 0
    needs = f"{bytes_text(most)} of host memory for each rank, and the variable NVTE_CPU_OFFLOAD_V1=1"
    return [f"Offloaded activations need up to {needs}."] if most else []


def cut_short(num_seen: int, budget_s: float) -> str:
    """Report that the budget ended the search."""
    return (
        f"The search stopped at its budget of {seconds_text(budget_s)}, after {num_seen} {plural('layout', num_seen)}. "
        f"More time might find a better plan."
    )


def scheduled(choice: Choice, stock: Choice) -> str:
    """Report how much a schedule that Megatron lacks saves over the best plan under Megatron's own schedules."""
    gain = 1 - choice.step_time_s / stock.step_time_s
    return (
        f"{choice.layout.words()} under the schedule {choice.schedule} takes {seconds_text(choice.step_time_s)} a "
        f"step. That is {gain:.1%} less than {stock.layout.words()}, the best plan under Megatron's own schedules. The "
        f"next sentences explain the latter plan."
    )


def _why_own(chosen: Chosen, margin: float) -> list[str]:
    best, own = chosen.best, chosen.own
    kept = f"The user's own configuration stays: {own.layout.words()}, {seconds_text(own.step_time_s)} a step"
    gain = 1 - best.placed.cost_s / own.step_time_s
    if gain < _PRINTS_AS_ZERO:
        return [f"{kept}; no other layout or placement is predicted to be faster."]
    other = f"{best.layout.words()}{' with another placement' if best.layout == own.layout else ''}"
    least = chosen.least_gain_s / own.step_time_s
    short_of = f"the margin of {margin:.1%}"
    if least > margin + _ROUNDING:
        short_of = f"the {least:.1%} by which the two predictions may be off ({MEASURE_BOTH})"
    return [f"{kept}; the best other, {other}, would save {gain:.1%}, less than {short_of}."]


def _why_other(inputs: SearchInputs, chosen: Chosen) -> list[str]:
    choice, own = chosen.choice, chosen.own
    takes = f"{seconds_text(choice.step_time_s)} a step."
    if inputs.own_cannot_run:
        found = [f"{choice.layout.words()} takes {takes}"]
    elif not own.fits:
        need = _need_text(own.memory)
        found = [
            f"The user's own layout {own.layout.words()} {need}.",
            *_easing(inputs, own),
            f"{choice.layout.words()} fits, and takes {takes}",
        ]
    else:
        found = _saving(choice, own)
    best = chosen.best
    found += _passed_over(chosen)
    saved = 1 - best.placed.cost_s / best.host_order_s
    if not (choice.is_host_order or best.layout == own.layout or saved < _PRINTS_AS_ZERO):
        before = seconds_text(best.host_order_s)
        found.append(f"Placing its ranks by the links saves {saved:.1%}; in torchrun's order it would take {before}.")
    return found


def _easing(inputs: SearchInputs, own: Choice) -> Iterator[str]:
    """Yield the need of a tight layout with expandable segments, if they lower it."""
    eased = with_expandable_segments(inputs.job)
    if eased is None or own.verdict != "tight":
        return
    overhead = measured_overhead(eased, own.layout, inputs.measurements)
    need_bytes = max(map(overhead.device_peak_bytes, own.memory.model_bytes))
    if need_bytes < max(own.memory.need_bytes):
        yield f"With {EXPANDABLE_SEGMENTS} it needs about {bytes_text(need_bytes)}."


def _need_text(memory: MemoryNeed) -> str:
    worst = max(memory.need_bytes)
    need = f"is predicted to need {bytes_text(worst)} on stage {memory.need_bytes.index(worst)}"
    if memory.verdict == "tight":
        least = f"at least {bytes_text(max(memory.least_bytes))}"
        return f"{need} ({least}, without the allocator's cache), and a plan may use {bytes_text(memory.limit_bytes)}"
    return f"{need}, but only {bytes_text(memory.limit_bytes)} is available"


def _passed_over(chosen: Chosen) -> list[str]:
    other = chosen.passed_over
    if other is None:
        return []
    gain = 1 - other.placed.cost_s / chosen.choice.step_time_s
    faster = f"{other.layout.words()} is predicted {gain:.2%} faster"
    if other.layout == chosen.choice.layout:
        return [
            f"A placement by the links is predicted {gain:.2%} faster. That is too little to leave torchrun's order."
        ]
    return [f"{faster}; steps within {EQUAL:.1%} count as equal, and the simpler layout wins."]


def _saving(choice: Choice, own: Choice) -> list[str]:
    """Report the saved share of the step, and the part of the step that shrinks most."""
    gain = 1 - choice.step_time_s / own.step_time_s
    same = choice.layout == own.layout
    theirs = "in torchrun's order" if same else f"{own.layout.words()}, the user's own,"
    ours = f"{choice.layout.words()}{', placed by the links,' if same else ''}"
    times = seconds_text(choice.step_time_s), seconds_text(own.step_time_s)
    found = [f"{ours} takes {times[0]} a step, {gain:.1%} less than {theirs} with {times[1]}."]
    parts = sorted(set(own.breakdown_s) | set(choice.breakdown_s))
    saved_s = {part: own.breakdown_s.get(part, 0.0) - choice.breakdown_s.get(part, 0.0) for part in parts}
    part = max(parts, key=lambda name: saved_s[name], default="")
    if part and saved_s[part] > 0:
        now, before = (seconds_text(which.breakdown_s.get(part, 0.0)) for which in (choice, own))
        found.append(f"It saves most on {PART_NAMES.get(part, part.replace('_', ' '))}: {now} instead of {before}.")
    return found


def _runner_up(chosen: Chosen) -> list[str]:
    if chosen.keeps_own or not chosen.alternatives:
        return []
    second = chosen.alternatives[0]
    behind = second.step_time_s / chosen.choice.step_time_s - 1
    runner_up = f"The runner-up, {second.layout.words()},"
    if behind < -_PRINTS_AS_ZERO:
        is_known = chosen.passed_over and chosen.passed_over.layout == second.layout
        less = f"{-behind:.1%} faster, less than both predictions may be off ({MEASURE_BOTH})"
        return [] if is_known else [f"{runner_up} is predicted {less}."]
    if behind < _PRINTS_AS_ZERO:
        return [f"{runner_up} is predicted to be equally fast."]
    return [f"{runner_up} takes {seconds_text(second.step_time_s)}, {behind:.1%} more."]


def _doubt(inputs: SearchInputs, chosen: Chosen) -> list[str]:
    """Compare the plan's leads with the usual error of a predicted lead, on machines that were not measured."""
    own, errors = chosen.own, published(inputs.job)
    rivals = {"your own configuration": own} if own.fits and not inputs.own_cannot_run else {}
    rivals |= {"the runner-up": chosen.alternatives[0]} if chosen.alternatives else {}
    # A runner-up may be predicted faster by less than the margin.
    rivals = {name: rival for name, rival in rivals.items() if rival.step_time_s > chosen.choice.step_time_s}
    if not inputs.cluster.imagined or chosen.keeps_own or not rivals:
        return []
    leads = {name: 1 - chosen.choice.step_time_s / rival.step_time_s for name, rival in rivals.items()}
    words = [
        f"the lead over {name}, {lead:.1%}, is {'larger' if lead > errors.lead_error else 'smaller'}"
        for name, lead in leads.items()
    ]
    pairs = f"{errors.pairs} pairs of layouts of {errors.pairs_of}"
    known = f"Leads of published layouts were predicted {errors.lead_error:.1%} off in the mean ({pairs})"
    return [f"{known}: {', and '.join(words)}."]


def _bound(chosen: Chosen) -> str:
    choice = chosen.choice
    gap = choice.step_time_s / choice.bound_s - 1 if choice.bound_s > 0 else 0.0
    if gap <= _ROUNDING:
        return "No placement of this layout can be faster, because its step equals the lower bound."
    return f"No placement can be faster than {seconds_text(choice.bound_s)}, a gap of {gap:.1%}."


def _floor(inputs: SearchInputs, chosen: Chosen, floor_s: float) -> str:
    # Offloading is tried only near the best layout.
    plain = " without offloading" if plannable_offload(inputs.job) and inputs.measurements.host_bytes_per_s else ""
    gap = chosen.choice.step_time_s / floor_s - 1 if floor_s > 0 else float("inf")
    if gap <= _ROUNDING:
        return f"No legal layout that fits{plain} is predicted to be faster in any placement."
    if gap == float("inf"):
        return "How much faster another layout could be is not known."
    least = seconds_text(floor_s)
    return f"No legal layout that fits{plain} takes less than {least} in any placement: a gap of {gap:.1%}."


def _changed_numbers(inputs: SearchInputs, chosen: Chosen) -> list[str]:
    """Name the effects of another layout on the numbers of a fresh run (Megatron's seeds and padding)."""
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
        # If TP divides the rows, `megatron.write_arguments` keeps the user's own padding.
        found.append(f"tp{new.tp} pads the vocabulary to {model.padded_vocab_size(new.tp)} rows instead of {rows}.")
    if model.num_experts and new.micro_batch_size != old.micro_batch_size:
        found.append("The router's auxiliary loss and capacity act on each micro-batch, whose size changes.")
    return found


def nothing_left(inputs: SearchInputs, *, dropped: Mapping[str, int], is_late: IsLate) -> PlanError:
    """Return the error if no legal layout fits and can be priced; the search for remedies ends at `is_late`."""
    if dropped.get(OVER_MEMORY):
        return _nothing_fits(inputs, is_late)
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
    job, cluster = inputs.job, inputs.cluster
    pins = f" with {', '.join(job.pinned)} fixed" if job.pinned else ""
    broken = f"; the user's own {job.own.words()} breaks: {inputs.own_fault}" if inputs.own_fault else ""
    if job.own_refusal:
        broken = f"; the user's own configuration is refused: {job.own_refusal}"
    ways = [*_released(inputs, must_fit=False, is_late=is_late)]
    # Propose fewer hosts: the largest number of hosts that has a legal layout.
    for hosts in range(len(cluster.hosts) - 1, 0, -1):
        ranks = hosts * cluster.devices_per_host
        if len(_legal(job, inputs, ranks)):
            ways.append(f"use {counted(hosts, 'host')} ({counted(ranks, 'rank')})")
            break
    return PlanError(f"no layout is legal for {counted(cluster.num_slots, 'rank')}{pins}{broken}. {_help(ways)}")


def _nothing_fits(inputs: SearchInputs, is_late: IsLate) -> PlanError:
    cluster, memory_margin = inputs.cluster, inputs.memory_margin
    found = _legal(inputs.job, inputs, cluster.num_slots)
    lean = found.tables.leanest(found.columns)
    fullest_N = inputs.predictor.fullest_N(lean)
    legal = [] if inputs.own_fault else [inputs.job.own]
    if len(lean):
        legal.append(lean.layout(int(np.argmin(fullest_N - limits_N(inputs.job, lean, inputs.limit_bytes)))))
    peaks = {layout: inputs.predictor.peaks(layout) for layout in legal}
    leanest = min(legal, key=lambda layout: max(peaks[layout]) - inputs.limit_bytes(layout))
    need, shown = max(peaks[leanest]), inputs.memory_need(leanest, peaks[leanest])
    ways = []
    bare = without_mask(inputs.job)
    if bare is not None:
        changed = SearchInputs.of(bare, inputs.measurements, memory_margin=memory_margin)
        count = _num_fitting(changed, _legal(bare, changed, cluster.num_slots))
        if count:
            ways.append(f"pass {NO_MASK} ({count} {plural('layout', count)})")
    eased = with_expandable_segments(inputs.job)
    count = _num_fitting(replace(inputs, job=eased), found) if eased else 0
    if count:
        ways.append(f"set {EXPANDABLE_SEGMENTS} ({count} {plural('layout', count)})")
    ways += _released(inputs, must_fit=True, is_late=is_late)
    # Propose the smallest multiple of the hosts on which a layout fits.
    for times in range(2, MOST_HOSTS_MORE + 1):
        ranks = times * cluster.num_slots
        if is_late():
            break
        if _num_fitting(inputs, _legal(inputs.job, inputs, ranks)):
            ways.append(f"use {times * len(cluster.hosts)} hosts ({ranks} ranks)")
            break
    if memory_margin > 0 and need <= replace(inputs, memory_margin=0.0).limit_bytes(leanest):
        ways.append(f"leave less memory free than {memory_margin:.0%}")
    overhead = measured_overhead(inputs.job, leanest, inputs.measurements)
    more_bytes = bisect_left(
        range(1 << 50),
        need,
        key=lambda more: overhead.limit_bytes(cluster.memory_bytes + more, memory_margin=memory_margin),
    )
    ways.append(f"use devices with {bytes_text(more_bytes)} more memory each")
    late = ". The budget ended before all ways to help were tried" if is_late() else ""
    return PlanError(
        f"no layout fits in memory: the leanest of {found.num_layouts}, {leanest.words()}, "
        f"{_need_text(shown)} (free on the fullest device "
        f"{bytes_text(cluster.memory_bytes)}, margin {memory_margin:.0%}). {_help(ways)}{late}"
    )


def _help(ways: list[str]) -> str:
    if not ways:
        return "No single released flag and no smaller number of hosts would help"
    return f"What would help: {', or '.join(ways)}"


def _released(inputs: SearchInputs, *, must_fit: bool, is_late: IsLate) -> Iterator[str]:
    job = inputs.job
    for pin in job.pinned:
        if is_late():
            return
        freed = replace(job, pinned=tuple(name for name in job.pinned if name != pin))
        others = _legal(freed, inputs, inputs.cluster.num_slots)
        count = _num_fitting(inputs, others) if must_fit else others.num_layouts
        if count:
            yield f"let {pin} change ({count} {plural('layout', count)})"


def _num_fitting(inputs: SearchInputs, found: BaseLayouts) -> int:
    lean = found.tables.leanest(found.columns)
    return int((inputs.predictor.fullest_N(lean) <= limits_N(inputs.job, lean, inputs.limit_bytes)).sum())


def _legal(job: Job, inputs: SearchInputs, world_size: int) -> BaseLayouts:
    domains = inputs.domains.first(world_size // inputs.cluster.devices_per_host)
    return base_layouts(job, world_size=world_size, device_kind=inputs.cluster.device_kind, domains=domains)
