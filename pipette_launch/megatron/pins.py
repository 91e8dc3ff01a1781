"""Layout fields that a plan must not change, and jobs that are not planned at all, each with a reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import NamedTuple

from pipette_launch.errors import MegatronError, OptionError
from pipette_launch.facts import Layout, files
from pipette_launch.facts.job import OPTIMIZERS
from pipette_launch.facts.layout import OVERLAPS
from pipette_launch.megatron.chunks import hybrid_pattern
from pipette_launch.megatron.flags import Arguments, release_of
from pipette_launch.megatron.layout import OPTIMIZER_FIELDS, PP
from pipette_launch.megatron.performance import unmodelled
from pipette_launch.megatron.script import Foreign, settings
from pipette_launch.text import did_you_mean

LAYOUT_FIELDS = tuple(field.name for field in fields(Layout))
SHORT_NAMES = {
    "mbs": ("micro_batch_size",),
    "micro_batch": ("micro_batch_size",),
    "sp": ("sequence_parallel",),
    "seq_par": ("sequence_parallel",),
    "dist_opt": ("use_distributed_optimizer",),
    "overlap": OVERLAPS,
    "layers": ("layers_per_chunk", "chunks_after_mtp"),
    "order": ("use_tp_pp_dp_mapping",),
    "all": LAYOUT_FIELDS,
}
"""Short names that `--pipette-fix` accepts in addition to the names of layout fields."""
_SHARDING, _RECOMPUTE = ": the distributed optimizer stays", ": recompute stays"
_SHARDED_BY = " decides which states are sharded: the optimizer's flags stay"
HELD_BY: dict[str, tuple[tuple[str, ...], str]] = {
    "use_precision_aware_optimizer": (OPTIMIZER_FIELDS, _SHARDING),
    "fp8_param_gather": (OPTIMIZER_FIELDS, _SHARDING),
    "optimizer_cpu_offload": (OPTIMIZER_FIELDS, _SHARDING),
    "overlap_param_gather_with_optimizer_step": (OPTIMIZER_FIELDS, _SHARDING),
    "distribute_saved_activations": (("recompute",), _RECOMPUTE),
    "enable_cuda_graph": (("recompute",), _RECOMPUTE),
    "fine_grained_activation_offloading": (("recompute",), _RECOMPUTE),
    "moe_layer_recompute": (("recompute",), _RECOMPUTE),
    "use_megatron_fsdp": (OPTIMIZER_FIELDS, _SHARDED_BY),
    "data_parallel_random_init": (("dp",), " gives each data-parallel rank its own seed: dp stays"),
}
"""Layout fields that a plan must not change if a flag is set, and the reason, by destination of the flag."""


class Pin(NamedTuple):
    """Layout fields that no plan may change, and the reason why."""

    fields: tuple[str, ...]
    note: str


def fixed_fields(names: Sequence[str]) -> tuple[str, ...]:
    """Return the sorted layout fields that `--pipette-fix` names. Raise OptionError for an unknown name."""
    found: set[str] = set()
    known = SHORT_NAMES | {field: (field,) for field in LAYOUT_FIELDS}
    for name in names:
        plain = name.strip().replace("-", "_")
        if plain not in known:
            hint = did_you_mean(plain, known, otherwise=f"known are {', '.join(sorted(known))}")
            raise OptionError("fix", f"{name}: no such part of a layout; {hint}")
        found.update(known[plain])
    return tuple(sorted(found))


def _reasons(when: str) -> dict[str, str]:
    rows = files.table("pipette_launch.megatron", "refused_jobs")
    return {row["flag"]: row["reason"] for row in rows if row["refused"] == when}


REFUSED = _reasons("always")
"""Reasons why a job is neither planned nor predicted, by destination of a flag that is set, or by the flag's value."""
UNPLANNED = _reasons("if planned") | _reasons("if placed")
"""Reasons why a job is predicted but not planned, by destination of a flag."""
UNMODELLED = _reasons("unless measured")
"""Reasons why a job is neither predicted nor planned for described machines, by destination of a flag."""
MEASURED = "pipette-launch measures and plans such jobs on their own machines, or pipette probe and plan --cluster"
"""Next step of a user whose job has no formula."""
UNTIMED = _reasons("if measured")
"""Reasons why no warm-up can time a job, by destination of a flag. `pipette plan --gpu` plans such jobs."""
BINDING = _reasons("if placed") | _reasons("if ordered")
"""Reasons why the hosts of a job keep their order, by a setting of any script or by its value."""


