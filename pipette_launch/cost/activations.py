"""Bytes that autograd keeps for one micro-batch, part by part.

Facts: memory.md section 4 (coefficients confirmed by executing megatron-core) and megatron.md section 8.3. There they
are written for 2-byte elements as bytes = s * b * h * coefficient; here each saved tensor is counted by itself, so that
fp32 training and any head size come out too. T = s * b / cp tokens of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipette_launch.cost import experts, latent
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.model import ModelSpec

_LOG_SUM_EXP_BYTES = 4
_MASK_BYTES = 1
_FP32_BYTES = 4
_TOKEN_ID_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerActivations:
    """What one layer keeps for one micro-batch, by who can recompute it."""

    layer_input: int
    """The input of the layer: all that full recompute keeps."""
    norm_outputs: int
    """Outputs of the two norms."""
    attention: int
    """Query, key, value and the context that the projection needs."""
    latent_projections: int
    """Query, key and value of multi-latent attention."""
    core_attention: int
    """Softmax statistics with flash or fused attention; probabilities, their mask and dropped copy without."""
    mlp_input: int
    """Input of the second norm."""
    mlp: int
    """Outputs of the first matrix (and of the dispatch to experts)."""
    mlp_activation: int
    """Input of the second matrix."""
    shared_experts: int
    dropout_masks: int

    @property
    def total(self) -> int:
        """Everything, without recompute."""
        return sum(getattr(self, name) for name in self.__slots__)

    def recomputed(self, modules: tuple[str, ...], *, moe: bool) -> int:
        """Bytes that selective recompute of these modules does not keep (Megatron's words; megatron.md 8.3)."""
        whole_mlp = self.mlp + self.mlp_activation
        saved_by_module = {
            "core_attn": self.core_attention,
            "layernorm": self.norm_outputs,
            "moe_act": self.mlp_activation if moe else 0,
            "mlp": 0 if moe else whole_mlp,
            "moe": whole_mlp + self.shared_experts if moe else 0,
            "shared_experts": self.shared_experts,
            "mla_up_proj": self.latent_projections,
        }
        names = set(modules) - ({"shared_experts", "moe_act"} if "moe" in modules else set())
        return sum(saved_by_module.get(name, 0) for name in names)


def recompute_modules(layout: Layout) -> tuple[str, ...]:
    """Return the modules of selective recompute; Megatron's default is the attention core (TC:1198-1240)."""
    if layout.recompute.granularity != "selective":
        return ()
    return layout.recompute.modules or ("core_attn",)


def tokens(model: ModelSpec, layout: Layout) -> int:
    """T = s * b / cp: tokens of one micro-batch on one rank, before sequence parallelism."""
    return model.seq_length * layout.micro_batch_size // layout.cp


def residual_bytes(model: ModelSpec, layout: Layout) -> int:
    """One tensor of T x h; sequence parallelism splits it over tp (Korthikanti et al. 2022, section 4.2)."""
    shards = layout.tp if layout.sequence_parallel else 1
    return model.dtype_bytes * tokens(model, layout) * model.hidden_size // shards


def layer_activations(job: Job, layout: Layout, *, moe: bool) -> LayerActivations:
    """Count what one layer keeps for one micro-batch.

    Llama with fused attention comes to s*b*h*(12 + 4k/a + 6f/h)/t with sequence parallelism and to 8 + (...)/t without;
    a GPT with dropout to 34, and to 10 + 24/t without (memory.md section 4, measured and Korthikanti 2022).
    """
    model = job.model
    residual = residual_bytes(model, layout)
    element = model.dtype_bytes * tokens(model, layout)
    heads = model.num_attention_heads * model.kv_channels // layout.tp
    groups = max(1, model.num_query_groups // layout.tp) * model.kv_channels
    attention, projections = element * (heads + 2 * groups) + element * heads, 0
    if model.latent_attention:
        fused = model.transformer_impl == "transformer_engine" and "--no-rope-fusion" not in job.performance_flags
        kept = latent.attention_activations(model, model.latent_attention, layout, fused_rope=fused)
        attention, projections = kept.latents + kept.context, kept.projected
    if moe:
        routed = experts.expert_activations(job, layout)
        fc1, act, shared = routed.routed - routed.activation, routed.activation, routed.shared
    else:
        (fc1, act), shared = _mlp(job, layout, model.ffn_hidden_size), 0
    masks = 2 * (residual // model.dtype_bytes) * _MASK_BYTES if model.hidden_dropout > 0 else 0
    return LayerActivations(
        layer_input=residual,
        norm_outputs=2 * residual,
        attention=attention,
        latent_projections=projections,
        core_attention=core_attention_bytes(model, layout),
        mlp_input=residual,
        mlp=fc1,
        mlp_activation=act,
        shared_experts=shared,
        dropout_masks=masks,
    )


def core_attention_bytes(model: ModelSpec, layout: Layout) -> int:
    """Count what the attention core keeps, by backend (memory.md section 4, rows fused and TE unfused).

    Flash and fused: the log-sum-exp in fp32. Unfused, Megatron's local implementation too: probabilities, and with
    dropout a mask and the dropped probabilities: 5as/(h*t) in bf16.
    """
    rows = model.num_attention_heads // layout.tp * tokens(model, layout)
    if not is_local_attention(model) and model.attention_backend != "unfused":
        return _LOG_SUM_EXP_BYTES * rows
    has_dropout = model.attention_dropout > 0
    copies, mask = (2, _MASK_BYTES) if has_dropout else (1, 0)
    return rows * model.seq_length * (copies * model.dtype_bytes + mask)


def is_local_attention(model: ModelSpec) -> bool:
    """Whether Megatron's own attention runs, which is never fused."""
    return model.transformer_impl == "local" or model.attention_backend == "local"


def attention_scores_bytes(model: ModelSpec, layout: Layout) -> int:
    """Local attention's scores 2as/(h*t): written to one buffer for all layers (dot_product_attention.py).

    memory.md section 4 has them as kept by every layer, 7as/(h*t); the golden rows of the local implementation fit 5as
    and one buffer, to the workspaces (12, 6 and 3 layers: 69, 70 and 74 MiB below the measured peak).
    """
    if not is_local_attention(model):
        return 0
    rows = model.num_attention_heads // layout.tp * tokens(model, layout)
    return model.dtype_bytes * rows * model.seq_length


def kept_bytes(job: Job, layout: Layout, *, moe: bool) -> int:
    """What a layer keeps for one micro-batch when it is not fully recomputed."""
    activations = layer_activations(job, layout, moe=moe)
    return activations.total - activations.recomputed(recompute_modules(layout), moe=moe)


def embedding_bytes(job: Job, layout: Layout) -> int:
    """Count token ids of one micro-batch and the embedding's dropout mask (memory.md section 3: 8*s*b + s*b*h)."""
    model = job.model
    mask = residual_bytes(model, layout) // model.dtype_bytes * _MASK_BYTES if model.hidden_dropout > 0 else 0
    return _TOKEN_ID_BYTES * tokens(model, layout) + mask


def prediction_bytes(job: Job, layout: Layout) -> int:
    """Count what the depths of multi-token prediction keep for one micro-batch, their layers' recompute included."""
    model = job.model
    if not model.mtp_num_layers:
        return 0
    if layout.recompute.granularity == "full":
        layer = residual_bytes(model, layout)
    else:
        layer = kept_bytes(job, layout, moe=model.has_expert_prediction)
    own = latent.prediction_activations(model, layout) + embedding_bytes(job, layout)
    return model.mtp_num_layers * (layer + own)


def head_bytes(job: Job, layout: Layout) -> int:
    """Count final norm, logits and vocabulary-parallel cross-entropy: 4*s*b*h/c (/t) + 6*s*b*V/(t*c) in bf16.

    The loss works on an fp32 copy of 2-byte logits, and in place on fp32 ones (memory.md section 4, measured;
    cross_entropy.py:24-33). Each depth of multi-token prediction computes a loss of its own (gpt_model.py:611-660).
    """
    model = job.model
    copy = 0 if model.dtype_bytes == _FP32_BYTES else _FP32_BYTES
    vocabulary = model.padded_vocab_size(layout.tp) // layout.tp
    depths = model.mtp_num_layers
    # The depths' loss copies are kept, and one of their logits, a variable that lives as long as the head's.
    logits = (1 + min(depths, 1)) * model.dtype_bytes + (1 + depths) * copy
    return 2 * residual_bytes(model, layout) + tokens(model, layout) * vocabulary * logits


def _mlp(job: Job, layout: Layout, ffn_hidden_size: int) -> tuple[int, int]:
    """Outputs of the first matrix, input of the second: fused SwiGLU 6f/h, unfused 8f/h or 10f/h, GELU 4f/h.

    memory.md section 4; the 10f/h by the contract test of saved bytes.
    """
    one = job.model.dtype_bytes * tokens(job.model, layout) * ffn_hidden_size // layout.tp
    return _first_matrices(job) * one, one


def _first_matrices(job: Job) -> int:
    if not job.model.gated_linear_unit:
        return 1
    is_unfused = "--no-bias-swiglu-fusion" in job.performance_flags
    return 2 + (experts.unfused_gate_copies(job.megatron_version) if is_unfused else 0)
