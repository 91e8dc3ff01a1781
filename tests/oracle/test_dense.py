"""megatron-core runs without a GPU, and the bytes are those that can be counted by hand."""

import os
from collections.abc import Iterator
from dataclasses import asdict

import pytest
from facts_for_tests import changed_job, tiny_job, tiny_model
from oracle.executor import Executor, RefusedError

from pipette_launch.cost.layers.parameters import stage_parameters
from pipette_launch.cost.memory.peak import peak_memory_bytes
from pipette_launch.facts import Batch, Job, Layout, ModelSpec, Recompute


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
    """Return a job with this number of micro-batches."""
    batch = Batch(global_batch_size=microbatches * layout.dp * layout.micro_batch_size)
    return tiny_job(layout.world_size, model=model, own=layout, batch=batch)


@pytest.mark.parametrize("layout", [Layout(tp=2, pp=2, dp=2), Layout(pp=4), Layout(dp=4, cp=2)])
def test_static_bytes_are_those_of_the_parameters(executor: Executor, layout: Layout) -> None:
    """2 bytes of weight, 4 of gradient, 12 of optimizer for each parameter, within 1 %: small ones are rounded up."""
    job = job_of(small(), layout)
    parameters = stage_parameters(job, layout)
    for found in executor.execute(job, layout, range(layout.pp)):
        count = parameters[found.pp_rank].count

        assert pytest.approx(2 * count, rel=0.01) == found.weights
        assert pytest.approx(4 * count, rel=0.01) == found.gradients
        assert pytest.approx(12 * count, rel=0.01) == found.optimizer
        assert sum(asdict(found.parts).values()) == found.peak >= found.first_peak >= found.allocated_after_step


def test_an_impossible_layout_is_refused_with_megatrons_reason(executor: Executor) -> None:
    """The worker answers the next request as before."""
    layout = Layout(tp=3)
    with pytest.raises(RefusedError, match=r"num_attention_heads \(4\) must be a multiple"):
        executor.execute(job_of(small(), layout), layout, (0,))
    assert executor.execute(job_of(small(), Layout()), Layout(), (0,))


LLAMA = {
    "gated_linear_unit": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
}
FULL = Recompute(granularity="full", method="uniform", num_layers=1)


@pytest.mark.parametrize(
    ("changes", "layout"),
    [
        ({}, Layout(dp=2, use_distributed_optimizer=True)),
        ({"attention_backend": "unfused", "attention_dropout": 0.1, "hidden_dropout": 0.1}, Layout(tp=2, pp=2)),
        (LLAMA, Layout(tp=2, pp=2, sequence_parallel=True, micro_batch_size=2)),
        ({**LLAMA, "attention_backend": "flash", "num_query_groups": 2}, Layout(pp=2, vpp=2)),
        ({**LLAMA, "attention_backend": "flash"}, Layout(cp=2, recompute=FULL)),
        ({"transformer_impl": "local", "attention_backend": "local"}, Layout(pp=2)),
    ],
)
def test_closed_form_and_execution_agree(executor: Executor, changes: dict[str, object], layout: Layout) -> None:
    """Two ways that share no code come within 4 % of each other on every stage, with every part of memory at work."""
    model = small(seq_length=1024, max_position_embeddings=1024, num_layers=8, vocab_size=8192, **changes)
    job = job_of(model, layout)
    closed = peak_memory_bytes(job, layout)
    for found in executor.execute(job, layout, range(layout.pp)):
        assert pytest.approx(found.peak, rel=0.04) == closed[found.pp_rank].total


SELECTIVE = Recompute(granularity="selective")


@pytest.mark.parametrize(
    "layout",
    [
        Layout(cp=4),
        Layout(pp=2, cp=8),
        Layout(pp=4, cp=2, recompute=SELECTIVE),
        Layout(pp=4, recompute=SELECTIVE),
        Layout(pp=4, vpp=2, cp=2),
        Layout(pp=4, vpp=2, recompute=SELECTIVE),
    ],
)
def test_both_ends_hold_the_mask_of_long_sequences(executor: Executor, layout: Layout) -> None:
    """First and last stages agree within 4 % where the mask of 8192 x 8192 is larger than what layers keep."""
    model = small(**LLAMA, seq_length=8192, max_position_embeddings=8192, num_layers=8, hidden_size=64, kv_channels=16)
    job = job_of(model, layout)
    closed = peak_memory_bytes(job, layout)
    for found in executor.execute(job, layout, sorted({0, layout.pp - 1})):
        assert pytest.approx(found.peak, rel=0.04) == closed[found.pp_rank].total


@pytest.mark.parametrize(
    ("changes", "layout"),
    [
        ({}, Layout(cp=16)),
        ({}, Layout(cp=16, recompute=FULL)),
        ({"attention_backend": "flash", "num_query_groups": 1}, Layout(cp=8, micro_batch_size=2, recompute=FULL)),
        ({"num_query_groups": 1}, Layout(pp=2, cp=16, recompute=FULL)),
    ],
)
def test_a_long_ring_holds_all_its_steps(executor: Executor, changes: dict[str, object], layout: Layout) -> None:
    """Without a mask the attention of one layer makes the peak: 24 MiB of 160 for 16 ranks."""
    model = small(**LLAMA, seq_length=8192, max_position_embeddings=8192, num_layers=2, **changes)
    job = changed_job(job_of(model, layout), performance_flags=("--no-create-attention-mask-in-dataloader",))
    closed = peak_memory_bytes(job, layout)
    for found in executor.execute(job, layout, range(layout.pp)):
        assert pytest.approx(found.peak, rel=0.04) == closed[found.pp_rank].total
