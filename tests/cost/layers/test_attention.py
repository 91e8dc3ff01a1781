"""Kept bytes of attention, by hand: s 32, b 1, h 64, four heads of 16 in bf16; s*b*h is 2,048 elements."""

import pytest
from facts_for_tests import tiny_job, tiny_model

from pipette_launch.cost.layers.attention import Attention, LatentBytes
from pipette_launch.cost.layers.ends import depth_bytes
from pipette_launch.cost.layers.kinds import kind_parameters
from pipette_launch.cost.layers.parameters import stage_parameters
from pipette_launch.facts import Job, LatentAttention, Layout, ModelSpec

LOG_SUM_EXP = 4 * 4 * 32
"""fp32, four heads, 32 tokens."""


def job(*flags: str, **changes: object) -> Job:
    """A bf16 GPT with fused attention."""
    model = {"params_dtype": "bf16", "transformer_impl": "transformer_engine", "attention_backend": "fused"}
    return tiny_job(model=tiny_model(**(model | changes)), performance_flags=flags)


def of(name: str, work: Job, layout: Layout) -> int:
    """Bytes that a method of the attention block counts."""
    found: int = getattr(Attention(work, layout), name)()
    return found


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # 5as/h = 10 with dropout; probabilities alone are 2as/h = 4, twice that in fp32.
        ({"attention_backend": "unfused", "attention_dropout": 0.1}, 10 * 2048),
        ({"attention_backend": "unfused"}, 4 * 2048),
        ({"transformer_impl": "local", "attention_dropout": 0.1}, 10 * 2048),
        ({"transformer_impl": "local", "attention_dropout": 0.1, "attention_backend": "flash"}, 10 * 2048),
        ({"transformer_impl": "local"}, 4 * 2048),
        ({"transformer_impl": "local", "params_dtype": "fp32"}, 8 * 2048),
        ({"attention_backend": "flash"}, LOG_SUM_EXP),
        ({"attention_backend": "auto"}, LOG_SUM_EXP),
    ],
)
def test_attention_core_by_backend(changes: dict[str, object], expected: int) -> None:
    """The bytes that autograd saves in attention, by backend."""
    assert of("core_bytes", job(**changes), Layout()) == expected


@pytest.mark.parametrize(
    ("flags", "changes", "expected"),
    [
        ((), {}, 4096),
        (("--fp8-format hybrid",), {}, 4096 + 2048),
        (("--fp8-format hybrid", "--fp8-recipe tensorwise"), {}, 4096),
        (("--fp4-format e2m1",), {}, 4096),
        (("--fp8-format hybrid",), {"attention_backend": "unfused"}, 2048),
        (("--fp8-format hybrid", "--fp8-recipe mxfp8"), {"attention_backend": "unfused"}, 4096),
    ],
)
def test_only_delayed_scaling_keeps_a_narrow_context(
    flags: tuple[str, ...], changes: dict[str, object], expected: int
) -> None:
    """In other formats the projection keeps the context itself, which fused attention keeps anyway."""
    assert of("context_bytes", job(*flags, **changes), Layout()) == expected


def test_gates_and_sinks_have_their_parameters_and_bytes() -> None:
    """A gate is as wide as the query: 64 x 64 weights, and two more tensors. A learnable sink is one number a head."""
    plain, gated = job(add_bias_linear=False), job(add_bias_linear=False, attention_output_gate=True)
    sinks = job(add_bias_linear=False, softmax_type="learnable")
    counts = [Attention(each, Layout(tp=2)).parameters().dense for each in (plain, gated, sinks)]
    products = [Attention(each, Layout()).loads().forward.products[0].n for each in (plain, gated)]

    assert (64 * 32, 2) == (counts[1] - counts[0], counts[2] - counts[0])
    assert gated.model.attention_parameters() - plain.model.attention_parameters() == 64 * 64
    assert of("projected_bytes", gated, Layout()) - of("projected_bytes", plain, Layout()) == 2 * 2 * 2048
    assert [192, 256] == products


def test_local_scores_are_written_to_one_buffer() -> None:
    """2as/h = 4 for all layers together, and nothing with other implementations."""
    assert Attention(job(transformer_impl="local"), Layout()).scores_buffer_bytes() == 4 * 2048
    assert Attention(job(transformer_impl="local"), Layout(tp=2)).scores_buffer_bytes() == 2 * 2048
    assert Attention(job(attention_backend="unfused"), Layout()).scores_buffer_bytes() == 0


