"""Starts for a grid of seats, pipelines by replicas: near places get compact rectangles of it, tier within tier."""

# Q = seats = rows * columns (row * columns + column), H = places, K = starts, T = types of flow, L = tiers,
# G = groups of the finest tier.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from pipette_launch.facts.layout import Floats, Ints
from pipette_launch.search.assignment.descent import Flows
from pipette_launch.search.slots import Tiers

MOST = 64
"""Starts that are priced at most."""


def best_tiled(flows: Flows, tiers: Tiers, *, rows: int, columns: int) -> Ints:
    """The cheapest way to cut the grid into rectangles that fill the groups of the tiers: the place of each seat.

    Ways are compared by the mean links between the groups of the finest tier. On single links the way that happens
    to run along good ones would win, and a search that begins there ends worse: finding good links is its business.

    Args:
        flows: the problem, whose seats are a grid in row-major order (a row: the replicas of a stage).
        tiers: of the places.
        rows: of the grid.
        columns: of the grid.

    """
    sizes = [int(np.median([len(run) for run in tiers.runs(tier)])) for tier in reversed(range(tiers.num_tiers))]
    place_KQ = np.array(list(_starts(rows, columns, tiers.order_H, sizes)), dtype=np.int64)
    if tiers.num_tiers:
        flows = replace(
            flows, seconds_THH=np.array([_mean_links(links, tiers.group_LH[0]) for links in flows.seconds_THH])
        )
    best_Q: Ints = place_KQ[int(np.argmin(flows.costs(place_KQ)))]
    return best_Q


def _mean_links(seconds_HH: Floats, group_H: Ints) -> Floats:
    """Each link replaced by the mean of those between (or within) the same groups."""
    names, at_H, size_G = np.unique(group_H, return_inverse=True, return_counts=True)
    member_GH = (at_H[None, :] == np.arange(len(names))[:, None]).astype(np.float64)
    links_HH = np.array(seconds_HH)
    np.fill_diagonal(links_HH, 0.0)
    pairs_GG = np.outer(size_G, size_G) - np.diag(size_G)
    mean_GG = member_GH @ links_HH @ member_GH.T / np.maximum(pairs_GG, 1)
    smooth_HH: Floats = mean_GG[at_H][:, at_H]
    return smooth_HH


def tiled(rows: int, columns: int, tiles: Sequence[tuple[int, int]]) -> Ints:
    """Slots in an order in which every tile of (rows, columns), coarsest first, is a run; neighbours snake along."""
    return np.array(_cut((0, rows), (0, columns), tiles, columns), dtype=np.int64)


def _starts(rows: int, columns: int, order_H: Ints, sizes: Sequence[int]) -> Iterator[Ints]:
    heights = [height for height in range(1, rows + 1) if rows % height == 0]
    for tiles in _nested(heights, columns, sizes)[:MOST]:
        place_Q = np.empty(rows * columns, dtype=np.int64)
        place_Q[tiled(rows, columns, tiles)] = order_H
        yield place_Q


def _nested(heights: Sequence[int], columns: int, sizes: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Tiles for each tier, none higher than the one around it."""
    if not sizes:
        return [[]]
    found = []
    for height in heights:
        width = max(1, min(columns, round(sizes[0] / height)))
        inner = _nested([lower for lower in heights if height % lower == 0], columns, sizes[1:])
        found += [[(height, width), *rest] for rest in inner]
    return found


def _cut(rows: tuple[int, int], columns: tuple[int, int], tiles: Sequence[tuple[int, int]], stride: int) -> list[int]:
    """Slots of a rectangle, tile by tile; along the shorter side where no tile is left."""
    if not tiles:
        down = [[row * stride + column for row in range(*rows)] for column in range(*columns)]
        if rows[1] - rows[0] > columns[1] - columns[0]:
            down = [[row * stride + column for column in range(*columns)] for row in range(*rows)]
        return [seat for line in down for seat in line]
    (height, width), inner = tiles[0], tiles[1:]
    order = []
    for band, top in enumerate(range(*rows, height)):
        lefts = list(range(*columns, width))
        for left in lefts[::-1] if band % 2 else lefts:
            bounds = (top, min(top + height, rows[1])), (left, min(left + width, columns[1]))
            order += _cut(*bounds, inner, stride)
    return order
