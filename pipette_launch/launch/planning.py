"""From measurements to a plan, with what earlier jobs taught."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone

from pipette_launch.cost.compute.extrapolated import with_extrapolated_times
from pipette_launch.cost.learned.corrected import corrections_from
from pipette_launch.facts import Job, Measurements, Plan, Provenance
from pipette_launch.facts.results.outcome import Outcome
from pipette_launch.launch.options import Options
from pipette_launch.search.solve import SolveOptions, solve

SOLVE_S = 10.0
"""The most that planning may take of the user's budget; the search is anytime."""


def make_plan(job: Job, measurements: Measurements, outcomes: Sequence[Outcome], *, options: Options, key: str) -> Plan:
    """Search for a plan.

    Args:
        job: the model, the batch, the user's own layout and its pins.
        measurements: the allocation and what was measured on it.
        outcomes: of earlier jobs on such machines.
        options: budget, margins, seed.
        key: of the cache; stored in the plan.

    Raises:
        PlanError: no layout is legal, fits or can be priced.

    """
    return solve(
        job,
        with_extrapolated_times(job, measurements),
        options=_solve_options(options, min(options.budget_s, SOLVE_S)),
        clock=time.monotonic,
        provenance=_measured_now(measurements, key),
        corrections=corrections_from(outcomes),
    )


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
