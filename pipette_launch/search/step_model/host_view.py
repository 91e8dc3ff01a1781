"""A placement described by hosts: its prices, and the links between hosts that each kind of group uses."""

# W = ranks, H = hosts, P = pipeline ranks, D = replicas, G = groups, K = members of a group, L = links.

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from pipette_launch.cost.communication.collectives import (
    Kind,
    chunk_share,
    links_together,
    num_steps,
    spread_over_hosts,
)
from pipette_launch.cost.step.placed import PlacementCost
from pipette_launch.cost.step.work import Prices
from pipette_launch.search.assignment.problem import Floats, Ints


class OnHosts(NamedTuple):
    """Size of the groups of a kind, and how they lie on hosts."""

    size: int
    """Members of a group."""
    spans: int
    """Largest number of hosts of a group."""
    fewest: int = 1
    """Least number of members on a host, among groups on several hosts; 1 if no group is."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LinksBetweenHosts:
    """Directed links between hosts, each once for each pipeline rank whose groups use it."""

    spread: OnHosts
    stage_L: Ints
    sender_L: Ints
    receiver_L: Ints

    def __len__(self) -> int:
        return len(self.stage_L)

    def worst_P(self, seconds_L: Floats, pp: int) -> Floats:
        """The largest of each pipeline rank's links; 0 where it has none."""
        worst = np.zeros(pp)
        np.maximum.at(worst, self.stage_L, seconds_L)
        return worst


@dataclass(frozen=True, kw_only=True, eq=False)
class View:
    """A placement of a layout, host by host."""

    model: PlacementCost
    prices: Prices
    host_W: Ints
    stage_W: Ints
    """Pipeline rank of each rank."""
    slowness_H: Floats
    """Of the slowest slot of each host."""
    latency_s_HH: Floats
    per_byte_s_HH: Floats

    @classmethod
    def of(cls, model: PlacementCost, placement: Ints) -> View:
        """Look at a placement: the RANK of each slot."""
        cluster = model.fabric.cluster
        host_W = np.empty_like(placement)
        host_W[placement] = np.arange(len(placement)) // cluster.devices_per_host
        stage_W = np.empty_like(host_W)
        stage_W[model.groups.grid_PDCT] = np.arange(model.work.layout.pp)[:, None, None, None]
        return cls(
            model=model,
            prices=model.prices(placement.tolist()),
            host_W=host_W,
            stage_W=stage_W,
            slowness_H=model.slowness_W.reshape(-1, cluster.devices_per_host).max(axis=1),
            latency_s_HH=np.asarray(cluster.between_hosts.latency_s),
            per_byte_s_HH=cluster.between_hosts.seconds_per_byte(),
        )

    @property
    def num_hosts(self) -> int:
        """H."""
        return len(self.slowness_H)

    @property
    def gathers_first(self) -> bool:
        """Whether parameters are gathered behind the first forward, rather than after the optimizer."""
        layout = self.model.work.layout
        return layout.use_distributed_optimizer and layout.overlap_param_gather

    @property
    def bare(self) -> Prices:
        """The prices without exchanges between hosts, and without gathers that a forward waits for."""
        nothing = np.zeros_like(self.prices.slowness_PD)
        exchange_s_PD = tuple(
            nothing if self.crosses(item.group) else seconds
            for item, seconds in zip(self.model.work.exchanges, self.prices.exchange_s_PD, strict=True)
        )
        gather_s_S = np.zeros_like(self.prices.gather_s_S) if self.gathers_first else self.prices.gather_s_S
        return replace(self.prices, exchange_s_PD=exchange_s_PD, gather_s_S=gather_s_S)

    def crosses(self, name: str) -> bool:
        """Whether some group of this name lies on several hosts."""
        host_GK = self.host_W[getattr(self.model.groups, name)]
        return bool((host_GK != host_GK[:, :1]).any())

    def inside_s(self, size_bytes: float) -> float:
        """Seconds of a send inside a host."""
        if self.model.fabric.cluster.devices_per_host == 1:
            return 0.0
        return self.model.fabric.seconds("send", (0, 1), size_bytes)

    def seconds_HH(self, kind: Kind, spread: OnHosts, size_bytes: float) -> Floats:
        """Seconds of a collective if a link between two hosts is its slowest (as in `Fabric.seconds_G`): shape (H, H).

        Args:
            kind: of the collective.
            spread: of its group.
            size_bytes: of the message.

        """
        size, spans, fewest = spread
        scale = self.model.fabric.scale(kind, size)
        per_byte = float(scale.bytes_factor[spans]) * size_bytes * chunk_share(kind, size)
        if scale.is_measured:
            per_byte /= float(links_together(kind, np.array(fewest)))
        # In place: on many hosts each copy of the matrix takes longer than the arithmetic.
        seconds: Floats = self.per_byte_s_HH * (num_steps(kind, size) * per_byte)
        seconds += self.latency_s_HH * (num_steps(kind, size) * float(scale.latency_factor[spans]))
        seconds += num_steps(kind, size) * float(scale.extra_latency_s[spans])
        return seconds

    def links(self, kind: Kind, ranks_GK: Ints) -> LinksBetweenHosts:
        """Links between hosts that groups of ranks use."""
        host_GK = self.host_W[ranks_GK]
        size = host_GK.shape[1]
        hosts_G, fewest_G = spread_over_hosts(host_GK)
        across_G = hosts_G > 1
        spread = OnHosts(size, int(hosts_G.max(initial=1)), int(fewest_G[across_G].min()) if across_G.any() else 1)
        stage_G1 = self.stage_W[ranks_GK[:, :1]]
        codes = []
        for shift in range(1, size) if kind == "all_to_all" else (self.model.fabric.ring_shift(kind),):
            receiver_GK = np.roll(host_GK, -shift, axis=1)
            code_GK = (stage_G1 * self.num_hosts + host_GK) * self.num_hosts + receiver_GK
            codes.append(np.unique(code_GK[host_GK != receiver_GK]))
        code_L = np.unique(np.concatenate(codes)) if codes else np.zeros(0, dtype=np.int64)
        rest_L, receiver_L = np.divmod(code_L, self.num_hosts)
        stage_L, sender_L = np.divmod(rest_L, self.num_hosts)
        return LinksBetweenHosts(spread=spread, stage_L=stage_L, sender_L=sender_L, receiver_L=receiver_L)
