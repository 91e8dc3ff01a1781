"""What a plan must leave alone for a job to learn the same, and jobs that are not planned, each with the reason."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

from pipette_launch.errors import MegatronError, UsageError
from pipette_launch.facts import Layout
from pipette_launch.megatron.flags import Arguments

LAYOUT_FIELDS = tuple(field.name for field in fields(Layout))
SHORT_NAMES = {
    "mbs": ("micro_batch_size",),
    "micro_batch": ("micro_batch_size",),
    "sp": ("sequence_parallel",),
    "seq_par": ("sequence_parallel",),
    "dist_opt": ("use_distributed_optimizer",),
    "overlap": ("overlap_grad_reduce", "overlap_param_gather"),
    "layers": ("layers_per_chunk",),
    "order": ("use_tp_pp_dp_mapping",),
    "all": LAYOUT_FIELDS,
}
"""What `--pipette-fix` takes besides the names of the layout's fields."""
ELEMENTWISE = ("adam", "sgd", "lion")
"""Optimizers that treat every weight alone, so that no cut of a matrix changes what they do."""
OPTIMIZER_FIELDS = ("overlap_grad_reduce", "overlap_param_gather", "use_distributed_optimizer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pin:
    """Layout fields that no plan may change, and why."""

    fields: tuple[str, ...]
    note: str


def fixed_fields(names: Sequence[str]) -> tuple[str, ...]:
    """Layout fields of what `--pipette-fix` names, sorted; raises UsageError for a name that is none."""
    found: set[str] = set()
    for name in names:
        plain = name.strip().replace("-", "_")
        if plain in LAYOUT_FIELDS:
            found.add(plain)
        elif plain in SHORT_NAMES:
            found.update(SHORT_NAMES[plain])
        else:
            known = (*SHORT_NAMES, *LAYOUT_FIELDS)
            near = difflib.get_close_matches(plain, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"
            raise UsageError(f"--pipette-fix {name}: no such part of a layout; {hint}")
    return tuple(sorted(found))


REFUSED: tuple[tuple[str, str], ...] = (
    ("local_rank", "a rank's device is the launcher's to choose; remove it, LOCAL_RANK in the environment says it"),
    ("yaml_cfg", "the file outranks the command line, which is all that a plan rewrites; give its values as flags"),
    (
        "multi_latent_attention",
        "the probes cannot time multi-latent attention; `pipette predict` and `pipette plan --gpu` read it",
    ),
    (
        "mtp_num_layers",
        "the probes cannot time multi-token prediction; `pipette predict` and `pipette plan --gpu` read it",
    ),
    ("hybrid_layer_pattern", "hybrid models are not modelled"),
    ("hybrid_override_pattern", "hybrid models are not modelled"),
    ("is_hybrid_model", "hybrid models are not modelled"),
    ("experimental_attention_variant", "this attention is not modelled"),
    ("linear_attention_freq", "linear attention is not modelled"),
    ("heterogeneous_layers_config_path", "layers of different shapes are not modelled"),
    ("heterogeneous_layers_config_encoded_json", "layers of different shapes are not modelled"),
    ("moe_latent_size", "latent experts are not modelled"),
    ("enable_mhc_connections", "hyper-connections are not modelled"),
    ("use_legacy_models", "only Megatron-Core's models are modelled"),
    ("decoder_num_layers", "encoder-decoder models are not modelled"),
    ("decoder_seq_length", "encoder-decoder models are not modelled"),
    ("vision_pretraining", "vision models are not modelled"),
    ("img_h", "vision models are not modelled"),
    ("retro_project_dir", "retrieval models are not modelled"),
    ("ict_head_size", "biencoders are not modelled"),
    ("perform_rl_step", "reinforcement learning steps are not modelled"),
    ("skip_train", "nothing is trained, so there is nothing to plan"),
    ("fake_process_group", "one process plays all ranks, so there is nothing to place"),
    ("fine_grained_activation_offloading", "what it moves to the host is not modelled: peaks came out twice as high"),
    ("use_torch_fsdp2", "FSDP is not modelled"),
    ("use_megatron_fsdp", "FSDP is not modelled"),
    ("hybrid_context_parallel", "dynamic context parallelism is not modelled"),
    ("tensor_parallel_num_weight_shards", "weight shards beyond tensor parallelism are not modelled"),
    ("expert_tensor_parallel_num_weight_shards", "weight shards beyond tensor parallelism are not modelled"),
    ("step_batch_size_schedule", "a global batch size that changes by a schedule cannot be pinned"),
    ("inprocess_restart", "a restart inside the process re-assigns ranks and would lose the placement"),
    ("batch_size", "no longer valid in Megatron; use --micro-batch-size"),
    ("model_parallel_size", "no longer valid in Megatron; use --tensor-model-parallel-size"),
)
"""Destinations that, when given and not off, mean a job that is not planned."""
REFUSED_VALUES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("non_persistent_ckpt_type", ("local",), "local checkpoints need the same rank on the same host at every start"),
    ("dataloader_type", ("external",), "what an external data loader gives to each rank is unknown"),
    ("position_embedding_type", ("relative", "mrope"), "these position embeddings are not modelled"),
)
REFUSED_ON_GPU: tuple[tuple[str, tuple[str, ...] | None, str], ...] = (
    ("tp_comm_overlap", None, "userbuffers tie tensor-parallel groups to hosts, which a placement does not promise"),
    (
        "moe_token_dispatcher_type",
        ("flex",),
        "this dispatcher ties blocks of expert-parallel ranks to hosts, which a placement does not promise",
    ),
)


PREDICTED = frozenset(
    {
        "dataloader_type",
        "inprocess_restart",
        "local_rank",
        "moe_token_dispatcher_type",
        "mtp_num_layers",
        "multi_latent_attention",
        "non_persistent_ckpt_type",
        "step_batch_size_schedule",
        "tp_comm_overlap",
    }
)
"""Destinations that keep a job from being planned or placed, though what it holds and costs can be told."""


UNTIMED = frozenset({"mtp_num_layers", "multi_latent_attention"})
"""Destinations of models whose layers no probe can time; on imagined machines they can be planned."""


def check_planned(
    arguments: Arguments, device_kind: str, *, for_prediction: bool = False, without_probes: bool = False
) -> None:
    """Raise MegatronError for a job that is not planned (or not even predicted), with the flag and the reason.

    The launcher then trains with the user's own configuration, as torchrun would, and shows the reason.
    """
    for dest, reason in REFUSED:
        if (for_prediction and dest in PREDICTED) or (without_probes and dest in UNTIMED):
            continue
        if arguments.is_given(dest) and (arguments.get(dest) or dest == "local_rank"):
            raise MegatronError(f"{arguments.shown(dest)}: {reason}")
    spec = arguments.get("spec")
    if spec and spec != ["local"]:
        raise MegatronError(f"{arguments.shown('spec')}: layers of a module of your own are not modelled")
    for dest, values, reason in REFUSED_VALUES:
        if arguments.get(dest) in values and not (for_prediction and dest in PREDICTED):
            raise MegatronError(f"{arguments.shown(dest)}: {reason}")
    if device_kind == "cuda":
        for dest, bad, reason in REFUSED_ON_GPU:
            value = arguments.get(dest)
            if value and (bad is None or value in bad) and not for_prediction:
                raise MegatronError(f"{arguments.shown(dest)}: {reason}")


def pins(arguments: Arguments, own: Layout, device_kind: str) -> Iterator[Pin]:
    """What must stay as the user has it for the job to learn the same, or to run at all."""
    for rule in (_data, _loss, _experts, _optimizer, _devices, _randomness):
        yield from rule(arguments, own, device_kind)


Rule = Callable[[Arguments, Layout, str], Iterator[Pin]]


def _data(arguments: Arguments, own: Layout, _device_kind: str) -> Iterator[Pin]:
    if arguments.get("dataloader_type") == "cyclic":
        yield Pin(
            fields=("dp", "micro_batch_size"),
            note=f"{arguments.shown('dataloader_type')} shuffles within each replica: dp and micro-batch stay",
        )
    if arguments.get("rampup_batch_size"):
        # The first, smallest batches must still divide, and fill the pipeline when it is interleaved.
        held = ("dp", "micro_batch_size", "vpp") if own.vpp == 1 else ("dp", "micro_batch_size", "pp", "vpp")
        yield Pin(
            fields=held,
            note=f"{arguments.shown('rampup_batch_size')} must divide at every step: {', '.join(held)} stay",
        )


def _loss(arguments: Arguments, _own: Layout, _device_kind: str) -> Iterator[Pin]:
    """The loss is a mean of micro-batch means: with unequally many tokens in each, their size is part of it."""
    uneven = next((dest for dest in ("eod_mask_loss", "sft", "fim_data") if arguments.get(dest)), None)
    if uneven and not arguments.get("calculate_per_token_loss"):
        yield Pin(
            fields=("micro_batch_size",),
            note=f"{arguments.shown(uneven)} masks tokens, and the loss averages micro-batches: their size stays "
            f"(--calculate-per-token-loss would free it)",
        )


def _experts(arguments: Arguments, _own: Layout, _device_kind: str) -> Iterator[Pin]:
    if not arguments.get("num_experts"):
        return
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


def _optimizer(arguments: Arguments, _own: Layout, _device_kind: str) -> Iterator[Pin]:
    kind = arguments.get("optimizer")
    if kind in ELEMENTWISE and kind != "adam":
        yield Pin(fields=OPTIMIZER_FIELDS, note=f"{arguments.shown('optimizer')}: the distributed optimizer stays")
    elif kind != "adam":
        # Muon and its kin orthogonalise whole matrices, or the shards that tensor parallelism leaves of them.
        yield Pin(
            fields=(*OPTIMIZER_FIELDS, "etp", "tp"),
            note=f"{arguments.shown('optimizer')} works on matrices: tp, etp and the distributed optimizer stay",
        )
    keeps = ("use_precision_aware_optimizer", "fp8_param_gather", "optimizer_cpu_offload")
    for dest in (*keeps, "overlap_param_gather_with_optimizer_step"):
        if arguments.get(dest):
            yield Pin(fields=OPTIMIZER_FIELDS, note=f"{arguments.shown(dest)}: the distributed optimizer stays")


def _devices(arguments: Arguments, _own: Layout, device_kind: str) -> Iterator[Pin]:
    if device_kind == "cpu":
        yield Pin(fields=("cp",), note="context parallelism needs Transformer Engine, and so a GPU: cp stays 1 on CPU")
    keeps = ("distribute_saved_activations", "enable_cuda_graph")
    for dest in (*keeps, "moe_layer_recompute"):
        if arguments.get(dest):
            yield Pin(fields=("recompute",), note=f"{arguments.shown(dest)}: recompute stays")


def _randomness(arguments: Arguments, _own: Layout, _device_kind: str) -> Iterator[Pin]:
    if arguments.get("data_parallel_random_init"):
        yield Pin(fields=("dp",), note="--data-parallel-random-init seeds each data-parallel rank apart: dp stays")


def _as_list(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]
