"""Plan of a job before its training, from measurements of the job's hosts, corrected by outcomes of earlier jobs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from pipette_launch.cost.compute.carried_over import with_extrapolated_times
from pipette_launch.cost.learned import corrections_from
from pipette_launch.facts import Choice, Job, Measurements, Plan
from pipette_launch.facts.outcome import Outcome
from pipette_launch.facts.plan import in_order_of
from pipette_launch.planning.plan import best_plan
from pipette_launch.search.candidates import SearchInputs
from pipette_launch.search.choose import choice_of
from pipette_launch.search.fallback_plans import FallbackNeeds, placed_anew, with_cases_of, with_fallback_plans
from pipette_launch.search.solve import SolveOptions

PLACING_S = 0.5
"""Longest search for a placement after the loss of a host. Every GPU waits during this search."""


def make_plan(
    job: Job,
    measurements: Measurements,
    outcomes: Sequence[Outcome],
    *,
    options: SolveOptions,
    key: str,
    needs: FallbackNeeds | None = None,
) -> Plan:
    """Search for a plan and its fallback plans. PlanError if no layout is legal, fits in memory and has a price.

    `needs` holds the conditions of the fallback plans for fewer hosts. None makes no fallback plans.
    """
    corrections = corrections_from(outcomes)
    priced = with_extrapolated_times(job, measurements)
    clock = time.monotonic
    plan = best_plan(job, priced, options=options, clock=clock, key=key, source="measured", corrections=corrections)
    if needs is None:
        return plan
    return with_fallback_plans(plan, measurements, needs, options=options, clock=clock, corrections=corrections)


def placed_for(
    plan: Plan, job: Job, measurements: Measurements, outcomes: Sequence[Outcome], *, options: SolveOptions
) -> Plan:
    """Place the ranks of a plan again on the remaining hosts, and predict the step time on these hosts.

    The user's own configuration stays in torchrun's order.
    """
    plan = in_order_of(plan, [host.name for host in measurements.cluster.hosts])
    if plan.keeps_own:
        return plan
    ends_s = time.monotonic() + PLACING_S
    inputs = _inputs(job, with_cases_of(job, measurements), outcomes, options)
    chosen = placed_anew(inputs, plan.chosen, seed=options.seed, is_late=lambda: time.monotonic() >= ends_s)
    return replace(plan, chosen=chosen)


def priced_anew(
    plan: Plan, job: Job, measurements: Measurements, outcomes: Sequence[Outcome], *, options: SolveOptions
) -> Plan:
    """Predict the step times of a plan's candidates again, without moving ranks."""
    inputs = _inputs(job, measurements, outcomes, options)

    def priced(one: Choice) -> Choice:
        if not inputs.predictor.can_price(one.layout):
            return one
        bound, peaks, layout = (one.bound_s, one.bound_reason), one.peak_memory_bytes, one.layout
        return choice_of(inputs, layout, one.placement, priced=layout, peaks=peaks, bound=bound, schedule=one.order)

    return replace(plan, chosen=priced(plan.chosen), alternatives=tuple(map(priced, plan.alternatives)))


def _inputs(job: Job, measurements: Measurements, outcomes: Sequence[Outcome], options: SolveOptions) -> SearchInputs:
    return SearchInputs.of(
        job,
        with_extrapolated_times(job, measurements),
        memory_margin=options.memory_margin,
        corrections=corrections_from(outcomes),
    )
