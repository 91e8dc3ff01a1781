"""The values that each axis of a layout may take: the declared sets, narrowed to the user's own where it is pinned.

| axis | values |
|---|---|
| TP, PP, CP, DP | all divisors of the ranks that give the ranks as their product; PP up to the layers |
| EP, ETP | all divisors of the experts, and of an expert's width |
| chunks | even ones where they divide, and those that balance the stages' times where that is quicker |
| virtual stages | all that divide a stage's layers, and powers of two |
| micro-batches in a group | the smallest legal group, and two for each stage |
| micro-batch | powers of two, quotients of a replica's samples by them, the user's own |
| rank order | the user's own; the default one where Megatron refuses his |
| sequence parallelism | on where TP splits and it is possible, as layers are timed; else off |
| distributed optimizer, overlap | on and off, where there are replicas; overlap on GPUs |
| recompute | none; selective, in growing sets of modules; some eighths of each chunk; all, in powers of two |

A placement is any permutation of the ranks, so either rank order can put every cell on every slot; only one is listed.
Where there are still too many cuts, `enumerate.cuts` sets some aside and counts them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TypeVar

from pipette_launch.facts import Job, ModelSpec, Recompute
from pipette_launch.facts.layout import NO_RECOMPUTE, MemoryOptions
from pipette_launch.megatron.chunks import Split
from pipette_launch.megatron.performance import performance_options
from pipette_launch.megatron.rules.broken import Rules
from pipette_launch.search.layouts.partition import SLACK, LayerSeconds, balanced_chunks, stage_seconds

T = TypeVar("T")

BLOCK_STEPS = 8
"""Recompute of a chunk's first layers grows in so many steps."""


def values(job: Job, field: str, options: tuple[T, ...]) -> tuple[T, ...]:
    """What a field may be: the options, or the user's own value where it is pinned."""
    return (getattr(job.own, field),) if field in job.pinned else options


