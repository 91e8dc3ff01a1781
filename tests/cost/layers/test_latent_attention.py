"""Latent attention and multi-token prediction by hand, as they are cut over ranks; the contract test has the rest."""

from facts_for_tests import tiny_model

from pipette_launch.cost.layers.latent_attention import (
    attention_activations,
    attention_parameters,
    prediction_activations,
)
from pipette_launch.cost.layers.parameters import layer_parameters, stage_parameters
from pipette_launch.facts import LatentAttention, Layout, ModelSpec

LATENT = LatentAttention(q_lora_rank=48, kv_lora_rank=32, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=12)


def model(**changes: object) -> ModelSpec:
    """A bf16 model of h 64 and four heads, without biases."""
    return tiny_model(**({"params_dtype": "bf16", "add_bias_linear": False, "latent_attention": LATENT} | changes))


def test_down_projections_are_whole_with_transformer_engine() -> None:
    """h*48 and h*40 stay; up-projections of 48*96 and 32*112 and the output's 48*h are split."""
    split = 48 * 96 + 32 * 112 + 48 * 64
    down = 64 * 48 + 64 * 40

    assert attention_parameters(model(transformer_impl="transformer_engine"), LATENT, 2) == down + split // 2
    assert attention_parameters(model(), LATENT, 2) == (down + split) // 2


def test_norms_and_biases_of_latent_attention() -> None:
    """A LayerNorm on each latent, and one bias behind the output."""
    plain = attention_parameters(model(), LATENT, 1)

    assert attention_parameters(model(qk_layernorm=True), LATENT, 1) == plain + 2 * (48 + 32)
    assert attention_parameters(model(add_bias_linear=True), LATENT, 1) == plain + 64


def test_plain_attention_has_norms_of_one_head() -> None:
    """Two LayerNorms of 16 channels."""
    plain = layer_parameters(tiny_model(), Layout(), moe=False)

    assert layer_parameters(tiny_model(qk_layernorm=True), Layout(), moe=False).dense == plain.dense + 4 * 16


def test_latents_are_split_over_the_sequence_and_heads_over_tp() -> None:
    """Compressed 48 + 40 channels for half the tokens; two of four heads with 24, 24 and 12 channels for all."""
    layout = Layout(tp=2, sequence_parallel=True)
    kept = attention_activations(model(), LATENT, layout, fused_rope=True)

    assert (2 * 16 * 88, 2 * 32 * 2 * 60, 2 * 32 * 2 * 12) == (kept.latents, kept.projected, kept.context)


def test_an_unfused_rotary_embedding_keeps_its_angles() -> None:
    """Sine and cosine for queries and keys, 8 channels of 2 bytes for each of 32 tokens."""
    fused, unfused = (attention_activations(model(), LATENT, Layout(), fused_rope=value) for value in (True, False))

    assert unfused.latents == fused.latents + 4 * 2 * 32 * 8


def test_multi_token_prediction_copies_the_embedding_to_the_last_rank() -> None:
    """A layer, three norms and a projection of 2h to h; words and positions, beside a head that is a copy itself."""
    for is_untied in (True, False):
        plain, predicts = (
            stage_parameters(
                tiny_model(mtp_num_layers=depths, untie_embeddings_and_output_weights=is_untied), Layout(pp=2)
            )
            for depths in (0, 1)
        )
        layer = layer_parameters(tiny_model(), Layout(), moe=False).dense

        assert plain[0] == predicts[0]
        assert predicts[1].dense - plain[1].dense == layer + 3 * 128 + 2 * 64 * 64 + (32 + 256) * 64


def test_multi_token_prediction_has_its_parameters_where_the_layout_puts_it() -> None:
    """A stage of its own copies the embedding, the first stage looks up its own, and the last has the head alone."""
    model = tiny_model(mtp_num_layers=1, untie_embeddings_and_output_weights=True)
    depth = layer_parameters(model, Layout(), moe=False).dense + 3 * 128 + 2 * 64 * 64
    words, embedding = 256 * 64, (32 + 256) * 64

    def ends(*chunks: int, after: int) -> list[int]:
        """Dense parameters of each stage without its layers."""
        stages = stage_parameters(model, Layout(pp=len(chunks), layers_per_chunk=chunks, chunks_after_mtp=after))
        layer = layer_parameters(model, Layout(), moe=False).dense
        return [stage.dense - layer * count for stage, count in zip(stages, chunks, strict=True)]

    assert [embedding, 0, depth + embedding, words + 128] == ends(2, 2, 0, 0, after=1)
    assert [embedding, 0, 0, depth + embedding + words + 128] == ends(2, 2, 0, 0, after=0)
    assert [embedding + depth, words + 128] == ends(4, 0, after=1)


def test_predicted_layers_have_experts_where_the_last_layer_has() -> None:
    """One more layer of experts on the last rank."""
    shape = {"num_experts": 4, "moe_layer_freq": (0, 0, 0, 1)}
    plain, predicts = (stage_parameters(tiny_model(mtp_num_layers=depths, **shape), Layout()) for depths in (0, 1))

    assert 2 * plain[0].expert == predicts[0].expert


def test_predictions_are_split_over_the_sequence() -> None:
    """Six tensors of s*b*h, halved by two ranks with sequence parallelism."""
    assert prediction_activations(model(), Layout()) == 6 * 2 * 32 * 64
    assert prediction_activations(model(), Layout(tp=2, sequence_parallel=True)) == 6 * 32 * 64
