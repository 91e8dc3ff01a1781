"""The tail of a step, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from facts_for_tests import tiny_cluster, tiny_job, tiny_measurements
from numpy.typing import NDArray

from pipette_launch.cost.compute.stages import ComputeTable
from pipette_launch.cost.layers.parameters import OnceAStep
from pipette_launch.cost.step.assemble import gather_waits_s, step_end, step_parts, totals_s_K
from pipette_launch.cost.step.work import LayoutWork, Prices
from pipette_launch.facts import Batch, Layout

Floats = NDArray[np.float64]


@pytest.mark.parametrize(("buckets", "expected"), [(1, 6.0), (2, 3.0 + 1.0), (3, 2.0 + 2 * 2 / 3)])
def test_a_bucket_is_dispatched_when_the_one_before_has_arrived(buckets: int, expected: float) -> None:
    """A gather of 6 and a forward of 4: g/n, and for each further bucket what the last one's layers do not hide."""
    assert expected == pytest.approx(float(gather_waits_s(np.array(6.0), np.array(4.0), buckets)))


def work(layout: Layout, *, num_microbatches: int = 4, optimizer_s: float = 0.0) -> LayoutWork:
    """The tiny job: layers of 1 ms a pass."""
    job = replace(tiny_job(), batch=Batch(global_batch_size=num_microbatches * layout.dp))
    once = OnceAStep(optimizer_s_per_parameter=optimizer_s, gradient_s_per_byte=0.0, host_s=0.0)
    return LayoutWork.of(job, layout, ComputeTable(job, tiny_measurements(tiny_cluster())), once)


def prices(this: LayoutWork, **changes: object) -> Prices:
    """Nothing costs anything on slots of speed 1."""
    shape = (this.layout.pp, this.layout.dp)
    free = Prices(
        slowness_PD=np.ones(shape),
        exchange_s_PD=tuple(np.zeros(shape) for _ in this.exchanges),
        forward_hop_s_PD=np.zeros(shape),
        backward_hop_s_PD=np.zeros(shape),
        reduce_s_SK=np.zeros((len(this.rank_S), 1)),
        gather_s_SK=np.zeros((len(this.rank_S), 1)),
        embedding_s_K=np.zeros(1),
    )
    return replace(free, **changes)  # type: ignore[arg-type]


def total_s(this: LayoutWork, given: Prices) -> float:
    """Seconds of the step under one placement."""
    return float(totals_s_K(this, given)[0])


def test_the_slowest_replica_sets_the_step() -> None:
    """Replica 1 is twice as slow; all wait for it in the gradient reduction."""
    this = work(Layout(dp=2))

    assert total_s(this, prices(this)) == pytest.approx(4 * 13.8e-3)
    assert total_s(this, prices(this, slowness_PD=np.array([[1.0, 2.0]]))) == pytest.approx(8 * 13.8e-3)


def test_gradients_of_a_rank_wait_for_its_own_pipeline_only() -> None:
    """The last stage drains one backward of 4.2 ms before the first: up to that its reduction is free."""
    this = work(Layout(pp=2))
    free_s = total_s(this, prices(this))

    assert total_s(this, prices(this, reduce_s_SK=np.array([0.0, 4.2e-3])[:, None])) == pytest.approx(free_s)
    assert total_s(this, prices(this, reduce_s_SK=np.array([0.0, 5.2e-3])[:, None])) == pytest.approx(free_s + 1e-3)
    assert total_s(this, prices(this, reduce_s_SK=np.array([1e-3, 0.0])[:, None])) == pytest.approx(free_s + 1e-3)


def test_a_transfer_that_is_not_critical_costs_nothing() -> None:
    """The way from the last rank to the first is used by chunks only."""
    this = work(Layout(pp=2))
    wrap = np.array([[0.0], [1.0]])

    assert total_s(this, prices(this, forward_hop_s_PD=wrap)) == total_s(this, prices(this))
    chunks = work(Layout(pp=2, vpp=2))
    assert total_s(chunks, prices(chunks, forward_hop_s_PD=wrap)) > 1.0


