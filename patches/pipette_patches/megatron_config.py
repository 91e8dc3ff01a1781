"""The TransformerConfig of a workload: Megatron's own settings for the user's model, as its flags have them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from pipette_launch.errors import PipetteError
from pipette_launch.facts import ComputeCase, Job, Layout, ModelSpec
from pipette_launch.facts.job import NOT_TIMED, RING


class NotModelledError(PipetteError):
    """The job asks for something that abstract execution does not know how to count."""


PartName = Literal["layer", "moe_layer", "embedding", "head", "core_attention", "prediction"]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
Convert = Callable[[str], Any]
FlagTable = dict[str, tuple[str, Convert]]
"""By flag: the field of a configuration that it sets, and how its value is read."""


def same_name(convert: Convert, flags_read_so: str) -> FlagTable:
    """Read each flag by `convert` into the field of the same name: `--qk-layernorm` into `qk_layernorm`."""
    return {flag: (flag[2:].replace("-", "_"), convert) for flag in flags_read_so.split()}


def switches_on(_value: str) -> bool:
    """Read a flag that has no value."""
    return True


def switches_off(_value: str) -> bool:
    """Read a flag that has no value and begins with `--no-`."""
    return False


FUSION_FLAGS: FlagTable = {
    "--no-bias-dropout-fusion": ("bias_dropout_fusion", switches_off),
    "--no-gradient-accumulation-fusion": ("gradient_accumulation_fusion", switches_off),
    "--no-masked-softmax-fusion": ("masked_softmax_fusion", switches_off),
    "--no-persist-layer-norm": ("persist_layer_norm", switches_off),
    "--no-rope-fusion": ("apply_rope_fusion", switches_off),
}
_MEASURED_FLAGS: FlagTable = {
    **FUSION_FLAGS,
    **same_name(
        switches_on,
        """
        --cross-entropy-loss-fusion --deterministic-mode --fp32-residual-connection
        --moe-permute-fusion --moe-router-fusion --qk-layernorm
        """,
    ),
    **same_name(str, "--cross-entropy-fusion-impl --rope-type"),
}


def flags(job: Job) -> dict[str, str]:
    """The job's other flags by name, as `{"--window-size": "128 0"}`."""
    return dict(flag.partition(" ")[::2] for flag in job.performance_flags)


def fields_set_by_flags(job: Job, table: FlagTable) -> dict[str, Any]:
    """The fields that the job's other flags set, of those in a table.

    Raises:
        NotModelledError: a value cannot be read.

    """
    found = {}
    for flag, value in flags(job).items():
        if flag in table:
            name, convert = table[flag]
            try:
                found[name] = convert(value)
            except (KeyError, ValueError, IndexError) as error:
                raise NotModelledError(f"{flag} {value}: this value is not understood") from error
    return found


def build_config(kind: Callable[..., Any], fields: Mapping[str, Any]) -> Any:
    """Make a configuration of megatron-core from those fields that its release knows."""
    known = inspect.signature(kind).parameters
    return kind(**{name: value for name, value in fields.items() if name in known})


