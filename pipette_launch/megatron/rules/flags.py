"""Rules that depend on flags alone: `validate_args` and the configuration classes behind it, core_v0.16 to v0.20."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any

from pipette_launch.facts.job import ENGINE, ITERATION, LOCAL, SHARDED_MUON
from pipette_launch.megatron.flags import OLDEST, Arguments, flag_defaults, known_dests, release_of
from pipette_launch.megatron.layout import read_recompute
from pipette_launch.megatron.performance import options_of
from pipette_launch.megatron.rules.broken import Broken, BrokenRule

DROPPING = {"aux_loss", "seq_aux_loss", "global_aux_loss", "none"}
"""Kinds of load balancing that allow a capacity factor."""
OFFLOADED = {"core_attn", "attn_proj", "expert_fc1", "moe_act", "attn_norm", "mlp_norm", "qkv_linear"}
OFFLOADED_SINCE = {"fused_group_mlp": (0, 19), "gdp_qkv": (0, 20)}
"""First release of each newer module, for `OFFLOADED`, and in the next table for `RECOMPUTED`."""
RECOMPUTED_SINCE = {"gdn_norm_out": (0, 19), "gdp_in_proj": (0, 20), "gdp_qkv": (0, 20), "mhc": (0, 20)}
RECOMPUTED = {"core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"}
Release = tuple[int, int]
DEST_OF = {"fp8_format": "fp8", "fp4_format": "fp4"}
"""Destination of each flag whose letters differ from its destination, for `needs`."""


class FlagView:
    """Values of flags, as attributes named by destination. None for destinations that only other releases have."""

    def __init__(self, arguments: Arguments) -> None:
        """Take the last value of each given flag, and the release's defaults for all other flags."""
        self._defaults = flag_defaults(arguments.version)
        given = {token.flag.dest: token.value for token in arguments.tokens if token.flag}
        self._values = {**self._defaults, **given}
        self.release = release_of(arguments.version)
        recompute, graphs = read_recompute(arguments), options_of(arguments).graphs
        self.granularity: str = recompute.granularity
        self.recomputed = {*recompute.modules} if recompute.granularity == "selective" else set()
        self.graphs, self.graphed = graphs
        self.dispatcher = str(self.moe_token_dispatcher_type)
        kinds = self.moe_router_load_balancing_type
        self.balancing = list(kinds) if isinstance(kinds, (list, tuple)) else [kinds]
        self.is_hybrid = bool(self.hybrid_layer_pattern or self.hybrid_override_pattern)
        self.is_rope = bool(self.use_rotary_position_embeddings or self.position_embedding_type == "rope")

    def __getattr__(self, dest: str) -> Any:
        """Return the value that Megatron's parser would store. Raise AttributeError if no release has the name."""
        if dest not in known_dests():
            raise AttributeError(f"no release of Megatron has a flag for {dest}")
        return self._values.get(dest)

    def is_on(self, dest: str) -> bool:
        """Return True if the flag has a value that is not off. 0 counts as on if the release has no default."""
        value = getattr(self, dest)
        return bool(value) or (value == 0 and value is not False and self._defaults.get(dest) is None)

    @property
    def capacity(self) -> float | None:
        """Capacity factor of the experts. The value is `None` if experts drop no tokens."""
        factor = self.moe_expert_capacity_factor
        return None if factor is None or factor < 0 else float(factor)

    @property
    def fuses_activation(self) -> bool:
        """True if Megatron fuses bias and activation into one kernel (core_transformer_config_from_args)."""
        if self.swiglu:
            return bool(self.bias_swiglu_fusion)
        return bool(self.bias_gelu_fusion and self.add_bias_linear)

    @property
    def activation(self) -> str:
        """Name of the activation function (core_transformer_config_from_args)."""
        return next((name for name in ("squared_relu", "quick_geglu", "swiglu") if getattr(self, name)), "gelu")

    @property
    def decay_steps(self) -> int:
        """Steps or samples until the learning rate is lowest. 0 if no flag sets the length of the training."""
        if self.train_iters:
            return int(self.lr_decay_iters or self.train_iters)
        return int(self.lr_decay_samples or self.train_samples or 0)

    @property
    def warmup_steps(self) -> float:
        """Steps or samples of the learning rate's warm-up."""
        if self.lr_warmup_fraction is not None:
            return float(self.lr_warmup_fraction) * self.decay_steps
        return float(self.lr_warmup_iters if self.train_iters else self.lr_warmup_samples)

    @property
    def mamba_width(self) -> int:
        """Channels to which a Mamba layer projects its input (mamba_mixer.py)."""
        heads = self.mamba_num_heads or 2 * self.hidden_size // self.mamba_head_dim
        return int(2 * heads * self.mamba_head_dim + 2 * self.mamba_num_groups * self.mamba_state_dim + heads)

    @property
    def grows(self) -> bool:
        """True if `--rampup-batch-size` reaches the global batch size (RampupBatchsizeNumMicroBatchesCalculator)."""
        if len(self.rampup_batch_size) != len(("start", "increment", "samples")):
            return False
        start, increment, samples = (int(str(word)) for word in self.rampup_batch_size)
        rest = self.global_batch_size - start
        return start > 0 and increment > 0 and samples >= 0 and rest > 0 and rest % increment == 0