def test_the_attention_core_is_split_over_heads() -> None:
    """Two of four heads, half the probabilities."""
    assert of("core_bytes", job(attention_backend="unfused"), Layout(tp=2)) == 2 * 2048


@pytest.mark.parametrize(
    ("flags", "changes", "expected"),
    [
        # Probabilities in fp32 4, mask 1, dropped ones 2: 7as/h = 14; without dropout 4 and a narrow copy 2: 12.
        (("--no-masked-softmax-fusion", "--attention-softmax-in-fp32"), {"attention_dropout": 0.1}, 14 * 2048),
        (("--no-masked-softmax-fusion", "--apply-query-key-layer-scaling"), {}, 12 * 2048),
        (("--no-masked-softmax-fusion",), {"attention_dropout": 0.1}, 10 * 2048),
        (("--attention-softmax-in-fp32",), {"attention_dropout": 0.1}, 10 * 2048),
    ],
)
def test_local_softmax_in_fp32(flags: tuple[str, ...], changes: dict[str, object], expected: int) -> None:
    """Only where Megatron's own kernel does not run are the probabilities kept in fp32."""
    assert of("core_bytes", job(*flags, transformer_impl="local", **changes), Layout()) == expected


def test_long_sequences_have_no_fused_softmax() -> None:
    """The kernel stops at 4,096 keys: 7 bytes a score beyond."""
    long = job(
        "--attention-softmax-in-fp32",
        transformer_impl="local",
        attention_dropout=0.1,
        seq_length=8192,
        max_position_embeddings=8192,
    )

    assert of("core_bytes", long, Layout()) == 7 * 4 * 8192 * 8192


def test_query_key_value_and_context() -> None:
    """Four tensors of 2; with half as many groups as heads, key and value are half."""
    assert of("projected_bytes", job(), Layout()) == 8 * 2048
    assert of("projected_bytes", job(num_query_groups=2), Layout()) == 6 * 2048
    assert of("projected_bytes", job(), Layout(tp=2)) == 4 * 2048


def test_a_query_group_is_whole_on_every_rank() -> None:
    """Two groups on four ranks: query and context 1/4, key and value one group of 16 channels each."""
    assert of("projected_bytes", job(num_query_groups=2), Layout(tp=4)) == 4 * 16 * 32 * 2


def test_flash_attention_copies_its_output_for_batches() -> None:
    """2 more for each sample of two; none with a single one, and none by cuDNN."""
    flash = job(attention_backend="flash")

    assert of("projected_bytes", flash, Layout()) == 8 * 2048
    assert of("projected_bytes", flash, Layout(micro_batch_size=2)) == 2 * 10 * 2048
    assert of("projected_bytes", job(), Layout(micro_batch_size=2)) == 2 * 8 * 2048


def test_norms_of_query_and_key() -> None:
    """Their inputs, 2 each, and two fp32 statistics of each of eight vectors a token; RMSNorm has one."""
    assert of("projected_bytes", job(qk_layernorm=True), Layout()) == 12 * 2048 + 8 * 8 * 32
    assert of("projected_bytes", job(qk_layernorm=True, normalization="RMSNorm"), Layout()) == 12 * 2048 + 4 * 8 * 32


def test_unfused_rotary_embedding_keeps_its_angles() -> None:
    """Sine and cosine for query and for key: four tensors of s * 16, for any micro-batch."""
    plain, unfused = (job(*flags, position_embedding_type="rope") for flags in ((), ("--no-rope-fusion",)))
    layout = Layout(micro_batch_size=2)

    assert of("projected_bytes", unfused, layout) - of("projected_bytes", plain, layout) == 4 * 2 * 32 * 16
    assert of("projected_bytes", job("--no-rope-fusion"), layout) == of("projected_bytes", job(), layout)


def test_backward() -> None:
    """Gradients of query, key, value and context; unfused one of the scores, 2as/h = 4, on top."""
    assert of("core_backward_bytes", job(), Layout()) == 8 * 2048
    assert of("core_backward_bytes", job(attention_backend="unfused"), Layout()) == 12 * 2048


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # Query, key and value lie in one tensor of 6 * 2048 bytes; a rotary embedding makes a new query and key.
        ({}, 0),
        ({"position_embedding_type": "rope"}, 4 * 2048),
        ({"position_embedding_type": "rope", "num_query_groups": 2}, 3 * 2048),
        ({"num_query_groups": 2}, 2 * 2048),
        ({"position_embedding_type": "rope", "qk_layernorm": True}, 0),
    ],
)
def test_recompute_of_the_core_holds_what_query_key_and_value_lie_in(changes: dict[str, object], expected: int) -> None:
    """It keeps views, which hold the whole; as abstract execution of megatron-core found."""
    assert Attention(job(**changes), Layout()).held_for_recompute_bytes() == expected


