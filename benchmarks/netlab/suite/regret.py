"""Run every layout in every order of hosts: the rank of the launcher's choice, and its cost."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from benchmarks.netlab.compare import launched
from benchmarks.netlab.lab import Lab
from benchmarks.netlab.suite import space
from benchmarks.netlab.suite.cases import MODELS, TOPOLOGIES, training
from benchmarks.netlab.suite.contenders import Case, Contender, first_plan, ours
from benchmarks.netlab.suite.direct import trained
from benchmarks.netlab.suite.parts import PartResult, Say, Setting
from benchmarks.netlab.system import LabError
from benchmarks.netlab.topology import Topology
from benchmarks.rivals.pick import Placement, torchrun_order
from benchmarks.stolen import processor_time
from pipette_launch.facts import Choice, Layout
from pipette_launch.facts.co_location import Domains
from pipette_launch.search.layouts import base_layouts

MODEL = "communication-heavy"
ITERATIONS = 8
SKIP = 3
"""Iterations at the start of each training that do not count."""
PROMISING = 10
"""The quickest predictions run first, because it would be easy to come near the best of random runs."""
FINALISTS = 4
FINALS = 3
"""The quickest, the launcher's choice and torchrun's default run so often again, in turns, and name the best, and so
often once more, and only that counts: the least of many looks is luck, and it must not be held against the choice."""
FIXED = ("recompute", "use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather", "layers_per_chunk")
"""Settings that launcher and space keep from the user, so that the space is small enough to run."""
BUDGET_S = 40.0
SEED = 7
HEADS = (
    "",
    (
        "| network | run | of | failed | choice ms | best ms | regret | rank | torchrun's default ms | its rank "
        "| slowest ms | stolen |"
    ),
    "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
)
"""Columns of the table whose rows `row` writes."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """One network with the time that its runs may take."""

    topology: str
    slots: int
    limit_s: float
    finalists: int = FINALISTS
    finals: int = FINALS

    @property
    def name(self) -> str:
        """As the table has it."""
        return f"{self.topology}, 4 x {self.slots}"

    def made(self) -> Topology:
        """Give every host this number of slots, which share the host's cores."""
        made = TOPOLOGIES[self.topology]()
        hosts = tuple(replace(host, slots=self.slots) for host in made.hosts)
        cores = None if made.cores_per_slot is None else made.cores_per_slot / self.slots
        return replace(made, hosts=hosts, cores_per_slot=cores)


FIELDS = (
    Field(topology="islands", slots=2, limit_s=120.0),
    *(
        Field(topology=name, slots=1, limit_s=80.0)
        for name in ("islands", "random", "asymmetric", "slow-node", "already-best")
    ),
)
QUICK = (Field(topology="islands", slots=1, limit_s=10.0, finalists=2, finals=1),)


@dataclass
class Tried:
    """A layout in an order of hosts, and how long its steps took."""

    run: Contender
    step_s: list[float] = field(default_factory=list)
    final_s: list[float] = field(default_factory=list)
    """Steps of the rounds that count; empty where it was not in them."""
    failure: str = ""

    @property
    def measured_s(self) -> float:
        """The median of the steps that count."""
        return statistics.median(self.final_s or self.step_s)


@dataclass(frozen=True, kw_only=True)
class Found:
    """Result on one network."""

    name: str
    of: int
    """Number of possible runs."""
    tried: tuple[Tried, ...]
    """Completed runs, quickest first."""
    failed: tuple[Tried, ...]
    choice: Tried
    default: Tried
    stolen: float
    """Processor time that other machines took meanwhile."""

    @property
    def best(self) -> Tried:
        """The quickest of those that are in the rounds that count, by all looks before these."""
        finalists = [one for one in self.tried if one.final_s]
        return min(finalists or self.tried, key=lambda one: statistics.median(one.step_s))

    @property
    def regret(self) -> float:
        """By how much the launcher's choice is slower than the best; below 0 where that was named by luck."""
        return self.choice.measured_s / self.best.measured_s - 1

    @property
    def rank(self) -> int:
        """Rank of the choice, from 1."""
        return 1 + sum(one.measured_s < self.choice.measured_s for one in self.tried)