Test = Callable[[Any], object]
"""Returns a true value if a `FlagView` breaks the rule. With the type Any, mypy accepts every destination."""
Fault = tuple[str, str]
"""Destinations, and the reason of a refusal. The message shows the given flags of these destinations."""


@dataclass(frozen=True, slots=True)
class FlagRule:
    """A rule on one or more flags, which some releases of Megatron have."""

    names: str
    reason: str
    is_broken: Test
    since: tuple[int, int] = OLDEST
    """First release with this rule."""
    until: tuple[int, int] = (0, 99)
    """Last release with this rule."""


def _always(_: FlagView) -> bool:
    return True


def _is_sparse(f: FlagView) -> bool:
    return f.experimental_attention_variant == "dsa" or "D" in (
        f.hybrid_layer_pattern or f.hybrid_override_pattern or ""
    )


def excludes(names: str, reason: str = "exclude each other", *, when: Test = _always, **releases: Release) -> FlagRule:
    """Make the rule that the flags of `names` may not all be on at the same time."""
    dests = names.split()
    return FlagRule(names, reason, lambda f: all(map(f.is_on, dests)) and when(f), **releases)


def needs(name: str, needed: str, *, when: Test = _always, **releases: Release) -> FlagRule:
    """Make the rule that a flag needs `--fp16` to be on, or `--normalization` to have the value `RMSNorm`."""
    option, *values = needed.replace(" or ", " ").split()
    letters = option.removeprefix("--").replace("-", "_")
    dest = DEST_OF.get(letters, letters)

    def is_broken(f: FlagView) -> object:
        is_met = str(getattr(f, dest)) in values if values else f.is_on(dest)
        return f.is_on(name) and not is_met and when(f)

    return FlagRule(f"{name} {dest}", f"needs {needed}", is_broken, **releases)


def at_least_1(name: str, *, when: Test = _always) -> FlagRule:
    """Make the rule that the number of a flag, if the flag is set, is at least 1."""

    def is_broken(f: FlagView) -> object:
        value = getattr(f, name)
        return value is not None and value < 1 and when(f)

    return FlagRule(name, "must be at least 1", is_broken)


