"""Page sections on the machines: ranks of each host, layer times, faults, links, and islands of fast links."""

# H = hosts (or the devices of a single host), B = blocks of hosts that are drawn as one.

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost.compute.device_model import case_of
from pipette_launch.facts import Measurements, Plan
from pipette_launch.report.measured import layer_times, pass_times_s
from pipette_launch.report.page.tables_and_bars import Segment, Table, bar, spaced
from pipette_launch.report.plan import rank_ranges
from pipette_launch.search.near_hosts import tiers_of
from pipette_launch.text import rate_text, seconds_text

MOST_ROWS = 128
"""Largest number of hosts with a drawn row of ranks. On larger jobs, each host is drawn as a small square."""
MOST_HOSTS = 2048
"""Largest number of hosts that the page draws and lists."""
MOST_STAGES_NAMED = 32
PASSES = ("forward", "backward")
MOST_CELLS = 64
"""Largest number of rows of a matrix. On larger jobs, a row stands for several neighbouring hosts, and shows their
slowest link."""
LEVELS = 7
Floats = NDArray[np.float64]


def placement_view(plan: Plan) -> dict[str, Any]:
    """Return each host's ranks in the order of devices, and the runs of devices with the same pipeline stage."""
    size, layout = plan.devices_per_host, plan.chosen.layout
    hosts, rows = [], []
    for index, name in enumerate(plan.hosts[:MOST_HOSTS]):
        ranks = plan.chosen.placement[index * size : (index + 1) * size]
        stages = [layout.cell_of(rank).pp for rank in ranks]
        listed, named = rank_ranges(ranks), " ".join(map(str, dict.fromkeys(stages)))
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
        "legend": spaced(layout.pp, MOST_STAGES_NAMED),
        "table": Table("Ranks of each host", ("host", "ranks", "stages"), rows),
    }


def layers_view(plan: Plan, measurements: Measurements | None) -> dict[str, Any] | None:
    """Draw the times of the layers that the plan's configurations run; None if no layer was timed."""
    timed = layer_times(measurements) if measurements else {}
    shown = {case_of(choice.layout) for choice in (plan.chosen, *plan.alternatives, plan.own)}
    used = {key: (times, pass_times_s(times)) for key, times in timed.items() if key[0] in shown}
    if not used:
        return None
    longest_s = max(sum(span_s) for _, span_s in used.values())
    bars, rows = [], []
    for (case, part), (times, span_s) in used.items():
        name = f"{part.replace('_', ' ')}, tp{case.tp} cp{case.cp} mbs{case.micro_batch_size}"
        segments = [Segment(one, seconds, seconds_text(seconds)) for one, seconds in zip(PASSES, span_s, strict=True)]
        slowest_s = max(sum(pass_times_s([time])) for time in times)
        if sum(span_s) > 0:
            label = f"{name}{' (chosen)' if case == case_of(plan.chosen.layout) else ''}"
            bars.append(bar(label, segments, kinds=PASSES, whole=longest_s, total=seconds_text(sum(span_s))))
        rows.append((name, *(one.text for one in segments), seconds_text(slowest_s), len(times), times[0].source))
    table = Table("Layer times", ("layer", *PASSES, "both on the slowest slot", "slots", "source"), rows)
    if plan.provenance.source == "imagined":
        table = Table(table.caption, table.head[:3], [row[:3] for row in rows])
    return {"bars": bars, "hidden": len(timed) - len(used), "table": table}


def health_table(measurements: Measurements | None) -> Table | None:
    """Return a table with a row for each fault; None without faults. Faults that exclude a host come first."""
    rows = [
        (
            f"{one.host} → {one.other_host}" if one.other_host else one.host,
            one.device,
            one.kind.replace("-", " "),
            one.figure,
            one.peers,
            one.advice,
        )
        for one in sorted(measurements.verdicts if measurements else (), key=lambda one: not one.is_sick)
    ]
    return Table("Problems", ("where", "device", "problem", "seen", "its peers", "what to do"), rows) if rows else None


