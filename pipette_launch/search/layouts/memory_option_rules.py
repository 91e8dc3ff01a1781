"""Megatron's constraints on what saves memory or hides communication, each with its reason."""

# Sources: validate_args and TransformerConfig (TC) of core_v0.14.0 to v0.19.0, line numbers of v0.16.1.

from __future__ import annotations

from collections.abc import Iterator

from pipette_launch.facts import Recompute
from pipette_launch.facts.performance import flag_of
from pipette_launch.megatron.layout import OWN_MODULES_OF_TE
from pipette_launch.search.layouts.layout_parts import JobConstraints, MemoryOptions

ONLY_ADAM_SHARDS = "the distributed optimizer shards only Adam"
NEEDS_DISTRIBUTED_OPTIMIZER = (
    "fp8_param_gather",
    "use_precision_aware_optimizer",
    "overlap_param_gather_with_optimizer_step",
)


def sequence_faults(terms: JobConstraints, tp: int, cp: int, saver: MemoryOptions) -> Iterator[str]:
    """Check sequence parallelism against the sequence and what needs it.

    Args:
        terms: the job and its flags.
        tp: tensor-parallel ranks.
        cp: context-parallel ranks.
        saver: the memory options to check.

    """
    model = terms.job.model
    if not saver.sequence_parallel:
        if model.num_experts and tp > 1:
            yield "experts with tp > 1 need sequence parallelism"
        if terms.options.tp_comm_overlap:
            yield f"{flag_of('tp_comm_overlap')} needs sequence parallelism"
        return
    if tp == 1:
        yield "sequence parallelism needs tp > 1"
    if terms.device_kind == "cpu":
        yield "sequence parallelism does not run on CPU"
    if model.seq_length // cp % tp:
        yield f"tp does not divide seq_length={model.seq_length}/cp for sequence parallelism"


def optimizer_faults(terms: JobConstraints, saver: MemoryOptions) -> Iterator[str]:
    """Check the distributed optimizer and the overlap of its communication."""
    sharded = saver.use_distributed_optimizer
    needs_sharding = [flag_of(name) for name in NEEDS_DISTRIBUTED_OPTIMIZER if getattr(terms.options, name)]
    if sharded and terms.job.optimizer != "adam":
        yield ONLY_ADAM_SHARDS
    if needs_sharding and not sharded:
        yield f"{'/'.join(needs_sharding)} needs the distributed optimizer"
    if saver.overlap_param_gather and not (sharded and saver.overlap_grad_reduce):
        yield "overlap_param_gather needs the distributed optimizer and overlap_grad_reduce"
    if terms.options.overlap_param_gather_with_optimizer_step and not saver.overlap_param_gather:
        yield f"{flag_of('overlap_param_gather_with_optimizer_step')} needs overlap_param_gather"


def recompute_faults(terms: JobConstraints, tp: int, layers: frozenset[int], saver: MemoryOptions) -> Iterator[str]:
    """Check recompute against the chunks' layers and the flags that exclude or need it.

    Args:
        terms: the job and its flags.
        tp: tensor-parallel ranks.
        layers: the different numbers of layers that chunks have.
        saver: the memory options to check.

    """
    recompute = saver.recompute
    full = recompute.granularity == "full"
    yield from _unit_faults(terms, recompute, layers)
    yield from _module_faults(terms, recompute)
    if full and terms.options.overlap_moe_expert_parallel_comm:
        yield "MoE overlap excludes full recompute"
    graphs = terms.options.cuda_graph_impl in ("local", "transformer_engine")
    if full and graphs and terms.options.cuda_graph_scope != ("full_iteration",):
        yield "CUDA graphs exclude full recompute"
    if recompute.granularity != "none" and terms.options.cpu_offloading_num_layers:
        yield f"{flag_of('cpu_offloading_num_layers')} excludes recompute"
    if terms.options.distribute_saved_activations and not (full and tp > 1 and not saver.sequence_parallel):
        yield f"{flag_of('distribute_saved_activations')} needs full recompute and tp > 1 without sequence parallelism"


def _unit_faults(terms: JobConstraints, recompute: Recompute, layers: frozenset[int]) -> Iterator[str]:
    if recompute.method != "uniform":
        return
    # transformer_block.py:536-547 runs whole units, past the end of the chunk; from 0.17 on the last is cut short.
    if terms.release < (0, 17) and any(size % recompute.num_layers for size in layers):
        yield "before 0.17 uniform recompute takes units that divide every chunk's layers"
    if terms.job.model.mtp_num_layers and recompute.num_layers > 1:
        yield "uniform recompute with multi-token prediction takes units of one layer"


def _module_faults(terms: JobConstraints, recompute: Recompute) -> Iterator[str]:
    """Check the modules of selective recompute (TC:1198-1253)."""
    if recompute.granularity != "selective":
        return
    model, modules = terms.job.model, {*(recompute.modules or ("core_attn",))}
    if model.transformer_impl == "local" and modules & OWN_MODULES_OF_TE:
        yield "recompute of layernorm, moe_act and mla_up_proj needs Transformer Engine"
    # Seen with megatron-core 0.16.1: the backward never ends.
    if "mlp" in modules and model.add_bias_linear:
        yield "recompute of mlp hangs where layers have biases"
    if "moe_act" in modules and not terms.options.moe_grouped_gemm:
        yield f"recompute of moe_act needs {flag_of('moe_grouped_gemm')}"
    if "mla_up_proj" in modules and model.latent_attention is None:
        yield "recompute of mla_up_proj needs multi-latent attention"
    if "shared_experts" in modules and terms.options.moe_shared_expert_overlap:
        yield f"{flag_of('moe_shared_expert_overlap')} excludes recompute of shared_experts"
    is_delayed = terms.options.fp8 is not None and terms.options.fp8_recipe == "delayed"
    if is_delayed and modules & {"layernorm", "moe_act"}:
        yield "delayed scaling of FP8 excludes recompute of layernorm and moe_act"
