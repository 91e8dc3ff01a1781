"""Asks several planners for one job, and prices the choice of each by our step time and our memory model."""

from __future__ import annotations

import difflib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pipette_launch.baselines.pick import Pick, PlannerOptions
from pipette_launch.baselines.planners import RANKINGS
from pipette_launch.cost.memory.overhead import measured_overhead
from pipette_launch.cost.memory.peak import peak_memory_bytes
from pipette_launch.cost.step.predictor import NOT_MODELLED, Predictor
from pipette_launch.errors import PipetteError, PlanError, UsageError
from pipette_launch.facts import Choice, Layout, Plan
from pipette_launch.facts.results.comparison import Comparison, Entry
from pipette_launch.facts.results.rate import Rate
from pipette_launch.megatron.rules.judge import broken_rule
from pipette_launch.megatron.rules.rules import Rules
from pipette_launch.search.candidates import memory_limit_bytes
from pipette_launch.tools.planning import PlanningProblem
from pipette_launch.units import bytes_text, seconds_text

OURS = "ours"
YOURS = "yours"
NAMES = (OURS, *RANKINGS, YOURS)
MOST_TRIED = 200
"""Where a planner's first choice cannot run, this many of its next choices are checked for one that can."""


def checked_names(text: str) -> tuple[str, ...]:
    """Split and check the names of planners; raises UsageError for an unknown one, with the nearest."""
    names = tuple(dict.fromkeys(name.strip().lower().replace("_", "-") for name in text.split(",") if name.strip()))
    for name in names:
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(NAMES)}"
            raise UsageError(f"--planners {name}: no such planner; {hint}")
    if not names:
        raise UsageError(f"--planners needs names; known are {', '.join(NAMES)}")
    return names


def of_planners(
    problem: PlanningProblem, names: Sequence[str], plan: Plan | PlanError, options: PlannerOptions
) -> Comparison:
    """Ask each planner, and price its choice by our predictor and our memory model.

    Args:
        problem: job and machines, the same for all.
        names: of `NAMES`; the first is what the others are measured by.
        plan: our own, or why there is none.
        options: what the rivals may use.

    """
    judge = Judge(problem, options.memory_margin)
    lead: Choice | None = None
    entries: list[Entry] = []
    for name in names:
        entry = _ours(plan, name) if name == OURS else _rival(judge, name, options)
        lead = lead if entries else entry.choice
        entries.append(_moved(entry, lead))
    assumed = (*problem.job.notes, *problem.measurements.notes)
    notes = (*assumed, *(f"Not modelled: {sentence[0].lower()}{sentence[1:]}" for sentence in NOT_MODELLED))
    return Comparison(entries=tuple(entries), notes=tuple(dict.fromkeys(notes)))


@dataclass(frozen=True, slots=True)
class PricedChoice:
    """What our models say of a configuration."""

    choice: Choice | None
    faults: tuple[str, ...]


class Judge:
    """Prices any configuration of a job on its machines, and says what keeps it from running."""

    def __init__(self, problem: PlanningProblem, memory_margin: float) -> None:
        self.job = problem.job
        self.measured = problem.measurements
        self._margin = memory_margin
        self._predictor = Predictor(self.job, self.measured)
        self._rules = Rules.of(self.job, device_kind=problem.machines.kind)

    def priced(self, layout: Layout, placement: Sequence[int]) -> PricedChoice:
        """Price a configuration where it can be priced, and list what is wrong with it."""
        broken = broken_rule(self._rules, layout)
        refused = (f"{layout.words()} is ruled out: {broken.reason}.",) if broken else ()
        try:
            choice = self._choice(layout, placement)
        except PipetteError as error:
            return PricedChoice(None, refused or (f"{layout.words()} cannot be priced: {error}.",))
        return PricedChoice(choice, (*refused, *memory_fault(choice)))

    def can_run(self, layout: Layout) -> bool:
        """Whether Megatron takes it and it fits; cheaper than `priced`."""
        if broken_rule(self._rules, layout):
            return False
        try:
            return max(parts.total for parts in peak_memory_bytes(self.job, layout)) <= self._limit_bytes(layout)
        except PipetteError:
            return False

    def _choice(self, layout: Layout, placement: Sequence[int]) -> Choice:
        step = self._predictor.step_time(layout, placement)
        peaks = tuple(parts.total for parts in peak_memory_bytes(self.job, layout))
        overhead = measured_overhead(self.job, layout, self.measured)
        free = self.measured.cluster.memory_bytes
        return Choice(
            layout=layout,
            placement=tuple(placement),
            schedule=layout.schedule_name,
            step_time_s=step.total_s,
            breakdown_s=dict(step.breakdown_s),
            peak_memory_bytes=peaks,
            memory_limit_bytes=overhead.limit_bytes(free, memory_margin=self._margin),
            memory=overhead.need(peaks, free, memory_margin=self._margin),
            bound_s=self._predictor.bound_s(layout),
            rate=Rate.of(self.job, layout, step.total_s, self.measured.cluster),
        )

    def _limit_bytes(self, layout: Layout) -> int:
        return memory_limit_bytes(self.job, layout, self.measured, memory_margin=self._margin)


