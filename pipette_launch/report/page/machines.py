"""Page sections on the machines: ranks of each host, layer times, faults, links, and islands of fast links."""

# H = hosts (or the devices of a single host), B = blocks of hosts that are drawn as one.

from __future__ import annotations

import itertools
import math
import statistics
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipette_launch.facts import Choice, ComputeTime, Links, Measurements, Plan
from pipette_launch.facts.measurements import LAYERS
from pipette_launch.report.page.tables_and_bars import Segment, Table, bar
from pipette_launch.report.plan import rank_ranges
from pipette_launch.text import rate_text, seconds_text

MOST_ROWS = 128
"""Largest number of hosts with a drawn row of ranks. If there are more hosts, each host is a small square."""
MOST_HOSTS = 2048
"""Largest number of hosts that the page draws and lists."""
MOST_STAGES_NAMED = 32
PASSES = ("forward", "backward")


def placement_view(plan: Plan) -> dict[str, Any]:
    """Return each host's ranks in the order of devices, and the runs of devices with the same pipeline stage."""
    size, layout = plan.devices_per_host, plan.chosen.layout
    hosts, rows = [], []
    for index, name in enumerate(plan.hosts[:MOST_HOSTS]):
        ranks = plan.chosen.placement[index * size : (index + 1) * size]
        stages = [layout.cell_of(rank).pp for rank in ranks]
        listed = rank_ranges(ranks)
        named = " ".join(map(str, dict.fromkeys(stages)))
        cells = list(zip(ranks, stages, strict=True))
        runs = [(stage, len(list(run))) for stage, run in itertools.groupby(stages)]
        tip = f"{name}\nranks {listed}\n{'stage' if len(set(stages)) == 1 else 'stages'} {named}"
        hosts.append({"name": name, "cells": cells, "runs": runs, "tip": tip})
        rows.append((name, listed, named))
    return {
        "hosts": hosts,
        "is_dense": len(plan.hosts) > MOST_ROWS,
        "hidden": len(plan.hosts) - len(hosts),
        "hues": [round(330 * stage / layout.pp) for stage in range(layout.pp)],
        "legend": _some(layout.pp, MOST_STAGES_NAMED),
        "table": Table("Ranks of each host", ("host", "ranks", "stages"), rows),
    }


def _some(count: int, most: int) -> list[int]:
    """Return all indices below `count`, or `most` evenly spaced indices that include both ends."""
    if count <= most:
        return list(range(count))
    return sorted({round(index * (count - 1) / (most - 1)) for index in range(most)})


def layers_view(plan: Plan, measurements: Measurements | None) -> dict[str, Any] | None:
    """Draw the times of the layers that the plan's configurations run; None if no layer was timed."""
    cases: dict[tuple[Any, str], list[ComputeTime]] = {}
    for time in measurements.compute if measurements else ():
        if time.part in LAYERS:
            cases.setdefault((time.case, time.part), []).append(time)
    shown = {_case(choice) for choice in (plan.chosen, *plan.alternatives, plan.own)}
    used = {key: times for key, times in cases.items() if (key[0].tp, key[0].cp, key[0].micro_batch_size) in shown}
    if not used:
        return None
    spans = {key: _passes(times) for key, times in used.items()}
    longest_s = max(sum(span) for span in spans.values())
    bars, rows = [], []
    chosen = _case(plan.chosen)
    for (case, part), times in used.items():
        span = spans[case, part]
        name = f"{part.replace('_', ' ')}, tp{case.tp} cp{case.cp} mbs{case.micro_batch_size}"
        is_chosen = (case.tp, case.cp, case.micro_batch_size) == chosen
        segments = [Segment(one, seconds, seconds_text(seconds)) for one, seconds in zip(PASSES, span, strict=True)]
        slowest_s = max(sum(_passes([time])) for time in times)
        if span[0] + span[1] > 0:
            label = f"{name}{' (chosen)' if is_chosen else ''}"
            bars.append(bar(label, segments, kinds=PASSES, whole=longest_s, total=seconds_text(sum(span))))
        rows.append((name, *(one.text for one in segments), seconds_text(slowest_s), len(times), times[0].source))
    table = Table("Layer times", ("layer", "forward", "backward", "both on the slowest slot", "slots", "source"), rows)
    if plan.provenance.source == "imagined":
        table = Table(table.caption, table.head[:3], [row[:3] for row in rows])
    return {"bars": bars, "hidden": len(cases) - len(used), "table": table}


