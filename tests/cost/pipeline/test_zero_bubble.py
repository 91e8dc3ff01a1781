"""Schedules with delayed weight gradients: blocks, peaks and bubbles against published figures."""

from __future__ import annotations

import itertools
import random

import pytest
from event_loop import EventLoop, bubble_rate, drawn_stages, even_stages
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_words import peak_live

from pipette_launch.cost.memory import peak as closed_form
from pipette_launch.cost.pipeline.engine import Engine, StageTimes, simulate
from pipette_launch.cost.pipeline.zero_bubble import (
    GAP_RULES,
    PERIOD,
    SCHEDULES,
    GapRule,
    SchedulingProblem,
    fill,
    linear_blocks,
    most_kept,
    named_schedule,
    pass_orders,
    schedule_peak_bytes,
)
from pipette_launch.errors import FactError, LayoutError
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.schedule import EXECUTABLE, Schedule, schedule_of

NAMES = sorted(SCHEDULES)


def test_every_schedule_can_be_executed() -> None:
    """A plan may name each of them."""
    assert set(SCHEDULES) == set(EXECUTABLE)


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
    ],
)
def test_no_worse_than_simulated_elsewhere(
    name: str, times: tuple[float, float, float, float], expected: float
) -> None:
    """P 8, n 32: the bubbles of an independent simulation, at their memory or less."""
    stage_times = even_stages(8, *times, vpp=2)
    schedule = named_schedule(name, pp=8, num_microbatches=32, times=stage_times)

    assert round(bubble_rate(simulate(schedule, stage_times)), 3) <= expected


def test_one_bubble_is_longer_than_elsewhere() -> None:
    """The independent simulation found a better order for V-Half, with a bubble of 0.117."""
    times = even_stages(8, 10.4, 10.2, 7.7, 0.41, vpp=2)

    bubble = round(bubble_rate(simulate(named_schedule("v-half", pp=8, num_microbatches=32, times=times), times)), 3)

    assert 0.117 < bubble <= 0.123


@pytest.mark.parametrize("pp", range(2, 9))
def test_peaks_are_the_published_ones(pp: int) -> None:
    """Micro-batches: p of ZB-1P and V-ZB, floor((p+2)/2) of V-Half, floor((p+4)/3) of V-Min: reached, not exceeded."""
    expected = {"zb-1p": pp, "v-zb": pp, "v-half": (pp + 2) // 2, "v-min": (pp + 4) // 3}
    for name, peak in expected.items():
        schedule = named_schedule(name, pp=pp, num_microbatches=2 * pp)

        assert max(peak_live(schedule)) <= schedule.vpp * peak
        assert most_kept(name, (1.0,) * schedule.num_stages, 2 * pp) == (schedule.vpp * peak,) * pp
    assert [8, 16, 10, 8] == [
        max(peak_live(named_schedule(name, pp=8, num_microbatches=48))) for name in ("zb-1p", "v-zb", "v-half", "v-min")
    ]


@given(st.sampled_from(NAMES), st.integers(2, 5), st.integers(1, 9), st.randoms())
@settings(max_examples=60)
def test_any_schedule_runs_within_its_peak(name: str, pp: int, microbatches: int, rng: random.Random) -> None:
    """For all times and sizes: complete, without deadlock, and every rank within its limit."""
    vpp = SCHEDULES[name].vpp
    times, held = drawn_stages(vpp * pp, rng), [rng.randint(1, 8) for _ in range(vpp * pp)]
    schedule = named_schedule(name, pp=pp, num_microbatches=microbatches, times=times, held_S=held)

    assert Engine(schedule).timeline(times).makespan_s == max(EventLoop(schedule, times).run().values())
    limits = most_kept(name, held, microbatches)
    assert all(peak <= limit for peak, limit in zip(schedule_peak_bytes(schedule, held), limits, strict=True))
    assert name == schedule.name


@pytest.mark.parametrize("pp", range(2, 10))
@pytest.mark.parametrize("slopes", [(3, 3, 3, 3), (1, 1, 1, 1), (2, 1, 1, 2)])
def test_passes_of_a_block_never_meet(pp: int, slopes: tuple[int, int, int, int]) -> None:
    """Repeated every six units, two passes of a rank never use the same unit, and each follows its cause."""
    for block in linear_blocks(pp, slopes):
        for starts in block:
            assert len({start % PERIOD for start in starts}) == 4
        for before, after in itertools.pairwise(block):
            assert before[0] < after[0] < after[1] < before[1] < before[2] < after[2] < after[3] < before[3]


def test_v_zb_runs_in_step() -> None:
    """The first block of V-ZB on two ranks, by hand: every pass is half a period later on the next rank."""
    assert linear_blocks(2, (3, 3, 3, 3))[0] == ((0, 7, 8, 15), (3, 4, 11, 12))


# p, n, F, I, W, c in ms, then the bubble rates of 1F1B and ZB-1P (Qi et al. 2024, Zero Bubble, table 5).
PUBLISHED = [
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552, 0.1397),
    (16, 128, 11.325, 11.308, 8.109, 0.378, 0.1251, 0.0576),
    (32, 96, 10.419, 10.207, 7.715, 0.408, 0.2646, 0.1421),
    (32, 256, 10.402, 10.248, 7.698, 0.460, 0.1352, 0.0594),
]