def _ours(plan: Plan | PlanError, name: str) -> Entry:
    if isinstance(plan, PlanError):
        return _entry(name, None, faults=(str(plan),))
    took = f"{plan.num_layouts} layouts in {seconds_text(plan.solve_s)}."
    own = ("It is the user's own configuration.",) if plan.keeps_own else ()
    return _entry(name, plan.chosen, gap=plan.gap, remarks=(took, *own))


def _rival(judge: Judge, name: str, options: PlannerOptions) -> Entry:
    """Price a planner's choice; where that cannot run, add a remark on its next choice that can."""
    if name == YOURS and judge.job.own_refusal:
        return _entry(name, None, faults=(f"{judge.job.own_refusal}.",))
    if name == YOURS:
        own = judge.priced(judge.job.own, range(judge.job.own.world_size))
        return _entry(name, own.choice, faults=own.faults, remarks=("In torchrun's order.",))
    started_s = time.monotonic()
    try:
        ranking = RANKINGS[name](judge.job, judge.measured, options)
    except PipetteError as error:
        return _entry(name, None, faults=(f"{error}.",))
    took_s = time.monotonic() - started_s
    found = judge.priced(ranking[0].layout, ranking[0].placement)
    remarks = [f"{ranking[0].note.rstrip('.')}; {seconds_text(took_s)}."]
    if found.faults:
        remarks.append(_further(judge, ranking))
    return _entry(name, found.choice, faults=found.faults, remarks=tuple(remarks))


def _further(judge: Judge, ranking: Sequence[Pick]) -> str:
    for number, pick in enumerate(ranking[1 : 1 + MOST_TRIED], 2):
        if judge.can_run(pick.layout):
            choice = judge.priced(pick.layout, pick.placement).choice
            takes = f", {seconds_text(choice.step_time_s)} a step" if choice else ""
            return f"Its first choice that can run is number {number}, {pick.layout.words()}{takes}."
    return f"None of its first {min(len(ranking), 1 + MOST_TRIED)} choices can run."


def _entry(
    name: str,
    choice: Choice | None,
    *,
    gap: float | None = None,
    faults: tuple[str, ...] = (),
    remarks: tuple[str, ...] = (),
) -> Entry:
    return Entry(name=name, choice=choice, gap=gap, num_moved=None, faults=faults, remarks=remarks)


def _moved(entry: Entry, lead: Choice | None) -> Entry:
    """Count the ranks that are on another device than under the first entry; all are on the same machines."""
    if entry.choice is None or lead is None:
        return entry
    return replace(entry, num_moved=sum(a != b for a, b in zip(entry.choice.placement, lead.placement, strict=True)))


def memory_fault(choice: Choice) -> Iterator[str]:
    """Say where a choice does not fit; nothing where it does."""
    if not choice.fits:
        shown = choice.memory_shown
        peak = max(shown.need_bytes)
        stage = shown.need_bytes.index(peak)
        limit = bytes_text(shown.limit_bytes)
        yield f"{choice.layout.words()} does not fit: stage {stage} needs {bytes_text(peak)} of {limit}."
