"""Synthetic fabrics in tiers, and the flows of a grid of pipelines and data-parallel rings on them.

Leaves of 16 hosts at 1.0, pods of 8 leaves at 0.8, the core at 0.6;
each link slower by |N(0, 8 %)|, both ways alike; 2 % of the hosts at 0.6 of all that; hosts in shuffled order.
"""

# H = hosts, Q = seats = stages * replicas, in the order of Megatron's ranks: a row holds the replicas of a stage.

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipette_launch.facts import Links
from pipette_launch.search.assignment.descent import Flows

LEAF, POD = 16, 8
TIERS = (1.0, 0.8, 0.6)
NOISE = 0.08
BAD_SHARE, BAD_SPEED = 0.02, 0.6
RING, PIPELINE = 1.0, 0.3

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Fabric:
    """Seconds per unit of flow between the hosts of an allocation, and their true order by pod and leaf."""

    seconds_HH: Floats
    sorted_H: Ints

    @classmethod
    def drawn(cls, hosts: int, seed: int) -> Fabric:
        """One allocation."""
        rng = np.random.default_rng(seed)
        leaf_H = np.arange(hosts) // LEAF
        pod_H = leaf_H // POD
        near_HH, same_HH = pod_H[:, None] == pod_H, leaf_H[:, None] == leaf_H
        speed_HH = np.where(same_HH, TIERS[0], np.where(near_HH, TIERS[1], TIERS[2]))
        noise_HH = np.triu(np.abs(rng.normal(0, NOISE, (hosts, hosts))), 1)
        bad_H = np.zeros(hosts, dtype=bool)
        bad_H[rng.choice(hosts, max(1, round(BAD_SHARE * hosts)), replace=False)] = True
        speed_HH = speed_HH * np.where(bad_H[:, None] | bad_H, BAD_SPEED, 1.0)
        speed_HH = speed_HH * (1 - np.minimum(noise_HH + noise_HH.T, 0.9))
        shuffled_H = rng.permutation(hosts)
        seconds_HH = 1.0 / speed_HH[shuffled_H][:, shuffled_H]
        np.fill_diagonal(seconds_HH, 0.0)
        return cls(seconds_HH=seconds_HH, sorted_H=np.argsort(shuffled_H))

    @property
    def links(self) -> Links:
        """As measured: no latency, and the bandwidth of each pair for the message size that separates tiers."""
        speed_HH = np.divide(1e10, self.seconds_HH, out=np.ones_like(self.seconds_HH), where=self.seconds_HH > 0)
        return Links(latency_s=np.zeros_like(speed_HH), bandwidth_bytes_per_s=speed_HH)


def grid_flows(seconds_HH: Floats, stages: int) -> Flows:
    """One sum: a closed ring through the replicas of each stage, and a path through the stages of each replica."""
    seat_PR = np.arange(len(seconds_HH)).reshape(stages, -1)
    ring, path = seat_PR.size, seat_PR[:-1].size
    return Flows(
        seconds_THH=seconds_HH[None],
        sender_F=np.concatenate([seat_PR.ravel(), seat_PR[:-1].ravel()]),
        receiver_F=np.concatenate([np.roll(seat_PR, -1, axis=1).ravel(), seat_PR[1:].ravel()]),
        type_F=np.zeros(ring + path, dtype=np.int64),
        weight_F=np.repeat([RING, PIPELINE], [ring, path]),
        group_F=np.zeros(ring + path, dtype=np.int64),
        offset_G=np.zeros(1),
        family_G=np.zeros(1, dtype=np.int64),
    )
