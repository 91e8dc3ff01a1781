"""Every layout that Megatron allows for a job, and how many fell out for which reason."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from pipette_launch.facts import ComputeCase, Job, Layout, ModelSpec, Recompute
from pipette_launch.search.rules import Degrees, Rules

T = TypeVar("T")

NO_RECOMPUTE = Recompute(granularity="none")
SELECTIVE = Recompute(granularity="selective", modules=("core_attn",))
FULL = Recompute(granularity="full", method="uniform", num_layers=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Enumeration:
    """The layouts to look at, the user's own first, and the combinations that Megatron refuses."""

    layouts: tuple[Layout, ...]
    dropped: dict[str, int]
    """Combinations by the first constraint they break; degrees that break one count once, whatever could follow."""
    own_fault: str | None
    """The constraint that the user's own layout breaks, if any."""


def layouts(job: Job, *, world_size: int, devices_per_host: int, device_kind: str) -> Enumeration:
    """Enumerate every legal layout of a job, the user's own first.

    TP beyond `devices_per_host` is legal in Megatron, so it stays in, after the layouts that keep TP in a host; the
    cost model prices its slow links.

    Args:
        job: the model, the batch, the user's own layout and its pins.
        world_size: ranks of the job.
        devices_per_host: slots of one host.
        device_kind: `cuda` or `cpu`.

    """
    rules = Rules.of(job, device_kind=device_kind)
    dropped: Counter[str] = Counter()
    found = dict.fromkeys(_legal(rules, world_size, dropped))
    found.pop(job.own, None)
    others = sorted(found, key=lambda layout: layout.tp > devices_per_host)
    return Enumeration(layouts=(job.own, *others), dropped=dict(dropped.most_common()), own_fault=rules.fault(job.own))


def compute_cases(candidates: tuple[Layout, ...]) -> tuple[ComputeCase, ...]:
    """Name the distinct shapes of computation that layouts need, most promising first.

    The first layout (the user's own) comes first: nothing can be compared without it. Then the rest by how many
    doublings they lie from one tensor rank, one context rank and micro-batches of two, where jobs that fit run best;
    those that more layouts share win ties.
    """
    count = Counter(
        ComputeCase(tp=layout.tp, cp=layout.cp, micro_batch_size=layout.micro_batch_size) for layout in candidates
    )
    own = next(iter(count), None)

    def doublings(case: ComputeCase) -> float:
        return math.log2(case.tp) + math.log2(case.cp) + abs(math.log2(case.micro_batch_size) - 1)

    return tuple(sorted(count, key=lambda case: (case != own, doublings(case), -count[case], case)))