TABLE = (
    # Rules on number formats.
    excludes("fp4 fp8", "FP4 and FP8 exclude each other"),
    needs("fp4_param", "--fp4-format"),
    needs("fp4_param_gather", "--fp4-format"),
    needs("fp8_param_gather", "--fp8-format"),
    needs("fp8_param_gather", "--use-distributed-optimizer", when=lambda f: f.optimizer == SHARDED_MUON),
    needs("fp8_recipe", "--fp8-quantizer-factory", when=lambda f: f.fp8 and f.fp8_recipe == "custom"),
    needs("fp4_recipe", "--fp4-quantizer-factory", when=lambda f: f.fp4 and f.fp4_recipe == "custom"),
    needs("reuse_grad_buf_for_mxfp8_param_ag", "--fp8-param-gather", when=lambda f: not f.use_torch_fsdp2),
    needs("fp16_lm_cross_entropy", "--fp16"),
    # Rules on the optimizer.
    needs("optimizer_cpu_offload", "--use-precision-aware-optimizer"),
    FlagRule("optimizer", "does not run in 0.17", lambda f: f.optimizer == "lion", since=(0, 17), until=(0, 17)),
    excludes("ddp_num_buckets ddp_bucket_size", when=lambda f: not f.use_torch_fsdp2),
    at_least_1("ddp_num_buckets", when=lambda f: not f.use_torch_fsdp2),
    at_least_1("num_distributed_optimizer_instances"),
    needs("overlap_param_gather_with_optimizer_step", "--ckpt-format torch"),
    excludes("use_torch_fsdp2 gradient_accumulation_fusion", "needs --no-gradient-accumulation-fusion"),
    needs("use_torch_fsdp2", "--ckpt-format torch_dist or torch_dcp"),
    needs("use_torch_fsdp2", "--untie-embeddings-and-output-weights"),
    excludes("use_torch_fsdp2 fp16"),
    needs("use_megatron_fsdp", "--ckpt-format fsdp_dtensor"),
    excludes("use_distributed_optimizer optimizer", when=lambda f: f.optimizer == SHARDED_MUON, until=(0, 17)),
    *(
        excludes(f"{name} optimizer", when=lambda f: f.optimizer not in ("adam", "sgd"))
        for name in ("use_megatron_fsdp", "use_torch_fsdp2")
    ),
    # Rules on steps and learning rates.
    *(
        excludes(
            f"train_{mine} lr_{change}_{other}",
            f"training counts {words}; use --lr-{change}-{mine}",
            when=attrgetter(f"train_{mine}"),
        )
        for mine, other, words in (("iters", "samples", "iterations"), ("samples", "iters", "samples"))
        for change in ("decay", "warmup")
    ),
    excludes("lr_warmup_fraction lr_warmup_iters"),
    excludes("lr_warmup_fraction lr_warmup_samples"),
    excludes("phase_transition_iterations rampup_batch_size"),
    excludes("step_batch_size_schedule global_batch_size"),
    excludes("step_batch_size_schedule rampup_batch_size"),
    # Rules on files.
    needs("save", "--save-interval"),
    at_least_1("save_interval", when=lambda f: f.save is not None),
    at_least_1("save_retain_interval", when=lambda f: f.save is not None),
    needs("load_main_params_from_ckpt", "--no-load-optim"),
    needs("moe_use_upcycling", "--save"),
    needs(
        "non_persistent_ckpt_type",
        "--non-persistent-local-ckpt-dir",
        when=lambda f: f.non_persistent_ckpt_type == "local",
    ),
    excludes("data_path data_args_path"),
    at_least_1("seed"),
    at_least_1("num_dataset_builder_threads"),
    # Rules on layers, positions and attention.
    excludes("multi_latent_attention group_query_attention"),
    excludes("multi_latent_attention rotary_interleaved"),
    excludes("multi_latent_attention attention_output_gate"),
    excludes("multi_latent_attention qk_l2_norm"),
    excludes("moe_latent_size moe_shared_expert_overlap"),
    needs("moe_latent_size", "--num-experts"),
    needs("experimental_attention_variant", "--transformer-impl transformer_engine", when=lambda f: not f.is_hybrid),
    needs(
        "experimental_attention_variant", "--multi-latent-attention", when=lambda f: _is_sparse(f) and not f.is_hybrid
    ),
    excludes("apply_rope_fusion", "sparse attention needs --no-rope-fusion", when=_is_sparse),
    excludes("add_bias_linear", "sparse attention needs --disable-bias-linear", when=_is_sparse, since=(0, 19)),
    needs("fused_residual_rmsnorm", "--normalization RMSNorm"),
    needs("rope_type", "--multi-latent-attention", when=lambda f: f.rope_type != "rope"),
    excludes("squared_relu swiglu"),
    excludes("quick_geglu swiglu", when=lambda f: not f.squared_relu),
    needs("batch_invariant_mode", "--attention-backend flash"),
    needs("batch_invariant_mode", "--flash-attention-version 3 or 4", since=(0, 19)),
    needs("batch_invariant_mode", "--context-parallel-size 1", since=(0, 19)),
    needs("batch_invariant_mode", "--bf16", since=(0, 20)),
    excludes("deterministic_mode cross_entropy_loss_fusion"),
    excludes("deterministic_mode tp_comm_overlap", "exclude each other from 0.19 on", since=(0, 19)),
    excludes("deterministic_mode use_flash_attn", until=(0, 18)),
    excludes("num_layers encoder_num_layers"),
    excludes("seq_length encoder_seq_length"),
    # Rules on saved activations.
    excludes("moe_layer_recompute recompute_granularity", when=lambda f: f.recompute_granularity == "full"),
    excludes("fine_grained_activation_offloading cpu_offloading_num_layers"),
    needs("fine_grained_activation_offloading", "--offload-modules"),
    needs("fine_grained_activation_offloading", "--transformer-impl transformer_engine"),
    needs(
        "recompute_modules",
        "--experimental-attention-variant gated_delta_net or gdn or gdn2",
        when=lambda f: "gdn_norm_out" in f.recomputed,
    ),
    needs("delay_wgrad_compute", "--transformer-impl transformer_engine"),
    # Rules on experts.
    needs("moe_ffn_hidden_size", "--num-experts"),
    needs("moe_enable_deepep", "--moe-token-dispatcher-type flex"),
    excludes(
        "moe_enable_deepep moe_flex_dispatcher_backend", when=lambda f: f.moe_flex_dispatcher_backend == "hybridep"
    ),
    at_least_1("moe_shared_expert_intermediate_size"),
    needs(
        "moe_shared_expert_overlap",
        "--moe-token-dispatcher-type alltoall",
        when=lambda f: f.moe_shared_expert_intermediate_size,
    ),
    needs("moe_paged_stash", "--moe-expert-rank-capacity-factor"),
    needs("delay_wgrad_compute", "--overlap-moe-expert-parallel-comm"),
    needs("ep_overlap_early_attn_memory_release", "--overlap-moe-expert-parallel-comm"),
    excludes("delay_wgrad_compute moe_use_legacy_grouped_gemm"),
    needs("overlap_moe_expert_parallel_comm", "--moe-token-dispatcher-type alltoall or flex"),
    excludes("overlap_moe_expert_parallel_comm moe_shared_expert_overlap"),
    # Rules on CUDA graphs.
    excludes("enable_cuda_graph external_cuda_graph"),
    excludes("cuda_graph_impl cpu_offloading_num_layers", when=lambda f: f.graphs != "none"),
)


