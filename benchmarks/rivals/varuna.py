"""Varuna: step time, micro-batch rule, feasibility and search (Athlur et al., EuroSys 2022, arXiv 2111.04007).

Re-derived from the authors' code (microsoft/varuna@a2145cc: varuna/auto_config.py, tools/simulator). It knows pipelines
and replicas only, always runs a stage's forward again before its backward (but for the last stage), takes the largest
micro-batch that it thinks fits, and prices every send at one of two figures, within a machine or between machines.
T = simulated pipeline + all-reduce. Kept: activations of micro-batches in flight are not counted. Left out: jitter,
which is drawn anew for every price.

Its search tries each PP that divides the layers: no tensor parallelism, full recompute always, and consecutive ranks
are consecutive stages, so pipelines are packed into hosts. Two things differ on Megatron: replicas must fill the
machines, so PP divides the GPUs too, and the micro-batch is the largest divisor of a replica's samples that Varuna lets
in.
"""

# W = ranks, S = slots, D = replicas, P = stages.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.rivals.inputs import UnitPrices, slot_of_rank
from benchmarks.rivals.pick import Pick, Placement, PlannerOptions, divisors, ranked, variant
from benchmarks.rivals.varuna_schedule import PipelineTimes, makespan_s
from pipette_launch.cost.communication.collectives import Fabric
from pipette_launch.cost.communication.exchanges import Groups
from pipette_launch.cost.layers import ends, kinds
from pipette_launch.cost.layers.block import residual_bytes
from pipette_launch.cost.layers.parameters import gradient_bytes_per_parameter, optimizer_bytes, stage_parameters
from pipette_launch.errors import PlanError
from pipette_launch.facts.cluster import Cluster
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import NO_RECOMPUTE, Cell, Layout, Recompute
from pipette_launch.facts.measurements import Measurements

NOTE = "Varuna: pp and the largest micro-batch that its check lets in, with full recompute and without tp."
FULL = Recompute(granularity="full", method="uniform", num_layers=1)


class VarunaPrices:
    """Varuna's step times of one job on one allocation; what layouts share is priced once."""

    def __init__(self, job: Job, measurements: Measurements) -> None:
        self._job = job
        self._measurements = measurements
        self._units = UnitPrices(job, measurements)
        self._fabric = Fabric(measurements.cluster, measurements.collectives)
        self._sends = _mean_sends(measurements.cluster)

    def step_time_s(self, layout: Layout, placement: Sequence[int] | None) -> float:
        """Predict seconds per step as Varuna does.

        Args:
            layout: pp, dp and micro-batch; recompute is always on.
            placement: RANK of each slot; None = torchrun's own.

        """
        job = self._job
        slot_W = slot_of_rank(layout, self._measurements, placement)
        forward, backward = self._units.in_torchrun_order(layout).stages_s(layout.stage_layers(job.model.num_layers))
        groups = Groups.of(layout)
        gradient_bytes = max(part.count for part in stage_parameters(job, layout)) * gradient_bytes_per_parameter(job)
        host_DP = self._fabric.host_S[slot_W[groups.grid_PDCT].reshape(layout.pp, layout.dp).T]
        microbatches = layout.num_microbatches(job.batch.global_batch_size)
        passes = {"forward_s": tuple(forward.tolist()), "backward_s": tuple(backward.tolist())}
        pipeline_s = max(
            makespan_s(PipelineTimes(**passes, hop_s=hops), microbatches) for hops in self._hops_s(layout, host_DP)
        )
        return pipeline_s + float(self._fabric.seconds_G("all_reduce", slot_W[groups.dp_cp], gradient_bytes).max())

    def _hops_s(self, layout: Layout, host_DP: NDArray[np.int64]) -> set[tuple[float, ...]]:
        """Price the hops of each pipeline: the mean send of all links within hosts, or of all between them."""
        size = residual_bytes(self._job, layout)
        within, between = (latency_s + size * byte_s for latency_s, byte_s in self._sends)
        hops_DP = np.where(host_DP[:, 1:] == host_DP[:, :-1], within, between)
        return {tuple(hops) for hops in hops_DP.tolist()}


