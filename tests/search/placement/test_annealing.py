"""The annealer finds minima, never loses the best, and is a function of its arguments."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from search.toys import Ticks

from pipette_launch.search.placement.annealing import Annealed, Cooling, anneal

COOLING = Cooling(start=0.5, end=1e-3, steps=400)


def hills(state: int) -> float:
    """A row of valleys; the deepest is at 37."""
    return abs(state - 37) + 6.0 * (state % 5 != 2)


def step(state: int, rng: random.Random) -> int:
    """One to the left or to the right."""
    return state + rng.choice((-1, 1))


def run(start: int, *, seed: int = 0, deadline_s: float = 1e9, cooling: Cooling = COOLING) -> Annealed[int]:
    """Anneal on the hills."""
    return anneal(
        start,
        costs=lambda some: [hills(state) for state in some],
        neighbour=step,
        cooling=cooling,
        scale=hills(start),
        rng=random.Random(seed),
        clock=Ticks(),
        deadline_s=deadline_s,
    )


@given(st.integers(-100, 100), st.integers(0, 1000), st.integers(1, 500))
def test_it_never_returns_worse_than_its_start(start: int, seed: int, deadline: int) -> None:
    """Whatever the start, the seed and the time, the result costs at most what the start did."""
    found = run(start, seed=seed, deadline_s=deadline)

    assert found.cost <= hills(start)
    assert hills(found.state) == found.cost


@given(st.integers(0, 1000), st.integers(1, 200), st.integers(0, 300))
def test_more_time_is_never_worse(seed: int, short: int, more: int) -> None:
    """The same seed walks the same way, and only further."""
    assert run(0, seed=seed, deadline_s=short + more).cost <= run(0, seed=seed, deadline_s=short).cost


def test_it_climbs_out_of_a_valley() -> None:
    """A greedy walk stays where it starts; the annealer does not."""
    greedy = run(32, cooling=Cooling(start=1e-12, end=1e-12, steps=400))

    assert (greedy.state, greedy.cost) == (32, 5.0)
    assert (37, 0.0) in [(run(32, seed=seed).state, run(32, seed=seed).cost) for seed in range(4)]


def test_the_same_arguments_give_the_same_walk() -> None:
    """No global chance is used."""
    random.seed(1)
    first = run(0, seed=7)
    random.seed(2)

    assert first == run(0, seed=7)


def test_a_past_deadline_returns_the_start() -> None:
    """Without time nothing is tried, and nothing is lost."""
    assert Annealed(state=5, cost=hills(5), steps=0) == run(5, deadline_s=0)


def test_cooling_goes_from_start_to_end() -> None:
    """The temperature falls geometrically."""
    cooling = Cooling(start=1.0, end=0.01, steps=2)

    assert [cooling.temperature(step) for step in (0, 1, 2)] == pytest.approx([1.0, 0.1, 0.01])


@pytest.mark.parametrize("values", [(0.1, 0.0, 5), (0.1, 0.2, 5), (0.2, 0.1, 0)])
def test_cooling_checks_itself(values: tuple[float, float, int]) -> None:
    """It must fall, stay above zero and take at least one step."""
    with pytest.raises(ValueError, match="cooling needs"):
        Cooling(start=values[0], end=values[1], steps=values[2])
