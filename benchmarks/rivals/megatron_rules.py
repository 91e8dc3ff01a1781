"""Megatron's rules of thumb, as NVIDIA writes them down; nothing is searched and nothing but layers is measured.

- "Begin with data parallelism only, add tensor parallelism if the model doesn't fit, add pipeline parallelism for very
  large models" (Megatron-LM core_v0.16.1, docs/user-guide/parallelism-guide.md, Start Simple): the smallest TP up to a
  host's devices that fits, then a host's devices and the smallest PP that does; the same in Narayanan et al. 2021
  (arXiv 2104.04473), takeaway 1.
- Sequence parallelism always with TP; the distributed optimizer and overlap of its communication always (same guide).
- Experts: expert before tensor parallelism, within the fastest links; then PP, and TP last; never slices of experts
  (Megatron-LM core_v0.16.1, core/transformer/moe/README.md).
- As many virtual stages as the layers and the micro-batches allow where there is a pipeline (same README).
- Recompute for extreme cases (same guides): only where nothing fits without; selective before full, with experts their
  activations, norms and the projections from latents.
- Micro-batch b: the least of (b'/b + p - 1)*(t_f(b) + t_b(b)), b' samples on a replica (Narayanan et al. 2021, section
  3.4), over the powers of two that fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.rivals.inputs import UnitPrices
from benchmarks.rivals.pick import (
    Pick,
    PlannerOptions,
    device_peak_bytes,
    divisors,
    tensor_sizes,
    torchrun_order,
    variant,
)
from pipette_launch.cost.layers.attention import is_flash
from pipette_launch.errors import PlanError
from pipette_launch.facts.co_location import Domains
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import NO_RECOMPUTE, Layout, Recompute
from pipette_launch.facts.measurements import Measurements

NOTE = "Megatron's rules: the smallest TP in a host, then the smallest PP that fits; micro-batch by its formula."
ATTENTION = Recompute(granularity="selective", modules=("core_attn",))
FULL = Recompute(granularity="full", method="uniform", num_layers=1)


def ranking(job: Job, measurements: Measurements, options: PlannerOptions) -> tuple[Pick, ...]:
    """List what fits in the order of the rules, in torchrun's order of ranks.

    Our memory model and margin decide if a layout fits, in place of a trial run.

    Raises:
        PlanError: nothing fits, or nothing was measured.

    """
    found = tuple(_picks(job, measurements, options))
    if not found:
        raise PlanError(
            f"Megatron's rules find no layout: nothing fits {options.capacity_bytes} bytes even with full recompute"
        )
    return found


def _picks(job: Job, measurements: Measurements, options: PlannerOptions) -> Iterator[Pick]:
    prices = UnitPrices(job, measurements)
    placement = torchrun_order(measurements.cluster.num_slots)
    for recompute in _recomputes(job):
        for degrees in _degrees(job, measurements):
            sized = {
                layout: batch_time_s(job, layout, prices)
                for layout in _sizes(job, measurements, degrees, recompute)
                if device_peak_bytes(job, layout, measurements) <= (1 - options.memory_margin) * options.capacity_bytes
            }
            if sized:
                layout = min(sized, key=lambda layout: sized[layout])
                yield Pick(layout=layout, placement=placement, claimed_s=sized[layout], note=NOTE)


def batch_time_s(job: Job, layout: Layout, prices: UnitPrices) -> float:
    """(b'/b + (p - 1)/v)*(t_f + t_b) of the slowest rank, what recompute runs again included."""
    forward, backward = prices.in_torchrun_order(layout).stages_s(layout.stage_layers(job.model.num_layers))
    again = forward if layout.recompute.granularity == "full" else 0.0
    microbatches = layout.num_microbatches(job.batch.global_batch_size)
    return (microbatches + (layout.pp - 1) / layout.vpp) * float((forward + backward + again).max())


def _recomputes(job: Job) -> Iterator[Recompute]:
    """No recompute, then modules that free many bytes for little time, then all."""
    yield NO_RECOMPUTE
    if not is_flash(job.model):
        yield ATTENTION
    if job.model.num_experts:
        latent = ("mla_up_proj",) if job.model.latent_attention else ()
        yield Recompute(granularity="selective", modules=("layernorm", *latent, "moe_act"))
    yield FULL


def _degrees(job: Job, measurements: Measurements) -> Iterator[tuple[int, int, int]]:
    """(tp, pp, ep) in the order of the rules: TP or EP rising, then PP with the largest; with experts TP comes last."""
    slots, model = measurements.cluster.num_slots, job.model
    sizes = tensor_sizes(job, measurements)
    if not model.num_experts:
        yield from ((tp, 1, 1) for tp in sizes)
        yield from ((sizes[-1], pp, 1) for pp in _stages(job, slots // sizes[-1]))
        return
    near = min(Domains.of(measurements.cluster).domain_devices)
    for tp in sizes:
        experts = [ep for ep in divisors(model.num_experts) if ep * tp <= near and slots // tp % ep == 0]
        yield from ((tp, 1, ep) for ep in experts)
        yield from (
            (tp, pp, ep) for pp in _stages(job, slots // tp) for ep in experts[-1:] if slots // tp // pp % ep == 0
        )


def _stages(job: Job, most: int) -> Iterator[int]:
    return (pp for pp in divisors(most) if pp > 1 and job.model.num_layers % pp == 0)


def _sizes(
    job: Job, measurements: Measurements, degrees: tuple[int, int, int], recompute: Recompute
) -> Iterator[Layout]:
    """Powers of two as micro-batches, with the flags that the guides ask for."""
    tp, pp, ep = degrees
    dp = measurements.cluster.num_slots // tp // pp
    samples, rest = divmod(job.batch.global_batch_size, dp)
    advised = replace(job, own=_with_advice(job, measurements, dp))
    size = 1
    while not rest and samples and samples % size == 0:
        layout = variant(advised, measurements, tp=tp, pp=pp, dp=dp, micro_batch_size=size, recompute=recompute, ep=ep)
        if layout is not None:
            yield layout
            # One layer in each virtual stage, where the micro-batches go through them in groups of pp.
            if pp > 1 and samples // size % pp == 0 and "vpp" not in job.pinned:
                yield replace(layout, vpp=job.model.num_layers // pp)
        size *= 2


def _with_advice(job: Job, measurements: Measurements, dp: int) -> Layout:
    """The user's own layout with the flags that the guide asks for, but for those that are pinned."""
    on_cuda = measurements.cluster.device_kind == "cuda"
    sharded = dp > 1 and job.optimizer == "adam"
    own, pinned = job.own, job.pinned

    def flag(name: str, *, advised: bool) -> bool:
        return bool(getattr(own, name)) if name in pinned else advised

    return replace(
        own,
        sequence_parallel=flag("sequence_parallel", advised=on_cuda),
        use_distributed_optimizer=flag("use_distributed_optimizer", advised=sharded),
        overlap_grad_reduce=flag("overlap_grad_reduce", advised=on_cuda and dp > 1),
        overlap_param_gather=flag("overlap_param_gather", advised=on_cuda and sharded),
    )