def _precision(f: FlagView) -> Iterator[Fault]:
    if f.fp8 and f.first_last_layers_bf16 and f.fp8_recipe == "delayed":
        yield "first_last_layers_bf16", "excludes delayed scaling of FP8; choose another --fp8-recipe"
    if f.fp32_residual_connection and not (f.fp16 or f.bf16):
        yield "fp32_residual_connection", "needs --bf16 or --fp16"
    if f.bf16 and f.accumulate_allreduce_grads_in_fp32 and f.main_grads_dtype != "fp32":
        names = "accumulate_allreduce_grads_in_fp32 main_grads_dtype"
        yield names, "gradients are summed in fp32, so they must be stored in fp32"
    dtypes = {f.main_grads_dtype, f.main_params_dtype, f.exp_avg_dtype, f.exp_avg_sq_dtype}
    if not f.use_precision_aware_optimizer and dtypes != {"fp32"}:
        names = "main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype"
        yield names, "other types than fp32 need --use-precision-aware-optimizer"
    if f.use_precision_aware_optimizer and f.optimizer != "adam":
        yield "use_precision_aware_optimizer optimizer", "needs Adam"
    if f.optimizer_cpu_offload and f.fp8_param_gather and f.fp8_recipe != "delayed":
        yield "optimizer_cpu_offload fp8_param_gather", "both need --fp8-recipe delayed"
    if f.fp8 and f.is_hybrid and f.mamba_width % 16:
        names = "fp8 mamba_num_heads mamba_head_dim mamba_num_groups mamba_state_dim"
        yield names, "FP8 needs a width of Mamba's projection that is a multiple of 16"


