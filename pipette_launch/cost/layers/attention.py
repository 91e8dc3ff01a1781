"""Parameters, bytes and work of multi-head or multi-latent attention, for the implementation that the job runs.

TE = TransformerEngine v2.8, pytorch/attention/dot_product_attention; MC = megatron/core of core_v0.16.1;
MLA = MC transformer/multi_latent_attention.py.
"""

# Symbols in formulas: T = tokens of one micro-batch on a rank, s = sequence, a = heads of a rank, k = query groups of a
# rank, d = channels of one head, t = tp, h = hidden size. The formulas of bytes in units of T or s*b*h count 2 bytes an
# element.

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pipette_launch.cost.layers.block import (
    FP32_BYTES,
    MASK_BYTES,
    Activations,
    Block,
    Parameters,
    as_matrix_input,
    has_narrow_copies,
)
from pipette_launch.cost.layers.loads import Exchange, Load, PassLoads, Product, matrix
from pipette_launch.facts.job import RING, Job
from pipette_launch.facts.layout import Ints, Layout
from pipette_launch.facts.model import LatentAttention, ModelSpec

_STATISTICS_BYTES = {"LayerNorm": 8, "RMSNorm": 4}
"""Bytes that a norm keeps for each vector: mean and reciprocal deviation in fp32 (RMSNorm keeps no mean)."""
ANGLES = 4
"""Number of tensors of sines and cosines that a rotary embedding keeps for queries and keys (MC
models/common/embeddings/rope_utils.py:113-125)."""


def is_local(model: ModelSpec) -> bool:
    """Return True if the job runs Megatron's own attention, which has no fused kernel."""
    return model.transformer_impl == "local" or model.attention_backend == "local"


def is_flash(model: ModelSpec) -> bool:
    """Return True for flash and fused attention, which never write the scores to the device's memory."""
    return not is_local(model) and model.attention_backend != "unfused"


def ring_steps(job: Job, layout: Layout) -> int:
    """Return the number of ranks in the longest context-parallel ring of a layer; 0 if no ring is used."""
    options = job.options
    steps = {RING: layout.cp, f"a2a+{RING}": (options.hierarchical_context_parallel_sizes or (layout.cp,))[-1]}
    longest = max((steps.get(kind, 1) for kind in options.cp_comm_type), default=1)
    return longest if longest > 1 else 0


class LatentBytes(NamedTuple):
    """Bytes that multi-latent attention keeps in one layer, without the attention core."""

    compressed: int
    """Bytes of compressed queries, keys and values, and of the inputs of their norms."""
    projected: int
    """Bytes of query, key and value of all heads, which are not kept if `mla_up_proj` is recomputed."""
    context: int
    """Bytes of the attention core's output."""