def micro_batch_sizes(samples: int, *, own: int) -> tuple[int, ...]:
    """Sizes worth trying for so many samples on a replica: powers of two, quotients by them, and the user's own.

    Every number of micro-batches that is a power of two is reached, and so is every size that is one.
    """
    powers = [1 << exponent for exponent in range(samples.bit_length())]
    sizes = {power for power in powers if samples % power == 0}
    sizes |= {samples // power for power in sizes} | ({own} if samples % own == 0 else set())
    return tuple(sorted(sizes))


def selective_recompute_matters(model: ModelSpec) -> bool:
    """Whether attention keeps its score matrices, so that recomputing them saves memory (not with flash or cuDNN)."""
    return model.transformer_impl == "local" or model.attention_backend in ("unfused", "local")


def _legal(rules: Rules, world_size: int, dropped: Counter[str]) -> Iterator[Layout]:
    for degrees in _degrees(rules.job, world_size):
        fault = rules.degrees_fault(degrees)
        if fault:
            dropped[fault] += 1
            continue
        for cut in _cut(rules, degrees, dropped):
            for layout in _savers(rules.job, cut, rules.device_kind):
                fault = rules.state_fault(layout) or rules.recompute_fault(layout)
                if fault:
                    dropped[fault] += 1
                else:
                    yield layout


def _degrees(job: Job, world_size: int) -> Iterator[Degrees]:
    experts = job.model.num_experts
    for tp in _values(job, "tp", _divisors(world_size)):
        for pp in _values(job, "pp", _divisors(world_size)):
            for cp in _values(job, "cp", _divisors(world_size)):
                dp, rest = divmod(world_size, tp * pp * cp)
                if rest or dp not in _values(job, "dp", (dp,)):
                    continue
                for ep in _values(job, "ep", _divisors(experts) if experts else (1,)):
                    for etp in _expert_tensor_sizes(job, tp):
                        yield Degrees(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, etp=etp)


def _expert_tensor_sizes(job: Job, tp: int) -> tuple[int, ...]:
    """Keep ETP as the user has it: the same number, or Megatron's default, which follows TP."""
    own = job.own
    if "etp" in job.pinned or own.etp != own.tp:
        return (own.etp,)
    return tuple(sorted({tp, own.etp})) if job.model.num_experts else (tp,)


def _cut(rules: Rules, degrees: Degrees, dropped: Counter[str]) -> Iterator[Layout]:
    """Choose virtual stages and micro-batches."""
    job, own = rules.job, rules.job.own
    samples = job.batch.global_batch_size // degrees.dp
    sizes = micro_batch_sizes(samples, own=own.micro_batch_size) if samples else (1,)
    for vpp, layers_per_chunk in _chunks(job, degrees.pp):
        fault = rules.chunks_fault(degrees.pp, vpp, layers_per_chunk)
        if fault:
            dropped[fault] += 1
            continue
        for micro_batch_size in _values(job, "micro_batch_size", sizes):
            layout = Layout(
                **degrees._asdict(),
                vpp=vpp,
                microbatch_group_size=_values(job, "microbatch_group_size", (0,))[0],
                layers_per_chunk=layers_per_chunk,
                micro_batch_size=micro_batch_size,
                use_tp_pp_dp_mapping=own.use_tp_pp_dp_mapping,
            )
            fault = rules.batch_fault(layout)
            if fault:
                dropped[fault] += 1
            else:
                yield layout


def _chunks(job: Job, pp: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Virtual stages and layers of each chunk: even ones, and the user's own cut where it has as many stages."""
    own = job.own
    per_stage, rest = divmod(job.model.num_layers, pp)
    if "layers_per_chunk" not in job.pinned or not own.layers_per_chunk:
        for vpp in _values(job, "vpp", _divisors(per_stage) if pp > 1 and not rest else (1,)):
            yield vpp, ()
    if own.layers_per_chunk and pp == own.pp:
        yield own.vpp, own.layers_per_chunk


def _savers(job: Job, cut: Layout, device_kind: str) -> Iterator[Layout]:
    """Choose sequence parallelism, distributed optimizer, overlap and recompute."""
    on_cuda = device_kind == "cuda"
    divides = job.model.seq_length // cut.cp % cut.tp == 0
    pays = cut.tp > 1 and on_cuda and (divides or bool(job.model.num_experts))
    sequence_parallel = cut.tp > 1 and _values(job, "sequence_parallel", (pays,))[0]
    sharded = (False, True) if cut.dp * cut.cp > 1 else (job.own.use_distributed_optimizer,)
    for use_distributed_optimizer in _values(job, "use_distributed_optimizer", sharded):
        for grad_reduce, param_gather in _overlaps(job, use_distributed_optimizer, on_cuda=on_cuda):
            for recompute in _recomputes(job):
                yield replace(
                    cut,
                    sequence_parallel=sequence_parallel,
                    use_distributed_optimizer=use_distributed_optimizer,
                    overlap_grad_reduce=grad_reduce,
                    overlap_param_gather=param_gather,
                    recompute=recompute,
                )


def _overlaps(job: Job, sharded: bool, *, on_cuda: bool) -> tuple[tuple[bool, bool], ...]:
    """Give the overlap flags as the user has them, as far as they go together, and both on where that pays."""
    own = job.own
    gather = own.overlap_param_gather and (sharded or "overlap_param_gather" in job.pinned)
    pairs = {(own.overlap_grad_reduce, gather)}
    if sharded and on_cuda:
        pairs.add((_values(job, "overlap_grad_reduce", (True,))[0], _values(job, "overlap_param_gather", (True,))[0]))
    return tuple(sorted(pairs))


def _recomputes(job: Job) -> tuple[Recompute, ...]:
    options = [NO_RECOMPUTE, *([SELECTIVE] if selective_recompute_matters(job.model) else []), FULL, job.own.recompute]
    return _values(job, "recompute", tuple(dict.fromkeys(options)))


def _values(job: Job, field: str, options: tuple[T, ...]) -> tuple[T, ...]:
    """What a field may be: the options, or the user's own value where it is pinned."""
    return (getattr(job.own, field),) if field in job.pinned else options


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(divisor for divisor in range(1, number + 1) if number % divisor == 0)