def _sharding(f: FlagView) -> Iterator[Fault]:
    is_fully_sharded = f.use_megatron_fsdp and f.data_parallel_sharding_strategy == "optim_grads_params"
    if is_fully_sharded and f.check_weight_hash_across_dp_replicas_interval is not None:
        names = "use_megatron_fsdp check_weight_hash_across_dp_replicas_interval"
        yield names, "no replica has all weights under --data-parallel-sharding-strategy optim_grads_params"
    if f.fsdp_manual_registration and not (f.use_megatron_fsdp and f.nccl_ub):
        yield "fsdp_manual_registration", "needs --use-megatron-fsdp and --use-nccl-ub"
    if f.ckpt_format == "torch_dcp" and not f.use_torch_fsdp2:
        yield "ckpt_format", "torch_dcp needs --use-torch-fsdp2"
    if f.ckpt_format == "torch_dcp" and f.tensor_model_parallel_size * f.pipeline_model_parallel_size > 1:
        names = "ckpt_format tensor_model_parallel_size pipeline_model_parallel_size"
        yield names, "torch_dcp excludes tensor and pipeline parallelism"
    if f.ckpt_format == "fsdp_dtensor" and not f.use_megatron_fsdp:
        yield "ckpt_format", "fsdp_dtensor needs --use-megatron-fsdp"
    lacks_gloo = False in (f.enable_gloo_process_groups, f.use_gloo_process_groups)
    if f.use_distributed_optimizer and f.ckpt_format == "torch" and lacks_gloo:
        names = "use_distributed_optimizer ckpt_format enable_gloo_process_groups use_gloo_process_groups"
        yield names, "without gloo the distributed optimizer needs --ckpt-format torch_dist"
    saves_in_gloo = f.dist_ckpt_optim_fully_reshardable and f.distrib_optim_fully_reshardable_mem_efficient
    if f.use_distributed_optimizer and saves_in_gloo and lacks_gloo:
        names = "distrib_optim_fully_reshardable_mem_efficient enable_gloo_process_groups use_gloo_process_groups"
        yield names, "exclude each other"


def _learning_rate(f: FlagView) -> Iterator[Fault]:
    if f.decay_steps and f.warmup_steps >= f.decay_steps:
        names = "lr_warmup_fraction lr_warmup_iters lr_warmup_samples lr_decay_iters lr_decay_samples train_iters"
        yield names, "the warm-up of the learning rate must end before its decay"
    if f.lr is not None and f.min_lr > f.lr:
        yield "lr min_lr", "--min-lr is larger than the learning rate"
    wsd_steps = f.lr_wsd_decay_iters if f.train_iters else f.lr_wsd_decay_samples
    if f.lr_decay_style == "WSD" and wsd_steps is None and f.decay_steps:
        yield "lr_decay_style", "WSD needs --lr-wsd-decay-iters (or -samples)"
    ends = (f.start_weight_decay, f.end_weight_decay)
    if f.weight_decay_incr_style == "constant" and ends != (None, None):
        reason = "a constant weight decay has no start and no end; add --weight-decay-incr-style"
        yield "start_weight_decay end_weight_decay", reason
    if f.weight_decay_incr_style != "constant" and None in ends:
        yield "weight_decay_incr_style", "needs --start-weight-decay and --end-weight-decay"


def _files(f: FlagView) -> Iterator[Fault]:
    has_ramp = f.rampup_batch_size is not None and f.release < (0, 18)
    if has_ramp and f.train_iters:
        reason = "a growing batch needs --train-samples instead of --train-iters"
        yield "train_iters rampup_batch_size", reason
    if has_ramp and f.global_batch_size is not None and not f.grows:
        reason = "whole increments, at least one, must lead from the start to the global batch size"
        yield "rampup_batch_size global_batch_size", reason
    if f.save is not None and f.save_retain_interval and f.save_retain_interval % (f.save_interval or 1):
        yield "save_retain_interval save_interval", "not a multiple of --save-interval"
    if f.log_memory_interval is not None and (not f.log_interval or f.log_memory_interval % f.log_interval):
        yield "log_memory_interval log_interval", "not a multiple of --log-interval"
    if f.replication and (f.replication_jump is None or f.non_persistent_ckpt_type != "local"):
        yield "replication", "needs --replication-jump and --non-persistent-ckpt-type local"
    blends = f.train_data_path or f.valid_data_path or f.test_data_path
    if bool(f.mock_data) + bool(f.data_path) + bool(blends) > 1:
        yield "mock_data data_path train_data_path valid_data_path test_data_path", "exclude each other"
    if f.warmup is not None:
        yield "warmup", "no longer valid; use --lr-warmup-fraction"


