"""The best draft of several orders and rules, and then without the fillings that stand on its critical path."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from pipette_launch.cost.pipeline.greedy import DraftSchedule, FillRules, PassOrder, SchedulingProblem, fill
from pipette_launch.errors import FactError
from pipette_launch.facts.schedule import Action

_TRIES = 4
"""Single waits that are tried in a round, besides all of them together."""
_FINALISTS = 6
_KEPT = 3
"""Choices that are left of a long step once it was tried shortened, and drafts that are polished."""
_ACTIONS = 1_000_000
"""Actions that may be run to choose a draft, and a quarter of that to polish it: seconds for any pipeline."""
_SAME = 1e-9

Ran = tuple[float, float, Action]
Choice = tuple[int, FillRules]
"""The place of an order among all, and how W are put into it."""


def best_draft(
    problem: SchedulingProblem, orders: Callable[[SchedulingProblem], Iterable[PassOrder]], rules: Sequence[FillRules]
) -> DraftSchedule:
    """Try every order with all rules, and polish the shortest by the problem's objective.

    A long step is tried with its first few micro-batches first, as all later ones repeat the same pattern.

    Args:
        problem: what the schedule is for.
        orders: makes the orders that are possible, always in the same number.
        rules: how W may be put into them.

    Raises:
        FactError: none of them can run to its end within the limits.

    """
    pairs = itertools.product(range(len(tuple(orders(problem)))), range(len(rules)))
    # The first orders and rules come before the later ones, as not all of them may be tried.
    choices = [(place, rules[number]) for place, number in sorted(pairs, key=lambda pair: (sum(pair), pair))]
    if len(choices) > max(_fills(problem), _FINALISTS):
        # Enough micro-batches to fill the pipeline, run a while and drain it.
        few = min(problem.num_microbatches, 3 * problem.pp)
        shorter = dataclasses.replace(problem, num_microbatches=few)
        tried = choices[: max(_fills(shorter), _FINALISTS)]
        choices = [choice for _, choice in _ranked(shorter, orders, tried)][:_FINALISTS]
    ranked = _ranked(problem, orders, choices)
    all_orders = tuple(orders(problem))
    best_of: dict[int, tuple[DraftSchedule, FillRules]] = {}
    for draft, (place, rule) in ranked:
        best_of.setdefault(place, (draft, rule))
    drafts = [
        polish(problem, all_orders[place], rule, draft, _fills(problem) // (4 * _KEPT))
        for place, (draft, rule) in list(best_of.items())[:_KEPT]
    ]
    best = min(drafts, key=lambda draft: draft.score_s(problem))
    if not best.complete:
        raise FactError("no order of this schedule runs to its end within the memory limit")
    return best


def polish(
    problem: SchedulingProblem, order: PassOrder, rules: FillRules, draft: DraftSchedule, fills: int
) -> DraftSchedule:
    """Let ranks wait where something that was put into a gap delays the critical path, as long as that helps.

    Runs the order at most `fills` times.
    """
    patient: frozenset[Action] = frozenset()
    while draft.complete and fills > 0:
        waits = [wait for wait in _waits(problem, draft) if not wait <= patient]
        tries = [patient.union(*waits), *(patient | wait for wait in waits[:_TRIES])] if waits else []
        for tried in tuple(dict.fromkeys(tries))[:fills]:
            fills -= 1
            other = fill(problem, order, rules, tried)
            if other.score_s(problem) < draft.score_s(problem) - _SAME * draft.makespan_s:
                draft, patient = other, tried
                break
        else:
            return draft
    return draft


def _fills(problem: SchedulingProblem) -> int:
    """How often the actions of a problem may be run."""
    return max(_ACTIONS // (3 * problem.pp * problem.vpp * problem.num_microbatches), 1)


def _ranked(
    problem: SchedulingProblem,
    orders: Callable[[SchedulingProblem], Iterable[PassOrder]],
    choices: Sequence[Choice],
) -> list[tuple[DraftSchedule, Choice]]:
    """Drafts of the choices, the shortest first."""
    made = tuple(orders(problem))
    seen: dict[tuple[PassOrder, FillRules], tuple[DraftSchedule, Choice]] = {}
    for place, rule in choices:
        if (made[place], rule) not in seen:
            seen[made[place], rule] = (fill(problem, made[place], rule), (place, rule))
    return sorted(seen.values(), key=lambda found: found[0].score_s(problem))


def _waits(problem: SchedulingProblem, draft: DraftSchedule) -> Iterator[frozenset[Action]]:
    """For each link on the critical path, the actions before it that could have started but for a W before them."""
    where = {action: (rank, place) for rank, ran in enumerate(draft.ranks) for place, (_, _, action) in enumerate(ran)}
    lengths = [ran[-1][1] - (0.0 if problem.objective == "makespan" else ran[0][0]) for ran in draft.ranks]
    rank = lengths.index(max(lengths))
    place = len(draft.ranks[rank]) - 1
    while True:
        # To where the busy time of the rank begins that the action belongs to.
        while _follows(draft.ranks[rank], place):
            place -= 1
        cause = _cause(problem, draft.ranks[rank][place][2])
        if cause is None:
            return
        rank, place = where[cause]
        ran = draft.ranks[rank]
        after_weight = place
        while _follows(ran, after_weight) and ran[after_weight - 1][2].kind != "W":
            after_weight -= 1
        if _follows(ran, after_weight):
            yield frozenset(action for _, _, action in ran[after_weight : place + 1])


def _follows(ran: tuple[Ran, ...], place: int) -> bool:
    """Whether an action starts as the one before it ends."""
    return place > 0 and ran[place - 1][1] >= ran[place][0] - _SAME


def _cause(problem: SchedulingProblem, action: Action) -> Action | None:
    """The action of another stage, or the forward of the last, whose result an action needs; none for a W."""
    stage, kind, microbatch = action
    if kind == "W" or (kind == "F" and stage == 0):
        return None
    if kind == "F":
        return Action(stage - 1, "F", microbatch)
    last = problem.pp * problem.vpp - 1
    return Action(last, "F", microbatch) if stage == last else Action(stage + 1, kind, microbatch)
