"""FP8 copies of weights, on layers of known size (see test_parameters), and stand-ins for gradients, shape by shape.

h 64, f 256, four heads of 16, 256 tokens in the vocabulary.
"""

from dataclasses import replace

import pytest
from facts_for_tests import tiny_job, tiny_model

from pipette_launch.cost.layers.beside_weights import dummy_gradient_bytes, fp8_weight_bytes
from pipette_launch.cost.layers.parameters import layer_parameters
from pipette_launch.facts import Job, Layout

MATRICES = 12480 + 4160 + 16640 + 16448
"""A GPT layer of h 64 without its two norms."""
LAYER = 2 * (192 * 64 + 64 * 64 + 256 * 64 + 64 * 256)
"""Query-key-value, projection, and the two of the MLP, in bf16."""


def job(*flags: str, **changes: object) -> Job:
    """A bf16 GPT of four layers on core_v0.16."""
    model = {"params_dtype": "bf16", "transformer_impl": "transformer_engine"}
    return replace(tiny_job(model=tiny_model(**(model | changes)), performance_flags=flags), megatron_version="0.16.1")


def test_two_bytes_for_each_parameter_of_the_layers() -> None:
    """On each rank its own layers; embeddings, norms and the head stay as they are."""
    fp8 = job("--fp8-format hybrid")

    assert fp8_weight_bytes(fp8, Layout()) == (8 * MATRICES,)
    assert fp8_weight_bytes(fp8, Layout(pp=2, layers_per_chunk=(3, 1))) == (6 * MATRICES, 2 * MATRICES)
    assert fp8_weight_bytes(fp8, Layout(pp=2, vpp=2)) == (4 * MATRICES, 4 * MATRICES)


def test_experts_are_copied_and_the_router_is_not() -> None:
    """Two dense layers and two with experts, of which a rank has two."""
    moe = {"num_experts": 4, "moe_layer_freq": (0, 1, 0, 1), "moe_ffn_hidden_size": 128, "add_bias_linear": False}
    fp8 = job("--fp8-format e4m3", **moe)
    plain, experts = (layer_parameters(fp8.model, Layout(dp=2, ep=2), moe=kind).count for kind in (False, True))

    expected = 2 * (2 * (plain - 256) + 2 * (experts - 256 - 4 * 64))
    assert fp8_weight_bytes(fp8, Layout(dp=2, ep=2)) == (expected,)


def test_no_copies() -> None:
    """Without FP8, with weights that are FP8 themselves, and in Megatron's own layers."""
    for plain in (
        job(),
        job("--fp8-format hybrid", "--fp8-param-gather"),
        job("--fp8-format hybrid", transformer_impl="local"),
    ):
        assert fp8_weight_bytes(plain, Layout(pp=2)) == (0, 0)


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
