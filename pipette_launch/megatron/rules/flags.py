"""Rules that depend on flags alone: no layout mends them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

from pipette_launch.megatron.flags import Arguments, flag_defaults, release_of
from pipette_launch.megatron.layout import read_recompute
from pipette_launch.megatron.rules.broken import Broken, BrokenRule

OLDEST, NEWEST = (0, 14), (0, 99)


@dataclass(frozen=True, slots=True)
class FlagRule:
    """A contradiction of flags that Megatron refuses."""

    names: str
    """Destinations whose flags the message shows, as given."""
    reason: str
    is_broken: Callable[[Any], object]
    """Test of a `FlagView`."""
    since: tuple[int, int] = OLDEST
    """The first release that has the rule."""
    until: tuple[int, int] = NEWEST
    """The last one."""


class FlagView:
    """Values by destination as attributes; None for a destination that the release does not have."""

    def __init__(self, arguments: Arguments) -> None:
        """Keep the last value of each flag, over the defaults of the release."""
        self._values = dict(flag_defaults(arguments.version))
        self._values.update((token.flag.dest, token.value) for token in arguments.tokens if token.flag)
        self.release = release_of(arguments.version)
        self._arguments = arguments

    def __getattr__(self, dest: str) -> Any:
        """Return what Megatron's parser would store."""
        return self._values.get(dest)

    @property
    def granularity(self) -> str:
        """Kind of recompute, by new flags or old ones."""
        return read_recompute(self._arguments).granularity

    @property
    def modules(self) -> set[str]:
        """Modules that selective recompute names."""
        return set(read_recompute(self._arguments).modules) if self.granularity == "selective" else set()

    @property
    def graphs(self) -> str:
        """Maker of CUDA graphs, by new flags or old ones: `none`, `local`, `transformer_engine`, `full_iteration`."""
        if self.enable_cuda_graph:
            return "local"
        if self.external_cuda_graph:
            return "transformer_engine"
        scope, impl = self.cuda_graph_scope_deprecated or [], self.cuda_graph_impl or "none"
        return "full_iteration" if "full_iteration" in scope and impl != "transformer_engine" else impl

    @property
    def graphed(self) -> set[str]:
        """Parts of a layer that CUDA graphs capture; empty for the whole layer."""
        given = self.cuda_graph_scope or self.cuda_graph_modules or self.cuda_graph_scope_deprecated or []
        return set(given.split(",") if isinstance(given, str) else given) - {"full"}

    @property
    def is_expert_model(self) -> bool:
        """True if a layer has experts."""
        return bool(self.num_experts)

    @property
    def dispatcher(self) -> str:
        """Dispatcher of the experts' tokens."""
        return str(self.moe_token_dispatcher_type)

    @property
    def balancing(self) -> list[str]:
        """Kinds of load balancing of the router."""
        kinds = self.moe_router_load_balancing_type
        return list(kinds) if isinstance(kinds, (list, tuple)) else [kinds]

    @property
    def capacity(self) -> float | None:
        """Capacity factor of the experts; None where tokens are not dropped."""
        factor = self.moe_expert_capacity_factor
        return None if factor is None or factor < 0 else float(factor)

    @property
    def fuses_activation(self) -> bool:
        """True if bias and activation are one kernel (core_transformer_config_from_args)."""
        if self.swiglu:
            return bool(self.bias_swiglu_fusion)
        return bool(self.bias_gelu_fusion and self.add_bias_linear)

    @property
    def activation(self) -> str:
        """Name of the activation (core_transformer_config_from_args)."""
        if self.squared_relu:
            return "squared_relu"
        if self.quick_geglu:
            return "quick_geglu"
        return "swiglu" if self.swiglu else "gelu"

    @property
    def layers(self) -> int:
        """Layers of the model; 0 where a pattern names them."""
        return int(self.num_layers or self.encoder_num_layers or 0)

    @property
    def is_rope(self) -> bool:
        """True if positions are rotated."""
        return bool(self.use_rotary_position_embeddings) or bool(self.position_embedding_type == "rope")

    @property
    def checks_nan(self) -> bool:
        """True if Megatron checks losses and gradients; the dynamic loss scale of fp16 checks them by itself."""
        return bool(self.check_for_nan_in_loss_and_grad) and not (self.fp16 and not self.loss_scale)

    @property
    def decay_steps(self) -> int:
        """Steps or samples after which the learning rate is lowest; 0 where no flag says how long training takes."""
        if self.train_iters:
            return int(self.lr_decay_iters or self.train_iters)
        return int(self.lr_decay_samples or self.train_samples or 0)

    @property
    def warmup_steps(self) -> float:
        """Steps or samples of the learning rate's warm-up."""
        if self.lr_warmup_fraction is not None:
            return float(self.lr_warmup_fraction) * self.decay_steps
        return float(self.lr_warmup_iters if self.train_iters else self.lr_warmup_samples)


