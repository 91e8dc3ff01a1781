"""Bytes that autograd keeps for one micro-batch, part by part.

Korthikanti et al. 2022 (section 4) write the sum for 2-byte elements as s * b * h * coefficient; here each saved tensor
is counted by itself, so that fp32 training and any head size come out too. The coefficients were confirmed by executing
megatron-core. T = s * b / cp tokens of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipette_launch.cost.layers import attention, ends, experts, offloading
from pipette_launch.cost.layers.attention import tokens
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.model import ModelSpec
from pipette_launch.megatron.performance import performance_options

_MASK_BYTES = 1
_FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerActivations:
    """What one layer keeps for one micro-batch, by who can recompute it."""

    layer_input: int
    """The input of the layer: all that full recompute keeps."""
    attention_norm: int
    """Output of the norm before the attention."""
    mlp_norm: int
    """Output of the norm before the MLP."""
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
    fuses_attention_norm: bool
    """The norm is part of the matrix behind it, so that it cannot be recomputed alone."""
    fuses_mlp_norm: bool

    @property
    def total(self) -> int:
        """Everything, without recompute."""
        return sum(getattr(self, name) for name in self.__slots__ if not name.startswith("fuses"))

    def recomputed(self, modules: tuple[str, ...], *, moe: bool) -> int:
        """Bytes that selective recompute of these modules does not keep, by Megatron's names for them.

        TransformerEngine's dense layers have their norms inside the matrices: `layernorm` then saves nothing, and `mlp`
        saves the norm too (transformer_layer.py:379-447 of core_v0.16.1).
        """
        whole_mlp = self.mlp + self.mlp_activation
        norms = (not self.fuses_attention_norm) * self.attention_norm + (not self.fuses_mlp_norm) * self.mlp_norm
        saved_by_module = {
            "core_attn": self.core_attention,
            "layernorm": norms,
            "moe_act": self.mlp_activation if moe else 0,
            "mlp": 0 if moe else whole_mlp + self.fuses_mlp_norm * self.mlp_norm,
            "moe": whole_mlp + self.shared_experts if moe else 0,
            "shared_experts": self.shared_experts,
            "mla_up_proj": self.latent_projections,
        }
        names = set(modules) - ({"shared_experts", "moe_act"} if "moe" in modules else set())
        return sum(saved_by_module.get(name, 0) for name in names)


def recompute_modules(layout: Layout) -> tuple[str, ...]:
    """Return the modules of selective recompute; Megatron's default is the attention core."""
    if layout.recompute.granularity != "selective":
        return ()
    return layout.recompute.modules or ("core_attn",)


def residual_bytes(model: ModelSpec, layout: Layout) -> int:
    """One tensor of T x h; sequence parallelism splits it over tp (Korthikanti et al. 2022, section 4.2)."""
    shards = layout.tp if layout.sequence_parallel else 1
    return model.dtype_bytes * tokens(model, layout) * model.hidden_size // shards


def stream_bytes(job: Job, layout: Layout) -> int:
    """One tensor of T x h between layers: in fp32 with `--fp32-residual-connection`, else as the weights."""
    residual = residual_bytes(job.model, layout)
    if not performance_options(job).fp32_residual_connection:
        return residual
    return residual * _FP32_BYTES // job.model.dtype_bytes


def computes_in_fp8(job: Job) -> bool:
    """Whether TransformerEngine multiplies in FP8: it then keeps the inputs of its matrices in one byte an element."""
    return job.model.transformer_impl == "transformer_engine" and performance_options(job).fp8 is not None


