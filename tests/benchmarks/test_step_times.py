"""Step times by the models of AMP, Varuna and Pipette: accuracy, terms by hand, and what each cannot see."""

from dataclasses import replace

import numpy as np
import pytest
from event_loop import one_forward_one_backward_s
from facts_for_tests import tiny_cluster, tiny_job, tiny_measurements, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from published import pipette_cluster

from benchmarks.estimators import step_times
from benchmarks.estimators.step_times import amp_arm_s, amp_s, pipette_s, refuse, varuna_s
from benchmarks.rivals.pipette_planner import Messages, amp_arm
from benchmarks.rivals.pipette_planner import pipette_s as formula_s
from pipette_launch.errors import PlanError
from pipette_launch.facts import Batch, Layout, Links, Recompute

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
def test_accuracy_against_the_exact_makespan(
    stages: int, microbatches: int, hop_s: float, pipette: float, amp: float, errors: tuple[float, float]
) -> None:
    """With f = 1 and b = 2 the formulas and their errors against the exact makespan."""
    exact = one_forward_one_backward_s(stages=stages, microbatches=microbatches, forward_s=1, backward_s=2, hop_s=hop_s)
    transfer_s = 2 * hop_s * (stages - 1)
    found = (
        formula_s(stages=stages, microbatches=microbatches, pass_s=3, transfer_s=transfer_s),
        amp_arm(stages=stages, microbatches=microbatches, forward_s=1, hop_s=hop_s),
    )

    assert (pipette, amp) == pytest.approx(found)
    assert errors == tuple(round(100 * (seconds / exact - 1), 1) for seconds in found)


@given(st.integers(1, 16), st.integers(1, 8), st.floats(0.1, 10))
def test_it_is_the_textbook_where_stages_divide(stages: int, rounds: int, pass_s: float) -> None:
    """Without communication, (n + p - 1) passes."""
    seconds = formula_s(stages=stages, microbatches=rounds * stages, pass_s=pass_s, transfer_s=0.0)

    assert seconds == pytest.approx((rounds * stages + stages - 1) * pass_s)


def test_fewer_micro_batches_than_stages_expose_one_round_trip() -> None:
    """No whole round: (4*3 + 0.6) + (2 - 1)*3."""
    assert formula_s(stages=4, microbatches=2, pass_s=3, transfer_s=0.6) == pytest.approx(15.6)