def memory_bytes(job: Job, layout: Layout) -> int:
    """Bytes that Varuna's check sees: the fullest stage with one micro-batch's activations in it.

    Its profile gives each cut-point's peak and activations; a stage is the sum of peaks without the inputs, and one
    input. Priced from our own parts: unsharded states and all that the stage's layers keep.
    """
    plain = replace(layout, recompute=NO_RECOMPUTE)
    per_parameter = job.model.dtype_bytes + gradient_bytes_per_parameter(job)
    unsharded = replace(plain, use_distributed_optimizer=False)
    source = residual_bytes(job, plain)
    stages = []
    first = 0
    layers_of = layout.stage_layers(job.model.num_layers)
    for layers, parameters in zip(layers_of, stage_parameters(job, layout), strict=True):
        some = job.model.layer_kinds[first : first + layers]
        kept = sum(kinds.kept_bytes(job, plain, kind) - source for kind in some)
        kept_states, _ = optimizer_bytes(job, parameters.dense, parameters.expert, unsharded)
        states = parameters.count * per_parameter + int(kept_states)
        stages.append(states + kept + source)
        first += layers
    stages[-1] += ends.head_bytes(job, plain)
    return max(stages)


def largest_micro_batch(job: Job, layout: Layout, capacity_bytes: float) -> int:
    """Find the largest micro-batch that fits by `memory_bytes`, by bisection; Varuna tries no smaller one.

    Raises:
        PlanError: a micro-batch of one does not fit: Varuna has no tensor parallelism to fall back on.

    """
    most = max(job.batch.global_batch_size // layout.dp, 1)

    def fits(size: int) -> bool:
        return memory_bytes(job, replace(layout, micro_batch_size=size)) <= capacity_bytes

    if not fits(1):
        raise PlanError(
            f"Varuna cannot fit {layout.words()}: one sample a micro-batch needs "
            f"{memory_bytes(job, replace(layout, micro_batch_size=1))} bytes of {capacity_bytes:.0f}; take more stages"
        )
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _mean_sends(cluster: Cluster) -> tuple[tuple[float, float], tuple[float, float]]:
    """Mean latency and mean seconds per byte of all links within hosts, and of all between them; 0 for no link."""
    inside = [(np.array(links.latency_s), links.seconds_per_byte) for links in cluster.within_host]
    outside = [(np.array(cluster.between_hosts.latency_s), cluster.between_hosts.seconds_per_byte)]

    def mean(matrices: list[NDArray[np.float64]]) -> float:
        width = len(matrices[0])
        return float(np.mean(matrices, axis=0)[~np.eye(width, dtype=bool)].mean()) if width > 1 else 0.0

    def means(pairs: list[tuple[NDArray[np.float64], NDArray[np.float64]]]) -> tuple[float, float]:
        return mean([latency_s for latency_s, _ in pairs]), mean([byte_s for _, byte_s in pairs])

    return means(inside), means(outside)


def ranking(job: Job, measurements: Measurements, options: PlannerOptions) -> tuple[Pick, ...]:
    """List Varuna's configurations, fastest first by its simulator.

    Raises:
        PlanError: without TP, one sample fits on no number of stages.

    """
    return ranked(
        "Varuna", _picks(job, measurements, options), nothing="without tp one sample fits on no number of stages"
    )


def packed(layout: Layout) -> Placement:
    """Return the RANK of each slot where slots in a row are the stages of one pipeline."""
    return tuple(
        layout.rank_of(Cell(pp=slot % layout.pp, dp=slot // layout.pp, cp=0, tp=0)) for slot in range(layout.world_size)
    )


def _picks(job: Job, measurements: Measurements, options: PlannerOptions) -> Iterator[Pick]:
    prices = VarunaPrices(job, measurements)
    for layout in _space(job, measurements, options):
        placement = packed(layout)
        yield Pick(layout=layout, placement=placement, claimed_s=prices.step_time_s(layout, placement), note=NOTE)


def _space(job: Job, measurements: Measurements, options: PlannerOptions) -> Iterator[Layout]:
    layers, batch = job.model.num_layers, job.batch.global_batch_size
    world = measurements.cluster.num_slots
    for pp in divisors(layers):
        dp, rest = divmod(world, pp)
        # As many stages as cut-points are left out in its code too.
        if pp == layers > 1 or rest or batch % dp:
            continue
        one = variant(job, measurements, tp=1, pp=pp, dp=dp, micro_batch_size=1, recompute=FULL)
        if one is None:
            continue
        try:
            largest = largest_micro_batch(job, one, options.capacity_bytes)
        except PlanError:
            continue
        size = max(size for size in divisors(batch // dp) if size <= largest)
        layout = variant(job, measurements, tp=1, pp=pp, dp=dp, micro_batch_size=size, recompute=FULL)
        if layout is not None:
            yield layout
