"""Pipette's moves are bijections of a line, and lines follow the flows."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search.problems import any_flows, ring_and_path
from search.toys import after, never

from pipette_launch.search.assignment import tempering
from pipette_launch.search.assignment.problem import Arrangement, Flows


def run(flows: Flows, *, moves: int, seed: int = 0, is_late: Callable[[], bool] = never) -> Arrangement:
    """Temper from seat order."""
    return tempering.temper(
        flows,
        np.arange(flows.num_seats),
        moves=moves,
        rng=np.random.default_rng(seed),
        is_late=is_late,
    )


@given(st.integers(0, 10_000), st.integers(2, 30), st.integers(0, 3_000))
@settings(max_examples=30, deadline=None)
def test_it_never_returns_worse_than_its_start(seed: int, seats: int, moves: int) -> None:
    """Whatever the problem, the result is a bijection that costs what is said, and at most what the start did."""
    flows = any_flows(np.random.default_rng(seed), seats)
    found = run(flows, moves=moves, seed=seed)

    assert list(range(flows.num_seats)) == sorted(found.place_Q.tolist())
    assert flows.cost(found.place_Q) == found.cost_s <= flows.cost(np.arange(flows.num_seats))


@given(st.integers(0, 10_000), st.integers(2, 24), st.integers(0, 3_000), st.integers(0, 3_000))
@settings(max_examples=30, deadline=None)
def test_more_moves_are_never_worse(seed: int, seats: int, moves: int, more: int) -> None:
    """The walk does not depend on how many moves are allowed."""
    flows = any_flows(np.random.default_rng(seed), seats)

    assert run(flows, moves=moves + more).cost_s <= run(flows, moves=moves).cost_s


@given(st.integers(0, 10_000), st.integers(2, 6))
@settings(max_examples=15, deadline=None)
def test_few_seats_end_at_the_optimum(seed: int, seats: int) -> None:
    """With moves enough the result is the best of all bijections."""
    flows = any_flows(np.random.default_rng(seed), seats)

    assert run(flows, moves=20_000).cost_s == min(flows.cost(place) for place in permutations(range(seats)))


def test_the_same_arguments_give_the_same_answer() -> None:
    """Chance comes from the generator that is passed alone."""
    flows = any_flows(np.random.default_rng(3), 20)

    assert run(flows, moves=5_000).place_Q.tolist() == run(flows, moves=5_000).place_Q.tolist()


def test_a_past_deadline_returns_the_start() -> None:
    """Without time nothing is tried, and nothing is lost."""
    flows = any_flows(np.random.default_rng(1), 20)

    assert list(range(20)) == run(flows, moves=100_000, is_late=after(0)).place_Q.tolist()


@pytest.mark.parametrize("seats", [20, 60])
def test_a_hidden_ring_is_found(seats: int) -> None:
    """Links are fast along one hidden ring only; rings and paths in any order are brought onto it."""
    hidden = np.random.default_rng(4).permutation(seats)
    seconds_HH = np.full((seats, seats), 3.0)
    seconds_HH[hidden, np.roll(hidden, -1)] = seconds_HH[np.roll(hidden, -1), hidden] = 1.0
    flows = ring_and_path(seconds_HH)

    assert run(flows, moves=60_000).cost_s < 0.7 * flows.cost(np.arange(seats))


@given(st.integers(0, 10_000), st.integers(2, 12))
def test_a_move_keeps_every_place(seed: int, seats: int) -> None:
    """Each seat takes the place of some seat, and no two that of the same."""
    rng = np.random.default_rng(seed)
    from_KQ = tempering.drawn_moves(np.array([rng.permutation(seats) for _ in range(3)]), 20, rng)

    assert np.sort(from_KQ, axis=1).tolist() == [list(range(seats))] * 20


def test_a_move_follows_its_line() -> None:
    """On the line 2-0-3-1 every move of 0-1-2-3 is the same with seats renamed."""
    line = np.array([2, 0, 3, 1])
    plain_KQ = tempering.drawn_moves(np.arange(4)[None], 50, np.random.default_rng(0))
    named_KQ = tempering.drawn_moves(line[None], 50, np.random.default_rng(0))

    assert line[plain_KQ].tolist() == named_KQ[:, line].tolist()


def test_the_moves_are_swap_reverse_and_migrate() -> None:
    """On four seats in a line: exactly what these moves can make of 0 1 2 3, and each of it."""
    found = set(map(tuple, tempering._sources(4_000, 4, np.random.default_rng(0)).tolist()))
    line = (0, 1, 2, 3)
    expected = {line}
    for first in range(4):
        for last in range(first, 4):
            head, segment, tail = line[:first], line[first : last + 1], line[last + 1 :]
            expected.add((*head, *segment[::-1], *tail))
            expected.add((*head, *segment[-1:], *segment[1:-1], *segment[:1], *tail) if last > first else line)
            for cut in range(1, len(segment)):
                expected.add((*head, *segment[cut:], *segment[:cut], *tail))
                expected.add((*head, *segment[cut:], *segment[:cut][::-1], *tail))

    assert expected == found


def test_lines_follow_rings_and_paths() -> None:
    """Two pipelines 0-1-2 and 3-4-5 and rings through them: seat order, and down the stages."""
    base = ring_and_path(np.ones((6, 6)))
    fields = {name: getattr(base, name) for name in Flows.__dataclass_fields__}
    flows = Flows(
        **{
            **fields,
            "seconds_THH": np.ones((2, 6, 6)),
            "sender_F": np.array([0, 1, 3, 4, 0, 1, 2]),
            "receiver_F": np.array([1, 2, 4, 5, 3, 4, 5]),
            "type_F": np.array([0, 0, 0, 0, 1, 1, 1]),
            "weight_F": np.ones(7),
            "group_F": np.zeros(7, dtype=np.int64),
        }
    )

    assert [[0, 1, 2, 3, 4, 5], [0, 3, 1, 4, 2, 5]] == tempering.lines(flows).tolist()
