"""What first forwards wait for, by hand and against a step that is gone through action by action."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipette_launch.cost.pipeline.engine import Engine, Order, StageTimes
from pipette_launch.cost.step.first_gathers import Forwards, waits_aligned_s, waits_one_by_one_s
from pipette_launch.facts import Layout

Floats = NDArray[np.float64]


def column(*values: float) -> Floats:
    """One pipeline."""
    return np.array(values)[:, None]


def megatron_waits_s(order: Order, times: StageTimes, gather_s_S: list[float]) -> list[float]:
    """Apply Megatron's rules to the simulated schedule until no wait changes."""
    stages, pp, group = order.num_stages, order.pp, order.group_size
    waits = [0.0] * stages
    while True:
        first = tuple(forward + wait for forward, wait in zip(times.forward_s, waits, strict=True))
        timeline = Engine(order).timeline(replace(times, first_forward_s=first))
        found = [0.0] * stages
        for rank in range(pp):
            actions = zip(order.schedule.ranks[rank], timeline.start_s[rank], strict=True)
            start_N = [start for action, start in actions if action.kind == "F"]
            gathered = 0.0
            for chunk in range(order.vpp):
                dispatched = start_N[(chunk - 1) * group - rank] if chunk > 1 else 0.0
                gathered = max(gathered, dispatched) + gather_s_S[chunk * pp + rank]
                found[chunk * pp + rank] = max(gathered - start_N[chunk * group], 0.0)
        if found == pytest.approx(waits, rel=1e-12, abs=1e-12):
            return found
        waits = found


@pytest.mark.parametrize(("buckets", "expected"), [(1, 6.0), (2, 3.0 + 1.0), (3, 2.0 + 2 * 2 / 3)])
def test_a_bucket_is_dispatched_when_the_one_before_has_arrived(buckets: int, expected: float) -> None:
    """A gather of 6 and a forward of 4: g/n, and for each further bucket what the last one's layers do not hide."""
    assert expected == pytest.approx(waits_one_by_one_s(column(6.0), column(4.0), np.array([buckets]))[0, 0])


def test_aligned_waits_do_not_add_up() -> None:
    """Gathers of 5 on three ranks, forwards of 2 and hops of 1: the second rank's ends before its activation comes."""
    layout = Layout(pp=3, vpp=2)
    forwards = Forwards(forward_s_SR=np.full((6, 1), 2.0), hop_s_SR=np.full((5, 1), 1.0))

    assert [5.0, 0.0, 0.0, 0.0, 0.0, 0.0] == waits_aligned_s(layout, np.full((6, 1), 5.0), forwards)[:, 0].tolist()


def test_the_longest_gather_of_the_first_chunks_counts_once() -> None:
    """The last rank's takes 12; its activation is there after 5 + 2 + 1 + 2 + 1 = 11."""
    layout = Layout(pp=3, vpp=2)
    forwards = Forwards(forward_s_SR=np.full((6, 1), 2.0), hop_s_SR=np.full((5, 1), 1.0))

    found = waits_aligned_s(layout, column(5.0, 5.0, 12.0, 5.0, 5.0, 5.0), forwards)

    assert [5.0, 0.0, 1.0, 0.0, 0.0, 0.0] == found[:, 0].tolist()


def test_a_later_chunk_hides_behind_the_forwards_before_it() -> None:
    """Chunk 1 of rank 0 is gathered from 1 on, chunk 0's two forwards and the way back of the first take until 5."""
    layout = Layout(pp=2, vpp=2)
    forwards = Forwards(forward_s_SR=np.full((4, 1), 2.0), hop_s_SR=np.zeros((3, 1)))

    waits = [waits_aligned_s(layout, column(1.0, 1.0, gather, 0.0), forwards)[2, 0] for gather in (4.0, 4.5, 6.0)]

    assert [0.0, 0.5, 2.0] == waits


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 4),
    st.integers(2, 4),
    st.integers(0, 2),
    st.integers(1, 3),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_aligned_waits_are_those_of_megatrons_rules(
    pp: int, vpp: int, wider: int, groups: int, rendezvous: bool, rng: object
) -> None:
    """Uneven stages, hops and gathers from free to far longer than what they could hide behind."""
    group = pp + wider
    order = Order(pp=pp, vpp=vpp, group_size=group, num_microbatches=groups * group, rendezvous=rendezvous)
    stages = order.num_stages
    draw = np.random.default_rng(rng.randrange(1 << 30))  # type: ignore[attr-defined]
    forward, backward, hop = draw.random(stages), draw.random(stages), draw.random(stages - 1)
    gather = draw.random(stages) * draw.choice([0.2, 2.0, 20.0])
    times = StageTimes(
        forward_s=tuple(forward.tolist()),
        backward_s=tuple(backward.tolist()),
        forward_hop_s=tuple(hop.tolist()),
        backward_hop_s=tuple(hop.tolist()),
    )
    layout = Layout(pp=pp, vpp=vpp, microbatch_group_size=group)
    forwards = Forwards(forward_s_SR=forward[:, None], hop_s_SR=hop[:, None], rendezvous=rendezvous)

    found = waits_aligned_s(layout, gather[:, None], forwards)[:, 0].tolist()

    assert megatron_waits_s(order, times, gather.tolist()) == pytest.approx(found, abs=1e-9)


def test_pipelines_side_by_side_are_priced_as_alone() -> None:
    """Short gathers and long ones, to the digit."""
    draw = np.random.default_rng(1)
    layout = Layout(pp=3, vpp=3)
    forwards = Forwards(forward_s_SR=draw.random((9, 8)), hop_s_SR=draw.random((8, 8)))
    gather_s_SR = draw.random((9, 8)) * np.array([0.1, 5.0] * 4)

    together = waits_aligned_s(layout, gather_s_SR, forwards)
    alone = [waits_aligned_s(layout, gather_s_SR[:, [r]], forwards.take(np.array([r]))) for r in range(8)]

    assert np.concatenate(alone, axis=1).tolist() == together.tolist()
