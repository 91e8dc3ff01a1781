"""Schedules written as words, and what is counted on them by hand."""

from collections.abc import Iterable

from pipette_launch.facts.schedule import Placement, Schedule, action_of, words


def from_words(
    name: str, *, pp: int, vpp: int, ranks: Iterable[Iterable[str]], placement: Placement = "loop"
) -> Schedule:
    """The schedule of these words, `0F0 0B0` and so on for each rank."""
    actions = tuple(tuple(map(action_of, rank)) for rank in ranks)
    microbatches = 1 + max((action.microbatch for rank in actions for action in rank), default=-1)
    return Schedule(name=name, pp=pp, vpp=vpp, num_microbatches=microbatches, ranks=actions, placement=placement)


def to_words(schedule: Schedule) -> list[list[str]]:
    """Every rank's actions as words."""
    return [words(actions) for actions in schedule.ranks]


def splits_backward(schedule: Schedule) -> bool:
    """Whether any backward is run as I and W."""
    return any(action.kind == "I" for actions in schedule.ranks for action in actions)


def peak_live(schedule: Schedule) -> list[int]:
    """Most forward passes of each rank whose backward, of a split one its W, has not ended."""
    peaks = []
    for actions in schedule.ranks:
        live = peak = 0
        for action in actions:
            live += (action.kind == "F") - (action.kind in "BW")
            peak = max(peak, live)
        peaks.append(peak)
    return peaks
