"""From measurements to a plan, with the help of whoever is idle: processes of this node, and the other nodes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from pipette_launch.agent.controller import Helper, Invite
from pipette_launch.cost.compute.extrapolated import with_extrapolated_times
from pipette_launch.facts import Job, Measurements, Plan, Provenance, files
from pipette_launch.facts.results.outcome import Outcome
from pipette_launch.launch.options import Options
from pipette_launch.launch.search_pool.crew import SharedCrew
from pipette_launch.launch.search_pool.messages import SearchOrder
from pipette_launch.launch.search_pool.workers import Hands, processes_of
from pipette_launch.search.candidates import Field
from pipette_launch.search.solve import SolveOptions, solve
from pipette_launch.search.tasks import TaskRunner, alone

ORDER = "search-order.json"
SOLVE_S = 10.0
"""The most that planning may take of the user's budget; the search is anytime."""
MOST_HOSTS = 256
"""Of more, telling the links takes longer than help saves: half a second to write and to read at this size."""


class Planned(NamedTuple):
    """A plan, and what to tell the user about how it was made."""

    plan: Plan
    words: tuple[str, ...]


def make_plan(
    job: Job,
    measurements: Measurements,
    outcomes: Sequence[Outcome],
    *,
    options: Options,
    key: str,
    folder: Path,
    invite: Invite,
) -> Planned:
    """Search for a plan.

    Args:
        job: the model, the batch, the user's own layout and its pins.
        measurements: the allocation and what was measured on it.
        outcomes: of earlier jobs on such machines.
        options: budget, margins, seed.
        key: of the cache; stored in the plan.
        folder: a private one, for the order that processes of this node read.
        invite: asks the other nodes for help.

    Raises:
        PlanError: no layout is legal, fits or can be priced.

    """
    measurements = with_extrapolated_times(job, measurements)
    budget_s = min(options.budget_s, SOLVE_S)
    deadline_s = time.monotonic() + budget_s
    order = SearchOrder(
        job=job,
        measurements=measurements,
        outcomes=tuple(outcomes),
        memory_margin=options.memory_margin,
        seed=options.seed,
    )
    crews: list[SharedCrew] = []
    with contextlib.ExitStack() as helpers:

        def call() -> Sequence[Helper]:
            text = files.dumps(order)
            here = hire(text, folder, num_slots=measurements.cluster.devices_per_host, beside=1)
            helpers.callback(here.close)
            return [here, *invite(text)]

        def make_crew(field: Field) -> TaskRunner:
            own = alone(field, seed=options.seed, clock=time.monotonic, deadline_s=deadline_s)
            crews.append(SharedCrew(own, call, clock=time.monotonic, deadline_s=deadline_s))
            return crews[0]

        plan = solve(
            job,
            measurements,
            options=_solve_options(options, budget_s),
            clock=time.monotonic,
            provenance=_measured_now(measurements, key),
            corrections=order.corrections(),
            make_crew=make_crew if len(measurements.cluster.hosts) <= MOST_HOSTS else None,
        )
    words = [text for crew in crews for text in (crew.words, *crew.troubles) if text]
    return Planned(plan, tuple(words))


def _solve_options(options: Options, budget_s: float) -> SolveOptions:
    usual = SolveOptions(
        margin=options.margin, memory_margin=options.memory_margin, budget_s=budget_s, seed=options.seed
    )
    # Trials may want more of them than a fallback does.
    return replace(usual, num_alternatives=max(usual.num_alternatives, options.trials))


def _measured_now(measurements: Measurements, key: str) -> Provenance:
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Provenance(key=key, made_at=now, versions=measurements.versions, source="measured")


def hire(order: str, folder: Path, *, num_slots: int, beside: int = 0) -> Hands:
    """Start the processes that a node lends to a search, as many less as work on it already."""
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / ORDER
    files.write_text(path, order)
    return Hands(path, processes_of(num_slots) - beside)
