"""Megatron's own configuration objects for a job and a layout, as its training script makes them from the flags.

Read in Megatron-LM core_v0.16.1: training/arguments.py (core_transformer_config_from_args, validate_args) and
training/training.py (get_model, train).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pipette_launch.facts import Job, Layout
from pipette_patches.abstract import moe
from pipette_patches.workload.config import (
    DTYPES,
    FUSION_FLAGS,
    Convert,
    FlagTable,
    build_config,
    fields_set_by_flags,
    flags,
    fuses_activation,
    model_fields,
    same_name,
    switches_on,
)


def _window(value: str) -> tuple[int, ...]:
    return tuple(int(word) for word in value.replace(",", " ").strip("()").split())


def _one_or_all(convert: Convert) -> Convert:
    """Read one value as itself, several as a list."""

    def read(value: str) -> Any:
        values = [convert(word) for word in value.split()]
        return values[0] if len(values) == 1 else values

    return read


_CONFIG_FLAGS: FlagTable = {
    **FUSION_FLAGS,
    **same_name(
        switches_on,
        """
        --apply-query-key-layer-scaling --attention-output-gate --attention-softmax-in-fp32
        --calculate-per-token-loss --cross-entropy-loss-fusion --defer-embedding-wgrad-compute
        --distribute-saved-activations --fine-grained-activation-offloading --fp32-residual-connection --qk-layernorm
        --moe-apply-probs-on-input --moe-grouped-gemm --moe-pad-expert-input-to-capacity --moe-permute-fusion
        --moe-router-enable-expert-bias --moe-router-padding-for-quantization --moe-router-pre-softmax
        --moe-shared-expert-gate --moe-shared-expert-overlap --overlap-moe-expert-parallel-comm
        """,
    ),
    **same_name(
        str,
        """
        --cross-entropy-fusion-impl --rope-type --softmax-type
        --moe-router-dtype --moe-router-score-function --moe-token-drop-policy
        """,
    ),
    **same_name(
        int,
        "--min-offloaded-tensor-size --wgrad-deferral-limit --moe-router-group-topk --moe-router-num-groups",
    ),
    **same_name(str.split, "--offload-modules"),
    **same_name(
        float,
        """
        --moe-expert-capacity-factor --moe-input-jitter-eps --moe-router-topk-scaling-factor --moe-z-loss-coeff
        """,
    ),
    **same_name(_window, "--window-size"),
    **same_name(lambda value: value.split()[0], "--cp-comm-type"),
    **same_name(_one_or_all(float), "--moe-aux-loss-coeff"),
    **same_name(_one_or_all(str), "--moe-router-load-balancing-type"),
    "--moe-router-padding-for-fp8": ("moe_router_padding_for_quantization", switches_on),
    "--overlap-p2p-communication-warmup-flush": ("overlap_p2p_comm_warmup_flush", switches_on),
}
"""Flags beyond a job's own fields: the field of TransformerConfig that each sets, and how its value is read."""
_OPTIMIZER_FLAGS: FlagTable = {
    **same_name(switches_on, "--use-precision-aware-optimizer --overlap-param-gather-with-optimizer-step"),
    **same_name(
        {**DTYPES, "fp8": torch.uint8}.__getitem__,
        "--main-grads-dtype --main-params-dtype --exp-avg-dtype --exp-avg-sq-dtype",
    ),
}
"""The same for OptimizerConfig."""
_DDP_FLAGS: FlagTable = {
    **same_name(switches_on, "--use-megatron-fsdp --fsdp-double-buffer"),
    **same_name(str, "--data-parallel-sharding-strategy --outer-dp-sharding-strategy"),
    **same_name(int, "--suggested-communication-unit-size"),
}
"""The same for DistributedDataParallelConfig."""
_NOT_MODELLED = (
    "--cpu-offloading-num-layers",
    "--cuda-graph-impl",
    "--enable-cuda-graph",
    "--external-cuda-graph",
    "--fp4",
    "--fp8",
    "--nccl-ub",
    "--optimizer-cpu-offload",
    "--tp-comm-overlap",
)
"""Beginnings of flags that change the bytes, and are left out with a note."""


def left_out(job: Job) -> str:
    """The user's flags that change the bytes and are not taken up, as `--nccl-ub, --fp8 hybrid`."""
    return ", ".join(flag for flag in job.performance_flags if flag.startswith(_NOT_MODELLED))