LAST_RAMP = (0, 17)
"""The last release in which `--rampup-batch-size` has an effect."""
_WORDS_OF_RAMP = 3


def grows(ramp: list[object], end: int) -> bool:
    """True if start, increment and samples lead to the end (RampupBatchsizeNumMicroBatchesCalculator)."""
    if len(ramp) != _WORDS_OF_RAMP:
        return False
    start, increment, samples = (int(str(word)) for word in ramp)
    return start > 0 and increment > 0 and samples >= 0 and end > start and (end - start) % increment == 0


PRECISION = (
    FlagRule("fp4 fp8", "FP4 and FP8 exclude each other", lambda f: f.fp4 and f.fp8),
    FlagRule(
        "fp4_param fp4_param_gather",
        "needs --fp4-format",
        lambda f: (f.fp4_param or f.fp4_param_gather) and not f.fp4,
    ),
    FlagRule("fp8_param_gather", "needs --fp8-format", lambda f: f.fp8_param_gather and not f.fp8),
    FlagRule(
        "fp8 fp8_recipe",
        "the custom recipe needs --fp8-quantizer-factory",
        lambda f: f.fp8 and f.fp8_recipe == "custom" and not f.fp8_quantizer_factory,
    ),
    FlagRule(
        "fp4 fp4_recipe",
        "the custom recipe needs --fp4-quantizer-factory",
        lambda f: f.fp4 and f.fp4_recipe == "custom" and not f.fp4_quantizer_factory,
    ),
    FlagRule(
        "first_last_layers_bf16",
        "does not go with FP8's delayed scaling; choose another --fp8-recipe",
        lambda f: f.fp8 and f.first_last_layers_bf16 and f.fp8_recipe == "delayed",
    ),
    FlagRule(
        "reuse_grad_buf_for_mxfp8_param_ag",
        "needs --fp8-param-gather",
        lambda f: f.reuse_grad_buf_for_mxfp8_param_ag and not f.fp8_param_gather and not f.use_torch_fsdp2,
    ),
    FlagRule("fp16_lm_cross_entropy", "needs --fp16", lambda f: f.fp16_lm_cross_entropy and not f.fp16),
    FlagRule(
        "fp32_residual_connection",
        "needs --bf16 or --fp16",
        lambda f: f.fp32_residual_connection and not (f.fp16 or f.bf16),
    ),
    FlagRule(
        "accumulate_allreduce_grads_in_fp32 main_grads_dtype",
        "gradients are summed in fp32, so that they are kept in fp32",
        lambda f: f.bf16 and f.accumulate_allreduce_grads_in_fp32 and f.main_grads_dtype != "fp32",
    ),
)
OPTIMIZER = (
    FlagRule(
        "use_precision_aware_optimizer optimizer",
        "needs Adam",
        lambda f: f.use_precision_aware_optimizer and f.optimizer != "adam",
    ),
    FlagRule(
        "main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype",
        "other types than fp32 need --use-precision-aware-optimizer",
        lambda f: (
            not f.use_precision_aware_optimizer
            and {f.main_grads_dtype, f.main_params_dtype, f.exp_avg_dtype, f.exp_avg_sq_dtype} != {"fp32"}
        ),
    ),
    FlagRule(
        "optimizer_cpu_offload",
        "needs --use-precision-aware-optimizer",
        lambda f: f.optimizer_cpu_offload and not f.use_precision_aware_optimizer,
    ),
    FlagRule(
        "optimizer_cpu_offload fp8_param_gather",
        "both need --fp8-recipe delayed",
        lambda f: f.optimizer_cpu_offload and f.fp8_param_gather and f.fp8_recipe != "delayed",
    ),
    FlagRule(
        "ddp_num_buckets ddp_bucket_size",
        "exclude each other",
        lambda f: f.ddp_num_buckets is not None and f.ddp_bucket_size is not None and not f.use_torch_fsdp2,
    ),
    FlagRule(
        "ddp_num_buckets",
        "must be at least 1",
        lambda f: f.ddp_num_buckets is not None and f.ddp_num_buckets < 1 and not f.use_torch_fsdp2,
    ),
    FlagRule(
        "num_distributed_optimizer_instances",
        "must be at least 1",
        lambda f: f.num_distributed_optimizer_instances == 0,
    ),
    FlagRule(
        "overlap_param_gather_with_optimizer_step ckpt_format",
        "needs --ckpt-format torch",
        lambda f: f.overlap_param_gather_with_optimizer_step and f.ckpt_format != "torch",
    ),
    FlagRule(
        "use_torch_fsdp2",
        "needs --no-gradient-accumulation-fusion",
        lambda f: f.use_torch_fsdp2 and f.gradient_accumulation_fusion,
    ),
    FlagRule(
        "use_torch_fsdp2 ckpt_format",
        "needs --ckpt-format torch_dist or torch_dcp",
        lambda f: f.use_torch_fsdp2 and f.ckpt_format not in ("torch_dist", "torch_dcp"),
    ),
    FlagRule(
        "use_torch_fsdp2",
        "needs --untie-embeddings-and-output-weights",
        lambda f: f.use_torch_fsdp2 and not f.untie_embeddings_and_output_weights,
    ),
    FlagRule("use_torch_fsdp2 fp16", "exclude each other", lambda f: f.use_torch_fsdp2 and f.fp16),
    FlagRule(
        "use_megatron_fsdp ckpt_format",
        "needs --ckpt-format fsdp_dtensor",
        lambda f: f.use_megatron_fsdp and f.ckpt_format != "fsdp_dtensor",
    ),
    FlagRule(
        "use_megatron_fsdp check_weight_hash_across_dp_replicas_interval",
        "no replica has all weights under --data-parallel-sharding-strategy optim_grads_params",
        lambda f: (
            f.use_megatron_fsdp
            and f.data_parallel_sharding_strategy == "optim_grads_params"
            and f.check_weight_hash_across_dp_replicas_interval is not None
        ),
    ),
    FlagRule(
        "fsdp_manual_registration",
        "needs --use-megatron-fsdp and --use-nccl-ub",
        lambda f: f.fsdp_manual_registration and not (f.use_megatron_fsdp and f.nccl_ub),
    ),
    FlagRule(
        "ckpt_format",
        "torch_dcp needs --use-torch-fsdp2",
        lambda f: f.ckpt_format == "torch_dcp" and not f.use_torch_fsdp2,
    ),
    FlagRule(
        "ckpt_format tensor_model_parallel_size pipeline_model_parallel_size",
        "torch_dcp goes with neither tensor nor pipeline parallelism",
        lambda f: f.ckpt_format == "torch_dcp" and f.tensor_model_parallel_size * f.pipeline_model_parallel_size > 1,
    ),
    FlagRule(
        "use_distributed_optimizer ckpt_format enable_gloo_process_groups use_gloo_process_groups",
        "without gloo the distributed optimizer needs --ckpt-format torch_dist",
        lambda f: (
            f.use_distributed_optimizer
            and f.ckpt_format == "torch"
            and False in (f.enable_gloo_process_groups, f.use_gloo_process_groups)
        ),
    ),
    FlagRule(
        "ckpt_format",
        "fsdp_dtensor needs --use-megatron-fsdp",
        lambda f: f.ckpt_format == "fsdp_dtensor" and not f.use_megatron_fsdp,
    ),
)
STEPS = (
    FlagRule(
        "train_iters lr_decay_samples",
        "training counts iterations, so that the decay counts them, too (--lr-decay-iters)",
        lambda f: f.train_iters and f.lr_decay_samples is not None,
    ),
    FlagRule(
        "train_iters lr_warmup_samples",
        "training counts iterations, so that the warm-up counts them, too (--lr-warmup-iters)",
        lambda f: f.train_iters and f.lr_warmup_samples,
    ),
    FlagRule(
        "train_samples lr_decay_iters",
        "training counts samples, so that the decay counts them, too (--lr-decay-samples)",
        lambda f: f.train_samples and f.lr_decay_iters is not None,
    ),
    FlagRule(
        "train_samples lr_warmup_iters",
        "training counts samples, so that the warm-up counts them, too (--lr-warmup-samples)",
        lambda f: f.train_samples and f.lr_warmup_iters,
    ),
    FlagRule(
        "lr_warmup_fraction lr_warmup_iters lr_warmup_samples",
        "exclude each other",
        lambda f: f.lr_warmup_fraction is not None and (f.lr_warmup_iters or f.lr_warmup_samples),
    ),
    FlagRule(
        "lr_warmup_fraction lr_warmup_iters lr_warmup_samples lr_decay_iters lr_decay_samples train_iters",
        "the warm-up of the learning rate must end before its decay",
        lambda f: f.decay_steps and f.warmup_steps >= f.decay_steps,
    ),
    FlagRule("lr min_lr", "the least learning rate is above the other", lambda f: f.lr is not None and f.min_lr > f.lr),
    FlagRule(
        "lr_decay_style",
        "WSD needs --lr-wsd-decay-iters (or -samples)",
        lambda f: (
            f.lr_decay_style == "WSD"
            and (f.lr_wsd_decay_iters if f.train_iters else f.lr_wsd_decay_samples) is None
            and f.decay_steps
        ),
    ),
    FlagRule(
        "start_weight_decay end_weight_decay",
        "a constant weight decay has no start and no end; add --weight-decay-incr-style",
        lambda f: (
            f.weight_decay_incr_style == "constant"
            and (f.start_weight_decay is not None or f.end_weight_decay is not None)
        ),
    ),
    FlagRule(
        "weight_decay_incr_style",
        "needs --start-weight-decay and --end-weight-decay",
        lambda f: (
            f.weight_decay_incr_style != "constant" and (f.start_weight_decay is None or f.end_weight_decay is None)
        ),
    ),
    FlagRule(
        "phase_transition_iterations rampup_batch_size",
        "exclude each other",
        lambda f: f.phase_transition_iterations and f.rampup_batch_size is not None,
    ),
    FlagRule(
        "step_batch_size_schedule global_batch_size",
        "exclude each other",
        lambda f: f.step_batch_size_schedule and f.global_batch_size is not None,
    ),
    FlagRule(
        "train_iters rampup_batch_size",
        "a growing batch needs --train-samples in place of --train-iters",
        lambda f: f.train_iters and f.rampup_batch_size is not None,
        until=LAST_RAMP,
    ),
    FlagRule(
        "rampup_batch_size global_batch_size",
        "the start grows to the global batch by whole increments, one at least",
        lambda f: (
            f.rampup_batch_size is not None
            and f.global_batch_size is not None
            and not grows(f.rampup_batch_size, f.global_batch_size)
        ),
        until=LAST_RAMP,
    ),
    FlagRule(
        "step_batch_size_schedule rampup_batch_size",
        "exclude each other",
        lambda f: f.step_batch_size_schedule and f.rampup_batch_size is not None,
    ),
)
FILES = (
    FlagRule("save", "needs --save-interval", lambda f: f.save is not None and f.save_interval is None),
    FlagRule(
        "save_interval",
        "must be at least 1",
        lambda f: f.save is not None and f.save_interval is not None and f.save_interval < 1,
    ),
    FlagRule(
        "save_retain_interval",
        "must be at least 1",
        lambda f: f.save is not None and f.save_retain_interval is not None and f.save_retain_interval < 1,
    ),
    FlagRule(
        "save_retain_interval save_interval",
        "no multiple of --save-interval",
        lambda f: f.save is not None and f.save_retain_interval and f.save_retain_interval % (f.save_interval or 1),
    ),
    FlagRule(
        "log_memory_interval log_interval",
        "no multiple of --log-interval",
        lambda f: f.log_memory_interval is not None and (not f.log_interval or f.log_memory_interval % f.log_interval),
    ),
    FlagRule(
        "load_main_params_from_ckpt",
        "needs --no-load-optim",
        lambda f: f.load_main_params_from_ckpt and not f.no_load_optim,
    ),
    FlagRule("moe_use_upcycling", "needs --save", lambda f: f.moe_use_upcycling and f.save is None),
    FlagRule(
        "replication",
        "needs --replication-jump and --non-persistent-ckpt-type local",
        lambda f: f.replication and (f.replication_jump is None or f.non_persistent_ckpt_type != "local"),
    ),
    FlagRule(
        "non_persistent_ckpt_type",
        "needs --non-persistent-local-ckpt-dir",
        lambda f: f.non_persistent_ckpt_type == "local" and f.non_persistent_local_ckpt_dir is None,
    ),
    FlagRule(
        "data_path data_args_path",
        "exclude each other",
        lambda f: f.data_path is not None and f.data_args_path is not None,
    ),
    FlagRule(
        "mock_data data_path train_data_path valid_data_path test_data_path",
        "exclude each other",
        lambda f: (
            bool(f.mock_data) + bool(f.data_path) + bool(f.train_data_path or f.valid_data_path or f.test_data_path) > 1
        ),
    ),
    FlagRule("seed", "must be at least 1", lambda f: f.seed < 1),
    FlagRule(
        "distrib_optim_fully_reshardable_mem_efficient enable_gloo_process_groups use_gloo_process_groups",
        "exclude each other",
        lambda f: (
            f.use_distributed_optimizer
            and f.dist_ckpt_optim_fully_reshardable
            and f.distrib_optim_fully_reshardable_mem_efficient
            and False in (f.enable_gloo_process_groups, f.use_gloo_process_groups)
        ),
    ),
    FlagRule("num_dataset_builder_threads", "must be at least 1", lambda f: f.num_dataset_builder_threads < 1),
    FlagRule("warmup", "no longer valid; use --lr-warmup-fraction", lambda f: f.warmup is not None),
)


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


