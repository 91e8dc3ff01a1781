"""The machines: ranks host by host, layer times, and what is amiss."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

from pipette_launch.facts import Choice, ComputeTime, Measurements, Plan
from pipette_launch.facts.measurements import LAYERS
from pipette_launch.report.choice import rank_ranges
from pipette_launch.report.page.pieces import Segment, Table, bar
from pipette_launch.text import seconds_text

MOST_ROWS = 128
"""Hosts that have a row with every rank; of more, each is a small square."""
MOST_HOSTS = 2048
"""Hosts that are drawn and listed at all."""
MOST_STAGES_NAMED = 32
PASSES = ("forward", "backward")


def placement_view(plan: Plan) -> dict[str, Any]:
    """Return hosts with the ranks of their devices, and runs of devices that hold the same pipeline stage."""
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
    """Return all of the first numbers, or evenly spaced ones with both ends."""
    if count <= most:
        return list(range(count))
    return sorted({round(index * (count - 1) / (most - 1)) for index in range(most)})


def layers_view(plan: Plan, measurements: Measurements | None) -> dict[str, Any] | None:
    """Draw the layers that the plan's configurations run; None where no layer was timed."""
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
    """Return the forward and the backward of one micro-batch, the medians over slots."""
    forward_s = statistics.median(time.forward.median_s for time in times)
    return forward_s, statistics.median(time.input_grad.median_s + time.weight_grad.median_s for time in times)


def health_table(measurements: Measurements | None) -> Table | None:
    """One row for each problem, what may leave a host out first; None where there is none."""
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
