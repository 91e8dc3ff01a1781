"""Every flag of every release has an effect, and releases survive a rewrite of the table."""

from __future__ import annotations

import json
import re
from pathlib import Path

from benchmarks.make_flag_table import TARGET, derived, effect_rows, known_rows, table
from pipette_launch.megatron.flags import EFFECTS

PAGE = Path(__file__).parents[2] / "docs" / "script_flags.md"


def test_every_flag_has_an_effect() -> None:
    """A flag of a new release is read by the code, or needs a word in `data/effects.csv`."""
    assert [option for option, *_, effect in effect_rows() if not effect] == []


def test_no_word_is_stale() -> None:
    """A flag that the code reads, pins or refuses needs no word, and the page explains each word."""
    every = {row[0] for flags in known_rows().values() for row in flags.values()}

    assert EFFECTS.keys() & derived().keys() == set()
    assert EFFECTS.keys() - every == set()
    assert set(EFFECTS.values()) == set(re.findall(r"^\| \*([a-z ]+)\* \|", PAGE.read_text(), re.MULTILINE))


def test_the_table_comes_back() -> None:
    """Splitting the table into releases and joining them again changes nothing."""
    assert json.loads(TARGET.read_text(encoding="utf-8"))["flags"] == table(known_rows())
