"""A plain GPT as a job: what benchmarks plan for when only its shape and its batch matter."""

from __future__ import annotations

from pipette_launch.facts import Batch, Job, Layout, ModelSpec
from pipette_launch.facts.job import PerformanceOptions


def gpt_job(
    shape: tuple[int, int, int],
    *,
    seq_length: int,
    vocab_size: int,
    params_dtype: str,
    transformer_impl: str,
    attention_backend: str,
    global_batch_size: int,
    own: Layout,
) -> Job:
    """Return a job with Adam of a GPT with biases, tied embeddings and an MLP of four hidden sizes.

    Args:
        shape: layers, hidden size, heads.
        seq_length: tokens of a sample.
        vocab_size: rows of the vocabulary before padding.
        params_dtype: element type of the weights.
        transformer_impl: as Megatron names it.
        attention_backend: backend that runs.
        global_batch_size: samples of a step.
        own: the user's own layout.

    """
    return Job(
        model=_model(
            shape,
            seq_length=seq_length,
            vocab_size=vocab_size,
            params_dtype=params_dtype,
            transformer_impl=transformer_impl,
            attention_backend=attention_backend,
        ),
        batch=Batch(global_batch_size=global_batch_size),
        own=own,
        pinned=(),
        notes=(),
        megatron_version="0.16.1",
        grad_reduce_in_bf16=False,
        optimizer="adam",
        log_interval=1,
        train_iters=None,
        options=PerformanceOptions(),
        performance_flags=(),
    )


def _model(
    shape: tuple[int, int, int],
    *,
    seq_length: int,
    vocab_size: int,
    params_dtype: str,
    transformer_impl: str,
    attention_backend: str,
) -> ModelSpec:
    layers, hidden, heads = shape
    return ModelSpec(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=4 * hidden,
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=hidden // heads,
        seq_length=seq_length,
        max_position_embeddings=seq_length,
        vocab_size=vocab_size,
        make_vocab_size_divisible_by=128,
        gated_linear_unit=False,
        normalization="LayerNorm",
        add_bias_linear=True,
        add_qkv_bias=False,
        position_embedding_type="learned_absolute",
        untie_embeddings_and_output_weights=False,
        attention_dropout=0.1,
        hidden_dropout=0.1,
        params_dtype=params_dtype,  # type: ignore[arg-type]
        transformer_impl=transformer_impl,  # type: ignore[arg-type]
        attention_backend=attention_backend,  # type: ignore[arg-type]
        num_experts=None,
        moe_layer_freq=(),
        moe_router_topk=2,
        moe_ffn_hidden_size=4 * hidden,
        moe_shared_expert_intermediate_size=0,
    )
