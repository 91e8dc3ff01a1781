"""Tests of asking an adviser: a process that answers, fails, babbles or hangs."""

import dataclasses
import re
import sys
from pathlib import Path

import pytest
from facts_for_tests import tiny_cluster, tiny_job, tiny_measurements
from probe.workers import REFERENCE

from pipette_launch.facts.messages import Advice, Dimension
from pipette_launch.probe import plan_hints

HEAD = "import sys; from pathlib import Path; question, answer = map(Path, sys.argv[-2:]); "


def ask(folder: Path, program: str) -> Advice:
    """Ask a little Python program."""
    measurements = tiny_measurements(tiny_cluster(1, 2), (REFERENCE,))
    return plan_hints.ask(
        (sys.executable, "-c", HEAD + program), tiny_job(2), measurements, folder=folder, budget_s=1.0
    )


def test_an_answer_is_read(tmp_path: Path) -> None:
    """The adviser finds a question that can be read, and what it writes comes back."""
    program = (
        "from pipette_launch.facts import files; from pipette_launch.facts.messages import Advice; "
        "from pipette_launch.facts.messages import MeasuringQuestion; "
        "asked = files.read(question, MeasuringQuestion); "
        "files.write(answer, Advice(host_pairs=((0, asked.job.own.world_size),), words='fine'))"
    )

    assert Advice(host_pairs=((0, 2),), words="fine") == ask(tmp_path, program)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("sys.exit('no plan fits')", "the first search ended with exit code 1: no plan fits"),
        ("answer.write_text('{')", "no first search was made: .*advice.json: not JSON"),
        ("pass", "no first search was made: .*advice.json"),
    ],
)
def test_a_failure_is_an_empty_advice_that_says_so(tmp_path: Path, program: str, words: str) -> None:
    """The warm-up goes on with its usual groups."""
    found = ask(tmp_path, program)

    assert () == found.dimensions
    assert re.match(words, found.words)


def test_an_adviser_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its time the warm-up goes on without it."""
    monkeypatch.setattr(plan_hints, "START_S", 0.0)

    assert "the first search gave no answer within 1 s" == ask(tmp_path, "import time; time.sleep(60)").words


def test_an_adviser_that_is_not_there_is_named(tmp_path: Path) -> None:
    """The command is in the sentence."""
    measurements = tiny_measurements(tiny_cluster(1, 2), (REFERENCE,))
    found = plan_hints.ask(("/no/such/adviser",), tiny_job(2), measurements, folder=tmp_path, budget_s=1.0)

    assert "/no/such/adviser" in found.words


def test_one_group_tells_for_all_of_its_shape() -> None:
    """Hosts of two slots: only kinds, sizes or numbers of hosts that nobody measured are new."""
    measured = Dimension(name="tp", kinds=("all_reduce",), groups=((0, 1), (2, 3)))
    across = Dimension(name="dp", kinds=("all_reduce",), groups=((0, 2), (1, 3)))
    within = Dimension(name="dp", kinds=("all_reduce", "all_gather"), groups=((4, 5),))
    larger = Dimension(name="dp", kinds=("all_reduce",), groups=((0, 1, 2, 3),))

    found = plan_hints.not_measured((measured, across, within, larger, across), (measured,), 2)

    assert (across, dataclasses.replace(within, kinds=("all_gather",)), larger) == found
    assert () == plan_hints.not_measured(found, (measured, across, within, larger), 2)