def layer_activations(job: Job, layout: Layout, *, moe: bool) -> LayerActivations:
    """Count what one layer keeps for one micro-batch.

    Llama with fused attention comes to s*b*h*(12 + 4k/a + 6f/h)/t with sequence parallelism and to 8 + (...)/t without;
    a GPT with dropout to 34, and to 10 + 24/t without (Korthikanti et al. 2022, section 4; measured).
    """
    model = job.model
    uses_te = model.transformer_impl == "transformer_engine"
    residual, stream = residual_bytes(model, layout), stream_bytes(job, layout)
    narrow = model.dtype_bytes if computes_in_fp8(job) else 1
    fuses_attention_norm, fuses_mlp_norm = uses_te and model.latent_attention is None, uses_te and not moe
    projected, latents = attention.projected_bytes(job, layout), 0
    if computes_in_fp8(job):
        # The projection's input is a copy of the context in one byte an element (TE module/linear.py).
        projected += tokens(model, layout) * (model.num_attention_heads // layout.tp) * model.kv_channels
    if model.latent_attention:
        fused = uses_te and performance_options(job).apply_rope_fusion
        kept = attention.attention_activations(model, model.latent_attention, layout, fused_rope=fused)
        projected, latents = kept.latents + kept.context, kept.projected
        # A ring keeps the last keys and values in a buffer of its own, so recompute of the projections frees neither.
        pair = attention.pair_bytes(model, layout) if attention.ring_steps(job, layout) else 0
        projected, latents = projected + pair, latents - pair
    if moe:
        routed = experts.expert_activations(job, layout)
        fc1, act, shared = routed.routed - routed.activation, routed.activation, routed.shared
    else:
        # Outputs of the first matrix, input of the second: fused SwiGLU 6f/h, unfused 8f/h or 10f/h, GELU 4f/h. The
        # 10f/h is what the contract test of saved bytes finds.
        act, shared = model.dtype_bytes * tokens(model, layout) * model.ffn_hidden_size // layout.tp, 0
        fc1 = (2 if model.gated_linear_unit else 1) * act
        if model.gated_linear_unit and not performance_options(job).bias_swiglu_fusion:
            fc1 += experts.unfused_gate_copies(job.megatron_version) * act
    masks = 2 * (residual // model.dtype_bytes) * _MASK_BYTES if model.hidden_dropout > 0 else 0
    return LayerActivations(
        layer_input=stream,
        attention_norm=residual // narrow if fuses_attention_norm else residual,
        mlp_norm=residual // narrow if fuses_mlp_norm else residual,
        attention=projected,
        latent_projections=latents,
        core_attention=attention.core_bytes(job, layout),
        mlp_input=stream,
        mlp=fc1,
        mlp_activation=act if moe else act // narrow,
        shared_experts=shared,
        dropout_masks=masks,
        fuses_attention_norm=fuses_attention_norm,
        fuses_mlp_norm=fuses_mlp_norm,
    )


def kept_bytes(job: Job, layout: Layout, *, moe: bool) -> int:
    """What a layer keeps for one micro-batch when it is not fully recomputed."""
    activations = layer_activations(job, layout, moe=moe)
    modules = recompute_modules(layout)
    held = attention.held_for_recompute_bytes(job.model, layout) if "core_attn" in modules else 0
    left = offloading.offloaded(job, layout, moe=moe, recomputed=modules).left
    return activations.total - activations.recomputed(modules, moe=moe) + held - left


def backward_bytes(job: Job, layout: Layout, *, moe: bool) -> int:
    """Count what the backward of one layer needs for a while, beyond what the layer kept and less what it has freed.

    Autograd frees what an operation saved when its backward is done. Largest of: the second matrix (the output's
    gradient, gathered with sequence parallelism, and that of its input), the activation (the gradient of the first
    matrices' output in place of the activation), and the attention core, with the MLP's share freed. Context
    parallelism may need more while the core runs forward, when that share is not yet there. Without
    `gradient_accumulation_fusion` a matrix's gradient is there once in the weights' type.
    """
    model = job.model
    residual = residual_bytes(model, layout)
    layer = layer_activations(job, layout, moe=moe)
    away = offloading.offloaded(job, layout, moe=moe, recomputed=recompute_modules(layout))
    if moe:
        freed = layer.mlp + layer.mlp_activation + layer.shared_experts + layer.mlp_input + layer.mlp_norm - away.mlp
        core = _core_bytes(job, layout, residual) - freed
        # The next micro-batch's forward runs beside this backward, layer by layer: one more layer keeps its share
        # (megatron-core, pipeline_parallel/combined_1f1b.py).
        overlaps = performance_options(job).overlap_moe_expert_parallel_comm
        beside = kept_bytes(job, layout, moe=True) if overlaps else 0
        return max(experts.exchange_bytes(job, layout), core) + beside + away.moved
    gathered = residual * layout.tp if layout.sequence_parallel else 0
    dropped = residual if model.hidden_dropout > 0 else 0
    matrix = model.dtype_bytes * model.hidden_size * model.ffn_hidden_size // layout.tp
    alone = 0 if performance_options(job).gradient_accumulation_fusion else matrix
    one = model.dtype_bytes * tokens(model, layout) * model.ffn_hidden_size // layout.tp
    second = residual + dropped + gathered + one + alone
    activation = residual + layer.mlp
    freed = layer.mlp + layer.mlp_activation + layer.mlp_input + layer.mlp_norm
    core = _core_bytes(job, layout, residual) - freed
    return max(second, activation, core) + away.moved


def _core_bytes(job: Job, layout: Layout, residual: int) -> int:
    return max(2 * residual + attention.backward_bytes(job, layout), attention.exchange_bytes(job, layout))


def prediction_bytes(job: Job, layout: Layout) -> int:
    """Count what the depths of multi-token prediction keep for one micro-batch, their layers' recompute included."""
    model = job.model
    if not model.mtp_num_layers:
        return 0
    if layout.recompute.granularity == "full":
        layer = residual_bytes(model, layout)
    else:
        layer = kept_bytes(job, layout, moe=model.has_expert_prediction)
    own = attention.prediction_activations(model, layout) + ends.embedding_bytes(job, layout)
    return model.mtp_num_layers * (layer + own)
