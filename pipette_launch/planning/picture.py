"""Computes what a report shows and the plan file lacks: every pass of a step, and memory of each stage by kind."""

# A = actions of all pipeline ranks, one rank after another, in the order of execution. S = stages (model chunks).

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost.memory.overhead import measured_overhead
from pipette_launch.cost.step.assemble import pipelines, stage_times
from pipette_launch.cost.step.predictor import Predictor
from pipette_launch.cost.step.work import LayoutWork, Prices
from pipette_launch.facts import Choice, Job, Measurements, Plan
from pipette_launch.facts.schedule import KINDS
from pipette_launch.planning.predict import count_stages, scaled

AFTER = ("embedding_gradients", "optimizer", "parameter_gather")
"""Names of a step's parts after the last backward, in the order of execution."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnStep:
    """Passes of the slowest pipeline in one step. The drawn step is as long as the plan's step time."""

    pp: int
    rank_A: tuple[int, ...]
    stage_A: tuple[int, ...]
    kind_A: tuple[str, ...]
    """Kind of each pass: `F` forward, `B` whole backward, `I` input gradient, `W` weight gradient."""
    microbatch_A: tuple[int, ...]
    start_s_A: tuple[float, ...]
    end_s_A: tuple[float, ...]
    exposed_s_S: tuple[tuple[float, float], ...]
    """Time (s) of collectives that compute does not hide, in one forward and in one backward of each stage."""
    after_s: tuple[tuple[str, float], ...]
    """Name and duration (s) of each part of the step after the last backward."""

    @property
    def makespan_s(self) -> float:
        """Time from the step's start to the end of the last backward."""
        return max(self.end_s_A)

    @property
    def total_s(self) -> float:
        """Duration of the whole step."""
        return self.makespan_s + sum(seconds for _, seconds in self.after_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """Drawn steps of the chosen and the user's own configuration, and memory of the chosen configuration."""

    chosen: DrawnStep
    own: DrawnStep | None
    """Step of the user's own configuration. None = the user's own configuration was chosen, or cannot run."""
    memory_bytes: tuple[dict[str, int], ...]
    """Bytes of each kind of memory, for each pipeline rank. They sum to the rank's predicted peak in the plan."""


def picture_of(plan: Plan, job: Job, measurements: Measurements) -> Picture:
    """Compute the drawn steps and the memory by kind of a plan, from the job and the measurements of the plan.

    The measurements must list the hosts in the plan's order. Raises PlanError if the plan is for other machines.
    """
    predictor = Predictor(job, measurements)
    draws_own = not (plan.keeps_own or plan.own_fault)
    return Picture(
        chosen=_drawn(predictor, plan.chosen),
        own=_drawn(predictor, plan.own) if draws_own else None,
        memory_bytes=_memory(job, plan.chosen, measurements),
    )


def steps_elsewhere_s(
    plan: Plan, job: Job, measurements: Measurements, placements: Sequence[Sequence[int]]
) -> tuple[float, ...]:
    """Predict the plan's step (s) with each of some placements and Megatron's own schedule, for another launcher.

    The measurements must list the hosts in the plan's order. Raises PlanError if the layout has no price.
    """
    predictor, chosen = Predictor(job, measurements), plan.chosen
    schedule = chosen.order.schedule() if chosen.order else None
    # The plan's step time includes corrections from earlier jobs.
    factor = chosen.step_time_s / predictor.step_time(chosen.layout, chosen.placement, schedule).total_s
    return tuple(factor * predictor.step_time(chosen.layout, one).total_s for one in placements)


def _drawn(predictor: Predictor, choice: Choice) -> DrawnStep:
    schedule = choice.order.schedule() if choice.order else None
    cost = predictor.placement_cost(choice.layout, schedule)
    step = predictor.step_time(choice.layout, choice.placement, schedule)
    work, prices = cost.work, cost.prices(choice.placement)
    times = stage_times(work, prices)
    timeline = work.engine.timeline(times)
    # Corrections from earlier jobs change the plan's whole step time, and do not change single parts of the model.
    factor = choice.step_time_s / step.total_s
    columns = work.engine.columns
    starts, ends = (
        [second * factor for rank in rows for second in rank] for rows in (timeline.start_s, timeline.end_s)
    )
    after = [(name, step.breakdown_s.get(name, 0.0) * factor) for name in AFTER]
    gradients_s = choice.step_time_s - max(ends) - sum(seconds for _, seconds in after)
    return DrawnStep(
        pp=choice.layout.pp,
        rank_A=tuple(columns.rank_A.tolist()),
        stage_A=tuple(columns.stage_A.tolist()),
        kind_A=tuple(KINDS[kind] for kind in columns.kind_A.tolist()),
        microbatch_A=tuple(columns.microbatch_A.tolist()),
        start_s_A=tuple(starts),
        end_s_A=tuple(ends),
        exposed_s_S=tuple(map(tuple, (factor * _exposed_s_S2(work, prices)).tolist())),
        after_s=(("data_parallel", max(0.0, gradients_s)), *after),
    )


def _exposed_s_S2(work: LayoutWork, prices: Prices) -> NDArray[np.float64]:
    """Return the exposed time of collectives in one forward and one backward of each stage of the slowest pipeline."""
    stages = len(work.rank_S)
    with_D, _ = pipelines(work, prices)
    without_D, _ = pipelines(work, replace(prices, exchange_s_PD=tuple(map(np.zeros_like, prices.exchange_s_PD))))
    slowest = int(with_D[: 2 * stages].sum(axis=0).argmax())
    added: NDArray[np.float64] = (with_D - without_D)[: 2 * stages, slowest].reshape(2, stages).T
    return added


def _memory(job: Job, choice: Choice, measured: Measurements) -> tuple[dict[str, int], ...]:
    """Split the plan's peak memory of each pipeline rank by kind, in the proportions of the memory formula."""
    chosen = replace(job, own=choice.layout)
    overhead = measured_overhead(chosen, choice.layout, measured)
    stages = count_stages(chosen, range(choice.layout.pp), overhead, measured=measured).stages
    needs = choice.memory.need_bytes
    return tuple(scaled(stage.parts_bytes, need) for stage, need in zip(stages, needs, strict=True))