@pytest.mark.parametrize(("pp", "milliseconds"), [(2, 233.61), (4, 117.31), (8, 73.53), (16, 78.59)])
def test_the_mapping_fixture(pp: int, milliseconds: float) -> None:
    """T_PP + T_out of host order on Pipette's sixteen hosts: 8.1B, fp32, tp 8, micro-batch 4."""
    model = tiny_model(
        num_layers=64, hidden_size=3072, seq_length=1024, vocab_size=50256, make_vocab_size_divisible_by=6282
    )
    cluster = pipette_cluster()
    layout = Layout(tp=8, pp=pp, dp=16 // pp, micro_batch_size=4, use_tp_pp_dp_mapping=True)
    slots = np.arange(128)
    messages = Messages.of(model, layout)
    transfer_s = step_times.transfer_s(layout, step_times.slot_seconds_per_byte(cluster), slots, messages.pipeline)
    data_parallel_s = step_times.data_parallel_s(layout, cluster, slots, messages.data_parallel)

    assert milliseconds == round(1e3 * (transfer_s + data_parallel_s), 2)


def test_pipettes_pipeline_by_hand() -> None:
    """Slowest stage 2.5 + 5 ms: q = 1 round of two passes and a round trip of 8,192 bytes, then one pass."""
    job = replace(tiny_job(2), batch=Batch(global_batch_size=2))
    seconds = pipette_s(job, Layout(pp=2), tiny_measurements(TWO))

    assert seconds == pytest.approx(2 * 7.5e-3 + 2 * 8192 / 1e8 + 7.5e-3)


def test_pipettes_replicas_reduce_within_hosts_and_between() -> None:
    """Two hosts of two: 1,114,112 bytes once over 100 MB/s and once over 1 GB/s; two passes of 13.8 ms."""
    message_bytes = 4 * (64 * 256 + 4 * 16 * 64 * 64)
    seconds = pipette_s(tiny_job(4), Layout(dp=4), tiny_measurements(tiny_cluster(2, 2)))

    assert seconds == pytest.approx(2 * 13.8e-3 + message_bytes / 1e8 + message_bytes / 1e9)


def test_full_recompute_in_pipette_is_one_forward_more() -> None:
    """A timer sees it: 4.6 ms a micro-batch."""
    measured = tiny_measurements(TWO)
    plain, full = (
        pipette_s(tiny_job(2), Layout(dp=2, recompute=kind), measured) for kind in (Layout().recompute, FULL)
    )

    assert full - plain == pytest.approx(2 * 4.6e-3)


def test_a_placement_counts_for_pipette() -> None:
    """With many micro-batches the pipeline is better off within a host than the replicas."""
    measured = tiny_measurements(tiny_cluster(2, 2))
    layout = Layout(pp=2, dp=2)
    job = replace(tiny_job(4), batch=Batch(global_batch_size=512))

    slow = pipette_s(job, layout, measured, (0, 1, 2, 3))
    fast = pipette_s(job, layout, measured, (0, 2, 1, 3))

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
def test_what_pipette_does_not_know_is_refused(layout: Layout, words: str) -> None:
    """Whoever asks is told what is missing, so that the configuration counts as infeasible."""
    measured = tiny_measurements(tiny_cluster(2, 2))

    with pytest.raises(PlanError, match=f"Pipette has no {words}"):
        pipette_s(tiny_job(4), layout, measured)
    with pytest.raises(PlanError, match=f"AMP has no {words}"):
        amp_arm_s(tiny_job(4), layout, measured)


def test_amps_pipeline_by_hand() -> None:
    """Stages of 3 * 2.1 and 3 * 2.5 ms, two micro-batches, 8,192 bytes over the cut once."""
    job = replace(tiny_job(2), batch=Batch(global_batch_size=2))
    seconds = amp_s(job, Layout(pp=2), tiny_measurements(tiny_cluster(2, 1)))

    assert seconds == pytest.approx(7.5e-3 + 6.3e-3 + 7.5e-3 + 8192 / 1e8)


def test_amps_replicas_by_hand() -> None:
    """Two passes of 3 * 4.6 ms and a ring of 4 * (h*V + 4 * 12h^2) bytes."""
    seconds = amp_s(tiny_job(2), Layout(dp=2), tiny_measurements(tiny_cluster(2, 1)))

    assert seconds == pytest.approx(2 * 13.8e-3 + 4 * (64 * 256 + 4 * 12 * 64 * 64) / 1e8)


def test_amp_knows_links_by_node_only() -> None:
    """One slow link of three is not seen: each node still has a fast one. A node that is slow to all is."""

    def links(slow: set[tuple[int, int]]) -> Links:
        rates = tuple(
            tuple(0.0 if i == j else 1e7 if (i, j) in slow or (j, i) in slow else 1e8 for j in range(3))
            for i in range(3)
        )
        return Links(latency_s=((0.0,) * 3,) * 3, bandwidth_bytes_per_s=rates)

    job = tiny_job(3)
    plain = tiny_cluster(3, 1)
    one_link, one_node = (replace(plain, between_hosts=links(slow)) for slow in ({(0, 1)}, {(0, 1), (0, 2)}))
    times = [amp_s(job, Layout(dp=3), tiny_measurements(c)) for c in (plain, one_link, one_node)]

    assert times[0] == times[1] < times[2]


def test_amp_is_blind_to_memory_and_recompute() -> None:
    """The largest micro-batch on the largest model is priced like any other, and recompute costs nothing."""
    full = Recompute(granularity="full", method="uniform", num_layers=1)
    small = tiny_cluster(2, 1, memory_bytes=1)
    measured = tiny_measurements(small)

    plain = amp_s(tiny_job(2), Layout(dp=2, micro_batch_size=2), measured)

    assert plain == amp_s(tiny_job(2), Layout(dp=2, micro_batch_size=2, recompute=full), measured)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(cp=2, dp=2), "context parallelism"),
        (Layout(dp=4, ep=2), "expert parallelism"),
        (Layout(pp=2, dp=2, vpp=2), "interleaved schedule"),
    ],
)
def test_what_amp_does_not_know_is_refused(layout: Layout, words: str) -> None:
    """The error names what is missing."""
    with pytest.raises(PlanError, match=f"AMP has no {words}"):
        amp_s(tiny_job(4), layout, tiny_measurements(tiny_cluster(2, 2)))


