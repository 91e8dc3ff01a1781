"""The front door: every name, its numbers, and why others are refused."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import mean

import numpy as np
import pytest
from c_for_tests import in_c
from event_loop import bubble_rate, drawn_stages
from gpu_rules.nccl import Pipeline, batched_by_moments, seconds_of, together
from hypothesis import HealthCheck, given, settings
from hypothesis import settings as examples
from hypothesis import strategies as st
from schedule_words import peak_live, splits_backward

from pipette_launch.cost.memory import peak as closed_form
from pipette_launch.cost.pipeline import engine
from pipette_launch.cost.pipeline.engine import Engine, StageTimes, critical_counts, simulate
from pipette_launch.cost.pipeline.extra import SCHEDULES, StreamEngine, named_schedule, peak_live_bytes
from pipette_launch.errors import FactError, LayoutError
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.schedule import Schedule, interleaved_zero_bubble, programs, schedule_of

CHUNKS = {"one": 1, "two": 2, "several": 3}


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(2, 4), st.integers(1, 3), st.booleans(), st.randoms())
@examples(max_examples=60)
def test_every_schedule_is_complete_and_keeps_its_promises(
    name: str, pp: int, rounds: int, timed: bool, rng: random.Random
) -> None:
    """A schedule checks that it is complete; besides it runs without deadlock, splits as told and keeps to its peak."""
    known = SCHEDULES[name]
    vpp = CHUNKS[known.chunks]
    times = drawn_stages(pp * vpp, rng)
    schedule = named_schedule(name, pp=pp, vpp=vpp, num_microbatches=rounds * pp, times=times if timed else None)

    assert name == schedule.name
    assert splits_backward(schedule) == known.splits_backward
    assert Engine(schedule).timeline(times).makespan_s > 0
    assert max(peak_live(schedule)) <= known.peak(pp, vpp, pp) * vpp


@pytest.mark.parametrize(
    ("name", "vpp", "group", "expected"),
    [
        ("1f1b", 1, None, 8),
        ("eager-1f1b", 1, None, 15),
        ("interleaved-1f1b", 2, 8, (8 * 3 - 1) / 2),
        ("interleaved-1f1b", 4, 8, (8 * 5 - 1) / 4),
        ("interleaved-1f1b", 2, 12, (14 + 12 + 1) / 2),
        ("gis", 2, 8, 8),
        ("gis", 2, 4, 6),
        ("gis", 4, 4, 5),
        ("gis", 4, 6, 6.5),
        ("zb-h1", 1, None, 8),
        ("interleaved-zb", 2, None, 8),
        ("zb-1p", 1, None, 8),
        ("v-zb", 2, None, 8),
        ("v-half", 2, None, 5),
        ("v-min", 2, None, 4),
        ("1f1b-v", 2, None, 6),
    ],
)
def test_published_peaks(name: str, vpp: int, group: int | None, expected: float) -> None:
    """Micro-batches that the fullest of eight ranks keeps, as the papers say: reached, not only allowed."""
    schedule = named_schedule(name, pp=8, vpp=vpp, num_microbatches=48, group_size=group)

    assert expected == max(peak_live(schedule)) / vpp
    assert expected == SCHEDULES[name].peak(8, vpp, group or 8)


@pytest.mark.parametrize(
    ("name", "vpp", "group", "times", "expected"),
    [
        ("1f1b", 1, None, (1, 1, 1, 0), 0.179),
        ("1f1b", 1, None, (10.4, 10.2, 7.7, 0.41), 0.200),
        ("1f1b", 1, None, (10, 13, 10, 3), 0.292),
        ("eager-1f1b", 1, None, (10.4, 10.2, 7.7, 0.41), 0.184),
        ("eager-1f1b", 1, None, (10, 13, 10, 3), 0.205),
        ("interleaved-1f1b", 2, None, (10.4, 10.2, 7.7, 0.41), 0.109),
        ("interleaved-1f1b", 4, None, (10, 13, 10, 3), 0.209),
        ("interleaved-zb", 2, None, (1, 1, 1, 0), 0.035),
        ("interleaved-zb", 2, None, (10.4, 10.2, 7.7, 0.41), 0.062),
        ("interleaved-zb", 2, None, (10, 16, 7, 0.5), 0.074),
        ("gis", 2, 8, (1, 1, 1, 0), 0.068),
        ("gis", 2, 8, (10.4, 10.2, 7.7, 0.41), 0.082),
        ("gis", 4, 8, (10, 16, 7, 0.5), 0.058),
        ("gis", 4, 8, (10, 13, 10, 3), 0.313),
        ("gis", 2, 4, (10.4, 10.2, 7.7, 0.41), 0.108),
        ("gis", 4, 4, (10, 13, 10, 3), 0.401),
    ],
)
def test_counted_orders_have_the_bubbles_simulated_elsewhere(
    name: str, vpp: int, group: int | None, times: tuple[float, float, float, float], expected: float
) -> None:
    """P 8, n 32: to the three digits of an independent simulation (0.1085 was printed as .108)."""
    forward_s, input_s, weight_s, hop_s = times
    stages = 8 * vpp
    stage_times = StageTimes(
        forward_s=(forward_s / vpp,) * stages,
        backward_s=((input_s + weight_s) / vpp,) * stages,
        input_s=(input_s / vpp,) * stages,
        weight_s=(weight_s / vpp,) * stages,
        forward_hop_s=(hop_s,) * (stages - 1),
        backward_hop_s=(hop_s,) * (stages - 1),
    )
    schedule = named_schedule(name, pp=8, vpp=vpp, num_microbatches=32, group_size=group)

    assert bubble_rate(simulate(schedule, stage_times)) == pytest.approx(expected, abs=0.00055)


@pytest.mark.parametrize(
    ("name", "asked", "reason"),
    [
        ("1f1p", {}, "did you mean 1f1b"),
        ("pipedream", {}, "there are 1f1b, eager-1f1b"),
        ("1f1b", {"vpp": 2}, "one chunks on each rank, got vpp=2"),
        ("v-half", {"vpp": 3}, "two chunks"),
        ("v-half", {"vpp": 2, "pp": 1}, "needs a pipeline"),
        ("gis", {"vpp": 1}, "several chunks"),
        ("1f1b", {"num_microbatches": 0}, "must be positive"),
        ("1f1b", {"group_size": 4}, "no micro-batch groups"),
        ("interleaved-1f1b", {"vpp": 2, "num_microbatches": 6}, "last group of 2"),
        ("gis", {"vpp": 2, "pp": 8, "group_size": 2}, "two groups in a row"),
    ],
)
def test_what_does_not_exist_is_refused_with_the_reason(name: str, asked: dict[str, object], reason: str) -> None:
    """The error suggests the nearest name, or names the wrong number."""
    with pytest.raises(LayoutError, match=reason):
        named_schedule(name, **{"pp": 4, "num_microbatches": 8, **asked})


def test_a_split_without_its_times_is_refused() -> None:
    """Times of whole backwards decide no split."""
    whole = StageTimes(forward_s=(1.0,) * 4, backward_s=(2.0,) * 4, forward_hop_s=(0.0,) * 3, backward_hop_s=(0.0,) * 3)
    with pytest.raises(FactError, match="v-zb splits the backward"):
        named_schedule("v-zb", pp=2, vpp=2, num_microbatches=4, times=whole)

    assert not splits_backward(named_schedule("1f1b-v", pp=2, vpp=2, num_microbatches=4, times=whole))


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 3), st.integers(0, 3), st.randoms())
def test_stock_schedules_hold_what_the_closed_form_says(
    pp: int, vpp: int, rounds: int, extra: int, rng: random.Random
) -> None:
    """Each rank's peak equals `cost.memory.peak.peak_live_bytes`, for all sizes of chunks."""
    group = pp + extra
    layout = Layout(pp=pp, vpp=vpp if pp > 1 else 1, microbatch_group_size=group if vpp > 1 and pp > 1 else 0)
    sizes = tuple(rng.randint(0, 9) for _ in range(layout.num_chunks))
    expected = tuple(
        closed_form.peak_live_bytes(pp, layout.vpp, group, rank, rounds * group, sizes[rank::pp]) for rank in range(pp)
    )

    assert expected == peak_live_bytes(schedule_of(layout, rounds * group), sizes)


