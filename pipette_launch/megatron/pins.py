"""What a plan must leave alone for a job to learn the same, and jobs that are not planned, each with the reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from pipette_launch.errors import MegatronError, OptionError
from pipette_launch.facts import Layout
from pipette_launch.megatron.chunks import HYBRID_SPECS, hybrid_pattern
from pipette_launch.megatron.flags import Arguments, release_of
from pipette_launch.text import did_you_mean

LAYOUT_FIELDS = tuple(field.name for field in fields(Layout))
SHORT_NAMES = {
    "mbs": ("micro_batch_size",),
    "micro_batch": ("micro_batch_size",),
    "sp": ("sequence_parallel",),
    "seq_par": ("sequence_parallel",),
    "dist_opt": ("use_distributed_optimizer",),
    "overlap": ("overlap_grad_reduce", "overlap_param_gather"),
    "layers": ("layers_per_chunk", "chunks_after_mtp"),
    "order": ("use_tp_pp_dp_mapping",),
    "all": LAYOUT_FIELDS,
}
"""What `--pipette-fix` takes besides the names of the layout's fields."""
ELEMENTWISE = ("adam", "sgd", "lion")
"""Optimizers that treat every weight alone, so that no cut of a matrix changes what they do."""
OPTIMIZER_FIELDS = ("overlap_grad_reduce", "overlap_param_gather", "use_distributed_optimizer")
HELD_BY: tuple[tuple[tuple[str, ...], tuple[str, ...], str], ...] = (
    (
        (
            "use_precision_aware_optimizer",
            "fp8_param_gather",
            "optimizer_cpu_offload",
            "overlap_param_gather_with_optimizer_step",
        ),
        OPTIMIZER_FIELDS,
        ": the distributed optimizer stays",
    ),
    (
        (
            "distribute_saved_activations",
            "enable_cuda_graph",
            "fine_grained_activation_offloading",
            "moe_layer_recompute",
        ),
        ("recompute",),
        ": recompute stays",
    ),
    (("use_megatron_fsdp", "use_torch_fsdp2"), OPTIMIZER_FIELDS, " says what is sharded: the optimizer's flags stay"),
    (("data_parallel_random_init",), ("dp",), " seeds each data-parallel rank apart: dp stays"),
)
"""Destinations of flags that hold layout fields wherever they are on, and the reason behind the flag."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pin:
    """Layout fields that no plan may change, and why."""

    fields: tuple[str, ...]
    note: str


def fixed_fields(names: Sequence[str]) -> tuple[str, ...]:
    """Layout fields of what `--pipette-fix` names, sorted; raises UsageError for a name that is none."""
    found: set[str] = set()
    known = SHORT_NAMES | {field: (field,) for field in LAYOUT_FIELDS}
    for name in names:
        plain = name.strip().replace("-", "_")
        if plain not in known:
            hint = did_you_mean(plain, known, otherwise=f"known are {', '.join(sorted(known))}")
            raise OptionError("fix", f"{name}: no such part of a layout; {hint}")
        found.update(known[plain])
    return tuple(sorted(found))


REFUSED = {
    "yaml_cfg": "the file outranks the command line, which is all that a plan rewrites; give its values as flags",
    "experimental_attention_variant": "this attention is not modelled",
    "linear_attention_freq": "linear attention is not modelled",
    "heterogeneous_layers_config_path": "layers of different shapes are not modelled",
    "heterogeneous_layers_config_encoded_json": "layers of different shapes are not modelled",
    "moe_latent_size": "latent experts are not modelled",
    "enable_mhc_connections": "hyper-connections are not modelled",
    "use_legacy_models": "only Megatron-Core's models are modelled",
    "decoder_num_layers": "encoder-decoder models are not modelled",
    "decoder_seq_length": "encoder-decoder models are not modelled",
    "vision_pretraining": "vision models are not modelled",
    "img_h": "vision models are not modelled",
    "retro_project_dir": "retrieval models are not modelled",
    "ict_head_size": "biencoders are not modelled",
    "perform_rl_step": "reinforcement learning steps are not modelled",
    "skip_train": "nothing is trained, so there is nothing to plan",
    "fake_process_group": "one process plays all ranks, so there is nothing to place",
    "hybrid_context_parallel": "dynamic context parallelism is not modelled",
    "tensor_parallel_num_weight_shards": "weight shards beyond tensor parallelism are not modelled",
    "expert_tensor_parallel_num_weight_shards": "weight shards beyond tensor parallelism are not modelled",
    "batch_size": "no longer valid in Megatron; use --micro-batch-size",
    "checkpoint_activations": "no longer valid in Megatron; use --recompute-activations",
    "model_parallel_size": "no longer valid in Megatron; use --tensor-model-parallel-size",
    "megatron_fsdp_version=2": "this version of Megatron-FSDP is not modelled",
    "transformer_impl=inference_optimized": "layers for inference alone are not modelled",
    "position_embedding_type=relative": "these position embeddings are not modelled",
    "position_embedding_type=mrope": "these position embeddings are not modelled",
}
"""Destinations (or a destination's value) that, when given and not off, mean a job of which nothing is known."""
UNPLANNED = {
    "local_rank": "a rank's device is the launcher's to choose; remove it, LOCAL_RANK in the environment says it",
    "step_batch_size_schedule": "a global batch size that changes by a schedule cannot be pinned",
    "inprocess_restart": "a restart inside the process re-assigns ranks and would lose the placement",
    "non_persistent_ckpt_type=local": "local checkpoints need the same rank on the same host at every start",
    "dataloader_type=external": "what an external data loader gives to each rank is unknown",
}
"""The same of jobs that are not planned, though what they hold and cost can be told."""
_SHARDED = "the warm-up runs nothing that torch shards; `pipette predict` and `pipette plan --gpu` read it"
_HYBRID = "the warm-up cannot time layers of hybrid models; `pipette predict` and `pipette plan --gpu` read it"
UNTIMED = {
    "use_torch_fsdp2": _SHARDED,
    "hybrid_layer_pattern": _HYBRID,
    "hybrid_override_pattern": _HYBRID,
    "is_hybrid_model": _HYBRID,
}
"""The same of jobs that no warm-up can time; on imagined machines they can be planned."""


def check_planned(arguments: Arguments, *, for_prediction: bool = False, without_probes: bool = False) -> None:
    """Raise MegatronError for a job that is not planned (or not even predicted), with the flag and the reason.

    The launcher then trains with the user's own configuration, as torchrun would, and shows the reason.

    Args:
        arguments: the job's flags.
        for_prediction: refuse only what nothing can be said of.
        without_probes: the plan rests on no warm-up.

    """
    refused = dict(REFUSED)
    if not for_prediction:
        refused |= UNPLANNED
        refused |= {} if without_probes else UNTIMED
    for key, reason in refused.items():
        dest, _, refused_value = key.partition("=")
        value = arguments.get(dest)
        # A local rank of 0 is one, too.
        is_on = arguments.is_given(dest) and bool(value or dest == "local_rank")
        if str(value) == refused_value if refused_value else is_on:
            raise MegatronError(f"{arguments.shown(dest)}: {reason}")
    if _is_offloading_uneven(arguments):
        raise MegatronError(
            f"{arguments.shown('offload_modules')}: with unfused attention and layers with and without experts, "
            f"tensors of two layers are back at once, which is not modelled: peaks came out up to 10 % too low"
        )
    if release_of(arguments.version) >= (0, 19) and "fused_group_mlp" in _as_list(arguments.get("offload_modules")):
        raise MegatronError(f"{arguments.shown('offload_modules')}: what a fused grouped MLP offloads is not modelled")
    if arguments.get("spec") not in (None, [], ["local"]) and arguments.get("spec")[-1] not in HYBRID_SPECS:
        raise MegatronError(f"{arguments.shown('spec')}: layers of a module of your own are not modelled")
    if hybrid_pattern(arguments):
        if not for_prediction and not without_probes:
            raise MegatronError(f"{arguments.shown('spec')}: {_HYBRID}")
        _check_hybrid(arguments)


def _check_hybrid(arguments: Arguments) -> None:
    """Raise MegatronError for what other models may have, and hybrid ones may not."""
    if arguments.get("fine_grained_activation_offloading"):
        shown = arguments.shown("fine_grained_activation_offloading")
        raise MegatronError(f"{shown}: which tensors of hybrid models leave the device is not modelled")
    if arguments.get("use_torch_fsdp2"):
        raise MegatronError(f"{arguments.shown('use_torch_fsdp2')}: how it wraps hybrid models is not modelled")
    if arguments.get("use_megatron_fsdp") and release_of(arguments.version) < (0, 19):
        shown = arguments.shown("use_megatron_fsdp")
        raise MegatronError(f"{shown}: before Megatron 0.19 Mamba layers are no units of it, which is not modelled")


def _is_offloading_uneven(arguments: Arguments) -> bool:
    """Whether dense layers offload fewer modules than others, while each core saves all its scores."""
    modules = set(_as_list(arguments.get("offload_modules")))
    uneven = "core_attn" in modules and bool(modules & {"mlp_norm", "expert_fc1", "moe_act"})
    mixes = str(arguments.get("moe_layer_freq")) not in ("1", "None")
    is_on = bool(arguments.get("fine_grained_activation_offloading"))
    return is_on and uneven and mixes and str(arguments.get("attention_backend")) == "unfused"


def pins(arguments: Arguments, own: Layout, device_kind: str) -> Iterator[Pin]:
    """What must stay as the user has it for the job to learn the same, or to run at all."""
    yield from _data(arguments, own)
    if arguments.get("num_experts"):
        yield from _experts(arguments)
    kind = arguments.get("optimizer")
    if kind not in ELEMENTWISE:
        # Muon and its kin orthogonalise whole matrices, or the shards that tensor parallelism leaves of them.
        yield Pin(
            fields=(*OPTIMIZER_FIELDS, "etp", "tp"),
            note=f"{arguments.shown('optimizer')} works on matrices: tp, etp and the distributed optimizer stay",
        )
    elif kind != "adam":
        yield Pin(fields=OPTIMIZER_FIELDS, note=f"{arguments.shown('optimizer')}: the distributed optimizer stays")
    if device_kind == "cpu":
        yield Pin(fields=("cp",), note="context parallelism needs Transformer Engine, and so a GPU: cp stays 1 on CPU")
    yield from _excluded(arguments)
    for dests, held, reason in HELD_BY:
        for dest in dests:
            if arguments.get(dest):
                yield Pin(fields=held, note=f"{arguments.shown(dest)}{reason}")


def _excluded(arguments: Arguments) -> Iterator[Pin]:
    """Hold what flags without a field of their own would exclude (tables of `rules`)."""
    shown = arguments.shown("ckpt_format")
    if arguments.get("ckpt_format") == "torch_dcp":
        yield Pin(fields=("pp", "tp"), note=f"{shown} goes with neither tensor nor pipeline parallelism: both stay")
    has_gloo = False not in (arguments.get("enable_gloo_process_groups"), arguments.get("use_gloo_process_groups"))
    if arguments.get("ckpt_format") == "torch" and not has_gloo:
        note = f"{shown} without gloo: the distributed optimizer stays"
        yield Pin(fields=("use_distributed_optimizer",), note=note)
    if arguments.get("batch_invariant_mode"):
        note = f"{arguments.shown('batch_invariant_mode')} excludes context parallelism from 0.19 on: cp stays"
        yield Pin(fields=("cp",), note=note)


def _data(arguments: Arguments, own: Layout) -> Iterator[Pin]:
    """What depends on the order of the samples, and on how the loss averages them."""
    if arguments.get("dataloader_type") == "cyclic":
        yield Pin(
            fields=("dp", "micro_batch_size"),
            note=f"{arguments.shown('dataloader_type')} shuffles within each replica: dp and micro-batch stay",
        )
    if arguments.get("rampup_batch_size") and release_of(arguments.version) < (0, 18):
        # The first, smallest batches must still divide, and fill the pipeline when it is interleaved.
        held = ("dp", "micro_batch_size", "vpp") if own.vpp == 1 else ("dp", "micro_batch_size", "pp", "vpp")
        yield Pin(
            fields=held,
            note=f"{arguments.shown('rampup_batch_size')} must divide at every step: {', '.join(held)} stay",
        )
    # The loss is a mean of micro-batch means: with unequally many tokens in each, their size is part of it.
    uneven = next((dest for dest in ("eod_mask_loss", "sft", "fim_data") if arguments.get(dest)), None)
    if uneven and not arguments.get("calculate_per_token_loss"):
        yield Pin(
            fields=("micro_batch_size",),
            note=f"{arguments.shown(uneven)} masks tokens, and the loss averages micro-batches: their size stays "
            f"(--calculate-per-token-loss would free it)",
        )


def _experts(arguments: Arguments) -> Iterator[Pin]:
    balancing = _as_list(arguments.get("moe_router_load_balancing_type"))
    weights = _as_list(arguments.get("moe_aux_loss_coeff"))
    shown = arguments.shown("moe_router_load_balancing_type")
    if "sinkhorn" in balancing or ("aux_loss" in balancing and any(weights)):
        yield Pin(fields=("micro_batch_size",), note=f"{shown} balances within a micro-batch: its size stays")
    if {"global_aux_loss", "quantile_balancing"} & set(balancing):
        yield Pin(fields=("dp", "micro_batch_size"), note=f"{shown} counts over dp and micro-batches: both stay")
    if arguments.get("moe_expert_capacity_factor") is not None:
        yield Pin(
            fields=("cp", "ep", "etp", "micro_batch_size", "tp"),
            note=f"{arguments.shown('moe_expert_capacity_factor')} drops tokens by each rank's own count: "
            f"cp, ep, etp, micro-batch and tp stay",
        )


def _as_list(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]
