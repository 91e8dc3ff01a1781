"""Lower bounds of the step time of many layouts at once, for the wide search.

Compute, collectives and parameters are counted by the very functions that price one layout, once for each group of
layouts that agree in what these depend on, and for the few kinds of chunk that a shape of pipelines has. What is left
out against `Predictor.bound_s`: the pipelines are bounded by paths (`cost.columns.pipeline_bound`) instead of
simulated, and overlapped reductions by their first and last, instead of one by one. What is added: data-parallel
groups that no host holds pass through every host, so some stages' groups use the links of hosts where these are slow.
"""

# T = groups of layouts that agree in what is exchanged once a step, K = kinds of chunk, P = pipeline ranks, V = chunks
# of each, R = groups that agree in their parameters, X = what chunks are made of (see `step_bounds`).
# N = layouts, U = groups of layouts that agree, T = groups that agree in what is exchanged once a step,
# K = kinds of chunk, P = pipeline ranks, V = chunks of each, L = lines whose lowest counts.
# X = what chunks are made of: of each kind of layer those that run once and those that full recompute runs again;
# embedding, head.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost.columns.bound_tables import Content, GroupsLie, Tables, UnitTimes, contents_of, split_by_code
from pipette_launch.cost.columns.pipeline_bound import Drains, Pipelines, drains
from pipette_launch.cost.communication.collectives import GroupsOnHosts
from pipette_launch.cost.communication.exchanges import aligns_gathers, meets_receivers, num_buckets
from pipette_launch.cost.layers.parameters import (
    expert_dp,
    experts_lie_in_stages,
    gradient_bytes_per_parameter,
    held_gradients,
    resident_parameters,
    sharding_of,
)
from pipette_launch.cost.step.assemble import waits_one_by_one_s
from pipette_launch.cost.step.predictor import Predictor
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout, LayoutColumns, codes_of
from pipette_launch.facts.measurements import Measurements

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Through(NamedTuple):
    """The prices of groups that have slots on hosts whose links are slow."""

    stages: int
    """So many stages have groups that take at least so long."""
    reduce_s_TVP: Floats
    gather_s_TVP: Floats


