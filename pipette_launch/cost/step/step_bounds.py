"""Lower bounds of the step time of many layouts at once, for the wide search.

The functions that price one layout also count compute, collectives and parameters here. They run once for each group of
layouts with equal values in the relevant fields, and for each kind of chunk. `assemble.StepEnd` prices the step's end.
The bounds differ from `Predictor.bound_s` in two ways. Lengths of paths (`pipeline_bound`) bound the pipelines, instead
of a simulation. Data-parallel groups that are too large for a host span slow hosts too, so some stages use slow links.
"""

# N = layouts, U = groups of layouts that agree, T = groups that agree in the exchanges of a step,
# R = groups that agree in their parameters, K = kinds of chunk, P = pipeline ranks, V = chunks of each.
# X = parts of a chunk (see `bound_tables`).

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost.communication.collectives import GroupsOnHosts
from pipette_launch.cost.communication.exchanges import aligns_gathers, meets_receivers, num_buckets
from pipette_launch.cost.layers import parameters
from pipette_launch.cost.step.assemble import StepEnd, gather_waits_s, gathers_in_forward
from pipette_launch.cost.step.bound_tables import Content, GroupsLie, Tables, UnitTimes, contents_of, split_by_code
from pipette_launch.cost.step.pipeline_bound import Pipelines, drains
from pipette_launch.cost.step.predictor import Predictor
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Floats, Ints, LayoutColumns, codes_of, grouped
from pipette_launch.facts.measurements import Measurements

_ROUNDING = 1e-9
"""Relative reduction of every bound, to allow for rounding: sums run in another order than for one layout."""
_AT_ONCE = 1 << 16
"""Largest number of stages in one numpy call, small enough for the cache of the processor."""


