"""Values that each field of a layout may take, and layer splits that make the slowest pipeline stage fast.

A pinned field takes only the user's own value. Embedding and head take time, so a stage with the embedding or the head
gets fewer layers. Chunk c, in model order, lies on pipeline rank c % pp.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TypeVar

from pipette_launch.facts import Job, ModelSpec, Recompute
from pipette_launch.facts.layout import NO_RECOMPUTE, MemoryOptions
from pipette_launch.megatron.chunks import Split
from pipette_launch.megatron.rules.broken import Rules
from pipette_launch.megatron.rules.flags import RECOMPUTED_SINCE

SLACK = 1e-9
_HALVINGS = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSeconds:
    """Seconds of the parts of a model for one micro-batch, forward plus backward. Only ratios of times matter."""

    layers_s: tuple[float, ...]
    first_s: float
    """Seconds of the embedding, which lies on the first stage."""
    last_s: float
    """Seconds of the head, the loss and multi-token prediction, which lie on the last stage."""


def by_parts(model: ModelSpec, parts_s: Mapping[str, float]) -> LayerSeconds:
    """Combine the seconds of a model's parts: layers by kind, embedding, head, prediction.

    A depth of multi-token prediction without a measured time takes the seconds of its layers and of one head.
    """
    plain_s = sum(parts_s.get(kind, 0.0) for kind in model.prediction_kinds) + parts_s["head"]
    depth_s = parts_s.get("prediction", plain_s)
    return LayerSeconds(
        layers_s=tuple(parts_s.get(kind, 0.0) for kind in model.layer_kinds),
        first_s=parts_s["embedding"],
        last_s=parts_s["head"] + model.mtp_num_layers * depth_s,
    )


def by_flops(model: ModelSpec) -> LayerSeconds:
    """Use FLOPs instead of measured times: 2 FLOPs for each weight, and 0 FLOPs for the embedding."""
    kinds = {*model.layer_kinds, *model.prediction_kinds}
    parts: dict[str, float] = {kind: model.kind_flops_per_token(kind) for kind in kinds}
    return by_parts(model, parts | {"embedding": 0.0, "head": 2.0 * model.hidden_size * model.vocab_size})


def stage_seconds(seconds: LayerSeconds, chunks: Sequence[int], pp: int) -> tuple[float, ...]:
    """Return the seconds of each pipeline rank for one micro-batch: the sum of its chunks, embedding and head."""
    stages_s = [0.0] * pp
    for chunk, (first, size) in enumerate(zip(accumulate(chunks, initial=0), chunks, strict=False)):
        stages_s[chunk % pp] += sum(seconds.layers_s[first : first + size])
    stages_s[0] += seconds.first_s
    stages_s[-1] += seconds.last_s
    return tuple(stages_s)


def balanced_chunks(seconds: LayerSeconds, *, pp: int, vpp: int) -> tuple[int, ...]:
    """Split the layers so that the slowest stage is as fast as possible; of equally fast splits, take the least memory.

    The memory of a stage is its number of layers times the number of micro-batches that it holds at once. The memory of
    a split is the memory of its fullest stage. Later stages hold fewer micro-batches, so they take more layers if no
    time is lost. Without interleaving (one chunk per rank), the split is optimal. With interleaving, the time is
    optimal if all layers are equal. Unequal layers are split into chunks of nearly equal time, and single layers then
    move between neighbouring chunks. The result has the layers of each of the `pp * vpp` chunks in model order; some
    chunks may be empty.
    """
    if len(set(seconds.layers_s)) > 1 and vpp > 1:
        return _improved(seconds, [*_contiguous(seconds, (1,) * (pp * vpp))], pp)
    chunks = [0] * (pp * vpp)
    # Most forwards (micro-batch and chunk) whose activations each stage holds at once: the warm-up forwards plus one.
    # Sources: schedules.py:2093 for 1F1B, schedules.py:762-786 for interleaving.
    held = (2 * (pp - rank - 1) + (vpp - 1) * pp + 1 if vpp > 1 else pp - rank for rank in range(pp))
    # Split the layers among the ranks, and spread the layers of each rank over its chunks.
    for rank, layers in enumerate(_contiguous(seconds, tuple(held))):
        for turn in range(vpp):
            # Larger chunks come first, except on the first rank, whose first chunk has the embedding.
            place = vpp - 1 - turn if rank == 0 else turn
            chunks[place * pp + rank] = (layers + vpp - 1 - turn) // vpp
    return tuple(chunks)


@lru_cache(maxsize=1 << 12)
def _contiguous(seconds: LayerSeconds, weights: tuple[int, ...]) -> tuple[int, ...]:
    """Split the layers into runs: minimize the slowest run's time, then the largest number of layers x weight."""
    sums_s = (0.0, *accumulate(seconds.layers_s))
    limit_s = _least_limit_s(seconds, len(weights)) * (1 + SLACK)
    few, many = 0, max(weights) * len(seconds.layers_s)
    while many - few > 1:
        middle = (few + many) // 2
        if _filled(sums_s, seconds, [middle // weight for weight in weights], limit_s):
            many = middle
        else:
            few = middle
    return _filled(sums_s, seconds, [many // weight for weight in weights], limit_s)


@lru_cache(maxsize=1 << 12)
def _least_limit_s(seconds: LayerSeconds, num_runs: int) -> float:
    """Return the least possible seconds of the slowest of `num_runs` runs."""
    sums_s = (0.0, *accumulate(seconds.layers_s))
    low_s = (sums_s[-1] + seconds.first_s + seconds.last_s) / num_runs
    # Upper limit that some split meets: the mean run or the longer end, plus the longest layer and both ends.
    high_s = max(low_s, seconds.first_s, seconds.last_s) + max(seconds.layers_s) + seconds.first_s + seconds.last_s
    most = [len(seconds.layers_s)] * num_runs
    for _ in range(_HALVINGS):
        middle_s = (low_s + high_s) / 2
        if _filled(sums_s, seconds, most, middle_s):
            high_s = middle_s
        else:
            low_s = middle_s
    return high_s


def _filled(sums_s: Sequence[float], seconds: LayerSeconds, most: Sequence[int], limit_s: float) -> tuple[int, ...]:
    """Fill the runs from the last to the first up to the limits, and return their sizes; () if layers remain."""
    end = len(sums_s) - 1
    sizes = []
    for stage in range(len(most) - 1, 0, -1):
        room_s = limit_s - (seconds.last_s if stage == len(most) - 1 else 0.0)
        if room_s < 0:
            return ()
        start = min(end, max(end - most[stage], bisect_left(sums_s, sums_s[end] - room_s)))
        sizes.append(end - start)
        end = start
    ends_s = seconds.first_s + (seconds.last_s if len(most) == 1 else 0.0)
    if end > most[0] or sums_s[end] + ends_s > limit_s:
        return ()
    return (end, *reversed(sizes))


def _improved(seconds: LayerSeconds, chunks: list[int], pp: int) -> tuple[int, ...]:
    """Move single layers between neighbouring chunks while each move makes the slower of the two stages faster."""
    stages_s = [*stage_seconds(seconds, chunks, pp)]
    starts = [0, *accumulate(chunks)][:-1]
    moved = True
    while moved:
        moved = False
        for right in range(1, len(chunks)):
            for step in (-1, 1):
                sender, receiver = (right - 1, right) if step < 0 else (right, right - 1)
                if not chunks[sender]:
                    continue
                layer_s = seconds.layers_s[starts[right] - (step < 0)]
                behind_s, ahead_s = stages_s[sender % pp], stages_s[receiver % pp]
                if ahead_s + layer_s >= behind_s * (1 - SLACK):
                    continue
                stages_s[sender % pp], stages_s[receiver % pp] = behind_s - layer_s, ahead_s + layer_s
                chunks[sender] -= 1
                chunks[receiver] += 1
                starts[right] += step
                moved = True
    return tuple(chunks)


T = TypeVar("T")

BLOCK_STEPS = 8
"""Number of values tried for the number of layers that block recompute repeats in a chunk."""


def values(job: Job, field: str, options: tuple[T, ...]) -> tuple[T, ...]:
    """Return the options of a field, or only the user's own value if the field is pinned."""
    return (getattr(job.own, field),) if field in job.pinned else options


@lru_cache(maxsize=1 << 12)
def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors of a number in rising order."""
    small = [size for size in range(1, int(number**0.5) + 1) if number % size == 0]
    return tuple(sorted({*small, *(number // size for size in small)}))


def expert_tensor_sizes(job: Job, tp: int) -> tuple[int, ...]:
    """Return the values of ETP: every divisor of an expert's width, or Megatron's default (TP) without experts."""
    if job.model.num_experts:
        return values(job, "etp", divisors(job.model.moe_ffn_hidden_size))
    return values(job, "etp", (tp,) if tp != job.own.tp else (job.own.etp,))


def rank_orders(job: Job) -> tuple[bool, ...]:
    """Return the values of `use_tp_pp_dp_mapping`; the search takes the first legal value."""
    return values(job, "use_tp_pp_dp_mapping", (True, False) if job.own.use_tp_pp_dp_mapping else (False,))


def micro_batch_sizes(samples: int, *, own: int) -> tuple[int, ...]:
    """Return micro-batch sizes that divide a replica's samples: powers of two, samples / powers, and the user's own."""
    powers = [1 << exponent for exponent in range(samples.bit_length())]
    sizes = {power for power in powers if samples % power == 0}
    sizes |= {samples // power for power in sizes} | ({own} if samples % own == 0 else set())
    return tuple(sorted(sizes))


def group_sizes(job: Job, pp: int, vpp: int, num_microbatches: int) -> tuple[int, ...]:
    """Return group sizes: micro-batches that interleaving runs through a chunk in a row; 0 = Megatron's default, pp.

    A larger group hides the transfer from the last stage to the first, but holds more activations. The last group must
    not have fewer micro-batches than stages. If the default (pp) breaks the rule on the last group, the next larger
    legal size replaces the default.
    """
    if vpp == 1:
        return values(job, "microbatch_group_size", (0,))
    legal = (group for group in range(pp, num_microbatches + 1) if not 0 < num_microbatches % group < pp)
    smallest = next(legal, pp)
    own = (job.own.microbatch_group_size,) if job.own.pp == pp else ()
    options = dict.fromkeys((0 if smallest == pp else smallest, *(() if smallest > 2 * pp else (2 * pp,)), *own))
    return values(job, "microbatch_group_size", tuple(options))


def virtual_stages(job: Job, pp: int) -> tuple[int, ...]:
    """Return the values of VPP: divisors of a stage's number of layers, and powers of two up to this number."""
    per_stage, rest = divmod(job.model.num_layers, pp)
    if pp == 1:
        return values(job, "vpp", (1,))
    powers = {1 << exponent for exponent in range(per_stage.bit_length())}
    return values(job, "vpp", tuple(sorted(powers if rest else powers | {*divisors(per_stage)})))


def layer_splits(job: Job, pp: int, seconds: LayerSeconds) -> Iterator[Split]:
    """Yield layer splits: virtual stages, layers of each chunk (() = even), and chunks after multi-token prediction.

    Only the user's own split may have chunks after multi-token prediction.
    """
    own, layers = job.own, job.model.num_layers
    own_split = Split(own.vpp, own.layers_per_chunk, own.chunks_after_mtp)
    has_own = pp == own.pp and own.layers_per_chunk
    if has_own:
        yield own_split
    if "layers_per_chunk" in job.pinned:
        if not own.layers_per_chunk:
            yield from map(Split, virtual_stages(job, pp))
        return
    for vpp in virtual_stages(job, pp) if pp <= layers else ():
        even_s = float("inf")
        if layers % (pp * vpp) == 0:
            yield Split(vpp)
            even_s = max(stage_seconds(seconds, (layers // (pp * vpp),) * (pp * vpp), pp))
        balanced = balanced_chunks(seconds, pp=pp, vpp=vpp) if pp > 1 else ()
        is_quicker = bool(balanced) and max(stage_seconds(seconds, balanced, pp)) < even_s * (1 - SLACK)
        if is_quicker and not (has_own and own_split == Split(vpp, balanced)):
            yield Split(vpp, balanced)


def memory_flags(rules: Rules, tp: int, *, has_replicas: bool) -> Iterator[MemoryOptions]:
    """Yield combinations of sequence parallelism, distributed optimizer and overlaps, fastest first; no recompute."""
    job = rules.job
    shardings = (True, False) if has_replicas else (job.own.use_distributed_optimizer,)
    for sequence_parallel in values(job, "sequence_parallel", (True, False)) if tp > 1 else (False,):
        for sharded in values(job, "use_distributed_optimizer", shardings):
            for overlap in _overlaps(rules, sharded=sharded, has_replicas=has_replicas):
                yield MemoryOptions(sequence_parallel, sharded, *overlap, NO_RECOMPUTE)


def _overlaps(rules: Rules, *, sharded: bool, has_replicas: bool) -> Iterator[tuple[bool, bool]]:
    """Yield (overlap_grad_reduce, overlap_param_gather); only the user's own values if overlap would hide nothing."""
    job, own = rules.job, rules.job.own
    hides = has_replicas and rules.device_kind == "cuda"
    for reduce in values(job, "overlap_grad_reduce", (True, False) if hides else (own.overlap_grad_reduce,)):
        may_gather = (sharded and reduce) or "overlap_param_gather" in job.pinned
        gathers = (True, False) if hides else (own.overlap_param_gather,)
        for gather in values(job, "overlap_param_gather", gathers if may_gather else (False,)):
            yield reduce, gather


def recomputes(job: Job, layers: frozenset[int]) -> tuple[Recompute, ...]:
    """Return the kinds of recompute for chunks with these numbers of layers, cheapest first."""
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
    """Yield sets of modules for selective recompute, cheapest first; sets with a whole MLP or expert layer come last.

    Each set has only modules whose bytes and seconds are predicted, and whose recompute frees memory. Recompute of the
    whole expert layer includes its activation and the shared experts.
    """
    model = job.model
    chosen = [*cheap_modules(job), *(["shared_experts"] if model.moe_shared_expert_intermediate_size else [])]
    for count in range(1, len(chosen) + 1):
        yield Recompute(granularity="selective", modules=tuple(chosen[:count]))
    light = [module for module in chosen if module in ("layernorm", "core_attn", "mla_up_proj", "gdn_norm_out")]
    if model.has_dense_mlps and not model.add_bias_linear:
        light.append("mlp")
        yield Recompute(granularity="selective", modules=tuple(light))
    if model.num_experts:
        yield Recompute(granularity="selective", modules=(*light, "moe"))


def cheap_modules(job: Job) -> Iterator[str]:
    """Yield modules whose recompute takes little time and frees memory."""
    model = job.model
    has_engine = model.transformer_impl == "transformer_engine"
    if has_engine and (model.num_experts or model.latent_attention):
        # In dense models with ordinary attention, Transformer Engine fuses norms with matrix products.
        yield "layernorm"
    if model.transformer_impl == "local" or model.attention_backend in ("unfused", "local"):
        # The local and the unfused attention store score matrices. Flash and cuDNN attention do not.
        yield "core_attn"
    if has_engine and model.num_experts and job.options.moe_grouped_gemm:
        yield "moe_act"
    if has_engine and model.latent_attention:
        yield "mla_up_proj"
    if model.linear_layers and job.release >= RECOMPUTED_SINCE["gdn_norm_out"]:
        yield "gdn_norm_out"
