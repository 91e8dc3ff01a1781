"""The step time of one layout as a function of the placement alone, for one placement or many at once."""

# K = placements, W = ranks = slots, P = pipeline ranks, D = replicas, S = stages, R = all replicas of all K, those of
# one placement together. G = groups of one kind, M = members of a group, L = groups that meet in one pipeline rank.

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost.communication.collectives import Fabric, Kind, Routes
from pipette_launch.cost.communication.groups import Groups, group_sizes
from pipette_launch.cost.step.assemble import totals_s_K
from pipette_launch.cost.step.work import LayoutWork, Prices

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_SLOTS_AT_ONCE = 1 << 18
"""Placements are priced in blocks of about so many slots in all, some MB for each array."""


class PlacementCost:
    """The step time of one layout as a function of the placement alone: everything else is worked out once."""

    def __init__(self, work: LayoutWork, fabric: Fabric, slowness_W: Floats, *, factor: float = 1.0) -> None:
        self.work = work
        self.fabric = fabric
        self.slowness_W = slowness_W
        """1 / speed of each slot."""
        self.factor = factor
        """On all that `cost` and `costs` return: what was learned of such layouts."""
        self.groups = Groups.of(work.layout, instances=work.shard_copies)
        self._slots = np.arange(work.layout.world_size)
        self._lanes: dict[str, Ints] = {}

    def times(self, factor: float) -> PlacementCost:
        """Return the same with another factor."""
        if factor == self.factor:
            return self
        same = copy.copy(self)
        same.factor = factor
        return same

    def of(self, work: LayoutWork) -> PlacementCost:
        """Return the same for other work of this layout."""
        same = copy.copy(self)
        same.work = work
        return same

    def cost(self, placement: Sequence[int] | Ints) -> float:
        """Predicted seconds per step; `placement` is the RANK of each slot."""
        return float(self.costs(np.asarray(placement, dtype=np.int64)[None])[0])

    def costs(self, placement_KW: Ints) -> Floats:
        """Predicted seconds per step of many placements, one in each row: `cost` of each, to the digit."""
        block = max(1, _SLOTS_AT_ONCE // len(self._slots))
        blocks = [placement_KW[first : first + block] for first in range(0, len(placement_KW), block)]
        seconds = [totals_s_K(self.work, self._prices(self._slot_KW(some))) for some in blocks]
        return (np.concatenate(seconds) if seconds else np.zeros(0)) * self.factor

    def prices(self, placement: Sequence[int] | Ints) -> Prices:
        """Price every group on the slots that the placement gives it; without `factor`."""
        prices = self._prices(self._slot_KW(np.asarray(placement, dtype=np.int64)[None]))
        return replace(
            prices,
            reduce_s_S=prices.reduce_s_S[:, 0],
            gather_s_S=prices.gather_s_S[:, 0],
            embedding_s=float(np.asarray(prices.embedding_s)[0]),
        )

    def _slot_KW(self, placement_KW: Ints) -> Ints:
        """Slot of each RANK."""
        slot_KW = np.empty(placement_KW.shape, dtype=np.int64)
        slot_KW[np.arange(len(placement_KW))[:, None], placement_KW] = self._slots
        return slot_KW

    def _prices(self, slot_KW: Ints) -> Prices:
        work, groups = self.work, self.groups
        # The same collective comes twice where only one of its uses passes behind compute.
        priced: dict[tuple[str, str, float], Floats] = {}
        rings: dict[tuple[str, int], Routes] = {}
        exchange_s = []
        for item in work.exchanges:
            key = (item.kind, item.group, item.size_bytes)
            if key not in priced:
                ranks_GM: Ints = getattr(groups, item.group)
                way = (item.group, self.fabric.ring_shift(item.kind))
                if item.kind == "all_to_all":
                    seconds = self.fabric.seconds_G(item.kind, _placed(slot_KW, ranks_GM), item.size_bytes)
                else:
                    if way not in rings:
                        rings[way] = self.fabric.routes(item.kind, _placed(slot_KW, ranks_GM))
                    seconds = self.fabric.routed_s_G(item.kind, ranks_GM.shape[1], rings[way], item.size_bytes)
                priced[key] = self._lanes_PR(item.group, seconds.reshape(len(slot_KW), -1))
            exchange_s.append(priced[key])
        forward_s, backward_s = self._hops_PR(slot_KW)
        reduce_s, gather_s = self._once_a_step_SK(slot_KW)
        embedding_s_K = np.zeros(len(slot_KW))
        if work.traffic.embedding_bytes:
            pairs = _placed(slot_KW, groups.embedding)
            seconds_G = self.fabric.seconds_G("all_reduce", pairs, work.traffic.embedding_bytes)
            embedding_s_K = seconds_G.reshape(len(slot_KW), -1).max(axis=1)
        slowness_KPD = self.slowness_W[slot_KW][:, groups.grid_PDCT].max(axis=(3, 4))
        return Prices(
            slowness_PD=_columns(slowness_KPD),
            exchange_s_PD=tuple(exchange_s),
            forward_hop_s_PD=forward_s,
            backward_hop_s_PD=backward_s,
            reduce_s_S=reduce_s,
            gather_s_S=gather_s,
            embedding_s=embedding_s_K,
        )

    def _lanes_PR(self, group: str, seconds_KG: Floats) -> Floats:
        """Slowest group on each pipeline rank of each replica: its tensor-parallel ranks wait for each other."""
        if group not in self._lanes:
            self._lanes[group] = self.groups.met_PDL(getattr(self.groups, group))
        lane_PDL = self._lanes[group]
        if lane_PDL.shape[2] == 1:
            return _columns(seconds_KG[:, lane_PDL[:, :, 0]])
        return _columns(seconds_KG[:, lane_PDL].max(axis=3))

    def _hops_PR(self, slot_KW: Ints) -> tuple[Floats, Floats]:
        """From each pipeline rank to the next and back, slowest lane of each replica: its lanes wait for each other."""
        layout = self.work.layout
        if layout.pp == 1:
            nothing = np.zeros((1, len(slot_KW) * layout.dp))
            return nothing, nothing
        shape = (len(slot_KW), layout.pp, layout.dp, layout.cp * layout.tp)
        sender, receiver = (slot_KW[:, end] for end in self.groups.forward_hop.T)
        forward_s, backward_s = (
            _columns(self.fabric.send_s(*way, self.work.hop_bytes).reshape(shape).max(axis=3))
            for way in ((sender, receiver), (receiver, sender))
        )
        return forward_s, backward_s

    def _once_a_step_SK(self, slot_KW: Ints) -> tuple[Floats, Floats]:
        """Reduce every stage's gradients, and gather its parameters: slowest group of the pipeline rank."""
        work, layout = self.work, self.work.layout
        reduce_s, gather_s = (np.zeros((layout.num_chunks, len(slot_KW))) for _ in range(2))
        uses = [(reduce_s, work.reduce_kind, work.gradient_bytes_S2)]
        if layout.use_distributed_optimizer:
            uses.append((gather_s, work.gather_kind, work.parameter_bytes_S2))
        for ranks_GM, column in ((self.groups.dp_cp, 0), (self.groups.expert_dp, 1)):
            if ranks_GM.shape[1] == 1 or not any(sizes_S2[:, column].any() for _, _, sizes_S2 in uses):
                continue
            rings: dict[int, Routes] = {}
            for seconds_SK, kind, sizes_S2 in uses:
                shift = self.fabric.ring_shift(kind)
                if shift not in rings:
                    rings[shift] = self.fabric.routes(kind, _placed(slot_KW, ranks_GM))
                known: dict[bytes, Floats] = {}
                for first in range(0, layout.num_chunks, layout.pp):
                    size_P = sizes_S2[first : first + layout.pp, column]
                    # Most chunks of a pipeline rank are alike.
                    if size_P.tobytes() not in known:
                        known[size_P.tobytes()] = self._rings_s_PK(kind, ranks_GM.shape, rings[shift], size_P)
                    seconds_SK[first : first + layout.pp] += known[size_P.tobytes()]
        return reduce_s, gather_s

    def _rings_s_PK(self, kind: Kind, shape: tuple[int, ...], routes: Routes, size_P: Floats) -> Floats:
        """Slowest ring of each pipeline rank; those that have nothing to send take no time."""
        lanes = shape[0] // self.work.layout.pp
        num_placements = len(routes.hosts_G) // shape[0]
        size_G = np.tile(np.repeat(size_P, lanes), num_placements)
        seconds_G = self.fabric.routed_s_G(kind, shape[1], routes, size_G) * (size_G > 0)
        return np.asarray(seconds_G.reshape(num_placements, -1, lanes).max(axis=2).T)


def best_prices(work: LayoutWork, fabric: Fabric, slowness_PK: Floats) -> Prices:
    """Price every group over the best links (`Fabric.bound_s`): no placement of the layout has lower prices.

    Args:
        work: what one replica of the layout does.
        fabric: the links.
        slowness_PK: 1 / speed of the slot of each pipeline rank, one column for each case that is priced.

    """
    layout, cases = work.layout, (1, slowness_PK.shape[1])
    sizes = group_sizes(layout, instances=work.shard_copies)
    hop_PK = np.full(slowness_PK.shape, fabric.bound_s("send", min(layout.pp, 2), work.hop_bytes))
    exchange_s = [fabric.bound_s(item.kind, sizes[item.group], item.size_bytes) for item in work.exchanges]

    def once_a_step_SK(kind: Kind, bytes_S2: Floats) -> Floats:
        dense_S, expert_S = (
            fabric.bounds_s(kind, sizes[group], bytes_S)
            for group, bytes_S in zip(("dp_cp", "expert_dp"), bytes_S2.T, strict=True)
        )
        return np.tile((dense_S + expert_S)[:, None], cases)

    tied = work.traffic.embedding_bytes
    return Prices(
        slowness_PD=slowness_PK,
        exchange_s_PD=tuple(np.full(slowness_PK.shape, seconds) for seconds in exchange_s),
        forward_hop_s_PD=hop_PK,
        backward_hop_s_PD=hop_PK,
        reduce_s_S=once_a_step_SK(work.reduce_kind, work.gradient_bytes_S2),
        gather_s_S=once_a_step_SK(work.gather_kind, work.parameter_bytes_S2),
        embedding_s=fabric.bound_s("all_reduce", 2, tied) if tied else 0.0,
    )


def _placed(slot_KW: Ints, ranks_GM: Ints) -> Ints:
    """Slots of all groups of all placements, one group in each row."""
    return slot_KW[:, ranks_GM].reshape(-1, ranks_GM.shape[1])


def _columns(values_KPD: Floats) -> Floats:
    """Lay the replicas of all placements side by side."""
    return np.asarray(values_KPD.transpose(1, 0, 2).reshape(values_KPD.shape[1], -1))