def test_a_split_backward_keeps_what_the_weights_need() -> None:
    """ZB-H1 of two ranks: rank 1 holds one W's half besides the next micro-batch."""
    schedule = interleaved_zero_bubble(2, 1, 4)

    assert peak_live_bytes(schedule, (10, 10)) == (20, 20)
    assert peak_live_bytes(schedule, (10, 10), (5, 5)) == (20, 15)
    assert peak_live_bytes(schedule, (10, 10), (0, 0)) == (20, 10)
    assert peak_live_bytes(schedule, (1, 1), (10, 10)) == (11, 20)


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
    while True:
        name, pp = rng.choice(list(SCHEDULES)), rng.randint(2, 6)
        vpp = {"one": 1, "two": 2, "several": rng.randint(2, 3)}[SCHEDULES[name].chunks]
        times = drawn_times(pp * vpp, rng)
        try:
            schedule = named_schedule(name, pp=pp, vpp=vpp, num_microbatches=rng.randint(1, 16), times=times)
        except LayoutError:
            continue
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


@pytest.mark.parametrize(
    ("name", "head_s", "batched"),
    [("zb-1p", 0.0, 1.06), ("interleaved-zb", 0.0, 1.09), ("gis", 0.0, 1.09), ("v-zb", 0.3, 1.15)],
)
def test_a_late_message_holds_up_no_others(name: str, head_s: float, batched: float) -> None:
    """Eight ranks and 32 micro-batches of unequal F, I and W: one group of all messages of a moment cost this much."""
    vpp = 1 if SCHEDULES[name].chunks == "one" else 2
    stages = 8 * vpp
    heads = [0.0] * (stages - 1) + [head_s]
    forward, input_, weight = (tuple(seconds / vpp + head for head in heads) for seconds in (1.0, 1.2, 0.8))
    times = StageTimes(
        forward_s=forward,
        backward_s=tuple(one + other for one, other in zip(input_, weight, strict=True)),
        input_s=input_,
        weight_s=weight,
        forward_hop_s=(0.05,) * (stages - 1),
        backward_hop_s=(0.05,) * (stages - 1),
    )
    schedule = named_schedule(name, pp=8, vpp=vpp, num_microbatches=32, times=times)
    free_s = simulate(schedule, times).makespan_s
    before = batched_by_moments(schedule.ranks, schedule.rank_S)
    before_s = Pipeline(before, schedule.rank_S, *seconds_of(times), stream_of=together).run()

    now_s = StreamEngine(replace(schedule, times=times.expected)).timeline(times).makespan_s

    assert free_s <= now_s <= 1.001 * free_s
    assert batched * free_s <= before_s
