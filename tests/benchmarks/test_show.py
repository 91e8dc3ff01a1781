"""The table comes out whole in every form; abstract execution is read as the logs and golden values need it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.validation import logs
from benchmarks.validation.abstract import Abstract
from benchmarks.validation.golden_score import Estimate
from benchmarks.validation.lines import Line, Section, counted
from benchmarks.validation.options import DEFAULT_FILES
from benchmarks.validation.scores import errors
from benchmarks.validation.show import Report, as_json, markdown, print_report
from pipette_launch.facts import Job
from pipette_launch.facts.messages import ExecutedMemory, ExecutedParts

LINE = Line(data="d", group="a|b", method="m", quantity="peak", scored=2, skipped=1, errors=errors([1, 3], [1, 2]))
SECTION = Section(
    data="d", source="file (digest)", lines=(LINE,), skipped=(("why", "row 1"), ("why", "row 2")), notes=("so",),
    details=("one",),
)  # fmt: skip
REPORT = Report(conditions={"date": "today"}, sections=(SECTION,))
PEAK = ExecutedMemory(
    pp_rank=0,
    weights=1,
    gradients=2,
    optimizer=3,
    allocated_after_step=7,
    first_peak=20,
    peak=30,
    parts=ExecutedParts(),
    notes=(),
)


class Fake(Abstract):
    """Answers without executing anything."""

    def __init__(self, memory: ExecutedMemory) -> None:
        self.memory = memory

    def stage(self, job: Job, pp_rank: int) -> ExecutedMemory:
        """One answer for all."""
        return replace(self.memory, pp_rank=pp_rank)


def test_the_terminal_shows_lines_reasons_and_with_verbose_all_rows(capsys: pytest.CaptureFixture[str]) -> None:
    """Reasons are counted; rows and predictions only on request."""
    print_report(REPORT, verbose=False)
    brief = capsys.readouterr().out
    print_report(REPORT, verbose=True)
    full = capsys.readouterr().out

    assert all(
        words in brief for words in ("date: today", "file (digest)", "25.00%", "note: so", "not scored: 2 x why")
    )
    assert "row 1: why" not in brief
    assert all(words in full for words in ("row 1: why", "row 2: why", "one"))


def test_markdown_and_json_hold_the_same_line() -> None:
    """A bar in a name does not break a Markdown row."""
    text, record = markdown(REPORT, title="Title"), json.loads(as_json(REPORT))

    assert "| a\\|b | m | peak | 2 | 1 | 25.00% | 25.00% | 50.00% | +25.00% | 1.000 |  |" in text
    assert "- not scored: 2 x why" in text
    (line,) = record["lines"]
    assert ("a|b", 0.25, 2, 1) == tuple(line[name] for name in ("group", "mean", "scored", "skipped"))
    assert {"why": 2} == record["sections"]["d"]["not scored"]


def test_notes_are_counted() -> None:
    """Most frequent first."""
    assert ("2 x b", "1 x a") == counted(["a", "b", "b"])


@pytest.mark.parametrize(
    ("when", "memory", "expected"),
    [
        ("iter1", PEAK, (20, 7)),
        ("iter2", PEAK, (30, 7)),
    ],
    ids=["first", "later"],
)
def test_executed_memory_of_the_first_iteration(when: str, memory: ExecutedMemory, expected: tuple[int, int]) -> None:
    """Logs of the first iteration are held against its peak, later ones against the steady one."""
    row = logs.read_table(DEFAULT_FILES["logs"], logs.COLUMNS).rows[-1]
    stage = logs.Stage(
        row=replace(row, values={**row.values, "when": when}),
        job=logs.job_of(logs.job_flags(row), world_size=8),
        device=None,
    )

    assert expected == logs.by_execution(Fake(memory))(stage)
    assert Estimate(static_bytes=7, peak_bytes=30) == Fake(memory).last_stage(stage.job)