def _layers(f: FlagView) -> Iterator[Fault]:
    is_torch_norm = f.transformer_impl == "local" and not f.is_hybrid and f.normalization == "RMSNorm"
    if is_torch_norm and (not f.no_persist_layer_norm or f.layernorm_zero_centered_gamma):
        reason = "torch's RMSNorm needs --no-persist-layer-norm and excludes --apply-layernorm-1p"
        yield "transformer_impl normalization", reason
    if f.cross_entropy_loss_fusion and f.cross_entropy_fusion_impl == "te" and f.release >= (0, 19):
        reason = "Transformer Engine's fusion is disabled; use --cross-entropy-fusion-impl native"
        yield "cross_entropy_loss_fusion cross_entropy_fusion_impl", reason
    layers = f.num_layers or f.encoder_num_layers or 0
    if str(f.no_rope_freq).isdigit() and int(f.no_rope_freq) and layers % int(f.no_rope_freq):
        yield "no_rope_freq num_layers", "must divide the layers"
    if f.tp_comm_overlap and f.mtp_num_layers and f.release < (0, 17):
        reason = "before 0.17 multi-token prediction has no buffers for this overlap"
        yield "tp_comm_overlap mtp_num_layers", reason
    pattern = f.hybrid_override_pattern
    if pattern and len(pattern) != (f.num_layers or f.encoder_num_layers) and f.release < (0, 17):
        reason = "before 0.17 needs --num-layers, equal to the number of letters in the pattern"
        yield "hybrid_override_pattern num_layers", reason
    if f.qk_clip and not (0 < f.qk_clip_alpha < 1 and f.qk_clip_threshold > 0):
        reason = "needs an alpha between 0 and 1 and a threshold above 0"
        yield "qk_clip qk_clip_alpha qk_clip_threshold", reason


def _attention(f: FlagView) -> Iterator[Fault]:
    if f.multi_latent_attention and f.apply_rope_fusion and f.is_rope and f.rope_type == "rope":
        reason = "the fused rotation of latent attention needs --rope-type yarn; add --no-rope-fusion"
        yield "multi_latent_attention rope_type", reason
    if f.add_position_embedding is False and not f.is_rope:
        yield "add_position_embedding", "no longer valid; use --position-embedding-type none"
    if f.mtp_num_layers and not f.is_rope and f.position_embedding_type != "none":
        reason = "multi-token prediction needs --position-embedding-type rope or none"
        yield "mtp_num_layers position_embedding_type", reason
    if f.attention_backend == "local" and (f.spec or [""])[0] != "local":
        yield "attention_backend", "local needs --spec local"
    if "a2a+p2p" in (f.cp_comm_type or ()) and f.hierarchical_context_parallel_sizes is None:
        yield "cp_comm_type", "a2a+p2p needs --hierarchical-context-parallel-sizes"


def _activations(f: FlagView) -> Iterator[Fault]:
    clamp = f.activation_func_clamp_value if f.activation == "swiglu" and f.release >= (0, 20) else None
    if f.fuses_activation and f.activation == "squared_relu":
        yield "squared_relu", "has no kernel with its bias; add --no-bias-gelu-fusion"
    if f.fuses_activation and f.glu_linear_offset and f.activation != "quick_geglu":
        yield "glu_linear_offset", "needs --quick-geglu"
    if clamp is not None and not (f.num_experts and 0 < clamp < math.inf):
        yield "activation_func_clamp_value", "needs --num-experts with --swiglu, and a finite value above 0"
    if clamp is not None and (f.glu_linear_offset or f.use_te_activation_func):
        names = "activation_func_clamp_value glu_linear_offset use_te_activation_func"
        yield names, "exclude each other with --swiglu"
    if f.use_te_activation_func and f.fuses_activation:
        yield "use_te_activation_func", "needs --no-bias-swiglu-fusion or --no-bias-gelu-fusion"
    if f.use_te_activation_func and f.activation in ("squared_relu", "quick_geglu"):
        names = "use_te_activation_func squared_relu quick_geglu"
        yield names, "Transformer Engine does not have this activation"


