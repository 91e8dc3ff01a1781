"""The TransformerConfig of a workload: Megatron's own settings for the user's model, as its flags have them."""

from __future__ import annotations

import inspect
from typing import Any, Literal

import torch

from pipette_launch.facts import ComputeCase, Job, ModelSpec

PartName = Literal["layer", "moe_layer", "embedding", "head", "core_attention"]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SWITCHES = {
    "--cross-entropy-loss-fusion": "cross_entropy_loss_fusion",
    "--deterministic-mode": "deterministic_mode",
    "--fp32-residual-connection": "fp32_residual_connection",
    "--moe-permute-fusion": "moe_permute_fusion",
    "--moe-router-fusion": "moe_router_fusion",
    "--qk-layernorm": "qk_layernorm",
}
"""Flags that switch a field of the same meaning on."""
VALUES = {"--cross-entropy-fusion-impl": "cross_entropy_fusion_impl"}
"""Flags whose value a field takes."""
UNHEEDED = ("--fp8", "--fp4", "--cuda-graph", "--enable-cuda-graph", "--external-cuda-graph", "--window-size")
"""Beginnings of flags that change how long a layer takes, and are not measured."""


def flags(job: Job) -> dict[str, str]:
    """The job's other flags by name, as `{"--window-size": "128 0"}`."""
    return dict(flag.partition(" ")[::2] for flag in job.performance_flags)


def layer_kinds(model: ModelSpec) -> tuple[PartName, ...]:
    """The kinds of layers that the model has; one of each is built."""
    dense: tuple[PartName, ...] = ("layer",) if 0 in model.moe_layer_freq or not model.num_experts else ()
    moe: tuple[PartName, ...] = ("moe_layer",) if 1 in model.moe_layer_freq else ()
    return dense + moe


def transformer_config(
    job: Job, case: ComputeCase, kinds: tuple[PartName, ...], *, device_kind: str, uses_te: bool
) -> tuple[Any, tuple[str, ...]]:
    """Make the configuration of a model with one layer of each kind, and say in what it differs from the job's."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    model = job.model
    on_cuda = device_kind == "cuda"
    # torch's norms, which stand where neither Transformer Engine nor Apex is, refuse sequence parallelism.
    splits_sequence = on_cuda and (uses_te or bool(getattr(gpt_layer_specs, "HAVE_APEX", False)))
    experts, notes = _expert_fields(job, kinds, uses_te=uses_te)
    switched, unheeded = _flagged(job)
    fields: dict[str, Any] = {
        **model_fields(model, len(kinds)),
        "tensor_model_parallel_size": case.tp,
        "context_parallel_size": case.cp,
        # Nobody trains with tensor parallelism on GPUs without it, and experts demand it everywhere.
        "sequence_parallel": case.tp > 1 and (splits_sequence or job.own.sequence_parallel or "moe_layer" in kinds),
        "use_cpu_initialization": not on_cuda,
        **_fusions(job, on_cuda=on_cuda, uses_te=uses_te),
        **({"attention_backend": AttnBackend[model.attention_backend]} if on_cuda else {}),
        **experts,
        **switched,
    }
    known = inspect.signature(TransformerConfig).parameters
    return TransformerConfig(**{name: value for name, value in fields.items() if name in known}), notes + unheeded


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


def expert_fields(model: ModelSpec) -> dict[str, Any]:
    """Fields that say what the experts are, however many of them are built."""
    return {
        "moe_router_topk": model.moe_router_topk,
        "moe_ffn_hidden_size": model.moe_ffn_hidden_size,
        "moe_shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size or None,
    }


def _flagged(job: Job) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Fields that the user's performance flags set, and a note on the flags that are not measured."""
    words = flags(job)
    switched: dict[str, Any] = {field: True for flag, field in SWITCHES.items() if flag in words}
    switched |= {field: words[flag] for flag, field in VALUES.items() if flag in words}
    unheeded = [flag for flag in job.performance_flags if flag.startswith(UNHEEDED)]
    return switched, (f"compute was measured without {', '.join(unheeded)}",) if unheeded else ()


def _fusions(job: Job, *, on_cuda: bool, uses_te: bool) -> dict[str, bool]:
    """Megatron's own defaults, unless the user's flags say no."""
    given = flags(job)
    return {
        # On CPUs, too: where nothing compiles them they are slower than the unfused ones, by a third.
        "bias_activation_fusion": fuses_activation(job),
        "bias_dropout_fusion": "--no-bias-dropout-fusion" not in given,
        "masked_softmax_fusion": on_cuda and "--no-masked-softmax-fusion" not in given,
        "apply_rope_fusion": uses_te and "--no-rope-fusion" not in given,
        "gradient_accumulation_fusion": uses_te and "--no-gradient-accumulation-fusion" not in given,
        "persist_layer_norm": on_cuda and "--no-persist-layer-norm" not in given,
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
