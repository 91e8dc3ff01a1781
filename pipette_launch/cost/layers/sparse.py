"""Parameters, bytes, work and exchanges of DeepSeek's sparse attention (DSA, letter D of hybrid patterns).

An indexer scores the earlier keys of each token, and the attention core reads only the keys with the best scores
(DeepSeek-V3.2, arXiv 2512.02556). Megatron multiplies the key's up-projection into the query and the value's
up-projection into the output, so all heads share one key and value: the latent with its rotary part.

Sources, in megatron/core/transformer/experimental_attention_variant of core_v0.19.0 and main d98e8a64 (0.20): DSA =
dsa.py, ABS = absorbed_mla.py, CUDNN = dsa_cudnn_kernels.py.
"""

# Symbols in formulas: T = tokens of one micro-batch on a rank, s = sequence.

from __future__ import annotations

from collections.abc import Iterator

from pipette_launch.cost.layers.attention import ANGLES, Attention
from pipette_launch.cost.layers.block import FP32_BYTES, MASK_BYTES, Activations, Parameters
from pipette_launch.cost.layers.loads import Exchange, Load, PassLoads, Product, matrix
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Ints, Layout

_FUSED_LATENT, _FUSED_HEADS = 512, 64
"""Width of the latent, and least number of heads, in the kernels. Fewer heads are padded (CUDNN:348-375)."""
_FP32_PRODUCT = 16
"""Seconds of a product in fp32, without tensor cores, divided by the seconds of the product in 16 bits."""
_SCORE_CHUNK_BYTES = 1 << 30
"""Most bytes of an indexer's scores that exist at once with kernels (CUDNN:136)."""


