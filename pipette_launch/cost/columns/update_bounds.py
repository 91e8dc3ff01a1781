"""What many layouts exchange and update once a step: over the best links, and over those that some must use."""

# T = groups of layouts that agree in what is exchanged once a step, K = kinds of chunk, P = pipeline ranks, V = chunks
# of each, R = groups that agree in their parameters, X = what chunks are made of (see `step_bounds`).

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost.columns.bound_tables import Content, GroupsLie, Tables
from pipette_launch.cost.communication.collectives import GroupsOnHosts
from pipette_launch.cost.communication.exchanges import aligns_gathers, num_buckets
from pipette_launch.cost.layers.parameters import (
    expert_dp,
    experts_lie_in_stages,
    gradient_bytes_per_parameter,
    held_gradients,
    resident_parameters,
    sharding_of,
)
from pipette_launch.facts.layout import LayoutColumns, codes_of

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
