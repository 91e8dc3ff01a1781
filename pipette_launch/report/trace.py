"""Predicted and measured steps of a plan as a trace for Perfetto: JSON in Chrome's trace event format.

Every event with a duration is a complete event (`ph` is `X`) with its start `ts` and duration `dur` in microseconds. A
process (`pid`) is one view, such as the predicted step, and a thread (`tid`) is one track of the view.
"""

# A = actions of all pipeline ranks.

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from pipette_launch.facts import Choice, ComputeTime, Links, Measurements, Plan
from pipette_launch.facts.outcome import Outcome
from pipette_launch.planning.picture import DrawnStep, Picture
from pipette_launch.text import rate_text, seconds_text

Event: TypeAlias = dict[str, Any]
Track: TypeAlias = tuple[int, int]  # Process and thread

CHOSEN, OWN, STEPS, LAYERS, LINKS = range(1, 6)
"""Process numbers (`pid`) of the views in the trace."""
PASSES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
MOST_PASSES = 10_000
"""Most drawn passes over all ranks: the first and last passes of a step."""
MOST_TRACKS = 100
"""Largest number of tracks of layers. A track shows layers with the same sizes."""
MOST_LINKS = 300
"""Largest number of drawn links, the slowest first."""
MOST_STEPS = 200
"""Largest number of drawn measured steps."""
SHORTEST_S = 1e-9
"""Shortest drawn event. Shorter events are left out, because their times would be rounded to 0."""
MESSAGE_BYTES = 1 << 20
"""Message size of a link's event. The event's duration is the time to send a message of this size."""


def trace_text(
    plan: Plan,
    measurements: Measurements | None,
    picture: Picture | None,
    outcome: Outcome | None = None,
) -> str:
    """Return the trace of a plan as JSON text.

    Without the `measurements` that priced the plan, layers and links are left out. Without a `picture`, the passes are
    left out. `outcome` belongs to the training; None without a training.
    """
    left_out: list[str] = []
    events: list[Event] = []
    if picture is not None:
        events += _step(CHOSEN, "chosen", plan.chosen, picture.chosen, left_out)
        if picture.own is not None:
            events += _step(OWN, "yours", plan.own, picture.own, left_out)
    events += _steps(plan, outcome, left_out)
    if measurements is not None:
        how = "assumed" if plan.provenance.source == "imagined" else "measured"
        events += _layers(measurements, how, left_out)
        events += _links(measurements, how, left_out)
    about = {"made_by": "pipette-launch", "plan": plan.provenance.key, "left_out": left_out or ["nothing"]}
    document = {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}
    return json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n"


def _view(pid: int, name: str) -> Event:
    return {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 0, "args": {"name": name}}


def _track(at: Track, name: str) -> Event:
    return {"ph": "M", "name": "thread_name", "pid": at[0], "tid": at[1], "ts": 0, "args": {"name": name}}


def _span(name: str, kind: str, at: Track, start_s: float, end_s: float, **about: object) -> Event:
    """Return an event with a duration, rounded so that neighbouring events never overlap."""
    start_us, end_us = round(start_s * 1e6, 3), round(end_s * 1e6, 3)
    made: Event = {"name": name, "cat": kind, "ph": "X", "ts": start_us, "dur": round(max(end_us - start_us, 0.0), 3)}
    made |= {"pid": at[0], "tid": at[1]}
    return made | {"args": about} if about else made


def _in_line(parts: Iterable[tuple[str, float, dict[str, object]]], kind: str, at: Track) -> Iterator[Event]:
    start_s = 0.0
    for name, seconds, about in parts:
        yield _span(name, kind, at, start_s, start_s + seconds, **about)
        start_s += seconds


