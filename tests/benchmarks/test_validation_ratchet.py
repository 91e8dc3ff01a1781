"""No recorded figure of the validation gets worse.

After a change that improves figures, or that makes one worse for a reason: `python -m benchmarks.validation --record`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.validation import ratchet
from benchmarks.validation.lines import Line
from benchmarks.validation.scores import Errors
from benchmarks.validation.tables import DataError

ERRORS = Errors(count=4, mean=0.02, median=0.01, largest=0.05, signed_median=-0.01, spearman=0.9)
LINE = Line(
    data="d", group="g", method="m", quantity="peak", scored=4, errors=ERRORS, figures={"regret": 0.1, "groups": 3.0}
)


def complaints(now: Line | None) -> list[str]:
    """What the ratchet says where LINE was recorded."""
    return ratchet.worse(ratchet.as_record([LINE]), [now] if now else [])


@pytest.mark.parametrize(
    "now",
    [
        LINE,
        replace(LINE, scored=5),
        replace(LINE, errors=replace(ERRORS, mean=0.001, median=0.001, largest=0.01, spearman=1.0)),
        replace(LINE, figures={"regret": 0.0, "groups": 9.0}),
        replace(LINE, errors=replace(ERRORS, mean=0.0202, signed_median=9.0)),
    ],
    ids=["the same", "more rows", "better", "no regret", "within the tolerance"],
)
def test_what_is_not_worse_passes(now: Line) -> None:
    """Better figures, more rows, rounding, and figures that are not held."""
    assert [] == complaints(now)


@pytest.mark.parametrize(
    ("now", "complaint"),
    [
        (replace(LINE, scored=3), "scored was 4 and is 3"),
        (replace(LINE, errors=replace(ERRORS, mean=0.021)), "mean was 0.02 and is 0.021"),
        (replace(LINE, errors=replace(ERRORS, largest=0.06)), "largest was 0.05 and is 0.06"),
        (replace(LINE, errors=replace(ERRORS, spearman=0.8)), "spearman was 0.9 and is 0.8"),
        (replace(LINE, errors=replace(ERRORS, spearman=None)), "spearman was 0.9 and is gone"),
        (replace(LINE, figures={"regret": 0.2}), "regret was 0.1 and is 0.2"),
        (None, "no longer scored"),
        (replace(LINE, method="renamed"), "no longer scored"),
    ],
)
def test_what_is_worse_is_named(now: Line | None, complaint: str) -> None:
    """The line, the figure, what it was and what it is."""
    assert [f"d | g | m | peak: {complaint}"] == complaints(now)


def test_a_record_comes_back_as_written(tmp_path: Path) -> None:
    """And what is no record is an error that says how to make one."""
    assert 1 == ratchet.write(tmp_path / "record.json", [LINE], {"date": "today"})
    assert ratchet.as_record([LINE]) == ratchet.read(tmp_path / "record.json")

    (tmp_path / "bad.json").write_text("[]", encoding="utf-8")
    for name in ("bad.json", "missing.json"):
        with pytest.raises(DataError, match="--record"):
            ratchet.read(tmp_path / name)


@pytest.mark.timeout(600)
def test_no_recorded_figure_gets_worse() -> None:
    """All golden rows, logs and papers, and a tenth of vTrain, computed anew."""
    recorded = ratchet.read(ratchet.RECORD)

    assert len(recorded) > 40
    assert [] == ratchet.worse(recorded, ratchet.lines())
