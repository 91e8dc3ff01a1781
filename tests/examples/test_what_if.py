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


def test_more_nodes_are_faster_and_dearer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each number of nodes. No plan is slower or dearer than the flags, and the cost follows the price."""
    monkeypatch.chdir(EXAMPLES)
    left = run([cell for cell in CELLS if "matplotlib" not in cell])
    _, _, own, planned, own_cost, planned_cost, _ = zip(*left["rows"], strict=True)

    assert sorted(own) == list(own)
    assert sorted(own_cost) == list(own_cost)
    assert all(plan >= flags for plan, flags in zip(planned, own, strict=True))
    assert all(plan <= flags for plan, flags in zip(planned_cost, own_cost, strict=True))
    assert pytest.approx(1e9 / own[0] / 3600 * 32 * 2.5) == own_cost[0]
    assert 2 + len(left["rows"]) == len(capsys.readouterr().out.splitlines())


def test_the_plot_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of speed and of cost, over all numbers of nodes."""
    pytest.importorskip("matplotlib", reason="the plot of the notebook needs matplotlib, which is no part of our tests")
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    left = run(CELLS)
    numbers = [row[0] for row in left["rows"]]

    assert [numbers] * 3 == [list(line.get_xdata()) for line in left["speed"].get_lines()]
    assert [numbers] * 2 == [list(line.get_xdata()) for line in left["cost"].get_lines()]
