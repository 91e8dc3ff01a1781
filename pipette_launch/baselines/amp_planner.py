"""AMP's search (Li et al., NeurIPS 2022): every TP, DP, micro-batch and PP, each with its own cut of the layers.

Re-derived from facts pipette.md section 9: tp divides a host's devices, dp divides the rest, the micro-batch divides a
replica's samples, pp is what remains; the stages come from its dynamic program; sort by T. Nothing is asked of memory.
RANKs are as torchrun gives them: its annealing of the placement exists in its code but is unused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pipette_launch.baselines import amp
from pipette_launch.baselines.inputs import UnitPrices, slot_of_rank
from pipette_launch.baselines.pick import (
    Pick,
    PlannerOptions,
    divisors,
    ranked,
    tensor_sizes,
    torchrun_order,
    variant,
)
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.measurements import Measurements

NOTE = "AMP: tp, dp, micro-batch, pp and uneven stages; memory is not asked for."


def ranking(job: Job, measurements: Measurements, options: PlannerOptions) -> tuple[Pick, ...]:
    """List AMP's configurations, fastest first by its model.

    Raises:
        PlanError: nothing divides, or nothing was measured.

    """
    del options
    return ranked("AMP", _picks(job, measurements), nothing="no degrees divide devices, heads and batch")


def space(job: Job, measurements: Measurements) -> Iterator[Layout]:
    """Every combination that divides, cut evenly or not yet."""
    world = measurements.cluster.num_slots
    for tp in tensor_sizes(job, measurements):
        for dp in divisors(world // tp):
            samples, rest = divmod(job.batch.global_batch_size, dp)
            pp = world // tp // dp
            if rest or pp > job.model.num_layers:
                continue
            for size in divisors(samples):
                layout = variant(job, measurements, tp=tp, pp=pp, dp=dp, micro_batch_size=size)
                if layout is not None:
                    yield layout


def _picks(job: Job, measurements: Measurements) -> Iterator[Pick]:
    prices = UnitPrices(job, measurements)
    seconds_per_byte_SS = amp.node_seconds_per_byte(measurements.cluster)
    placement = torchrun_order(measurements.cluster.num_slots)
    cuts: dict[tuple[int, int, int, bool], tuple[int, ...]] = {}
    for even in space(job, measurements):
        cuts_freely = "layers_per_chunk" not in job.pinned
        if not cuts_freely and job.model.num_layers % even.pp:
            continue
        units = prices.in_torchrun_order(even)
        is_one = even.num_microbatches(job.batch.global_batch_size) == 1
        key = (even.tp, even.pp, even.micro_batch_size, is_one)
        if key not in cuts:
            cuts[key] = amp.own_cut(job, even, units) if cuts_freely else even.layers_per_chunk
        layout = replace(even, layers_per_chunk=cuts[key])
        slot_W = slot_of_rank(layout, measurements, None)
        seconds = amp.priced_s(job, layout, units, seconds_per_byte_SS, slot_W)
        yield Pick(layout=layout, placement=placement, claimed_s=seconds, note=NOTE)
