"""Predicted and measured steps of a plan as a trace for Perfetto: JSON in Chrome's trace event format.

Every event with a duration is a complete event (`ph` is `X`) with its start `ts` and duration `dur` in microseconds. A
process (`pid`) is one view, such as the predicted step, and a thread (`tid`) is one track of the view.
"""

# A = actions.
# A = actions of all pipeline ranks.

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np

from pipette_launch.errors import PlanError
from pipette_launch.facts import Choice, ComputeTime, Links, Measurements, Plan
from pipette_launch.facts.outcome import Outcome, ProfiledRank
from pipette_launch.planning.picture import DrawnStep, Picture
from pipette_launch.text import rate_text, seconds_text

Event: TypeAlias = dict[str, Any]

PASSES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


def named(kind: str, pid: int, tid: int, name: str) -> Event:
    """Return the event that names a process (`pid`) or a thread (`tid`) of the trace."""
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}


def span(name: str, kind: str, at: tuple[int, int], start_s: float, end_s: float, **about: object) -> Event:
    """Return an event on a track (process, thread), rounded so that neighbouring events never overlap."""
    start_us, end_us = round(start_s * 1e6, 3), round(end_s * 1e6, 3)
    made: Event = {"name": name, "cat": kind, "ph": "X", "ts": start_us, "dur": round(max(end_us - start_us, 0.0), 3)}
    made |= {"pid": at[0], "tid": at[1]}
    return made | {"args": about} if about else made


def in_line(parts: Iterable[tuple[str, float, dict[str, object]]], kind: str, at: tuple[int, int]) -> Iterator[Event]:
    """Yield events one after the other on one track."""
    start_s = 0.0
    for name, seconds, about in parts:
        yield span(name, kind, at, start_s, start_s + seconds, **about)
        start_s += seconds


MOST_PASSES = 10_000
"""Largest number of drawn passes over all ranks. A longer step shows the first passes of each rank."""


def profile_events(pid: int, plan: Plan, step: DrawnStep, ranks: Sequence[ProfiledRank]) -> Iterator[Event]:
    """Draw the last profiled step, one track for each rank, with passes in the predicted order.

    Args:
        pid: process number of the tracks.
        plan: plan whose chosen configuration was profiled.
        step: predicted step of the chosen configuration.
        ranks: measured passes; empty draws nothing.

    Raises:
        PlanError: the measured passes belong to another configuration.

    """
    layout = plan.chosen.layout
    if not ranks:
        return
    if not {"I", "W"}.isdisjoint(step.kind_A):
        raise PlanError(f"{plan.chosen.schedule} splits its backwards, and the profiler shows no halves of them")
    drawn = []
    for one in ranks:
        if one.world_size != layout.world_size or one.rank >= layout.world_size:
            raise PlanError(
                f"the profile is of rank {one.rank} of {one.world_size}, the plan of {layout.world_size} ranks"
            )
        stage = layout.cell_of(one.rank).pp
        row = [index for index, rank in enumerate(step.rank_A) if rank == stage]
        steps, rest = divmod(len(one.kind_A), len(row))
        if rest or not steps:
            passes = f"{len(one.kind_A)} passes, no multiple of the {len(row)} of a step of {layout.words()}"
            raise PlanError(f"rank {one.rank} was profiled with {passes}: the profile is of another configuration")
        drawn.append((one, stage, row, steps))
    begins_s = min(one.start_s_A[(steps - 1) * len(row)] for one, _, row, steps in drawn)
    words = f"measured, the last of {max(map(itemgetter(3), drawn))} steps under torch's profiler, which slows the host"
    yield named("process_name", pid, 0, words)
    for tid, (one, stage, row, steps) in enumerate(drawn, 1):
        yield named("thread_name", pid, tid, f"pipeline rank {stage}, RANK {one.rank}")
        yield from islice(
            _passes(step, one, row, (steps - 1) * len(row), (pid, tid), begins_s), MOST_PASSES // len(drawn)
        )


def _passes(
    step: DrawnStep, one: ProfiledRank, row: Sequence[int], first: int, at: tuple[int, int], begins_s: float
) -> Iterator[Event]:
    """Match the k-th measured forward of a rank to its k-th predicted forward, and match backwards in the same way."""
    predicted = {kind: iter([index for index in row if step.kind_A[index] == kind]) for kind in "FB"}
    for place in range(first, first + len(row)):
        kind = one.kind_A[place]
        index = next(predicted[kind], None)
        if index is None:
            raise PlanError(f"a step of rank {one.rank} has other passes than the plan: of another configuration")
        name = f"{PASSES[kind]} {step.microbatch_A[index]}"
        start_s, end_s = one.start_s_A[place] - begins_s, one.end_s_A[place] - begins_s
        yield span(name, "pass", at, max(start_s, 0.0), max(end_s, 0.0), stage=step.stage_A[index])


