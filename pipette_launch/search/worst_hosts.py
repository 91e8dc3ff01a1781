"""A lower bound of a layout's step time over all placements: some ranks must lie on hosts with slow links."""

# D = directions (outgoing, incoming), H = hosts, K = trials, P = pipeline ranks, S = stages (model chunks).

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from pipette_launch.cost.communication.exchanges import group_sizes
from pipette_launch.cost.layers.loads import Collective
from pipette_launch.cost.layers.parameters import experts_lie_in_stages
from pipette_launch.cost.step.assemble import totals_s_K
from pipette_launch.cost.step.predictor import PlacementCost, best_prices, fewest_hosts
from pipette_launch.facts.cluster import Links
from pipette_launch.facts.layout import Floats, Ints

_ROUNDING = 1e-12
"""Share by which the bound is lowered to allow for rounding: placements add the same numbers in another order."""
Way = tuple[float, float]
"""Latency in seconds and seconds per byte of a link that is at least as fast as each link of some kind."""


class Ways(NamedTuple):
    """The best links of each host to others, outgoing and incoming. A group that leaves a host uses one of both."""

    latency_s_DH: Floats
    byte_s_DH: Floats
    slowest_first_H: Ints

    def of(self, host: int) -> tuple[Way, ...]:
        """Return the outgoing and the incoming way of a host."""
        return self._best(np.array([host]))

    def of_slowest(self, count: int) -> tuple[Way, ...]:
        """Return an outgoing and an incoming way. None of the `count` slowest hosts has a faster one."""
        return self._best(self.slowest_first_H[:count])

    def _best(self, hosts: Ints) -> tuple[Way, ...]:
        latency_s_D, byte_s_D = self.latency_s_DH[:, hosts].min(axis=1), self.byte_s_DH[:, hosts].min(axis=1)
        return tuple(zip(latency_s_D.tolist(), byte_s_D.tolist(), strict=True))


@lru_cache(maxsize=16)
def ways_of(links: Links, others: int) -> Ways:
    """Return the ways of hosts that exchange data with at least `others` other hosts each."""

    def best_DH(seconds_HH: Floats) -> Floats:
        apart_HH = np.where(np.eye(links.size, dtype=bool), np.inf, seconds_HH)
        directions = (apart_HH, apart_HH.T)
        return np.array([np.partition(one_HH, others - 1, axis=1)[:, others - 1] for one_HH in directions])

    byte_s_DH = best_DH(links.seconds_per_byte)
    return Ways(best_DH(links.latency_s), byte_s_DH, np.argsort(-byte_s_DH.max(axis=0), kind="stable"))


def worst_hosts_bound_s(model: PlacementCost) -> float:
    """Return a lower bound of a layout's step over all placements, in seconds; 0 s on a single host.

    Some pipeline rank uses the host with the slowest links, so the bound is the least step of trials with one such
    rank each. The hosts with the slowest links also hold ranks of other groups, because the others have too few slots.
    A group that fits on one host uses the best links.
    """
    work, fabric, layout = model.work, model.fabric, model.work.layout
    links, hosts, pp = fabric.cluster.between_hosts, len(fabric.cluster.hosts), layout.pp
    if hosts < 2:
        return 0.0
    sizes, fewest = group_sizes(layout, instances=work.shard_copies), fewest_hosts(work, fabric)
    worst, own_PK = int(ways_of(links, 1).slowest_first_H[0]), np.eye(pp, dtype=bool)
    slowness_H = model.slowness_W.reshape(hosts, -1).max(axis=1)
    trials = best_prices(work, fabric, np.where(own_PK, slowness_H[worst], model.slowness_W.min()))

    def least_s(kind: Collective, group: str, size_bytes: Floats, slots: int) -> tuple[Floats, Floats]:
        """Price the groups of ranks that have any `slots` slots, and groups with a rank on the worst host."""
        if fewest[group] < 2:
            seconds = fabric.bounds_s(kind, sizes[group], size_bytes)
            return seconds, seconds
        ways = ways_of(links, fewest[group] - 1 if kind == "all_to_all" else 1)
        # All other hosts together have fewer than `slots` slots.
        num_slowest = (layout.world_size - slots) // fabric.cluster.devices_per_host + 1

        def slower_direction_s(both: tuple[Way, ...]) -> Floats:
            seconds = [fabric.bounds_s(kind, sizes[group], size_bytes, fewest=fewest[group], way=way) for way in both]
            return np.maximum(*seconds)

        all_s = slower_direction_s(ways.of_slowest(num_slowest))
        return all_s, np.maximum(all_s, slower_direction_s(ways.of(worst)))

    for item, seconds_PK in zip(work.exchanges, trials.exchange_s_PD, strict=True):
        all_s, worst_s = least_s(item.kind, item.group, np.array(item.size_bytes), sizes[item.group])
        np.maximum(seconds_PK, np.where(own_PK, worst_s, all_s), out=seconds_PK)
    own_SK, slots = np.tile(own_PK, (layout.vpp, 1)), layout.world_size // pp
    for seconds_SK, kind, bytes_S2 in (
        (trials.reduce_s_SK, work.reduce_kind, work.gradient_bytes_S2),
        (trials.gather_s_SK, "all_gather", work.parameter_bytes_S2),
    ):
        dense_s_S, dense_worst_s_S = least_s(kind, "dp_cp", bytes_S2[:, 0], slots)
        expert_s_S, expert_worst_s_S = least_s(kind, "expert_dp", bytes_S2[:, 1], slots)
        if not experts_lie_in_stages(layout):
            expert_worst_s_S = expert_s_S
        all_s_S, worst_s_S = dense_s_S + expert_s_S, dense_worst_s_S + expert_worst_s_S
        seconds_SK[:] = np.where(own_SK, worst_s_S[:, None], all_s_S[:, None])
    return float(totals_s_K(work, trials).min()) * (1 - _ROUNDING) * model.factor
