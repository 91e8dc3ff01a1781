"""Schedules on a V and with zero bubble: blocks, peaks and bubbles against published figures."""

import itertools
import random
from dataclasses import replace

import pytest
from event_loop import EventLoop, bubble_rate, drawn_stages
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from schedule_words import peak_live

from pipette_launch.cost.pipeline.engine import Engine, StageTimes, Timeline, simulate
from pipette_launch.cost.pipeline.extra import SCHEDULES, named_schedule, peak_live_bytes
from pipette_launch.cost.pipeline.extra.drafts import (
    PERIOD,
    WEIGHT_GAPS,
    FillRules,
    SchedulingProblem,
    fill,
    linear_blocks,
    order_of,
    refilled,
    short_lived_blocks,
    zero_bubble,
)
from pipette_launch.errors import FactError
from pipette_launch.facts.schedule import grouped_split, interleaved_zero_bubble, one_forward_one_backward

V_NAMES = ("v-zb", "v-half", "v-min", "1f1b-v")


def split_times(pp: int, forward_s: float, input_s: float, weight_s: float, hop_s: float) -> StageTimes:
    """Two equal chunks on each rank; the times belong to a whole rank."""
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
    """Four entries of the paper's table are not reached; the others are kept."""
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
    """For all times: complete, without deadlock, and within the schedule's known memory."""
    times = drawn_stages(2 * pp, rng)
    schedule = named_schedule(name, pp=pp, vpp=2, num_microbatches=microbatches, times=times)

    assert Engine(schedule).timeline(times).makespan_s == max(EventLoop(schedule, times).run().values())
    assert max(peak_live(schedule)) <= 2 * SCHEDULES[name].peak(pp, 2, pp)


@pytest.mark.parametrize("pp", range(2, 10))
@pytest.mark.parametrize("slopes", [(3, 3, 3, 3), (1, 1, 1, 1), (2, 1, 1, 2)])
def test_passes_of_a_block_never_meet(pp: int, slopes: tuple[int, int, int, int]) -> None:
    """Repeated every six units, two passes of a rank never use the same unit, and each follows its cause."""
    for block in linear_blocks(pp, slopes):
        for slots in block:
            assert len({slot % PERIOD for slot in slots}) == 4
        for before, after in itertools.pairwise(block):
            assert before[0] < after[0] < after[1] < before[1] < before[2] < after[2] < after[3] < before[3]


@pytest.mark.parametrize("pp", range(2, 10))
def test_whole_backwards_fill_the_period(pp: int) -> None:
    """Two forwards of one unit and two backwards of two leave no unit free, and each follows its cause."""
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


# p, n, F, B, W, c in ms, then the bubble rates of 1F1B, ZB-1p and ZB-2p (Qi et al. 2024, Zero Bubble, table 5).
PUBLISHED = [
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585, 0.0433),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674, 0.0026),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552, 0.1397, 0.0066),
    (16, 128, 11.325, 11.308, 8.109, 0.378, 0.1251, 0.0576, 0.0028),
    (32, 96, 10.419, 10.207, 7.715, 0.408, 0.2646, 0.1421, 0.0038),
    (32, 256, 10.402, 10.248, 7.698, 0.460, 0.1352, 0.0594, 0.0018),
]
CASES = [pytest.param(*row, id=f"p{row[0]}-n{row[1]}") for row in PUBLISHED]


def even_split_times(pp: int, forward_s: float, input_s: float, weight_s: float, hop_s: float) -> StageTimes:
    """Equal stages whose whole backward is the sum of its halves."""
    return StageTimes(
        forward_s=(forward_s,) * pp,
        backward_s=(input_s + weight_s,) * pp,
        input_s=(input_s,) * pp,
        weight_s=(weight_s,) * pp,
        forward_hop_s=(hop_s,) * (pp - 1),
        backward_hop_s=(hop_s,) * (pp - 1),
    )


def published_problem(pp: int, n: int, times: StageTimes, limit: int) -> SchedulingProblem:
    """As Qi et al. 2024 count: the span of a rank, and half of each micro-batch kept until its W."""
    return SchedulingProblem(
        pp=pp,
        vpp=1,
        num_microbatches=n,
        times=times,
        held_S=(1.0,) * pp,
        w_share=0.5,
        limit_P=(float(limit),) * pp,
        objective="span",
    )


def span_rate(timeline: Timeline) -> float:
    """The bubble against the longest span of one rank, as 2401.10241 counts it."""
    return bubble_rate(timeline, max(timeline.span_s_P))


@pytest.mark.parametrize(("pp", "n", "f", "b", "w", "c", "rate", "_one", "_two"), CASES)
def test_1f1b_has_the_published_rate(
    pp: int, n: int, f: float, b: float, w: float, c: float, rate: float, _one: float, _two: float
) -> None:
    """To four digits, against the longest span of one rank as published."""
    timeline = simulate(one_forward_one_backward(pp, n), even_split_times(pp, f, b, w, c))

    assert rate == round(span_rate(timeline), 4)


