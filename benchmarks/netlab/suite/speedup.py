"""Step times under pipette-launch against torchrun with what others would pick, network by network, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from benchmarks.netlab.compare import TORCHRUN, Ended, launched, train
from benchmarks.netlab.lab import Lab
from benchmarks.netlab.suite import contenders, standings
from benchmarks.netlab.suite.cases import CORES_PER_SLOT, MODELS, TOPOLOGIES, training
from benchmarks.netlab.suite.contenders import Case, Contender
from benchmarks.netlab.suite.parts import PartResult, Say, Setting
from benchmarks.netlab.suite.standings import Cell, Entrant
from benchmarks.netlab.system import LabError
from pipette_launch import megatron

ROUNDS = 2
ITERATIONS = 14
BUDGET_S = 25.0
"""For the warm-up of each network's first model; later ones find its links again."""
QUICK = (("islands", "communication-heavy"),)
ALL = tuple((network, model) for network in TOPOLOGIES for model in MODELS)

Start = Callable[[], Ended]


def run(setting: Setting, say: Say) -> PartResult:
    """Measure every cell."""
    asked = QUICK if setting.quick else ALL
    rounds = 1 if setting.quick else ROUNDS
    cells = []
    for network, group in groupby(asked, key=lambda cell: cell[0]):
        models = [model for _, model in group]
        cells += list(_on_network(network, models, setting, rounds=rounds, say=say))
    return PartResult(
        name="speedup",
        lines=(*_head(rounds), *standings.lines(cells)),
        raw={"cells": [raw(cell) for cell in cells]},
        headline=standings.headline(cells),
    )


def _head(rounds: int) -> Iterator[str]:
    yield (
        f"Four hosts of one slot with {CORES_PER_SLOT:g} of a core each (`suite/cases.py`). Columns of ratios: their "
        f"step over ours, median of {rounds} rounds (least-most); above 1 pipette-launch is faster. In a round "
        f"everybody trains {ITERATIONS} iterations once, {standings.SKIP} of them not counted; every other round runs "
        "backwards. torchrun = the user's own words, which pipette-launch is given too; rules = Megatron's rules of "
        "thumb. Who picks the same configuration in the same places is run once. pipette-launch starts from its "
        "cached plan."
    )
    yield ""


def _on_network(network: str, models: Sequence[str], setting: Setting, *, rounds: int, say: Say) -> Iterator[Cell]:
    with Lab(TOPOLOGIES[network]()) as lab, setting.python(lab) as python:
        lab.check()
        for model in models:
            say(f"speedup: {network}, {model}")
            try:
                cell = _Runner(lab, python, setting.budget_s(BUDGET_S), say).cell(network, model, rounds)
            except LabError as error:
                cell = _failed(network, model, str(error))
            say(f"speedup: {standings.headline([cell])}")
            yield cell


def _failed(network: str, model: str, text: str) -> Cell:
    """Result of a cell in which pipette-launch wrote no plan."""
    nothing = Entrant(
        names=("pipette-launch",), layout="no plan", placement=(), predicted_s=None, rounds=(), failure=why(text)
    )
    return Cell(topology=network, model=model, ours=nothing, others=(), refused={})


class _Runner:
    """Trains on one laboratory; all that pipette-launch learns on it is kept in one cache."""

    def __init__(self, lab: Lab, python: str, budget_s: float, say: Say) -> None:
        self._lab = lab
        self._python = python
        self._say = say
        self._cache = lab.folder / "plans"
        self._ours = launched(self._cache, budget_s)

    def cell(self, network: str, model: str, rounds: int) -> Cell:
        """Measure and plan once, then train in turns."""
        words = training(model, iterations=ITERATIONS)
        once = training(model, iterations=1)
        plan, measurements = contenders.first_plan(self._lab, self._ours, once, cache=self._cache, python=self._python)
        case = Case.of(words, measurements)
        others, refused = contenders.rivals(case, time.monotonic)
        choice = contenders.ours(plan)
        own = case.contender("pipette-launch", choice.layout, choice.placement)
        starts: list[tuple[Contender, Start]] = [(one, self._stock(one)) for one in others]
        starts.append((own, self._checked(own, [*self._ours, *words], lambda _host: contenders.EVENTS)))
        done = self._rounds(starts, rounds)
        return Cell(topology=network, model=model, ours=done[-1], others=tuple(done[:-1]), refused=refused)

    def _stock(self, one: Contender) -> Start:
        return self._checked(one, [*TORCHRUN, *one.words], contenders.in_order(self._lab, one.placement))

    def _checked(self, one: Contender, words: Sequence[str], env: Callable[[str], Mapping[str, str]]) -> Start:
        """Train, and check the RANKs of the workers."""

        def start() -> Ended:
            ended = train(self._lab, words, python=self._python, env=env)
            outputs = [self._lab.folder / host / "output" for host in self._lab.hosts]
            found = tuple(contenders.landed(path.read_text(errors="replace")) for path in outputs)
            if found != one.placement:
                raise LabError(f"the hosts had the ranks {found}, asked were {one.placement}")
            return ended

        return start

    def _rounds(self, starts: Sequence[tuple[Contender, Start]], rounds: int) -> list[Entrant]:
        ended: dict[int, list[Ended]] = {number: [] for number in range(len(starts))}
        failures: dict[int, str] = {}
        for turn in range(rounds):
            for number in list(ended)[:: -1 if turn % 2 else 1]:
                one, start = starts[number]
                if number in failures:
                    continue
                try:
                    ended[number].append(start())
                except LabError as error:
                    failures[number] = why(str(error))
                    self._say(f"speedup: {'/'.join(one.names)} failed: {failures[number]}")
        return [
            Entrant(
                names=one.names,
                layout=one.layout.words(),
                placement=one.placement,
                predicted_s=one.predicted_s,
                rounds=() if number in failures else tuple(ended[number]),
                failure=failures.get(number, ""),
            )
            for number, (one, _) in enumerate(starts)
        ]


def why(text: str) -> str:
    """Say in a line why a training failed, from the end of its output."""
    known = megatron.explain_failure(text)
    return known.cause if known else text.splitlines()[0][-200:]


def raw(cell: Cell) -> Mapping[str, Any]:
    """Every figure of a cell, for JSON."""
    return {
        "topology": cell.topology,
        "model": cell.model,
        "noise": cell.noise,
        "ours": _entrant(cell.ours),
        "others": [_entrant(one) for one in cell.others],
        "refused": cell.refused,
        "ratios": {name: list(cell.ratios(name)) for name in standings.COLUMNS},
    }


def _entrant(one: Entrant) -> Mapping[str, Any]:
    return {
        "names": list(one.names),
        "layout": one.layout,
        "placement": list(one.placement),
        "predicted_s": one.predicted_s,
        "measured_s": one.measured_s,
        "step_s": [list(ended.step_s) for ended in one.rounds],
        "losses": [list(ended.losses) for ended in one.rounds],
        "wall_s": [ended.wall_s for ended in one.rounds],
        "failure": one.failure,
    }
