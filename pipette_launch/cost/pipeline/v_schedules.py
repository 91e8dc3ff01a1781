"""Schedules on a V of ranks: repeated building blocks, squeezed and refilled with real times under a memory limit."""

# Slots are the times of one micro-batch's passes on one rank, in the order F of chunk 0, F of chunk 1, backward of
# chunk 1, backward of chunk 0. A block is the slots of every rank; it repeats every six units (2405.15362).

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from pipette_launch.cost.pipeline.greedy import FillRules, PassOrder, SchedulingProblem
from pipette_launch.cost.pipeline.local_search import best_draft
from pipette_launch.facts.schedule import Action, Kind, Schedule

PERIOD = 6
"""Units of work of one micro-batch on one rank: two chunks, each forward, input and weight gradient of one unit."""

Slots = tuple[int, int, int, int]
Block = tuple[Slots, ...]
Slopes = tuple[int, int, int, int]
"""Units from a rank to the next for each of the four passes."""

RULES = (
    FillRules(weight_gap=0.5),
    FillRules(weight_gap=1.0),
    FillRules(weight_gap=0.0, pull="all"),
    FillRules(weight_gap=0.25, pull="all", pull_gap=0.5),
    FillRules(weight_gap=0.75, pull="all", pull_gap=1.0),
    FillRules(weight_gap=0.75, pull="all", pull_gap=0.5, pull_first=True),
)
WHOLE_RULES = (
    FillRules(weight_gap=1.0),
    FillRules(weight_gap=1.0, pull="all"),
    FillRules(weight_gap=1.0, pull="all", pull_gap=0.5),
    FillRules(weight_gap=1.0, pull="all", pull_gap=1.0),
)

_BLOCKS = 6
"""Blocks of equal slopes that are tried."""


def v_schedule(name: str, problem: SchedulingProblem, slopes: Sequence[Slopes]) -> Schedule:
    """V-ZB, V-Half or V-Min: every possible block of its offsets, with W and squeezing by real times.

    Peaks are kept under the problem's limits, which are p, floor((p+2)/2) and floor((p+4)/3) micro-batches where no
    others are given (2405.15362).

    Raises:
        FactError: no block runs within the limits.

    """

    def orders(asked: SchedulingProblem) -> Iterator[PassOrder]:
        every = (linear_blocks(asked.pp, each)[:_BLOCKS] for each in slopes)
        for blocks in itertools.zip_longest(*every):
            yield from (order_of_block(block, asked.num_microbatches, "I") for block in blocks if block is not None)

    return best_draft(problem, orders, RULES).schedule(name, problem)


def one_forward_one_backward_v(problem: SchedulingProblem) -> Schedule:
    """1F1B-V: whole backwards on a V, with the blocks of shortest life: two thirds of 1F1B's memory.

    Raises:
        FactError: no block runs within the limits.

    """

    def orders(asked: SchedulingProblem) -> Iterable[PassOrder]:
        return [order_of_block(block, asked.num_microbatches, "B") for block in short_lived_blocks(asked.pp)]

    return best_draft(problem, orders, WHOLE_RULES).schedule("1f1b-v", problem)


def order_of_block(block: Block, num_microbatches: int, backward: Kind) -> PassOrder:
    """Repeat a block for every micro-batch and read each rank's passes in the order of their slots."""
    pp = len(block)
    ranks = []
    for rank, slots in enumerate(block):
        passes: tuple[tuple[int, int, Kind], ...] = (
            (slots[0], rank, "F"),
            (slots[1], 2 * pp - 1 - rank, "F"),
            (slots[2], 2 * pp - 1 - rank, backward),
            (slots[3], rank, backward),
        )
        timed = sorted(
            (slot + PERIOD * microbatch, Action(stage, kind, microbatch))
            for microbatch in range(num_microbatches)
            for slot, stage, kind in passes
        )
        ranks.append(tuple(action for _, action in timed))
    return tuple(ranks)