RING_OUT, RING_PAIR, RING_STATISTICS = 16 * 64 * 2, 2 * 16 * 64 * 2, 4 * 4 * 16
"""One step on one of two ranks: output, keys and values in bf16, log-sum-exp in fp32."""


@pytest.mark.parametrize(
    ("flags", "changes", "layout", "expected"),
    [
        ((), {}, Layout(), 0),
        ((), {}, Layout(cp=2), 2 * (RING_OUT + RING_PAIR + RING_STATISTICS)),
        ((), {}, Layout(cp=2, micro_batch_size=3), 3 * 2 * (RING_OUT + RING_PAIR + RING_STATISTICS)),
        # In a longer ring every rank has less, and the ring holds the same.
        ((), {}, Layout(cp=8), 2 * (RING_OUT + RING_PAIR + RING_STATISTICS)),
        ((), {}, Layout(cp=2, tp=2), RING_OUT + RING_PAIR + RING_STATISTICS),
        ((), {"num_query_groups": 1}, Layout(cp=2), 2 * (RING_OUT + RING_PAIR // 4 + RING_STATISTICS)),
        (("--cp-comm-type all_gather",), {}, Layout(cp=2), 2 * RING_PAIR),
        (("--cp-comm-type a2a",), {}, Layout(cp=2), 0),
        (
            ("--cp-comm-type a2a+p2p", "--hierarchical-context-parallel-sizes 4 2"),
            {},
            Layout(cp=8),
            (RING_OUT + RING_PAIR + RING_STATISTICS) // 2,
        ),
    ],
)
def test_a_ring_holds_the_steps_of_all_its_ranks(
    flags: tuple[str, ...], changes: dict[str, object], layout: Layout, expected: int
) -> None:
    """Keys, values, output and statistics of every step, for as long as one layer's attention runs."""
    assert expected == of("exchange_bytes", job(*flags, **changes), layout)


def test_a_ring_of_latent_attention() -> None:
    """Outputs have the value's channels, keys the query's."""
    latent = LatentAttention(kv_lora_rank=16, q_lora_rank=None, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=12)
    pairs, outputs = 32 * 4 * (24 + 12) * 2, 32 * 4 * 12 * 2

    assert pairs + outputs + 32 * 4 * 4 == of("exchange_bytes", job(latent_attention=latent), Layout(cp=4))


LATENT = LatentAttention(q_lora_rank=48, kv_lora_rank=32, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=12)


def model(**changes: object) -> ModelSpec:
    """A bf16 model of h 64 and four heads, without biases."""
    return tiny_model(**({"params_dtype": "bf16", "add_bias_linear": False, "latent_attention": LATENT} | changes))


def test_down_projections_are_whole_with_transformer_engine() -> None:
    """h*48 and h*40 stay; up-projections of 48*96 and 32*112 and the output's 48*h are split."""
    split = 48 * 96 + 32 * 112 + 48 * 64
    down = 64 * 48 + 64 * 40

    assert latent_parameters(2, transformer_impl="transformer_engine") == down + split // 2
    assert latent_parameters(2) == (down + split) // 2


def test_norms_and_biases_of_latent_attention() -> None:
    """A LayerNorm on each latent, and one bias behind the output."""
    plain = latent_parameters(1)

    assert latent_parameters(1, qk_layernorm=True) == plain + 2 * (48 + 32)
    assert latent_parameters(1, add_bias_linear=True) == plain + 64


def test_plain_attention_has_norms_of_one_head() -> None:
    """Two LayerNorms of 16 channels."""
    plain = kind_parameters(tiny_job(), Layout(), "layer")

    assert (
        kind_parameters(tiny_job(model=tiny_model(qk_layernorm=True)), Layout(), "layer").dense == plain.dense + 4 * 16
    )


def latent_bytes(work: Job, layout: Layout) -> LatentBytes:
    """Bytes that one latent attention keeps."""
    return Attention(work, layout).latent_bytes(LATENT)


def test_latents_are_split_over_the_sequence_and_heads_over_tp() -> None:
    """Compressed 48 + 40 channels for half the tokens; two of four heads with 24, 24 and 12 channels for all."""
    layout = Layout(tp=2, sequence_parallel=True)
    kept = latent_bytes(job(latent_attention=LATENT), layout)

    assert (2 * 16 * 88, 2 * 32 * 2 * 60, 2 * 32 * 2 * 12) == (kept.compressed, kept.projected, kept.context)


@pytest.mark.parametrize(("backend", "norms", "expected"), [("unfused", False, (96, 12)), ("fused", True, (256, 36))])
def test_fp8_keeps_inputs_of_latent_projections_in_one_byte(
    backend: str, norms: bool, expected: tuple[int, int]
) -> None:
    """80 latent channels in 1 byte and 8 in 2; norms keep the 80 in 2 bytes too, and fused attention its own output."""
    narrow = job("--fp8-format hybrid", latent_attention=LATENT, attention_backend=backend, qk_layernorm=norms)
    kept = latent_bytes(narrow, Layout())

    assert (32 * expected[0], 32 * 4 * expected[1]) == (kept.compressed, kept.context)


def test_an_unfused_rotary_embedding_keeps_its_angles() -> None:
    """Sine and cosine for queries and keys, 8 channels of 2 bytes for each of 32 tokens."""
    jobs = (job(*flags, latent_attention=LATENT) for flags in ((), ("--no-rope-fusion",)))
    fused, unfused = (latent_bytes(each, Layout()) for each in jobs)

    assert unfused.compressed == fused.compressed + 4 * 2 * 32 * 8


def latent_parameters(tp: int, **changes: object) -> int:
    """Parameters of one latent attention on one rank."""
    return Attention(tiny_job(model=model(latent_attention=LATENT, **changes)), Layout(tp=tp)).parameters().dense


def test_multi_token_prediction_copies_the_embedding_to_the_last_rank() -> None:
    """A layer, three norms and a projection of 2h to h; words and positions, beside a head that is a copy itself."""
    for is_untied in (True, False):
        plain, predicts = (
            stage_parameters(
                tiny_job(model=tiny_model(mtp_num_layers=depths, untie_embeddings_and_output_weights=is_untied)),
                Layout(pp=2),
            )
            for depths in (0, 1)
        )
        layer = kind_parameters(tiny_job(), Layout(), "layer").dense

        assert plain[0] == predicts[0]
        assert predicts[1].dense - plain[1].dense == layer + 3 * 128 + 2 * 64 * 64 + (32 + 256) * 64


def test_multi_token_prediction_has_its_parameters_where_the_layout_puts_it() -> None:
    """A stage of its own copies the embedding, the first stage looks up its own, and the last has the head alone."""
    model = tiny_model(mtp_num_layers=1, untie_embeddings_and_output_weights=True)
    depth = kind_parameters(tiny_job(model=model), Layout(), "layer").dense + 3 * 128 + 2 * 64 * 64
    words, embedding = 256 * 64, (32 + 256) * 64

    def ends(*chunks: int, after: int) -> list[int]:
        """Dense parameters of each stage without its layers."""
        stages = stage_parameters(
            tiny_job(model=model), Layout(pp=len(chunks), layers_per_chunk=chunks, chunks_after_mtp=after)
        )
        layer = kind_parameters(tiny_job(model=model), Layout(), "layer").dense
        return [stage.dense - layer * count for stage, count in zip(stages, chunks, strict=True)]

    assert [embedding, 0, depth + embedding, words + 128] == ends(2, 2, 0, 0, after=1)
    assert [embedding, 0, 0, depth + embedding + words + 128] == ends(2, 2, 0, 0, after=0)
    assert [embedding + depth, words + 128] == ends(4, 0, after=1)


def test_predicted_layers_have_experts_where_the_last_layer_has() -> None:
    """One more layer of experts on the last rank."""
    shape = {"num_experts": 4, "moe_layer_freq": (0, 0, 0, 1)}
    plain, predicts = (
        stage_parameters(tiny_job(model=tiny_model(mtp_num_layers=depths, **shape)), Layout()) for depths in (0, 1)
    )

    assert 2 * plain[0].expert == predicts[0].expert


def test_predictions_are_split_over_the_sequence() -> None:
    """Six tensors of s*b*h, halved by two ranks with sequence parallelism."""
    plain = tiny_job(model=model())

    assert depth_bytes(plain, Layout()) == 6 * 2 * 32 * 64
    layout = Layout(tp=2, sequence_parallel=True)
    assert depth_bytes(plain, layout) == 6 * 32 * 64