@lru_cache(maxsize=1 << 12)
def divisors(number: int) -> tuple[int, ...]:
    """All divisors, rising."""
    small = [size for size in range(1, int(number**0.5) + 1) if number % size == 0]
    return tuple(sorted({*small, *(number // size for size in small)}))


def expert_sizes(job: Job) -> tuple[int, ...]:
    """EP: every divisor of the experts."""
    return values(job, "ep", divisors(job.model.num_experts) if job.model.num_experts else (1,))


def expert_tensor_sizes(job: Job, tp: int) -> tuple[int, ...]:
    """ETP: every divisor of an expert's width; without experts nothing reads it, and it is Megatron's default, TP."""
    if job.model.num_experts:
        return values(job, "etp", divisors(job.model.moe_ffn_hidden_size))
    return values(job, "etp", (tp,) if tp != job.own.tp else (job.own.etp,))


def rank_orders(job: Job) -> tuple[bool, ...]:
    """`use_tp_pp_dp_mapping`, the first that is legal to be taken."""
    return values(job, "use_tp_pp_dp_mapping", (True, False) if job.own.use_tp_pp_dp_mapping else (False,))


def micro_batch_sizes(samples: int, *, own: int) -> tuple[int, ...]:
    """Sizes worth trying for so many samples on a replica: powers of two, quotients by them, and the user's own.

    Every number of micro-batches that is a power of two is reached, and so is every size that is one.
    """
    powers = [1 << exponent for exponent in range(samples.bit_length())]
    sizes = {power for power in powers if samples % power == 0}
    sizes |= {samples // power for power in sizes} | ({own} if samples % own == 0 else set())
    return tuple(sorted(sizes))


def group_sizes(job: Job, pp: int, vpp: int, num_microbatches: int) -> tuple[int, ...]:
    """Micro-batches that interleaving runs through a chunk at a time; 0 is Megatron's default, one for each stage.

    Larger groups than needed hide the transfer from the last stage back to the first, and hold more activations. A last
    group of fewer micro-batches than stages is not legal; where the default has one, the next larger group without
    takes its place.

    Args:
        job: with the user's own group size, and whether it is pinned.
        pp: pipeline ranks.
        vpp: chunks of each.
        num_microbatches: of one step.

    """
    if vpp == 1:
        return values(job, "microbatch_group_size", (0,))
    legal = (group for group in range(pp, num_microbatches + 1) if not 0 < num_microbatches % group < pp)
    smallest = next(legal, pp)
    own = (job.own.microbatch_group_size,) if job.own.pp == pp else ()
    options = dict.fromkeys((0 if smallest == pp else smallest, *(() if smallest > 2 * pp else (2 * pp,)), *own))
    return values(job, "microbatch_group_size", tuple(options))


def virtual_stages(job: Job, pp: int) -> tuple[int, ...]:
    """VPP: what divides a stage's layers, and powers of two up to them."""
    per_stage, rest = divmod(job.model.num_layers, pp)
    if pp == 1:
        return values(job, "vpp", (1,))
    powers = {1 << exponent for exponent in range(per_stage.bit_length())}
    return values(job, "vpp", tuple(sorted(powers if rest else powers | {*divisors(per_stage)})))


def splits(job: Job, pp: int, seconds: LayerSeconds) -> Iterator[Split]:
    """Virtual stages, layers of each chunk (() for even ones), and chunks behind multi-token prediction.

    Only the user's own split has that apart from the head.
    """
    own, layers = job.own, job.model.num_layers
    own_split = Split(own.vpp, own.layers_per_chunk, own.chunks_after_mtp)
    has_own = pp == own.pp and own.layers_per_chunk
    if "layers_per_chunk" in job.pinned:
        if has_own:
            yield own_split
        elif not own.layers_per_chunk:
            yield from map(Split, virtual_stages(job, pp))
        return
    if has_own:
        yield own_split
    for vpp in virtual_stages(job, pp) if pp <= layers else ():
        even_s = float("inf")
        if layers % (pp * vpp) == 0:
            yield Split(vpp)
            even_s = max(stage_seconds(seconds, (layers // (pp * vpp),) * (pp * vpp), pp))
        balanced = balanced_chunks(seconds, pp=pp, vpp=vpp) if pp > 1 else ()
        is_quicker = bool(balanced) and max(stage_seconds(seconds, balanced, pp)) < even_s * (1 - SLACK)
        if is_quicker and not (has_own and own_split == Split(vpp, balanced)):
            yield Split(vpp, balanced)


def states(rules: Rules, tp: int, *, has_replicas: bool) -> Iterator[MemoryOptions]:
    """Sequence parallelism, distributed optimizer and overlap, the quickest first; without recompute."""
    job = rules.job
    shardings = (True, False) if has_replicas else (job.own.use_distributed_optimizer,)
    for sequence_parallel in values(job, "sequence_parallel", (True, False)) if tp > 1 else (False,):
        for sharded in values(job, "use_distributed_optimizer", shardings):
            for overlap in _overlaps(rules, sharded=sharded, has_replicas=has_replicas):
                yield MemoryOptions(sequence_parallel, sharded, *overlap, NO_RECOMPUTE)


def _overlaps(rules: Rules, *, sharded: bool, has_replicas: bool) -> Iterator[tuple[bool, bool]]:
    """Overlap of the gradients' reduction and of the parameters' gathering.

    Where nothing is reduced, or no stream of its own hides it, as on CPU, only what the user has.
    """
    job, own = rules.job, rules.job.own
    hides = has_replicas and rules.device_kind == "cuda"
    for reduce in values(job, "overlap_grad_reduce", (True, False) if hides else (own.overlap_grad_reduce,)):
        may_gather = (sharded and reduce) or "overlap_param_gather" in job.pinned
        gathers = (True, False) if hides else (own.overlap_param_gather,)
        for gather in values(job, "overlap_param_gather", gathers if may_gather else (False,)):
            yield reduce, gather


def recomputes(job: Job, layers: frozenset[int]) -> tuple[Recompute, ...]:
    """What may be recomputed in chunks with so many layers, the cheapest first."""
    deepest = max(layers)
    step = -(-deepest // BLOCK_STEPS)
    blocks = [Recompute(granularity="full", method="block", num_layers=size) for size in range(step, deepest, step)]
    units = [1 << exponent for exponent in range(deepest.bit_length())]
    uniform = [
        Recompute(granularity="full", method="uniform", num_layers=size)
        for size in units
        if not any(chunk % size for chunk in layers)
    ]
    options = (NO_RECOMPUTE, *module_sets(job), *blocks, *uniform, job.own.recompute)
    return values(job, "recompute", tuple(dict.fromkeys(options)))


def module_sets(job: Job) -> Iterator[Recompute]:
    """Selective recompute in growing sets: what costs next to nothing first, whole blocks of matrices last.

    Only modules whose bytes and seconds are predicted, and whose recompute frees anything. Recompute of the experts'
    layer contains that of its activation and of the shared experts.
    """
    model, chosen = job.model, list[str]()
    for module in (*cheap_modules(job), *(("shared_experts",) if model.moe_shared_expert_intermediate_size else ())):
        chosen.append(module)
        yield Recompute(granularity="selective", modules=tuple(chosen))
    light = [module for module in chosen if module in ("layernorm", "core_attn", "mla_up_proj")]
    if {"layer", "mlp_layer"} & {*model.layer_kinds} and not model.add_bias_linear:
        light.append("mlp")
        yield Recompute(granularity="selective", modules=tuple(light))
    if model.num_experts:
        yield Recompute(granularity="selective", modules=(*light, "moe"))


def cheap_modules(job: Job) -> Iterator[str]:
    """Modules that are recomputed in little time, and free something."""
    model = job.model
    if model.transformer_impl == "transformer_engine" and (model.num_experts or model.latent_attention):
        # Elsewhere Transformer Engine has the norms inside the matrices.
        yield "layernorm"
    if selective_recompute_matters(model):
        yield "core_attn"
    if (
        model.transformer_impl == "transformer_engine"
        and model.num_experts
        and performance_options(job).moe_grouped_gemm
    ):
        yield "moe_act"
    if model.transformer_impl == "transformer_engine" and model.latent_attention:
        yield "mla_up_proj"


def selective_recompute_matters(model: ModelSpec) -> bool:
    """Whether attention keeps its score matrices, so that recomputing them saves memory (not with flash or cuDNN)."""
    return model.transformer_impl == "local" or model.attention_backend in ("unfused", "local")
