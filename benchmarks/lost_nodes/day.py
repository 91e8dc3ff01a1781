"""Throughput left after a day of losses: fewer hosts, and the time that each loss takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

DAY_S = 24 * 3600.0
SAVE_S = 10.0
"""Assumed: how long a checkpoint stops the training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """Seconds that one loss takes."""

    stands_still_s: float
    loads_checkpoint: bool
    """True if training returns to the last checkpoint and loses half an interval on average. Else it loses one step."""


def checkpoint_interval_s(between_s: float) -> float:
    """Young's interval between checkpoints (1974): the square root of twice the pause times the time between losses."""
    return math.sqrt(2 * SAVE_S * between_s)


def kept(
    rate_after: Callable[[int], float], loss: Loss, *, between_s: float, most_lost: int, step_s: float
) -> tuple[float, float]:
    """Average the throughput until the given number of hosts is lost or a day is over.

    Args:
        rate_after: throughput by number of lost hosts, divided by the throughput of all hosts.
        loss: what each costs.
        between_s: seconds from one loss to the next; the first comes after as many.
        most_lost: the loss after this one ends the count.
        step_s: of one step, lost where no checkpoint is loaded.

    Returns:
        The part of the throughput that is kept, and the hours that were counted.

    """
    interval_s = checkpoint_interval_s(between_s)
    saves = 1 - SAVE_S / (interval_s + SAVE_S)
    again_s = min(interval_s, between_s) / 2 if loss.loads_checkpoint else step_s / 2
    done_s, at_s, lost = 0.0, 0.0, 0
    while at_s < DAY_S and lost <= most_lost:
        lasts_s = min(between_s, DAY_S - at_s)
        away_s = (loss.stands_still_s + again_s) if lost else 0.0
        done_s += max(lasts_s - away_s, 0.0) * saves * rate_after(lost)
        at_s, lost = at_s + lasts_s, lost + 1
    return done_s / at_s, at_s / 3600
