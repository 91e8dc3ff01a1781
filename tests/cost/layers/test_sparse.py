"""Sparse attention: parameters, kept bytes, work and exchanges, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from facts_for_tests import tiny_job, tiny_model

from pipette_launch.cost.layers.sparse import SharedSparse, Sparse
from pipette_launch.facts import LatentAttention, Layout, ModelSpec, SparseAttention

GLM = LatentAttention(q_lora_rank=2048, kv_lora_rank=512, qk_head_dim=192, qk_pos_emb_head_dim=64, v_head_dim=256)
TOKENS, HEADS, HIDDEN, QUERY = 4096, 64, 6144, 576
"""Sizes of GLM-5, but with a short sequence. A query has the 512 channels of the latent and 64 rotary channels."""
LAYOUT = Layout()
ONE = np.array([1])


def model(**changes: Any) -> ModelSpec:
    """GLM-5's attention, trained with cuDNN's kernels and the loss of selected keys."""
    indexer = {"dsa_indexer_n_heads": 32, "dsa_indexer_head_dim": 128, "dsa_indexer_topk": 2048}
    options = {"dsa_indexer_loss_coeff": 0.001, "dsa_indexer_use_sparse_loss": True, "dsa_kernel_backend": "cudnn"}
    return tiny_model(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        seq_length=TOKENS,
        params_dtype="bf16",
        max_position_embeddings=TOKENS,
        transformer_impl="transformer_engine",
        add_bias_linear=False,
        normalization="RMSNorm",
        qk_layernorm=True,
        position_embedding_type="rope",
        latent_attention=GLM,
        sparse_attention=SparseAttention(**(indexer | options | changes)),
    )


def kept(block: Sparse) -> int:
    """Bytes that the indexer and the core keep."""
    return block.core_bytes()


def test_every_tensor_rank_holds_the_whole_indexer() -> None:
    """Queries from the latent, keys and weights from the hidden state, and a LayerNorm of the keys."""
    indexer = 32 * 128 * 2048 + 128 * HIDDEN + 32 * HIDDEN + 2 * 128

    for layout in (LAYOUT, Layout(tp=8)):
        with_indexer, without = (
            each(tiny_job(model=model()), layout).parameters().dense for each in (Sparse, SharedSparse)
        )
        assert indexer == with_indexer - without


def test_kernels_keep_indices_and_gradients_of_the_indexer() -> None:
    """Keys, output with a copy of the value's weights, 4 bytes an index, and what the indexer's loss keeps."""
    core = 2 * TOKENS * (QUERY + HEADS * 512) + 2 * HEADS * 256 * 512 + TOKENS * (4 * 2048 + 4 * HEADS)
    indexer = 2 * TOKENS * (32 * 128 + 32 + 2 * 128) + 4 * 2 * TOKENS * 64

    assert core + indexer == kept(Sparse(tiny_job(model=model()), LAYOUT))
    assert (
        core
        == kept(Sparse(tiny_job(model=model(dsa_indexer_loss_coeff=0.0)), LAYOUT))
        == kept(SharedSparse(tiny_job(model=model()), LAYOUT))
    )
    gathered = 2 * TOKENS * (HIDDEN + 2048)
    split = (Sparse(tiny_job(model=model()), Layout(tp=2, sequence_parallel=parallel)) for parallel in (True, False))
    assert gathered == kept(next(split)) - kept(next(split))


def test_kernels_pad_few_heads() -> None:
    """8 heads of a rank cost cuDNN the output and the work of 64."""
    one, eight = (Sparse(tiny_job(model=model()), Layout(tp=tp)) for tp in (1, 8))

    assert one._selected_loads() == eight._selected_loads()


def test_torch_keeps_all_scores_and_multiplies_in_fp32() -> None:
    """13 bytes for each score of all keys, fp32 queries and keys, and the output."""
    plain = Sparse(tiny_job(model=model(dsa_kernel_backend="none", dsa_indexer_loss_coeff=0.0)), LAYOUT)
    scores = TOKENS * TOKENS * HEADS

    assert plain.has_plain_loss is False
    rest = 4 * QUERY * TOKENS * (HEADS + 1) + 2 * TOKENS * (QUERY + HEADS * 512) + 2 * HEADS * 256 * 512
    assert 13 * scores + rest == kept(plain)
    assert 17 * scores == plain.core_backward_bytes()
    scored, context = plain._selected_loads().forward.products
    assert scored.flops == 16 * 2 * scores * QUERY
    assert context.flops == 2 * scores * 512


def test_the_core_reads_the_selected_keys() -> None:
    """A token has at most 2,048 keys and at most its own number; the backward takes 2.5 times the forward."""
    pairs = sum(min(2048, 1 + token) for token in range(TOKENS)) * HEADS
    loads = Sparse(tiny_job(model=model()), LAYOUT)._selected_loads()

    assert loads.forward.attention_flops == pytest.approx(2.0 * pairs * (QUERY + 512), rel=1e-3)
    assert loads.input_grad.attention_flops == 2.5 * loads.forward.attention_flops


def test_torch_scores_parts_of_a_sequence_beside_cudnn() -> None:
    """Head by head in fp32, unless samples are packed; TileLang's kernels score any part."""
    whole, part = Layout(), Layout(cp=2)

    def fp32(layout: Layout, **changes: Any) -> int:
        """Products of the indexer's scores by torch."""
        return len(Sparse(tiny_job(model=model(**changes)), layout)._scored().products)

    assert (0, 1) == (fp32(whole), fp32(part))
    assert (0, 0) == (fp32(part, sft=True), fp32(part, dsa_kernel_backend="tilelang"))
    scores = TOKENS // 2 * TOKENS
    assert 16 * 2 * scores * 32 * 128 == Sparse(tiny_job(model=model()), part)._scored().products[0].flops