class Attention(Block):
    """Attention block: projections, rotary embedding and attention core."""

    graph_parts = ("attn",)

    def __init__(self, job: Job, layout: Layout, domain: int = 1) -> None:
        super().__init__(job, layout, domain)
        model = self.model
        latent = model.latent_attention
        self.heads = model.num_attention_heads // layout.tp
        self.groups = self.heads if latent else max(1, model.num_query_groups // layout.tp)
        """Number of query groups on a rank, at least 1 even with more ranks than groups (MC
        transformer/attention.py)."""
        self.query = latent.query_channels if latent else model.kv_channels
        """Number of channels in the query, and in the key, of one head."""
        self.value = latent.v_head_dim if latent else model.kv_channels
        """Number of channels in the value of one head."""
        self.pair = self.groups * (self.query + self.value)
        """Number of channels in all keys and values of one token on a rank."""
        self.pair_outputs = 2 * model.num_query_groups * model.kv_channels // layout.tp
        """Number of outputs of the query-key-value matrix that belong to keys and values. The ranks that share a query
        group split its channels evenly."""
        self.gate = model.attention_output_gate * self.heads * self.query
        """Number of outputs of the query-key-value matrix that gate the output of attention."""
        self.pair_bytes = model.dtype_bytes * self.tokens * self.pair
        """Bytes of the keys and values of one layer."""

    def parameters(self) -> Parameters:
        """Count the parameters of projections, of their biases, of the norms of query and key, and of sinks."""
        model, query = self.model, self.heads * self.query
        if model.latent_attention:
            return Parameters(dense=self._latent_parameters(model.latent_attention) + self._sinks())
        outputs = query + self.gate + self.pair_outputs
        bias = outputs if model.add_bias_linear or model.add_qkv_bias else 0
        bias += model.hidden_size if model.add_bias_linear else 0
        # Norms of one head's query and key (MC transformer/attention.py, q_layernorm and k_layernorm).
        norms = 2 * model.kv_channels * (2 if model.normalization == "LayerNorm" else 1) if model.qk_layernorm else 0
        return Parameters(dense=model.hidden_size * (outputs + query) + bias + norms + self._sinks())

    def _sinks(self) -> int:
        return self.heads if self.model.softmax_type == "learnable" else 0

    def _latent_parameters(self, latent: LatentAttention) -> int:
        """Count multi-latent attention (MLA:441-553).

        tp splits up-projections and the output projection. Transformer Engine's layers have the whole down-projections
        on every rank (models/gpt/gpt_layer_specs.py:245-262), but Megatron's own layers split the
        down-projections. The latents have norms only with `--qk-layernorm`.
        """
        model, hidden, tp = self.model, self.model.hidden_size, self.layout.tp
        down_shards = 1 if self.uses_te else tp
        heads, ranks = model.num_attention_heads, latent.kv_lora_rank + (latent.q_lora_rank or 0)
        down = hidden * (ranks + latent.qk_pos_emb_head_dim)
        count = down // down_shards + (latent.weights(hidden, heads) - down) // tp
        norms = ranks * (2 if model.normalization == "LayerNorm" else 1) if model.qk_layernorm else 0
        return count + norms + (hidden if model.add_bias_linear else 0)

    def activations(self) -> Activations:
        """Count the activations of norm, projections and attention core.

        A whole layer of Llama with fused attention keeps s*b*h*(12 + 4k/a + 6f/h)/t bytes with sequence parallelism.
        Without sequence parallelism this layer keeps s*b*h*(8 + (4 + 4k/a + 6f/h)/t) bytes. A layer of a GPT with
        dropout keeps s*b*h*34/t bytes with sequence parallelism, and s*b*h*(10 + 24/t) bytes without (Korthikanti et
        al. 2022, section 4).
        """
        latent, latents = self.model.latent_attention, 0
        if latent:
            each = self.latent_bytes(latent)
            # Ring attention keeps the last keys and values in a buffer that recompute of projections does not free.
            pair = self.pair_bytes if ring_steps(self.job, self.layout) else 0
            kept, latents = each.compressed + each.context + pair, each.projected - pair
        else:
            kept = self.projected_bytes()
        return Activations(
            layer_input=self.stream_bytes(),
            attention_norm=self.residual_bytes if latent else as_matrix_input(self.job, self.residual_bytes),
            attention=kept,
            latent_projections=latents,
            core_attention=self.core_bytes(),
            dropout_masks=self.dropout_mask_bytes,
            fuses_attention_norm=self.uses_te and not latent,
        )

    def projected_bytes(self) -> int:
        """Count query, key, value and context, T*(2a + 2k)*d elements, and the tensors kept between them.

        The whole output of the query-key-value matrix is not kept, because TE makes query, key and value contiguous.
        With query groups a reshape copies the query (TE utils.py, get_qkv_layout; MC transformer/attention.py:1463).
        """
        model, channels = self.model, self.model.kv_channels
        element = model.dtype_bytes * self.tokens
        kept = element * (self.heads + 2 * self.groups) * channels + self.context_bytes()
        if not is_local(model) and model.attention_backend == "flash" and self.layout.micro_batch_size > 1:
            # Flash attention needs tensors whose first dimension is the batch. If a micro-batch has several samples,
            # FlashAttention.forward copies its output for the projection, so the output is kept twice (TE backends.py,
            # v1.7 to v1.11 and from v2.3 on).
            kept += element * self.heads * channels
        if self.gate:
            # The output gate keeps itself and its product with the context, which is the projection's input. With one
            # query group the gate is a view of the whole output of the matrix (MC transformer/attention.py:1486).
            whole = self.heads * self.query + self.gate + self.pair
            kept += element * (self.gate if self.groups > 1 else whole)
            kept += 0 if has_narrow_copies(self.job) else element * self.gate
        if model.qk_layernorm:
            # Inputs of the norms of query and key, and their statistics (MC transformer/attention.py:1477-1481).
            vectors = self.tokens * (self.heads + self.groups)
            kept += vectors * (model.dtype_bytes * channels + _STATISTICS_BYTES[model.normalization])
        if model.position_embedding_type == "rope" and not self.options.apply_rope_fusion:
            kept += ANGLES * model.dtype_bytes * model.seq_length // self.layout.cp * channels
        return kept

    def context_bytes(self) -> int:
        """Count the core's output, which flash and fused attention, an output gate and the output projection keep.

        With FP8 and delayed scaling the output projection keeps a narrow copy instead (TE module/linear.py).
        """
        size = self.model.dtype_bytes * self.tokens * self.heads * self.value
        if not has_narrow_copies(self.job):
            return size
        return as_matrix_input(self.job, size) + (size if is_flash(self.model) or self.gate else 0)

    def latent_bytes(self, latent: LatentAttention) -> LatentBytes:
        """Count the bytes that multi-latent attention keeps (MLA:580-850).

        The outputs of the up-projections are not kept: query, key and value are assembled from copies. An unfused
        rotary embedding keeps the sines and cosines of queries and keys. Sequence parallelism splits the tokens of the
        latents.
        """
        model, ranks = self.model, latent.kv_lora_rank + (latent.q_lora_rank or 0)
        is_fused = self.uses_te and self.options.apply_rope_fusion
        angles = 0 if is_fused else ANGLES * model.seq_length // self.layout.cp * latent.qk_pos_emb_head_dim
        widths = latent.qk_pos_emb_head_dim + (ranks if model.qk_layernorm else 0)
        inputs = as_matrix_input(self.job, model.dtype_bytes * self.local_tokens * ranks)
        return LatentBytes(
            compressed=model.dtype_bytes * (self.local_tokens * widths + angles) + inputs,
            projected=model.dtype_bytes * self.tokens * self.heads * (2 * self.query + self.value),
            context=self.context_bytes(),
        )

    def core_bytes(self) -> int:
        """Count the bytes that the attention core keeps, by backend.

        Flash and fused attention keep the log-sum-exp in fp32. Unfused attention, Megatron's own included, keeps
        probabilities. Unfused attention with dropout also keeps a mask and the dropped probabilities: 5as/(h*t) in
        bf16. If Megatron's softmax is neither fused nor in the element type, probabilities are kept in fp32: 7as/(h*t)
        (MC fusions/fused_softmax.py:289-320).
        """
        model, rows = self.model, self.heads * self.tokens
        if is_flash(model):
            return FP32_BYTES * rows
        wide = is_local(model) and self._softmax_is_wide()
        each = FP32_BYTES if wide else model.dtype_bytes
        if model.attention_dropout > 0:
            each += model.dtype_bytes + MASK_BYTES
        elif wide:
            each += model.dtype_bytes
        return rows * model.seq_length * each

    def _softmax_is_wide(self) -> bool:
        """Return True if Megatron's softmax runs unfused in fp32, on scores of 2 bytes (MC fused_softmax.py:239)."""
        model, options = self.model, self.options
        matrices = self.layout.micro_batch_size * self.heads
        fits_kernel = 16 < model.seq_length <= 4096 and model.seq_length % 4 == 0 and matrices % 4 == 0
        in_fp32 = options.attention_softmax_in_fp32 or options.apply_query_key_layer_scaling
        return in_fp32 and not (fits_kernel and options.masked_softmax_fusion) and model.params_dtype != "fp32"

    def held_for_recompute_bytes(self) -> int:
        """Count the bytes of the query-key-value output that recompute of the core keeps beyond query, key and value.

        Query, key and value are views of the output of one matrix, and recompute keeps views. If a rotary embedding
        makes a new query and key, the view of the value still keeps the whole output. Without a rotary embedding extra
        bytes are kept only with query groups, because attention copies the query. With norms of query and key the
        result is 0, because the norms keep the whole output.
        """
        model = self.model
        if model.latent_attention or model.qk_layernorm:
            return 0
        vector = model.dtype_bytes * self.tokens * model.kv_channels
        if model.position_embedding_type == "rope":
            return vector * (self.heads + self.groups) + model.dtype_bytes * self.tokens * self.gate
        return vector * self.heads if self.heads > self.groups else 0

    def scores_buffer_bytes(self) -> int:
        """Count the bytes of the one buffer for local attention's scores in all layers (dot_product_attention.py)."""
        model = self.model
        return model.dtype_bytes * self.heads * self.tokens * model.seq_length if is_local(model) else 0

    def backward_bytes(self) -> int:
        """Count the larger need of bytes: the core's backward with two residual gradients, or the ring's exchange."""
        return max(2 * self.residual_bytes + self.core_backward_bytes(), self.exchange_bytes())

    def core_backward_bytes(self) -> int:
        """Count the bytes that the backward of the attention core needs beyond the core's kept activations.

        The backward of the core needs the gradients of query, key, value and context. The backward of unfused attention
        also needs a gradient as large as the probabilities. Ring attention has two buffers, each for keys, values and
        their gradients. Ring attention also holds the gradients of one step of the ring, with the gradients of keys and
        values twice (TE context_parallel.py, AttnFuncWithCPAndKVP2P.backward).
        """
        channels = (self.heads + self.groups) * (self.query + self.value)
        if ring_steps(self.job, self.layout):
            channels += self.heads * self.query + 5 * self.pair
        scores = 0 if is_flash(self.model) else self.heads * self.model.seq_length
        return self.model.dtype_bytes * self.tokens * (channels + scores)

    def exchange_bytes(self) -> int:
        """Count the bytes that context parallelism holds in one layer beside the core's inputs and output.

        Ring attention keeps keys, values, output and statistics of every step until the last step corrects all outputs.
        On the rank with the last piece of the sequence, the output of every step has full size. With `--cp-comm-type
        all_gather` a layer holds the keys and values of the whole sequence. With `--cp-comm-type a2a` a layer holds no
        additional bytes (TE context_parallel.py, forward of AttnFuncWithCPAndKVP2P and AttnFuncWithCPAndKVAllGather,
        v1.7 to v2.18).
        """
        steps, cp = ring_steps(self.job, self.layout), self.layout.cp
        gathers = cp > 1 and "all_gather" in self.options.cp_comm_type
        output = self.tokens * self.heads * (self.model.dtype_bytes * self.value + FP32_BYTES)
        return steps * output + max(steps, cp if gathers else 0) * self.pair_bytes

    def loads(self) -> PassLoads:
        """Return the work of projections, rotary embedding and core."""
        model, latent, count = self.model, self.model.latent_attention, self.tokens
        if latent:
            matrices = self._latent_loads(latent)
            groups, width = model.num_attention_heads, latent.qk_pos_emb_head_dim
        else:
            query = self.heads * self.query
            matrices = matrix(count, query + self.gate + self.pair_outputs, model.hidden_size)
            matrices += matrix(count, model.hidden_size, query)
            groups, width = max(self.layout.tp, model.num_query_groups), model.kv_channels
        turned = (model.num_attention_heads + groups) // self.layout.tp * width
        rotary = 4.0 * count * turned * model.dtype_bytes if latent or model.position_embedding_type == "rope" else 0.0
        # The gate's kernel reads gate and output, and writes their product; its backward also writes two gradients.
        gate = self.gate * count * model.dtype_bytes
        kernels = (4 if rotary else 0) + (1 if gate else 0)
        forward, backward = (Load(moved_bytes=rotary + each * gate, kernels=kernels) for each in (3, 5))
        return matrices + PassLoads(forward=forward, input_grad=backward) + self.core_loads()

    def _latent_loads(self, latent: LatentAttention) -> PassLoads:
        """Return the work of unsplit down-projections and of the up-projections to a rank's heads (MLA:441-553)."""
        count, hidden, heads = self.tokens, self.model.hidden_size, self.heads
        loads = matrix(count, latent.kv_lora_rank + latent.qk_pos_emb_head_dim, hidden)
        loads += matrix(count, heads * (latent.qk_head_dim + latent.v_head_dim), latent.kv_lora_rank)
        loads += matrix(count, hidden, heads * latent.v_head_dim)
        if latent.q_lora_rank is None:
            return loads + matrix(count, heads * self.query, hidden)
        return loads + matrix(count, latent.q_lora_rank, hidden) + matrix(count, heads * self.query, latent.q_lora_rank)

    def core_loads(self) -> PassLoads:
        """Return the work of scores, softmax and context, for flash attention or with all scores written to memory.

        Flash attention skips the scores behind the causal mask, which halves 2 * T * s * a * (d of query + d of value)
        FLOPs. Flash attention also skips the scores outside a window, counted in the mean of all layers. Flash
        attention has 2 products in the forward and 5 in the backward (Dao 2023). Other backends compute all T * s * a
        scores, and write, mask, normalise, drop and read these scores.
        """
        model, one = self.model, self.model.seq_length
        if is_flash(model):
            scores_seen = 0.5 * self.tokens * one * self.heads * model.window_share
            flops = 2.0 * scores_seen * (self.query + self.value)
            return PassLoads(
                forward=Load(attention_flops=flops, exponentials=scores_seen, kernels=2),
                input_grad=Load(attention_flops=2.5 * flops, exponentials=scores_seen, kernels=4),
            )
        batch = self.heads * self.tokens / one
        scores = Product(m=one, n=one, k=self.query, count=batch)
        context = Product(m=one, n=self.value, k=one, count=batch)
        probabilities = batch * one * one * model.dtype_bytes
        dropout = 2.5 * probabilities if model.attention_dropout > 0 else 0.0
        backward = (scores, scores, context, context)
        return PassLoads(
            forward=Load(products=(scores, context), moved_bytes=2 * probabilities + dropout, kernels=8),
            input_grad=Load(products=backward, moved_bytes=3 * probabilities + dropout, kernels=10),
        )

    def module_flops(self) -> dict[str, float]:
        """Return the FLOPs per token of the core and, with multi-latent attention, of the up-projections."""
        model, found = self.model, {"core_attn": self.model.core_flops_per_token}
        if model.latent_attention:
            found["mla_up_proj"] = 2.0 * model.latent_attention.up_weights(model.num_attention_heads)
        return found

    def column_flops(self) -> float:
        """Return the FLOPs per token of the query-key-value matrix, or the mean of multi-latent up-projections."""
        model = self.model
        if model.latent_attention:
            return 1.0 * model.latent_attention.up_weights(model.num_attention_heads)
        heads = (1 + model.attention_output_gate) * model.num_attention_heads
        return 2.0 * model.hidden_size * (heads + 2 * model.num_query_groups) * model.kv_channels

    def column_inputs(self) -> tuple[int, ...]:
        """Return the input widths of up-projections, and of down-projections in Megatron's own layers."""
        latent, hidden = self.model.latent_attention, self.model.hidden_size
        if latent is None:
            return (hidden,)
        num_down = 0 if self.uses_te else 1 if latent.q_lora_rank is None else 2
        return (latent.q_lora_rank or hidden, latent.kv_lora_rank, *(num_down * (hidden,)))

    def _gathers(self, once_S: Ints, again_S: Ints) -> Iterator[Exchange]:
        """Yield tensor-parallel gathers of query, key and value (MC transformer/attention.py:1398-1416, MLA:574-618).

        With fewer query groups than ranks, the whole output of the query-key-value matrix is gathered. Megatron's own
        down-projections of latent attention are gathered, and then split over the sequence. Transformer Engine does not
        split down-projections, so with sequence parallelism only the key's rotary part is gathered.
        """
        model, latent, none_S = self.model, self.model.latent_attention, 0 * once_S
        row, gathered = model.dtype_bytes * self.tokens, 0
        if latent is None and model.num_query_groups < self.layout.tp:
            heads = (1 + model.attention_output_gate) * model.num_attention_heads
            gathered = (heads + 2 * model.num_query_groups) * model.kv_channels
        elif latent and self.uses_te and self.layout.sequence_parallel:
            gathered = latent.qk_pos_emb_head_dim
        elif latent and not self.uses_te:
            query, key_value = latent.q_lora_rank or 0, latent.kv_lora_rank
            for output, split in ((query, query), (key_value + latent.qk_pos_emb_head_dim, key_value)):
                split_S = once_S * self.layout.sequence_parallel
                yield Exchange.of("all_gather", "tp", row * output, once_S * (output > 0), again_S * (output > 0))
                yield Exchange.of("all_gather", "tp", row * split, none_S, split_S * (output > 0))
        if gathered:
            yield Exchange.of("all_gather", "tp", row * gathered, once_S, again_S)
            yield Exchange.of("reduce_scatter", "tp", row * gathered, none_S, once_S)

    def exchanges(self, once_S: Ints, again_S: Ints) -> Iterator[Exchange]:
        """Yield the gathers of heads or latents, and ring attention's exchange.

        The ring moves keys and values in the forward, and keys, values and their gradients in the backward. The
        attention of one of the cp pieces hides each of the ring's cp - 1 messages (Liu et al. 2023, section 3).
        """
        if self.layout.tp > 1:
            yield from self._gathers(once_S, again_S)
        cp = self.layout.cp
        if cp > 1:
            size, counts = self.pair_bytes * cp, (once_S, 2 * once_S + again_S)
            yield Exchange.of("all_gather", "cp", size, *counts, behind="core_attention_s", share=(cp - 1) / cp)
