"""Results of the validation: lines of one table, and rows that it leaves out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.validation.scores import Errors, errors


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One line: how one method did on one group of one data set."""

    data: str
    group: str
    method: str
    quantity: str
    scored: int
    skipped: int = 0
    errors: Errors | None = None
    figures: dict[str, float] = field(default_factory=dict)
    """Other figures by name: `auc`, `regret median`, `R2`."""

    @property
    def key(self) -> str:
        """Name of the line for the ratchet."""
        return f"{self.data} | {self.group} | {self.method} | {self.quantity}"


def step_time_line(
    data: str,
    group: str,
    method: str,
    pairs: Sequence[tuple[float, float]],
    *,
    skipped: int,
    figures: Mapping[str, float] | None = None,
) -> Line:
    """Score step times; `pairs` are predicted and measured seconds."""
    return Line(
        data=data,
        group=group,
        method=method,
        quantity="step time",
        scored=len(pairs),
        skipped=skipped,
        errors=errors([predicted for predicted, _ in pairs], [measured for _, measured in pairs]),
        figures=dict(figures or {}),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """Result of one data set."""

    data: str
    source: str
    """File name and digest."""
    lines: tuple[Line, ...]
    skipped: tuple[tuple[str, str], ...] = ()
    """(reason, which row) of everything that was not scored."""
    notes: tuple[str, ...] = ()
    """Remarks for readers of the figures, one sentence each."""
    details: tuple[str, ...] = ()
    """Predicted against measured, one row each; printed with --verbose."""

    @property
    def reasons(self) -> Counter[str]:
        """Rows that were not scored, by reason."""
        return Counter(reason for reason, _ in self.skipped)


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Result of one method on one data set."""

    lines: tuple[Line, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    details: tuple[str, ...] = ()

    def __add__(self, other: Found) -> Found:
        """Both, one after the other."""
        return Found(
            lines=self.lines + other.lines,
            skipped=self.skipped + other.skipped,
            details=self.details + other.details,
        )

    def section(self, data: str, source: str, notes: tuple[str, ...]) -> Section:
        """Return all that was found on a data set."""
        return Section(
            data=data,
            source=source,
            lines=self.lines,
            skipped=self.skipped,
            notes=notes,
            details=self.details,
        )


def counted(notes: Iterable[str]) -> tuple[str, ...]:
    """Each note once, with how often it came: `39 x tag older than 0.16 read as 0.16`."""
    return tuple(f"{count} x {note}" for note, count in Counter(notes).most_common())