class BoundColumns:
    """Bounds the step time of layouts of one job on one allocation."""

    def __init__(self, job: Job, measurements: Measurements, predictor: Predictor | None = None) -> None:
        """Prepare the tables of a job, with the compute times of a predictor if one is given."""
        predictor = predictor or Predictor(job, measurements)
        self._tables = Tables(job, measurements, predictor.compute, predictor.fabric)

    def of_columns(self, columns: LayoutColumns) -> Floats:
        """Return a lower bound over all placements of each layout; nan if the layout cannot be priced."""
        return self._bounds_N(columns, "anywhere")

    def rough_of_columns(self, columns: LayoutColumns) -> Floats:
        """Return a bound that is lower and much cheaper to compute: one direct path through each pipeline rank.

        The first micro-batch reaches rank p through the first chunks of the ranks before it. Rank p runs all its
        passes, and the last backward returns through the same chunks. Some rank has the slowest slot. Exchanges after
        the passes are left out.
        """
        seconds_N = np.full(len(columns), np.nan)
        known = np.flatnonzero(self._tables.can_price_N(columns))
        if not len(known):
            return seconds_N
        columns = columns.take(known)
        unit, n_N = self._tables.unit_times(columns), self._tables.microbatches_N(columns)
        for rows in split_by_code(codes_of([columns.pp, columns.vpp])):
            content, here = contents_of(self._tables.job, columns.take(rows)), unit.take(rows)
            first_U, group_N = grouped(here.group_N, content.split_N)
            unit_U, kinds_UVP = here.group_N[first_U], content.kind_CVP[content.split_N[first_U]]
            fast_UVP, slow_UVP = (
                np.add(*here.chunk_times(content.parts_KX, slow=slow))[unit_U[:, None, None], kinds_UVP]
                for slow in (False, True)
            )
            first_UP = fast_UVP[:, 0]
            hops_UP = 2 * here.hop_s_U[unit_U][:, None] * np.arange(first_UP.shape[1])
            beside_NP = (first_UP.cumsum(axis=1) - first_UP + hops_UP)[group_N]
            fast_NP, slow_NP = (n_N[rows][:, None] * each.sum(axis=1)[group_N] for each in (fast_UVP, slow_UVP))
            seconds_N[known[rows]] = np.maximum((fast_NP + beside_NP).max(axis=1), (slow_NP + beside_NP).min(axis=1))
        return seconds_N * (1 - _ROUNDING)

    def sharpened(self, columns: LayoutColumns) -> Floats:
        """Return higher bounds for two or three times the work; 0 if no group inside layers fits on one host.

        One of three cases holds for the groups that fit on a host: all lie inside hosts, some tensor-parallel group
        spans hosts, or some ranks that share experts span hosts. The result is the least bound of the three cases. If
        the ranks that share experts are whole tensor-parallel groups, the second case is part of the third.
        """
        seconds_N = np.zeros(len(columns))
        tensor_N, experts_N = self._tables.tensor_fits_hosts(columns), self._tables.experts_fit_hosts(columns)
        whole_N = ((columns.ep * columns.etp) % columns.tp == 0) & (columns.use_tp_pp_dp_mapping == 0)
        cases: tuple[tuple[GroupsLie, NDArray[np.bool_]], ...] = (
            ("inside hosts", tensor_N | experts_N),
            ("tensor across hosts", tensor_N & ~(experts_N & whole_N)),
            ("experts across hosts", experts_N),
        )
        seconds_N[tensor_N | experts_N] = np.inf
        for groups_lie, holds_N in cases:
            rows = np.flatnonzero(holds_N)
            if len(rows):
                seconds_N[rows] = np.minimum(seconds_N[rows], self._bounds_N(columns.take(rows), groups_lie))
        return seconds_N

    def _bounds_N(self, columns: LayoutColumns, groups_lie: GroupsLie) -> Floats:
        seconds_N = np.full(len(columns), np.nan)
        known = np.flatnonzero(self._tables.can_price_N(columns))
        if not len(known):
            return seconds_N
        columns = columns.take(known)
        crosses = groups_lie in ("tensor across hosts", "experts across hosts")
        unit = self._tables.unit_times(columns, "anywhere" if crosses else groups_lie)
        # The same fields decide `unit` and `crossing`, so both have the same groups of layouts.
        crossing = self._tables.unit_times(columns, groups_lie) if crosses else None
        group_N, unit_parameters_U2X = self._tables.unit_parameters(columns)
        for rows in split_by_code(codes_of([columns.pp, columns.vpp])):
            content = contents_of(self._tables.job, columns.take(rows))
            pieces = -(-len(rows) * int(columns.pp[rows[0]] * columns.vpp[rows[0]]) // _AT_ONCE)
            for place in np.array_split(np.arange(len(rows)), pieces):
                part = rows[place]
                some, here = columns.take(part), replace(content, split_N=content.split_N[place])
                passes = _Passes(self._tables, some, unit.take(part), here, crossing.take(part) if crossing else None)
                update = _UpdatePrices(self._tables, some, (group_N[part], unit_parameters_U2X), here, groups_lie)
                seconds_N[known[part]] = _step_s_N(some, passes, update)
        return seconds_N * (1 - _ROUNDING)


class _Passes:
    """Bounds of the pipelines of each group of layouts."""

    def __init__(
        self, tables: Tables, columns: LayoutColumns, unit: UnitTimes, content: Content, crossing: UnitTimes | None
    ) -> None:
        """Bound the pipelines.

        If `crossing` is given, at least one rank of each pipeline takes at least its times; which rank is unknown.
        """
        microbatches_N = tables.microbatches_N(columns)
        first_U, self.group_N = grouped(unit.group_N, content.split_N, microbatches_N, columns.microbatch_group_size)
        kinds_UVP = content.kind_CVP[content.split_N[first_U]]
        rows_U = unit.group_N[first_U]
        group_size_U = np.where(columns.microbatch_group_size > 0, columns.microbatch_group_size, columns.pp)[first_U]

        def pipelines(unit: UnitTimes, *, slow: bool) -> Pipelines:
            forward_RK, backward_RK = unit.chunk_times(content.parts_KX, slow=slow)
            # Same rule as in `ComputeTable.chunk_passes`.
            waits_U = np.ones(len(first_U)) if kinds_UVP.shape[2] > 1 else 1 / microbatches_N[first_U]
            wake_s = tables.compute.wake.forward_s * (tables.slowest if slow else tables.fastest)
            wake_s_U11 = (wake_s * waits_U)[:, None, None]
            rows_U11 = rows_U[:, None, None]
            return Pipelines(
                forward_s_UVP=forward_RK[rows_U11, kinds_UVP] + wake_s_U11,
                backward_s_UVP=backward_RK[rows_U11, kinds_UVP] + wake_s_U11,
                hop_s_U=unit.hop_s_U[rows_U],
                microbatches_U=microbatches_N[first_U],
                group_size_U=group_size_U,
            )

        fast = slow = slowest = pipelines(unit, slow=False)
        if crossing is not None:
            slow, slowest = pipelines(crossing, slow=False), pipelines(crossing, slow=True)
        elif tables.slowest > tables.fastest:
            slow = slowest = pipelines(unit, slow=True)
        by_paths, slow_by_paths = fast, slow
        if meets_receivers(tables.job, int(columns.vpp[0]), tables.compute.device_kind):
            by_paths, slow_by_paths = _with_hops_in_passes(fast), _with_hops_in_passes(slow)
        self.drains = drains(by_paths, slow=slow_by_paths if slow is not fast else None)
        # The first stage's forward on the fastest slot, and its backward on the slowest slot. Gradient reductions start
        # at most this backward before its end.
        self.first_forward_s_U = fast.forward_s_UVP[:, 0, 0]
        self.first_backward_s_U = slowest.backward_s_UVP[:, 0, 0]


def _with_hops_in_passes(pipelines: Pipelines) -> Pipelines:
    """Add each hop to the pass that receives it, because a send that waits for its receiver keeps the receiver busy."""
    shape = pipelines.forward_s_UVP.shape[1:]
    stages = int(np.prod(shape))
    hop_s_U11 = pipelines.hop_s_U[:, None, None]
    stage_VP = np.arange(stages).reshape(shape)
    return replace(
        pipelines,
        forward_s_UVP=pipelines.forward_s_UVP + hop_s_U11 * (stage_VP > 0),
        backward_s_UVP=pipelines.backward_s_UVP + hop_s_U11 * (stage_VP < stages - 1),
        hop_s_U=np.zeros_like(pipelines.hop_s_U),
    )


class _SlowGroups(NamedTuple):
    """Prices of groups with slots on hosts whose links are slow."""

    stages: int
    """Least number of stages that have groups on slow hosts."""
    reduce_s_TVP: Floats
    gather_s_TVP: Floats


class _UpdatePrices:
    """Exchanges and updates after the passes, for each group of layouts with the same pp and vpp."""

    def __init__(
        self, tables: Tables, columns: LayoutColumns, unit: tuple[Ints, Ints], content: Content, groups_lie: GroupsLie
    ) -> None:
        """Price the exchanges and updates.

        `unit` has the group of each layout by parameters, and the parameters of a chunk's parts for each group.
        """
        job, (unit_N, parameters_R2X) = tables.job, unit
        fields = [columns.dp, columns.cp, columns.ep, columns.etp, columns.use_distributed_optimizer]
        first_T, self.group_N = grouped(unit_N, content.split_N, *fields)
        groups = columns.take(first_T)
        kinds_TVP = content.kind_CVP[content.split_N[first_T]]
        rows_T11 = unit_N[first_T][:, None, None]
        parameters_2RK = np.moveaxis(parameters_R2X @ content.parts_KX.T, 1, 0)
        counts = tuple(each_RK[rows_T11, kinds_TVP] for each_RK in parameters_2RK)
        prices = partial(_exchange_s, tables, groups, counts, _group_slots(tables, groups, groups_lie))
        self.reduce_s_TVP, self.gather_s_TVP = prices(tables.num_hosts)
        slow_hosts = tables.slow_hosts(int(columns.pp[0]))
        self.slow_groups = [_SlowGroups(stages, *prices(among)) for stages, among in slow_hosts]
        dense_PT, expert_PT = (count_TVP.sum(axis=1).T for count_TVP in counts)
        optimizer_s_PT = tables.once_a_step.seconds(
            parameters.resident_parameters(job, dense_PT, expert_PT, groups),
            parameters.held_gradients(job, dense_PT, expert_PT, groups) * parameters.gradient_bytes_per_parameter(job),
        )
        self.optimizer_s_TP = optimizer_s_PT.T * tables.fastest
        # Number of gradient buckets of the first stage; later stages have one bucket.
        self.buckets_T = num_buckets(sum(counts)[:, 0, 0], groups.dp * groups.cp)
        self.embedding_s_T = tables.embedding_s_N(groups)
        self.aligns_gathers = aligns_gathers(job, int(columns.vpp[0]))


def _group_slots(tables: Tables, groups: LayoutColumns, groups_lie: GroupsLie) -> tuple[Ints, Ints]:
    """Return the slots that dense and expert groups need on their hosts, including slots that others must fill."""
    dense_slots_T, expert_slots_T = groups.dp * groups.cp, parameters.expert_dp(groups)
    if tables.fabric.cluster.keeps_residues:
        # Members whose ranks are equal modulo the slots of a host lie on different hosts.
        dense_slots_T = dense_slots_T * np.gcd(groups.tp, tables.devices)
        apart_T = np.gcd(groups.ep * groups.etp, tables.devices)
        expert_slots_T = expert_slots_T * np.where(parameters.experts_lie_in_stages(groups), apart_T, 1)
    elif groups_lie == "inside hosts":
        # Each member belongs to a different group inside the layers, and a host holds whole groups of this kind.
        dense_slots_T = dense_slots_T * np.where(tables.tensor_fits_hosts(groups), groups.tp, 1)
        expert_slots_T = expert_slots_T * np.where(tables.experts_fit_hosts(groups), groups.ep * groups.etp, 1)
    return dense_slots_T, expert_slots_T


def _exchange_s(
    tables: Tables, groups: LayoutColumns, counts: tuple[Ints, ...], slots: tuple[Ints, Ints], among: int
) -> tuple[Floats, Floats]:
    """Return the seconds of gradient reduction and of parameter gathers for every stage.

    `counts` are dense and expert parameters of each chunk, and `slots` the slots that dense and expert groups need on
    their hosts. Each group has a slot on at least one of the `among` hosts with the slowest links.
    """
    job, sharding = tables.job, parameters.sharding_of(tables.job)
    # FSDP exchanges gradients and weights in the passes. The FSDP gather of embedding and head is left out.
    gradient_bytes = 0 if sharding and sharding.gradients else parameters.gradient_bytes_per_parameter(job)
    weight_bytes = 0 if sharding and sharding.weights else job.model.dtype_bytes
    reduce_s, gather_s = np.zeros(counts[0].shape), np.zeros(counts[0].shape)
    is_sharded_T = groups.use_distributed_optimizer > 0
    dense = (groups.dp * groups.cp, slots[0], np.full(len(groups), True))
    experts = (parameters.expert_dp(groups), slots[1], parameters.experts_lie_in_stages(groups))
    for count_TVP, (size_T, slots_T, uses_T) in zip(counts, (dense, experts), strict=True):
        if not count_TVP.any():
            continue
        fewest_T = -(-slots_T // tables.devices)
        among_T = np.where(uses_T, among, tables.num_hosts)
        sharded, whole = (
            GroupsOnHosts(size_T=np.where(counts_T, size_T, 1), fewest_T=fewest_T, among_T=among_T)
            for counts_T in (is_sharded_T, ~is_sharded_T)
        )
        reduce_s += tables.fabric.groups_bound_s("all_reduce", whole, count_TVP * gradient_bytes)
        reduce_s += tables.fabric.groups_bound_s("reduce_scatter", sharded, count_TVP * gradient_bytes)
        gather_s += tables.fabric.groups_bound_s("all_gather", sharded, count_TVP * weight_bytes)
    return reduce_s, gather_s


def _step_s_N(columns: LayoutColumns, passes: _Passes, update: _UpdatePrices) -> Floats:
    """Bound the steps: pipelines, then `StepEnd` with the best links and with the links of slow hosts."""
    t = update.group_N
    buckets_N = np.where(columns.overlap_grad_reduce > 0, update.buckets_T[t], 1)
    drain_VPN = _drains_VPN(columns, passes, update, buckets_N)
    # Only the first stage has several buckets, which are reduced during the last backward.
    backward_VPN = np.zeros_like(drain_VPN)
    backward_VPN[0, 0] = passes.first_backward_s_U[passes.group_N]
    buckets_VPN = np.ones(drain_VPN.shape, dtype=np.int64)
    buckets_VPN[0, 0] = buckets_N
    end = StepEnd(
        layout=columns,
        drain_s_VPN=drain_VPN,
        backward_s_VPN=backward_VPN,
        num_buckets_VPN=buckets_VPN,
        reduce_s_VPN=_first_and_others_VPN(update.reduce_s_TVP, t),
        gather_s_VPN=update.gather_s_TVP.sum(axis=1)[t].T[None],
        optimizer_s_PN=update.optimizer_s_TP[t].T,
        embedding_s_N=update.embedding_s_T[t],
    )
    finish_N = end.finish_s_N + end.more_embedding_s_N
    later_N = end.update_s_PN.max(axis=0)
    steps_N: Floats = finish_N + later_N
    for slow in update.slow_groups:
        # At least `stages` stages use the links of slow hosts, and these may be the quickest stages.
        slower = replace(
            end,
            reduce_s_VPN=_first_and_others_VPN(slow.reduce_s_TVP, t),
            gather_s_VPN=slow.gather_s_TVP.sum(axis=1)[t].T[None],
        )
        slow_PN = np.maximum(slower.reduced_s_PN, finish_N) + np.maximum(slower.update_s_PN, later_N)
        steps_N = np.maximum(steps_N, np.partition(slow_PN, slow.stages - 1, axis=0)[slow.stages - 1])
    return steps_N


def _first_and_others_VPN(seconds_TVP: Floats, group_N: Ints) -> Floats:
    """Return the seconds of each rank's first chunk, and of all its other chunks together."""
    first_TP = seconds_TVP[:, 0]
    if seconds_TVP.shape[1] == 1:
        return np.asarray(first_TP[group_N].T[None])
    both_T2P = np.stack([first_TP, seconds_TVP[:, 1:].sum(axis=1)], axis=1)
    return np.asarray(both_T2P[group_N].transpose(1, 2, 0))


def _drains_VPN(columns: LayoutColumns, passes: _Passes, update: _UpdatePrices, buckets_N: Ints) -> Floats:
    """Bound the drains of each rank's first and last chunk, including waits for overlapped gathers.

    If gathers are aligned, every action depends on the first forward of stage 0, which waits for the whole gather of
    its parameters. If gathers are not aligned, the first forward of each stage waits for one bucket of parameters, and
    for the part of the gather that compute does not hide.
    """
    u, t = passes.group_N, update.group_N
    any_NP, early_NP = passes.drains.any_UP[u], passes.drains.early_UP[u]
    has_gather_N = gathers_in_forward(columns)
    own_N = update.gather_s_TVP[:, 0, 0][t]
    if update.aligns_gathers:
        wait_N1 = np.where(has_gather_N, own_N, 0.0)[:, None]
        any_NP, early_NP = any_NP + wait_N1, early_NP + wait_N1
    else:
        exposed_N = update.gather_s_TVP.sum(axis=(1, 2))[t] - own_N
        exposed_N += gather_waits_s(own_N, passes.first_forward_s_U[u], buckets_N)
        exposed_N = np.where(has_gather_N, exposed_N, 0.0)
        any_NP = np.maximum(any_NP, passes.drains.first_UP[u] + exposed_N[:, None])
    return np.stack([any_NP.T, early_NP.T] if columns.vpp[0] > 1 else [any_NP.T])