class Sparse(Attention):
    """Absorbed latent attention over the keys that an indexer selects."""

    has_indexer = True

    def __init__(self, job: Job, layout: Layout, domain: int = 1) -> None:
        super().__init__(job, layout, domain)
        model = self.model
        assert model.latent_attention is not None
        assert model.sparse_attention is not None
        latent, sparse = model.latent_attention, model.sparse_attention
        self.latent, self.sparse, self.groups, self.value = latent, sparse, 1, latent.kv_lora_rank
        self.query = self.pair = latent.kv_lora_rank + latent.qk_pos_emb_head_dim
        self.pair_bytes = model.dtype_bytes * self.tokens * self.pair
        """Bytes of the keys of a rank's own tokens, which are also the values."""
        self.is_fused = sparse.dsa_kernel_backend != "none" and latent.kv_lora_rank == _FUSED_LATENT
        self.core_heads = max(self.heads, _FUSED_HEADS) if self.is_fused else self.heads
        self.has_loss = self.has_indexer and sparse.dsa_indexer_loss_coeff > 0
        is_whole = sparse.dsa_kernel_backend == "cudnn" and sparse.dsa_indexer_topk_freq == layout.cp == 1
        self.has_plain_loss = self.has_loss and not (self.is_fused and (sparse.dsa_indexer_use_sparse_loss or is_whole))
        """True if torch computes the loss on all scores in fp32 (DSA, `FusedDSAIndexerLoss`)."""
        self.keeps_query = self.is_fused or self.has_loss  # Else torch's core keeps only an fp32 copy.
        self.width = sparse.dsa_indexer_n_heads * sparse.dsa_indexer_head_dim  # Channels of the indexer's queries.
        self.topk = min(sparse.dsa_indexer_topk, model.seq_length)
        self.scores = self.tokens * model.seq_length
        self.pairs = self.tokens * sparse.selected_keys(model.seq_length)
        self.latent_query = latent.q_lora_rank or model.hidden_size  # Input of the query's up-projection.
        self.indexed = model.hidden_size + self.latent_query  # Inputs of the indexer.
        self.is_split = layout.sequence_parallel and layout.tp > 1
        self.angles = ANGLES * model.seq_length // layout.cp * latent.qk_pos_emb_head_dim

    def parameters(self) -> Parameters:
        """Count latent attention and, on every tensor rank, the whole indexer with the LayerNorm of its keys."""
        indexer = self.sparse.weights(self.model.hidden_size, self.latent_query) if self.has_indexer else 0
        return super().parameters() + Parameters(dense=indexer)

    def activations(self) -> Activations:
        """Count the activations of norm, projections, indexer and core, by the saved tensors of ABS:380-700."""
        one, latent, latents = self.model.dtype_bytes, self.latent, self.latent.q_lora_rank or 0
        widths = latents + (latents + latent.kv_lora_rank if self.model.qk_layernorm else 0)
        vectors = one * self.tokens * self.heads
        return Activations(
            layer_input=self.stream_bytes(),
            attention_norm=self.residual_bytes,
            attention=one * (self.local_tokens * widths + self.angles) + vectors * latent.v_head_dim,
            latent_projections=vectors * (latent.query_channels + self.query * self.keeps_query),
            core_attention=self.core_bytes(),
            dropout_masks=self.dropout_mask_bytes,
        )

    def core_bytes(self) -> int:
        """Count the bytes that indexer and core keep: keys of all context-parallel ranks, output, indices, scores.

        Kernels keep indices and the log-sum-exp in 4 bytes each (CUDNN:2264). For each head, torch's core keeps three
        masks, two fp32 matrices and one 16-bit matrix of all T * s scores, and fp32 copies of query and key
        (DSA:65-130, dsa_masking.py:356-373). Both keep a copy of the value's up-projection.
        """
        one, b, heads = self.model.dtype_bytes, self.layout.micro_batch_size, self.heads
        keys = self.tokens * self.layout.cp
        kept = one * self.value * (heads * self.latent.v_head_dim + self.tokens * self.core_heads)
        # Without kernels and loss, the values of one sample are the keys, and several samples are copied for each head.
        kept += self.layout.cp * self.pair_bytes if self.keeps_query or b == 1 else 0
        kept += self._indexer_bytes(keys)
        if self.is_fused:
            return kept + 4 * self.tokens * (self.topk + self.core_heads)
        kept += self.scores * heads * (3 * MASK_BYTES + 2 * FP32_BYTES + one)
        kept += FP32_BYTES * self.query * (self.tokens * heads + keys * (1 if b == 1 else heads))
        return kept + (one * keys * heads * self.value if b > 1 else 0)

    def _indexer_bytes(self, keys: int) -> int:
        """Count the bytes that the indexer keeps for the backward of its loss; 0 without the loss.

        With cuDNN the forward also computes the gradients of queries, keys and weights, and keeps these gradients
        instead (CUDNN:2264). With sequence parallelism the indexer gathers its inputs (DSA:1265-1268).
        """
        if not self.has_loss:
            return 0
        one, sparse, size = self.model.dtype_bytes, self.sparse, self.sparse.dsa_indexer_head_dim
        widths = self.width + sparse.dsa_indexer_n_heads + size + self.is_split * self.indexed
        # Torch's loss keeps indices in 8 bytes, and TileLang gradients of scores in 4 (tilelang_indexer_loss.py:333).
        each = 8 if self.has_plain_loss else 4 if sparse.dsa_kernel_backend == "tilelang" else 0
        return one * (self.tokens * widths + keys * size + self.angles) + self.tokens * self.topk * each

    def held_for_recompute_bytes(self) -> int:
        """Count the bytes of a rank's own keys, and of a query that the core does not keep itself."""
        query = 0 if self.keeps_query else self.model.dtype_bytes * self.tokens * self.heads * self.query
        return self.pair_bytes + query

    def core_backward_bytes(self) -> int:
        """Count the bytes that indexer and core need for a while.

        cuDNN's backward copies query, output and gradient twice (CUDNN:2064-2088). For each score and head, torch's
        core needs 17 bytes in its backward, torch's loss 9, and torch's indexer 8 while the core keeps no scores yet
        (peaks of CPU runs with 512 tokens, 4 and 8 heads, and 2 and 16 heads of the indexer).
        """
        one, heads, of_index = self.model.dtype_bytes, self.heads, self.sparse.dsa_indexer_n_heads
        loss = max(9 * of_index + 12, 17 * heads) if self.has_plain_loss else 0
        if not self.is_fused:
            index = 8 * of_index - (3 + 2 * FP32_BYTES + one) * heads if self.has_indexer else 0
            return self.scores * max(17 * heads, loss, index)
        core = one * self.tokens * self.core_heads * (3 * self.query + 5 * self.value)
        chunks = 3 * min(FP32_BYTES * self.scores, _SCORE_CHUNK_BYTES) * self.has_indexer
        return max(core, chunks, self.scores * loss)

    def loads(self) -> PassLoads:
        """Return the work of projections, rotary embedding, indexer and core.

        Two products with the up-projections' weights replace the key's and value's up-projections. Their results are
        copied once, and the query is assembled by one more copy (ABS:655-696).
        """
        rows, local, hidden, latent = self.tokens, self.local_tokens, self.model.hidden_size, self.latent
        loads = matrix(local, self.query, hidden) + matrix(rows, hidden, self.heads * latent.v_head_dim)
        loads += matrix(rows, self.heads * latent.query_channels, self.latent_query)
        if latent.q_lora_rank:
            loads += matrix(local, latent.q_lora_rank, hidden)
        for outputs, inputs in ((self.value, latent.qk_head_dim), (latent.v_head_dim, self.value)):
            loads += matrix(rows, outputs, inputs, count=self.heads, is_linear=False)
        moved = self.model.dtype_bytes * rows * self.heads * (5.0 * self.query + 2 * self.value)
        turn = Load(moved_bytes=moved, kernels=16)
        return loads + PassLoads(forward=turn, input_grad=turn) + self.core_loads()

    def core_loads(self) -> PassLoads:
        """Return the work of the core, and of the indexer, whose matrices run whole on every tensor rank.

        Gradients of the loss stop at the indexer's inputs, so its matrices have no input gradients. The backward of
        torch's loss computes all scores again, and three products with the indexer's queries and keys.
        """
        found, sparse = self._selected_loads(), self.sparse
        if not self.has_indexer:
            return found
        linears = matrix(self.tokens, self.width, self.latent_query)
        linears += matrix(self.tokens, sparse.dsa_indexer_head_dim + sparse.dsa_indexer_n_heads, self.model.hidden_size)
        found += PassLoads(forward=linears.forward + Load(kernels=40) + self._scored())
        if not self.has_loss:
            return found
        loss, scored = self._loss_load(), self._scored()
        again = loss + scored + scored + scored if self.has_plain_loss else Load(kernels=20)
        return found + PassLoads(forward=loss, input_grad=again, weight_grad=linears.weight_grad)

    def _in_fp32(self, heads: float, width: float, moved: float) -> Load:
        """Return the work of torch's scores in fp32 for all keys; each score moves `moved` bytes."""
        one = self.model.seq_length
        product = Product(m=one, n=one, k=width, count=_FP32_PRODUCT * heads * self.tokens / one)
        return Load(products=(product,), moved_bytes=moved * self.scores * heads, kernels=30)

    def _scored(self) -> Load:
        """Return the work of the indexer's scores: of earlier keys by kernels, or of all keys by torch.

        Beside cuDNN torch computes the scores head by head in fp32, if samples are not packed and the scores of a rank
        are computed in chunks or for a part of the sequence (CUDNN:626-660).
        """
        sparse, is_part = self.sparse, self.layout.cp > 1 or FP32_BYTES * self.scores > _SCORE_CHUNK_BYTES
        is_kept = self.has_loss and not sparse.dsa_indexer_use_sparse_loss
        if not self.is_fused or (sparse.dsa_kernel_backend == "cudnn" and is_part and not (sparse.sft or is_kept)):
            return self._in_fp32(sparse.dsa_indexer_n_heads, sparse.dsa_indexer_head_dim, 20.0)
        return Load(attention_flops=1.0 * self.scores * self.width, moved_bytes=6.0 * self.scores, kernels=6)

    def _loss_load(self) -> Load:
        """Return the forward of the indexer's loss, which computes the core's scores again.

        With shared keys, cuDNN also runs the core's forward once more (CUDNN:2432).
        """
        if self.has_plain_loss:
            return self._in_fp32(self.heads, self.query, 90.0)
        sparse = self.sparse
        pairs = self.pairs if sparse.dsa_indexer_use_sparse_loss else 0.5 * self.scores
        flops = 2.0 * pairs * (self.core_heads * self.query + 3 * self.width)
        load = Load(attention_flops=flops, exponentials=pairs * self.core_heads, kernels=20)
        runs_again = sparse.dsa_kernel_backend == "cudnn" and sparse.dsa_indexer_topk_freq > 1
        return load + self._selected_loads().forward if runs_again else load

    def _selected_loads(self) -> PassLoads:
        """Return the work of scores and context over the selected keys, or with torch over all keys.

        TileLang's backward also runs the forward again (ops/sparse_mla.py:89).
        """
        if not self.is_fused:
            one = self.model.seq_length
            context = Load(products=(Product(m=one, n=self.value, k=one, count=self.heads * self.tokens / one),))
            forward = self._in_fp32(self.heads, self.query, 90.0) + context
            return PassLoads(forward=forward, input_grad=self._in_fp32(2.0 * self.heads, self.query, 10.0) + forward)
        pairs = self.pairs * self.core_heads
        flops, backward = 2.0 * pairs * (self.query + self.value), 2.5 + (self.sparse.dsa_kernel_backend == "tilelang")
        load = Load(attention_flops=backward * flops, exponentials=pairs, kernels=20)
        return PassLoads(forward=Load(attention_flops=flops, exponentials=pairs, kernels=8), input_grad=load)

    def module_flops(self) -> dict[str, float]:
        """Return the FLOPs per token of indexer and core, and of the products that `mla_up_proj` repeats."""
        absorbed = 2.0 * self.model.num_attention_heads * self.latent.qk_head_dim * self.value
        core = self.model.sparse_core_flops(has_indexer=self.has_indexer)
        return {"core_attn": core, "mla_up_proj": self.column_flops() + absorbed}

    def column_flops(self) -> float:
        """Return the FLOPs per token of the query's up-projection."""
        return 2.0 * self.latent_query * self.model.num_attention_heads * self.latent.query_channels

    def column_inputs(self) -> tuple[int, ...]:
        """Return the width of the input of the query's up-projection, the only gathered input of a matrix."""
        return (self.latent_query,)

    def exchanges(self, once_S: Ints, again_S: Ints) -> Iterator[Exchange]:
        """Yield the gathers of latents and indexer inputs over tp, of keys over cp, and the sums of the loss's target.

        Gathers at the same time count as one. The target is a mean over all heads, so tensor ranks add their parts
        (CUDNN:1463, DSA:487). Not counted: one sum of the indexer's gradients over tp in each step.
        """
        row, cp, size = self.model.dtype_bytes * self.tokens, self.layout.cp, self.sparse.dsa_indexer_head_dim
        if self.is_split:
            gathered = self.query + self.has_indexer * self.indexed
            yield Exchange.of("all_gather", "tp", row * gathered, once_S, again_S)
            yield Exchange.of("reduce_scatter", "tp", row * self.query, 0 * once_S, once_S)
        if self.layout.tp > 1 and self.has_loss:
            target = FP32_BYTES * self.tokens * (self.model.seq_length if self.has_plain_loss else self.topk)
            yield Exchange.of("all_reduce", "tp", target, once_S, again_S + once_S * self.has_plain_loss)
        if cp > 1:
            keys, reduced = (self.query + size * each for each in (self.has_indexer, self.has_loss))
            yield Exchange.of("all_gather", "cp", row * cp * keys, once_S, again_S)
            yield Exchange.of("reduce_scatter", "cp", row * cp * reduced, 0 * once_S, once_S)


class SharedSparse(Sparse):
    """Sparse attention that takes the selected keys of an earlier layer of its pipeline stage."""

    has_indexer = False
