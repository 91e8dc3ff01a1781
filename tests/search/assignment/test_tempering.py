"""Pipette's moves are bijections of a line, and lines follow the flows."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from search.problems import ring_and_path

from pipette_launch.search.assignment import tempering
from pipette_launch.search.assignment.problem import Flows


@given(st.integers(0, 10_000), st.integers(2, 12))
def test_a_move_keeps_every_place(seed: int, seats: int) -> None:
    """Each seat takes the place of some seat, and no two that of the same."""
    rng = np.random.default_rng(seed)
    from_KQ = tempering.moves(np.array([rng.permutation(seats) for _ in range(3)]), 20, rng)

    assert np.sort(from_KQ, axis=1).tolist() == [list(range(seats))] * 20


def test_a_move_follows_its_line() -> None:
    """On the line 2-0-3-1 every move of 0-1-2-3 is the same with seats renamed."""
    line = np.array([2, 0, 3, 1])
    plain_KQ = tempering.moves(np.arange(4)[None], 50, np.random.default_rng(0))
    named_KQ = tempering.moves(line[None], 50, np.random.default_rng(0))

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
