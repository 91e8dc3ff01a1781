"""AMP (Li et al., NeurIPS 2022, arXiv 2210.07297): latency model T = T_pipe + T_dp, cut of the layers, and search.

Re-derived from the authors' code (DachengLi1/AMP@72eeea4: src/pipe.py, src/cost_homo.py, src/sa.py). Kept as it is:
backward is twice the forward, a node has one bandwidth to others and one within, the pipeline's communication is
charged once and one way, no latency, no recompute, no optimizer, and no notion of memory at all: every layout fits. Two
faults of its code are not kept, as they are not its model: the slowest link of a ring is the slowest of all, not the
last; and elements are as wide as the model's, not 4 bytes.

Its search tries every tp that divides a host's devices, every dp that divides the rest and every micro-batch that
divides a replica's samples; pp is what remains, and the stages come from its dynamic program. RANKs are as torchrun
gives them: its annealing of the placement exists in its code but is unused.
`pipette_planner.amp_ranking` is the other AMP, the one in Pipette's code.
"""

# U = units of AMP's layer list, E = ends of parts in it, N = hosts, S = slots, D = replicas, T = tensor-parallel ranks.

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.rivals.inputs import Array, UnitPrices, Units, slot_of_rank
from benchmarks.rivals.pick import Pick, PlannerOptions, divisors, ranked, tensor_sizes, torchrun_order, variant
from pipette_launch.cost.communication.exchanges import rank_grid
from pipette_launch.errors import FactError
from pipette_launch.facts.cluster import Cluster
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.measurements import Measurements
from pipette_launch.facts.model import ModelSpec

NOTE = "AMP: tp, dp, micro-batch, pp and uneven stages; memory is not asked for."
_BACKWARD = 3
"""Forward and backward over forward."""
_LAYER_WEIGHTS = 12
"""Parameters of a layer over h^2."""


def priced_s(job: Job, layout: Layout, priced: Units, seconds_per_byte_SS: Array, slot_W: NDArray[np.int64]) -> float:
    """T = T_pipe + T_dp, of units and links that are priced already.

    Args:
        job: the model and batch.
        layout: degrees and stages.
        priced: seconds of each unit of the model.
        seconds_per_byte_SS: of the links as AMP knows them.
        slot_W: the slot of each RANK.

    """
    forward, _ = priced.stages_s(layout.stage_layers(job.model.num_layers))
    slots_PDT = slot_W[rank_grid(layout)][:, :, 0, :]
    return pipeline_s(
        microbatches=layout.num_microbatches(job.batch.global_batch_size),
        stage_s=(_BACKWARD * forward).tolist(),
        cut_s=cuts_s(job.model, layout, seconds_per_byte_SS, slots_PDT),
    ) + data_parallel_s(job.model, layout, seconds_per_byte_SS, slots_PDT)


def own_cut(job: Job, layout: Layout, priced: Units) -> tuple[int, ...]:
    """Return the layers of each stage as AMP's dynamic program would cut them, empty where that is evenly.

    The program makes the slowest stage as fast as can be: every cut costs the same wherever between layers it lies, so
    its sum is least where its largest stage is. One micro-batch gives an even split. The embedding goes with the first
    layer and the head with the last.

    Raises:
        LayoutError: the batch does not divide.

    """
    layers = job.model.num_layers
    if layout.pp == 1 or layout.num_microbatches(job.batch.global_batch_size) == 1:
        short, rest = divmod(layers, layout.pp)
        return (short + 1,) * rest + (short,) * (layout.pp - rest) if rest else ()
    forward_s = priced.forward_s_U
    seconds = forward_s[1:-1].copy()
    seconds[0] += forward_s[0]
    seconds[-1] += forward_s[-1]
    cut = partition(seconds.tolist(), layout.pp)
    return cut if len(set(cut)) > 1 else ()


def partition(seconds: Sequence[float], stages: int) -> tuple[int, ...]:
    """Cut a list into contiguous parts, none empty, so that the largest sum is least.

    Returns:
        How many entries each part has; among equally good cuts, the one whose later parts are longest.

    Raises:
        FactError: fewer entries than parts.

    """
    if not 1 <= stages <= len(seconds):
        raise FactError(f"{len(seconds)} layers cannot make {stages} stages; take between 1 and {len(seconds)}")
    sums = np.concatenate([[0.0], np.cumsum(seconds)])
    count = len(seconds)
    place = np.arange(count + 1)
    # Cost of one part from entry `start` (row) to before entry `end` (column).
    part_EE = np.where(place[:, None] < place, sums - sums[:, None], math.inf)
    least = np.where(place > 0, sums, math.inf)  # of the first i entries in one part
    starts = []
    for _ in range(1, stages):
        worst_EE = np.maximum(least[:, None], part_EE)
        start = worst_EE.argmin(axis=0)
        least = worst_EE[start, place]
        starts.append(start)
    bounds = [count]
    for start in reversed(starts):
        bounds.append(int(start[bounds[-1]]))
    bounds.append(0)
    return tuple(high - low for low, high in zip(bounds[1:], bounds[:-1], strict=True))[::-1]


