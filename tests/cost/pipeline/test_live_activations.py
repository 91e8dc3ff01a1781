"""What a schedule holds in memory, against stock Megatron's closed form, by hand and over time."""

import random

import pytest
from event_loop import equal_stages
from hypothesis import given
from hypothesis import strategies as st

from pipette_launch.cost.memory import peak
from pipette_launch.cost.pipeline.live_activations import live_bytes, peak_live_bytes
from pipette_launch.cost.pipeline.simulate import simulate
from pipette_launch.errors import FactError
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.schedules import gpipe, interleaved_zero_bubble, one_forward_one_backward, schedule_of


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 3), st.integers(0, 3), st.randoms())
def test_stock_schedules_hold_what_the_closed_form_says(
    pp: int, vpp: int, rounds: int, extra: int, rng: random.Random
) -> None:
    """Each rank's peak is that of `cost.memory.peak.peak_live_bytes`, whatever its chunks keep."""
    group = pp + extra
    layout = Layout(pp=pp, vpp=vpp if pp > 1 else 1, microbatch_group_size=group if vpp > 1 and pp > 1 else 0)
    sizes = tuple(rng.randint(0, 9) for _ in range(layout.num_chunks))
    expected = tuple(peak.peak_live_bytes(layout, rank, rounds * group, sizes[rank :: layout.pp]) for rank in range(pp))

    assert expected == peak_live_bytes(schedule_of(layout, rounds * group), sizes)


def test_a_split_backward_keeps_what_the_weights_need() -> None:
    """ZB-H1 of two ranks: rank 1 holds one W's half besides the next micro-batch."""
    schedule = interleaved_zero_bubble(2, 1, 4)

    assert peak_live_bytes(schedule, (10, 10)) == (20, 20)
    assert peak_live_bytes(schedule, (10, 10), 0.5) == (20, 15)
    assert peak_live_bytes(schedule, (10, 10), 0.0) == (20, 10)


def test_memory_over_time_by_hand() -> None:
    """A forward takes its bytes when it starts, a backward gives them back when it ends."""
    timeline = simulate(one_forward_one_backward(2, 2), equal_stages(2, hop_s=0.5))

    assert live_bytes(timeline, (3, 5)) == (
        ((0.0, 3), (1.0, 6), (7.0, 3), (10.0, 0)),
        ((1.5, 5), (4.5, 0), (4.5, 5), (7.5, 0)),
    )


@given(st.integers(1, 4), st.integers(1, 8), st.floats(0, 1))
def test_the_series_ends_empty_and_peaks_at_the_peak(pp: int, microbatches: int, w_share: float) -> None:
    """Over time nothing is lost, and the highest point is the peak that the order alone gives."""
    schedule = interleaved_zero_bubble(pp, 1, microbatches)
    sizes = tuple(range(7, 7 + pp))
    series = live_bytes(simulate(schedule, equal_stages(pp)), sizes, w_share)

    assert [0] * pp == [rank[-1][1] for rank in series]
    assert peak_live_bytes(schedule, sizes, w_share) == tuple(max(held for _, held in rank) for rank in series)


@pytest.mark.parametrize(("sizes", "w_share"), [((1,), 1.0), ((1, -1), 1.0), ((1, 1), 1.5)])
def test_strange_sizes_are_refused(sizes: tuple[int, ...], w_share: float) -> None:
    """One size for each stage, none negative, and a share."""
    with pytest.raises(FactError, match="bytes"):
        peak_live_bytes(gpipe(2, 2), sizes, w_share)
