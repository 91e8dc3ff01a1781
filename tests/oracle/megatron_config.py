"""Megatron's configuration objects for a job, as Megatron's training script makes them from the flags.

The functions follow Megatron-LM core_v0.16.1: training/arguments.py
(core_transformer_config_from_args, validate_args) and training/training.py (get_model, train).
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from pipette_launch.facts import Job, Layout, ModelSpec
from pipette_launch.megatron.performance import given_options

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_STATE_DTYPES = {**DTYPES, "fp8": torch.uint8}
_RANK_OPTIONS = """
apply_query_key_layer_scaling apply_rope_fusion attention_softmax_in_fp32 bias_dropout_fusion
calculate_per_token_loss cross_entropy_fusion_impl cross_entropy_loss_fusion defer_embedding_wgrad_compute
distribute_saved_activations fine_grained_activation_offloading fp32_residual_connection gradient_accumulation_fusion
masked_softmax_fusion min_offloaded_tensor_size moe_apply_probs_on_input moe_expert_capacity_factor moe_grouped_gemm
moe_input_jitter_eps moe_pad_expert_input_to_capacity moe_permute_fusion moe_router_dtype moe_router_enable_expert_bias
moe_router_group_topk moe_router_num_groups moe_router_padding_for_quantization moe_router_pre_softmax
moe_router_score_function moe_router_topk_scaling_factor moe_shared_expert_overlap
moe_token_drop_policy moe_z_loss_coeff offload_modules overlap_moe_expert_parallel_comm overlap_p2p_comm_warmup_flush
qk_layernorm rope_type wgrad_deferral_limit
"""
"""Options that set a field of TransformerConfig with the same name, and that have no field in `Job`."""
_OPTIMIZER_SWITCHES = "use_precision_aware_optimizer overlap_param_gather_with_optimizer_step"
_OPTIMIZER_DTYPES = "main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype"
_SHARDING_OPTIONS = """
use_megatron_fsdp fsdp_double_buffer data_parallel_sharding_strategy outer_dp_sharding_strategy
suggested_communication_unit_size
"""


def _given(job: Job, names: str) -> dict[str, Any]:
    """Return the values of the options in `names` that the job's flags set."""
    options = given_options(job)
    return {name: options[name] for name in names.split() if name in options}


def _converted_options(job: Job) -> dict[str, Any]:
    """Return the fields of TransformerConfig that Megatron's script makes from options of another name or form."""
    found: dict[str, Any] = {}
    options = given_options(job)
    for name in ("moe_aux_loss_coeff", "moe_router_load_balancing_type"):
        if name in options:
            found[name] = options[name][0] if len(options[name]) == 1 else options[name]
    if "cp_comm_type" in options:
        found["cp_comm_type"] = options["cp_comm_type"][0]
    if "window_size" in options:
        found["window_size"] = tuple(map(int, re.findall(r"-?\d+", options["window_size"])))
    if "moe_router_padding_for_fp8" in options:
        found["moe_router_padding_for_quantization"] = True
    return found


def _build(kind: Callable[..., Any], fields: Mapping[str, Any]) -> Any:
    """Make a configuration of megatron-core. Fields that the installed release does not have are left out."""
    known = inspect.signature(kind).parameters
    return kind(**{name: value for name, value in fields.items() if name in known})


_SAME_IN_MODEL = """
hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels gated_linear_unit normalization
add_bias_linear add_qkv_bias attention_dropout hidden_dropout
"""
"""Fields of TransformerConfig that have the same name in ModelSpec."""


def _model_fields(model: ModelSpec, num_layers: int) -> dict[str, Any]:
    """Return the fields of TransformerConfig that describe the model without its experts."""
    dtype, latent = DTYPES[model.params_dtype], model.latent_attention
    return {
        **{name: getattr(model, name) for name in _SAME_IN_MODEL.split()},
        "num_layers": num_layers,
        "activation_func": torch.nn.functional.silu if model.gated_linear_unit else torch.nn.functional.gelu,
        "bf16": model.params_dtype == "bf16",
        "fp16": model.params_dtype == "fp16",
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bias_dropout_fusion": True,
        **({"multi_latent_attention": True, **dataclasses.asdict(latent)} if latent else {}),
    }


def _fuses_activation(job: Job) -> bool:
    """Return True if Megatron fuses the activation function with its gate or bias, as it does by default."""
    model = job.model
    fusion = "bias_swiglu_fusion" if model.gated_linear_unit else "bias_gelu_fusion"
    return given_options(job).get(fusion, True) and (model.gated_linear_unit or model.add_bias_linear)