def test_an_untrained_indexer_has_no_backward() -> None:
    """Without its loss the indexer only scores; with it, its matrices have weight gradients but no input gradients."""
    trained, untrained, shared = (
        block.loads()
        for block in (
            Sparse(tiny_job(model=model()), LAYOUT),
            Sparse(tiny_job(model=model(dsa_indexer_loss_coeff=0.0)), LAYOUT),
            SharedSparse(tiny_job(model=model()), LAYOUT),
        )
    )

    assert untrained.weight_grad == shared.weight_grad
    assert 2 == len(trained.weight_grad.products) - len(untrained.weight_grad.products)
    assert 2 == len(untrained.forward.products) - len(shared.forward.products)
    assert len(trained.input_grad.products) == len(shared.input_grad.products)


def test_exchanges_gather_keys_and_sum_the_target() -> None:
    """Over cp keys and the indexer's keys; over tp latents, the indexer's inputs, and the target of the loss."""
    over_cp = [*Sparse(tiny_job(model=model()), Layout(cp=4)).exchanges(ONE, 0 * ONE)]
    over_tp = [*Sparse(tiny_job(model=model()), Layout(tp=2, sequence_parallel=True)).exchanges(ONE, 0 * ONE)]
    plain = Sparse(tiny_job(model=model(dsa_kernel_backend="none")), Layout(tp=2))

    both = ["all_gather", "reduce_scatter"]
    assert [both, [*both, "all_reduce"]] == [[each.kind for each in some] for some in (over_cp, over_tp)]
    assert 2 * [2 * TOKENS * (QUERY + 128)] == [each.size_bytes for each in over_cp]
    gathered, reduced, target = (each.size_bytes for each in over_tp)
    assert (QUERY + HIDDEN + 2048, QUERY, 2 * 2048) == tuple(size / 2 / TOKENS for size in (gathered, reduced, target))
    assert [4 * TOKENS * TOKENS] == [each.size_bytes for each in plain.exchanges(ONE, 0 * ONE)]