@dataclass(frozen=True, kw_only=True)
class UpdatePrices:
    """What each group of layouts exchanges and updates once a step."""

    group_N: Ints
    reduce_s_TVP: Floats
    gather_s_TVP: Floats
    through: tuple[Through, ...]
    buckets_T: Ints
    """Parts of the first stage's gradients that leave one by one, where they are overlapped."""
    optimizer_s_TP: Floats
    embedding_s_T: Floats
    aligns_gathers: bool
    """As `LayoutWork.aligns_gathers`: the same for all, as they are of one shape of pipelines."""

    @classmethod
    def of(
        cls, tables: Tables, columns: LayoutColumns, unit: tuple[Ints, Ints], content: Content, groups_lie: GroupsLie
    ) -> UpdatePrices:
        """Price what layouts of one shape of pipelines exchange and update.

        Args:
            tables: of the job.
            columns: the layouts.
            unit: the group of each layout in its parameters, and of each group those of what chunks are made of.
            content: of the chunks.
            groups_lie: where the groups inside layers lie.

        """
        job, (unit_N, parameters_R2X) = tables.job, unit
        fields = [columns.dp, columns.cp, columns.ep, columns.etp, columns.use_distributed_optimizer]
        codes_N = codes_of([unit_N, content.cut_N, *fields])
        _, first_T, group_N = np.unique(codes_N, return_index=True, return_inverse=True)
        groups = columns.take(first_T)
        kinds_TVP = content.kind_CVP[content.cut_N[first_T]]
        rows_T11 = unit_N[first_T][:, None, None]
        dense_TVP, expert_TVP = (
            each_RK[rows_T11, kinds_TVP] for each_RK in np.moveaxis(parameters_R2X @ content.parts_KX.T, 1, 0)
        )
        gradient, sharding = gradient_bytes_per_parameter(job), sharding_of(job)
        # FSDP exchanges them in the passes; that it gathers embedding and head once a step is left out.
        sizes = (
            0 if sharding and sharding.gradients else gradient,
            0 if sharding and sharding.weights else job.model.dtype_bytes,
        )
        dense_slots_T, expert_slots_T = groups.dp * groups.cp, expert_dp(groups)
        if tables.fabric.cluster.keeps_residues:
            # Members whose ranks are alike modulo the slots of a host lie on different hosts.
            dense_slots_T = dense_slots_T * np.gcd(groups.tp, tables.devices)
            apart_T = np.gcd(groups.ep * groups.etp, tables.devices)
            expert_slots_T = expert_slots_T * np.where(experts_lie_in_stages(groups), apart_T, 1)
        elif groups_lie == "inside hosts":
            # Each member belongs to another group inside the layers: a host that holds whole ones holds few members.
            dense_slots_T = dense_slots_T * np.where(tables.tensor_fits_hosts(groups), groups.tp, 1)
            expert_slots_T = expert_slots_T * np.where(tables.experts_fit_hosts(groups), groups.ep * groups.etp, 1)
        prices = partial(_exchanges, tables, groups, (dense_TVP, expert_TVP), sizes, (dense_slots_T, expert_slots_T))
        reduce_s, gather_s = prices(tables.num_hosts)
        through = [Through(stages, *prices(among)) for stages, among in tables.slow_hosts(int(columns.pp[0]))]
        # Ranks first, so that figures of T stand behind.
        dense_PT, expert_PT = dense_TVP.sum(axis=1).T, expert_TVP.sum(axis=1).T
        optimizer_s_PT = tables.once_a_step.seconds(
            resident_parameters(job, dense_PT, expert_PT, groups),
            held_gradients(job, dense_PT, expert_PT, groups) * gradient,
        )
        return cls(
            group_N=group_N.reshape(-1),
            reduce_s_TVP=reduce_s,
            gather_s_TVP=gather_s,
            through=tuple(through),
            buckets_T=num_buckets((dense_TVP + expert_TVP)[:, 0, 0], groups.dp * groups.cp),
            optimizer_s_TP=optimizer_s_PT.T * tables.fastest,
            embedding_s_T=tables.embedding_s_N(groups),
            aligns_gathers=aligns_gathers(job, int(columns.vpp[0])),
        )