@pytest.mark.parametrize(("pp", "n", "f", "b", "w", "c", "_rate", "one", "_two"), CASES)
def test_zb_1p_has_the_published_rate(
    pp: int, n: int, f: float, b: float, w: float, c: float, _rate: float, one: float, _two: float
) -> None:
    """To four digits, within the published limit of p micro-batches, half of each kept until its W.

    It is also the makespan's: (p-1)(F+I-W+4c) more than the work.
    """
    times = even_split_times(pp, f, b, w, c)
    schedule = zero_bubble("zb-1p", published_problem(pp, n, times, pp))
    timeline = simulate(schedule, times)

    assert one == round(span_rate(timeline), 4)
    assert timeline.makespan_s == pytest.approx(n * (f + b + w) + (pp - 1) * (f + b - w + 4 * c))
    assert max(peak_live_bytes(schedule, (2,) * pp, (1,) * pp)) == 2 * pp


@pytest.mark.parametrize(("pp", "n", "f", "b", "w", "c", "_rate", "_one", "two"), CASES)
def test_zb_2p_is_no_worse_than_published(
    pp: int, n: int, f: float, b: float, w: float, c: float, _rate: float, _one: float, two: float
) -> None:
    """To four digits, within twice the memory."""
    times = even_split_times(pp, f, b, w, c)
    schedule = zero_bubble("zb-2p", published_problem(pp, n, times, 2 * pp))

    assert round(span_rate(simulate(schedule, times)), 4) <= two
    assert max(peak_live_bytes(schedule, (2,) * pp, (1,) * pp)) <= 2 * 2 * pp


def drawn_problem(pp: int, microbatches: int, room: float, rng: random.Random) -> SchedulingProblem:
    """Unequal stages, and a memory limit above one micro-batch."""
    held = tuple(float(rng.randint(1, 8)) for _ in range(pp))
    return SchedulingProblem(
        pp=pp,
        vpp=1,
        num_microbatches=microbatches,
        times=drawn_stages(pp, rng),
        held_S=held,
        w_share=rng.choice((0.0, 0.5, 1.0)),
        limit_P=tuple(size * (1 + room * (pp - 1)) for size in held),
        objective=rng.choice(("makespan", "span")),
    )


@given(st.integers(1, 5), st.integers(1, 9), st.floats(0, 2), st.randoms())
@examples(max_examples=40)
def test_any_zero_bubble_order_runs_within_its_limits(
    pp: int, microbatches: int, room: float, rng: random.Random
) -> None:
    """For all times, sizes and limits: complete, without deadlock, and every rank within its limit."""
    problem = drawn_problem(pp, microbatches, room, rng)
    schedule = zero_bubble("zb-1p", problem)

    ends = EventLoop(schedule, problem.times).run()
    assert Engine(schedule).timeline(problem.times).makespan_s == max(ends.values())
    sizes = tuple(int(2 * size) for size in problem.held_S)
    waiting = tuple(round(size * problem.w_share) for size in sizes)
    for peak, limit in zip(peak_live_bytes(schedule, sizes, waiting), problem.limit_P, strict=True):
        assert peak <= 2 * limit * (1 + 1e-6)


@given(st.integers(1, 5), st.integers(1, 9), st.sampled_from(WEIGHT_GAPS), st.randoms())
def test_a_draft_is_what_its_order_takes(pp: int, microbatches: int, rules: FillRules, rng: random.Random) -> None:
    """The clock of the generator and the longest path of the simulator agree."""
    problem = drawn_problem(pp, microbatches, 1.0, rng)
    draft = fill(problem, order_of(interleaved_zero_bubble(pp, 1, microbatches), microbatches), rules)

    assert draft.complete
    timeline = simulate(draft.schedule("zb", problem), problem.times)
    assert draft.makespan_s == timeline.makespan_s
    assert draft.score_s(replace(problem, objective="span")) == max(timeline.span_s_P)


def test_weights_put_anew_are_faster() -> None:
    """GIS with its W in the gaps has the bubble of interleaved zero bubble, in the memory that both need anyway."""
    schedule = grouped_split(4, 2, 8, 4)
    times = even_split_times(8, 0.5, 0.5, 0.5, 0.0)
    problem = SchedulingProblem(pp=4, vpp=2, num_microbatches=8, times=times, held_S=(0.5,) * 8, limit_P=(4.0,) * 4)
    better = refilled(schedule, problem)

    assert simulate(schedule, times).makespan_s == 8 * 3 + 3.0
    assert simulate(better, times).makespan_s == 8 * 3 + 1.5
    assert max(peak_live_bytes(better, (1,) * 8)) == 8


def test_a_limit_below_one_micro_batch_is_refused() -> None:
    """Nothing can run in it, and the message says on which rank."""
    times = even_split_times(2, 1.0, 1.0, 1.0, 0.0)
    with pytest.raises(FactError, match="rank 1 may keep"):
        SchedulingProblem(pp=2, vpp=1, num_microbatches=2, times=times, held_S=(1.0, 1.0), limit_P=(1.0, 0.5))
