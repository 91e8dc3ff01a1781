"""Stand-ins for gradients, shape by shape: h 64, f 256, four heads of 16, 256 tokens in the vocabulary."""

from dataclasses import replace

import pytest
from facts_for_tests import tiny_job, tiny_model

from pipette_launch.cost.layers.dummy_gradients import dummy_gradient_bytes
from pipette_launch.facts import Job, Layout

LAYER = 2 * (192 * 64 + 64 * 64 + 256 * 64 + 64 * 256)
"""Query-key-value, projection, and the two of the MLP, in bf16."""


def job(*flags: str, **changes: object) -> Job:
    """A bf16 GPT on core_v0.16."""
    model = {"params_dtype": "bf16", "transformer_impl": "transformer_engine"}
    return replace(tiny_job(model=tiny_model(**(model | changes)), performance_flags=flags), megatron_version="0.16.1")


def test_one_for_each_shape() -> None:
    """However many layers there are; the head's on the last rank."""
    assert dummy_gradient_bytes(job(), Layout(), has_head=False) == LAYER
    assert dummy_gradient_bytes(job(num_layers=2), Layout(), has_head=False) == LAYER
    assert dummy_gradient_bytes(job(vocab_size=512), Layout(), has_head=True) == LAYER + 2 * 512 * 64


def test_equal_shapes_share_one() -> None:
    """A vocabulary of 256 and a first matrix of 256, both from 64 inputs."""
    assert dummy_gradient_bytes(job(), Layout(), has_head=True) == LAYER


def test_tensor_parallelism_cuts_the_matrices() -> None:
    """All of them in halves; a gated unit's first matrix is twice as high."""
    assert dummy_gradient_bytes(job(), Layout(tp=2), has_head=False) == LAYER // 2
    assert dummy_gradient_bytes(job(gated_linear_unit=True), Layout(), has_head=False) == LAYER + 2 * 256 * 64


def test_experts_have_none_but_shared_ones() -> None:
    """Attention 192 + 64 rows, and a shared expert of width 32."""
    moe = {"num_experts": 4, "moe_layer_freq": (1,) * 4, "moe_ffn_hidden_size": 128}
    attention = 2 * (192 * 64 + 64 * 64)

    assert dummy_gradient_bytes(job(**moe), Layout(), has_head=False) == attention
    shared = job(**moe, moe_shared_expert_intermediate_size=32)
    assert dummy_gradient_bytes(shared, Layout(), has_head=False) == attention + 2 * 2 * 32 * 64


@pytest.mark.parametrize(
    "this",
    [
        job("--no-gradient-accumulation-fusion"),
        job(transformer_impl="local"),
        replace(job(), megatron_version="0.13.1"),
    ],
)
def test_nothing_without_the_store(this: Job) -> None:
    """Gradients that are computed apart, Megatron's own layers, and releases before it."""
    assert dummy_gradient_bytes(this, Layout(), has_head=True) == 0