def layers_config(
    job: Job, case: ComputeCase, kinds: tuple[PartName, ...], *, device_kind: str, uses_te: bool
) -> tuple[Any, tuple[str, ...]]:
    """Make the configuration of a model with one layer of each kind, and say in what it differs from the job's."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    model = job.model
    on_cuda = device_kind == "cuda"
    # torch's norms, which stand where neither Transformer Engine nor Apex is, refuse sequence parallelism.
    splits_sequence = on_cuda and (uses_te or bool(getattr(gpt_layer_specs, "HAVE_APEX", False)))
    experts, notes = _expert_fields(job, kinds, uses_te=uses_te)
    unheeded = ", ".join(flag for flag in job.performance_flags if flag.startswith(NOT_TIMED))
    if unheeded:
        notes = (*notes, f"compute was measured without {unheeded}")
    exchange = flags(job).get("--cp-comm-type", RING)
    if case.cp > 1 and exchange != RING:
        notes = (*notes, f"compute with cp{case.cp} was timed as a ring, not with --cp-comm-type {exchange}")
    fields: dict[str, Any] = {
        **model_fields(model, len(kinds)),
        "tensor_model_parallel_size": case.tp,
        "context_parallel_size": case.cp,
        # Nobody trains with tensor parallelism on GPUs without it, and experts demand it everywhere.
        "sequence_parallel": case.tp > 1 and (splits_sequence or job.own.sequence_parallel or "moe_layer" in kinds),
        "use_cpu_initialization": not on_cuda,
        # Megatron's own defaults. On CPUs, too: where nothing compiles them they are slower than the unfused ones, by
        # a third.
        "bias_activation_fusion": fuses_activation(job),
        "bias_dropout_fusion": True,
        "masked_softmax_fusion": on_cuda,
        "apply_rope_fusion": uses_te,
        "gradient_accumulation_fusion": uses_te,
        "persist_layer_norm": on_cuda,
        **({"attention_backend": AttnBackend[model.attention_backend]} if on_cuda else {}),
        **experts,
        **latent_fields(model),
        # All depths of multi-token prediction are alike.
        **({"mtp_num_layers": 1} if model.mtp_num_layers else {}),
    }
    kind = MLATransformerConfig if model.latent_attention else TransformerConfig
    # A flag switches a fusion off, and never on where it cannot be.
    return build_config(kind, fields | fields_set_by_flags(job, _MEASURED_FLAGS)), notes


def model_fields(model: ModelSpec, num_layers: int) -> dict[str, Any]:
    """Fields that say what the model is, whatever it runs on."""
    dtype = DTYPES[model.params_dtype]
    return {
        "num_layers": num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_query_groups,
        "kv_channels": model.kv_channels,
        "gated_linear_unit": model.gated_linear_unit,
        "activation_func": torch.nn.functional.silu if model.gated_linear_unit else torch.nn.functional.gelu,
        "normalization": model.normalization,
        "add_bias_linear": model.add_bias_linear,
        "add_qkv_bias": model.add_qkv_bias,
        "attention_dropout": model.attention_dropout,
        "hidden_dropout": model.hidden_dropout,
        "bf16": model.params_dtype == "bf16",
        "fp16": model.params_dtype == "fp16",
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
    }


def fuses_activation(job: Job) -> bool:
    """Whether Megatron fuses the activation function: by default, where it has a gate or a bias to fuse."""
    model = job.model
    unfused = "--no-bias-swiglu-fusion" if model.gated_linear_unit else "--no-bias-gelu-fusion"
    return unfused not in flags(job) and (model.gated_linear_unit or model.add_bias_linear)


def latent_fields(model: ModelSpec) -> dict[str, Any]:
    """Fields of latent attention; none where the model has ordinary attention."""
    latent = model.latent_attention
    return {"multi_latent_attention": True, **dataclasses.asdict(latent)} if latent else {}


def expert_fields(model: ModelSpec) -> dict[str, Any]:
    """Fields that say what the experts are, however many of them are built."""
    return {
        "moe_router_topk": model.moe_router_topk,
        "moe_ffn_hidden_size": model.moe_ffn_hidden_size,
        "moe_shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size or None,
    }


def _expert_fields(job: Job, kinds: tuple[PartName, ...], *, uses_te: bool) -> tuple[dict[str, Any], tuple[str, ...]]:
    """One rank's share of the experts, fed by as many tokens as it would get from its expert-parallel peers."""
    model = job.model
    if not model.num_experts:
        return {}, ()
    local = max(model.num_experts // job.own.ep, model.moe_router_topk)
    share = f"MoE layers were measured with {local} of {model.num_experts} experts, one rank's share at ep{job.own.ep}"
    notes = () if local == model.num_experts else (share,)
    return {
        "num_moe_experts": local,
        "moe_layer_freq": [int(kind == "moe_layer") for kind in kinds],
        **expert_fields(model),
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": uses_te and "--moe-grouped-gemm" in job.performance_flags,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": 1,
    }, notes


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
    return (*found, *_expert_notes(job))


def rank_config(job: Job, layout: Layout, *, chunks: tuple[int, ...], changes: Mapping[str, Any] | None = None) -> Any:
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
        **_expert_and_depth_fields(job),
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


_EXPERTS_NOT_MODELLED = ("--moe-router-fusion", "--moe-use-legacy-grouped-gemm")
"""Flags that change a few bytes, and are left out with a note."""


def _expert_and_depth_fields(job: Job) -> dict[str, Any]:
    """Fields of the configuration for experts, latent attention and token prediction, beside those that flags set."""
    model = job.model
    found: dict[str, Any] = {}
    if model.num_experts:
        dispatcher = flags(job).get("--moe-token-dispatcher-type", "allgather")
        found |= {
            **expert_fields(model),
            "num_moe_experts": model.num_experts,
            "moe_token_dispatcher_type": dispatcher if dispatcher == "allgather" else "alltoall",
        }
        if dispatcher == "flex":
            found["moe_permute_fusion"] = True
    found |= latent_fields(model)
    if model.mtp_num_layers:
        # Megatron-LM's default, which megatron-core itself has from 0.16 on.
        found |= {"mtp_num_layers": model.mtp_num_layers, "mtp_loss_scaling_factor": 0.1}
    return found


def _expert_notes(job: Job) -> tuple[str, ...]:
    """In what the executed experts differ from the user's, one sentence each."""
    if not job.model.num_experts:
        return ()
    found = ["routing was taken as balanced: every expert gets as many tokens"]
    words = flags(job)
    left_out = [flag for flag in _EXPERTS_NOT_MODELLED if flag in words]
    if left_out:
        found.append(f"experts were executed without {', '.join(left_out)}")
    if words.get("--moe-token-dispatcher-type") == "flex":
        found.append("the flex dispatcher was executed as alltoall with fused permutation")
    return tuple(found)
