"""The machines: links as a matrix before and after placement, islands, ranks by host, layer times."""

# H = hosts (or the devices of a single host), B = blocks of hosts that are drawn as one.

from __future__ import annotations

import itertools
import math
import statistics
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipette_launch.facts import ComputeTime, Links, Measurements, Plan
from pipette_launch.facts.measurements import LAYERS
from pipette_launch.report.plan import rank_ranges
from pipette_launch.units import rate_text, seconds_text

MOST_CELLS = 64
"""Rows of a drawn matrix; of more hosts, neighbours are drawn as one, by their slowest link."""
LEVELS = 7
MOST_HOST_ROWS = 128
ISLAND = 0.5
"""Places belong together that a link of at least this part of the fastest one's bandwidth joins."""

Floats = NDArray[np.float64]


def links_view(plan: Plan, measurements: Measurements | None) -> dict[str, Any] | None:
    """Return both matrices, their scale and a table; None where nothing was measured or there is one place."""
    if measurements is None:
        return None
    cluster, size = measurements.cluster, plan.devices_per_host
    between = len(cluster.hosts) > 1
    links: Links = cluster.between_hosts if between else cluster.within_host[0]
    if links.size < 2:
        return None
    names = [host.name for host in cluster.hosts] if between else [f"device {index}" for index in range(links.size)]
    each = size if between else 1
    first_rank = [min(plan.chosen.placement[index * each : (index + 1) * each]) for index in range(links.size)]
    placed = sorted(range(links.size), key=lambda index: first_rank[index])
    rates = links.bandwidth_bytes_per_s
    own = rates[~np.eye(links.size, dtype=bool)]
    islands = _islands(rates)
    matrices = [
        _matrix("In the order of torchrun", rates, names, list(range(links.size))),
        _matrix("In the order of the plan's ranks", rates, names, placed),
    ]
    return {
        "places": "hosts" if between else "devices",
        "matrices": matrices if placed != list(range(links.size)) else matrices[:1],
        "is_same": placed == list(range(links.size)),
        "legend": _legend(float(own.min()), float(own.max())),
        "islands": [[names[index] for index in island] for island in islands] if len(islands) > 1 else [],
        "rows": [_row(rates, names, index) for index in range(links.size)][:MOST_HOST_ROWS],
        "hidden": max(0, links.size - MOST_HOST_ROWS),
    }


def _matrix(title: str, rates_HH: Floats, names: list[str], order: list[int]) -> dict[str, Any]:
    """Put hosts into an order and neighbours into blocks; a block has the rate of its slowest link."""
    count = min(len(order), MOST_CELLS)
    bounds = [round(index * len(order) / count) for index in range(count + 1)]
    blocks = [order[first:last] for first, last in itertools.pairwise(bounds)]
    ordered = rates_HH[np.ix_(order, order)].copy()
    np.fill_diagonal(ordered, np.inf)
    starts = bounds[:-1]
    rates_BB = np.minimum.reduceat(np.minimum.reduceat(ordered, starts, axis=0), starts, axis=1)
    known = rates_HH[~np.eye(len(order), dtype=bool)]
    level_BB = _levels(rates_BB, float(known.min()), float(known.max()))
    paths = [
        "".join(f"M{column} {row}h1v1h-1z" for row, column in zip(*np.nonzero(level_BB == level), strict=True))
        for level in range(LEVELS)
    ]
    return {
        "title": title,
        "size": count,
        "paths": paths,
        "names": [" … ".join(dict.fromkeys((names[block[0]], names[block[-1]]))) for block in blocks],
        "rates": [[None if math.isinf(rate) else float(f"{rate:.3g}") for rate in row] for row in rates_BB.tolist()],
    }


def _levels(rates: Floats, slowest: float, fastest: float) -> NDArray[np.int64]:
    """Return the level of each rate on a logarithmic scale, 0 the slowest; -1 where there is no link."""
    if fastest <= slowest:
        return np.where(np.isinf(rates), -1, LEVELS - 1)
    place = np.log(np.minimum(rates, fastest) / slowest) / math.log(fastest / slowest)
    return np.where(np.isinf(rates), -1, np.minimum(place * LEVELS, LEVELS - 1).astype(np.int64))


def _legend(slowest: float, fastest: float) -> list[tuple[int, str]]:
    if fastest <= slowest:
        return [(LEVELS - 1, rate_text(fastest))]
    step = (fastest / slowest) ** (1 / LEVELS)
    return [
        (level, f"{rate_text(slowest * step**level)} to {rate_text(slowest * step ** (level + 1))}")
        for level in range(LEVELS)
    ]


def _islands(rates_HH: Floats) -> list[list[int]]:
    """Return the groups of places that fast links join, each in its own order."""
    near = np.minimum(rates_HH, rates_HH.T) >= ISLAND * rates_HH[~np.eye(len(rates_HH), dtype=bool)].max()
    left, found = set(range(len(rates_HH))), []
    while left:
        island, edge = set(), {min(left)}
        while edge:
            island |= edge
            edge = {int(other) for one in edge for other in np.flatnonzero(near[one])} - island
        found.append(sorted(island))
        left -= island
    return found


def _row(rates_HH: Floats, names: list[str], index: int) -> tuple[str, str, str, str, str]:
    """Name a place, its slowest link and to whom, the median and the fastest of those that it sends over."""
    others = [other for other in range(len(names)) if other != index]
    rates = rates_HH[index][others]
    slowest = others[int(rates.argmin())]
    return (
        names[index],
        rate_text(float(rates.min())),
        names[slowest],
        rate_text(float(np.median(rates))),
        rate_text(float(rates.max())),
    )


def placement_view(plan: Plan) -> dict[str, Any]:
    """Return hosts with the ranks and pipeline stages of their devices; neighbours that are alike stand together."""
    size = plan.devices_per_host
    rows: list[dict[str, Any]] = []
    for index, host in enumerate(plan.hosts):
        ranks = plan.chosen.placement[index * size : (index + 1) * size]
        stages = [plan.chosen.layout.cell_of(rank).pp for rank in ranks]
        if rows and len(plan.hosts) > MOST_HOST_ROWS and rows[-1]["stages"] == stages:
            rows[-1] |= {"last": host, "count": rows[-1]["count"] + 1, "ranks": ""}
            continue
        cells = [{"rank": rank, "stage": stage} for rank, stage in zip(ranks, stages, strict=True)]
        rows.append(
            {"host": host, "last": host, "count": 1, "stages": stages, "cells": cells, "ranks": rank_ranges(ranks)}
        )
    return {"rows": rows[:MOST_HOST_ROWS], "hidden": sum(row["count"] for row in rows[MOST_HOST_ROWS:])}


def layers_view(measurements: Measurements | None) -> list[tuple[str, str, str, str, str]]:
    """Return each timed case of each kind of layer: forward, backward, recompute, median over its slots."""
    if measurements is None:
        return []
    cases: dict[tuple[object, str], list[ComputeTime]] = {}
    for time in measurements.compute:
        if time.part in LAYERS:
            cases.setdefault((time.case, time.part), []).append(time)
    rows = []
    for (_, part), times in cases.items():
        case = times[0].case
        forward_s = statistics.median(time.forward.median_s for time in times)
        backward_s = statistics.median(time.input_grad.median_s + time.weight_grad.median_s for time in times)
        rows.append(
            (
                f"tp{case.tp} cp{case.cp} mbs{case.micro_batch_size}",
                part.replace("_", " "),
                seconds_text(forward_s),
                seconds_text(backward_s),
                f"{len(times)}, {times[0].source}",
            )
        )
    return rows
