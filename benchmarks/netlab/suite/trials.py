"""What trials before the training cost, and whether the pick is never slower than the user's own configuration."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.netlab.compare import TORCHRUN, in_turns, launched, train
from benchmarks.netlab.lab import Lab
from benchmarks.netlab.suite.cases import TOPOLOGIES, training
from benchmarks.netlab.suite.contenders import new_plan
from benchmarks.netlab.suite.parts import PartResult, Say, Setting
from benchmarks.netlab.system import LabError
from pipette_launch.facts import Plan, files
from pipette_launch.facts.trials import Trial, Trials
from pipette_launch.units import seconds_text

NETWORKS = ("islands", "already-best")
"""One on which the order of hosts matters, and one on which torchrun's own is the best."""
MODEL = "communication-heavy"
NUM_PLANS = 2
TRIAL_ITERS = 5
ITERATIONS = 10
SKIP = 3
"""Of each training's iterations, so many at the start do not count."""
PAIRS = 3
BUDGET_S = 30.0
FLAGS = (f"--pipette-trials={NUM_PLANS}", f"--pipette-trial-iters={TRIAL_ITERS}")


@dataclass(frozen=True, kw_only=True)
class Race:
    """One network: what was tried, and the pick beside the user's own configuration under torchrun."""

    network: str
    pick: str
    keeps_own: bool
    trials: Trials
    cold_s: float
    """The whole first job: warm-up, planning, trials, training."""
    pairs: tuple[tuple[float, float], ...]
    """Median steps in seconds, torchrun's and pipette-launch's, in turns."""

    @property
    def ratio(self) -> float:
        """How much faster the pick is, by the median of pairs; below 1 it is slower."""
        return statistics.median(stock_s / ours_s for stock_s, ours_s in self.pairs)

    @property
    def noise(self) -> float:
        """By how much of it torchrun's own step differs between trainings: half of the range."""
        stock_s = [one for one, _ in self.pairs]
        return (max(stock_s) - min(stock_s)) / 2 / statistics.median(stock_s)

    def row(self) -> str:
        """For the table."""
        stock_s, ours_s = (statistics.median(column) for column in zip(*self.pairs, strict=True))
        # One training alone tells nothing of it.
        noise = f"±{self.noise:.1%}" if len(self.pairs) > 1 else "-"
        return (
            f"| {self.network} | {'your own' if self.keeps_own else self.pick} | {seconds_text(stock_s)} | "
            f"{seconds_text(ours_s)} | {self.ratio:.2f} | {noise} | {self.trials.took_s:.0f} | "
            f"{self.cold_s:.0f} |"
        )


def run(setting: Setting, say: Say) -> PartResult:
    """Try plans on each network from a cold cache, then train in turns."""
    networks, pairs = (NETWORKS[:1], 1) if setting.quick else (NETWORKS, PAIRS)
    races = [_race(network, setting, pairs, say) for network in networks]
    return PartResult(
        name="trials",
        lines=tuple(_lines(races)),
        raw={"races": [_raw(race) for race in races]},
        headline=headline(races),
    )


def headline(races: Sequence[Race]) -> str:
    """Speed-ups, and what the trials took."""
    found = ", ".join(f"{race.ratio:.2f} on {race.network}" for race in races)
    took = " and ".join(f"{race.trials.took_s:.0f}" for race in races)
    return f"measured pick over the user's own under torchrun: {found}; trials took {took} s"


def _race(network: str, setting: Setting, pairs: int, say: Say) -> Race:
    with Lab(TOPOLOGIES[network]()) as lab, setting.python(lab) as python:
        lab.check()
        words = training(MODEL, iterations=ITERATIONS)
        cache = lab.folder / "trials"
        stock = [*TORCHRUN, *words]
        ours = [*launched(cache, setting.budget_s(BUDGET_S), *FLAGS), *words]
        say(f"trials: {network}, from a cold cache")
        cold = train(lab, ours, python=python)
        plan = _kept(cache)
        assert plan.trials is not None
        say(f"trials: {network}, {', '.join(_words(one) for one in plan.trials.runs)}")
        found = in_turns(
            lambda: train(lab, stock, python=python).steady_s(SKIP),
            lambda: train(lab, ours, python=python).steady_s(SKIP),
            pairs=pairs,
        )
    return Race(
        network=network,
        pick=plan.chosen.layout.words(),
        keeps_own=plan.keeps_own,
        trials=plan.trials,
        cold_s=cold.wall_s,
        pairs=found,
    )


def _kept(cache: Path) -> Plan:
    """The plan that the first job left, with what was measured."""
    path = new_plan(cache) / "plan.json"
    plan = files.read(path, Plan)
    if plan.trials is None:
        raise LabError(f"{path}: nothing was tried")
    return plan


def _lines(races: Sequence[Race]) -> Iterator[str]:
    yield (
        f"`{' '.join(FLAGS)}` from a cold cache, model {MODEL}; then {ITERATIONS} iterations under torchrun with the "
        f"user's own words and under pipette-launch with the pick, in turns, {SKIP} iterations of each not counted. "
        f"Ratio: torchrun's step over ours, median of {len(races[0].pairs)} pairs; noise: half the range of "
        "torchrun's own steps."
    )
    yield ""
    yield "| network | pick | torchrun | pipette-launch | ratio | noise | trials s | first job s |"
    yield "|---|---|--:|--:|--:|--:|--:|--:|"
    yield from (race.row() for race in races)
    yield ""
    yield "What was measured in the trials:"
    yield ""
    for race in races:
        yield f"- {race.network}: {'; '.join(_words(one) for one in race.trials.runs)}"


def _words(one: Trial) -> str:
    who = "the user's own" if one.is_own else one.layout.words()
    if one.step is None:
        return f"{who} failed ({one.failure})"
    predicted = seconds_text(one.predicted_step_s)
    return f"{who} {seconds_text(one.step.median_s)} (predicted {predicted}, spread {one.step.spread:.0%})"


def _raw(race: Race) -> dict[str, Any]:
    return {**asdict(race), "trials": files.to_plain(race.trials), "ratio": race.ratio, "noise": race.noise}
