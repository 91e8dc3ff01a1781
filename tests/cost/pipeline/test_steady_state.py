"""Leaving out the micro-batches that tell nothing new changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipette_launch.cost.pipeline import steady_state
from pipette_launch.cost.pipeline.engine import Engine, Order
from pipette_launch.cost.pipeline.steady_state import engine_of
from pipette_launch.errors import LayoutError
from pipette_launch.facts import Layout
from pipette_launch.facts.known_schedules import schedule_of


@st.composite
def orders(draw: st.DrawFn) -> Order:
    """Pipelines of up to five ranks, with up to three chunks and groups wider than the pipeline."""
    pp, vpp, rendezvous = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.booleans())
    if pp == 1 or vpp == 1:
        number = draw(st.integers(1, 60))
        return Order(pp=pp, vpp=1, group_size=1, num_microbatches=number, rendezvous=rendezvous)
    group = draw(st.integers(pp, pp + 2))
    last = draw(st.integers(0, group - 1))
    number = group * draw(st.integers(1, 12)) + last * (last >= pp)
    blocking = not rendezvous and draw(st.booleans())
    return Order(
        pp=pp, vpp=vpp, group_size=group, num_microbatches=number, rendezvous=rendezvous, blocking_ends=blocking
    )


@given(orders())
def test_columns_are_those_of_the_schedule(order: Order) -> None:
    """Action by action, as the schedule that is made of objects."""
    made = schedule_of(order.layout, order.num_microbatches)

    assert (made.name, made.num_stages, made.rank_S) == (order.name, order.num_stages, order.rank_S)
    for mine, its in zip(order.columns, made.columns, strict=True):
        assert its.tolist() == mine.tolist()


def test_an_order_that_megatron_refuses_is_refused() -> None:
    """As the schedule itself is."""
    with pytest.raises(LayoutError, match="micro-batch group size 2 must lie between"):
        Order(pp=4, vpp=2, group_size=2, num_microbatches=8)


@settings(max_examples=150)
@given(
    orders(),
    st.integers(0, 10**6),
    st.sampled_from([0.0, 0.01, 1.0, 5.0]),
    st.sampled_from([0.0, 1e-9, 0.02, 1.0]),
    st.integers(1, 6),
)
def test_a_step_ends_when_the_whole_of_it_does(
    order: Order, seed: int, hop: float, uneven: float, pipelines: int
) -> None:
    """Equal and unequal stages, hops of no weight and hops that rule: the ends differ by rounding only."""
    rng = np.random.default_rng(seed)
    stages = order.num_stages
    durations = np.tile(np.repeat([1.0, 2.0, 1.0], stages)[:, None], pipelines)
    durations *= 1 + uneven * rng.random(durations.shape)
    hops = hop * (1 - 0.5 * rng.random((2 * stages - 1, pipelines)))
    hops[-1] = 0.0
    layout = Layout(pp=order.pp, vpp=order.vpp, microbatch_group_size=order.group_size if order.vpp > 1 else 0)
    engine = engine_of(layout, order.num_microbatches, rendezvous=order.rendezvous, blocking_ends=order.blocking_ends)

    drained = engine.drain_s_SR(durations, hops)

    np.testing.assert_allclose(drained, Engine(order).drain_s_SR(durations, hops), rtol=1e-11)
    for column in range(pipelines):
        alone = engine.drain_s_SR(durations[:, [column]], hops[:, [column]])
        assert alone[:, 0].tolist() == drained[:, column].tolist()


def test_a_long_step_is_not_run_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand micro-batches are priced by a few dozen."""
    monkeypatch.setattr(steady_state, "_engines", type(steady_state._engines)())
    engine = engine_of(Layout(pp=4), 10_000)
    durations, hops = np.repeat([1.0, 2.0, 1.0], 4)[:, None], np.full((7, 1), 0.1)

    engine.drain_s_SR(durations, hops)

    assert 0 == engine.num_prepared
    assert sum(kept.num_prepared for kept in steady_state._engines.values()) < 400


def test_engines_are_forgotten_when_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that were used last stay in memory, up to a number of actions."""
    monkeypatch.setattr(steady_state, "_engines", type(steady_state._engines)())
    monkeypatch.setattr(steady_state, "_CACHED_ACTIONS", 100)
    engines = [engine_of(Layout(pp=2), 10 + extra) for extra in range(5)]
    for engine in engines:
        assert 40 <= len(engine.graph.level_A)

    assert engine_of(Layout(pp=2), 14) is engines[4]
    assert engine_of(Layout(pp=2), 30) is not None
    assert engine_of(Layout(pp=2), 14) is engines[4]
    assert engine_of(Layout(pp=2), 10) is not engines[0]
