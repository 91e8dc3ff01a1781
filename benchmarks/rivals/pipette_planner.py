"""Pipette's latency model and search (DATE 2024, arXiv 2405.18093).

Re-derived from strategy/merge4/llm_train_strategy_assignment_total_v3.py of yimjinkyu1/date2024_pipette@a2b0683. f and
b are one forward and backward of one micro-batch on one stage, with the tensor-parallel collectives inside; here those
of the slowest stage, priced as ours are. Kept as they are: messages not divided by tp, 16 h^2 parameters a layer,
leftover micro-batches that vanish, no latency, no overlap, no optimizer.

The search follows loops that are commented out there. pp divides the hosts and the layers, tp is a power of two
within a host, the micro-batch is 1, 2, 4 or 8. Pipette drops what its memory estimate puts over 85 % of the device (61
% on V100), anneals the order of the hosts for every candidate and takes the least of its latency model. Its network
ships without weights, so the estimate is our own closed form.
"""

# R = pipelines of hosts, S = stages, N = hosts, D = devices of one host.

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.rivals.inputs import Array, UnitPrices
from benchmarks.rivals.pick import (
    Pick,
    Placement,
    PlannerOptions,
    device_peak_bytes,
    divisors,
    ranked,
    tensor_sizes,
    variant,
)
from benchmarks.rivals.pipette_annealer import State, anneal
from pipette_launch.facts.cluster import Cluster
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.measurements import Measurements
from pipette_launch.facts.model import ModelSpec

NOTE = "Pipette: tp, pp, micro-batch and an annealed order of hosts; memory by our closed form with its limits."
MICRO_BATCH_SIZES = (1, 2, 4, 8)
MEMORY_SHARES = {"V100": 20000 / 32768}
"""Its limit over the device's memory, by the beginning of the device's name."""
MEMORY_SHARE = 70000 / 81920
"""On A100-80GB, and here on everything else."""

_GPT_WEIGHTS = 16
"""Parameters of a layer over h^2 in Pipette's code; a GPT has about 12."""
_MS = 1e3


@dataclass(frozen=True, kw_only=True, slots=True)
class Messages:
    """Bytes that Pipette counts."""

    pipeline: float
    """mbs*s*h*e, not divided by tp."""
    data_parallel: float
    """e*(h*V + L_s*16*h^2)/tp: an embedding on every stage."""

    @classmethod
    def of(cls, model: ModelSpec, layout: Layout) -> Messages:
        """Count them for a layout of even stages."""
        h, element = model.hidden_size, model.dtype_bytes
        stage_layers = model.num_layers // layout.pp
        parameters = h * model.padded_vocab_size(layout.tp) + stage_layers * _GPT_WEIGHTS * h * h
        return cls(
            pipeline=layout.micro_batch_size * model.seq_length * h * element,
            data_parallel=element * parameters / layout.tp,
        )


def pipette_s(
    *, stages: int, microbatches: int, pass_s: float, transfer_s: float, data_parallel_s: float = 0.0
) -> float:
    """q*(p*F + T_PP) + (p - 1)*F + T_DP with q = n // p, or (p*F + T_PP) + (n - 1)*F + T_DP where q = 0.

    T_PP, a round trip over all links, is the hidden critical path: every p micro-batches expose one.

    Args:
        stages: p.
        microbatches: n.
        pass_s: F, forward and backward of one micro-batch on one stage.
        transfer_s: T_PP.
        data_parallel_s: T_DP.

    """
    rounds = microbatches // stages
    if rounds == 0:
        return stages * pass_s + transfer_s + (microbatches - 1) * pass_s + data_parallel_s
    return rounds * (stages * pass_s + transfer_s) + (stages - 1) * pass_s + data_parallel_s


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
    order = state_RS.T.ravel()
    rank_ND = np.empty((order.size, devices_per_host), dtype=np.int64)
    rank_ND[order] = np.arange(rank_ND.size).reshape(rank_ND.shape)
    return tuple(rank_ND.ravel().tolist())


def _picks(job: Job, measurements: Measurements, options: PlannerOptions) -> Iterator[Pick]:
    prices, links = UnitPrices(job, measurements), MeasuredRates.of(measurements.cluster)
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
class MeasuredRates:
    """1 / bandwidth as Pipette measures it: one figure for each pair of hosts, and one within each."""

    byte_s_NN: Array
    best: float
    within: float
    """Seconds per byte of the slowest link within any host."""

    @classmethod
    def of(cls, cluster: Cluster) -> MeasuredRates:
        """Read them off a cluster."""
        between = cluster.between_hosts.seconds_per_byte
        outside = between[~np.eye(len(between), dtype=bool)]
        return cls(
            byte_s_NN=between,
            best=float(outside.min()) if outside.size else 0.0,
            within=max(float(links.seconds_per_byte.max()) for links in cluster.within_host),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Model:
    """Pipette's latency model of one candidate as a function of its state."""

    layout: Layout
    links: MeasuredRates
    microbatches: int
    pass_s: float
    hop_bytes: float
    """There and back."""
    out_bytes: float
    """2(d - 1)/d of a replica's message around the hosts of the first stage."""
    inner_s: float
    """T_in, which no state changes."""

    @classmethod
    def of(cls, job: Job, layout: Layout, prices: UnitPrices, links: MeasuredRates) -> _Model:
        """Price the parts that the state does not change."""
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
        """Cost that it anneals: T_PP + T_out + T_in, without the rounds of the latency model."""
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
