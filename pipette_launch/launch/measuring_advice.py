"""The adviser: a short search in the launcher that tells a warm-up what to measure.

The first worker of a warm-up asks after measuring links and before measuring collectives. The adviser searches plans
for a few seconds with the measurements so far. The answer lists the groups and stages of the shortlisted plans, which
the warm-up then measures.
"""

# Letters of array axes: N = pairs of ranks, G = groups, K = members of a group, W = ranks.

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost.communication.exchanges import collective_dimensions
from pipette_launch.cost.compute.carried_over import with_extrapolated_times
from pipette_launch.cost.compute.stages import ComputeTable
from pipette_launch.cost.memory.peak import peak_memory_bytes
from pipette_launch.errors import PlanError
from pipette_launch.facts import Choice, Job, Layout, Plan, files
from pipette_launch.facts.co_location import Domains
from pipette_launch.facts.messages import Advice, Dimension, MeasuringQuestion, StageCase
from pipette_launch.planning.plan import best_plan
from pipette_launch.search.solve import SolveOptions
from pipette_launch.text import plural

Ints = NDArray[np.int64]
logger = logging.getLogger(__name__)
MOST_DIMENSIONS = 8
MOST_STAGES = 8


def answer(question: Path, answer: Path, *, margin: float, memory_margin: float, seed: int) -> None:
    """Answer a question file of a warm-up; an answer without advice has the reason."""
    try:
        asked = files.read(question, MeasuringQuestion)
        options = SolveOptions(budget_s=asked.budget_s, margin=margin, memory_margin=memory_margin, seed=seed)
        found = advise(asked, options, time.monotonic)
    except Exception as error:
        # The warm-up goes on with standard groups.
        logger.debug("no advice", exc_info=True)
        found = Advice(words=f"there is no advice: {type(error).__name__}: {' '.join(str(error).split())}")
    # The folder is gone if the warm-up has ended meanwhile.
    if answer.parent.exists():
        files.write(answer, found)


def advise(question: MeasuringQuestion, options: SolveOptions, clock: Callable[[], float]) -> Advice:
    """Search plans for a short time; return the groups and stages of the best plans, or an error's reason."""
    job = question.job
    try:
        measured = with_extrapolated_times(job, question.measurements)
        plan = best_plan(job, measured, options=options, clock=clock, key="", source="measured")
    except PlanError as error:
        return Advice(words=f"the measurements so far give no plan: {error}")
    shortlist = shortlisted(plan)
    first, domains = shortlist[0].layout.words(), Domains.of(measured.cluster)
    return Advice(
        dimensions=dimensions(job, shortlist, domains),
        stages=stage_cases(job, shortlist, ComputeTable(job, measured)),
        words=f"{len(shortlist)} {plural('plan', len(shortlist))} shortlisted in {plan.solve_s:.1f} s, first {first}",
    )


def shortlisted(plan: Plan) -> tuple[Choice, ...]:
    """Return the chosen plan, the user's own configuration and the runners-up, in this order and each once."""
    found = {(choice.layout, choice.placement): choice for choice in (*plan.alternatives[::-1], plan.own, plan.chosen)}
    return tuple(found.values())[::-1]


def dimensions(job: Job, shortlist: Sequence[Choice], domains: Domains) -> tuple[Dimension, ...]:
    """Return the groups of slots of each parallel dimension without duplicates, first the first plan's groups."""
    found: dict[tuple[tuple[int, ...], ...], Dimension] = {}
    for choice in shortlist:
        slot_W = np.argsort(np.array(choice.placement, dtype=np.int64))
        for group in collective_dimensions(job, choice.layout, domains.smallest):
            groups = tuple(sorted(tuple(row) for row in np.sort(slot_W[group.ranks_GK], axis=1).tolist()))
            made = Dimension(name=group.name, kinds=tuple(group.kinds), groups=groups, most_bytes=group.most_bytes)
            known = found.setdefault(groups, made)
            kinds = tuple(dict.fromkeys((*known.kinds, *made.kinds)))
            found[groups] = replace(known, kinds=kinds, most_bytes=max(known.most_bytes, made.most_bytes))
    return tuple(found.values())[:MOST_DIMENSIONS]


def stage_cases(job: Job, shortlist: Sequence[Choice], table: ComputeTable) -> tuple[StageCase, ...]:
    """Return the pipeline ranks to run, the most valuable first.

    The fullest rank decides if a plan fits, and the slowest rank decides the time of a step. Both come first for the
    best plan and for the next plan, the user's own. Then come each plan's fullest, slowest, middle and other ranks.
    """
    ranked = []
    for choice in shortlist:
        layout, peaks = choice.layout, choice.memory.model_bytes
        seconds = [one.forward_s + one.backward_s + one.recompute_s for one in table.chunk_passes(layout)]
        fullest = sorted(range(layout.pp), key=lambda rank, peaks=peaks: -peaks[rank])  # type: ignore[misc]
        slowest = max(range(layout.pp), key=lambda rank, each=seconds, pp=layout.pp: sum(each[rank::pp]))  # type: ignore[misc]
        ranks = dict.fromkeys((fullest[0], slowest, layout.pp // 2, *fullest))
        states = [parts.weights + parts.gradients + parts.optimizer for parts in peak_memory_bytes(job, layout)]
        ranked.append(
            [
                StageCase(layout=layout, pp_rank=rank, predicted_bytes=peaks[rank], state_bytes=states[rank])
                for rank in ranks
            ]
        )
    first = chain.from_iterable(cases[:2] for cases in ranked[:2])
    found: dict[tuple[Layout, int], StageCase] = {}
    for case in (*first, *filter(None, chain.from_iterable(zip_longest(*ranked)))):
        found.setdefault((case.layout, case.pp_rank), case)
    return tuple(found.values())[:MOST_STAGES]
