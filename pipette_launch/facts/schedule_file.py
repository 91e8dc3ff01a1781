"""A pipeline schedule as a file: what the planner made, and every worker executes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import ClassVar

from pipette_launch.errors import FactError
from pipette_launch.facts.files import ADDED_LATER
from pipette_launch.facts.schedule import KINDS, Action, PassTimes, Placement, Schedule, words

# schema_version history of schedule.json
# 1  2026-11-23  first version

VARIABLE = "PIPETTE_SCHEDULE"
"""Names the file for the patch `schedules`."""

_WORD = re.compile(rf"(\d{{1,9}})([{''.join(KINDS)}])(\d{{1,9}})", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleFile:
    """A schedule with its actions as words; raises FactError where they are not those of a schedule."""

    KIND: ClassVar[str] = "schedule"
    SCHEMA_VERSION: ClassVar[int] = 1

    name: str
    pp: int
    vpp: int
    num_microbatches: int
    placement: Placement
    ranks: tuple[str, ...]
    """What each pipeline rank does, one word for each action, between blanks."""
    checks_first_step: bool = field(default=False, metadata=ADDED_LATER)
    """Whether the first step is run under Megatron's own schedule too, and compared; that needs memory for both."""

    times: PassTimes | None = field(default=None, metadata=ADDED_LATER)
    """Expected times, by which its messages are ordered over NCCL; None = all passes take equally long."""

    @classmethod
    def of(cls, schedule: Schedule, *, checks_first_step: bool = False) -> ScheduleFile:
        """Write a schedule."""
        return cls(
            checks_first_step=checks_first_step,
            name=schedule.name,
            pp=schedule.pp,
            vpp=schedule.vpp,
            num_microbatches=schedule.num_microbatches,
            placement=schedule.placement,
            times=schedule.times,
            ranks=tuple(" ".join(words(actions)) for actions in schedule.ranks),
        )

    def schedule(self) -> Schedule:
        """Read it; raises FactError where the actions are not those of a schedule."""
        return Schedule(
            name=self.name,
            pp=self.pp,
            vpp=self.vpp,
            num_microbatches=self.num_microbatches,
            placement=self.placement,
            times=self.times,
            ranks=tuple(tuple(map(action_of, rank.split())) for rank in self.ranks),
        )


def action_of(word: str) -> Action:
    """Read an action as people write it, `2B1`."""
    found = _WORD.fullmatch(word)
    if found is None:
        raise FactError(f"{word!r} is no action; one is a stage, a letter of {', '.join(KINDS)} and a micro-batch: 2B1")
    stage, kind, microbatch = found.groups()
    return Action(int(stage), KINDS[KINDS.index(kind)], int(microbatch))