@lru_cache(maxsize=256)
def linear_blocks(pp: int, slopes: Slopes) -> tuple[Block, ...]:
    """Blocks whose passes are `slopes` units apart from rank to rank, those of the shortest life first.

    At its ends the V may wait a few units; of all such waits those remain in which no two passes of a rank ever meet.
    """
    down, up, back_down, back_up = slopes
    last = pp - 1
    blocks = []
    for waits in itertools.product(range(PERIOD), repeat=3):
        turn = down * last + 1 + waits[0]
        back = turn + up * last + 1 + waits[1]
        back_turn = back + back_down * last + 1 + waits[2]
        block = tuple(
            (down * rank, turn + up * (last - rank), back + back_down * rank, back_turn + back_up * (last - rank))
            for rank in range(pp)
        )
        if all(len({slot % PERIOD for slot in slots}) == 4 for slots in block):
            # Units that the passes of a rank are alive, on the worst rank.
            life = max(slots[3] - slots[0] + slots[2] - slots[1] for slots in block)
            blocks.append((life, block))
    return tuple(block for _, block in sorted(blocks))


Residues = tuple[int, int, int, int]
"""Slots modulo the period."""


@lru_cache(maxsize=64)
def short_lived_blocks(pp: int) -> tuple[Block, ...]:
    """Blocks of whole backwards, two units long, in which micro-batches live shortest; one for each pattern of rank 0.

    On every rank the four passes fill the period, so a rank has one of 36 patterns, and the way from a rank to the next
    is fixed by their patterns: a shortest path over the ranks.
    """
    patterns = []
    for first, second, back, last in itertools.product(range(PERIOD), repeat=4):
        used = {first, second, back, (back + 1) % PERIOD, last, (last + 1) % PERIOD}
        if len(used) == PERIOD:
            patterns.append((first, second, back, last))
    best: dict[Residues, tuple[int, tuple[Residues, ...]]] = {
        own: (_delay(own[0], own[1], 1) + _delay(own[2], own[3], 2), (own,)) for own in patterns
    }
    for _ in range(pp - 1):
        best = {
            own: min((seconds + _between(own, after[0]), (own, *after)) for seconds, after in best.values())
            for own in patterns
        }
    found = sorted((life + _delay(own[1], own[2], 1), ranks) for own, (life, ranks) in best.items())
    # Patterns that differ by a turn of the period are the same block.
    shapes = {_block_of(ranks): None for _, ranks in found}
    return tuple(shapes)


def _delay(before: int, after: int, units: int) -> int:
    """From the start of a pass of so many units to the next start of the pattern that needs its result."""
    return (after - before - units) % PERIOD + units


def _between(own: Residues, after: Residues) -> int:
    """What a step down the V adds to the life of a micro-batch: twice down, twice up."""
    forward = _delay(own[0], after[0], 1) + _delay(after[1], own[1], 1)
    return forward + _delay(own[2], after[2], 2) + _delay(after[3], own[3], 2)


def _block_of(ranks: tuple[Residues, ...]) -> Block:
    """Slots of a chain of patterns, from 0 on."""

    def slots(ways: tuple[Residues, ...], which: int, units: int, start: int) -> list[int]:
        """The slots of one pass on each rank, in the order in which it comes to them."""
        steps = (_delay(before[which], after[which], units) for before, after in itertools.pairwise(ways))
        return list(itertools.accumulate(steps, initial=start))

    back_up, first, last = ranks[::-1], ranks[0], ranks[-1]
    down = slots(ranks, 0, 1, 0)
    up = slots(back_up, 1, 1, down[-1] + _delay(last[0], last[1], 1))
    back = slots(ranks, 2, 2, up[-1] + _delay(first[1], first[2], 1))
    end = slots(back_up, 3, 2, back[-1] + _delay(last[2], last[3], 2))
    return tuple(zip(down, up[::-1], back, end[::-1], strict=True))
