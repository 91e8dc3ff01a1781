"""Pipette's search (DATE 2024), and that of the AMP in its code: the loops that are commented out there, as intended.

Re-derived from facts pipette.md sections 2 to 4. pp divides the hosts and the layers, tp is a power of two within a
host, the micro-batch is 1, 2, 4 or 8. Pipette drops what its memory estimate puts over 85 % of the device (61 % on
V100), anneals the order of the hosts for every candidate and takes the least of its latency model. Its network ships
without weights, so the estimate is our own closed form; the AMP arm asks nothing of memory and maps nothing.
"""

# R = pipelines of hosts, S = stages, N = hosts.

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from pipette_launch.baselines.inputs import Array, UnitPrices
from pipette_launch.baselines.pick import (
    Pick,
    Placement,
    PlannerOptions,
    device_peak_bytes,
    divisors,
    ranked,
    tensor_sizes,
    torchrun_order,
    variant,
)
from pipette_launch.baselines.pipette_annealer import State, anneal
from pipette_launch.baselines.pipette_latency import Messages, amp_arm, nominal_seconds_per_byte, pipette_s
from pipette_launch.baselines.placers import in_host_order
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.machines.cluster import Cluster
from pipette_launch.facts.measurements import Measurements

AMP_NOTE = "AMP as in Pipette's code: tp, pp and micro-batch on nominal links; memory is not asked for."
NOTE = "Pipette: tp, pp, micro-batch and an annealed order of hosts; memory by our closed form with its limits."
MICRO_BATCH_SIZES = (1, 2, 4, 8)
MEMORY_SHARES = {"V100": 20000 / 32768}
"""Its limit over the device's memory, by the beginning of the device's name."""
MEMORY_SHARE = 70000 / 81920
"""On A100-80GB, and here on everything else."""

_MS = 1e3


def amp_ranking(job: Job, measurements: Measurements, options: PlannerOptions) -> tuple[Pick, ...]:
    """List the configurations of the AMP arm, fastest first by its model, in torchrun's order.

    Raises:
        PlanError: nothing divides, or nothing was measured.

    """
    del options
    return ranked("AMP", _amp_picks(job, measurements), nothing="no pp divides hosts and layers")


def ranking(job: Job, measurements: Measurements, options: PlannerOptions) -> tuple[Pick, ...]:
    """List Pipette's configurations with their mappings, fastest first by its model.

    It anneals every candidate; here those are left in torchrun's order that would lose with the best link everywhere,
    so the first pick is the same and the budget goes to those that matter.

    Raises:
        PlanError: nothing divides, fits its memory limit, or was measured.

    """
    picks = _picks(job, measurements, options)
    return ranked("Pipette", picks, nothing="no pp, tp and micro-batch that divide stay below its memory limit")


def space(job: Job, measurements: Measurements) -> Iterator[Layout]:
    """Its loops: pp over the divisors of hosts and layers, tp, micro-batch."""
    cluster, model = measurements.cluster, job.model
    for pp in divisors(len(cluster.hosts)):
        if model.num_layers % pp:
            continue
        for tp in tensor_sizes(job, measurements):
            dp = cluster.num_slots // tp // pp
            for size in MICRO_BATCH_SIZES:
                if tp & (tp - 1) or job.batch.global_batch_size % (dp * size):
                    continue
                layout = variant(job, measurements, tp=tp, pp=pp, dp=dp, micro_batch_size=size)
                if layout is not None:
                    yield layout


def placement_of(state_RS: State, devices_per_host: int) -> Placement:
    """Return the RANK of each slot: host state[row][stage] takes the ranks of stock host stage*R + row."""
    return in_host_order(state_RS.T.ravel().tolist(), devices_per_host)


def _amp_picks(job: Job, measurements: Measurements) -> Iterator[Pick]:
    cluster = measurements.cluster
    prices = UnitPrices(job, measurements)
    within, between = nominal_seconds_per_byte(cluster)
    is_one_host = len(cluster.hosts) == 1
    for layout in space(job, measurements):
        forward, _ = prices.in_torchrun_order(layout).stages_s(layout.stage_layers(job.model.num_layers))
        messages = Messages.of(job.model, layout)
        ring = 2 * (layout.dp - 1) / layout.dp * messages.data_parallel
        seconds = amp_arm(
            stages=layout.pp,
            microbatches=layout.num_microbatches(job.batch.global_batch_size),
            forward_s=float(forward.max()),
            hop_s=messages.pipeline * (within if is_one_host else between),
            data_parallel_s=ring * (within if is_one_host else max(within, between)),
        )
        yield Pick(layout=layout, placement=torchrun_order(layout.world_size), claimed_s=seconds, note=AMP_NOTE)