def _case(choice: Choice) -> tuple[int, int, int]:
    return (choice.layout.tp, choice.layout.cp, choice.layout.micro_batch_size)


def _passes(times: list[ComputeTime]) -> tuple[float, float]:
    """Return the forward and backward times of one micro-batch, as medians over device slots."""
    forward_s = statistics.median(time.forward.median_s for time in times)
    return forward_s, statistics.median(time.input_grad.median_s + time.weight_grad.median_s for time in times)


def health_table(measurements: Measurements | None) -> Table | None:
    """Return a table with a row for each fault; None without faults. Faults that exclude a host come first."""
    verdicts = sorted(measurements.verdicts, key=lambda one: not one.is_sick) if measurements else []
    rows = [
        (
            f"{one.host} → {one.other_host}" if one.other_host else one.host,
            one.device,
            one.kind.replace("-", " "),
            one.figure,
            one.peers,
            one.advice,
        )
        for one in verdicts
    ]
    return Table("Problems", ("where", "device", "problem", "seen", "its peers", "what to do"), rows) if rows else None


MOST_CELLS = 64
"""Largest number of rows of a matrix.

If there are more hosts, neighbours share a row with their slowest link's rate.
"""
LEVELS = 7
STEP = 1.15
"""Ratio of bandwidths that separates islands of hosts: no link is between a bandwidth and STEP times this bandwidth."""

Floats = NDArray[np.float64]


def links_view(plan: Plan, measurements: Measurements | None) -> dict[str, Any] | None:
    """Return both matrices of links, their scale and a table; None without measurements, or for one host."""
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
    before = list(range(links.size))
    after = sorted(before, key=lambda index: first_rank[index])
    rates = links.bandwidth_bytes_per_s
    own = rates[~np.eye(links.size, dtype=bool)]
    slowest, fastest = float(own.min()), float(own.max())
    # A minimal range of the scale, so that small differences do not look large.
    scale = (min(slowest, fastest / 2), fastest)
    islands = islands_of(rates)
    island_of = {place: number for number, island in enumerate(islands) for place in island}
    titles = [("In torchrun's order", before), ("In the order of the plan's ranks", after)]
    rows = [_row(rates, names, index) for index in range(min(links.size, MOST_ROWS))]
    matrices = [
        _matrix(title, rates, names, order, scale=scale, island_of=island_of)
        for title, order in titles[: 1 if after == before else 2]
    ]
    return {
        "places": "hosts" if between else "devices",
        "matrices": matrices,
        "is_same": after == before,
        "range": rate_text(fastest) if slowest == fastest else f"{rate_text(slowest)} to {rate_text(fastest)}",
        "legend": [one for one in _legend(*scale) if any(matrix["paths"][one[0]] for matrix in matrices)],
        "islands": [_island_words(names, island) for island in islands],
        "table": Table(
            f"Links from each of the {'hosts' if between else 'devices'}",
            ("from", "slowest", "to", "median", "fastest"),
            rows,
        ),
        "hidden": links.size - len(rows),
    }


def _island_words(names: list[str], island: list[int]) -> str:
    return names[island[0]] if len(island) == 1 else f"{names[island[0]]} … {names[island[-1]]} ({len(island)})"


