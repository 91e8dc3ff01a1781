"""The trace keeps to Chrome's trace event format, and tells the plan's own times."""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from pages import Drawn, drawn, many_hosts

from pipette_launch.facts import Samples
from pipette_launch.planning.picture import DrawnStep, Picture
from pipette_launch.report.trace import CHOSEN, LAYERS, LINKS, OWN, STEPS, trace_text

MOST_BYTES = 5_000_000
US = 1e6


def traced(found: Drawn) -> dict[str, Any]:
    """The trace of a plan with everything, read back."""
    return json.loads(trace_text(found.plan, found.measurements, found.picture, found.outcome))  # type: ignore[no-any-return]


def lasting(document: dict[str, Any], pid: int) -> list[dict[str, Any]]:
    """Events of a process that last."""
    return [event for event in document["traceEvents"] if event["ph"] == "X" and event["pid"] == pid]


def check(document: dict[str, Any]) -> None:
    """Hold the rules of the format, and that every track is named once and read without overlaps."""
    events = document["traceEvents"]
    named = set()
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    passes: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        assert {"name", "ph", "ts", "pid", "tid"} <= set(event)
        assert event["ph"] in {"X", "M"}
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        at = event["pid"], event["tid"]
        if event["ph"] == "M":
            assert event["name"] in {"process_name", "thread_name"}
            assert event["args"]["name"]
            assert (event["name"], at) not in named
            named.add((event["name"], at))
            continue
        assert 0 <= event["ts"] < math.inf
        assert 0 <= event["dur"] < math.inf
        span = event["ts"], event["ts"] + event["dur"]
        (passes if event["cat"] == "exposed" else tracks)[at].append(span)
    for at, spans in tracks.items():
        assert ("thread_name", at) in named
        assert ("process_name", (at[0], 0)) in named
        ordered = sorted(spans)
        for before, after in itertools.pairwise(ordered):
            assert before[1] <= after[0] + 1e-3, at
    for at, spans in passes.items():
        for start, end in spans:
            assert any(first - 1e-3 <= start and end <= last + 1e-3 for first, last in tracks[at])


def test_the_format() -> None:
    """Each event has its place, time and length; slices of a track follow each other, exchanges lie in their pass."""
    found = drawn()
    document = traced(found)
    check(document)

    assert {CHOSEN, OWN, STEPS, LAYERS, LINKS} == {event["pid"] for event in document["traceEvents"]}
    assert ["nothing"] == document["otherData"]["left_out"]


def test_times_are_the_plans() -> None:
    """Both steps end where the plan says; every pass of each rank is there, of its stage and micro-batch."""
    found = drawn()
    document = traced(found)
    for pid, choice, step in (
        (CHOSEN, found.plan.chosen, found.picture.chosen),
        (OWN, found.plan.own, found.picture.own),
    ):
        assert step is not None
        events = lasting(document, pid)
        end_us = max(event["ts"] + event["dur"] for event in events)
        assert end_us == pytest.approx(choice.step_time_s * US, rel=1e-3)
        passes = [event for event in events if event["cat"] == "pass"]
        assert len(step.rank_A) == len(passes)
        for rank in range(step.pp):
            spans = [
                end - start
                for one, start, end in zip(step.rank_A, step.start_s_A, step.end_s_A, strict=True)
                if one == rank
            ]
            drawn_us = sum(event["dur"] for event in passes if event["tid"] == rank + 1)
            assert drawn_us == pytest.approx(sum(spans) * US, rel=1e-6)
            after_us = {
                event["name"]: event["dur"] for event in events if event["cat"] == "after" and event["tid"] == rank + 1
            }
            assert sum(after_us.values()) == pytest.approx(sum(seconds for _, seconds in step.after_s) * US, abs=0.01)


def test_measured_steps_stand_beside_the_predicted_ones() -> None:
    """Of each trial and of the training, step by step."""
    found = drawn()
    document = traced(found)
    names = {
        event["tid"]: event["args"]["name"]
        for event in document["traceEvents"]
        if event["pid"] == STEPS and event["name"] == "thread_name"
    }
    lengths = defaultdict(list)
    for event in lasting(document, STEPS):
        lengths[names[event["tid"]]].append(event["dur"])

    words = found.plan.chosen.layout.words()
    predicted_us = round(found.plan.chosen.step_time_s * US, 3)
    assert [40_000, 50_000, 60_000] == lengths["training, measured"] == lengths[f"trial of {words}, measured"]
    assert [predicted_us] * 3 == pytest.approx(lengths["training, predicted"])
    assert [predicted_us] == lengths["chosen, predicted"]
    assert [round(found.plan.own.step_time_s * US, 3)] == lengths["yours, predicted"]


def test_probes_have_tracks_of_their_own() -> None:
    """A layer's passes as they were measured; links, the slowest first, with what 1 MiB takes."""
    found = drawn()
    document = traced(found)
    layer = found.measurements.compute[0]
    passes = [event for event in lasting(document, LAYERS) if event["tid"] == 1]
    links = found.measurements.cluster.between_hosts
    seconds = links.latency_s + (1 << 20) / links.bandwidth_bytes_per_s.clip(min=1e-9)
    slowest_s = max(float(seconds[i, j]) for i in range(len(seconds)) for j in range(len(seconds)) if i != j)

    assert [layer.forward.median_s, layer.input_grad.median_s, layer.weight_grad.median_s] == pytest.approx(
        [event["dur"] / US for event in passes]
    )
    assert slowest_s == pytest.approx(lasting(document, LINKS)[0]["dur"] / US)


def test_a_file_alone_still_has_its_steps() -> None:
    """Without what the plan rests on: whole steps, predicted and measured."""
    found = drawn()
    document = json.loads(trace_text(found.plan, None, None))
    check(document)

    assert {STEPS} == {event["pid"] for event in document["traceEvents"]}


def test_what_is_left_out_is_said() -> None:
    """1,280 hosts, and thousands of micro-batches: the file stays small, and tells what it lacks."""
    found = many_hosts(1280)
    ranks, each = 16, 4000
    long = DrawnStep(
        pp=ranks,
        rank_A=tuple(rank for rank in range(ranks) for _ in range(each)),
        stage_A=tuple(rank for rank in range(ranks) for _ in range(each)),
        kind_A=("F", "B") * (ranks * each // 2),
        microbatch_A=tuple(number // 2 for number in range(each)) * ranks,
        start_s_A=tuple(0.1 * number for number in range(each)) * ranks,
        end_s_A=tuple(0.1 * (number + 1) for number in range(each)) * ranks,
        exposed_s_S=((0.01, 0.02),) * ranks,
        after_s=(("optimizer", 1.0),),
    )
    ran = replace(found.outcome, measured_step=Samples(values_s=(1.0,) * 900))
    big = replace(found, picture=Picture(chosen=long, own=long, memory_bytes=()), outcome=ran)
    text = trace_text(big.plan, big.measurements, big.picture, big.outcome)
    document = json.loads(text)
    check(document)

    assert MOST_BYTES > len(text)
    said = " ".join(document["otherData"]["left_out"])
    for words in ("54016 of 64000 passes", "700 of 900 measured steps", "of 1637120 links between hosts"):
        assert words in said
    assert 401.0 * US == max(event["ts"] + event["dur"] for event in lasting(document, CHOSEN))
    assert ranks == sum(event["cat"] == "left out" for event in lasting(document, CHOSEN))
