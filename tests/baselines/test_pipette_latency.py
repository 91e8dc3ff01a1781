"""Pipette's formula: its accuracy as the facts measured it, its mapping fixture, and terms by hand."""

from dataclasses import replace

import numpy as np
import pytest
from baselines.published import pipette_cluster
from facts_for_tests import tiny_cluster, tiny_job, tiny_measurements, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from pipette_launch.baselines import pipette_latency
from pipette_launch.baselines.pipette_latency import Messages, amp_arm, amp_arm_s, pipette_s, step_time_s
from pipette_launch.cost.pipeline.simulate import one_forward_one_backward_s
from pipette_launch.errors import PlanError
from pipette_launch.facts import Batch, Layout, Recompute

FULL = Recompute(granularity="full", method="uniform", num_layers=1)
TWO = tiny_cluster(2, 1)


@pytest.mark.parametrize(
    ("stages", "microbatches", "hop_s", "pipette", "amp", "errors"),
    [
        (4, 16, 0.1, 59.40, 57.60, (-0.7, -3.7)),
        (8, 32, 0.3, 133.80, 121.20, (-2.6, -11.8)),
        (16, 64, 0.3, 273.00, 246.00, (-3.0, -12.6)),
        (8, 36, 0.1, 122.60, 130.40, (-10.1, -4.4)),
    ],
)
def test_accuracy_is_that_of_the_facts(
    stages: int, microbatches: int, hop_s: float, pipette: float, amp: float, errors: tuple[float, float]
) -> None:
    """With f = 1 and b = 2 the formulas and their errors against the exact makespan (pipette.md section 2)."""
    exact = one_forward_one_backward_s(stages=stages, microbatches=microbatches, forward_s=1, backward_s=2, hop_s=hop_s)
    transfer_s = 2 * hop_s * (stages - 1)
    found = (
        pipette_s(stages=stages, microbatches=microbatches, pass_s=3, transfer_s=transfer_s),
        amp_arm(stages=stages, microbatches=microbatches, forward_s=1, hop_s=hop_s),
    )

    assert (pipette, amp) == pytest.approx(found)
    assert errors == tuple(round(100 * (seconds / exact - 1), 1) for seconds in found)


@given(st.integers(1, 16), st.integers(1, 8), st.floats(0.1, 10))
def test_it_is_the_textbook_where_stages_divide(stages: int, rounds: int, pass_s: float) -> None:
    """Without communication, (n + p - 1) passes."""
    seconds = pipette_s(stages=stages, microbatches=rounds * stages, pass_s=pass_s, transfer_s=0.0)

    assert seconds == pytest.approx((rounds * stages + stages - 1) * pass_s)


def test_fewer_micro_batches_than_stages_expose_one_round_trip() -> None:
    """No whole round: (4*3 + 0.6) + (2 - 1)*3."""
    assert pipette_s(stages=4, microbatches=2, pass_s=3, transfer_s=0.6) == pytest.approx(15.6)


@pytest.mark.parametrize(("pp", "milliseconds"), [(2, 233.61), (4, 117.31), (8, 73.53), (16, 78.59)])
def test_the_mapping_fixture(pp: int, milliseconds: float) -> None:
    """T_PP + T_out of host order on Pipette's sixteen hosts (pipette.md section 4): 8.1B, fp32, tp 8, micro-batch 4."""
    model = tiny_model(
        num_layers=64, hidden_size=3072, seq_length=1024, vocab_size=50256, make_vocab_size_divisible_by=6282
    )
    cluster = pipette_cluster()
    layout = Layout(tp=8, pp=pp, dp=16 // pp, micro_batch_size=4, use_tp_pp_dp_mapping=True)
    slots = np.arange(128)
    messages = Messages.of(model, layout)
    transfer_s = pipette_latency.transfer_s(layout, cluster.seconds_per_byte_SS(), slots, messages.pipeline)
    data_parallel_s = pipette_latency.data_parallel_s(layout, cluster, slots, messages.data_parallel)

    assert milliseconds == round(1e3 * (transfer_s + data_parallel_s), 2)


def test_a_pipeline_by_hand() -> None:
    """Slowest stage 2.5 + 5 ms: q = 1 round of two passes and a round trip of 8,192 bytes, then one pass."""
    job = replace(tiny_job(2), batch=Batch(global_batch_size=2))
    seconds = step_time_s(job, Layout(pp=2), tiny_measurements(TWO))

    assert seconds == pytest.approx(2 * 7.5e-3 + 2 * 8192 / 1e8 + 7.5e-3)


def test_replicas_reduce_within_hosts_and_between() -> None:
    """Two hosts of two: 1,114,112 bytes once over 100 MB/s and once over 1 GB/s; two passes of 13.8 ms."""
    message_bytes = 4 * (64 * 256 + 4 * 16 * 64 * 64)
    seconds = step_time_s(tiny_job(4), Layout(dp=4), tiny_measurements(tiny_cluster(2, 2)))

    assert seconds == pytest.approx(2 * 13.8e-3 + message_bytes / 1e8 + message_bytes / 1e9)


def test_full_recompute_is_one_forward_more() -> None:
    """A timer sees it: 4.6 ms a micro-batch."""
    measured = tiny_measurements(TWO)
    plain, full = (
        step_time_s(tiny_job(2), Layout(dp=2, recompute=kind), measured) for kind in (Layout().recompute, FULL)
    )

    assert full - plain == pytest.approx(2 * 4.6e-3)


def test_a_placement_counts() -> None:
    """With many micro-batches the pipeline is better off within a host than the replicas."""
    measured = tiny_measurements(tiny_cluster(2, 2))
    layout = Layout(pp=2, dp=2)
    job = replace(tiny_job(4), batch=Batch(global_batch_size=512))

    slow = step_time_s(job, layout, measured, (0, 1, 2, 3))
    fast = step_time_s(job, layout, measured, (0, 2, 1, 3))

    assert fast < slow


def test_the_amp_arm_by_hand() -> None:
    """3f = 7.5 ms in three passes, a hop there and back, no gradients to reduce."""
    job = replace(tiny_job(2), batch=Batch(global_batch_size=2))

    assert amp_arm_s(job, Layout(pp=2), tiny_measurements(TWO)) == pytest.approx(3 * 7.5e-3 + 2 * 8192 / 1e8)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(cp=2, dp=2), "context parallelism"),
        (Layout(dp=4, ep=2), "expert parallelism"),
        (Layout(pp=2, dp=2, vpp=2), "interleaved schedule"),
        (Layout(pp=2, dp=2, layers_per_chunk=(1, 3)), "uneven stages"),
    ],
)
def test_what_it_does_not_know_is_refused(layout: Layout, words: str) -> None:
    """Whoever asks is told what is missing, so that the configuration counts as infeasible."""
    measured = tiny_measurements(tiny_cluster(2, 2))

    with pytest.raises(PlanError, match=f"Pipette has no {words}"):
        step_time_s(tiny_job(4), layout, measured)
    with pytest.raises(PlanError, match=f"AMP has no {words}"):
        amp_arm_s(tiny_job(4), layout, measured)
