"""Tiled orders name every seat once, tile by tile, and the cheapest is taken."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from search.problems import ring_and_path

from benchmarks.mapping import tiles
from benchmarks.mapping.tiles import best_tiled, tiled
from pipette_launch.search.slots import Tiers


@given(st.integers(1, 8), st.integers(1, 9), st.lists(st.tuples(st.integers(1, 8), st.integers(1, 9)), max_size=3))
def test_every_seat_is_named_once(rows: int, columns: int, cut: list[tuple[int, int]]) -> None:
    """Whatever the tiles, also where they do not divide the grid."""
    assert list(range(rows * columns)) == sorted(tiled(rows, columns, cut).tolist())


def test_a_tile_is_a_run() -> None:
    """Two rows of four seats in squares of two, and the same as one band of two rows."""
    assert [0, 4, 1, 5, 2, 6, 3, 7] == tiled(2, 4, [(2, 2)]).tolist()
    assert [0, 1, 2, 3, 6, 7, 4, 5] == tiled(2, 4, [(1, 2)]).tolist()


def test_near_places_get_a_tile() -> None:
    """A ring of eight along four racks of two: each rack holds two neighbours, so half of the links are short."""
    rack_H = np.array([0, 1, 2, 3, 0, 1, 2, 3])
    flows = ring_and_path(np.where(rack_H[:, None] == rack_H, 1.0, 2.0), path_weight=0.0)
    tiers = Tiers(order_H=np.argsort(rack_H, kind="stable"), by_speed=(), group_LH=rack_H[None])

    assert 4 * 1.0 + 4 * 2.0 == flows.cost(best_tiled(flows, tiers, rows=1, columns=8))


def test_links_are_smoothed_by_groups() -> None:
    """The mean of what lies between two groups, and within one; a host alone has no link of its own."""
    seconds_HH = np.array([[9.0, 1, 4], [3, 9, 6], [5, 7, 9]])

    assert [[2, 2, 5], [2, 2, 5], [6, 6, 0]] == tiles._mean_links(seconds_HH, np.array([0, 0, 1])).tolist()


def test_without_tiers_the_order_is_kept() -> None:
    """Where all places are alike, neighbours in the order of places get neighbours of the grid."""
    order_H = np.array([2, 0, 1, 3])
    tiers = Tiers(order_H=order_H, by_speed=(), group_LH=np.zeros((0, 4), dtype=np.int64))

    assert order_H.tolist() == best_tiled(ring_and_path(np.ones((4, 4))), tiers, rows=1, columns=4).tolist()
