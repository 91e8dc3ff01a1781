"""Imagined fabrics with known racks and pods, for tests that find or use them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from facts_for_tests import tiny_cluster
from numpy.typing import NDArray

from pipette_launch.facts import Cluster, Links


@dataclass(frozen=True, kw_only=True, eq=False)
class FatTree:
    """Hosts in racks of `sizes[0]`, pods of `sizes[1]` racks and so on, in a shuffled order."""

    links: Links
    group_LH: NDArray[np.int64]
    """The rack, pod and so on of each host."""


def fat_tree(
    hosts: int,
    *,
    sizes: Sequence[int],
    bytes_per_s: Sequence[float],
    noise: float = 0.0,
    bad: float = 0.0,
    seed: int = 0,
) -> FatTree:
    """Draw links whose bandwidth depends on the nearest common switch; `bytes_per_s` has one entry more than `sizes`.

    Args:
        hosts: how many.
        sizes: hosts of a rack, racks of a pod, and so on.
        bytes_per_s: inside a rack, inside a pod, ..., across everything.
        noise: each link is slower by |N(0, noise)|.
        bad: the share of hosts all of whose links have 0.6 of their bandwidth.
        seed: of the order and the noise.

    """
    rng = np.random.default_rng(seed)
    place_H = rng.permutation(hosts)
    group_LH = np.array([place_H // width for width in np.cumprod(sizes)]).reshape(len(sizes), hosts)
    speed_HH = np.full((hosts, hosts), float(bytes_per_s[-1]))
    for group_H, speed in reversed(list(zip(group_LH, bytes_per_s[:-1], strict=True))):
        speed_HH[group_H[:, None] == group_H[None, :]] = speed
    speed_HH /= 1 + np.abs(rng.normal(0.0, noise, (hosts, hosts))) if noise else 1.0
    health_H = np.where(rng.random(hosts) < bad, 0.6, 1.0)
    speed_HH *= np.minimum(health_H[:, None], health_H[None, :])
    np.fill_diagonal(speed_HH, 0.0)
    latency_HH = np.where(np.eye(hosts, dtype=bool), 0.0, 1e-5)
    links = Links(
        latency_s=tuple(map(tuple, latency_HH.tolist())), bandwidth_bytes_per_s=tuple(map(tuple, speed_HH.tolist()))
    )
    return FatTree(links=links, group_LH=group_LH)


def cluster_with(links: Links, *, devices: int = 1) -> Cluster:
    """Tiny hosts with given links between them."""
    return replace(tiny_cluster(links.size, devices), between_hosts=links)
