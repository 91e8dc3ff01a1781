"""Megatron-LM's own memory estimate, `theoretical_memory_usage`, as it prints it before training.

Re-derived from megatron/training/theoretical_memory_usage.py of NVIDIA/Megatron-LM@d98e8a64, based on table 2 of
Korthikanti et al. 2022 (arXiv 2205.05198). Kept unchanged, for comparison. It leaves out:

- Context parallelism divides nothing, and the optimizer shard is 1/dp, not 1/(dp*cp).
- Unfused attention's scores (5as/h), grouped queries and SwiGLU are not in the activations.
- Without sequence parallelism the MLP counts as 4h wide.
- Full recompute is ignored: anything but selective recompute counts as no recompute.
- First stage only: no logits where pp > 1; uneven stages count as even ones.
- Experts' activations count as a dense MLP's.
- Every precision counts as bf16 with fp32 gradients; biases, positions, padding and buffers are missing.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipette_launch.cost.layers.parameters import expert_dp
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.model import ModelSpec

_BYTES_PER_PARAMETER = 18
"""bf16 weight, fp32 gradient, fp32 copy and two Adam moments."""
_OVERHEAD = 1.05
"""Bytes that the branch without sequence parallelism adds for temporaries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FormulaBytes:
    """Megatron's two figures, in bytes; it prints them in MiB and calls them MB."""

    weights_and_optimizer: float
    """Weights, gradients and optimizer states of the shard that it takes for the fullest."""
    activations: float

    @property
    def total(self) -> float:
        """Their sum, which it prints as the total."""
        return self.weights_and_optimizer + self.activations


def megatron_formula(job: Job, layout: Layout, *, before_v18: bool = False) -> FormulaBytes:
    """Compute what Megatron-LM would print for a job.

    Args:
        job: the model and batch.
        layout: the degrees.
        before_v18: until core_v0.17 norms and experts were divided by tp alone and the router was not counted.

    Raises:
        LayoutError: the global batch does not divide into micro-batches.

    """
    shard = _fullest_shard_before_v18 if before_v18 else _fullest_shard
    dense, expert = shard(job.model, layout)
    states = dense * _bytes_per_parameter(layout, layout.dp)
    states += expert * _bytes_per_parameter(layout, layout.dp if before_v18 else expert_dp(layout))
    microbatches = layout.num_microbatches(job.batch.global_batch_size)
    is_published_case = layout.sequence_parallel and layout.recompute.granularity == "selective"
    activations = _with_sequence_parallel if is_published_case else _without_sequence_parallel
    return FormulaBytes(weights_and_optimizer=states, activations=activations(job.model, layout, microbatches))


def megatron_formula_bytes(job: Job, layout: Layout) -> int:
    """Return the total in bytes: the baseline's one figure for every rank."""
    return round(megatron_formula(job, layout).total)


def _bytes_per_parameter(layout: Layout, replicas: int) -> float:
    """18, or 6 + 12/d with the distributed optimizer, d without cp."""
    return 6 + 12 / replicas if layout.use_distributed_optimizer else _BYTES_PER_PARAMETER


@dataclass(frozen=True, kw_only=True, slots=True)
class _Count:
    """Parameters by how they are held."""

    split: float = 0.0
    """Over tp."""
    norms: float = 0.0
    router: float = 0.0
    expert: float = 0.0

    def __add__(self, other: _Count) -> _Count:
        return _Count(
            split=self.split + other.split,
            norms=self.norms + other.norms,
            router=self.router + other.router,
            expert=self.expert + other.expert,
        )

    def __mul__(self, factor: float) -> _Count:
        return _Count(
            split=self.split * factor,
            norms=self.norms * factor,
            router=self.router * factor,
            expert=self.expert * factor,
        )


def _fullest_shard(model: ModelSpec, layout: Layout) -> tuple[float, float]:
    """Dense and expert: (split layers/p + MTP + h*V)/t + norms and routers, and experts/(etp*ep)."""
    held = _transformer(model, layout)
    dense = (held.split + _vocabulary(model, layout)) / layout.tp + held.norms + held.router
    return dense, held.expert / (layout.etp * layout.ep)


def _fullest_shard_before_v18(model: ModelSpec, layout: Layout) -> tuple[float, float]:
    """Everything over tp, ep ignored, no router."""
    held = _transformer(model, layout)
    return (held.split + held.norms + held.expert + _vocabulary(model, layout)) / layout.tp, 0.0