def test_varunas_pipeline_by_hand() -> None:
    """F 2.1 and 2.5 ms, B 4.2 and 5 ms, hops of 0.18192 ms: the first stage runs its forward again, the last does not.

    0F0, hop, 1F0 1B0 1F1 1B1, hop, then 0R1 0B1.
    """
    job = replace(tiny_job(2), batch=Batch(global_batch_size=2))
    hop_s = 1e-4 + 8192 / 1e8
    seconds = varuna_s(job, Layout(pp=2), tiny_measurements(tiny_cluster(2, 1)))

    assert seconds == pytest.approx(2.1e-3 + hop_s + 2 * 7.5e-3 + hop_s + 2.1e-3 + 4.2e-3)


def test_megatrons_order_recomputes_on_the_last_stage_too() -> None:
    """With 1F1B both of its backwards take 2.5 ms more."""
    job = replace(tiny_job(2), batch=Batch(global_batch_size=2))
    measured = tiny_measurements(tiny_cluster(2, 1))
    times = [varuna_s(job, Layout(pp=2), measured, priority=name) for name in ("varuna", "1f1b")]  # type: ignore[arg-type]

    assert times[1] - times[0] == pytest.approx(2 * 2.5e-3)


def test_varunas_replicas_add_an_all_reduce() -> None:
    """Two passes of 13.8 ms, nothing run again on the only stage, and a ring over 218,496 fp32 gradients."""
    seconds = varuna_s(tiny_job(2), Layout(dp=2), tiny_measurements(tiny_cluster(2, 1)))

    assert seconds == pytest.approx(2 * 13.8e-3 + 2 * (1e-4 + 4 * 218496 / 2 / 1e8))


def test_varuna_always_recomputes() -> None:
    """Whatever the layout says."""
    full = Recompute(granularity="full", method="uniform", num_layers=1)
    measured = tiny_measurements(tiny_cluster(2, 1))

    assert varuna_s(tiny_job(2), Layout(pp=2), measured) == varuna_s(
        tiny_job(2), Layout(pp=2, recompute=full), measured
    )


def test_varunas_own_order_keeps_pipelines_in_a_host() -> None:
    """Consecutive slots are consecutive stages, which torchrun's own order is not."""
    measured = tiny_measurements(tiny_cluster(2, 2))
    job = replace(tiny_job(4), batch=Batch(global_batch_size=32))

    own = varuna_s(job, Layout(pp=2, dp=2), measured)

    assert own != varuna_s(job, Layout(pp=2, dp=2), measured, (0, 1, 2, 3))
    assert own == varuna_s(job, Layout(pp=2, dp=2), measured, (0, 2, 1, 3))


def test_varunas_sends_have_two_prices() -> None:
    """A slow link between hosts slows every send between hosts by its share of the mean."""
    measured = tiny_measurements(tiny_cluster(3, 1))
    matrix = [list(row) for row in measured.cluster.between_hosts.bandwidth_bytes_per_s]
    matrix[2][0] = matrix[0][2] = 1e6
    links = replace(measured.cluster.between_hosts, bandwidth_bytes_per_s=tuple(tuple(row) for row in matrix))
    slower = replace(measured, cluster=replace(measured.cluster, between_hosts=links))
    job = replace(tiny_job(3), model=replace(tiny_job(3).model, num_layers=3))

    # No stage sends from host 2 to host 0, yet the prediction changes.
    assert varuna_s(job, Layout(pp=3), measured) < varuna_s(job, Layout(pp=3), slower)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(tp=2, dp=2), "tensor parallelism"),
        (Layout(cp=2, dp=2), "context parallelism"),
        (Layout(dp=4, ep=2), "expert parallelism"),
        (Layout(pp=2, dp=2, vpp=2), "interleaved schedule"),
    ],
)
def test_what_varuna_does_not_know_is_refused(layout: Layout, words: str) -> None:
    """The error names what is missing, so that the configuration counts as infeasible."""
    with pytest.raises(PlanError, match=f"Varuna has no {words}"):
        varuna_s(tiny_job(4), layout, tiny_measurements(tiny_cluster(2, 2)))


def test_what_a_model_does_not_know_is_named() -> None:
    """The error says whose model, which dimension, and what to do."""
    with pytest.raises(PlanError, match="Varuna has no tensor parallelism; take tp=1"):
        refuse("Varuna", Layout(tp=2), "tp")
    refuse("Varuna", Layout(dp=2), "tp", "cp")
