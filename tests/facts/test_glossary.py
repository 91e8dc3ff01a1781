"""Every label on the screens has an explanation."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import screens

from pipette_launch.errors import FactError
from pipette_launch.facts.glossary import MEANINGS, STEP, Meaning, key_of
from pipette_launch.facts.health import SEVERITIES, Checkup, Finding
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.outcome import LiveJob
from pipette_launch.facts.prediction import PARTS
from pipette_launch.report import checkup_screen
from pipette_launch.report.live import live_rows
from pipette_launch.search.explanations import PART_NAMES

ROOT = Path(__file__).parents[2]
SCREENS = sorted((ROOT / "tests" / "data" / "screens").glob("*-120.txt"))


@pytest.mark.parametrize("path", SCREENS, ids=lambda path: path.stem)
def test_every_heading_is_explained(path: Path) -> None:
    """Of each golden screen: what begins a line at its margin."""
    headings = re.findall(r"^([A-Z][A-Za-z]*(?: [a-z]+)*)(?: {2,}| *$)", path.read_text(), re.MULTILINE)

    assert len(headings) > 3
    assert [] == [heading for heading in headings if key_of(heading) not in MEANINGS]


DIM = re.compile("\x1b\\[2m(.*?)\x1b\\[0m")


def heads(screen: str) -> set[str]:
    """The heads of tables on a coloured screen: dim cells alone in a line; the words of one stand below each other."""
    found: set[str] = set()
    above: dict[int, str] = {}
    for line in screen.splitlines():
        # Every cell is one piece of dim text; what stands at the margin is the bold heading of the section.
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


def in_colour(draw: Callable[..., str]) -> Callable[..., str]:
    """A screen as a terminal with colours shows it."""
    return lambda *what, **how: draw(*what, **{**how, "colour": True})


@pytest.fixture
def coloured(monkeypatch: pytest.MonkeyPatch) -> None:
    """All golden screens, in colour."""
    for name in ("prediction_screen", "comparison_screen", "plan_screen", "plan_file_screen"):
        monkeypatch.setattr(screens, name, in_colour(getattr(screens, name)))


@pytest.mark.usefixtures("coloured")
@pytest.mark.parametrize("width", [80, 120])
def test_every_head_of_a_column_is_explained(width: int) -> None:
    """On the screens of plan, predict and compare, in short and in full, as they are drawn."""
    drawn = {name: heads(screens.SCREENS[name](width)) for name in screens.SCREENS if name != "measured"}

    assert {"ratio", "gap", "layout", "tensor parallel", "other"} <= drawn["compared"]
    assert {"GiB", "layers", "peak", "overhd" if width == 80 else "overhead"} <= drawn["foretold"]
    assert set() == {head for found in drawn.values() for head in found if key_of(head) not in MEANINGS}


def test_what_stands_beside_the_bars_is_explained() -> None:
    """`chosen` and `yours` behind step times."""
    beside = set(re.findall(r"█[█░]*  ([a-z]+) ", screens.SCREENS["planned"](120)))

    assert {"chosen", "yours"} == beside
    assert beside <= set(MEANINGS)


def test_every_line_of_watch_and_doctor_is_explained() -> None:
    """What stands at the margin of their screens."""
    job = LiveJob(read_s=9.0, written_s=8.0, phase="training", layout="tp1", iteration=3, step_s=0.5, tokens_per_s=9.0)
    lines = {row.name for row in live_rows(replace(job, memory_need_bytes=8), [0.5]) if row.name}
    findings = tuple(Finding(severity=one, what=one, value="1 B") for one in SEVERITIES)
    screen = checkup_screen(Checkup(host="n1", taken_at="now", findings=findings), width=80, colour=False)
    lines |= set(re.findall(r"^[A-Z]\w+", screen, re.MULTILINE))

    assert {"Phase", "Failures", "Data", "Stops", "Answer"} <= lines
    assert [] == [line for line in lines if key_of(line) not in MEANINGS]


def test_every_part_of_the_step_is_explained() -> None:
    """By the names in plan files; the sentences beside a plan know the same."""
    assert {key_of(name) for name in PART_NAMES} <= {*STEP, "compute"}


def test_every_kind_of_memory_is_explained() -> None:
    """As the split of a prediction names them."""
    assert [] == [name for name in PARTS if name not in MEANINGS]


def test_every_word_of_a_layout_is_explained() -> None:
    """All that the short form may hold."""
    layout = Layout(tp=2, pp=2, dp=4, cp=1, ep=2, etp=1, vpp=2, sequence_parallel=True, use_distributed_optimizer=True)
    words = [re.sub(r"\d+$", "", word) for word in layout.words().split()]

    assert {"tp", "vpp", "etp", "seq-par", "dist-opt"} <= set(words)
    assert [] == [word for word in words if word not in MEANINGS]


def test_named_files_exist() -> None:
    """A source that is a file of the product or a page is there."""
    named = {
        word
        for meaning in MEANINGS.values()
        for word in re.findall(r"[\w/]+(?:\.py|\.md)|[a-z]+/[a-z/]+/", meaning.source)
        if "/" in word
    }

    assert len(named) > 15
    assert set() == {
        word for word in named if not any((base / word).exists() for base in (ROOT / "pipette_launch", ROOT))
    }


def test_a_number_needs_a_source() -> None:
    """A unit without formula and source is refused."""
    with pytest.raises(FactError, match="a number needs how it is got"):
        Meaning("Some number.", unit="seconds")
