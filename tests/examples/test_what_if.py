"""The notebook's cells run, from top to bottom."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
CELLS = [
    "".join(cell["source"])
    for cell in json.loads((EXAMPLES / "what_if.ipynb").read_text())["cells"]
    if cell["cell_type"] == "code"
]


def run(cells: list[str]) -> dict[str, Any]:
    """What the cells leave behind, executed one after the other in one namespace."""
    left: dict[str, Any] = {}
    for cell in cells:
        exec(compile(cell, "what_if.ipynb", "exec"), left)  # noqa: S102
    return left


def test_more_hosts_take_less_time(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All cells but the plot: a row of the table for each number of hosts, and a plan is no slower than the flags."""
    monkeypatch.chdir(EXAMPLES)
    left = run([cell for cell in CELLS if "matplotlib" not in cell])
    steps_s = [one.step_time_s for one in left["predictions"]]
    planned_s = [plan.chosen.step_time_s for plan in left["plans"]]

    assert sorted(steps_s, reverse=True) == steps_s
    assert sorted(planned_s, reverse=True) == planned_s
    assert all(plan_s <= own_s for plan_s, own_s in zip(planned_s, steps_s, strict=True))
    assert 1 + len(left["hosts"]) == len(capsys.readouterr().out.splitlines())


def test_the_plot_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three lines, over all numbers of hosts."""
    pytest.importorskip("matplotlib", reason="the plot of the notebook needs matplotlib, which is no part of our tests")
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    left = run(CELLS)

    assert [left["hosts"]] * 3 == [list(line.get_xdata()) for line in left["axes"].get_lines()]
