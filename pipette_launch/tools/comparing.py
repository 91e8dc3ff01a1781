"""Plans side by side: those of files as they are, those of planners priced by the same models."""

from __future__ import annotations

import difflib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipette_launch.baselines.pick import Pick, PlannerOptions
from pipette_launch.baselines.planners import RANKINGS
from pipette_launch.cost.memory.peak import peak_memory_bytes
from pipette_launch.cost.step.predictor import NOT_MODELLED, Predictor
from pipette_launch.errors import PipetteError, PlanError, UsageError
from pipette_launch.facts import Choice, Layout, Plan, files
from pipette_launch.facts.results.comparison import Comparison, Entry
from pipette_launch.facts.results.rate import Rate
from pipette_launch.search.candidates import measured_overhead, memory_limit_bytes
from pipette_launch.search.layouts.rules import Rules
from pipette_launch.tools.question import Question
from pipette_launch.units import bytes_text, seconds_text

OURS = "ours"
YOURS = "yours"
NAMES = (OURS, *RANKINGS, YOURS)
MOST_TRIED = 200
"""Of a planner whose first choice cannot run, so many further ones are looked at for one that can."""


def of_files(paths: Sequence[Path]) -> Comparison:
    """Set plan files side by side; raises FileFormatError for one that is none, UsageError for fewer than two."""
    if len(paths) < 2:
        raise UsageError(
            f"what is {paths[0] if paths else 'it'} compared with? Name two plan files or more, or planners with "
            f"--planners"
        )
    plans = [files.read(path, Plan) for path in paths]
    entries = [
        Entry(
            name=name,
            choice=plan.chosen,
            gap=plan.gap,
            num_moved=num_moved(plans[0], plan),
            faults=tuple(_memory_fault(plan.chosen)),
            remarks=("It is the user's own configuration.",) if plan.keeps_own else (),
        )
        for name, plan in zip(_short(paths), plans, strict=True)
    ]
    return Comparison(entries=tuple(entries), notes=tuple(_unlike(plans)))


def _short(paths: Sequence[Path]) -> list[str]:
    """The names of the files, with their folders where two are alike."""
    names = [path.name.removesuffix(".json").removesuffix(".plan") for path in paths]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def num_moved(one: Plan, other: Plan) -> int | None:
    """Count the ranks that sit on another device; None where hosts or devices are others."""
    if sorted(one.hosts) != sorted(other.hosts) or one.devices_per_host != other.devices_per_host:
        return None
    size = one.devices_per_host
    moved = 0
    for index, name in enumerate(one.hosts):
        there = other.hosts.index(name)
        mine = one.chosen.placement[index * size : (index + 1) * size]
        others = other.chosen.placement[there * size : (there + 1) * size]
        moved += sum(a != b for a, b in zip(mine, others, strict=True))
    return moved


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
    question: Question, names: Sequence[str], plan: Plan | PlanError, options: PlannerOptions
) -> Comparison:
    """Ask each planner, and price its choice by our predictor and our memory model.

    Args:
        question: job and machines, the same for all.
        names: of `NAMES`; the first is what the others are measured by.
        plan: our own, or why there is none.
        options: what the rivals may use.

    """
    judge = Judge(question, options.memory_margin)
    lead: Choice | None = None
    entries: list[Entry] = []
    for name in names:
        entry = _ours(plan, name) if name == OURS else _rival(judge, name, options)
        lead = lead if entries else entry.choice
        entries.append(_moved(entry, lead))
    assumed = (*question.job.notes, *question.measurements.notes)
    notes = (*assumed, *(f"Not modelled: {sentence[0].lower()}{sentence[1:]}" for sentence in NOT_MODELLED))
    return Comparison(entries=tuple(entries), notes=tuple(dict.fromkeys(notes)))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What our models say of a configuration."""

    choice: Choice | None
    faults: tuple[str, ...]


class Judge:
    """Prices any configuration of a job on its machines, and says what keeps it from running."""

    def __init__(self, question: Question, memory_margin: float) -> None:
        self.job = question.job
        self.measured = question.measurements
        self._margin = memory_margin
        self._predictor = Predictor(self.job, self.measured)
        self._rules = Rules.of(self.job, device_kind=question.machines.kind)

    def verdict(self, layout: Layout, placement: Sequence[int]) -> Verdict:
        """Price a configuration where it can be priced, and list what is wrong with it."""
        fault = self._rules.fault(layout)
        refused = (f"Megatron refuses {layout.words()}: {fault}.",) if fault else ()
        try:
            choice = self._choice(layout, placement)
        except PipetteError as error:
            return Verdict(None, refused or (f"{layout.words()} cannot be priced: {error}.",))
        return Verdict(choice, (*refused, *_memory_fault(choice)))

    def can_run(self, layout: Layout) -> bool:
        """Whether Megatron takes it and it fits; cheaper than a verdict."""
        if self._rules.fault(layout):
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
    """Judge a planner's choice; where it cannot run, tell the first of its further choices that can."""
    if name == YOURS:
        own = judge.verdict(judge.job.own, range(judge.job.own.world_size))
        return _entry(name, own.choice, faults=own.faults, remarks=("In torchrun's order.",))
    started_s = time.monotonic()
    try:
        ranking = RANKINGS[name](judge.job, judge.measured, options)
    except PipetteError as error:
        return _entry(name, None, faults=(f"{error}.",))
    took_s = time.monotonic() - started_s
    found = judge.verdict(ranking[0].layout, ranking[0].placement)
    remarks = [f"{ranking[0].note.rstrip('.')}; {seconds_text(took_s)}."]
    if found.faults:
        remarks.append(_further(judge, ranking))
    return _entry(name, found.choice, faults=found.faults, remarks=tuple(remarks))


def _further(judge: Judge, ranking: Sequence[Pick]) -> str:
    for number, pick in enumerate(ranking[1 : 1 + MOST_TRIED], 2):
        if judge.can_run(pick.layout):
            choice = judge.verdict(pick.layout, pick.placement).choice
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
    """Count the ranks that sit elsewhere than under the first entry; all are on the same machines."""
    if entry.choice is None or lead is None:
        return entry
    return replace(entry, num_moved=sum(a != b for a, b in zip(entry.choice.placement, lead.placement, strict=True)))


def _memory_fault(choice: Choice) -> Iterator[str]:
    if not choice.fits:
        shown = choice.memory_shown
        peak = max(shown.need_bytes)
        stage = shown.need_bytes.index(peak)
        limit = bytes_text(shown.limit_bytes)
        yield f"{choice.layout.words()} does not fit: stage {stage} needs {bytes_text(peak)} of {limit}."


def _unlike(plans: Sequence[Plan]) -> Iterator[str]:
    """Say where plans are for other jobs or machines than the first, so that their steps mean something else."""
    first = plans[0]
    for number, plan in enumerate(plans[1:], 2):
        if first.setting is None or plan.setting is None:
            yield f"{number}: whether it is for the same job as 1 cannot be told; a file does not say what it is for."
            continue
        for what, name in (
            ("parameters", "num_parameters"),
            ("sequences a step", "global_batch_size"),
            ("tokens a sequence", "seq_length"),
            ("devices", "device_name"),
            ("network", "network"),
        ):
            mine, others = getattr(plan.setting, name), getattr(first.setting, name)
            if mine != others:
                yield f"{number}: other {what} than 1: {mine or 'measured'}, not {others or 'measured'}."
        if len(plan.hosts) != len(first.hosts):
            yield f"{number}: {len(plan.hosts)} hosts, not {len(first.hosts)}."
