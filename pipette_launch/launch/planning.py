"""From measurements to a plan, with what earlier jobs taught."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone

from pipette_launch.cost.compute.carried_over import with_extrapolated_times
from pipette_launch.cost.learned import corrections_from
from pipette_launch.defaults import SEARCH_BUDGET_S
from pipette_launch.facts import Choice, Job, Measurements, Plan, Provenance
from pipette_launch.facts.outcome import Outcome
from pipette_launch.facts.plan import in_order_of
from pipette_launch.launch.options import Options
from pipette_launch.search.candidates import SearchInputs
from pipette_launch.search.choose import choice_of
from pipette_launch.search.fallback_plans import TemplateNeeds, placed_anew, with_cases_of, with_templates
from pipette_launch.search.solve import SolveOptions, solve

PLACING_S = 0.5
"""The most that ranks are placed anew after the loss of a host: every GPU waits."""


def make_plan(
    job: Job,
    measurements: Measurements,
    outcomes: Sequence[Outcome],
    *,
    options: Options,
    key: str,
    needs: TemplateNeeds | None = None,
) -> Plan:
    """Search for a plan, and for its templates.

    Args:
        job: the model, the batch, the user's own layout and its pins.
        measurements: the allocation and what was measured on it.
        outcomes: of earlier jobs on such machines.
        options: budget, margins, seed.
        key: of the cache; stored in the plan.
        needs: what the plans for fewer hosts have to heed; None makes none.

    Raises:
        PlanError: no layout is legal, fits or can be priced.

    """
    corrections = corrections_from(outcomes)
    solve_options = _solve_options(options, min(options.budget_s, SEARCH_BUDGET_S))
    plan = solve(
        job,
        with_extrapolated_times(job, measurements),
        options=solve_options,
        clock=time.monotonic,
        provenance=_measured_now(measurements, key),
        corrections=corrections,
    )
    if needs is None:
        return plan
    return with_templates(
        plan, measurements, needs, options=solve_options, clock=time.monotonic, corrections=corrections
    )


def placed_for(
    plan: Plan, job: Job, measurements: Measurements, outcomes: Sequence[Outcome], *, options: Options
) -> Plan:
    """Place the ranks of a plan anew for the hosts that it got, and predict its step on them.

    The user's own configuration stays in torchrun's order.

    Args:
        plan: with these hosts in it.
        job: for these hosts.
        measurements: of these hosts.
        outcomes: of earlier jobs on such machines.
        options: margins, seed.

    """
    plan = in_order_of(plan, [host.name for host in measurements.cluster.hosts])
    if plan.keeps_own:
        return plan
    ends_s = time.monotonic() + PLACING_S
    inputs = SearchInputs.of(
        job,
        with_extrapolated_times(job, with_cases_of(job, measurements)),
        memory_margin=options.memory_margin,
        corrections=corrections_from(outcomes),
    )
    chosen = placed_anew(inputs, plan.chosen, seed=options.seed, is_late=lambda: time.monotonic() >= ends_s)
    return replace(plan, chosen=chosen)


def priced_anew(
    plan: Plan, job: Job, measurements: Measurements, outcomes: Sequence[Outcome], *, options: Options
) -> Plan:
    """Predict the steps of a plan's candidates anew where their ranks are now; for the arguments see `placed_for`."""
    inputs = SearchInputs.of(
        job,
        with_extrapolated_times(job, measurements),
        memory_margin=options.memory_margin,
        corrections=corrections_from(outcomes),
    )

    def priced(one: Choice) -> Choice:
        if not inputs.predictor.can_price(one.layout):
            return one
        bound = (one.bound_s, one.bound_reason)
        peaks = one.peak_memory_bytes
        return choice_of(
            inputs, one.layout, one.placement, priced=one.layout, peaks=peaks, bound=bound, schedule=one.order
        )

    return replace(plan, chosen=priced(plan.chosen), alternatives=tuple(map(priced, plan.alternatives)))


def _solve_options(options: Options, budget_s: float) -> SolveOptions:
    usual = SolveOptions(
        margin=options.margin,
        memory_margin=options.memory_margin,
        budget_s=budget_s,
        seed=options.seed,
        schedules=options.schedules if options.runs_python else (),
    )
    # Trials may want more of them than a fallback does.
    return replace(usual, num_alternatives=max(usual.num_alternatives, options.trials))


def _measured_now(measurements: Measurements, key: str) -> Provenance:
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Provenance(key=key, made_at=now, versions=measurements.versions, source="measured")