def binds_hosts(words: Sequence[str]) -> bool:
    """Return whether a setting of any script binds ranks to hosts."""
    return any(name in BINDING or f"{name}={value}" in BINDING for name, value in settings(words))


def refusals(
    arguments: Arguments, foreign: Foreign, *, for_prediction: bool = False, without_probes: bool = False
) -> Iterator[MegatronError]:
    """Yield an error, with flag and reason, for each property of a job that is not planned.

    The launcher then trains with the user's own configuration, as torchrun would, and shows the reason. With
    `for_prediction` only jobs that cannot be predicted are refused. `without_probes` is true if the plan uses no
    warm-up.
    """
    needs_warm_up = not for_prediction and not without_probes
    refused = REFUSED | ({} if for_prediction else UNPLANNED) | (UNTIMED if needs_warm_up else {})
    for key, reason in refused.items():
        dest, _, refused_value = key.partition("=")
        value = arguments.get(dest)
        # A flag with the value 0 counts as off, except `--local-rank 0`.
        is_on = arguments.is_given(dest) and bool(value or dest == "local_rank")
        if str(value) == refused_value if refused_value else is_on:
            yield arguments.refusal(reason, dest)
    yield from _offloading_refusals(arguments)
    # The warm-up runs the script itself, so it can time layers for which no formula exists.
    unknown = [] if needs_warm_up else unmodelled(arguments)
    for reason in dict.fromkeys(UNMODELLED[dest] for dest in unknown):
        yield arguments.refusal(f"{reason}; {MEASURED}", *(dest for dest in unknown if UNMODELLED[dest] == reason))
    if needs_warm_up and (arguments.get("dsa_indexer_topk_freq") or 1) > 1:
        reason = "the warm-up times single layers, so it cannot time layers that share selected keys"
        yield arguments.refusal(reason, "dsa_indexer_topk_freq")
    if foreign.name and not needs_warm_up and not unknown:
        yield MegatronError(f"no formula describes the {foreign.name} model of this script; {MEASURED}")
    if foreign.name and not foreign.has_one_stack and arguments.size(PP) > 1:
        yield arguments.refusal("pipeline stages of several stacks of layers are not modelled", PP)
    if hybrid_pattern(arguments):
        yield from _hybrid_refusals(arguments)


def _offloading_refusals(arguments: Arguments) -> Iterator[MegatronError]:
    offloaded = set(_as_list(arguments.get("offload_modules")))
    is_offloading = bool(arguments.get("fine_grained_activation_offloading"))
    # Dense layers offload fewer modules than layers with experts, and unfused core attention saves all its scores.
    is_uneven = "core_attn" in offloaded and bool(offloaded & {"mlp_norm", "expert_fc1", "moe_act"})
    mixes_layers = str(arguments.get("moe_layer_freq")) not in ("1", "None")
    if is_offloading and is_uneven and mixes_layers and str(arguments.get("attention_backend")) == "unfused":
        reason = (
            "with unfused attention and layers with and without experts, tensors of two layers return at once, "
            "which is not modelled: predicted peaks were up to 10 % too low"
        )
        yield arguments.refusal(reason, "offload_modules")


def _hybrid_refusals(arguments: Arguments) -> Iterator[MegatronError]:
    if arguments.get("fine_grained_activation_offloading") and release_of(arguments.version) < (0, 18):
        reason = "before 0.18 hybrid models do not offload activations"
        yield arguments.refusal(reason, "fine_grained_activation_offloading")
    if arguments.get("use_megatron_fsdp") and release_of(arguments.version) < (0, 19):
        reason = "before 0.19 Megatron-FSDP does not wrap Mamba layers one by one, which is not modelled"
        yield arguments.refusal(reason, "use_megatron_fsdp")


def pins(arguments: Arguments, own: Layout, device_kind: str) -> Iterator[Pin]:
    """Yield the fields that must not change, because the job would learn differently or would not run."""
    yield from _data_pins(arguments, own)
    if arguments.get("num_experts"):
        yield from _expert_pins(arguments)
    kind = arguments.get("optimizer")
    if not OPTIMIZERS[kind].is_elementwise:
        # Muon and similar optimizers orthogonalise whole matrices, or the matrices' tensor-parallel shards.
        note = " updates whole matrices: tp, etp and the distributed optimizer stay"
        yield _pin(arguments, (*OPTIMIZER_FIELDS, "etp", "tp"), "optimizer", note)
    elif kind != "adam":
        yield _pin(arguments, OPTIMIZER_FIELDS, "optimizer", _SHARDING)
    if device_kind == "cpu":
        yield Pin(("cp",), "context parallelism needs Transformer Engine, and so a GPU: cp stays 1 on CPU")
    yield from _excluded_pins(arguments)
    for dest, (held, note) in HELD_BY.items():
        if arguments.get(dest):
            yield _pin(arguments, held, dest, note)