MOST_TRACKS = 100
"""Largest number of tracks of layers. A track shows layers with the same sizes."""
MOST_LINKS = 300
"""Largest number of drawn links, the slowest first."""
MOST_STEPS = 200
"""Largest number of drawn measured steps."""
SHORTEST_S = 1e-9
"""Shortest drawn event; shorter events would be rounded to 0."""
MESSAGE_BYTES = 1 << 20
"""Message size of a link's event. The event's duration is the time to send a message of this size."""
AFTER = {
    "data_parallel": "gradient reduction",
    "embedding_gradients": "embedding gradients",
    "optimizer": "optimizer",
    "parameter_gather": "parameter gather",
}
CHOSEN, PROFILED, OWN, STEPS, LAYERS, LINKS = range(1, 7)
"""Process numbers (`pid`) of the views in the trace."""


def trace_text(
    plan: Plan,
    measurements: Measurements | None,
    picture: Picture | None,
    outcome: Outcome | None = None,
    profiled: Sequence[ProfiledRank] = (),
) -> str:
    """Return the trace of a plan as JSON text.

    Args:
        plan: plan whose steps the trace shows.
        measurements: measurements that priced the plan; None leaves out layers and links.
        picture: passes of the plan's steps; None leaves out the passes.
        outcome: outcome of the plan's training; None if there was no training.
        profiled: measured passes of some ranks of the chosen configuration.

    Raises:
        PlanError: the measured passes belong to another plan.

    """
    left_out: list[str] = []
    events: list[Event] = []
    if picture is not None:
        events += _step(CHOSEN, f"predicted, chosen: {_words(plan.chosen)}", picture.chosen, left_out)
        events += profile_events(PROFILED, plan, picture.chosen, profiled)
        if picture.own is not None:
            events += _step(OWN, f"predicted, yours: {_words(plan.own)}", picture.own, left_out)
    events += _steps(plan, outcome, left_out)
    if measurements is not None:
        how = "assumed" if plan.provenance.source == "imagined" else "measured"
        events += _layers(measurements, how, left_out)
        events += _links(measurements, how, left_out)
    about = {"made_by": "pipette-launch", "plan": plan.provenance.key, "left_out": left_out or ["nothing"]}
    document = {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}
    return json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n"


def _words(choice: Choice) -> str:
    return f"{choice.layout.words()}, {choice.schedule}, {seconds_text(choice.step_time_s)} a step"


