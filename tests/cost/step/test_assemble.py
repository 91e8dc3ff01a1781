"""The tail of a step and the choice of replicas, by hand."""

from dataclasses import replace

import numpy as np
import pytest
from facts_for_tests import tiny_cluster, tiny_job, tiny_measurements

from pipette_launch.cost.compute.stages import ComputeTable
from pipette_launch.cost.layers.parameters import OnceAStep
from pipette_launch.cost.step.assemble import reduced_s_P, step_parts, total_s
from pipette_launch.cost.step.work import LayoutWork, Prices
from pipette_launch.facts import Batch, Layout


def work(layout: Layout, *, num_microbatches: int = 4, optimizer_s: float = 0.0) -> LayoutWork:
    """The tiny job: layers of 1 ms a pass."""
    job = replace(tiny_job(), batch=Batch(global_batch_size=num_microbatches * layout.dp))
    once = OnceAStep(optimizer_s_per_parameter=optimizer_s, gradient_s_per_byte=0.0, host_s=0.0)
    return LayoutWork.of(job, layout, ComputeTable(job, tiny_measurements(tiny_cluster())), once, loss_s=0.0)


def prices(this: LayoutWork, **changes: object) -> Prices:
    """Nothing costs anything on slots of speed 1."""
    shape = (this.layout.pp, this.layout.dp)
    free = Prices(
        slowness_PD=np.ones(shape),
        exchange_s_PD=tuple(np.zeros(shape) for _ in this.exchanges),
        forward_hop_s_PD=np.zeros(shape),
        backward_hop_s_PD=np.zeros(shape),
        reduce_s_S=np.zeros(len(this.rank_S)),
        gather_s_S=np.zeros(len(this.rank_S)),
        embedding_s=0.0,
    )
    return replace(free, **changes)  # type: ignore[arg-type]


def test_the_slowest_replica_sets_the_step() -> None:
    """Replica 1 is twice as slow; all wait for it in the gradient reduction."""
    this = work(Layout(dp=2))

    assert total_s(this, prices(this)) == pytest.approx(4 * 13.8e-3)
    assert total_s(this, prices(this, slowness_PD=np.array([[1.0, 2.0]]))) == pytest.approx(8 * 13.8e-3)


def test_gradients_of_a_rank_wait_for_its_own_pipeline_only() -> None:
    """The last stage drains one backward of 4.2 ms before the first: up to that its reduction is free."""
    this = work(Layout(pp=2))
    free_s = total_s(this, prices(this))

    assert total_s(this, prices(this, reduce_s_S=np.array([0.0, 4.2e-3]))) == pytest.approx(free_s)
    assert total_s(this, prices(this, reduce_s_S=np.array([0.0, 5.2e-3]))) == pytest.approx(free_s + 1e-3)
    assert total_s(this, prices(this, reduce_s_S=np.array([1e-3, 0.0]))) == pytest.approx(free_s + 1e-3)


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
    parts = step_parts(this, prices(this, gather_s_S=np.array([0.0, 1.0])))

    assert parts.breakdown_s["parameter_gather"] == 1.0
    assert parts.breakdown_s["optimizer"] == pytest.approx(this.optimizer_s_P[1])


def test_an_overlapped_gather_delays_the_first_forward() -> None:
    """One bucket: the first forward of each stage waits for the whole of it, one stage after the other."""
    plain = Layout(pp=2, dp=2, use_distributed_optimizer=True, overlap_grad_reduce=True)
    overlapped = replace(plain, overlap_param_gather=True)
    gather_s_S = np.array([1e-3, 1e-3])
    before, after = (total_s(work(each), prices(work(each), gather_s_S=gather_s_S)) for each in (plain, overlapped))

    assert after - before == pytest.approx(1e-3)


def test_aligned_gathers_of_virtual_stages_delay_the_step_once() -> None:
    """All stages gather at once: the first chunk's gather alone is waited for, and the part says so."""
    plain = Layout(pp=2, vpp=2, dp=2, use_distributed_optimizer=True, overlap_grad_reduce=True)
    this = work(replace(plain, overlap_param_gather=True))
    free, priced = (step_parts(this, prices(this, gather_s_S=np.full(4, seconds))) for seconds in (0.0, 1e-3))

    assert 1e-3 == pytest.approx(priced.total_s - free.total_s)
    assert 1e-3 == pytest.approx(priced.breakdown_s["parameter_gather"])
    assert free.breakdown_s["bubble"] == pytest.approx(priced.breakdown_s["bubble"])


def test_gathers_that_are_not_aligned_delay_every_stage() -> None:
    """One by one, in nearly each of the four first forwards; what all wait is the gather's, not the bubble's."""
    layout = Layout(
        pp=2, vpp=2, dp=2, use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
    )
    this = replace(work(layout), aligns_gathers=False)
    free, priced = (step_parts(this, prices(this, gather_s_S=np.full(4, seconds))) for seconds in (0.0, 1e-3))

    assert 3.9e-3 == pytest.approx(priced.total_s - free.total_s)
    assert 3.9e-3 == pytest.approx(priced.breakdown_s["parameter_gather"])
    assert free.breakdown_s["bubble"] == pytest.approx(priced.breakdown_s["bubble"])


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

    (done_s,) = reduced_s_P(this, prices(this, reduce_s_S=np.array([reduce_s])), np.array([10.0]), np.array([4.0]))

    assert expected == done_s


def test_chunks_leave_when_they_are_done() -> None:
    """Chunk 1 ends at 5 and needs 4, chunk 0 ends at 8 and needs 2; without overlap all wait for the end."""
    layout = Layout(pp=2, vpp=2, dp=2)
    drain, backward = np.array([8.0, 7.0, 5.0, 4.0]), np.ones(4)
    both = (work(replace(layout, overlap_grad_reduce=True)), work(layout))

    done = [
        reduced_s_P(this, prices(this, reduce_s_S=np.array([2.0, 0.0, 4.0, 0.0])), drain, backward)[0] for this in both
    ]

    assert done == [11.0, 14.0]


def test_the_loss_is_added_up_where_the_last_stage_is_done() -> None:
    """It drains 4.2 ms before the first, so up to that it is free; a tied embedding makes it wait for the first."""
    tied = work(Layout(pp=2, dp=2))
    untied = replace(tied, traffic=replace(tied.traffic, embedding_bytes=0))
    free_s = total_s(tied, prices(tied))

    def longer_s(this: LayoutWork, loss_s: float) -> float:
        return total_s(replace(this, loss_s=loss_s), prices(this)) - free_s

    assert longer_s(untied, 4.2e-3) == pytest.approx(0.0, abs=1e-12)
    assert longer_s(untied, 5.2e-3) == pytest.approx(1e-3)
    assert longer_s(tied, 1e-3) == pytest.approx(1e-3)
