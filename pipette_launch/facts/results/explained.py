"""What labels and numbers of the screens mean: the document of `pipette explain --json`."""

# schema_version history of the document
# 1  2026-11-24  first version

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """One of `facts.meanings`, with its value in a plan."""

    key: str
    what: str
    unit: str
    """Empty where it is no number."""
    how: str
    source: str
    value: str
    """With its unit; empty without a plan, and where the plan holds none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Explained:
    """The answer of `pipette explain`."""

    KIND: ClassVar[str] = "explained"
    SCHEMA_VERSION: ClassVar[int] = 1

    keys: tuple[Explanation, ...]
