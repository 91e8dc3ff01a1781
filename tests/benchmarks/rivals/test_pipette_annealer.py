"""Pipette's annealer: its moves, its acceptance, and that it finds small optima."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.rivals import pipette_annealer
from pipette_launch.errors import FactError


class Ticks:
    """A clock that shows one more second at every look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Tick once."""
        self.now += 1.0
        return self.now


@given(st.integers(2, 12), st.integers(0, 999))
def test_every_move_keeps_every_host(hosts: int, seed: int) -> None:
    """No host is lost or doubled."""
    moved = pipette_annealer.neighbour(list(range(hosts)), random.Random(seed))

    assert list(range(hosts)) == sorted(moved)


def test_a_gain_is_always_taken_and_a_loss_by_its_digits_alone() -> None:
    """1.1 and 110 have the same chance; in the cold no loss is taken."""
    chances = [
        [pipette_annealer.accepts(loss, 0.5, random.Random(seed)) for seed in range(200)] for loss in (1.1, 110.0)
    ]

    assert chances[0] == chances[1]
    assert 100 < sum(chances[0]) < 200
    assert pipette_annealer.accepts(0.0, 1e-9, random.Random(0))
    assert not any(pipette_annealer.accepts(1e-9, 1e-5, random.Random(seed)) for seed in range(50))


def test_a_small_optimum_is_found() -> None:
    """Two pipelines of three stages over random links: the best of all 720 orders."""
    links = np.random.default_rng(3).uniform(1, 9, (6, 6))

    def cost(state_PS: np.ndarray) -> float:
        return float(links[state_PS[:, :-1], state_PS[:, 1:]].sum(axis=1).max())

    found = pipette_annealer.anneal(cost, pipelines=2, stages=3, seed=0, budget_s=3000, clock=Ticks())

    assert min(cost(np.array(order).reshape(2, 3)) for order in itertools.permutations(range(6))) == found.cost
    assert found.cost == cost(found.state_PS)
    assert 2999 == found.iterations


def test_one_host_and_no_time_are_ends() -> None:
    """A single host has one order; without time the random start is returned, the same for the same seed."""
    assert (
        0 == pipette_annealer.anneal(lambda _: 1.0, pipelines=1, stages=1, seed=0, budget_s=9, clock=Ticks()).iterations
    )
    starts = [
        pipette_annealer.anneal(lambda _: 1.0, pipelines=2, stages=4, seed=seed, budget_s=0, clock=Ticks()).state_PS
        for seed in (1, 1, 2)
    ]

    assert starts[0].tolist() == starts[1].tolist() != starts[2].tolist()


def test_nothing_to_map_is_refused() -> None:
    """A mapping without stages is an error."""
    with pytest.raises(FactError, match="needs pipelines and stages"):
        pipette_annealer.anneal(lambda _: 1.0, pipelines=1, stages=0, seed=0, budget_s=1, clock=Ticks())