def _saved_activations(f: FlagView) -> Iterator[Fault]:
    offloaded = set(f.offload_modules or ()) if f.fine_grained_activation_offloading else set()
    for names, used, known, newer in (
        ("recompute_modules", f.recomputed, RECOMPUTED, RECOMPUTED_SINCE),
        ("offload_modules", offloaded, OFFLOADED, OFFLOADED_SINCE),
    ):
        all_known = known | {module for module, since in newer.items() if f.release >= since}
        if used - all_known:
            yield names, f"known modules are {', '.join(sorted(all_known))}"
    if f.cpu_offloading_num_layers and not 0 <= f.cpu_offloading_num_layers < (f.num_layers or 1 << 30):
        yield "cpu_offloading_num_layers num_layers", "must be from 0 to one less than the layers"
    within = offloaded & {"expert_fc1", "moe_act"}
    if "fused_group_mlp" in offloaded and (within or not f.use_transformer_engine_op_fuser):
        yield "offload_modules", "fused_group_mlp needs --use-transformer-engine-op-fuser, and no module within it"
    limit = f.fine_grained_offloading_max_inflight_offloads
    if offloaded and f.graphs == ITERATION and f.release >= (0, 18) and (limit is None or limit < 0):
        reason = "with a graph of whole iterations needs --fine-grained-offloading-max-inflight-offloads of at least 0"
        yield "fine_grained_activation_offloading fine_grained_offloading_max_inflight_offloads", reason
    share, delta = f.activation_offload_fraction, f.delta_offload_bytes_across_pp_ranks
    if offloaded and share is not None and not (0 <= share <= 1 and delta >= 0):
        names = "activation_offload_fraction delta_offload_bytes_across_pp_ranks"
        yield names, "needs a fraction from 0 to 1, and bytes from 0 on"
    if "attn_proj" in offloaded and "core_attn" not in offloaded:
        yield "offload_modules", "attn_proj needs core_attn beside it"
    if f.defer_embedding_wgrad_compute and not f.gradient_accumulation_fusion:
        yield "defer_embedding_wgrad_compute gradient_accumulation_fusion", "exclude each other"
    if f.defer_embedding_wgrad_compute and f.wgrad_deferral_limit < 0:
        yield "defer_embedding_wgrad_compute wgrad_deferral_limit", "needs a limit of at least 0"


def _experts(f: FlagView) -> Iterator[Fault]:
    if (f.num_experts or 0) < 0:
        yield "num_experts", "must not be below 0"
    if not f.num_experts:
        return
    if f.moe_router_topk > f.num_experts > 0:
        yield "moe_router_topk num_experts", "the router sends a token to more experts than the model has"
    if f.add_bias_linear and f.moe_shared_expert_intermediate_size:
        yield "moe_shared_expert_intermediate_size", "needs --disable-bias-linear"
    is_grouped = f.moe_grouped_gemm and not f.moe_use_legacy_grouped_gemm and f.transformer_impl == ENGINE
    if f.add_bias_linear and is_grouped and f.bias_dropout_fusion:
        reason = "with biases needs --no-bias-dropout-fusion; or add --disable-bias-linear"
        yield "moe_grouped_gemm", reason
    if f.graphs != "none" and "moe" in f.graphed and (f.capacity is None or not f.moe_pad_expert_input_to_capacity):
        yield SCOPE, "moe needs --moe-expert-capacity-factor and --moe-pad-expert-input-to-capacity"


def _router(f: FlagView) -> Iterator[Fault]:
    num_coefficients = len(f.moe_aux_loss_coeff) if isinstance(f.moe_aux_loss_coeff, list) else 1
    if len(f.balancing) > 1 and len(f.balancing) != num_coefficients:
        yield "moe_router_load_balancing_type moe_aux_loss_coeff", "needs one coefficient for each kind"
    if f.moe_router_enable_expert_bias and f.moe_router_score_function == "softmax":
        yield "moe_router_enable_expert_bias", "needs --moe-router-score-function sigmoid"
    is_single = f.moe_router_topk == 1 and f.moe_router_score_function == "softmax"
    if is_single and not f.moe_router_pre_softmax and f.balancing != ["sinkhorn"]:
        yield "moe_router_topk", "needs --moe-router-pre-softmax"
    chosen, groups = f.moe_router_group_topk or 0, f.moe_router_num_groups or 0
    if chosen and (not groups or not f.num_experts or f.num_experts % groups):
        reason = "needs --moe-router-num-groups, which must divide the experts"
        yield "moe_router_group_topk moe_router_num_groups", reason
    if chosen > groups:
        yield "moe_router_group_topk moe_router_num_groups", "larger than the number of groups"


def _dispatcher(f: FlagView) -> Iterator[Fault]:
    pads_to_capacity = f.moe_pad_expert_input_to_capacity
    is_deepep = f.moe_enable_deepep or f.moe_flex_dispatcher_backend in ("deepep", None)
    if f.dispatcher == "flex" and pads_to_capacity and is_deepep:
        names = "moe_token_dispatcher_type moe_pad_expert_input_to_capacity"
        yield names, "the flex dispatcher does not pad with DeepEP"
    if f.moe_expert_capacity_factor is not None and set(f.balancing) - DROPPING:
        names = "moe_expert_capacity_factor moe_router_load_balancing_type"
        yield names, f"tokens are dropped only with {', '.join(sorted(DROPPING))}"
    if pads_to_capacity and f.capacity is None:
        yield "moe_pad_expert_input_to_capacity", "needs --moe-expert-capacity-factor"
    pads = f.moe_router_padding_for_fp8 or f.moe_router_padding_for_quantization
    names = "moe_router_padding_for_fp8 moe_router_padding_for_quantization"
    if pads and not (f.fp8 or f.fp4):
        yield names, "needs --fp8-format"
    if pads and f.dispatcher == "allgather":
        yield f"{names} moe_token_dispatcher_type", "this dispatcher does not pad; use alltoall or flex"


