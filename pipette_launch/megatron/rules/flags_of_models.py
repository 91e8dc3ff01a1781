"""Rules on flags of layers, positions, attention and saved activations: `validate_args` and its configurations."""

from __future__ import annotations

import math

from pipette_launch.megatron.rules.flag_view import FlagRule, FlagView

OFFLOADED = {"core_attn", "attn_proj", "expert_fc1", "moe_act", "attn_norm", "mlp_norm", "qkv_linear"}
RECOMPUTED = {"core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"}


def mamba_width(f: FlagView) -> int:
    """Channels that a Mamba layer projects its input to (mamba_mixer.py)."""
    heads = f.mamba_num_heads or 2 * f.hidden_size // f.mamba_head_dim
    return int(2 * heads * f.mamba_head_dim + 2 * f.mamba_num_groups * f.mamba_state_dim + heads)


MODEL = (
    FlagRule(
        "multi_latent_attention group_query_attention",
        "exclude each other",
        lambda f: f.multi_latent_attention and f.group_query_attention,
        since=(0, 16),
    ),
    FlagRule(
        "multi_latent_attention rotary_interleaved",
        "exclude each other",
        lambda f: f.multi_latent_attention and f.rotary_interleaved,
    ),
    FlagRule(
        "multi_latent_attention attention_output_gate",
        "exclude each other",
        lambda f: f.multi_latent_attention and f.attention_output_gate,
    ),
    FlagRule(
        "multi_latent_attention qk_l2_norm",
        "exclude each other",
        lambda f: f.multi_latent_attention and f.qk_l2_norm,
    ),
    FlagRule(
        "fused_residual_rmsnorm normalization",
        "needs --normalization RMSNorm",
        lambda f: f.fused_residual_rmsnorm and f.normalization != "RMSNorm",
    ),
    FlagRule(
        "transformer_impl normalization",
        "torch's RMSNorm needs --no-persist-layer-norm and excludes --apply-layernorm-1p",
        lambda f: (
            f.transformer_impl == "local"
            and not (f.hybrid_layer_pattern or f.hybrid_override_pattern)
            and f.normalization == "RMSNorm"
            and (not f.no_persist_layer_norm or f.apply_layernorm_1p or f.layernorm_zero_centered_gamma)
        ),
    ),
    FlagRule(
        "cross_entropy_loss_fusion cross_entropy_fusion_impl",
        "Transformer Engine's fusion is disabled; use --cross-entropy-fusion-impl native",
        lambda f: f.cross_entropy_loss_fusion and f.cross_entropy_fusion_impl == "te",
        since=(0, 19),
    ),
    FlagRule(
        "no_rope_freq num_layers",
        "must divide the layers",
        lambda f: str(f.no_rope_freq).isdigit() and int(f.no_rope_freq) and f.layers % int(f.no_rope_freq),
    ),
    FlagRule(
        "fp8 mamba_num_heads mamba_head_dim mamba_num_groups mamba_state_dim",
        "FP8 needs Mamba's projection to be a multiple of 16 wide",
        lambda f: f.fp8 and (f.hybrid_layer_pattern or f.hybrid_override_pattern) and mamba_width(f) % 16,
    ),
    FlagRule(
        "tp_comm_overlap mtp_num_layers",
        "multi-token prediction has no buffers to overlap before 0.17",
        lambda f: f.tp_comm_overlap and f.mtp_num_layers,
        until=(0, 16),
    ),
    FlagRule(
        "multi_latent_attention rope_type",
        "the fused rotation of latent attention needs --rope-type yarn; add --no-rope-fusion",
        lambda f: f.multi_latent_attention and f.apply_rope_fusion and f.is_rope and f.rope_type == "rope",
    ),
    FlagRule(
        "rope_type",
        "needs --multi-latent-attention",
        lambda f: f.rope_type not in (None, "rope") and not f.multi_latent_attention,
    ),
    FlagRule(
        "add_position_embedding",
        "no longer valid; use --position-embedding-type none",
        lambda f: f.add_position_embedding is False and not f.is_rope,
    ),
    FlagRule(
        "mtp_num_layers position_embedding_type",
        "multi-token prediction needs --position-embedding-type rope or none",
        lambda f: f.mtp_num_layers and not f.is_rope and f.position_embedding_type != "none",
    ),
    FlagRule("squared_relu swiglu", "exclude each other", lambda f: f.squared_relu and f.swiglu),
    FlagRule("quick_geglu swiglu", "exclude each other", lambda f: f.quick_geglu and f.swiglu and not f.squared_relu),
    FlagRule(
        "squared_relu",
        "has no kernel with its bias; add --no-bias-gelu-fusion",
        lambda f: f.fuses_activation and f.activation == "squared_relu",
    ),
    FlagRule(
        "glu_linear_offset",
        "needs --quick-geglu",
        lambda f: f.fuses_activation and f.glu_linear_offset and f.activation != "quick_geglu",
    ),
    FlagRule(
        "activation_func_clamp_value",
        "needs --num-experts with --swiglu, and a finite value above 0",
        lambda f: (
            f.activation == "swiglu"
            and f.activation_func_clamp_value is not None
            and not (f.is_expert_model and 0 < f.activation_func_clamp_value < math.inf)
        ),
        since=(0, 20),
    ),
    FlagRule(
        "activation_func_clamp_value glu_linear_offset use_te_activation_func",
        "exclude each other with --swiglu",
        lambda f: (
            f.activation == "swiglu"
            and f.activation_func_clamp_value is not None
            and (f.glu_linear_offset or f.use_te_activation_func)
        ),
        since=(0, 20),
    ),
    FlagRule(
        "use_te_activation_func",
        "needs --no-bias-swiglu-fusion or --no-bias-gelu-fusion",
        lambda f: f.use_te_activation_func and f.fuses_activation,
    ),
    FlagRule(
        "use_te_activation_func squared_relu quick_geglu",
        "Transformer Engine does not have this activation",
        lambda f: f.use_te_activation_func and f.activation in ("squared_relu", "quick_geglu"),
    ),
    FlagRule(
        "batch_invariant_mode attention_backend",
        "needs --attention-backend flash",
        lambda f: f.batch_invariant_mode and f.attention_backend != "flash",
    ),
    FlagRule(
        "batch_invariant_mode flash_attention_version",
        "needs --flash-attention-version 3 or 4",
        lambda f: f.batch_invariant_mode and f.flash_attention_version not in (3, 4),
        since=(0, 19),
    ),
    FlagRule(
        "batch_invariant_mode context_parallel_size",
        "exclude each other",
        lambda f: f.batch_invariant_mode and f.context_parallel_size > 1,
        since=(0, 19),
    ),
    FlagRule(
        "batch_invariant_mode fp16",
        "needs --bf16",
        lambda f: f.batch_invariant_mode and not f.bf16,
        since=(0, 20),
    ),
    FlagRule(
        "attention_backend",
        "local needs --spec local",
        lambda f: f.attention_backend == "local" and (f.spec or [""])[0] != "local",
    ),
    FlagRule(
        "deterministic_mode cross_entropy_loss_fusion",
        "exclude each other",
        lambda f: f.deterministic_mode and f.cross_entropy_loss_fusion,
    ),
    FlagRule(
        "deterministic_mode tp_comm_overlap",
        "exclude each other from 0.19 on",
        lambda f: f.deterministic_mode and f.tp_comm_overlap,
        since=(0, 19),
    ),
    FlagRule(
        "deterministic_mode use_flash_attn",
        "exclude each other",
        lambda f: f.deterministic_mode and f.use_flash_attn,
        until=(0, 18),
    ),
    FlagRule(
        "cp_comm_type",
        "a2a+p2p needs --hierarchical-context-parallel-sizes",
        lambda f: "a2a+p2p" in (f.cp_comm_type or ()) and f.hierarchical_context_parallel_sizes is None,
    ),
    FlagRule(
        "hybrid_override_pattern num_layers",
        "needs --num-layers before 0.17, as many as the pattern has letters",
        lambda f: (
            f.hybrid_override_pattern and len(f.hybrid_override_pattern) != (f.num_layers or f.encoder_num_layers)
        ),
        until=(0, 16),
    ),
    FlagRule(
        "num_layers encoder_num_layers",
        "exclude each other",
        lambda f: f.num_layers is not None and f.encoder_num_layers is not None,
    ),
    FlagRule(
        "seq_length encoder_seq_length",
        "exclude each other",
        lambda f: f.seq_length is not None and f.encoder_seq_length is not None,
    ),
    FlagRule(
        "qk_clip qk_clip_alpha qk_clip_threshold",
        "needs an alpha between 0 and 1 and a threshold above 0",
        lambda f: f.qk_clip and not (0 < f.qk_clip_alpha < 1 and f.qk_clip_threshold > 0),
    ),
)
MEMORY = (
    FlagRule(
        "recompute_modules",
        f"known modules are {', '.join(sorted(RECOMPUTED))}",
        lambda f: f.modules - RECOMPUTED,
    ),
    FlagRule(
        "moe_layer_recompute recompute_granularity",
        "exclude each other",
        lambda f: f.moe_layer_recompute and f.recompute_granularity == "full",
    ),
    FlagRule(
        "cpu_offloading_num_layers num_layers",
        "must be less than the layers",
        lambda f: (
            f.cpu_offloading_num_layers
            and (f.cpu_offloading_num_layers < 0 or f.cpu_offloading_num_layers >= (f.num_layers or 1 << 30))
        ),
    ),
    FlagRule(
        "fine_grained_activation_offloading cpu_offloading_num_layers",
        "exclude each other",
        lambda f: f.fine_grained_activation_offloading and f.cpu_offloading_num_layers,
    ),
    FlagRule(
        "fine_grained_activation_offloading",
        "needs --offload-modules",
        lambda f: f.fine_grained_activation_offloading and not f.offload_modules,
    ),
    FlagRule(
        "offload_modules",
        f"known modules are {', '.join(sorted(OFFLOADED))}",
        lambda f: f.fine_grained_activation_offloading and set(f.offload_modules or ()) - OFFLOADED,
    ),
    FlagRule(
        "offload_modules",
        "attn_proj needs core_attn beside it",
        lambda f: (
            f.fine_grained_activation_offloading
            and "attn_proj" in (f.offload_modules or ())
            and "core_attn" not in f.offload_modules
        ),
    ),
    FlagRule(
        "fine_grained_activation_offloading transformer_impl",
        "needs --transformer-impl transformer_engine",
        lambda f: f.fine_grained_activation_offloading and f.transformer_impl != "transformer_engine",
    ),
    FlagRule(
        "delay_wgrad_compute transformer_impl",
        "needs --transformer-impl transformer_engine",
        lambda f: f.delay_wgrad_compute and f.transformer_impl != "transformer_engine",
    ),
    FlagRule(
        "defer_embedding_wgrad_compute gradient_accumulation_fusion",
        "exclude each other",
        lambda f: f.defer_embedding_wgrad_compute and not f.gradient_accumulation_fusion,
    ),
    FlagRule(
        "defer_embedding_wgrad_compute wgrad_deferral_limit",
        "needs a limit of at least 0",
        lambda f: f.defer_embedding_wgrad_compute and f.wgrad_deferral_limit < 0,
    ),
)
