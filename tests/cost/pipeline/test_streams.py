"""Steps over NCCL, against a stand-in that runs the rules of its streams."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import mean

import numpy as np
import pytest
from c_for_tests import in_c
from gpu_rules.nccl import Pipeline, seconds_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipette_launch.cost.pipeline import engine
from pipette_launch.cost.pipeline.engine import StageTimes, critical_counts, simulate
from pipette_launch.cost.pipeline.streams import StreamEngine
from pipette_launch.cost.pipeline.zero_bubble import SCHEDULES, named_schedule
from pipette_launch.facts.programs import programs
from pipette_launch.facts.schedule import Schedule


def drawn_times(num_stages: int, rng: random.Random) -> StageTimes:
    """Stages that take up to ten times as long as others, and messages of up to 0.3 of a pass."""
    forward, input_, weight = ([rng.uniform(0.2, 2) for _ in range(num_stages)] for _ in range(3))
    hops = [tuple(rng.uniform(0, 0.3) for _ in range(num_stages - 1)) for _ in range(2)]
    return StageTimes(
        forward_s=tuple(forward),
        backward_s=tuple(one + other for one, other in zip(input_, weight, strict=True)),
        input_s=tuple(input_),
        weight_s=tuple(weight),
        forward_hop_s=hops[0],
        backward_hop_s=hops[1],
    )


def drawn(rng: random.Random) -> tuple[Schedule, StageTimes]:
    """A schedule made for drawn times; its messages are ordered by them."""
    name, pp = rng.choice(sorted(SCHEDULES)), rng.randint(2, 6)
    times = drawn_times(pp * SCHEDULES[name].vpp, rng)
    schedule = named_schedule(name, pp=pp, num_microbatches=rng.randint(1, 16), times=times)
    return replace(schedule, times=times.expected), times


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1 << 30), ordered=st.sampled_from(("by these times", "by others", "by none")))
def test_a_step_takes_as_long_as_under_the_rules_of_nccl(seed: int, ordered: str) -> None:
    """The times equal the stand-in's for every order of messages; more work queues never make a step longer."""
    rng = random.Random(seed)
    schedule, times = drawn(rng)
    if ordered != "by these times":
        others = drawn_times(schedule.num_stages, rng).expected
        schedule = replace(schedule, times=others if ordered == "by others" else None)
    found = programs(schedule.ranks, schedule.rank_S, schedule.times)

    priced_s = StreamEngine(schedule).timeline(times).makespan_s

    pipelines = [Pipeline(found, schedule.rank_S, *seconds_of(times), one_queue=one) for one in (True, False)]
    assert pipelines[0].run() == pytest.approx(priced_s, rel=1e-9)
    assert pipelines[1].run() <= priced_s * (1 + 1e-9)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 30))
def test_numpy_and_c_price_alike(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """To the last digit, one pipeline or several at once."""
    schedule, times = drawn(random.Random(seed))
    durations_R, hops_R = (np.repeat(np.array(each)[:, None], 3, axis=1) for each in (times.durations_s, times.hops_s))
    found = []
    for module in (None, in_c("cost.pipeline._longest_path")):
        monkeypatch.setattr(engine, "_IN_C", module)
        made = StreamEngine(schedule)
        found.append((made.drain_s_SR(durations_R, hops_R).tolist(), made.ends_AR(durations_R, hops_R).tolist()))

    assert found[0] == found[1]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 30))
def test_the_longest_path_adds_up_to_the_makespan(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Passes and messages on it, counted by numpy and in C; starts of messages take no time and are not counted."""
    schedule, times = drawn(random.Random(seed))
    durations_R, hops_R = (np.array(each)[:, None] for each in (times.durations_s, times.hops_s))
    made = StreamEngine(schedule)
    for module in (None, in_c("cost.pipeline._longest_path")):
        monkeypatch.setattr(engine, "_IN_C", module)
        of_durations, of_hops = critical_counts(made, durations_R, hops_R)

        assert (durations_R.shape, hops_R.shape) == (of_durations.shape, of_hops.shape)
        total_s = float((of_durations * durations_R).sum() + (of_hops * hops_R).sum())
        assert total_s == pytest.approx(made.timeline(times).makespan_s)


def test_messages_ordered_by_the_stages_times_are_nearly_free() -> None:
    """Over sixty drawn pipelines; a receive that waits in an occupied stream would cost ten times as much."""
    lost = []
    for seed in range(60):
        schedule, times = drawn(random.Random(seed))
        lost.append(StreamEngine(schedule).timeline(times).makespan_s / simulate(schedule, times).makespan_s - 1)

    assert 0 <= mean(lost) <= 0.003
    assert max(lost) <= 0.04
