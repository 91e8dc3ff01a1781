"""The choice among priced layouts: winner, the user's own configuration, alternatives, ranked list and front."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from operator import attrgetter

from pipette_launch.cost.compute.device_model import case_of
from pipette_launch.cost.layers.block import compute_dtype
from pipette_launch.errors import LayoutError
from pipette_launch.facts import Choice, Layout
from pipette_launch.facts.files import digest
from pipette_launch.facts.layout import NO_RECOMPUTE
from pipette_launch.facts.measurements import LAYERS, ComputeCase
from pipette_launch.facts.plan import Ranked, Rate
from pipette_launch.facts.schedule import ScheduleFile
from pipette_launch.search.candidates import Candidate, SearchInputs, doublings_apart
from pipette_launch.search.frontier import ALL_DEGREES
from pipette_launch.search.slots import Placed, Placement, Slots, host_order

EQUAL = 0.005
"""Relative difference below which steps count as equally fast. Predictions err by several times this difference."""
DOUBTFUL_GAIN = 0.06
"""Least share of the user's own step that a plan must save if its prediction may be off.

The value comes from 36 predicted ratios of another layout's step to the user's own step, on four CPU hosts over gloo
with six networks and three models. These ratios were 6 % too small in the mean, with a median error of 5 %. On GPUs
only predictions without measurements have been compared: the lead of one published layout over another is 4.5 % off in
the mean for dense models, and 13 % with experts.
"""
NEAREST = 32
"""Number of fastest candidates that are compared in detail; each comparison needs a whole prediction."""
LEANER = 0.8
"""An alternative is leaner if its memory need is at most this share of the least need of earlier alternatives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """The decision between plans, and the numbers that led to the decision."""

    choice: Choice
    alternatives: tuple[Choice, ...]
    own: Choice
    own_basis: Layout | None
    """Layout whose step time stands for the user's own layout, if the user's own layout could not be priced."""
    best: Candidate
    """The chosen candidate, or the fastest candidate if the user's own configuration is kept."""
    keeps_own: bool
    least_gain_s: float
    """Seconds that `best` had to save, compared with the user's own step."""
    passed_over: Candidate | None = None
    """Fastest candidate that saves enough, if a simpler candidate was chosen instead."""


def choose(inputs: SearchInputs, candidates: Sequence[Candidate], *, margin: float, num_alternatives: int) -> Chosen:
    """Choose the fastest candidate that beats the user's own configuration.

    If the user's own configuration does not fit, choose the fastest candidate.

    `least_gain` gives the needed gain. Among equally fast layouts, the simplest wins: fewest kinds of parallelism, then
    nearest to the user's own layout. Among equally fast placements, torchrun's order wins. `margin` is the share of the
    user's own step that another plan must save. With margin 0, every gain is enough.
    """
    own, basis = _own_choice(inputs, candidates)
    ranking = sorted(candidates, key=lambda one: (one.placed.cost_s, doublings_apart(one.layout, own.layout)))
    own_runs = own.fits and not inputs.own_cannot_run
    times = inputs.measurements.compute
    measured = frozenset(one.case for one in times if one.part in LAYERS and one.source == "measured")

    def needed_s(layout: Layout) -> float:
        return least_gain(layout, basis or own.layout, measured, margin) * own.step_time_s if own_runs else 0.0

    def saves_enough(one: Candidate) -> bool:
        return not own_runs or own.step_time_s - one.placed.cost_s >= needed_s(one.layout)

    before_own = takewhile(lambda one: not (own_runs and _is_own(one, own)), ranking)
    fastest = next(filter(saves_enough, before_own), None)
    winner = _simplest(inputs, saves_enough, fastest, ranking, own) if fastest and margin else fastest
    passed_over = fastest if winner and fastest is not winner else None
    best = winner or ranking[0]
    rest = [one for one in ranking if not (winner and one.layout == winner.layout) and not _is_own(one, own)]
    if own_runs and winner:
        # A job tries the user's own configuration last, so slower alternatives would never run.
        rest = [one for one in rest if one.placed.cost_s < own.step_time_s]
    return Chosen(
        choice=_to_choice(inputs, winner) if winner else own,
        alternatives=tuple(_to_choice(inputs, one) for one in _diverse(rest, best, num_alternatives)),
        own=own,
        own_basis=basis,
        best=best,
        keeps_own=winner is None,
        least_gain_s=needed_s(best.layout),
        passed_over=passed_over,
    )


