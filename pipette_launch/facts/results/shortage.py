"""A plan that ran out of memory though it was predicted to fit, and what that says of other plans of such a job."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from pipette_launch.errors import FactError
from pipette_launch.facts.checks import check_numbers
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.results.plan import Choice, Plan
from pipette_launch.units import bytes_text

MOST_CHARACTERS = 1000
"""Of a cause or a moment."""
LEAST_SHARE = 0.5
"""Of what was free: a plan that was to need less is not to blame, as no prediction is wrong by half."""
MOST_MARGIN = 1 - 2**-50
"""Of memory that has to stay free: all of it is no margin that a planner takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortage:
    """The file shortage.json: of the plans that ran out of memory the one that was predicted to need the least."""

    KIND: ClassVar[str] = "shortage"
    SCHEMA_VERSION: ClassVar[int] = 1

    layout: Layout
    need_bytes: int
    """Predicted for the fullest device, all overhead included."""
    free_bytes: int
    """What was free on the fullest device before the job."""
    cause: str
    """How it ended."""
    noticed_at: str

    def __post_init__(self) -> None:
        check_numbers(self, "need_bytes")
        if self.need_bytes > self.free_bytes:
            raise FactError(f"need_bytes={self.need_bytes} is more than free_bytes={self.free_bytes}: it never fitted")
        longest = max(len(self.cause), len(self.noticed_at))
        if longest > MOST_CHARACTERS:
            raise FactError(f"a cause or a moment has at most {MOST_CHARACTERS} characters, got {longest}")

    @classmethod
    def of(cls, choice: Choice, *, cause: str, noticed_at: str) -> Shortage | None:
        """Return what a plan that ran out of memory teaches; None where that is nothing: it was not to fit, or easily.

        Args:
            choice: what ran.
            cause: how it ended, for the user.
            noticed_at: when.

        """
        memory = choice.memory
        if memory is None or not memory.fits:
            return None
        if not LEAST_SHARE * memory.free_bytes <= max(memory.need_bytes) <= memory.free_bytes:
            return None
        return cls(
            layout=choice.layout,
            need_bytes=max(memory.need_bytes),
            free_bytes=memory.free_bytes,
            cause=cause[:MOST_CHARACTERS],
            noticed_at=noticed_at,
        )

    @property
    def share(self) -> float:
        """The part of what was free that was not enough, as predicted."""
        return self.need_bytes / self.free_bytes

    def margin(self, memory_margin: float) -> float:
        """The part of a device's memory that a new plan must leave free, where else it would have to leave this much.

        What was predicted to need `share` of what was free needed more than all of it. So predictions are taken to be
        too low by 1 / share at least, and the margin stands beside that: need / share <= (1 - margin) free.
        """
        # One byte less: where no margin is asked for, the same plan must not fit again.
        share = (self.need_bytes - 1) / self.free_bytes
        return max(memory_margin, min(1 - (1 - memory_margin) * share, MOST_MARGIN))

    def rules_out(self, choice: Choice) -> bool:
        """Whether a plan is predicted to need as large a part of what is free as the one that ran out of memory."""
        memory = choice.memory
        return memory is not None and max(memory.need_bytes) * self.free_bytes >= self.need_bytes * memory.free_bytes

    def leaner(self, plan: Plan) -> Plan | None:
        """Leave out the candidates of a plan that are ruled out; None where none is left."""
        if plan.keeps_own:
            return None if self.rules_out(plan.own) else plan
        left = [choice for choice in plan.candidates() if not self.rules_out(choice)]
        if not left:
            return None
        if len(left) == len(plan.candidates()):
            return plan
        num_in_line = None if plan.num_in_line is None else len(left) - 1
        return replace(plan, chosen=left[0], alternatives=tuple(left[1:]), num_in_line=num_in_line)

    @property
    def sentence(self) -> str:
        """Say which plan ran out of memory, when, how, and what had been predicted."""
        return (
            f"the plan {self.layout.words()} ran out of memory at {self.noticed_at} ({self.cause}), though only "
            f"{bytes_text(self.need_bytes)} of {bytes_text(self.free_bytes)} were predicted to be needed"
        )


def lower(one: Shortage | None, other: Shortage | None) -> Shortage | None:
    """Return the shortage that rules out more; the first where they are alike."""
    return min(filter(None, (one, other)), key=lambda shortage: shortage.share, default=None)