def run(setting: Setting, say: Say) -> PartResult:
    """Measure every network."""
    asked = QUICK if setting.quick else FIELDS
    tried = {one.name: _found_or_none(one, setting, say) for one in asked}
    found = [one for one in tried.values() if one is not None]
    lost = [name for name, one in tried.items() if one is None]
    if not found:
        raise LabError("regret: no network could be measured")
    regrets = [one.regret for one in found]
    gains = [one.default.measured_s / one.choice.measured_s for one in found]
    return PartResult(
        name="regret",
        lines=(
            *_head(asked[0]),
            *HEADS,
            *map(row, found),
            "",
            *chosen_and_best(found),
            *(f"- {name}: could not be measured." for name in lost),
        ),
        raw={"fields": [raw(one) for one in found]},
        headline=(
            f"regret {statistics.median(regrets):.1%} in the median, {max(regrets):.1%} at worst, of {len(found)} "
            f"networks (aims: 3 %, 8 %); torchrun's default takes {min(gains):.2f} to {max(gains):.2f} times our step"
        ),
    )


def _found_or_none(one: Field, setting: Setting, say: Say) -> Found | None:
    """Lose one network and not the minutes that the others take."""
    try:
        return _found(one, setting, say)
    except LabError as error:
        say(f"regret: {one.name} failed: {error}")
        return None


def _found(one: Field, setting: Setting, say: Say) -> Found:
    with Lab(one.made()) as lab, setting.python(lab) as python:
        lab.check()
        say(f"regret: {one.name}, warm-up")
        case, choice = planned(lab, python, setting.budget_s(BUDGET_S))
        num_hosts, slots = len(lab.hosts), one.slots
        meter = Meter(case, slots, lambda words, placement: trained(lab, words, placement, python=python).step_s)
        found = base_layouts(
            case.job, world_size=num_hosts * slots, domains=Domains(devices_per_host=slots), device_kind="cpu"
        )
        runs = promising_first(
            space.runs([*map(found.columns.layout, range(len(found)))], num_hosts, slots, random.Random(SEED)), case
        )
        before = processor_time()
        chosen = meter.tried(choice.layout, choice.placement)
        default = meter.tried(case.job.own, torchrun_order(num_hosts * slots))
        began_s = time.monotonic()
        for number, (layout, placement) in enumerate(runs, start=1):
            if time.monotonic() - began_s > one.limit_s:
                break
            meter.tried(layout, placement)
            if number % 20 == 0:
                say(f"regret: {one.name}, {number} of {len(runs)} runs")
        meter.finals((chosen, default), finalists=one.finalists, rounds=one.finals)
        say(f"regret: {one.name}, {len(meter.done())} of {len(runs)} were run")
        return Found(
            name=one.name,
            of=len(runs),
            tried=tuple(sorted(meter.done(), key=lambda each: each.measured_s)),
            failed=tuple(each for each in meter.all() if not each.step_s),
            choice=chosen,
            default=default,
            stolen=processor_time().stolen_since(before),
        )


def planned(lab: Lab, python: str, budget_s: float) -> tuple[Case, Choice]:
    """Let pipette-launch measure and choose, without a cache of before.

    Raises:
        LabError: it failed, or left no plan.

    """
    cache = Path(lab.folder) / "plans"
    start = launched(cache, budget_s, f"--pipette-fix={','.join(FIXED)}")
    slots = sum(host.slots for host in lab.topology.hosts)
    once = training(MODEL, iterations=1, num_slots=slots)
    plan, measurements = first_plan(lab, start, once, cache=cache, python=python)
    words = training(MODEL, iterations=ITERATIONS, num_slots=slots)
    return Case.of(words, measurements, fix=FIXED), ours(plan)


def promising_first(runs: Sequence[space.Run], case: Makes) -> list[space.Run]:
    """Put the most promising runs before the others, which stay by chance; what cannot be priced promises nothing."""
    predicted = [case.contender("", *run).predicted_s for run in runs]
    priced = sorted((seconds, number) for number, seconds in enumerate(predicted) if seconds is not None)
    first = [number for _, number in priced[:PROMISING]]
    return [runs[number] for number in (*first, *sorted(set(range(len(runs))) - set(first)))]


class Makes(Protocol):
    """Makes contenders, as `Case` does."""

    def contender(self, name: str, layout: Layout, placement: Placement) -> Contender:
        """Make a layout in an order of hosts runnable."""