def foreign_pins(foreign: Foreign) -> Iterator[Pin]:
    """Yield the fields that stay for a model that no formula describes."""
    if not foreign.name:
        return
    yield Pin((), f"the layers of this {foreign.name} model are measured; memory and exchanges are those of a GPT")
    note = "micro-batches of this model may differ in predicted tokens, and cp may not split them: mbs and cp stay"
    yield Pin(("cp", "micro_batch_size"), note)
    if not foreign.has_one_stack:
        held = ("chunks_after_mtp", "ep", "etp", "layers_per_chunk", "microbatch_group_size", "pp")
        note = "no formula describes the exchanges of several stacks of layers: tp and pp stay"
        yield Pin((*held, "sequence_parallel", "tp", "vpp"), note)


def _pin(arguments: Arguments, held: tuple[str, ...], dest: str, note: str) -> Pin:
    return Pin(held, f"{arguments.shown(dest)}{note}")


def _excluded_pins(arguments: Arguments) -> Iterator[Pin]:
    """Yield fields that a plan must not change, because some flags exclude all other values."""
    ckpt_format = arguments.get("ckpt_format")
    if ckpt_format == "torch_dcp":
        yield _pin(arguments, ("pp", "tp"), "ckpt_format", " excludes tensor and pipeline parallelism: tp and pp stay")
    has_gloo = False not in (arguments.get("enable_gloo_process_groups"), arguments.get("use_gloo_process_groups"))
    if ckpt_format == "torch" and not has_gloo:
        yield _pin(arguments, ("use_distributed_optimizer",), "ckpt_format", f" without gloo{_SHARDING}")
    if arguments.get("batch_invariant_mode"):
        note = " excludes context parallelism from 0.19 on: cp stays"
        yield _pin(arguments, ("cp",), "batch_invariant_mode", note)


def _data_pins(arguments: Arguments, own: Layout) -> Iterator[Pin]:
    """Yield fields on which the order of the samples and the average of the loss depend."""
    loader = arguments.get("dataloader_type")
    if loader not in (None, "single"):
        why = "shuffles samples within each replica" if loader == "cyclic" else "may split samples by replica"
        yield Pin(("dp", "micro_batch_size"), f"{arguments.shown('dataloader_type')} {why}: dp and mbs stay")
    if arguments.get("rampup_batch_size") and release_of(arguments.version) < (0, 18):
        # The smallest batch sizes of a ramp-up must also divide among the replicas, and must fill an interleaved
        # pipeline.
        held = ("dp", "micro_batch_size", "vpp") if own.vpp == 1 else ("dp", "micro_batch_size", "pp", "vpp")
        yield Pin(held, f"{arguments.shown('rampup_batch_size')} must divide at every step: {', '.join(held)} stay")
    # The loss is a mean over means of micro-batches, so the micro-batch size matters if tokens are masked.
    uneven = next((dest for dest in ("eod_mask_loss", "sft", "fim_data") if arguments.get(dest)), None)
    if uneven and not arguments.get("calculate_per_token_loss"):
        note = (
            f"{arguments.shown(uneven)} masks tokens, and the loss averages micro-batches: the micro-batch size stays "
            f"(--calculate-per-token-loss would free it)"
        )
        yield Pin(("micro_batch_size",), note)


def _expert_pins(arguments: Arguments) -> Iterator[Pin]:
    balancing = _as_list(arguments.get("moe_router_load_balancing_type"))
    weights = _as_list(arguments.get("moe_aux_loss_coeff"))
    shown = arguments.shown("moe_router_load_balancing_type")
    if "sinkhorn" in balancing or ("aux_loss" in balancing and any(weights)):
        yield Pin(("micro_batch_size",), f"{shown} balances within a micro-batch: the micro-batch size stays")
    if {"global_aux_loss", "quantile_balancing"} & set(balancing):
        yield Pin(("dp", "micro_batch_size"), f"{shown} balances over dp and micro-batches: dp and mbs stay")
    if arguments.get("moe_expert_capacity_factor") is not None:
        note = (
            f"{arguments.shown('moe_expert_capacity_factor')} drops tokens by each rank's own count: "
            f"cp, ep, etp, micro-batch and tp stay"
        )
        yield Pin(("cp", "ep", "etp", "micro_batch_size", "tp"), note)


def _as_list(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]
