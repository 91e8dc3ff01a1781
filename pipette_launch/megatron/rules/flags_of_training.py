"""Rules on flags of precision, optimizer, steps and files: `validate_args` and the configurations behind it."""

from __future__ import annotations

from pipette_launch.megatron.rules.flag_view import FlagRule

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
