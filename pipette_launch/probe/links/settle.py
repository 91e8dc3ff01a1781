"""Measure the first links inside hosts until two looks agree: the first may be slow. Pure.

On a virtual machine that had been idle for a minute the first large messages inside hosts took two to four times as
long as a few seconds later, all of a round (5 MB: 39 to 113 MB/s beside 140 to 330). Why is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipette_launch.probe.options import LinkSamples

AGREE = 1.25
"""Two measurements of which the later is faster by no more than this agree."""
MOST_LOOKS = 4

Looks = Callable[[], tuple[LinkSamples, ...]]


def settled(measure: Looks, largest: Callable[[float], float], has_time: Callable[[], bool]) -> tuple[LinkSamples, ...]:
    """Measure links at least once, and again while there is time and one was much faster than the time before.

    Args:
        measure: measures the same links each time.
        largest: of this rank's number, brings the largest of all ranks; all call it at the same time.
        has_time: whether to measure again; the same answer on every rank.

    Returns:
        The fastest look of each link: a disturbance only ever slows it down, so the last need not be the best.

    """
    looks = [measure()]
    while len(looks) < MOST_LOOKS and has_time():
        looks.append(measure())
        if largest(_gain(looks[-2], looks[-1])) <= AGREE:
            break
    return tuple(min(links, key=_seconds_per_byte) for links in zip(*looks, strict=True))


def _gain(before: Sequence[LinkSamples], after: Sequence[LinkSamples]) -> float:
    """How many times as fast as before the largest message of a link went, at most; 1 where none is faster."""
    return max(
        [1.0, *(_seconds_per_byte(one) / _seconds_per_byte(two) for one, two in zip(before, after, strict=True))]
    )


def _seconds_per_byte(link: LinkSamples) -> float:
    """Of the largest message: how large that is depends on the time that there was."""
    return link.samples[-1].median_s / link.sizes_bytes[-1]
