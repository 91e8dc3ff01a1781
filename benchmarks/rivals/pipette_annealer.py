"""Pipette's simulated annealing of a mapping of hosts (DATE 2024, arXiv 2405.18093).

Re-derived from its code: strategy/merge4/mh_simulated_annealing_opt.py of yimjinkyu1/date2024_pipette@a2b0683. The
state is a permutation of hosts as a matrix of pipelines by stages. Kept: the five moves with equal chances, the
acceptance that throws away how large a loss is (0.11 and 110 look alike), a cooling that turns it into greed after some
9,200 iterations, one start at random, the wall clock as the only end. Not kept: its second pricing of a state whose
cost is known, which only made it slower.
"""

# P = pipelines, S = stages.

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipette_launch.errors import FactError

Clock = Callable[[], float]
State = NDArray[np.int64]

_START = 1.0
_COOLING = 0.999
_COLDEST = 1e-4
"""Below it a worse state is never accepted."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AnnealedMapping:
    """Result of an annealing."""

    state_PS: State
    """The best state met: the host of each stage of each pipeline."""
    cost: float
    iterations: int


def anneal(
    cost: Callable[[State], float], *, pipelines: int, stages: int, seed: int, budget_s: float, clock: Clock
) -> AnnealedMapping:
    """Anneal as Pipette does, until the time is up.

    Args:
        cost: of a state; Pipette gives milliseconds, and its acceptance depends on the unit where losses are below 1.
        pipelines: rows of the state.
        stages: columns of the state; hosts = pipelines * stages.
        seed: of every draw.
        budget_s: seconds by the clock.
        clock: seconds that only grow, such as `time.monotonic`.

    Raises:
        FactError: no pipelines or no stages.

    """
    if pipelines < 1 or stages < 1:
        raise FactError(f"a mapping needs pipelines and stages, got {pipelines} and {stages}")
    deadline_s = clock() + budget_s
    rng = random.Random(seed)
    hosts = list(range(pipelines * stages))
    rng.shuffle(hosts)

    def price(order: list[int]) -> float:
        return cost(np.array(order, dtype=np.int64).reshape(pipelines, stages))

    now = least = price(hosts)
    best, temperature, iterations = hosts, _START, 0
    while len(hosts) > 1 and clock() < deadline_s:
        iterations += 1
        moved = neighbour(hosts, rng)
        after = price(moved)
        if accepts(after - now, temperature, rng):
            hosts, now = moved, after
            if now < least:
                best, least = hosts, now
        temperature *= _COOLING
    return AnnealedMapping(
        state_PS=np.array(best, dtype=np.int64).reshape(pipelines, stages), cost=least, iterations=iterations
    )


def neighbour(hosts: list[int], rng: random.Random) -> list[int]:
    """Draw one of the five moves between two places: reverse, move a host, swap, move a segment, move it reversed."""
    low, high = sorted(rng.sample(range(len(hosts)), 2))
    move = rng.randrange(5)
    if move == 0:
        return hosts[:low] + hosts[low : high + 1][::-1] + hosts[high + 1 :]
    if move == 1:
        return hosts[:low] + hosts[low + 1 : high + 1] + hosts[low : low + 1] + hosts[high + 1 :]
    if move == 2:
        swapped = hosts.copy()
        swapped[low], swapped[high] = hosts[high], hosts[low]
        return swapped
    segment, rest = hosts[low : high + 1], hosts[:low] + hosts[high + 1 :]
    at = rng.randint(0, len(rest))
    return rest[:at] + (segment if move == 3 else segment[::-1]) + rest[at:]


def accepts(loss: float, temperature: float, rng: random.Random) -> bool:
    """True if a move is taken: always without a loss, else with probability exp(-s / temperature).

    s = loss / 10^(int(log10 loss) + 1), between 0.1 and 1 where the loss is at least 1.
    """
    if loss <= 0:
        return True
    if temperature < _COLDEST:
        return False
    scaled = loss / 10.0 ** (int(math.log10(loss)) + 1)
    return rng.random() < math.exp(-scaled / temperature)
