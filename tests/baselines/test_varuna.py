"""Varuna's model: terms by hand, its micro-batch rule, and what it cannot do."""

from dataclasses import replace

import pytest
from baselines.published import llama_7b
from facts_for_tests import tiny_cluster, tiny_job, tiny_measurements
from hypothesis import given
from hypothesis import strategies as st

from pipette_launch.baselines import varuna
from pipette_launch.cost import peak_memory_bytes
from pipette_launch.errors import PlanError
from pipette_launch.facts import Batch, Layout, Recompute
from pipette_launch.units import GIB


def test_a_pipeline_by_hand() -> None:
    """F 2.1 and 2.5 ms, B 4.2 and 5 ms, hops of 0.18192 ms: the first stage runs its forward again, the last does not.

    0F0, hop, 1F0 1B0 1F1 1B1, hop, then 0R1 0B1.
    """
    job = replace(tiny_job(2), batch=Batch(global_batch_size=2))
    hop_s = 1e-4 + 8192 / 1e8
    seconds = varuna.step_time_s(job, Layout(pp=2), tiny_measurements(tiny_cluster(2, 1)))

    assert seconds == pytest.approx(2.1e-3 + hop_s + 2 * 7.5e-3 + hop_s + 2.1e-3 + 4.2e-3)


def test_megatrons_order_recomputes_on_the_last_stage_too() -> None:
    """With 1F1B both of its backwards take 2.5 ms more."""
    job = replace(tiny_job(2), batch=Batch(global_batch_size=2))
    measured = tiny_measurements(tiny_cluster(2, 1))
    times = [varuna.step_time_s(job, Layout(pp=2), measured, priority=name) for name in ("varuna", "1f1b")]  # type: ignore[arg-type]

    assert times[1] - times[0] == pytest.approx(2 * 2.5e-3)


def test_replicas_add_an_all_reduce() -> None:
    """Two passes of 13.8 ms, nothing run again on the only stage, and a ring over 218,496 fp32 gradients."""
    seconds = varuna.step_time_s(tiny_job(2), Layout(dp=2), tiny_measurements(tiny_cluster(2, 1)))

    assert seconds == pytest.approx(2 * 13.8e-3 + 2 * (1e-4 + 4 * 218496 / 2 / 1e8))


def test_recompute_is_always_on() -> None:
    """Whatever the layout says."""
    full = Recompute(granularity="full", method="uniform", num_layers=1)
    measured = tiny_measurements(tiny_cluster(2, 1))

    assert varuna.step_time_s(tiny_job(2), Layout(pp=2), measured) == varuna.step_time_s(
        tiny_job(2), Layout(pp=2, recompute=full), measured
    )


def test_its_own_order_keeps_pipelines_in_a_host() -> None:
    """Consecutive slots are consecutive stages, which torchrun's own order is not."""
    measured = tiny_measurements(tiny_cluster(2, 2))
    job = replace(tiny_job(4), batch=Batch(global_batch_size=32))

    own = varuna.step_time_s(job, Layout(pp=2, dp=2), measured)

    assert own != varuna.step_time_s(job, Layout(pp=2, dp=2), measured, (0, 1, 2, 3))
    assert own == varuna.step_time_s(job, Layout(pp=2, dp=2), measured, (0, 2, 1, 3))


def test_sends_have_two_prices() -> None:
    """A slow link between hosts slows every send between hosts by its share of the mean."""
    measured = tiny_measurements(tiny_cluster(3, 1))
    matrix = [list(row) for row in measured.cluster.between_hosts.bandwidth_bytes_per_s]
    matrix[2][0] = matrix[0][2] = 1e6
    links = replace(measured.cluster.between_hosts, bandwidth_bytes_per_s=tuple(tuple(row) for row in matrix))
    slower = replace(measured, cluster=replace(measured.cluster, between_hosts=links))
    job = replace(tiny_job(3), model=replace(tiny_job(3).model, num_layers=3))

    # No stage sends from host 2 to host 0, yet the prediction changes.
    assert varuna.step_time_s(job, Layout(pp=3), measured) < varuna.step_time_s(job, Layout(pp=3), slower)


def test_memory_is_states_and_one_micro_batch() -> None:
    """Last stage of 7B: 18 bytes a parameter, and activations once, not as often as there are live micro-batches."""
    job, layout = llama_7b(), Layout(pp=4, dp=2)
    # Flash attention keeps more from the second sample on.
    job = replace(job, model=replace(job.model, attention_backend="fused"))
    states = 18 * (8 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096) + 32000 * 4096 + 4096)
    one, two = (varuna.memory_bytes(job, replace(layout, micro_batch_size=size)) for size in (1, 2))

    assert one - states == two - one
    assert one < max(stage.total for stage in peak_memory_bytes(job, layout))


@given(st.integers(24, 60))
def test_the_micro_batch_is_the_largest_that_fits(gibibytes: int) -> None:
    """It fits, and one more sample would not, or there is no more."""
    job, layout = replace(llama_7b(), batch=Batch(global_batch_size=64)), Layout(pp=8, dp=2)
    size = varuna.largest_micro_batch(job, layout, gibibytes * GIB)

    assert varuna.memory_bytes(job, replace(layout, micro_batch_size=size)) <= gibibytes * GIB
    assert size == 32 or varuna.memory_bytes(job, replace(layout, micro_batch_size=size + 1)) > gibibytes * GIB


def test_what_does_not_fit_is_refused() -> None:
    """7B on two stages of 24 GiB: Varuna has nothing but more stages to offer."""
    with pytest.raises(PlanError, match=r"Varuna cannot fit tp1 pp2 dp4.*take more stages"):
        varuna.largest_micro_batch(llama_7b(), Layout(pp=2, dp=4), 24 * GIB)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(tp=2, dp=2), "tensor parallelism"),
        (Layout(cp=2, dp=2), "context parallelism"),
        (Layout(dp=4, ep=2), "expert parallelism"),
        (Layout(pp=2, dp=2, vpp=2), "interleaved schedule"),
    ],
)
def test_what_it_does_not_know_is_refused(layout: Layout, words: str) -> None:
    """Time and memory both say so."""
    with pytest.raises(PlanError, match=f"Varuna has no {words}"):
        varuna.step_time_s(tiny_job(4), layout, tiny_measurements(tiny_cluster(2, 2)))
    with pytest.raises(PlanError, match=f"Varuna has no {words}"):
        varuna.memory_bytes(tiny_job(4), layout)
