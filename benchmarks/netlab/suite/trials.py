"""Cost of trials before the training, and a check that the pick is never slower than the user's own configuration."""

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
from pipette_launch.facts.plan import Trial, Trials
from pipette_launch.text import seconds_text

NETWORKS = ("islands", "already-best")
"""One on which the order of hosts matters, and one on which torchrun's own is the best."""
MODEL = "communication-heavy"
NUM_PLANS = 2
SKIP = 3
"""Number of iterations at the start of each training that do not count."""
BUDGET_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Length:
    """Size of a race."""

    trial_iters: int = 5
    iterations: int = 10
    pairs: int = 3

    @property
    def flags(self) -> tuple[str, ...]:
        """Ask for the trials."""
        return (f"--pipette-trials={NUM_PLANS}", f"--pipette-trial-iters={self.trial_iters}")


FULL, QUICK = Length(), Length(trial_iters=3, pairs=1)


@dataclass(frozen=True, kw_only=True)
class Race:
    """One network: the trials, and the pick beside the user's own configuration under torchrun."""

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
        """Speed of the pick against the user's configuration, median of pairs; below 1 it is slower."""
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
    networks, length = (NETWORKS[:1], QUICK) if setting.quick else (NETWORKS, FULL)
    races = [_race(network, setting, length, say) for network in networks]
    return PartResult(
        name="trials",
        lines=tuple(_lines(races, length)),
        raw={"races": [_raw(race) for race in races]},
        headline=headline(races),
    )


def headline(races: Sequence[Race]) -> str:
    """Write the speed-ups and the cost of the trials."""
    found = ", ".join(f"{race.ratio:.2f} on {race.network}" for race in races)
    took = " and ".join(f"{race.trials.took_s:.0f}" for race in races)
    return f"measured pick over the user's own under torchrun: {found}; trials took {took} s"


def _race(network: str, setting: Setting, length: Length, say: Say) -> Race:
    with Lab(TOPOLOGIES[network]()) as lab, setting.python(lab) as python:
        lab.check()
        words = training(MODEL, iterations=length.iterations)
        cache = lab.folder / "trials"
        stock = [*TORCHRUN, *words]
        ours = [*launched(cache, setting.budget_s(BUDGET_S), *length.flags), *words]
        say(f"trials: {network}, from a cold cache")
        cold = train(lab, ours, python=python)
        plan = _kept(cache)
        assert plan.trials is not None
        say(f"trials: {network}, {', '.join(_words(one) for one in plan.trials.runs)}")
        found = in_turns(
            lambda: train(lab, stock, python=python).steady_s(SKIP),
            lambda: train(lab, ours, python=python).steady_s(SKIP),
            pairs=length.pairs,
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
    """Read the plan of the first job, with its measurements."""
    path = new_plan(cache) / "plan.json"
    plan = files.read(path, Plan)
    if plan.trials is None:
        raise LabError(f"{path}: nothing was tried")
    return plan


def _lines(races: Sequence[Race], length: Length) -> Iterator[str]:
    yield (
        f"`{' '.join(length.flags)}` from a cold cache, model {MODEL}; then {length.iterations} iterations under "
        "torchrun with the user's own words and under pipette-launch with the pick, in turns, "
        f"{SKIP} iterations of each not counted. Ratio: torchrun's step over ours, median of {length.pairs} pairs; "
        "noise: half the range of torchrun's own steps."
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
