"""Schedules on a V: their blocks, their peaks, and their bubbles against what was simulated elsewhere."""

import itertools
import random

import pytest
from event_loop import EventLoop, bubble_rate, drawn_stages
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from schedule_words import peak_live

from pipette_launch.cost.pipeline.engine import Engine, simulate
from pipette_launch.cost.pipeline.named_schedules import SCHEDULES, named_schedule
from pipette_launch.cost.pipeline.timeline import StageTimes
from pipette_launch.cost.pipeline.v_schedules import PERIOD, linear_blocks, short_lived_blocks

V_NAMES = ("v-zb", "v-half", "v-min", "1f1b-v")


def split_times(pp: int, forward_s: float, input_s: float, weight_s: float, hop_s: float) -> StageTimes:
    """Two equal chunks on each rank; the times are those of a whole rank."""
    stages = 2 * pp
    return StageTimes(
        forward_s=(forward_s / 2,) * stages,
        backward_s=((input_s + weight_s) / 2,) * stages,
        input_s=(input_s / 2,) * stages,
        weight_s=(weight_s / 2,) * stages,
        forward_hop_s=(hop_s,) * (stages - 1),
        backward_hop_s=(hop_s,) * (stages - 1),
    )


@pytest.mark.parametrize(
    ("name", "times", "expected"),
    [
        ("v-zb", (1, 1, 1, 0), 0.035),
        ("v-zb", (10.4, 10.2, 7.7, 0.41), 0.053),
        ("v-zb", (10, 16, 7, 0.5), 0.070),
        ("v-zb", (10, 13, 10, 3), 0.115),
        ("v-half", (1, 1, 1, 0), 0.081),
        ("v-half", (10, 16, 7, 0.5), 0.205),
        ("v-half", (10, 13, 10, 3), 0.256),
        ("v-min", (1, 1, 1, 0), 0.123),
        ("v-min", (10.4, 10.2, 7.7, 0.41), 0.251),
        ("v-min", (10, 16, 7, 0.5), 0.408),
        ("v-min", (10, 13, 10, 3), 0.456),
        ("1f1b-v", (10, 13, 10, 3), 0.336),
    ],
)
def test_no_worse_than_simulated_elsewhere(
    name: str, times: tuple[float, float, float, float], expected: float
) -> None:
    """P 8, n 32: the bubbles of an independent simulation, at their memory or less."""
    stage_times = split_times(8, *times)
    schedule = named_schedule(name, pp=8, vpp=2, num_microbatches=32, times=stage_times)

    assert round(bubble_rate(simulate(schedule, stage_times)), 3) <= expected


@pytest.mark.parametrize(
    ("name", "times", "expected", "elsewhere"),
    [
        ("v-half", (10.4, 10.2, 7.7, 0.41), 0.121, 0.117),
        ("1f1b-v", (1, 1, 1, 0), 0.158, 0.147),
        ("1f1b-v", (10.4, 10.2, 7.7, 0.41), 0.235, 0.232),
        ("1f1b-v", (10, 16, 7, 0.5), 0.181, 0.179),
    ],
)
def test_where_others_found_better_orders(
    name: str, times: tuple[float, float, float, float], expected: float, elsewhere: float
) -> None:
    """Four entries of that table are not reached; what is reached is held."""
    stage_times = split_times(8, *times)
    schedule = named_schedule(name, pp=8, vpp=2, num_microbatches=32, times=stage_times)

    assert elsewhere < round(bubble_rate(simulate(schedule, stage_times)), 3) <= expected


@pytest.mark.parametrize("pp", range(2, 9))
def test_published_peaks(pp: int) -> None:
    """floor((p+2)/2) of V-Half, floor((p+4)/3) of V-Min, p of V-ZB, two thirds of p, rounded, of 1F1B-V."""
    expected = {"v-zb": pp, "v-half": (pp + 2) // 2, "v-min": (pp + 4) // 3, "1f1b-v": (2 * pp + 2) // 3}
    for name, peak in expected.items():
        schedule = named_schedule(name, pp=pp, vpp=2, num_microbatches=2 * pp)

        assert max(peak_live(schedule)) <= 2 * peak == 2 * SCHEDULES[name].peak(pp, 2, pp)


@given(st.sampled_from(V_NAMES), st.integers(2, 5), st.integers(1, 9), st.randoms())
@examples(max_examples=30)
def test_any_v_runs_within_its_peak(name: str, pp: int, microbatches: int, rng: random.Random) -> None:
    """Whatever the times: complete, without deadlock, and within the memory that the schedule is known for."""
    times = drawn_stages(2 * pp, rng)
    schedule = named_schedule(name, pp=pp, vpp=2, num_microbatches=microbatches, times=times)

    assert Engine(schedule).makespan_s(times) == max(EventLoop(schedule, times).run().values())
    assert max(peak_live(schedule)) <= 2 * SCHEDULES[name].peak(pp, 2, pp)


@pytest.mark.parametrize("pp", range(2, 10))
@pytest.mark.parametrize("slopes", [(3, 3, 3, 3), (1, 1, 1, 1), (2, 1, 1, 2)])
def test_passes_of_a_block_never_meet(pp: int, slopes: tuple[int, int, int, int]) -> None:
    """Repeated every six units, no two passes of a rank ask for the same unit, and each follows what it needs."""
    for block in linear_blocks(pp, slopes):
        for slots in block:
            assert len({slot % PERIOD for slot in slots}) == 4
        for before, after in itertools.pairwise(block):
            assert before[0] < after[0] < after[1] < before[1] < before[2] < after[2] < after[3] < before[3]


@pytest.mark.parametrize("pp", range(2, 10))
def test_whole_backwards_fill_the_period(pp: int) -> None:
    """Two forwards of one unit and two backwards of two leave no unit free, and each follows what it needs."""
    for block in short_lived_blocks(pp):
        for first, second, back, last in block:
            used = {first, second, back, back + 1, last, last + 1}
            assert {unit % PERIOD for unit in used} == set(range(PERIOD))
        for before, after in itertools.pairwise(block):
            assert before[0] < after[0] < after[1] < before[1] < before[2]
            assert before[2] + 2 <= after[2]
            assert after[2] + 2 <= after[3]
            assert after[3] + 2 <= before[3]


def test_v_zb_runs_in_step() -> None:
    """The first block of V-ZB on two ranks, by hand: every pass is half a period later on the next rank."""
    assert linear_blocks(2, (3, 3, 3, 3))[0] == ((0, 7, 8, 15), (3, 4, 11, 12))
