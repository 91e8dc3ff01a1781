"""One job on one cluster: our plan and every rival's pick, priced by the same Predictor and the same memory model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.rivals.pick import Pick, PlannerOptions, device_peak_bytes
from benchmarks.rivals.placers import PLACERS
from benchmarks.rivals.planners import RANKINGS
from pipette_launch.cost.memory.overhead import allowed_bytes
from pipette_launch.cost.step.predictor import Predictor
from pipette_launch.errors import PlanError
from pipette_launch.facts import Job, Layout, Measurements, Plan, Provenance
from pipette_launch.facts.co_location import Domains
from pipette_launch.megatron.rules.broken import Rules
from pipette_launch.megatron.rules.judge import broken_rule
from pipette_launch.search.solve import SolveOptions, solve

MEMORY_MARGIN = 0.08
OWN = "megatron-rules"
"""Rival whose pick, in torchrun's order, is the user's own configuration."""
RIVALS = (
    "amp",
    "amp-pipette",
    "varuna",
    "varuna-1f1b",
    "varuna-any-size",
    "pipette",
    "megatron-rules",
    "topology-sorted",
    "random",
)
"""Torchrun's order of the user's own layout is what `megatron-rules` runs."""
FLAGGED = ("amp", "amp-pipette", "varuna", "varuna-1f1b", "varuna-any-size", "pipette")
"""Rivals that have no notion of the optimizer's flags: for their picks the fastest of them that fit are chosen."""
OPTIMIZER_FLAGS = ((True, True, True), (True, True, False), (True, False, False), (False, True, False), (False,) * 3)
"""Distributed optimizer, overlap of its reductions, overlap of its gathers."""
_FLAGS = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
MAPPERS = ("torchrun-order", "topology-sorted", "random")
PROVENANCE = Provenance(key="", made_at="", versions={}, source="measured")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Conditions of the comparison."""

    seed: int
    budget_s: float
    """For our search."""
    pipette_budget_s: float
    """For each annealing of Pipette's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Outcome of a rival's pick."""

    layout: Layout
    step_s: float
    """Seconds of the first pick by our Predictor, even if it does not fit."""
    claimed_s: float | None
    fits: bool
    device_share: float
    """Predicted peak over the device's memory."""
    fallback: Layout | None
    """The first of its ranking that Megatron takes and that fits; the pick itself where it does."""
    fallback_s: float | None
    rank: int
    """Number of picks ranked before the fallback."""
    search_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Duel:
    """One case."""

    job: Job
    plan: Plan | None
    """None where nothing fits."""
    why_not: str
    outcomes: dict[str, Outcome]
    """Among rivals that find a layout."""
    mapped_s: dict[str, float]
    """Our layout in the orders that look at no measurement."""

    def ratio(self, rival: str) -> float | None:
        """Step of the rival's first pick that fits over ours."""
        outcome = self.outcomes.get(rival)
        if self.plan is None or outcome is None or outcome.fallback_s is None:
            return None
        return outcome.fallback_s / self.plan.chosen.step_time_s


def user_own(job: Job, measurements: Measurements, options: PlannerOptions) -> Layout | None:
    """The user's configuration: the pick of Megatron's rules, or None if nothing fits."""
    try:
        return RANKINGS[OWN](job, measurements, options)[0].layout
    except PlanError:
        return None


def duel(job: Job, measurements: Measurements, options: PlannerOptions, *, budget_s: float) -> Duel:
    """Plan one case by everybody."""
    own = user_own(job, measurements, options)
    job = job if own is None else replace(job, own=own)
    judge = _Judge(job, measurements, options)
    try:
        plan = solve(
            job,
            measurements,
            options=SolveOptions(margin=0.0, memory_margin=MEMORY_MARGIN, budget_s=budget_s, seed=options.seed),
            clock=options.clock,
            provenance=PROVENANCE,
        )
        why_not = ""
    except PlanError as error:
        plan, why_not = None, str(error)
    mapped = {}
    if plan is not None:
        layout = plan.chosen.layout
        mapped = {name: judge.step_s(layout, PLACERS[name](layout, measurements, options)) for name in MAPPERS}
    return Duel(
        job=job,
        plan=plan,
        why_not=why_not,
        outcomes={name: found for name in RIVALS if (found := judge.outcome(name)) is not None},
        mapped_s=mapped,
    )


class _Judge:
    """Prices the picks of one case."""

    def __init__(self, job: Job, measurements: Measurements, options: PlannerOptions) -> None:
        self._job = job
        self._measurements = measurements
        self._options = options
        self._predictor = Predictor(job, measurements)
        self._rules = Rules.of(
            job, device_kind=measurements.cluster.device_kind, rooms=Domains.of(measurements.cluster)
        )

    def step_s(self, layout: Layout, placement: tuple[int, ...]) -> float:
        return self._predictor.placement_cost(layout).cost(placement)

    def outcome(self, name: str) -> Outcome | None:
        """Price a rival's pick and its fallback; None if it finds nothing."""
        began = self._options.clock()
        try:
            ranking = RANKINGS[name](self._job_of(name), self._measurements, self._options)
        except PlanError:
            return None
        search_s = self._options.clock() - began
        pick = ranking[0]
        found = ((rank, self._flagged(name, one)) for rank, one in enumerate(ranking))
        rank, fallback = next(((rank, one) for rank, one in found if one is not None), (len(ranking), None))
        layout, step_s = fallback if rank == 0 and fallback else (pick.layout, self.step_s(pick.layout, pick.placement))
        return Outcome(
            layout=layout,
            step_s=step_s,
            claimed_s=pick.claimed_s,
            fits=rank == 0,
            device_share=device_peak_bytes(self._job, layout, self._measurements) / self._options.capacity_bytes,
            fallback=None if fallback is None else fallback[0],
            fallback_s=None if fallback is None else fallback[1],
            rank=rank,
            search_s=search_s,
        )

    def _job_of(self, name: str) -> Job:
        """Varuna always recomputes, even if the job pins recompute."""
        pins = self._job.pinned
        if not name.startswith("varuna"):
            return self._job
        return replace(self._job, pinned=tuple(pin for pin in pins if pin != "recompute"))

    def _flagged(self, name: str, pick: Pick) -> tuple[Layout, float] | None:
        """Return the pick and its step time, with the best flags where it knows none; None where nothing fits."""
        layouts = [pick.layout]
        if name in FLAGGED:
            layouts += [
                replace(
                    pick.layout,
                    use_distributed_optimizer=shards,
                    overlap_grad_reduce=reduce,
                    overlap_param_gather=gather,
                )
                for shards, reduce, gather in OPTIMIZER_FLAGS
            ]
        limit = allowed_bytes(self._options.capacity_bytes, memory_margin=MEMORY_MARGIN)
        own, pins = self._job.own, self._job.pinned
        fitting = [
            layout
            for layout in dict.fromkeys(layouts)
            if all(getattr(layout, pin) == getattr(own, pin) for pin in _FLAGS if pin in pins)
            and broken_rule(self._rules, layout) is None
            and device_peak_bytes(self._job, layout, self._measurements) <= limit
        ]
        priced = {layout: self.step_s(layout, pick.placement) for layout in fitting}
        return min(priced.items(), key=lambda item: item[1], default=None)
