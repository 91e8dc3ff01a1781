"""What processes that share a search tell each other: the order once, then batches of tasks and what came of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from pipette_launch.cost.learned.corrected import Corrections, corrections_from
from pipette_launch.facts import Job, Layout, Measurements, files
from pipette_launch.facts.results.outcome import Outcome
from pipette_launch.search.candidates import Field
from pipette_launch.search.tasks import Stage, Task, Tried


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchOrder:
    """All that a task is judged by, so that every process judges it alike."""

    KIND: ClassVar[str] = "search-order"
    SCHEMA_VERSION: ClassVar[int] = 1

    job: Job
    measurements: Measurements
    outcomes: tuple[Outcome, ...]
    """Of earlier jobs on such machines, the newest last: corrections are learned from them anew."""
    memory_margin: float
    seed: int

    def field(self) -> Field:
        """What the search looks at."""
        return Field.of(
            self.job,
            self.measurements,
            memory_margin=self.memory_margin,
            corrections=self.corrections(),
        )

    def corrections(self) -> Corrections:
        """What the outcomes teach."""
        return corrections_from(self.outcomes)


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskWords:
    """A `share.Task` in JSON, which has no infinity: None stands for it."""

    stage: Stage
    layout: Layout
    beat_s: float | None
    placement: tuple[int, ...]
    cost_s: float | None
    bound_s: float
    round: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TriedWords:
    """A `share.Tried` in JSON, None for infinity."""

    bound_s: float | None
    host_order_s: float | None
    placement: tuple[int, ...]
    cost_s: float | None
    is_optimal: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Tasks for one helper."""

    KIND: ClassVar[str] = "search-batch"
    SCHEMA_VERSION: ClassVar[int] = 1

    left_s: float
    """How long the search may go on; clocks differ from machine to machine."""
    tasks: tuple[TaskWords, ...]

    @classmethod
    def of(cls, tasks: Sequence[Task], *, left_s: float) -> Batch:
        """Put tasks into words."""
        return cls(left_s=left_s, tasks=tuple(TaskWords(**_without_infinity(task)) for task in tasks))

    def read(self) -> list[Task]:
        """Return the tasks."""
        return [Task(**_with_infinity(words)) for words in self.tasks]


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """What came of a batch, in the order of its tasks."""

    KIND: ClassVar[str] = "search-done"
    SCHEMA_VERSION: ClassVar[int] = 1

    tried: tuple[TriedWords | None, ...]
    """None where the time was up, or where whoever was to do it failed."""
    trouble: str = ""
    """Why a helper does no more, one sentence; empty while all is well."""

    @classmethod
    def of(cls, found: Sequence[Tried | None], *, trouble: str = "") -> Done:
        """Put results into words."""
        words = tuple(None if tried is None else TriedWords(**_without_infinity(tried)) for tried in found)
        return cls(tried=words, trouble=trouble)

    def read(self) -> list[Tried | None]:
        """Return the results."""
        return [None if words is None else Tried(**_with_infinity(words)) for words in self.tried]


def as_line(document: files.Document) -> str:
    """Write a document as one line; within strings JSON writes a line's end in two letters."""
    return files.dumps(document).replace("\n", "") + "\n"


def _without_infinity(fact: Task | Tried) -> dict[str, Any]:
    values = {field.name: getattr(fact, field.name) for field in fields(fact)}
    return {name: None if value == math.inf else value for name, value in values.items()}


def _with_infinity(words: TaskWords | TriedWords) -> dict[str, Any]:
    values = {field.name: getattr(words, field.name) for field in fields(words)}
    return {name: math.inf if value is None else value for name, value in values.items()}
