"""Meaning, unit, calculation and source of every word and number on the screens, from `data/glossary.json`.

`pipette explain` prints these entries, and `scripts/glossary.py` makes docs/glossary.md from the same file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources

from pipette_launch.errors import FactError


@dataclass(frozen=True, slots=True)
class Meaning:
    """Explanation of one word or number on the screens."""

    what: str
    """Meaning of the word in one sentence."""
    unit: str = ""
    """Unit of the number. The unit is empty for a word without a number."""
    how: str = ""
    """Formula or measurement that gives the number."""
    source: str = ""
    """Paper, flag, or page of the documentation."""

    def __post_init__(self) -> None:
        if self.unit and not (self.how and self.source):
            raise FactError(f"a number needs how and source: {self.what}")


_FILE = resources.files("pipette_launch.facts").joinpath("data/glossary.json")
GROUPS: dict[str, dict[str, Meaning]] = {
    title: {key: Meaning(**entry) for key, entry in entries.items()}
    for title, entries in json.loads(_FILE.read_text(encoding="utf-8")).items()
}
"""Entries of the glossary by key in lower case, in groups with the titles and the order of docs/glossary.md."""
MEANINGS = {key: meaning for group in GROUPS.values() for key, meaning in group.items()}
SHORT = {
    "weights": "weight",
    "gradients": "grad",
    "optimizer": "optim",
    "activations": "activ",
    "logits": "logits",
    "buffers": "buffer",
    "overhead": "overhd",
    "step time": "step",
}
"""Shorter heads of columns for narrow screens."""
_IN_FULL = {short: key for key, short in SHORT.items()}


def key_of(label: str) -> str:
    """Return the glossary key of a label on a screen or in a file, such as `data_parallel`, `Step time` or `activ`."""
    key = " ".join(label.replace("_", " ").lower().split())
    return _IN_FULL.get(key, key)
