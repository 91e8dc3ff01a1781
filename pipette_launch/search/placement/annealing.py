"""Simulated annealing over any state: it knows nothing of GPUs, and chance and clock are its arguments."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

State = TypeVar("State")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cooling:
    """Geometric cooling from `start` to `end` over `steps` steps, in parts of what the cost may change at all.

    Relative temperatures make one schedule serve a step of 10 ms and one of 10 s; Pipette's annealer drops the size
    of a change altogether, and so takes 0.1 % and 100 % for alike.
    """

    start: float
    end: float
    steps: int
    width: int = 1
    """Neighbours that are priced together at each step, of which the best is looked at."""
    patience: int = 1 << 30
    """The walk ends after so many steps without a new best."""

    def __post_init__(self) -> None:
        if not (0 < self.end <= self.start and self.steps >= 1):
            raise ValueError(
                f"cooling needs 0 < end <= start and steps >= 1, got start={self.start}, end={self.end}, "
                f"steps={self.steps}"
            )

    def temperature(self, step: int) -> float:
        """Temperature before step `step`, counted from 0."""
        return self.start * math.pow(self.end / self.start, step / self.steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class Annealed(Generic[State]):
    """The best state that was seen, what it costs, and how many steps were gone."""

    state: State
    cost: float
    steps: int


def anneal(
    start: State,
    *,
    costs: Callable[[Sequence[State]], list[float]],
    neighbour: Callable[[State, random.Random], State],
    cooling: Cooling,
    scale: float,
    rng: random.Random,
    clock: Callable[[], float],
    deadline_s: float,
) -> Annealed[State]:
    """Walk from a state to its neighbours, downhill always and uphill at times, and return the best one seen.

    It depends on the arguments and `rng` alone; the deadline only cuts it short, so more time is never worse.

    Args:
        start: where to begin; nothing worse is ever returned.
        costs: what each state costs; finite and at least 0.
        neighbour: a state one move away.
        cooling: how readily the walk goes uphill.
        scale: by how much the cost could fall at most, which is what temperatures are parts of.
        rng: the only source of chance.
        clock: seconds, on the scale of `deadline_s`.
        deadline_s: when to stop.

    """
    here, here_cost = start, costs([start])[0]
    best, best_cost, found_at = here, here_cost, 0
    for step in range(cooling.steps):
        if clock() >= deadline_s or step - found_at >= cooling.patience:
            return Annealed(state=best, cost=best_cost, steps=step)
        batch = [neighbour(here, rng) for _ in range(cooling.width)]
        priced = costs(batch)
        there_cost = min(priced)
        if _accepts(there_cost - here_cost, cooling.temperature(step) * scale, rng):
            here, here_cost = batch[priced.index(there_cost)], there_cost
            if here_cost < best_cost:
                best, best_cost, found_at = here, here_cost, step
    return Annealed(state=best, cost=best_cost, steps=cooling.steps)


def _accepts(rise: float, temperature: float, rng: random.Random) -> bool:
    """Metropolis' rule."""
    chance = rng.random()  # Drawn always, so that the walk does not depend on how costs are rounded.
    return rise <= 0 or (temperature > 0 and chance < math.exp(-rise / temperature))