def least_gain(layout: Layout, own: Layout, measured: frozenset[ComputeCase], margin: float) -> float:
    """Return the share of the user's own step that a plan must save: the margin, or DOUBTFUL_GAIN if this is more.

    A prediction is doubtful if its degrees differ from the user's own, or if the layer times of one of both layouts
    were not `measured`. If no layer times were measured at all, both predictions have the same error, and the margin
    is enough. With margin 0, the share is 0.
    """
    degrees = {(one.tp, one.pp, one.cp, one.ep, one.vpp) for one in (layout, own)}
    is_certain = len(degrees) == 1 and {case_of(layout), case_of(own)} <= measured
    return max(margin, DOUBTFUL_GAIN) if margin and measured and not is_certain else margin


def _simplest(
    inputs: SearchInputs,
    saves_enough: Callable[[Candidate], bool],
    fastest: Candidate,
    ranking: Sequence[Candidate],
    own: Choice,
) -> Candidate:
    """Return the simplest of the equally fast candidates, in torchrun's rank order if this order is equally fast."""
    limit_s = (1 + EQUAL) * fastest.placed.cost_s
    near = islice(takewhile(lambda one: one.placed.cost_s <= limit_s, ranking), NEAREST)
    order = host_order(inputs.cluster.num_slots)
    equal = [one for one in near if saves_enough(one) and not _is_own(one, own)]
    in_order = (_in_order(inputs, one, order) for one in (fastest, *equal))
    plain = [one for one in in_order if one and one.placed.cost_s <= limit_s and saves_enough(one)]

    def complexity(one: Candidate) -> tuple[float, ...]:
        moved = one.placed.placement != order
        return num_axes(one.layout), doublings_apart(one.layout, own.layout), moved, one.placed.cost_s

    return min((fastest, *equal, *(one for one in plain if not _is_own(one, own))), key=complexity)


def _in_order(inputs: SearchInputs, one: Candidate, order: Placement) -> Candidate | None:
    """Return the candidate with torchrun's rank order; None if already used, not allowed, or clearly slower."""
    if one.placed.placement == order or one.host_order_s > (1 + EQUAL) * one.placed.cost_s:
        return None
    if not Slots.of(inputs.cluster, inputs.blocks(one.layout)).allows(order):
        return None
    return replace(one, placed=Placed(placement=order, cost_s=one.host_order_s))


def num_axes(layout: Layout) -> int:
    """Count the kinds of parallelism and options that a layout uses beyond plain data parallelism."""
    degrees = (layout.tp, layout.pp, layout.cp, layout.ep, layout.vpp)
    others = (layout.layers_per_chunk, layout.microbatch_group_size, layout.use_tp_pp_dp_mapping)
    return sum(degree > 1 for degree in degrees) + sum(map(bool, others)) + (layout.recompute != NO_RECOMPUTE)


def _own_choice(inputs: SearchInputs, candidates: Sequence[Candidate]) -> tuple[Choice, Layout | None]:
    """Describe the user's own configuration; use the nearest candidate's step time if this step cannot be predicted."""
    own, basis = inputs.job.own, None
    placement = host_order(inputs.cluster.num_slots)
    if inputs.own_fault is not None or not inputs.predictor.can_price(own):
        basis = min(candidates, key=lambda one: (doublings_apart(one.layout, own), one.host_order_s)).layout
    priced = basis or own
    known = {one.layout: one.bound_s for one in candidates}
    bound_s = known[priced] if priced in known else inputs.bound_s(priced)
    try:
        peaks = inputs.predictor.peaks(own)
    except LayoutError:
        # Megatron refuses the user's own layout. The plan gives the reason from `SearchInputs.own_fault`.
        peaks = inputs.predictor.peaks(priced)
    return choice_of(inputs, own, placement, peaks=peaks, bound_s=bound_s, priced=basis), basis


