"""Screens of jobs in the documents are drawn by the product, from the files that these jobs left in tests/data/jobs."""

from __future__ import annotations

import re
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest
from doc_pages import PAGES, ROOT, blocks, lacks, name_of
from facts_for_tests import tiny_cluster
from screens import choice, plan

from pipette_launch.cli.pipette import COMMANDS
from pipette_launch.facts import Layout, Measurements, Plan, files
from pipette_launch.facts.outcome import LiveJob, Outcome
from pipette_launch.planning.replan import UseFallback
from pipette_launch.report.live import live_screen
from pipette_launch.report.plan import outcome_line, plan_screen

sys.path.insert(0, str(ROOT / "examples"))
import log_lines

JOBS = ROOT / "tests" / "data" / "jobs"
STEPS_S = (0.2122, 0.1869)
"""The watched job's first lines."""


def start(job: str) -> str:
    """Draw the screen before the training."""
    chosen = files.read(JOBS / job / "plan.json", Plan)
    assert chosen.setting is not None
    return plan_screen(
        chosen,
        files.read(JOBS / job / "cluster.json", Measurements),
        arguments=chosen.setting.arguments,
        new_arguments=chosen.setting.new_arguments,
        saved_to=None,
    )


def outcome(job: str) -> str:
    """Draw the line that sets the measured step beside the predicted one."""
    return f"pipette-launch: {outcome_line(files.read(JOBS / job / 'outcome.json', Outcome))}\n"


def watched(job: str) -> str:
    """Draw the screen of `pipette watch`."""
    return live_screen(files.read(JOBS / job / "live-job.json", LiveJob), STEPS_S)


def loss() -> str:
    """Draw the line about a lost host, of a job with a plan for three of its four hosts."""
    layout = choice(Layout(tp=2, dp=12, micro_batch_size=2), 3.41)
    three = replace(plan(tiny_cluster(3, 8), layout, layout), hosts=("n0", "n1", "n2"), other_hosts=("n3",))
    lost = UseFallback(plan=three, proven=False, lost=(("n3", "its agent is gone"),), came_back=(), put_in=())
    return f"pipette-launch: {lost.reason}\n"


SCREENS: dict[str, Callable[[], str]] = {
    "before training on three hosts": lambda: start("three-hosts"),
    "before training on one machine": lambda: start("one-machine"),
    "measured step on one machine": lambda: outcome("one-machine"),
    "watched on one machine": lambda: watched("one-machine"),
    "a lost host": loss,
}
"""By what follows `<!-- screen: ` in front of a block."""


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_screen_is_held(page: Path) -> None:
    """Each block in no language is printed by a command or a stored job, or is a synopsis, a log, or a drawing."""
    marks = [block.mark for block in blocks(page) if not block.language]
    held = {"prints", "synopsis", "log", "drawing", *(f"screen: {name}" for name in SCREENS)}

    assert [] == [mark for mark in marks if mark not in held]
    assert {block.language for block in blocks(page)} <= {"", "bash", "sh", "diff", "python", "json", "toml"}


@pytest.mark.parametrize("name", SCREENS)
def test_a_screen_is_what_the_product_draws(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the page that shows it, with `...` for lines that are left out."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    shown = [block.text for page in PAGES for block in blocks(page) if block.mark == f"screen: {name}"]

    assert len(shown) == 1
    assert "" == lacks(SCREENS[name](), shown[0])


@pytest.mark.parametrize("page", [page for page in PAGES if any(block.mark == "synopsis" for block in blocks(page))])
def test_a_synopsis_names_flags_that_exist(page: Path) -> None:
    """Of the subcommand in front of them."""
    synopses = [block.text for block in blocks(page) if block.mark == "synopsis"]
    for command, words in re.findall(r"^pipette (\w+)(.*(?:\n .*)*)", "".join(synopses), re.MULTILINE):
        parser = ArgumentParser()
        COMMANDS[command].add_arguments(parser)
        known = {flag for action in parser._actions for flag in action.option_strings}

        assert set() == set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", words)) - known, command


def masked(line: str) -> str:
    """Return a line of a log without its figures."""
    return re.sub(r"[\d.]*\d(E[+-]\d+)?", "#", re.sub(r" +|-{9,}", " ", line.rstrip()))


def test_the_log_of_the_example_is_what_it_prints() -> None:
    """Each line is one that the example writes, apart from the figures of the run."""
    iteration = log_lines.Iteration(
        iteration=1,
        train_iters=2,
        consumed_samples=16,
        step_time_s=0.1,
        tflops_per_device=None,
        learning_rate=3e-3,
        global_batch_size=16,
        loss=5.0,
        loss_scale=1.0,
        grad_norm=1.0,
        num_skipped=0,
        num_nan=0,
    )
    lines = [
        iteration.line(datetime(2026, 1, 1, tzinfo=timezone.utc)),
        *log_lines.validation("iteration 1", 2.0).splitlines(),
    ]
    written = {masked(line) for line in lines}
    sources = "".join(path.read_text() for folder in ("examples", "patches") for path in (ROOT / folder).rglob("*.py"))
    (shown,) = (block.text for page in PAGES for block in blocks(page) if block.mark == "log")
    other = [line for line in shown.splitlines() if line.strip() != "..." and masked(line) not in written]

    for line in other:
        for part in re.split(r"\w*\d\w*|cpu_backend: |masked_softmax_fusion|Python's .* given", line):
            assert part.strip(" (),>") in sources, line