def links_view(plan: Plan, measurements: Measurements | None) -> dict[str, Any] | None:
    """Return the matrix of links in host order and in the plan's order, with scale and table; None without links."""
    if measurements is None:
        return None
    cluster, size = measurements.cluster, plan.devices_per_host
    between = len(cluster.hosts) > 1
    places, each = ("hosts", size) if between else ("devices", 1)
    links = cluster.between_hosts if between else cluster.within_host[0]
    count, rates = links.size, links.bandwidth_bytes_per_s
    if count < 2:
        return None
    names = [host.name for host in cluster.hosts] if between else [f"device {index}" for index in range(count)]
    before = list(range(count))
    after = sorted(before, key=lambda index: min(plan.chosen.placement[index * each : (index + 1) * each]))
    own = rates[~np.eye(count, dtype=bool)]
    slowest, fastest = float(own.min()), float(own.max())
    # The scale spans at least a factor of 2, so that small differences do not look large.
    scale = (min(slowest, fastest / 2), fastest)
    # Islands (groups of fast links) are the groups of near hosts that the planner also uses.
    tiers = tiers_of(links)
    islands = sorted(sorted(hosts.tolist()) for hosts in tiers.runs(0)) if tiers.num_tiers else []
    island_of = {place: number for number, island in enumerate(islands) for place in island}
    titles = [("In torchrun's order", before), ("In the order of the plan's ranks", after)]
    matrices = [
        _matrix(title, rates, names, order, scale=scale, island_of=island_of)
        for title, order in titles[: 1 if after == before else 2]
    ]
    rows = [_row(rates, names, index) for index in range(min(count, MOST_ROWS))]
    step = (scale[1] / scale[0]) ** (1 / LEVELS)
    levels = [
        f"{rate_text(scale[0] * step**one)} to {rate_text(scale[0] * step ** (one + 1))}" for one in range(LEVELS)
    ]
    return {
        "places": places,
        "matrices": matrices,
        "is_same": after == before,
        "range": rate_text(fastest) if slowest == fastest else f"{rate_text(slowest)} to {rate_text(fastest)}",
        "legend": [one for one in enumerate(levels) if any(matrix["paths"][one[0]] for matrix in matrices)],
        "islands": [
            names[one[0]] if len(one) == 1 else f"{names[one[0]]} … {names[one[-1]]} ({len(one)})" for one in islands
        ],
        "table": Table(f"Links from each of the {places}", ("from", "slowest", "to", "median", "fastest"), rows),
        "hidden": count - len(rows),
    }


def _matrix(
    title: str,
    rates_HH: Floats,
    names: list[str],
    order: list[int],
    *,
    scale: tuple[float, float],
    island_of: Mapping[int, int],
) -> dict[str, Any]:
    """Sort hosts by `order`, and join neighbouring hosts into blocks. Each block shows its slowest link's rate."""
    least = math.ceil(len(order) / MOST_CELLS)
    largest = max(np.bincount(list(island_of.values())), default=0)
    # A block has the least number of hosts that gives at most MOST_CELLS rows, or a larger number that divides the
    # largest island.
    size = next((size for size in range(least, largest + 1) if largest % size == 0), least)
    starts = list(range(0, len(order), size))
    blocks = [order[first : first + size] for first in starts]
    ordered = rates_HH[np.ix_(order, order)]
    np.fill_diagonal(ordered, np.inf)
    rates_BB = np.minimum.reduceat(np.minimum.reduceat(ordered, starts, axis=0), starts, axis=1)
    # Levels are equal steps of the rate's logarithm: the slowest rate has level 0, and a block without links has level
    # -1.
    place_BB = np.log(np.minimum(rates_BB, scale[1]) / scale[0]) / math.log(scale[1] / scale[0])
    level_BB = np.where(np.isinf(rates_BB), -1, np.minimum(place_BB * LEVELS, LEVELS - 1).astype(np.int64))
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


def _row(rates_HH: Floats, names: list[str], index: int) -> tuple[str, ...]:
    rates, others = np.delete(rates_HH[index], index), [*names[:index], *names[index + 1 :]]
    slowest, median, fastest = (rate_text(float(rate)) for rate in (rates.min(), np.median(rates), rates.max()))
    return names[index], slowest, others[int(rates.argmin())], median, fastest
