"""megatron-core runs without a GPU, and the bytes are those that can be counted by hand."""

import os
from collections.abc import Iterator

import pytest
from facts_for_tests import tiny_job, tiny_model

from pipette_launch.cost.executed import Executor
from pipette_launch.cost.parameters import stage_parameters
from pipette_launch.errors import PlanError
from pipette_launch.facts import Batch, Job, Layout, ModelSpec


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    """One worker for all tests here."""
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    with Executor() as started:
        yield started


def small(**changes: object) -> ModelSpec:
    """A GPT in bf16 with Transformer Engine's fused attention."""
    return tiny_model(
        **{
            "params_dtype": "bf16",
            "transformer_impl": "transformer_engine",
            "attention_backend": "fused",
            "hidden_size": 512,
            "ffn_hidden_size": 2048,
            "kv_channels": 128,
            **changes,
        }
    )


def job_of(model: ModelSpec, layout: Layout, microbatches: int = 4) -> Job:
    """A job of so many micro-batches."""
    batch = Batch(global_batch_size=microbatches * layout.dp * layout.micro_batch_size)
    return tiny_job(layout.world_size, model=model, own=layout, batch=batch)


@pytest.mark.parametrize("layout", [Layout(tp=2, pp=2, dp=2), Layout(pp=4), Layout(dp=4, cp=2)])
def test_static_bytes_are_those_of_the_parameters(executor: Executor, layout: Layout) -> None:
    """2 bytes of weight, 4 of gradient, 12 of optimizer for each parameter, within 1 %: small ones are rounded up."""
    job = job_of(small(), layout)
    parameters = stage_parameters(job.model, layout)
    for found in executor.execute(job, layout, range(layout.pp)):
        count = parameters[found.pp_rank].count

        assert pytest.approx(2 * count, rel=0.01) == found.weights
        assert pytest.approx(4 * count, rel=0.01) == found.gradients
        assert pytest.approx(12 * count, rel=0.01) == found.optimizer
        assert found.parts.total == found.peak > found.first_peak > found.weights + found.gradients


def test_what_is_impossible_is_refused_with_its_reason(executor: Executor) -> None:
    """megatron-core's own words reach the user, and the worker lives on."""
    layout = Layout(tp=3)
    with pytest.raises(PlanError, match=r"tp3 pp1 dp1 mbs1: num_attention_heads \(4\) must be a multiple"):
        executor.execute(job_of(small(), layout), layout, (0,))
    assert executor.execute(job_of(small(), Layout()), Layout(), (0,))