def pipeline_s(*, microbatches: int, stage_s: Sequence[float], cut_s: Sequence[float]) -> float:
    """T_pipe = (B - 1)*max stage + sum of stages + sum of cuts."""
    return (microbatches - 1) * max(stage_s) + sum(stage_s) + sum(cut_s)


def cuts_s(model: ModelSpec, layout: Layout, seconds_per_byte_SS: Array, slots_PDT: NDArray[np.int64]) -> list[float]:
    """c: an activation, mbs*s*h elements, over the slowest tensor-parallel lane, averaged over the replicas.

    Args:
        model: its sequence and width make the activation.
        layout: its micro-batch.
        seconds_per_byte_SS: of the links, from the slot of the row.
        slots_PDT: the slot of each stage, replica and tensor-parallel rank.

    Returns:
        Seconds of each cut between neighbouring stages.

    """
    size = layout.micro_batch_size * model.seq_length * model.hidden_size * model.dtype_bytes
    hops_PDT = seconds_per_byte_SS[slots_PDT[:-1], slots_PDT[1:]]
    means: list[float] = (size * hops_PDT.max(axis=2).mean(axis=1)).tolist()
    return means


def data_parallel_s(
    model: ModelSpec, layout: Layout, seconds_per_byte_SS: Array, slots_PDT: NDArray[np.int64]
) -> float:
    """T_dp: the slowest over stages and lanes of 2(d - 1)/d * P over the slowest link of the ring.

    P = h*V/t where there is an embedding (once, both at one stage or not) + 12*h^2/t for each layer.

    Args:
        model: its parameters.
        layout: degrees and stages.
        seconds_per_byte_SS: of the links, from the slot of the row.
        slots_PDT: the slot of each stage, replica and tensor-parallel rank.

    """
    if layout.dp == 1:
        return 0.0
    h, last = model.hidden_size, layout.pp - 1
    vocabulary = h * model.padded_vocab_size(layout.tp)
    ring_PDT = seconds_per_byte_SS[slots_PDT, np.roll(slots_PDT, -1, axis=1)]
    share = 2 * (layout.dp - 1) / layout.dp * model.dtype_bytes / layout.tp
    return max(
        share * ((vocabulary if rank in (0, last) else 0) + _LAYER_WEIGHTS * h * h * layers) * float(rings.max())
        for rank, (layers, rings) in enumerate(zip(layout.stage_layers(model.num_layers), ring_PDT, strict=True))
    )


def node_seconds_per_byte(cluster: Cluster) -> Array:
    """1 / bandwidth between slots as AMP knows it: each node has one figure to others and one within.

    A node's figures are its best links'; between two nodes the lower of both counts.
    """
    rate_NN = cluster.between_hosts.bandwidth_bytes_per_s
    out_N = np.maximum(rate_NN.max(axis=1), rate_NN.max(axis=0))
    in_N = np.array([links.bandwidth_bytes_per_s.max() for links in cluster.within_host])
    host_S = np.arange(cluster.num_slots) // cluster.devices_per_host
    same_SS = host_S[:, None] == host_S[None, :]
    rate_SS = np.where(same_SS, in_N[host_S][:, None], np.minimum(out_N[host_S][:, None], out_N[host_S][None, :]))
    seconds = np.zeros_like(rate_SS)
    np.divide(1.0, rate_SS, out=seconds, where=rate_SS > 0)
    return seconds


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
    seconds_per_byte_SS = node_seconds_per_byte(measurements.cluster)
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
            cuts[key] = own_cut(job, even, units) if cuts_freely else even.layers_per_chunk
        layout = replace(even, layers_per_chunk=cuts[key])
        slot_W = slot_of_rank(layout, measurements, None)
        seconds = priced_s(job, layout, units, seconds_per_byte_SS, slot_W)
        yield Pick(layout=layout, placement=placement, claimed_s=seconds, note=NOTE)