class Meter:
    """Runs layouts in orders of hosts, each of a symmetric set once.

    Args:
        case: makes a layout and an order of hosts runnable.
        devices_per_host: slots of a host.
        train: takes the script's words and the RANK of each slot, gives the seconds of each iteration.
        skip: iterations at the start of each training that do not count.

    """

    def __init__(
        self,
        case: Makes,
        devices_per_host: int,
        train: Callable[[Sequence[str], Sequence[int]], Sequence[float]],
        *,
        skip: int = SKIP,
    ) -> None:
        self._case = case
        self._devices = devices_per_host
        self._train = train
        self._skip = skip
        self._tried: dict[space.Run, Tried] = {}

    def tried(self, layout: Layout, placement: Sequence[int]) -> Tried:
        """Run it, unless it or its like has been."""
        order = tuple(placement)
        key = (layout, space.canonical(layout, order, self._devices))
        if key not in self._tried:
            self._tried[key] = Tried(self._case.contender("", layout, order))
            self.again(self._tried[key])
        return self._tried[key]

    def again(self, one: Tried, *, final: bool = False) -> None:
        """Run it once more."""
        try:
            found_s = self._train(one.run.words, one.run.placement)[self._skip :]
            (one.final_s if final else one.step_s).extend(found_s)
        except LabError as error:
            one.failure = str(error)

    def finals(self, always: Sequence[Tried], *, finalists: int, rounds: int) -> None:
        """Run the quickest and some others in turns: rounds that name the best, then as many that count."""
        quickest = sorted(self.done(), key=lambda each: each.measured_s)[:finalists]
        chosen = {id(each): each for each in (*quickest, *always)}.values()
        for counts in (False, True):
            for _ in range(rounds):
                for each in chosen:
                    self.again(each, final=counts)

    def done(self) -> list[Tried]:
        """All that ran."""
        return [one for one in self.all() if one.step_s]

    def all(self) -> list[Tried]:
        """Return all requested runs."""
        return list(self._tried.values())


def _head(one: Field) -> Iterator[str]:
    yield (
        f"{' '.join(MODELS[MODEL])}; launcher and space leave {', '.join(FIXED)} as the user has them. Every legal "
        "layout in every order of hosts that is not the same by symmetry (rings may turn, slots of a host are alike): "
        f"the {PROMISING} of the best predictions, then by chance as many as the time allows; {ITERATIONS} iterations, "
        f"{SKIP} not counted; then the quickest {one.finalists}, the choice and the default {one.finals} times more in "
        f"turns, which names the best, and {one.finals} times once more, and of these only that counts. "
        "Stolen = processor time that other virtual machines took."
    )


def row(one: Found) -> str:
    """Write the table's row of a network."""
    best, worst = one.best.measured_s, one.tried[-1].measured_s
    default_rank = 1 + sum(each.measured_s < one.default.measured_s for each in one.tried)
    times = f"{one.choice.measured_s * 1e3:.0f} | {best * 1e3:.0f} | {one.regret:.1%} | {one.rank}"
    default = f"{one.default.measured_s * 1e3:.0f} | {default_rank} | {worst * 1e3:.0f}"
    return f"| {one.name} | {len(one.tried)} | {one.of} | {len(one.failed)} | {times} | {default} | {one.stolen:.0%} |"


def chosen_and_best(found: Sequence[Found]) -> Iterator[str]:
    """Write a line for each network: the choice, the quickest, and torchrun's run."""
    for one in found:
        yield (
            f"- {one.name}: chosen {_words(one.choice)}; quickest {_words(one.best)}; default {_words(one.default)}."
        )


def _words(one: Tried) -> str:
    run = one.run
    predicted = "not priced" if run.predicted_s is None else f"{run.predicted_s * 1e3:.0f} predicted"
    return f"{run.layout.words()} on {','.join(map(str, run.placement))} ({one.measured_s * 1e3:.0f} ms, {predicted})"


def raw(one: Found) -> Mapping[str, Any]:
    """Every figure of a network, for JSON."""
    return {
        "name": one.name,
        "of": one.of,
        "regret": one.regret,
        "rank": one.rank,
        "choice": _entry(one.choice),
        "default": _entry(one.default),
        "tried": [_entry(each) for each in one.tried],
        "failed": [{**_place(each), "failure": each.failure} for each in one.failed],
        "stolen": one.stolen,
    }


def _place(one: Tried) -> Mapping[str, Any]:
    return {"layout": one.run.layout.words(), "placement": list(one.run.placement)}


def _entry(one: Tried) -> Mapping[str, Any]:
    figures = {"predicted_s": one.run.predicted_s, "measured_s": one.measured_s}
    return {**_place(one), **figures, "step_s": one.step_s, "final_s": one.final_s}
