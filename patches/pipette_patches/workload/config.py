"""The TransformerConfig of a workload: Megatron's own settings for the user's model, as its flags have them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from pipette_launch.facts import ComputeCase, Job, ModelSpec
from pipette_launch.facts.job import NOT_TIMED, RING
from pipette_patches.errors import NotModelledError

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


def transformer_config(
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