def _vocabulary(model: ModelSpec, layout: Layout) -> float:
    """One embedding, and the head where both are on the only stage."""
    copies = 2 if model.untie_embeddings_and_output_weights and layout.pp == 1 else 1
    return copies * model.hidden_size * model.padded_vocab_size(layout.tp)


def _transformer(model: ModelSpec, layout: Layout) -> _Count:
    """One p-th of all layers and of the final norm, and the whole of multi-token prediction, its layers alone."""
    moe_layers = sum(model.moe_layer_freq)
    block = _layer(model, moe=True) * moe_layers + _layer(model, moe=False) * (model.num_layers - moe_layers)
    block += _Count(norms=model.norm_parameters())
    return block * (1 / layout.pp) + _layer(model, moe=model.layer_kinds[-1] == "moe_layer") * model.mtp_num_layers


def _layer(model: ModelSpec, *, moe: bool) -> _Count:
    """One layer. No biases but the router's; a gated MLP counts 3/2 times."""
    h, gate = model.hidden_size, 1.5 if model.gated_linear_unit else 1.0
    width = model.moe_shared_expert_intermediate_size if moe else model.ffn_hidden_size
    dense = _Count(split=_attention(model) + 2 * h * width * gate, norms=2 * model.norm_parameters())
    if not moe:
        return dense
    experts = model.num_experts or 0
    router = experts * (h + (1 if model.add_bias_linear else 0))
    return dense + _Count(router=router, expert=2 * h * gate * model.moe_ffn_hidden_size * experts)


def _attention(model: ModelSpec) -> float:
    """2h(1 + k/a) times the query's width, or the matrices and norms of multi-latent attention."""
    h, heads, latent = model.hidden_size, model.num_attention_heads, model.latent_attention
    if latent is None:
        return 2 * h * model.kv_channels * (heads + model.num_query_groups)
    norm = model.norm_parameters() // h
    queries = heads * latent.query_channels
    query = latent.q_lora_rank * (h + queries + norm) if latent.q_lora_rank else h * queries
    key_value = latent.kv_lora_rank * (h + heads * (latent.qk_head_dim + latent.v_head_dim) + norm)
    return query + key_value + h * (latent.qk_pos_emb_head_dim + heads * latent.v_head_dim)


def _with_sequence_parallel(model: ModelSpec, layout: Layout, microbatches: int) -> float:
    """[s*b*h*(18 + 4f/h)*L + embedding] x F + (p = 1: 4*s*b*h*(1 + V/h)), over t."""
    tokens, h = model.seq_length * layout.micro_batch_size, model.hidden_size
    layers = tokens * h * (18 + 4 * model.ffn_hidden_size / h) * model.num_layers
    kept = (layers + _embedding_input(model, layout)) * _in_flight(layout, microbatches)
    if layout.pp == 1:
        kept += 4 * tokens * (h + model.padded_vocab_size(layout.tp))
    return kept / layout.tp


def _without_sequence_parallel(model: ModelSpec, layout: Layout, microbatches: int) -> float:
    """{[s*b*h*(10 + 24/t)*L + embedding] x F + (p = 1: 2*(s*b*V/t + s*b*h))} x 1.05."""
    tokens, h = model.seq_length * layout.micro_batch_size, model.hidden_size
    layers = tokens * h * (10 + 24 / layout.tp) * model.num_layers
    kept = (layers + _embedding_input(model, layout)) * _in_flight(layout, microbatches)
    if layout.pp == 1:
        kept += 2 * tokens * (model.padded_vocab_size(layout.tp) / layout.tp + h)
    return kept * _OVERHEAD


def _embedding_input(model: ModelSpec, layout: Layout) -> float:
    """Token ids, 8*s*b, and dropout mask, s*b*h, of p micro-batches."""
    return model.seq_length * layout.micro_batch_size * (8 + model.hidden_size) * layout.pp


def _in_flight(layout: Layout, microbatches: int) -> float:
    """F: the first stage holds p micro-batches of L/p layers, more when interleaved, fewer when there are fewer."""
    if layout.vpp > 1:
        return 1 + (layout.pp - 1) / (layout.pp * layout.vpp)
    return min(1.0, microbatches / layout.pp)