def _expert_overlap(f: FlagView) -> Iterator[Fault]:
    if not f.overlap_moe_expert_parallel_comm:
        return
    if not (f.bf16 or f.fp16):
        yield "overlap_moe_expert_parallel_comm", "needs --bf16 or --fp16"
    if (f.mtp_num_layers or 0) > 1:
        reason = "allows one depth of multi-token prediction"
        yield "overlap_moe_expert_parallel_comm mtp_num_layers", reason
    # A plan may change the method and the number of layers of full recompute.
    if f.granularity != "full" and (f.recompute_method, f.recompute_num_layers) != (None, None):
        names = "overlap_moe_expert_parallel_comm recompute_method recompute_num_layers"
        yield names, "excludes a method and a number of recompute"


SCOPE = "cuda_graph_scope cuda_graph_modules"


def _graph_flags(f: FlagView) -> Iterator[Fault]:
    if (f.enable_cuda_graph or f.external_cuda_graph) and f.cuda_graph_impl not in (None, "none"):
        names = "enable_cuda_graph external_cuda_graph cuda_graph_impl"
        yield names, "old and new flags of CUDA graphs exclude each other"
    if {"full"} < set(f.cuda_graph_scope or f.cuda_graph_scope_deprecated or []):
        yield "cuda_graph_scope", "full excludes other scopes"
    if f.cuda_graph_scope_deprecated is not None and f.cuda_graph_modules:
        yield SCOPE, "old and new flags of the scope exclude each other"
    # The dynamic loss scale of fp16 replaces Megatron's check of losses and gradients for NaN.
    checks_nan = f.check_for_nan_in_loss_and_grad and not (f.fp16 and not f.loss_scale)
    if checks_nan and f.graphs == ITERATION:
        reason = "a graph of the whole iteration needs --no-check-for-nan-in-loss-and-grad"
        yield "cuda_graph_impl cuda_graph_scope", reason
    if f.graphs == ITERATION and f.graphed and f.release >= (0, 18):
        yield f"cuda_graph_impl {SCOPE}", "a graph of the whole iteration excludes graphs of modules"
    if f.graphs == ENGINE and ITERATION in f.graphed:
        yield "cuda_graph_impl cuda_graph_scope", "the whole iteration needs --cuda-graph-impl local"


def _graph_modules(f: FlagView) -> Iterator[Fault]:
    if f.graphs == "none":
        return
    if {"moe", "moe_router"} <= f.graphed:
        yield SCOPE, "moe and moe_router exclude each other"
    if f.graphs == ENGINE and "moe_preprocess" in f.graphed and "moe_router" not in f.graphed:
        yield SCOPE, "moe_preprocess needs moe_router"
    of_experts = {"moe", "moe_router", "moe_preprocess"} if f.graphs == LOCAL else {"moe", "moe_router"}
    has_experts = (f.num_experts or 1) > 1
    if f.graphed & of_experts and not has_experts:
        yield SCOPE, "moe and moe_router need --num-experts above 1"
    if f.graphs != ITERATION and has_experts and "mlp" in f.graphed and str(f.moe_layer_freq) == "1":
        yield SCOPE, "mlp needs layers without experts"


CHECKS = (
    *(_precision, _sharding, _learning_rate, _files, _layers, _attention, _activations, _saved_activations),
    *(_experts, _router, _dispatcher, _expert_overlap, _graph_flags, _graph_modules),
)


def flag_faults(arguments: Arguments) -> Broken:
    """Yield the rules that a command line breaks under every layout."""
    view = FlagView(arguments)
    listed = (
        (rule.names, rule.reason) for rule in TABLE if rule.since <= view.release <= rule.until and rule.is_broken(view)
    )
    for names, reason in chain(listed, *(check(view) for check in CHECKS)):
        dests = tuple(names.split())
        given = sum(map(arguments.is_given, dests))
        yield BrokenRule(reason, dests, "change one of them" if given > 1 else "change or remove it")
