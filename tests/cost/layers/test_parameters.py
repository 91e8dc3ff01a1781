"""Parameters on one rank, by hand."""

import pytest
from facts_for_tests import tiny_model

from pipette_launch.cost.layers.parameters import (
    Parameters,
    chunk_parameters,
    expert_dp,
    layer_parameters,
    stage_parameters,
)
from pipette_launch.facts import Layout

MOE = {"num_experts": 4, "moe_layer_freq": (0, 1, 0, 1), "moe_ffn_hidden_size": 128, "add_bias_linear": False}


def test_a_gpt_layer() -> None:
    """With h 64, f 256: QKV 64*192+192, projection 64*64+64, MLP 64*256+256 and 256*64+64, two norms of 128."""
    assert layer_parameters(tiny_model(), Layout(), moe=False) == Parameters(dense=12480 + 4160 + 16640 + 16448 + 256)


def test_tensor_parallel_halves_columns_and_rows_but_not_row_biases_and_norms() -> None:
    """QKV and first matrix halve with their bias; projection and second matrix keep theirs."""
    expected = 6240 + (2048 + 64) + 8320 + (8192 + 64) + 256

    assert layer_parameters(tiny_model(), Layout(tp=2), moe=False) == Parameters(dense=expected)


def test_a_llama_layer() -> None:
    """Two query groups of four heads, SwiGLU, RMSNorm, no bias: 64*(64+2*32) + 64*64 + 3*64*256 + 2*64."""
    model = tiny_model(num_query_groups=2, gated_linear_unit=True, normalization="RMSNorm", add_bias_linear=False)

    assert layer_parameters(model, Layout(), moe=False) == Parameters(dense=8192 + 4096 + 49152 + 128)


def test_a_query_group_is_never_split() -> None:
    """With tp 4 over two groups: each rank holds one whole group of 16 channels."""
    model = tiny_model(num_query_groups=2, add_bias_linear=False)

    assert layer_parameters(model, Layout(tp=4), moe=False) == Parameters(dense=64 * (16 + 32 + 16) + 8192 + 256)


def test_query_bias_alone() -> None:
    """`--add-qkv-bias` without other biases adds one bias for each QKV column."""
    plain = layer_parameters(tiny_model(add_bias_linear=False), Layout(), moe=False)

    assert layer_parameters(
        tiny_model(add_bias_linear=False, add_qkv_bias=True), Layout(), moe=False
    ) == plain + Parameters(dense=192)


def test_an_expert_layer() -> None:
    """Attention, norms and router everywhere; two of four experts of width 128 on each of two ranks, split by etp."""
    dense = 64 * 192 + 64 * 64 + 256 + 64 * 4
    model = tiny_model(**MOE)

    assert layer_parameters(model, Layout(dp=2, ep=2), moe=True) == Parameters(dense=dense, expert=2 * 2 * 64 * 128)
    assert layer_parameters(model, Layout(tp=2, dp=2, ep=2, etp=2), moe=True).expert == 2 * 2 * 64 * 64


def test_a_shared_expert_is_dense() -> None:
    """It is reduced with the rest of the model."""
    plain = layer_parameters(tiny_model(**MOE), Layout(), moe=True)
    shared = layer_parameters(tiny_model(**MOE, moe_shared_expert_intermediate_size=32), Layout(), moe=True)

    assert shared == plain + Parameters(dense=2 * 64 * 32)


def test_ends_of_the_model() -> None:
    """Embedding 256*64 and positions 32*64 in front, final norm behind; a tied copy on the last of several stages."""
    layer = layer_parameters(tiny_model(), Layout(), moe=False).dense

    assert stage_parameters(tiny_model(), Layout()) == (Parameters(dense=4 * layer + 16384 + 2048 + 128),)
    assert stage_parameters(tiny_model(), Layout(pp=2)) == (
        Parameters(dense=2 * layer + 16384 + 2048),
        Parameters(dense=2 * layer + 128 + 16384),
    )


def test_an_untied_head_has_weights_of_its_own() -> None:
    """On one stage it comes on top of the embedding."""
    tied, untied = (
        stage_parameters(tiny_model(untie_embeddings_and_output_weights=value), Layout())[0] for value in (False, True)
    )

    assert untied == tied + Parameters(dense=16384)


def test_the_vocabulary_is_padded_and_split() -> None:
    """250 tokens on two ranks: padded to 256, 128 rows each."""
    model = tiny_model(vocab_size=250, position_embedding_type="rope")
    layer = layer_parameters(model, Layout(tp=2), moe=False).dense

    assert stage_parameters(model, Layout(tp=2))[0] == Parameters(dense=4 * layer + 128 * 64 + 128)


def test_chunks_follow_the_layers() -> None:
    """Uneven chunks hold what they are given, and ranks hold every pp-th chunk."""
    model = tiny_model(position_embedding_type="rope", untie_embeddings_and_output_weights=True)
    layer = layer_parameters(model, Layout(), moe=False).dense
    layout = Layout(pp=2, vpp=2, layers_per_chunk=(0, 1, 2, 1))

    assert [part.dense for part in chunk_parameters(model, layout)] == [
        16384,
        layer,
        2 * layer,
        layer + 128 + 16384,
    ]
    assert [part.dense for part in stage_parameters(model, layout)] == [
        16384 + 2 * layer,
        2 * layer + 128 + 16384,
    ]


@pytest.mark.parametrize(
    ("layout", "expected"), [(Layout(dp=8, ep=4), 2), (Layout(tp=2, dp=4, ep=2, etp=1), 4), (Layout(pp=2, dp=2), 2)]
)
def test_expert_data_parallel_size(layout: Layout, expected: int) -> None:
    """World over etp * ep * pp."""
    assert expert_dp(layout) == expected
