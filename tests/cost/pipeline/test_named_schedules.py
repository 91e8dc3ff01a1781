"""The front door: every name, its numbers, and why others are refused."""

import random

import pytest
from event_loop import bubble_rate, drawn_stages, equal_stages
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from schedule_words import peak_live, splits_backward

from pipette_launch.cost.pipeline.engine import Engine, simulate
from pipette_launch.cost.pipeline.named_schedules import SCHEDULES, named_schedule
from pipette_launch.cost.pipeline.timeline import StageTimes
from pipette_launch.errors import FactError, LayoutError

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
    assert Engine(schedule).makespan_s(times) > 0
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
        ("pipedream", {}, "Known are gpipe, 1f1b"),
        ("1f1b", {"vpp": 2}, "one chunks on each rank, got vpp=2"),
        ("v-half", {"vpp": 3}, "two chunks"),
        ("v-half", {"vpp": 2, "pp": 1}, "needs a pipeline"),
        ("gis", {"vpp": 1}, "several chunks"),
        ("1f1b", {"num_microbatches": 0}, "must be positive"),
        ("1f1b", {"group_size": 4}, "no micro-batch groups"),
        ("1f1b", {"extra": 1}, "extra=1"),
        ("1f1b", {"limit_P": (1.0,) * 4}, "takes no memory limit"),
        ("interleaved-1f1b", {"vpp": 2, "num_microbatches": 6}, "last group of 2"),
        ("gis", {"vpp": 2, "pp": 8, "group_size": 2}, "two groups in a row"),
    ],
)
def test_what_does_not_exist_is_refused_with_the_reason(name: str, asked: dict[str, object], reason: str) -> None:
    """A wrong name gets the nearest one, wrong numbers what is wrong with them."""
    with pytest.raises(LayoutError, match=reason):
        named_schedule(name, **{"pp": 4, "num_microbatches": 8, **asked})


def test_a_split_without_its_times_is_refused() -> None:
    """Times of whole backwards decide no split."""
    whole = StageTimes(forward_s=(1.0,) * 4, backward_s=(2.0,) * 4, forward_hop_s=(0.0,) * 3, backward_hop_s=(0.0,) * 3)
    with pytest.raises(FactError, match="v-zb splits the backward"):
        named_schedule("v-zb", pp=2, vpp=2, num_microbatches=4, times=whole)

    assert not splits_backward(named_schedule("1f1b-v", pp=2, vpp=2, num_microbatches=4, times=whole))


def test_times_of_another_pipeline_are_refused() -> None:
    """Four stages' times do not order three."""
    with pytest.raises(FactError, match="3 stages on 3 ranks"):
        named_schedule("zb-1p", pp=3, num_microbatches=4, times=equal_stages(4))