@pytest.mark.parametrize(
    ("pp", "n", "f", "i", "w", "c", "stock_rate", "rate"),
    [pytest.param(*row, id=f"p{row[0]}-n{row[1]}") for row in PUBLISHED],
)
def test_zb_1p_has_the_published_rate(
    pp: int, n: int, f: float, i: float, w: float, c: float, stock_rate: float, rate: float
) -> None:
    """To 0.0001, within p micro-batches: the step takes (p-1)(F+I-W+4c) more than the work."""
    times = even_stages(pp, f, i, w, c)
    schedule = named_schedule("zb-1p", pp=pp, num_microbatches=n, times=times)
    timeline = simulate(schedule, times)

    assert stock_rate == round(bubble_rate(simulate(schedule_of(Layout(pp=pp), n), times)), 4)
    assert bubble_rate(timeline) == pytest.approx(rate, abs=1e-4)
    assert timeline.makespan_s == pytest.approx(n * (f + i + w) + (pp - 1) * (f + i - w + 4 * c), rel=1e-4)
    assert max(peak_live(schedule)) == pp


@given(st.sampled_from(NAMES), st.integers(2, 5), st.integers(1, 9), st.sampled_from(GAP_RULES), st.randoms())
@settings(max_examples=60)
def test_a_draft_is_as_long_as_its_simulated_schedule(
    name: str, pp: int, microbatches: int, rule: GapRule, rng: random.Random
) -> None:
    """The clock of the generator and the longest path of the engine agree."""
    kind = SCHEDULES[name]
    held = (1.0,) * (pp * kind.vpp)
    problem = SchedulingProblem(
        kind=kind,
        pp=pp,
        num_microbatches=microbatches,
        times=drawn_stages(pp * kind.vpp, rng),
        held_S=held,
        limit_P=most_kept(name, held, microbatches),
    )
    draft = fill(problem, pass_orders(kind, pp, microbatches)[0], rule)
    made = Schedule(
        name=name,
        pp=pp,
        vpp=kind.vpp,
        num_microbatches=microbatches,
        placement=kind.placement,
        ranks=draft.ranks,
    )

    assert draft.makespan_s == simulate(made, problem.times).makespan_s


def test_a_limit_below_one_micro_batch_is_refused() -> None:
    """Nothing can run in it, and the message names the rank."""
    with pytest.raises(FactError, match="rank 1 may keep"):
        SchedulingProblem(
            kind=SCHEDULES["zb-1p"],
            pp=2,
            num_microbatches=2,
            times=even_stages(2, 1.0, 1.0, 1.0, 0.0),
            held_S=(1.0, 1.0),
            limit_P=(1.0, 0.5),
        )


@pytest.mark.parametrize(
    ("name", "pp", "n", "reason"), [("zb-1p", 4, 0, "must be positive"), ("v-half", 1, 8, "needs a pipeline")]
)
def test_numbers_without_a_schedule_are_refused(name: str, pp: int, n: int, reason: str) -> None:
    """The error names the wrong number."""
    with pytest.raises(LayoutError, match=reason):
        named_schedule(name, pp=pp, num_microbatches=n)


def test_a_split_without_its_times_is_refused() -> None:
    """Times of whole backwards decide no split."""
    whole = StageTimes(forward_s=(1.0,) * 4, backward_s=(2.0,) * 4, forward_hop_s=(0.0,) * 3, backward_hop_s=(0.0,) * 3)
    with pytest.raises(FactError, match="split the backward"):
        named_schedule("v-zb", pp=2, num_microbatches=4, times=whole)


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

    assert expected == schedule_peak_bytes(schedule_of(layout, rounds * group), sizes)


def test_a_split_backward_keeps_what_the_weights_need() -> None:
    """ZB-1P of two ranks: rank 1 holds one W's half beside the next micro-batch."""
    schedule = named_schedule("zb-1p", pp=2, num_microbatches=4)

    assert schedule_peak_bytes(schedule, (10, 10)) == (20, 20)
    assert schedule_peak_bytes(schedule, (10, 10), (5, 5)) == (20, 15)
    assert schedule_peak_bytes(schedule, (10, 10), (0, 0)) == (20, 10)
    assert schedule_peak_bytes(schedule, (1, 1), (10, 10)) == (11, 20)