def test_optimizer_and_gather_follow_the_slowest_rank() -> None:
    """A gather that is not overlapped starts when the rank has stepped."""
    this = work(Layout(pp=2, dp=2, use_distributed_optimizer=True), optimizer_s=1e-8)
    parts = step_parts(this, prices(this, gather_s_SK=np.array([0.0, 1.0])[:, None]))

    assert parts.breakdown_s["parameter_gather"] == 1.0
    assert parts.breakdown_s["optimizer"] == pytest.approx(this.optimizer_s_P[1])


def test_an_overlapped_gather_delays_the_first_forward() -> None:
    """One bucket: the first forward of each stage waits for the whole of it, one stage after the other."""
    plain = Layout(pp=2, dp=2, use_distributed_optimizer=True, overlap_grad_reduce=True)
    overlapped = replace(plain, overlap_param_gather=True)
    gather_s_SK = np.full((2, 1), 1e-3)
    before, after = (total_s(work(each), prices(work(each), gather_s_SK=gather_s_SK)) for each in (plain, overlapped))

    assert after - before == pytest.approx(1e-3)


def test_gathers_of_virtual_stages_delay_the_step_once() -> None:
    """All stages gather at once: only the first stage waits, and the wait is in the part of the gathers."""
    plain = Layout(pp=2, vpp=2, dp=2, use_distributed_optimizer=True, overlap_grad_reduce=True)
    this = work(replace(plain, overlap_param_gather=True))
    free, priced = (step_parts(this, prices(this, gather_s_SK=np.full((4, 1), seconds))) for seconds in (0.0, 1e-3))

    assert 1e-3 == pytest.approx(priced.total_s - free.total_s)
    assert 1e-3 == pytest.approx(priced.breakdown_s["parameter_gather"])
    assert free.breakdown_s["bubble"] == pytest.approx(priced.breakdown_s["bubble"])


def reduced_s(this: LayoutWork, reduce_s_S: np.ndarray, drain_S: np.ndarray, backward_S: np.ndarray) -> np.ndarray:
    """When each pipeline rank has reduced its gradients."""
    durations_S1 = np.concatenate([np.zeros_like(backward_S), backward_S])[:, None]
    end = step_end(this, prices(this, reduce_s_SK=reduce_s_S[:, None]), drain_S[:, None], durations_S1)
    return end.reduced_s_PN[:, 0]


@pytest.mark.parametrize(
    ("reduce_s", "buckets", "expected"),
    [
        # A backward from 6 to 10: buckets are ready at 7, 8, 9 and 10.
        (2.0, 4, 10.5),
        (4.0, 4, 11.0),
        (8.0, 4, 15.0),
        (8.0, 1, 18.0),
    ],
)
def test_buckets_leave_during_the_backward(reduce_s: float, buckets: int, expected: float) -> None:
    """The first leaves when it is ready, the last at the end, one at a time."""
    this = work(Layout(dp=2, overlap_grad_reduce=True))
    this = replace(this, traffic=replace(this.traffic, num_buckets=(buckets,)))

    (done_s,) = reduced_s(this, np.array([reduce_s]), np.array([10.0]), np.array([4.0]))

    assert expected == done_s


def test_chunks_leave_when_they_are_done() -> None:
    """Chunk 1 ends at 5 and needs 4, chunk 0 ends at 8 and needs 2; without overlap all wait for the end."""
    layout = Layout(pp=2, vpp=2, dp=2)
    drain, backward = np.array([8.0, 7.0, 5.0, 4.0]), np.ones(4)
    both = (work(replace(layout, overlap_grad_reduce=True)), work(layout))

    done = [reduced_s(this, np.array([2.0, 0.0, 4.0, 0.0]), drain, backward)[0] for this in both]

    assert done == [11.0, 14.0]
