"""What the suite says of trials, from figures alone."""

from __future__ import annotations

import json

import pytest

from benchmarks.netlab.suite import trials
from benchmarks.netlab.suite.trials import Race, headline
from pipette_launch.facts import Layout, Samples
from pipette_launch.facts.plan import Trial, Trials

OWN = Trial(
    layout=Layout(dp=4),
    placement=(0, 1, 2, 3),
    is_own=True,
    predicted_step_s=1.0,
    step=Samples(values_s=(1.1, 1.2, 1.3)),
    failure="",
    took_s=12.0,
)
FAILED = Trial(
    layout=Layout(pp=4),
    placement=(0, 2, 1, 3),
    is_own=False,
    predicted_step_s=0.5,
    step=None,
    failure="it hung",
    took_s=30.0,
)
RACE = Race(
    network="islands",
    pick="tp1 pp1 dp4 mbs1",
    keeps_own=True,
    trials=Trials(asked=1, iterations=3, runs=(OWN, FAILED)),
    cold_s=99.6,
    pairs=((1.0, 0.5), (1.1, 1.0), (0.9, 1.0)),
)


def test_the_row_is_worked_by_hand() -> None:
    """Medians of 1.0 and 1.0, ratios 2, 1.1 and 0.9, and a tenth of torchrun's step as noise."""
    assert (1.1, 0.1) == (pytest.approx(RACE.ratio), pytest.approx(RACE.noise))
    assert "| islands | your own | 1.00 s | 1.00 s | 1.10 | ±10.0% | 42 | 100 |" == RACE.row()
    assert "1.10 on islands; trials took 42 s" in headline([RACE])


def test_every_trial_is_told() -> None:
    """Of one that failed the reason, and all figures go into JSON."""
    lines = "\n".join(trials._lines([RACE], trials.FULL))

    assert "- islands: the user's own 1.20 s (predicted 1.00 s, spread 8%); tp1 pp4 dp1 mbs1 failed (it hung)" in lines
    assert 42.0 == sum(run["took_s"] for run in json.loads(json.dumps(trials._raw(RACE)))["trials"]["runs"])
