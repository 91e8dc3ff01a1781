"""Every label on the screens has an explanation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipette_launch.errors import FactError
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.meanings import MEANINGS, STEP, Meaning, key_of
from pipette_launch.facts.results.prediction import PARTS
from pipette_launch.search.explanations import PART_NAMES

ROOT = Path(__file__).parents[2]
SCREENS = sorted((ROOT / "tests" / "data" / "screens").glob("*-120.txt"))


@pytest.mark.parametrize("path", SCREENS, ids=lambda path: path.stem)
def test_every_heading_is_explained(path: Path) -> None:
    """Of each golden screen: what begins a line at its margin."""
    headings = re.findall(r"^([A-Z][A-Za-z]*(?: [a-z]+)*)(?: {2,}| *$)", path.read_text(), re.MULTILINE)

    assert len(headings) > 3
    assert [] == [heading for heading in headings if key_of(heading) not in MEANINGS]


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
