"""The entry of the search: enumerate layouts, drop what does not fit, place the promising, return the best plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from pipette_launch.cost.columns.step_bounds import BoundColumns
from pipette_launch.cost.learned.corrected import NOTHING_LEARNED, Corrections
from pipette_launch.defaults import MARGIN, MEMORY_MARGIN, SEARCH_BUDGET_S, SEED
from pipette_launch.errors import UsageError
from pipette_launch.facts import Job, Measurements, Plan, Provenance
from pipette_launch.search import explanations, no_plan
from pipette_launch.search.candidates import SearchInputs
from pipette_launch.search.choose import choose
from pipette_launch.search.frontier import BEATEN, OUTDONE, UNPROMISING, Frontier
from pipette_launch.search.layouts.enumerate import Cuts, cuts
from pipette_launch.search.placement.slots import IsLate
from pipette_launch.search.schedule_choice import LEANEST, best_scheduled, unsupported
from pipette_launch.search.search_loop import Searched, SearchLoop


@dataclass(frozen=True, kw_only=True, slots=True)
class SolveOptions:
    """How hard to look, and what counts as better."""

    margin: float = MARGIN
    """Another plan than the user's own must be faster by this part of the step."""
    memory_margin: float = MEMORY_MARGIN
    """Part of the device's memory that stays free."""
    budget_s: float = SEARCH_BUDGET_S
    seed: int = SEED
    num_alternatives: int = 3
    schedules: tuple[str, ...] = ()
    """Schedules beside Megatron's own, by name."""

    def __post_init__(self) -> None:
        for name in ("margin", "memory_margin"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}")
        for name in ("budget_s", "num_alternatives"):
            if not getattr(self, name) >= 0:
                raise UsageError(f"{name} must not be negative, got {getattr(self, name)}")


def solve(
    job: Job,
    measurements: Measurements,
    *,
    options: SolveOptions,
    clock: Callable[[], float],
    provenance: Provenance,
    corrections: Corrections = NOTHING_LEARNED,
) -> Plan:
    """Find the fastest legal layout that fits, and its placement; the user's own configuration is the incumbent.

    The arguments and the seed fix what the search does, and the budget only ends it. So equal inputs give equal plans
    where the budget is not the limit, and more budget never finds a slower step; the plan may take one that counts as
    equally fast (`choose.EQUAL`), so its step may be longer by as much.

    Args:
        job: the model, the batch, the user's own layout and its pins.
        measurements: the allocation and what was measured on it.
        options: margins, budget, seed.
        clock: seconds that only grow, such as `time.monotonic`.
        provenance: stored in the plan as it is.
        corrections: learned from earlier outcomes on these machines; the plan's notes name them.

    Raises:
        PlanError: no layout is legal, fits or can be priced; the error names the constraint and what would help.

    """
    started_s = clock()
    deadline_s = started_s + options.budget_s
    cluster = measurements.cluster
    inputs = SearchInputs.of(job, measurements, memory_margin=options.memory_margin, corrections=corrections)
    found = cuts(
        job,
        world_size=cluster.num_slots,
        devices_per_host=cluster.devices_per_host,
        device_kind=cluster.device_kind,
        table=inputs.predictor.compute,
        rooms=inputs.rooms,
    )
    inputs = replace(inputs, own_fault=found.own_fault)

    def is_late() -> bool:
        return clock() >= deadline_s

    frontier = _frontier(inputs, found, options, is_late)
    searched = SearchLoop(inputs, frontier, seed=options.seed, is_late=is_late).run()
    dropped = _dropped(found, frontier, searched)
    plan = _plan(inputs, searched, options, corrections.notes, provenance)
    if options.schedules:
        # As long again as the search: some schedules of long pipelines take ten seconds to make.
        schedules_deadline_s = clock() + options.budget_s
        plan = _scheduled(plan, inputs, searched, frontier, options, lambda: clock() >= schedules_deadline_s)
    return replace(
        plan,
        reasons=(*plan.reasons, *explanations.kept_order(inputs, plan.chosen)),
        num_layouts=found.num_layouts,
        dropped=dropped,
        solve_s=clock() - started_s,
    )