def rank_config(job: Job, layout: Layout, *, chunks: tuple[int, ...], changes: Mapping[str, Any] | None = None) -> Any:
    """Make the TransformerConfig of one rank, for the layers of each chunk. `changes` override the job's flags."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    model, interleaved = job.model, layout.vpp > 1
    overlaps_p2p = interleaved and job.options.overlap_p2p_comm
    fields = {
        **_model_fields(model, sum(chunks)),
        "transformer_impl": model.transformer_impl,
        "perform_initialization": False,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if interleaved else None,
        "microbatch_group_size_per_vp_stage": (layout.microbatch_group_size or layout.pp) if interleaved else None,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "sequence_parallel": layout.sequence_parallel,
        "overlap_p2p_comm": overlaps_p2p,
        "batch_p2p_comm": not overlaps_p2p,
        "deallocate_pipeline_outputs": True,
        **_uneven_chunks(chunks, model.mtp_num_layers, layout.chunks_after_mtp),
        "bias_activation_fusion": _fuses_activation(job),
        "masked_softmax_fusion": True,
        "gradient_accumulation_fusion": True,
        "persist_layer_norm": "no_persist_layer_norm" not in given_options(job),
        "apply_rope_fusion": model.transformer_impl == "transformer_engine" and model.position_embedding_type == "rope",
        "attention_softmax_in_fp32": False,
        **_recompute(layout),
        **_given(job, _RANK_OPTIONS),
        **_converted_options(job),
        **_expert_fields(job),
        # Set Megatron-LM's default scaling factor, because megatron-core before 0.16 has another default.
        **({"mtp_num_layers": model.mtp_num_layers, "mtp_loss_scaling_factor": 0.1} if model.mtp_num_layers else {}),
        **(changes or {}),
    }
    # Releases before 0.16 lack these fields.
    newer = {"attention_output_gate": False, "softmax_type": "vanilla", "moe_shared_expert_gate": False}
    fields |= {name: getattr(model, name) for name, usual in newer.items() if getattr(model, name) != usual}
    if model.attention_windows:
        fields["window_attn_skip_freq"] = model.has_window
    if model.num_experts:
        # A run with fewer layers takes the first entries of `moe_layer_freq`, because the kinds of layers repeat.
        fields["moe_layer_freq"] = list(model.moe_layer_freq[: sum(chunks)])
    return _build(MLATransformerConfig if model.latent_attention else TransformerConfig, fields)


def _expert_fields(job: Job) -> dict[str, Any]:
    model = job.model
    if not model.num_experts:
        return {}
    dispatcher = job.options.moe_token_dispatcher_type
    return {
        "moe_router_topk": model.moe_router_topk,
        "moe_ffn_hidden_size": model.moe_ffn_hidden_size,
        "moe_shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size or None,
        "num_moe_experts": model.num_experts,
        "moe_token_dispatcher_type": dispatcher if dispatcher == "allgather" else "alltoall",
        **({"moe_permute_fusion": True} if dispatcher == "flex" else {}),
    }


def _uneven_chunks(chunks: tuple[int, ...], depths: int, after: int) -> dict[str, Any]:
    """Return a pipeline layout that names the layers of each chunk; empty if all chunks have equally many layers.

    `depths` of multi-token prediction follow the layers of the chunk that has `after` chunks behind it.
    """
    if len(set(chunks)) == 1 and not after:
        return {}
    stages = [["decoder"] * count for count in chunks]
    stages[0].insert(0, "embedding")
    stages[-1 - after] += ["mtp"] * depths
    stages[-1].append("loss")
    return {"pipeline_model_parallel_layout": stages}


def _recompute(layout: Layout) -> dict[str, Any]:
    recompute = layout.recompute
    match recompute.granularity:
        case "none":
            return {}
        case "selective":
            modules = list(recompute.modules) or ["core_attn"]
            return {"recompute_granularity": "selective", "recompute_modules": modules}
        case "full":
            return {
                "recompute_granularity": "full",
                "recompute_method": recompute.method,
                "recompute_num_layers": recompute.num_layers,
            }


def optimizer_config(job: Job, layout: Layout) -> Any:
    """Make the OptimizerConfig of one rank."""
    from megatron.core.optimizer import OptimizerConfig

    dtype = job.model.params_dtype
    return OptimizerConfig(
        optimizer=job.optimizer,
        lr=1e-4,
        min_lr=1e-5,
        bf16=dtype == "bf16",
        fp16=dtype == "fp16",
        params_dtype=DTYPES[dtype],
        use_distributed_optimizer=layout.use_distributed_optimizer,
        overlap_param_gather=layout.overlap_param_gather,
        clip_grad=1.0,
        **_given(job, _OPTIMIZER_SWITCHES),
        **{name: _STATE_DTYPES[value] for name, value in _given(job, _OPTIMIZER_DTYPES).items()},
    )


def ddp_config(job: Job, layout: Layout, *, num_parameters: int) -> Any:
    """Make the DistributedDataParallelConfig of one rank, which sets the gradient buffers and their buckets."""
    from megatron.core.distributed import DistributedDataParallelConfig

    given, options = given_options(job), job.options
    bucket_size = given.get("ddp_bucket_size") or max(40_000_000, 1_000_000 * layout.dp * layout.cp)
    if "ddp_num_buckets" in given:
        bucket_size = num_parameters // given["ddp_num_buckets"]
    fields = {
        # By default bf16 jobs keep gradients in fp32, and fp16 jobs do not.
        "grad_reduce_in_fp32": not job.grad_reduce_in_bf16
        and (job.model.params_dtype == "bf16" or options.accumulate_allreduce_grads_in_fp32),
        "overlap_grad_reduce": layout.overlap_grad_reduce,
        "overlap_param_gather": layout.overlap_param_gather,
        "use_distributed_optimizer": layout.use_distributed_optimizer,
        "num_distributed_optimizer_instances": options.num_distributed_optimizer_instances,
        "bucket_size": bucket_size if layout.overlap_grad_reduce else None,
        "pad_buckets_for_high_nccl_busbw": options.ddp_pad_buckets_for_high_nccl_busbw,
        "average_in_collective": "ddp_average_in_collective" in given,
        "reduce_scatter_with_fp32_accumulation": "ddp_reduce_scatter_with_fp32_accumulation" in given,
        **_given(job, _SHARDING_OPTIONS),
    }
    return _build(DistributedDataParallelConfig, fields)