def notes(job: Job) -> tuple[str, ...]:
    """In what the executed job differs from the user's, one sentence each."""
    without = left_out(job)
    found = (f"executed abstractly without {without}",) if without else ()
    return (*found, *moe.notes(job))


def transformer_config(
    job: Job, layout: Layout, *, chunks: tuple[int, ...], changes: Mapping[str, Any] | None = None
) -> Any:
    """Make the configuration of a model with so many layers in each chunk, in model order, and change fields of it."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    model, interleaved = job.model, layout.vpp > 1
    overlaps_p2p = interleaved and "--no-overlap-p2p-communication" not in flags(job)
    fields = {
        **model_fields(model, sum(chunks)),
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
        **_chunks(chunks, model.mtp_num_layers, layout.chunks_after_mtp),
        "bias_activation_fusion": fuses_activation(job),
        "bias_dropout_fusion": True,
        "masked_softmax_fusion": True,
        "gradient_accumulation_fusion": True,
        "persist_layer_norm": True,
        "apply_rope_fusion": model.transformer_impl == "transformer_engine" and model.position_embedding_type == "rope",
        "attention_softmax_in_fp32": False,
        **_recompute(layout),
        **fields_set_by_flags(job, _CONFIG_FLAGS),
        **moe.fields(job),
        **(changes or {}),
    }
    if model.num_experts:
        # A part of the model is run only where all its layers are alike.
        fields["moe_layer_freq"] = list(model.moe_layer_freq[: sum(chunks)])
    return build_config(MLATransformerConfig if model.latent_attention else TransformerConfig, fields)


def optimizer_config(job: Job, layout: Layout) -> Any:
    """Make the optimizer's configuration."""
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
        **fields_set_by_flags(job, _OPTIMIZER_FLAGS),
    )


def optimizer_instances(job: Job) -> int:
    """Into how many copies the distributed optimizer's shards are made."""
    return int(flags(job).get("--num-distributed-optimizer-instances", 1))


def is_sharded(job: Job) -> bool:
    """Whether Megatron-FSDP shards the job."""
    return "--use-megatron-fsdp" in flags(job)


def ddp_config(job: Job, layout: Layout, *, num_parameters: int) -> Any:
    """Make the configuration of gradient buffers and their buckets."""
    from megatron.core.distributed import DistributedDataParallelConfig

    given = flags(job)
    bucket_size = int(given.get("--ddp-bucket-size", 0)) or max(40_000_000, 1_000_000 * layout.dp * layout.cp)
    if "--ddp-num-buckets" in given:
        bucket_size = num_parameters // int(given["--ddp-num-buckets"])
    fields = {
        # Unless told otherwise gradients are kept in fp32 for bf16, and not for fp16.
        "grad_reduce_in_fp32": not job.grad_reduce_in_bf16
        and (job.model.params_dtype == "bf16" or "--accumulate-allreduce-grads-in-fp32" in given),
        "overlap_grad_reduce": layout.overlap_grad_reduce,
        "overlap_param_gather": layout.overlap_param_gather,
        "use_distributed_optimizer": layout.use_distributed_optimizer,
        "num_distributed_optimizer_instances": optimizer_instances(job),
        "bucket_size": bucket_size if layout.overlap_grad_reduce else None,
        "pad_buckets_for_high_nccl_busbw": "--ddp-pad-buckets-for-high-nccl-busbw" in given,
        "average_in_collective": "--ddp-average-in-collective" in given,
        "reduce_scatter_with_fp32_accumulation": "--ddp-reduce-scatter-with-fp32-accumulation" in given,
        **fields_set_by_flags(job, _DDP_FLAGS),
    }
    return build_config(DistributedDataParallelConfig, fields)


def _chunks(chunks: tuple[int, ...], depths: int, after: int) -> dict[str, Any]:
    """Name the layers of each chunk, where chunks differ in their number of layers.

    Args:
        chunks: layers of each chunk.
        depths: of multi-token prediction.
        after: chunks behind the one with these depths.

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
    if recompute.granularity == "none":
        return {}
    if recompute.granularity == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(recompute.modules) or ["core_attn"]}
    return {
        "recompute_granularity": "full",
        "recompute_method": recompute.method,
        "recompute_num_layers": recompute.num_layers,
    }