DROPPING = {"aux_loss", "seq_aux_loss", "global_aux_loss", "none"}
"""Load balancing that goes with a capacity factor."""
EXPERTS = (
    FlagRule(
        "moe_router_topk num_experts",
        "a token goes to more experts than there are",
        lambda f: f.is_expert_model and f.moe_router_topk > f.num_experts > 0,
    ),
    FlagRule("num_experts", "must not be below 0", lambda f: f.is_expert_model and f.num_experts < 0),
    FlagRule(
        "num_experts",
        "experts with biases are refused before 0.15; add --disable-bias-linear",
        lambda f: f.is_expert_model and f.add_bias_linear,
        until=(0, 14),
    ),
    FlagRule(
        "moe_grouped_gemm", "needs --bf16 before 0.16", lambda f: f.moe_grouped_gemm and not f.bf16, until=(0, 15)
    ),
    FlagRule(
        "moe_grouped_gemm",
        "with biases needs --no-bias-dropout-fusion; or add --disable-bias-linear",
        lambda f: (
            f.is_expert_model
            and f.moe_grouped_gemm
            and not f.moe_use_legacy_grouped_gemm
            and f.add_bias_linear
            and f.bias_dropout_fusion
            and f.transformer_impl == "transformer_engine"
        ),
    ),
    FlagRule(
        "moe_token_dispatcher_type",
        "needs --moe-enable-deepep before 0.16",
        lambda f: f.is_expert_model and f.dispatcher == "flex" and not f.moe_enable_deepep,
        until=(0, 15),
    ),
    FlagRule(
        "moe_ffn_hidden_size",
        "needs --num-experts",
        lambda f: f.moe_ffn_hidden_size is not None and not f.is_expert_model,
    ),
    FlagRule(
        "moe_enable_deepep moe_token_dispatcher_type",
        "needs --moe-token-dispatcher-type flex",
        lambda f: f.moe_enable_deepep and f.dispatcher != "flex",
    ),
    FlagRule(
        "moe_enable_deepep moe_flex_dispatcher_backend",
        "exclude each other",
        lambda f: f.moe_enable_deepep and f.moe_flex_dispatcher_backend == "hybridep",
    ),
    FlagRule(
        "moe_token_dispatcher_type moe_pad_expert_input_to_capacity",
        "the flex dispatcher with DeepEP does not pad",
        lambda f: (
            f.dispatcher == "flex"
            and f.moe_pad_expert_input_to_capacity
            and (f.moe_enable_deepep or f.moe_flex_dispatcher_backend in ("deepep", None))
        ),
    ),
    FlagRule(
        "moe_shared_expert_intermediate_size",
        "must be at least 1",
        lambda f: f.moe_shared_expert_intermediate_size is not None and f.moe_shared_expert_intermediate_size < 1,
    ),
    FlagRule(
        "moe_shared_expert_overlap moe_token_dispatcher_type",
        "needs --moe-token-dispatcher-type alltoall",
        lambda f: f.moe_shared_expert_intermediate_size and f.moe_shared_expert_overlap and f.dispatcher != "alltoall",
    ),
    FlagRule(
        "moe_shared_expert_intermediate_size",
        "needs --disable-bias-linear",
        lambda f: f.is_expert_model and f.moe_shared_expert_intermediate_size and f.add_bias_linear,
    ),
    FlagRule(
        "moe_router_load_balancing_type moe_aux_loss_coeff",
        "needs one coefficient for each kind",
        lambda f: (
            len(f.balancing) > 1
            and len(f.balancing) != (len(f.moe_aux_loss_coeff) if isinstance(f.moe_aux_loss_coeff, list) else 1)
        ),
    ),
    FlagRule(
        "moe_expert_capacity_factor moe_router_load_balancing_type",
        f"tokens are dropped only with {', '.join(sorted(DROPPING))}",
        lambda f: f.moe_expert_capacity_factor is not None and set(f.balancing) - DROPPING,
    ),
    FlagRule(
        "moe_pad_expert_input_to_capacity",
        "needs --moe-expert-capacity-factor",
        lambda f: f.moe_pad_expert_input_to_capacity and f.capacity is None,
    ),
    FlagRule(
        "moe_router_enable_expert_bias",
        "needs --moe-router-score-function sigmoid",
        lambda f: f.moe_router_enable_expert_bias and f.moe_router_score_function == "softmax",
    ),
    FlagRule(
        "moe_router_topk",
        "needs --moe-router-pre-softmax",
        lambda f: (
            f.moe_router_topk == 1
            and f.moe_router_score_function == "softmax"
            and not f.moe_router_pre_softmax
            and f.balancing != ["sinkhorn"]
        ),
    ),
    FlagRule(
        "moe_router_group_topk",
        "needs --moe-router-num-groups",
        lambda f: f.moe_router_group_topk and not f.moe_router_num_groups,
    ),
    FlagRule(
        "moe_router_group_topk num_experts moe_router_num_groups",
        "the groups must divide the experts",
        lambda f: (
            f.moe_router_group_topk
            and f.moe_router_num_groups
            and (not f.is_expert_model or f.num_experts % f.moe_router_num_groups)
        ),
    ),
    FlagRule(
        "moe_router_group_topk moe_router_num_groups",
        "more groups than there are",
        lambda f: f.moe_router_group_topk and f.moe_router_group_topk > (f.moe_router_num_groups or 0),
    ),
    FlagRule(
        "moe_router_padding_for_fp8 moe_router_padding_for_quantization",
        "needs --fp8-format",
        lambda f: (f.moe_router_padding_for_fp8 or f.moe_router_padding_for_quantization) and not (f.fp8 or f.fp4),
    ),
    FlagRule(
        "moe_router_padding_for_fp8 moe_router_padding_for_quantization moe_token_dispatcher_type",
        "this dispatcher does not pad; use alltoall or flex",
        lambda f: (
            (f.moe_router_padding_for_fp8 or f.moe_router_padding_for_quantization) and f.dispatcher == "allgather"
        ),
    ),
    FlagRule(
        "moe_paged_stash",
        "needs --moe-expert-rank-capacity-factor",
        lambda f: f.moe_paged_stash and f.moe_expert_rank_capacity_factor is None,
    ),
    FlagRule(
        "delay_wgrad_compute",
        "needs --overlap-moe-expert-parallel-comm",
        lambda f: f.delay_wgrad_compute and not f.overlap_moe_expert_parallel_comm,
    ),
    FlagRule(
        "ep_overlap_early_attn_memory_release",
        "needs --overlap-moe-expert-parallel-comm",
        lambda f: f.ep_overlap_early_attn_memory_release and not f.overlap_moe_expert_parallel_comm,
    ),
    FlagRule(
        "delay_wgrad_compute moe_use_legacy_grouped_gemm",
        "exclude each other",
        lambda f: f.delay_wgrad_compute and f.moe_use_legacy_grouped_gemm,
    ),
    FlagRule(
        "overlap_moe_expert_parallel_comm moe_token_dispatcher_type",
        "needs --moe-token-dispatcher-type alltoall or flex",
        lambda f: f.overlap_moe_expert_parallel_comm and f.dispatcher not in ("alltoall", "flex"),
    ),
    FlagRule(
        "overlap_moe_expert_parallel_comm",
        "needs --bf16 or --fp16",
        lambda f: f.overlap_moe_expert_parallel_comm and not (f.bf16 or f.fp16),
    ),
    FlagRule(
        "overlap_moe_expert_parallel_comm moe_shared_expert_overlap",
        "exclude each other",
        lambda f: f.overlap_moe_expert_parallel_comm and f.moe_shared_expert_overlap,
    ),
    FlagRule(
        "overlap_moe_expert_parallel_comm mtp_num_layers",
        "allows one depth of multi-token prediction",
        lambda f: f.overlap_moe_expert_parallel_comm and (f.mtp_num_layers or 0) > 1,
    ),
    FlagRule(
        "overlap_moe_expert_parallel_comm recompute_method recompute_num_layers",
        "excludes a method and a number of recompute",
        # With full recompute a plan changes both.
        lambda f: (
            f.overlap_moe_expert_parallel_comm
            and f.granularity != "full"
            and (f.recompute_method is not None or f.recompute_num_layers is not None)
        ),
    ),
)
GRAPHS = (
    FlagRule(
        "enable_cuda_graph external_cuda_graph",
        "exclude each other",
        lambda f: f.enable_cuda_graph and f.external_cuda_graph,
    ),
    FlagRule(
        "enable_cuda_graph external_cuda_graph cuda_graph_impl",
        "old and new flags of CUDA graphs exclude each other",
        lambda f: (f.enable_cuda_graph or f.external_cuda_graph) and f.cuda_graph_impl not in (None, "none"),
    ),
    FlagRule(
        "cuda_graph_scope",
        "full stands alone",
        lambda f: {"full"} < set(f.cuda_graph_scope or f.cuda_graph_scope_deprecated or []),
        since=(0, 16),
    ),
    FlagRule(
        "cuda_graph_scope cuda_graph_modules",
        "are old and new flags for the same",
        lambda f: f.cuda_graph_scope_deprecated is not None and f.cuda_graph_modules,
    ),
    FlagRule(
        "cuda_graph_impl cuda_graph_scope",
        "a graph of the whole iteration needs --no-check-for-nan-in-loss-and-grad",
        lambda f: (
            f.checks_nan and (f.graphs == "full_iteration" or (f.graphs == "local" and "full_iteration" in f.graphed))
        ),
    ),
    FlagRule(
        "cuda_graph_impl cuda_graph_scope",
        "the whole iteration needs --cuda-graph-impl local",
        lambda f: f.graphs == "transformer_engine" and "full_iteration" in f.graphed,
    ),
    FlagRule(
        "cuda_graph_impl cpu_offloading_num_layers",
        "exclude each other",
        lambda f: f.graphs != "none" and f.cpu_offloading_num_layers,
    ),
    FlagRule(
        "cuda_graph_scope cuda_graph_modules",
        "moe and moe_router exclude each other",
        lambda f: f.graphs != "none" and {"moe", "moe_router"} <= f.graphed,
    ),
    FlagRule(
        "cuda_graph_scope cuda_graph_modules",
        "moe_preprocess needs moe_router",
        lambda f: f.graphs == "transformer_engine" and "moe_preprocess" in f.graphed and "moe_router" not in f.graphed,
    ),
    FlagRule(
        "cuda_graph_scope cuda_graph_modules",
        "moe and moe_router need --num-experts above 1",
        lambda f: (
            f.graphs != "none"
            and f.graphed & {"moe", "moe_router", *(["moe_preprocess"] if f.graphs == "local" else [])}
            and (f.num_experts or 1) <= 1
        ),
    ),
    FlagRule(
        "cuda_graph_scope cuda_graph_modules",
        "mlp needs layers without experts",
        lambda f: (
            f.graphs in ("local", "transformer_engine")
            and (f.num_experts or 1) > 1
            and "mlp" in f.graphed
            and str(f.moe_layer_freq) == "1"
        ),
    ),
    FlagRule(
        "cuda_graph_scope cuda_graph_modules",
        "moe needs --moe-expert-capacity-factor and --moe-pad-expert-input-to-capacity",
        lambda f: (
            f.graphs != "none"
            and f.is_expert_model
            and "moe" in f.graphed
            and (f.capacity is None or not f.moe_pad_expert_input_to_capacity)
        ),
    ),
)


TABLES = (PRECISION, OPTIMIZER, STEPS, FILES, MODEL, MEMORY, EXPERTS, GRAPHS)


def flag_faults(arguments: Arguments) -> Broken:
    """Check flags that exclude or need each other, by the tables of Megatron's rules."""
    view = FlagView(arguments)
    for rule in chain.from_iterable(TABLES):
        if rule.since <= view.release <= rule.until and rule.is_broken(view):
            names = tuple(rule.names.split())
            given = sum(arguments.is_given(name) for name in names)
            yield BrokenRule(rule.reason, names, "change one of them" if given > 1 else "change or remove it")