def _to_choice(inputs: SearchInputs, one: Candidate) -> Choice:
    return choice_of(inputs, one.layout, one.placed.placement, peaks=one.peak_bytes, bound_s=one.bound_s)


def choice_of(
    inputs: SearchInputs,
    layout: Layout,
    placement: Placement,
    *,
    peaks: tuple[int, ...],
    bound_s: float,
    priced: Layout | None = None,
    schedule: ScheduleFile | None = None,
) -> Choice:
    """Return a layout as a choice of a plan, with the predicted step time of the layout itself, or of `priced`.

    If `priced` is given, or the schedule is not Megatron's own, later jobs learn nothing from this choice.
    """
    step = inputs.predictor.step_time(priced or layout, placement, schedule.schedule() if schedule else None)
    choice = Choice(
        layout=layout,
        placement=placement,
        schedule=schedule.name if schedule else layout.schedule_name,
        order=schedule,
        step_time_s=step.total_s,
        breakdown_s=dict(step.breakdown_s),
        memory=inputs.memory_need(layout, peaks),
        bound_s=bound_s,
        rate=Rate.of(inputs.job, layout, step.total_s, inputs.cluster, dtype=compute_dtype(inputs.job)),
    )
    if priced is not None or schedule is not None:
        return choice
    return replace(
        choice,
        step_correction=inputs.predictor.step_factor,
        memory=replace(choice.memory, correction=inputs.predictor.memory_correction(layout)),
        configuration_digest=digest(inputs.job.model, inputs.job.batch, layout),
    )


def _is_own(candidate: Candidate, own: Choice) -> bool:
    return candidate.layout == own.layout and candidate.placed.placement == own.placement


def _diverse(rest: list[Candidate], best: Candidate, count: int) -> list[Candidate]:
    """Return the fastest other candidate, then the fastest candidates with clearly less memory, then the rest.

    After an out-of-memory error, a job needs an alternative with less memory rather than the next fastest one.
    """
    chosen: list[Candidate] = []
    least = max(best.peak_bytes)
    for candidate in rest:
        need = max(candidate.peak_bytes)
        if not chosen or need <= LEANER * least:
            chosen.append(candidate)
            least = min(least, need)
    chosen = chosen[:count]
    chosen += [candidate for candidate in rest if candidate not in chosen][: count - len(chosen)]
    return sorted(chosen, key=lambda one: one.placed.cost_s)


DEGREES = attrgetter(*ALL_DEGREES)
SPAN = 2.0
"""Layouts are listed up to this multiple of the chosen step."""


def ranking(
    inputs: SearchInputs, candidates: Sequence[Candidate], chosen: Choice, count: int
) -> tuple[tuple[Ranked, ...], tuple[Ranked, ...]]:
    """Return the fastest priced layout of each of `count` sets of degrees, the chosen layout first, and the front."""
    if not count:
        return (), ()
    near = [one for one in candidates if one.placed.cost_s <= SPAN * chosen.step_time_s]
    best = {DEGREES(chosen.layout): Ranked.of(chosen)}
    for one in sorted(near, key=lambda one: one.placed.cost_s):
        if len(best) < count and DEGREES(one.layout) not in best:
            best[DEGREES(one.layout)] = _ranked(inputs, one)
    known = {one.layout: one for one in best.values()}
    return tuple(best.values()), tuple(known.get(one.layout) or _ranked(inputs, one) for one in _front(near))


def _front(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the candidates that no other candidate beats in both step time and memory, by rising memory."""
    front: list[Candidate] = []
    for one in sorted(candidates, key=lambda one: (max(one.peak_bytes), one.placed.cost_s)):
        if not front or one.placed.cost_s < front[-1].placed.cost_s:
            front.append(one)
    return front


def _ranked(inputs: SearchInputs, one: Candidate) -> Ranked:
    step = inputs.predictor.step_time(one.layout, one.placed.placement)
    return Ranked(
        layout=one.layout,
        step_time_s=one.placed.cost_s,
        need_bytes=max(inputs.memory_need(one.layout, one.peak_bytes).need_bytes),
        rate=Rate.of(inputs.job, one.layout, one.placed.cost_s, inputs.cluster, dtype=compute_dtype(inputs.job)),
        breakdown_s=dict(step.breakdown_s),
    )