def _picks(job: Job, measurements: Measurements, options: PlannerOptions) -> Iterator[Pick]:
    prices, links = UnitPrices(job, measurements), HostLinks.of(measurements.cluster)
    name = measurements.cluster.hosts[0].devices[0].name
    share = next((share for start, share in MEMORY_SHARES.items() if start in name), MEMORY_SHARE)
    models = [
        _Model.of(job, layout, prices, links)
        for layout in space(job, measurements)
        if device_peak_bytes(job, layout, measurements) < share * options.capacity_bytes
    ]
    least = float("inf")
    for model in sorted(models, key=_Model.bound_s):
        pipelines, stages = len(links.byte_s_NN) // model.layout.pp, model.layout.pp
        state_RS = np.arange(pipelines * stages).reshape(stages, pipelines).T
        if model.bound_s() < least:
            state_RS = anneal(
                model.cost_ms(),
                pipelines=pipelines,
                stages=stages,
                seed=options.seed,
                budget_s=options.budget_s,
                clock=options.clock,
            ).state_PS
        seconds = model.seconds(state_RS)
        least = min(least, seconds)
        placement = placement_of(state_RS, measurements.cluster.devices_per_host)
        yield Pick(layout=model.layout, placement=placement, claimed_s=seconds, note=NOTE)


@dataclass(frozen=True, kw_only=True, eq=False)
class HostLinks:
    """1 / bandwidth as Pipette measures it: one figure for each pair of hosts, and one within each."""

    byte_s_NN: Array
    best: float
    within: float
    """Of the slowest link within any host."""

    @classmethod
    def of(cls, cluster: Cluster) -> HostLinks:
        """Read them off a cluster."""
        between = cluster.between_hosts.seconds_per_byte()
        outside = between[~np.eye(len(between), dtype=bool)]
        return cls(
            byte_s_NN=between,
            best=float(outside.min()) if outside.size else 0.0,
            within=max(float(links.seconds_per_byte().max()) for links in cluster.within_host),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Model:
    """Pipette's latency model of one candidate as a function of its state."""

    layout: Layout
    links: HostLinks
    microbatches: int
    pass_s: float
    hop_bytes: float
    """There and back."""
    out_bytes: float
    """2(d - 1)/d of a replica's message around the hosts of the first stage."""
    inner_s: float
    """T_in, which no state changes."""

    @classmethod
    def of(cls, job: Job, layout: Layout, prices: UnitPrices, links: HostLinks) -> _Model:
        """Price what the state does not change."""
        forward, backward = prices.in_torchrun_order(layout).stages_s(layout.stage_layers(job.model.num_layers))
        again = forward if layout.recompute.granularity == "full" else 0.0
        messages = Messages.of(job.model, layout)
        outer = len(links.byte_s_NN) // layout.pp
        inner = layout.dp // outer
        return cls(
            layout=layout,
            links=links,
            microbatches=layout.num_microbatches(job.batch.global_batch_size),
            pass_s=float((forward + backward + again).max()),
            hop_bytes=2 * messages.pipeline,
            out_bytes=2 * (outer - 1) / outer * messages.data_parallel,
            inner_s=2 * (inner - 1) / inner * messages.data_parallel * links.within,
        )

    def bound_s(self) -> float:
        """No state is faster: the best link everywhere."""
        return self._total_s((self.layout.pp - 1) * self.links.best, self.links.best)

    def seconds(self, state_RS: State) -> float:
        """T_Pipette of a state."""
        byte_s_NN, first = self.links.byte_s_NN, state_RS[:, 0]
        hops = float(byte_s_NN[state_RS[:, :-1], state_RS[:, 1:]].sum(axis=1).max())
        return self._total_s(hops, float(byte_s_NN[first, np.roll(first, -1)].max()))

    def cost_ms(self) -> Callable[[State], float]:
        """What it anneals: T_PP + T_out + T_in, without the rounds of the latency model."""
        byte_s_NN = self.links.byte_s_NN
        onward = np.roll(np.arange(len(byte_s_NN) // self.layout.pp), -1)

        def cost(state_RS: State) -> float:
            hops = byte_s_NN[state_RS[:, :-1], state_RS[:, 1:]].sum(axis=1).max()
            first = state_RS[:, 0]
            ring = byte_s_NN[first, first[onward]].max()
            return float(self.hop_bytes * hops + self.out_bytes * ring + self.inner_s) * _MS

        return cost

    def _total_s(self, hops: float, ring: float) -> float:
        return pipette_s(
            stages=self.layout.pp,
            microbatches=self.microbatches,
            pass_s=self.pass_s,
            transfer_s=self.hop_bytes * hops,
            data_parallel_s=self.out_bytes * ring + self.inner_s,
        )
