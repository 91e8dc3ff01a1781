"""What a schedule holds in memory, against stock Megatron's closed form and by hand."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipette_launch.cost.memory import live_activations as closed_form
from pipette_launch.cost.pipeline.live_activations import peak_live_bytes
from pipette_launch.errors import FactError
from pipette_launch.facts.known_schedules import gpipe, interleaved_zero_bubble, schedule_of
from pipette_launch.facts.layout import Layout


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 3), st.integers(0, 3), st.randoms())
def test_stock_schedules_hold_what_the_closed_form_says(
    pp: int, vpp: int, rounds: int, extra: int, rng: random.Random
) -> None:
    """Each rank's peak is that of `cost.memory.live_activations.peak_live_bytes`, whatever its chunks keep."""
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


@pytest.mark.parametrize(("sizes", "waiting"), [((1,), None), ((1, -1), None), ((1, 1), (1, -1)), ((1, 1), (1,))])
def test_strange_sizes_are_refused(sizes: tuple[int, ...], waiting: tuple[int, ...] | None) -> None:
    """One size for each stage, and none negative."""
    with pytest.raises(FactError, match="bytes"):
        peak_live_bytes(gpipe(2, 2), sizes, waiting)