def _step(pid: int, title: str, step: DrawnStep, left_out: list[str]) -> Iterator[Event]:
    """Yield a track for each pipeline rank, with passes, exposed communication, and the end of the step."""
    yield named("process_name", pid, 0, title)
    rows: dict[int, list[int]] = {rank: [] for rank in range(step.pp)}
    for index, rank in enumerate(step.rank_A):
        rows[rank].append(index)
    each = max(MOST_PASSES // step.pp, 2)
    missing = 0
    for rank, row in rows.items():
        at = pid, rank + 1
        yield named("thread_name", *at, f"pipeline rank {rank}")
        head, tail = (row, []) if len(row) <= each else (row[: each // 2], row[-(each // 2) :])
        for index in (*head, *tail):
            yield from _pass(step, index, at)
        if tail:
            gap = len(row) - len(head) - len(tail)
            missing += gap
            ends = step.end_s_A[head[-1]], step.start_s_A[tail[0]]
            yield span(f"{gap} passes are left out", "left out", at, *ends)
        yield from _after(step, at)
    if missing:
        left_out.append(f"{missing} of {len(step.rank_A)} passes of {title}, in the middle of each track")


def _pass(step: DrawnStep, index: int, at: tuple[int, int]) -> Iterator[Event]:
    kind, stage, micro_batch = step.kind_A[index], step.stage_A[index], step.microbatch_A[index]
    start_s, end_s = step.start_s_A[index], step.end_s_A[index]
    yield span(f"{PASSES[kind]} {micro_batch}", "pass", at, start_s, end_s, stage=stage)
    exposed_s = step.exposed_s_S[stage][kind != "F"]
    # Exposed communication belongs to the input gradient, because a weight gradient does not wait for communication.
    if exposed_s > 0 and kind != "W":
        yield span("exposed communication", "exposed", at, max(end_s - exposed_s, start_s), end_s)


def _after(step: DrawnStep, at: tuple[int, int]) -> Iterator[Event]:
    """Yield the events after the last backward of all ranks."""
    start_s = step.makespan_s
    for name, seconds in step.after_s:
        if seconds > SHORTEST_S:
            yield span(AFTER[name], "after", at, start_s, start_s + seconds)
        start_s += seconds


def _steps(plan: Plan, outcome: Outcome | None, left_out: list[str]) -> Iterator[Event]:
    """Yield predicted and measured whole steps of the plan, the own configuration, trials and the training."""
    tracks: list[tuple[str, Iterable[float]]] = [("chosen, predicted", (plan.chosen.step_time_s,))]
    if not (plan.keeps_own or plan.own_fault):
        tracks.append(("yours, predicted", (plan.own.step_time_s,)))
    for run in plan.trials.runs if plan.trials else ():
        words = f"{run.layout.words()}{', yours' if run.is_own else ''}"
        if run.step is not None:
            tracks.append((f"trial of {words}, predicted", [run.predicted_step_s] * len(run.step.values_s)))
            tracks.append((f"trial of {words}, measured", run.step.values_s))
    if outcome is not None:
        values_s = outcome.measured_step.values_s
        if len(values_s) > MOST_STEPS:
            left_out.append(f"{len(values_s) - MOST_STEPS} of {len(values_s)} measured steps of the training, the last")
        kept_s = values_s[:MOST_STEPS]
        tracks.append(("training, predicted", [outcome.predicted_step_s] * len(kept_s)))
        tracks.append(("training, measured", kept_s))
    yield named("process_name", STEPS, 0, "whole steps")
    for tid, (name, times_s) in enumerate(tracks, 1):
        yield named("thread_name", STEPS, tid, name)
        yield from in_line([("step", seconds, {}) for seconds in times_s], "step", (STEPS, tid))


def _layers(measurements: Measurements, how: str, left_out: list[str]) -> Iterator[Event]:
    """Yield a track for each part of the model in each timed set of sizes, with the median times of its passes."""
    shapes: dict[tuple[str, str], list[ComputeTime]] = {}
    for time in measurements.compute:
        case = time.case
        shapes.setdefault((time.part, f"tp{case.tp} cp{case.cp} mbs{case.micro_batch_size}"), []).append(time)
    if len(shapes) > MOST_TRACKS:
        left_out.append(f"{len(shapes) - MOST_TRACKS} of {len(shapes)} shapes of layers")
    yield named("process_name", LAYERS, 0, f"parts of the model, {how}, without communication")
    for tid, ((part, shape), times) in enumerate([*shapes.items()][:MOST_TRACKS], 1):
        yield named("thread_name", LAYERS, tid, f"{part.replace('_', ' ')}, {shape}")
        about: dict[str, object] = {"slots": len(times), "source": times[0].source}
        passes = [
            (PASSES["F"], [time.forward.median_s for time in times]),
            (PASSES["I"], [time.input_grad.median_s for time in times]),
            (PASSES["W"], [time.weight_grad.median_s for time in times]),
        ]
        yield from in_line(
            [(name, statistics.median(values), about) for name, values in passes], "layer", (LAYERS, tid)
        )


def _links(measurements: Measurements, how: str, left_out: list[str]) -> Iterator[Event]:
    """Yield the slowest links first, with links between hosts on one track and links inside hosts on another track."""
    cluster = measurements.cluster
    names, size = [host.name for host in cluster.hosts], cluster.devices_per_host
    between = _slowest(cluster.between_hosts, names)
    within = [
        link
        for host, links in enumerate(cluster.within_host)
        for link in _slowest(links, [cluster.slot_name(host * size + device) for device in range(size)])
    ]
    yield named("process_name", LINKS, 0, f"links, {how}: 1 MiB from one end to the other")
    for tid, (track, found) in enumerate((("between hosts", between), ("within hosts", within)), 1):
        kept = sorted(found, key=lambda link: -link[1])[:MOST_LINKS]
        if not kept:
            continue
        yield named("thread_name", LINKS, tid, f"{track}, the slowest first")
        yield from in_line(kept, "link", (LINKS, tid))
    counts = len(names) * (len(names) - 1), len(names) * size * (size - 1)
    for where, count in zip(("between hosts", "within hosts"), counts, strict=True):
        if count > MOST_LINKS:
            left_out.append(f"{count - MOST_LINKS} of {count} links {where}, the quickest")


def _slowest(links: Links, names: list[str]) -> list[tuple[str, float, dict[str, object]]]:
    """Return the slowest links, with the time (s) of a message of MESSAGE_BYTES."""
    count = len(names)
    with np.errstate(divide="ignore"):
        seconds = links.latency_s + MESSAGE_BYTES / links.bandwidth_bytes_per_s
    np.fill_diagonal(seconds, -1.0)
    pairs = [
        divmod(int(pair), count) for pair in np.argsort(-seconds, axis=None)[: min(MOST_LINKS, count * (count - 1))]
    ]
    return [
        (
            f"{names[source]} to {names[target]}",
            float(seconds[source, target]),
            {
                "latency": seconds_text(float(links.latency_s[source, target])),
                "rate": rate_text(float(links.bandwidth_bytes_per_s[source, target])),
            },
        )
        for source, target in pairs
    ]
