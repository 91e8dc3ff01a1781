"""Zero-bubble schedules on stock placement: 1F1B order with W where ranks would wait, by real times and memory."""

# S = stages, P = pipeline ranks.

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

from pipette_launch.cost.pipeline.engine import simulate
from pipette_launch.cost.pipeline.greedy import FillRules, PassOrder, SchedulingProblem, order_of
from pipette_launch.cost.pipeline.local_search import best_draft
from pipette_launch.facts.schedule import Action, Kind, Schedule

_KINDS: tuple[Kind, Kind] = ("F", "I")
RULES = tuple(FillRules(weight_gap=gap) for gap in (0.25, 0.9, 0.0, 0.5))
"""A W is put into any gap, or into those that it nearly fits: which is best depends on the times (measured)."""


def zero_bubble(name: str, problem: SchedulingProblem) -> Schedule:
    """ZB-1P where a rank may keep what 1F1B's first rank keeps, ZB-2P where it may keep twice that (2401.10241).

    Between F and I the order is 1F1B's; how many forwards run ahead depends on the limit and on when the first gradient
    comes back, and several such counts are tried, each with W by all of `RULES`. With equal stages ZB-1P comes to
    (p-1)(F+I-W+4c), the rates of 2401.10241, Table 5.

    Raises:
        FactError: a rank may keep less than one micro-batch.

    """
    return best_draft(problem, _orders, RULES).schedule(name, problem)


def refilled(schedule: Schedule, problem: SchedulingProblem) -> Schedule:
    """Put the W of a split schedule anew, by real times and within the limits; forwards and backwards keep their order.

    Returns the schedule itself where that is no better.
    """

    def orders(asked: SchedulingProblem) -> tuple[PassOrder, ...]:
        return (order_of(schedule, asked.num_microbatches),)

    anew = best_draft(problem, orders, RULES).schedule(schedule.name, problem)
    before, after = (simulate(one, problem.times) for one in (schedule, anew))
    if problem.objective == "span":
        return anew if max(after.span_s_P) < max(before.span_s_P) else schedule
    return anew if after.makespan_s < before.makespan_s else schedule


def _orders(problem: SchedulingProblem) -> Iterator[PassOrder]:
    """One order for each rule of the warm-up, some the same: forwards, then a backward and a forward in turn."""
    for rule in _WARMUPS:
        ranks = []
        for rank in range(problem.pp):
            ahead = _ahead(problem, rank, rule)
            forward, backward = (
                [Action(rank, kind, microbatch) for microbatch in range(problem.num_microbatches)] for kind in _KINDS
            )
            turns = itertools.zip_longest(backward, forward[ahead:])
            ranks.append((*forward[:ahead], *(action for turn in turns for action in turn if action is not None)))
        yield tuple(ranks)


def _ahead(problem: SchedulingProblem, rank: int, count: Callable[[SchedulingProblem, int], int]) -> int:
    """Forwards before a rank's first backward: at least what 1F1B needs, at most what memory allows."""
    room = math.floor(problem.limit_P[rank] / problem.held_S[rank] * (1 + 1e-9)) if problem.held_S[rank] else math.inf
    return int(max(1, min(max(count(problem, rank), problem.pp - rank), room, problem.num_microbatches)))


def _until_return(problem: SchedulingProblem, rank: int) -> float:
    """How many forwards fit before the first gradient comes back to a rank."""
    times = problem.times
    input_s = times.durations_s[3 * problem.pp :]
    later_s = sum(times.forward_s[rank:]) + sum(input_s[rank + 1 : problem.pp])
    hops_s = sum(times.forward_hop_s[rank:]) + sum(times.backward_hop_s[rank:])
    return (later_s + hops_s) / times.forward_s[rank] if times.forward_s[rank] else math.inf


def _covers_beside_first(problem: SchedulingProblem, rank: int) -> int:
    """Where rank 0 has no room for all that would fit, the others run as many fewer ahead: all gradients come late."""
    room = problem.limit_P[0] / problem.held_S[0] if problem.held_S[0] else math.inf
    late = max(0.0, _until_return(problem, 0) - room)
    return math.ceil(_capped(problem, _until_return(problem, rank) - late))


def _capped(problem: SchedulingProblem, count: float) -> float:
    return min(count, float(problem.num_microbatches))


_WARMUPS: tuple[Callable[[SchedulingProblem, int], int], ...] = (
    lambda problem, rank: problem.pp - rank,
    lambda problem, rank: 2 * (problem.pp - rank) - 1,
    lambda problem, rank: math.floor(_capped(problem, _until_return(problem, rank))),
    lambda problem, rank: math.ceil(_capped(problem, _until_return(problem, rank))),
    _covers_beside_first,
)
"""Forwards before a rank's first backward: as in 1F1B, in eager 1F1B, or as many as the wait for a gradient holds."""
