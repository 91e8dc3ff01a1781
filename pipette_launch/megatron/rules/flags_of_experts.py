"""Rules on flags of experts and of CUDA graphs: `validate_args` and TransformerConfig."""

from __future__ import annotations

from pipette_launch.megatron.rules.flag_view import FlagRule

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