def _exchanges(
    tables: Tables,
    groups: LayoutColumns,
    counts: tuple[Ints, Ints],
    sizes: tuple[int, int],
    slots: tuple[Ints, Ints],
    among: int,
) -> tuple[Floats, Floats]:
    """Seconds of reducing gradients and of gathering weights, stage by stage.

    Args:
        tables: of the job.
        groups: the layouts.
        counts: dense and expert parameters of each chunk.
        sizes: bytes of a gradient and of a weight.
        slots: what dense and expert groups need on their hosts, slots beside their members included.
        among: each group is priced as one with a slot on some of so many hosts, those with the slowest links.

    """
    reduce_s, gather_s = np.zeros(counts[0].shape), np.zeros(counts[0].shape)
    is_sharded_T = groups.use_distributed_optimizer > 0
    dense = (groups.dp * groups.cp, slots[0], np.full(len(groups), True))
    experts = (expert_dp(groups), slots[1], experts_lie_in_stages(groups))
    for count_TVP, (size_T, slots_T, uses_T) in zip(counts, (dense, experts), strict=True):
        if not count_TVP.any():
            continue
        fewest_T = -(-slots_T // tables.devices)
        among_T = np.where(uses_T, among, tables.num_hosts)
        sharded, whole = (
            GroupsOnHosts(size_T=np.where(counts_T, size_T, 1), fewest_T=fewest_T, among_T=among_T)
            for counts_T in (is_sharded_T, ~is_sharded_T)
        )
        reduce_s += tables.fabric.groups_bound_s("all_reduce", whole, count_TVP * sizes[0])
        reduce_s += tables.fabric.groups_bound_s("reduce_scatter", sharded, count_TVP * sizes[0])
        gather_s += tables.fabric.groups_bound_s("all_gather", sharded, count_TVP * sizes[1])
    return reduce_s, gather_s


_ROUNDING = 1e-9
"""The sums run in another order than those of one layout: so much is taken off, which no sum's rounding exceeds."""
_AT_ONCE = 1 << 16
"""Stages that go through numpy at once: few enough to stay in the processor's cache."""


class BoundColumns:
    """Bounds the step time of layouts of one job on one allocation."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    @classmethod
    def of(cls, job: Job, measurements: Measurements, predictor: Predictor | None = None) -> BoundColumns:
        """Prepare the tables of a job; those of a predictor of the same job are used where one is given."""
        predictor = predictor or Predictor(job, measurements)
        return cls(Tables(job, measurements, predictor.compute, predictor.fabric))

    def seconds_N(self, layouts: Sequence[Layout]) -> Floats:
        """No placement of a layout is faster than this many seconds; nan where it cannot be priced."""
        return self.of_columns(LayoutColumns.of(layouts))

    def rough_of_columns(self, columns: LayoutColumns) -> Floats:
        """Return a cruder bound that is much cheaper: the one path of each pipeline rank that goes straight to it.

        The first micro-batch reaches rank p through the first chunks of the ranks before it, p runs all that it runs,
        and the last backward leaves through those chunks; some rank does so on the slowest slot. What is exchanged once
        a step is left out.
        """
        seconds_N = np.full(len(columns), np.nan)
        known = np.flatnonzero(self._tables.can_price_N(columns))
        if not len(known):
            return seconds_N
        columns = columns.take(known)
        unit, n_N = self._tables.unit_times(columns), self._tables.microbatches_N(columns)
        for rows in split_by_code(codes_of([columns.pp, columns.vpp])):
            content, here = contents_of(self._tables.job, columns.take(rows)), unit.take(rows)
            codes_U, group_N = np.unique(here.group_N * len(content.kind_CVP) + content.cut_N, return_inverse=True)
            unit_U, cut_U = np.divmod(codes_U, len(content.kind_CVP))
            kinds_UVP = content.kind_CVP[cut_U]
            fast_UVP, slow_UVP = (
                np.add(*here.chunk_times(content.parts_KX, slow=slow))[unit_U[:, None, None], kinds_UVP]
                for slow in (False, True)
            )
            first_UP = fast_UVP[:, 0]
            hops_UP = 2 * here.hop_s_U[unit_U][:, None] * np.arange(first_UP.shape[1])
            beside_NP = (first_UP.cumsum(axis=1) - first_UP + hops_UP)[group_N]
            fast_NP, slow_NP = (n_N[rows][:, None] * each.sum(axis=1)[group_N] for each in (fast_UVP, slow_UVP))
            # Every rank runs on a slot no faster than the fastest, some rank on the slowest.
            seconds_N[known[rows]] = np.maximum((fast_NP + beside_NP).max(axis=1), (slow_NP + beside_NP).min(axis=1))
        return seconds_N * (1 - _ROUNDING)

    def of_columns(self, columns: LayoutColumns) -> Floats:
        """Return `seconds_N` of layouts that stand as columns."""
        return self._bounds_N(columns, "anywhere")

    def sharpened(self, columns: LayoutColumns) -> Floats:
        """Return sharper bounds, at two or three times the cost; 0 where no groups inside layers fit on one host.

        Either all that fit lie inside hosts, or some tensor-parallel group does not, or some ranks that share experts:
        the least bound of these cases holds. Where those that share experts are whole tensor-parallel groups, the
        second case is part of the third.
        """
        seconds_N = np.zeros(len(columns))
        tensor_N, experts_N = self._tables.tensor_fits_hosts(columns), self._tables.experts_fit_hosts(columns)
        whole_N = ((columns.ep * columns.etp) % columns.tp == 0) & (columns.use_tp_pp_dp_mapping == 0)
        kinds: tuple[tuple[GroupsLie, NDArray[np.bool_]], ...] = (
            ("tensor across hosts", tensor_N & ~(experts_N & whole_N)),
            ("experts across hosts", experts_N),
        )
        inside = np.flatnonzero(tensor_N | experts_N)
        if len(inside):
            seconds_N[inside] = self._bounds_N(columns.take(inside), "inside hosts")
        for groups_lie, fits_N in kinds:
            rows = np.flatnonzero(fits_N)
            if len(rows):
                seconds_N[rows] = np.minimum(seconds_N[rows], self._bounds_N(columns.take(rows), groups_lie))
        return seconds_N

    def _bounds_N(self, columns: LayoutColumns, groups_lie: GroupsLie) -> Floats:
        seconds_N = np.full(len(columns), np.nan)
        overlaps_N2 = np.stack([columns.overlap_grad_reduce, columns.overlap_param_gather], axis=-1) > 0
        known = np.flatnonzero(self._tables.can_price_N(columns))
        if not len(known):
            return seconds_N
        columns, overlaps_N2 = columns.take(known), overlaps_N2[known]
        crosses = groups_lie in ("tensor across hosts", "experts across hosts")
        unit = self._tables.unit_times(columns, "anywhere" if crosses else groups_lie)
        # Of the same groups, as the same fields decide.
        crossing = self._tables.unit_times(columns, groups_lie) if crosses else None
        group_N, unit_parameters_U2X = self._tables.unit_parameters(columns)
        for rows in split_by_code(codes_of([columns.pp, columns.vpp])):
            content = contents_of(self._tables.job, columns.take(rows))
            pieces = -(-len(rows) * int(columns.pp[rows[0]] * columns.vpp[rows[0]]) // _AT_ONCE)
            for place in np.array_split(np.arange(len(rows)), pieces):
                part = rows[place]
                some, here = columns.take(part), replace(content, cut_N=content.cut_N[place])
                passes = _Passes.of(
                    self._tables, some, unit.take(part), here, crossing.take(part) if crossing else None
                )
                update = UpdatePrices.of(self._tables, some, (group_N[part], unit_parameters_U2X), here, groups_lie)
                seconds_N[known[part]] = _steps(passes, update, overlaps_N2[part])
        return seconds_N * (1 - _ROUNDING)


@dataclass(frozen=True, kw_only=True)
class _Passes:
    """What the pipelines of each group of layouts take."""

    group_N: Ints
    drains: Drains
    first_forward_s_U: Floats
    """Of the first stage, on the fastest slot."""
    first_backward_s_U: Floats
    """On the slowest: reductions start at most so long before its end."""

    @classmethod
    def of(
        cls, tables: Tables, columns: LayoutColumns, unit: UnitTimes, content: Content, crossing: UnitTimes | None
    ) -> _Passes:
        """Work out the pipelines; with `crossing` some rank takes as long as that says."""
        microbatches_N = tables.microbatches_N(columns)
        codes_N = codes_of([unit.group_N, content.cut_N, microbatches_N, columns.microbatch_group_size])
        _, first_U, group_N = np.unique(codes_N, return_index=True, return_inverse=True)
        kinds_UVP = content.kind_CVP[content.cut_N[first_U]]
        rows_U = unit.group_N[first_U]
        group_size_U = np.where(columns.microbatch_group_size > 0, columns.microbatch_group_size, columns.pp)[first_U]

        def pipelines(unit: UnitTimes, *, slow: bool) -> Pipelines:
            forward_RK, backward_RK = unit.chunk_times(content.parts_KX, slow=slow)
            # As in `ComputeTable.chunk_passes`.
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
            by_paths, slow_by_paths = _met(fast), _met(slow)
        return cls(
            group_N=group_N.reshape(-1),
            drains=drains(by_paths, slow=slow_by_paths if slow is not fast else None),
            first_forward_s_U=fast.forward_s_UVP[:, 0, 0],
            first_backward_s_U=slowest.backward_s_UVP[:, 0, 0],
        )


def _met(pipelines: Pipelines) -> Pipelines:
    """Where messages meet their receivers a hop is as good as a part of the pass behind it."""
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


def _steps(passes: _Passes, update: UpdatePrices, overlaps_N2: NDArray[np.bool_]) -> Floats:
    """Put pipelines and updates together, as `cost.step.assemble` does for one layout."""
    has_reduce_N, has_gather_N = overlaps_N2.T
    t = update.group_N
    buckets_N = np.where(has_reduce_N, update.buckets_T[t], 1)
    drains = _drains(passes, update, buckets_N, has_gather_N)
    finish_NP = _finish_NP(passes, update, update.reduce_s_TVP, drains, buckets_N, has_reduce_N)
    tied_N = np.maximum(finish_NP[:, 0], finish_NP[:, -1]) + update.embedding_s_T[t]
    finish_N = np.maximum(finish_NP.max(axis=1), tied_N)
    later_NP = _later_NP(update, update.gather_s_TVP, has_gather_N)
    later_N = later_NP.max(axis=1)
    steps_N: Floats = finish_N + later_N
    for slow in update.through:
        # That many stages at least take as long as with their groups through the slow host, and the quickest may do.
        finish_NP = _finish_NP(passes, update, slow.reduce_s_TVP, drains, buckets_N, has_reduce_N)
        later_NP = _later_NP(update, slow.gather_s_TVP, has_gather_N)
        slow_NP = np.maximum(finish_NP, finish_N[:, None]) + np.maximum(later_NP, later_N[:, None])
        steps_N = np.maximum(steps_N, np.partition(slow_NP, slow.stages - 1, axis=1)[:, slow.stages - 1])
    return steps_N


def _finish_NP(
    passes: _Passes,
    update: UpdatePrices,
    reduce_s_TVP: Floats,
    drains: tuple[Floats, Floats],
    buckets_N: Ints,
    has_reduce_N: NDArray[np.bool_],
) -> Floats:
    """When the gradients of each pipeline rank are reduced."""
    u, t = passes.group_N, update.group_N
    drain_NP, early_NP = drains
    last_NP, all_NP = reduce_s_TVP[:, 0][t], reduce_s_TVP.sum(axis=1)[t]
    overlapped_NP = np.maximum(drain_NP + last_NP, early_NP + all_NP)
    # Buckets of the first stage leave during its last backward.
    behind_N = passes.first_backward_s_U[u] * (buckets_N - 1) / buckets_N
    first_N = drain_NP[:, 0]
    early_N = np.minimum(early_NP[:, 0], first_N - behind_N)
    ends = (first_N + last_NP[:, 0] / buckets_N, first_N - behind_N + last_NP[:, 0], early_N + all_NP[:, 0])
    overlapped_NP[:, 0] = np.maximum(np.maximum(ends[0], ends[1]), ends[2])
    finish_NP: Floats = np.where(has_reduce_N[:, None], overlapped_NP, drain_NP + all_NP)
    return finish_NP


def _later_NP(update: UpdatePrices, gather_s_TVP: Floats, has_gather_N: NDArray[np.bool_]) -> Floats:
    """Optimizer, and gathers that nothing overlaps."""
    gathers_NP = np.where(has_gather_N[:, None], 0.0, gather_s_TVP.sum(axis=1)[update.group_N])
    later_NP: Floats = update.optimizer_s_TP[update.group_N] + gathers_NP
    return later_NP


def _drains(
    passes: _Passes, update: UpdatePrices, buckets_N: Ints, has_gather_N: NDArray[np.bool_]
) -> tuple[Floats, Floats]:
    """Return when the first and the last chunk of each rank drain, with overlapped gathers (`cost.step.first_gathers`).

    Aligned gathers: every action depends on the first forward of stage 0, which waits for its whole gather.
    Otherwise the first forward of every stage is longer, by one bucket and by what its own compute does not hide.
    """
    u, t = passes.group_N, update.group_N
    any_NP, early_NP = passes.drains.any_UP[u], passes.drains.early_UP[u]
    own_N = update.gather_s_TVP[:, 0, 0][t]
    if update.aligns_gathers:
        wait_N1 = np.where(has_gather_N, own_N, 0.0)[:, None]
        return any_NP + wait_N1, early_NP + wait_N1
    exposed_N = update.gather_s_TVP.sum(axis=(1, 2))[t] - own_N
    exposed_N += waits_one_by_one_s(own_N, passes.first_forward_s_U[u], buckets_N)
    exposed_N = np.where(has_gather_N, exposed_N, 0.0)
    return np.maximum(any_NP, passes.drains.first_UP[u] + exposed_N[:, None]), early_NP
