"""The memory estimator for 4D parallel training of Fujii, Watanabe and Yokota 2024 (arXiv 2411.06465).

Re-derived from the equations as a third party numbers them, checked against the author's own script
(okoge-kaz/okoge-kaz.github.io@72832da6). Kept as it is: every model is a Llama with bf16 weights, sequence parallelism
and flash attention; recompute is unknown; the optimizer is sharded over dp alone; p micro-batches are live however few
there are. Differs from the script in one thing, as the paper's stages do: the embedding is on the first stage and the
head on the last, not both on every GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipette_launch.errors import FactError, PlanError
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.model import ModelSpec

SAFE_SHARE = 0.8
"""The 80 % rule: below this share of the GPU's memory none of the authors' 454 runs went out of memory."""

_WEIGHT_BYTES = 2
_OPTIMIZER_BYTES = 12
"""fp32 copy and two Adam moments."""
_GROUP_OVERHEAD_BYTES = 500_000_000
"""Bytes that the script adds for NCCL, for each of TP, PP, DP, CP and EP above 1."""
_CONTEXT_BYTES = 500_000_000
"""CUDA context: 300 to 500 MB in the source."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FujiiBytes:
    """The estimate for one pipeline rank, in bytes."""

    model_states: float
    """18 bytes a parameter, or 6 + 12/d with the distributed optimizer (equation 4)."""
    activations: float

    @property
    def total(self) -> float:
        """Bytes that the 80 % rule compares with the GPU's memory; the other 20 % are for overheads."""
        return self.model_states + self.activations


def estimate(job: Job, layout: Layout) -> tuple[FujiiBytes, ...]:
    """Estimate every pipeline rank; each is given p live micro-batches, as its schedule were the first stage's.

    Raises:
        LayoutError: the layers do not divide into the stages.
        PlanError: the model has multi-latent attention or multi-token prediction, which the estimator does not know.

    """
    _check_known(job.model)
    per_parameter = _state_bytes_per_parameter(job, layout)
    return tuple(
        FujiiBytes(
            model_states=parameters * per_parameter, activations=_activation_bytes(job.model, layout, kinds, live)
        )
        for parameters, kinds, live in _stages(job.model, layout)
    )


def estimate_bytes(job: Job, layout: Layout) -> int:
    """Return the estimate of the fullest pipeline rank."""
    return round(max(stage.total for stage in estimate(job, layout)))


def fits(job: Job, layout: Layout, capacity_bytes: float) -> bool:
    """True if the estimate is under 80 % of a GPU's memory.

    Raises:
        FactError: the capacity is not positive.

    """
    if not capacity_bytes > 0:
        raise FactError(f"capacity_bytes must be positive, got {capacity_bytes}")
    return estimate_bytes(job, layout) < SAFE_SHARE * capacity_bytes


def overhead_bytes(layout: Layout) -> int:
    """Bytes of the script for NCCL and the CUDA context; not in `estimate_bytes`, as the 80 % rule has room."""
    groups = sum(size > 1 for size in (layout.tp, layout.pp, layout.dp, layout.cp, layout.ep))
    return groups * _GROUP_OVERHEAD_BYTES + _CONTEXT_BYTES


def layer_coefficient(model: ModelSpec, *, moe: bool) -> float:
    """Activation of a layer over s*b*h/(t*c): 12 + 4k/a + 8f/h (equation 12).

    Attention 6 + 4k/a, two norms 4, SwiGLU 2 + 8f/h; with experts 2 + 8*topk*f_e/h in its place, which is perfectly
    balanced routing without dispatch buffers.
    """
    width = model.moe_router_topk * model.moe_ffn_hidden_size if moe else model.ffn_hidden_size
    return 12 + 4 * model.num_query_groups / model.num_attention_heads + 8 * width / model.hidden_size


def _check_known(model: ModelSpec) -> None:
    if model.latent_attention or model.mtp_num_layers:
        name = "multi-latent attention" if model.latent_attention else "multi-token prediction"
        raise PlanError(f"Fujii's estimator has no {name}; use another for this model")


def _stages(model: ModelSpec, layout: Layout) -> list[tuple[float, tuple[bool, ...], float]]:
    """Parameters, kind of each layer (True has experts) and live micro-batches of each pipeline rank."""
    chunks = layout.chunk_layers(model.num_layers)
    starts = [sum(chunks[:chunk]) for chunk in range(len(chunks))]
    rows = []
    for rank in range(layout.pp):
        kinds = tuple(
            model.layer_kinds[layer] == "moe_layer"
            for chunk in range(rank, len(chunks), layout.pp)
            for layer in range(starts[chunk], starts[chunk] + chunks[chunk])
        )
        parameters = sum(_layer_parameters(model, layout, moe=moe) for moe in kinds)
        parameters += _end_parameters(model, layout, rank)
        # Interleaved, the script takes one chunk's layers p times: an under-count, kept.
        rows.append((parameters, kinds, layout.pp / layout.vpp))
    return rows


def _layer_parameters(model: ModelSpec, layout: Layout, *, moe: bool) -> float:
    """2h(a*d) + 2h(k*d) + 3hf + 2h over t; experts, shared expert and router over t*ep as a whole."""
    h = model.hidden_size
    attention = 2 * h * model.kv_channels * (model.num_attention_heads + model.num_query_groups) + 2 * h
    if not moe:
        return (attention + 3 * h * model.ffn_hidden_size) / layout.tp
    experts = model.num_experts or 0
    mlp = 3 * h * (experts * model.moe_ffn_hidden_size + model.moe_shared_expert_intermediate_size) + h * experts
    return attention / layout.tp + mlp / (layout.tp * layout.ep)


def _end_parameters(model: ModelSpec, layout: Layout, rank: int) -> float:
    """Embedding on the first stage; final norm, and the head when untied, on the last."""
    vocabulary = model.hidden_size * model.padded_vocab_size(layout.tp)
    first = vocabulary if rank == 0 else 0
    head = vocabulary if model.untie_embeddings_and_output_weights else 0
    last = head + model.hidden_size if rank == layout.pp - 1 else 0
    return (first + last) / layout.tp


def _state_bytes_per_parameter(job: Job, layout: Layout) -> float:
    """Weight 2, gradient 4 (2 when reduced in bf16), Adam 12, over d alone with the distributed optimizer."""
    gradient = 2 if job.grad_reduce_in_bf16 else 4
    shards = layout.dp if layout.use_distributed_optimizer else 1
    return _WEIGHT_BYTES + gradient + _OPTIMIZER_BYTES / shards


def _activation_bytes(model: ModelSpec, layout: Layout, kinds: tuple[bool, ...], live: float) -> float:
    tokens = model.seq_length * layout.micro_batch_size / (layout.tp * layout.cp)
    return live * tokens * model.hidden_size * sum(layer_coefficient(model, moe=moe) for moe in kinds)