def _step(pid: int, whose: str, choice: Choice, step: DrawnStep, left_out: list[str]) -> Iterator[Event]:
    words = f"{choice.layout.words()}, {choice.schedule}, {seconds_text(choice.step_time_s)} a step"
    title = f"predicted, {whose}: {words}"
    yield _view(pid, title)
    each, missing = max(MOST_PASSES // step.pp, 2), 0
    rank_A = np.array(step.rank_A)
    for rank in range(step.pp):
        at, row = (pid, rank + 1), np.flatnonzero(rank_A == rank).tolist()
        yield _track(at, f"pipeline rank {rank}")
        head, tail = (row, []) if len(row) <= each else (row[: each // 2], row[-(each // 2) :])
        for index in (*head, *tail):
            yield from _pass(step, index, at)
        if tail:
            gap = len(row) - len(head) - len(tail)
            missing += gap
            yield _span(f"{gap} passes are left out", "left out", at, step.end_s_A[head[-1]], step.start_s_A[tail[0]])
        start_s = step.makespan_s
        for name, seconds in step.after_s:
            if seconds > SHORTEST_S:
                after = "gradient reduction" if name == "data_parallel" else name.replace("_", " ")
                yield _span(after, "after", at, start_s, start_s + seconds)
            start_s += seconds
    if missing:
        left_out.append(f"{missing} of {len(step.rank_A)} passes of {title}, in the middle of each track")


def _pass(step: DrawnStep, index: int, at: Track) -> Iterator[Event]:
    kind, stage, micro_batch = step.kind_A[index], step.stage_A[index], step.microbatch_A[index]
    start_s, end_s = step.start_s_A[index], step.end_s_A[index]
    yield _span(f"{PASSES[kind]} {micro_batch}", "pass", at, start_s, end_s, stage=stage)
    exposed_s = step.exposed_s_S[stage][kind != "F"]
    # Exposed communication belongs to the input gradient, because a weight gradient does not wait for communication.
    if exposed_s > 0 and kind != "W":
        yield _span("exposed communication", "exposed", at, max(end_s - exposed_s, start_s), end_s)


def _steps(plan: Plan, outcome: Outcome | None, left_out: list[str]) -> Iterator[Event]:
    tracks: list[tuple[str, Sequence[float]]] = [("chosen, predicted", (plan.chosen.step_time_s,))]
    if not (plan.keeps_own or plan.own_fault):
        tracks.append(("yours, predicted", (plan.own.step_time_s,)))
    measured = [
        (f"trial of {run.layout.words()}{', yours' if run.is_own else ''}", run.predicted_step_s, run.step.values_s)
        for run in (plan.trials.runs if plan.trials else ())
        if run.step is not None
    ]
    if outcome is not None:
        values_s = outcome.measured_step.values_s
        if len(values_s) > MOST_STEPS:
            left_out.append(f"{len(values_s) - MOST_STEPS} of {len(values_s)} measured steps of the training, the last")
        measured.append(("training", outcome.predicted_step_s, values_s[:MOST_STEPS]))
    for name, predicted_s, kept_s in measured:
        tracks += [(f"{name}, predicted", [predicted_s] * len(kept_s)), (f"{name}, measured", kept_s)]
    yield _view(STEPS, "whole steps")
    for tid, (name, times_s) in enumerate(tracks, 1):
        yield _track((STEPS, tid), name)
        yield from _in_line([("step", seconds, {}) for seconds in times_s], "step", (STEPS, tid))


def _layers(measurements: Measurements, how: str, left_out: list[str]) -> Iterator[Event]:
    timed: dict[str, list[ComputeTime]] = {}
    for time in measurements.compute:
        case = time.case
        name = f"{time.part.replace('_', ' ')}, tp{case.tp} cp{case.cp} mbs{case.micro_batch_size}"
        timed.setdefault(name, []).append(time)
    if len(timed) > MOST_TRACKS:
        left_out.append(f"{len(timed) - MOST_TRACKS} of {len(timed)} sizes of layers")
    yield _view(LAYERS, f"parts of the model, {how}, without communication")
    for tid, (name, times) in enumerate([*timed.items()][:MOST_TRACKS], 1):
        yield _track((LAYERS, tid), name)
        about: dict[str, object] = {"slots": len(times), "source": times[0].source}
        fields = ("F", "forward"), ("I", "input_grad"), ("W", "weight_grad")
        medians_s = [statistics.median(getattr(one, field).median_s for one in times) for _, field in fields]
        passes = [(PASSES[kind], median_s, about) for (kind, _), median_s in zip(fields, medians_s, strict=True)]
        yield from _in_line(passes, "layer", (LAYERS, tid))


def _links(measurements: Measurements, how: str, left_out: list[str]) -> Iterator[Event]:
    cluster = measurements.cluster
    hosts, size = [host.name for host in cluster.hosts], cluster.devices_per_host
    slots = [cluster.slot_name(slot) for slot in range(len(hosts) * size)]
    within = [
        link
        for host, links in enumerate(cluster.within_host)
        for link in _slowest(links, slots[host * size : (host + 1) * size])
    ]
    yield _view(LINKS, f"links, {how}: 1 MiB from one end to the other")
    tracks = (
        ("between hosts", _slowest(cluster.between_hosts, hosts), len(hosts) * (len(hosts) - 1)),
        ("within hosts", within, len(slots) * (size - 1)),
    )
    for tid, (name, found, count) in enumerate(tracks, 1):
        if found:
            yield _track((LINKS, tid), f"{name}, the slowest first")
            kept = sorted(found, key=lambda link: -link[1])[:MOST_LINKS]
            yield from _in_line(kept, "link", (LINKS, tid))
        if count > MOST_LINKS:
            left_out.append(f"{count - MOST_LINKS} of {count} links {name}, the quickest")


def _slowest(links: Links, names: Sequence[str]) -> list[tuple[str, float, dict[str, object]]]:
    """Return the slowest links, with the time (s) of a message of MESSAGE_BYTES."""
    count = len(names)
    with np.errstate(divide="ignore"):
        seconds = links.latency_s + MESSAGE_BYTES / links.bandwidth_bytes_per_s
    np.fill_diagonal(seconds, -1.0)
    slowest = np.argsort(-seconds, axis=None)[: min(MOST_LINKS, count * (count - 1))].tolist()
    return [
        (
            f"{names[pair[0]]} to {names[pair[1]]}",
            float(seconds[pair]),
            {
                "latency": seconds_text(float(links.latency_s[pair])),
                "rate": rate_text(float(links.bandwidth_bytes_per_s[pair])),
            },
        )
        for pair in (divmod(index, count) for index in slowest)
    ]
