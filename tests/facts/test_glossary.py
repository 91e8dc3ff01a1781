"""The glossary explains every label on the screens, and docs/glossary.md is made from it."""

from __future__ import annotations

import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import screens

from pipette_launch.errors import FactError
from pipette_launch.facts.glossary import MEANINGS, Meaning, key_of
from pipette_launch.facts.health import SEVERITIES, Checkup, Finding
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.outcome import LiveJob
from pipette_launch.facts.prediction import PARTS
from pipette_launch.report.live import live_rows
from pipette_launch.report.measured import checkup_screen
from pipette_launch.search.explanations import PART_NAMES

ROOT = Path(__file__).parents[2]
SCREENS = sorted((ROOT / "tests" / "data" / "screens").glob("*-120.txt"))


@pytest.mark.parametrize("path", SCREENS, ids=lambda path: path.stem)
def test_every_heading_is_explained(path: Path) -> None:
    """A heading begins a line of a golden screen at the margin."""
    headings = re.findall(r"^([A-Z][A-Za-z]*(?: [a-z]+)*)(?: {2,}| *$)", path.read_text(), re.MULTILINE)

    assert len(headings) > 3
    assert [] == [heading for heading in headings if key_of(heading) not in MEANINGS]


DIM = re.compile("\x1b\\[2m(.*?)\x1b\\[0m")


def heads(screen: str) -> set[str]:
    """Return the heads of columns on a coloured screen: lines of dim cells only. A long head takes several lines."""
    found: set[str] = set()
    above: dict[int, str] = {}
    for line in screen.splitlines():
        # Each cell is one piece of dim text. The bold text at the margin is the heading of the section.
        body = re.sub("^\x1b\\[1m.*?\x1b\\[0m", lambda bold: " " * len(re.sub("\x1b.*?m", "", bold[0])), line)
        plain = re.sub("\x1b.*?m", "", body)
        is_dim = not DIM.sub("", body).strip()
        cells = {cell.end(): cell[0] for cell in re.finditer(r"\S+", plain)} if is_dim else {}
        if len(DIM.findall(body)) < 2 or (not above and len(cells) < 3):
            found |= set(above.values())
            above = {}
        elif cells and set(cells) <= set(above):
            above |= {end: f"{above[end]} {word}" for end, word in cells.items()}
        else:
            found |= set(above.values())
            above = cells
    return found | set(above.values())


@pytest.mark.parametrize("width", [80, 120])
def test_every_head_of_a_column_is_explained(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """The screens of plan and predict have short heads at 80 columns and full heads at 120."""
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    drawn = {name: heads(screens.drawn(name, width)) for name in screens.SCREENS if name != "measured"}

    assert {"GiB", "layers", "peak", "overhd" if width == 80 else "overhead"} <= drawn["foretold"]
    assert set() == {head for found in drawn.values() for head in found if key_of(head) not in MEANINGS}


def test_words_beside_the_bars_are_explained() -> None:
    """The bars of step times are labelled `chosen` and `yours`."""
    beside = set(re.findall(r"█[█░]*  ([a-z]+) ", screens.drawn("planned", 120)))

    assert {"chosen", "yours"} == beside
    assert beside <= set(MEANINGS)


def test_every_line_of_watch_and_doctor_is_explained() -> None:
    """Each label at the margin of these screens has an entry."""
    job = LiveJob(read_s=9.0, written_s=8.0, phase="training", layout="tp1", iteration=3, step_s=0.5, tokens_per_s=9.0)
    lines = {row.name for row in live_rows(replace(job, memory_need_bytes=8), [0.5]) if row.name}
    findings = tuple(Finding(severity=one, what=one, value="1 B") for one in SEVERITIES)
    screen = checkup_screen(Checkup(host="n1", taken_at="now", findings=findings))
    lines |= set(re.findall(r"^[A-Z]\w+", screen, re.MULTILINE))

    assert {"Phase", "Failures", "Data", "Stops", "Answer"} <= lines
    assert [] == [line for line in lines if key_of(line) not in MEANINGS]


def test_every_part_of_the_step_is_explained() -> None:
    """The parts of a step in plan files have entries."""
    assert {key_of(name) for name in PART_NAMES} <= set(MEANINGS)


def test_every_kind_of_memory_is_explained() -> None:
    """The kinds of memory in a prediction have entries."""
    assert [] == [name for name in PARTS if name not in MEANINGS]


def test_every_word_of_a_layout_is_explained() -> None:
    """Each word of the short form has an entry, without its number."""
    layout = Layout(tp=2, pp=2, dp=4, cp=1, ep=2, etp=1, vpp=2, sequence_parallel=True, use_distributed_optimizer=True)
    words = [re.sub(r"\d+$", "", word) for word in layout.words().split()]

    assert {"tp", "vpp", "etp", "seq-par", "dist-opt"} <= set(words)
    assert [] == [word for word in words if word not in MEANINGS]


def test_named_files_exist() -> None:
    """A page of the documentation that an entry names exists."""
    named = {word for meaning in MEANINGS.values() for word in re.findall(r"docs/[\w/]+\.md", meaning.source)}

    assert len(named) > 4
    assert [] == [word for word in named if not (ROOT / word).exists()]


def test_the_page_is_up_to_date() -> None:
    """`PYTHONPATH=. python scripts/glossary.py` writes docs/glossary.md after a change of the table."""
    assert (ROOT / "docs" / "glossary.md").read_text() == runpy.run_path(str(ROOT / "scripts" / "glossary.py"))[
        "page"
    ]()


def test_a_number_needs_a_source() -> None:
    """A unit without formula and source is an error."""
    with pytest.raises(FactError, match="a number needs how and source"):
        Meaning("Some number.", unit="seconds")