def _dropped(found: Cuts, frontier: Frontier, searched: Searched) -> dict[str, int]:
    """Count the layouts that no longer stand for choice, by reason; the most frequent reason first."""
    dropped = Counter(found.dropped) + frontier.dropped
    if not searched.is_cut_short:
        outdone = len(frontier.outdone.difference(one.layout for one in searched.candidates))
        beaten = found.num_layouts - len(searched.candidates) - searched.num_aside - outdone - frontier.dropped.total()
        dropped += Counter({BEATEN: beaten, UNPROMISING: searched.num_aside, OUTDONE: outdone})
    return dict(dropped.most_common())


def _frontier(inputs: SearchInputs, found: Cuts, options: SolveOptions, is_late: IsLate) -> Frontier:
    """Bound the cuts; raises PlanError where neither a cut nor the user's own layout can be chosen."""
    job, measurements = inputs.job, inputs.measurements
    bounds = BoundColumns.of(job, measurements, inputs.predictor)
    frontier = Frontier(inputs, found, bounds)
    own_dropped = None if found.own_fault else inputs.own_dropped
    if own_dropped:
        frontier.dropped[own_dropped] += 1
    if (found.own_fault or own_dropped) and not frontier.find_any():
        raise no_plan.nothing_left(
            inputs, dropped=frontier.dropped, memory_margin=options.memory_margin, is_late=is_late
        )
    return frontier


def _plan(
    inputs: SearchInputs, searched: Searched, options: SolveOptions, learned: tuple[str, ...], provenance: Provenance
) -> Plan:
    """Choose among the layouts that were priced, with reasons; the caller adds the counts of dropped layouts."""
    chosen = choose(inputs, searched.candidates, margin=options.margin, num_alternatives=options.num_alternatives)
    cut_short = (explanations.cut_short(searched.num_seen, options.budget_s),) if searched.is_cut_short else ()
    return Plan(
        hosts=tuple(host.name for host in inputs.cluster.hosts),
        devices_per_host=inputs.cluster.devices_per_host,
        device_kind=inputs.cluster.device_kind,
        chosen=chosen.choice,
        alternatives=chosen.alternatives,
        own=chosen.own,
        own_fault=inputs.own_cannot_run,
        keeps_own=chosen.keeps_own,
        reasons=(*cut_short, *explanations.reasons(inputs, chosen, floor_s=searched.floor_s, margin=options.margin)),
        notes=(*learned, *explanations.notes(inputs, chosen)),
        num_layouts=0,
        dropped={},
        floor_s=searched.floor_s,
        solve_s=0.0,
        provenance=provenance,
    )


def _scheduled(
    plan: Plan, inputs: SearchInputs, searched: Searched, frontier: Frontier, options: SolveOptions, is_late: IsLate
) -> Plan:
    """Choose a schedule that Megatron lacks, where one saves enough; else say what speaks against all of them."""
    fault = unsupported(inputs.job, inputs.cluster)
    if fault:
        return replace(plan, notes=(*plan.notes, f"Schedules beside Megatron's own are left out: {fault}."))
    over_the_limit = frontier.over_the_limit(live=LEANEST)
    found = best_scheduled(
        inputs, searched.candidates, over_the_limit, plan.chosen, options.schedules, seed=options.seed, is_late=is_late
    )
    if found is None:
        return plan
    return replace(
        plan,
        chosen=found,
        # Tried next, should the patch fail.
        alternatives=(plan.chosen, *plan.alternatives)[: options.num_alternatives],
        keeps_own=False,
        floor_s=min(plan.floor_s, found.step_time_s),
        reasons=(explanations.scheduled(found, plan.chosen), *plan.reasons),
    )
