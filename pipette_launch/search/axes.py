"""The values that each axis of a layout may take: the declared sets, narrowed to the user's own where it is pinned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from pipette_launch.facts import Job, ModelSpec, Recompute
from pipette_launch.search.rules import Degrees, Rules, Saver

T = TypeVar("T")

NO_RECOMPUTE = Recompute(granularity="none")
SELECTIVE = Recompute(granularity="selective", modules=("core_attn",))
FULL = Recompute(granularity="full", method="uniform", num_layers=1)


def values(job: Job, field: str, options: tuple[T, ...]) -> tuple[T, ...]:
    """What a field may be: the options, or the user's own value where it is pinned."""
    return (getattr(job.own, field),) if field in job.pinned else options


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, rising."""
    small = [size for size in range(1, int(number**0.5) + 1) if number % size == 0]
    return tuple(sorted({*small, *(number // size for size in small)}))


def expert_sizes(job: Job) -> tuple[int, ...]:
    """EP: every divisor of the experts."""
    return values(job, "ep", divisors(job.model.num_experts) if job.model.num_experts else (1,))


def expert_tensor_sizes(job: Job, tp: int) -> tuple[int, ...]:
    """Keep ETP as the user has it: the same number, or Megatron's default, which follows TP."""
    own = job.own
    if "etp" in job.pinned or own.etp != own.tp:
        return (own.etp,)
    return tuple(sorted({tp, own.etp})) if job.model.num_experts else (tp,)


def micro_batch_sizes(samples: int, *, own: int) -> tuple[int, ...]:
    """Sizes worth trying for so many samples on a replica: powers of two, quotients by them, and the user's own.

    Every number of micro-batches that is a power of two is reached, and so is every size that is one.
    """
    powers = [1 << exponent for exponent in range(samples.bit_length())]
    sizes = {power for power in powers if samples % power == 0}
    sizes |= {samples // power for power in sizes} | ({own} if samples % own == 0 else set())
    return tuple(sorted(sizes))


def group_sizes(job: Job) -> tuple[int, ...]:
    """Micro-batches that interleaving runs through a chunk at a time; 0 is Megatron's default."""
    return values(job, "microbatch_group_size", (0,))


def chunk_cuts(job: Job, pp: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Virtual stages and layers of each chunk: even ones, and the user's own cut where it has as many stages."""
    own = job.own
    per_stage, rest = divmod(job.model.num_layers, pp)
    if "layers_per_chunk" not in job.pinned or not own.layers_per_chunk:
        for vpp in values(job, "vpp", divisors(per_stage) if pp > 1 and not rest and per_stage else (1,)):
            yield vpp, ()
    if own.layers_per_chunk and pp == own.pp:
        yield own.vpp, own.layers_per_chunk


def states(rules: Rules, degrees: Degrees) -> Iterator[Saver]:
    """Sequence parallelism, distributed optimizer and overlap, the quickest first; without recompute."""
    job, on_cuda = rules.job, rules.device_kind == "cuda"
    divides = job.model.seq_length // degrees.cp % degrees.tp == 0
    pays = degrees.tp > 1 and on_cuda and (divides or bool(job.model.num_experts))
    sequence_parallel = degrees.tp > 1 and values(job, "sequence_parallel", (pays,))[0]
    sharded = (True, False) if degrees.dp * degrees.cp > 1 else (job.own.use_distributed_optimizer,)
    for use_distributed_optimizer in values(job, "use_distributed_optimizer", sharded):
        for grad_reduce, param_gather in _overlaps(job, use_distributed_optimizer, on_cuda=on_cuda):
            yield Saver(sequence_parallel, use_distributed_optimizer, grad_reduce, param_gather, NO_RECOMPUTE)


def recomputes(job: Job) -> tuple[Recompute, ...]:
    """What may be recomputed, the cheapest first."""
    options = [NO_RECOMPUTE, *([SELECTIVE] if selective_recompute_matters(job.model) else []), FULL, job.own.recompute]
    return values(job, "recompute", tuple(dict.fromkeys(options)))


def selective_recompute_matters(model: ModelSpec) -> bool:
    """Whether attention keeps its score matrices, so that recomputing them saves memory (not with flash or cuDNN)."""
    return model.transformer_impl == "local" or model.attention_backend in ("unfused", "local")


def _overlaps(job: Job, sharded: bool, *, on_cuda: bool) -> tuple[tuple[bool, bool], ...]:
    """Give the overlap flags as the user has them, as far as they go together, and both on where that pays."""
    own = job.own
    gather = own.overlap_param_gather and (sharded or "overlap_param_gather" in job.pinned)
    pairs = {(own.overlap_grad_reduce, gather)}
    if sharded and on_cuda:
        pairs.add((values(job, "overlap_grad_reduce", (True,))[0], values(job, "overlap_param_gather", (True,))[0]))
    return tuple(sorted(pairs, reverse=True))