def _matrix(
    title: str,
    rates_HH: Floats,
    names: list[str],
    order: list[int],
    *,
    scale: tuple[float, float],
    island_of: dict[int, int],
) -> dict[str, Any]:
    """Sort hosts by `order`, and join neighbouring hosts into blocks. Each block shows its slowest link's rate."""
    starts = list(range(0, len(order), _hosts_in_a_block(len(order), list(island_of.values()))))
    blocks = [order[first:last] for first, last in itertools.pairwise([*starts, len(order)])]
    ordered = rates_HH[np.ix_(order, order)].copy()
    np.fill_diagonal(ordered, np.inf)
    rates_BB = np.minimum.reduceat(np.minimum.reduceat(ordered, starts, axis=0), starts, axis=1)
    level_BB = _levels(rates_BB, *scale)
    paths = [
        "".join(f"M{column} {row}h1v1h-1z" for row, column in zip(*np.nonzero(level_BB == level), strict=True))
        for level in range(LEVELS)
    ]
    return {
        "title": title,
        "size": len(blocks),
        "paths": paths,
        # A diagonal cell of one host is not a link. A diagonal cell of several hosts shows the links among these hosts.
        "diagonal": [island_of.get(block[0], -1) if len(block) == 1 else -1 for block in blocks],
        "names": [" … ".join(dict.fromkeys((names[block[0]], names[block[-1]]))) for block in blocks],
        "rates": [[None if math.isinf(rate) else float(f"{rate:.3g}") for rate in row] for row in rates_BB.tolist()],
    }


def _hosts_in_a_block(count: int, islands: list[int]) -> int:
    """Return the number of hosts in a block: the least for `MOST_CELLS`, or the largest island's next divisor."""
    least = math.ceil(count / MOST_CELLS)
    largest = max((islands.count(island) for island in set(islands)), default=0)
    return next((size for size in range(least, largest + 1) if largest % size == 0), least)


def _levels(rates: Floats, slowest: float, fastest: float) -> NDArray[np.int64]:
    """Return the level of each rate on a logarithmic scale. The slowest rate has level 0, and a missing link has -1."""
    place = np.log(np.minimum(rates, fastest) / slowest) / math.log(fastest / slowest)
    return np.where(np.isinf(rates), -1, np.minimum(place * LEVELS, LEVELS - 1).astype(np.int64))


def _legend(slowest: float, fastest: float) -> list[tuple[int, str]]:
    step = (fastest / slowest) ** (1 / LEVELS)
    return [
        (level, f"{rate_text(slowest * step**level)} to {rate_text(slowest * step ** (level + 1))}")
        for level in range(LEVELS)
    ]


def islands_of(rates_HH: Floats) -> list[list[int]]:
    """Return groups of hosts with fast links inside the group (islands); empty if the links show no islands.

    Bandwidths of different tiers differ by more than the factor `STEP`. Islands use links of the fastest tiers that
    give several islands, with at least half of all hosts in islands of two or more hosts.
    """
    count = len(rates_HH)
    both_HH = np.minimum(rates_HH, rates_HH.T)
    rates = np.log(both_HH[np.triu_indices(count, 1)])
    width = math.log(STEP) / 4
    bins = np.unique(np.floor(rates / width))
    gaps = [index for index in range(len(bins) - 1) if bins[index + 1] - bins[index] > 4]
    for index in reversed(gaps):
        islands = _joined(both_HH >= math.exp((bins[index] + 1) * width))
        together = sum(len(island) for island in islands if len(island) > 1)
        if len(islands) > 1 and 2 * together >= count:
            return islands
    return []


def _joined(near_HH: NDArray[np.bool_]) -> list[list[int]]:
    left, found = set(range(len(near_HH))), []
    while left:
        island, edge = np.zeros(len(near_HH), dtype=bool), np.zeros(len(near_HH), dtype=bool)
        edge[min(left)] = True
        while edge.any():
            island |= edge
            edge = near_HH[edge].any(axis=0) & ~island
        found.append(np.flatnonzero(island).tolist())
        left.difference_update(found[-1])
    return found


def _row(rates_HH: Floats, names: list[str], index: int) -> tuple[str, str, str, str, str]:
    """Return a row with a host, the rate and receiver of its slowest link, and its median and fastest rates."""
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
