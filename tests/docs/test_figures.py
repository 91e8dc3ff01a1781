"""Figures of predicted against measured, on the pages that people read, are those of the recorded run."""

from __future__ import annotations

import json
import re

import pytest
from doc_pages import ROOT

RECORDED = json.loads((ROOT / "benchmarks" / "results" / "validation.json").read_text())["lines"]
LINES = {
    "peak memory, NVIDIA's own tests of Megatron-LM": "golden memory | all | closed form, workspaces stated | peak",
    "peak memory, stages printed in public logs": "public logs | all stages | closed form, workspaces stated | peak",
    "step time, Megatron-LM's README, 1.7B to 462B on up to 6,144 H100": (
        "Megatron README | fastest micro-batch | pipette | step time"
    ),
    "step time, NVIDIA's recipes, dense models": "NVIDIA | dense | pipette | step time",
    "step time, NVIDIA's recipes, experts (constants fitted to these models)": "NVIDIA | MoE | pipette | step time",
    "step time, NVIDIA's recipes, hybrid models (Mamba)": "NVIDIA | hybrid | pipette | step time",
    "step time, vTrain, fitted to a tenth of its rows": "vTrain | all | pipette, fitted to drawn rows | step time",
    "step time, vTrain, nothing fitted": "vTrain | all | pipette, built-in figures | step time",
}
TABLE = dict(
    re.findall(
        r"^\| ([^|\n]+) (\|[^|\n]+\|[^|\n]+\|[^|\n]+\|[^|\n]+\|)$",
        (ROOT / "docs" / "validation.md").read_text(),
        re.MULTILINE,
    )
)


def percent(part: float) -> str:
    """Write an error as the pages do: two digits."""
    return f"{100 * part:.1f} %" if part < 0.0995 else f"{100 * part:.0f} %"


@pytest.mark.parametrize("row", LINES)
def test_a_row_of_the_table_is_recorded(row: str) -> None:
    """docs/validation.md gives rows, mean and largest error and rank correlation as validation.json has them."""
    line = RECORDED[LINES[row]]
    mean, largest = percent(line["mean"]), percent(line["largest"])

    assert f"| {line['scored']:.0f} | {mean} | {largest} | {line['spearman']:.2f} |" == TABLE[row]


@pytest.mark.parametrize(
    "row", [row for row in LINES if "vTrain" not in row and "logs" not in row and "hybrid" not in row]
)
def test_the_readme_says_the_same(row: str) -> None:
    """The front page gives the same mean errors."""
    assert percent(RECORDED[LINES[row]]["mean"]) in (ROOT / "README.md").read_text()
