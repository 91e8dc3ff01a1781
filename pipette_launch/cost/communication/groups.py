"""The communication groups of a layout as index arrays: one row for each group, in ring order."""

# Letters of array axes: W = ranks, P = pipeline ranks, D = data-parallel replicas, C = cp, T = tp, E = ep, X = etp, Y =
# expert data-parallel. G = groups of one kind, K = members of a group.

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost.layers.parameters import expert_dp
from pipette_launch.facts.layout import Layout

Ranks = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """The communication groups of a layout. The ranks of each group are sorted, as torch sorts them."""

    grid_PDCT: Ranks
    """RANK of each cell (pipeline rank, replica, cp, tp)."""
    tp: Ranks
    cp: Ranks
    ep: Ranks
    etp: Ranks
    ep_etp: Ranks
    """Groups over ep and etp together, in which the dispatcher `allgather` gathers tokens."""
    dp_cp: Ranks
    """Data-parallel groups with cp included; rows ordered by (pp, tp)."""
    expert_dp: Ranks
    """Data-parallel groups of experts; rows ordered by (pp, ep, etp)."""
    shard: Ranks
    """Subgroups of the `dp_cp` groups; the ranks of a subgroup share one copy of FSDP's shards."""
    expert_shard: Ranks
    embedding: Ranks
    """Pairs of first and last pipeline rank with equal (dp, cp, tp)."""
    forward_hop: Ranks
    """Pairs (sender, receiver) of ranks in neighbouring stages, and from the last stage to the first; rows ordered by
    the sender's (pp, dp, cp, tp)."""

    @classmethod
    def of(cls, layout: Layout, *, instances: int = 1) -> Groups:
        """Return all groups of a layout; `instances` = number of copies of FSDP's shards."""
        grid = rank_grid(layout)
        expert = _grid(layout, expert_dp(layout), layout.ep, layout.etp)
        dp_cp = grid.transpose(0, 3, 1, 2).reshape(layout.pp * layout.tp, -1)
        expert_dp_rows = _rows(expert, (0, 2, 3, 1))
        sizes = group_sizes(layout, instances=instances)
        hop = np.stack([grid, np.roll(grid, -1, axis=0)], axis=-1)
        return cls(
            grid_PDCT=grid,
            tp=grid.reshape(-1, layout.tp),
            cp=_rows(grid, (0, 1, 3, 2)),
            ep=_rows(expert, (0, 1, 3, 2)),
            etp=_rows(expert, (0, 1, 2, 3)),
            ep_etp=expert.reshape(-1, layout.ep * layout.etp),
            dp_cp=dp_cp,
            expert_dp=expert_dp_rows,
            # Consecutive members of a data-parallel group share one copy of FSDP's shards (parallel_state.py,
            # intra_partial_data_parallel_group).
            shard=dp_cp.reshape(-1, sizes["shard"]),
            expert_shard=expert_dp_rows.reshape(-1, sizes["expert_shard"]),
            embedding=np.stack([grid[0], grid[-1]], axis=-1).reshape(-1, 2),
            forward_hop=hop.reshape(-1, 2),
        )

    def met_PDL(self, groups_GK: Ranks) -> NDArray[np.int64]:
        """Return, for each pipeline rank of each replica, the rows of `groups_GK` that contain its ranks.

        If every group contains all ranks along the tensor axis or the context axis, each group is listed once for these
        ranks.
        """
        group_W = np.empty(self.grid_PDCT.size, dtype=np.int64)
        group_W[groups_GK] = np.arange(len(groups_GK))[:, None]
        met_PDCT = group_W[self.grid_PDCT]
        if (met_PDCT == met_PDCT[..., :1]).all():
            met_PDCT = met_PDCT[..., :1]
        if (met_PDCT == met_PDCT[:, :, :1]).all():
            met_PDCT = met_PDCT[:, :, :1]
        return np.asarray(met_PDCT.reshape(*met_PDCT.shape[:2], -1))


def group_sizes(layout: Layout, *, instances: int = 1) -> dict[str, int]:
    """Return the size of each kind of group, by its name in `Groups`; `instances` = copies of FSDP's shards."""
    replicas, expert_replicas = layout.dp * layout.cp, expert_dp(layout)
    return {
        "tp": layout.tp,
        "cp": layout.cp,
        "ep": layout.ep,
        "etp": layout.etp,
        "ep_etp": layout.ep * layout.etp,
        "dp_cp": replicas,
        "expert_dp": expert_replicas,
        # Megatron accepts only layouts whose replicas the number of copies divides.
        "shard": replicas // math.gcd(replicas, instances),
        "expert_shard": expert_replicas // math.gcd(expert_replicas, instances),
    }


def rank_grid(layout: Layout) -> Ranks:
    """Return the RANK of each cell (pp, dp, cp, tp): order tp-cp-ep-dp-pp, or tp-cp-ep-pp-dp (parallel_state.py)."""
    return _grid(layout, layout.dp, layout.cp, layout.tp)


def _grid(layout: Layout, replicas: int, outer: int, inner: int) -> Ranks:
    """Return the RANK of each (pp, replica, outer, inner). Outer and inner are cp and tp, or ep and etp for experts."""
    ranks = np.arange(layout.world_size, dtype=np.int64)
    if layout.use_tp_pp_dp_mapping:
        return np.asarray(ranks.reshape(replicas, layout.pp, outer, inner).transpose(1, 0, 2, 3).copy())
    return ranks.reshape(layout.pp, replicas, outer, inner)


def _rows(grid: Ranks, axes: tuple[int, int, int, int]) -> Ranks:
    """Return groups whose members differ only along the last of `axes`."""
    return np.asarray(grid.transpose(axes).reshape(-1, grid.shape[axes[-1]]))
