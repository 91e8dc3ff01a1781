"""The table of deadlines: in the code, in the documents, and for a large start on slow storage."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from pipette_launch import defaults
from pipette_launch.defaults import START_S, Deadline
from pipette_launch.probe.messages import wait_s

ROOT = Path(__file__).parents[1]
DEADLINES = {name: value for name, value in vars(defaults).items() if isinstance(value, Deadline)}


def test_the_documents_have_every_deadline() -> None:
    """The table in docs/reliability.md is the table of the code, row by row."""
    rows = [
        f"| {one.waits_for} | {one:g} s | "
        f"{'' if one.ranks_per_s == math.inf else f'1 s for {one.ranks_per_s:g} ranks'} | {one.when_passed} |"
        for one in DEADLINES.values()
    ]
    table = (ROOT / "docs" / "reliability.md").read_text().split("## Deadlines")[1].split("\n## ")[0]

    assert rows == [line for line in table.splitlines() if re.match(r"\| .* s \| ", line)]


@pytest.mark.parametrize("name", DEADLINES)
def test_every_deadline_is_used(name: str) -> None:
    """A deadline that no code uses would be a wrong row of the documents."""
    sources = (*(ROOT / "pipette_launch").rglob("*.py"), *(ROOT / "patches").rglob("*.py"))
    text = "".join(path.read_text() for path in sources if path.name != "defaults.py")

    assert len(re.findall(rf"\b{name}\b", text)) > 1


@pytest.mark.parametrize("first_s", [5.0, 120.0, 390.0])
def test_imports_of_4096_ranks_may_end_five_minutes_apart(first_s: float) -> None:
    """The first worker still waits for the last worker, whose progress message and warm-up are not overdue then."""
    ranks, last_s, budget_s = 4096, first_s + 300, 60.0
    left_s = START_S.of(ranks) - first_s

    assert first_s + wait_s(ranks, left_s) > last_s
    assert wait_s(ranks, START_S.of(ranks)) > last_s
    assert wait_s(ranks, START_S.of(ranks)) + wait_s(ranks, budget_s) > last_s + budget_s
