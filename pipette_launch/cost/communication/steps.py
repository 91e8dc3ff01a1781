"""The steps of a collective: how many, what each moves, to whom, and over how many links at once."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]

_DOWNWARDS: dict[str, tuple[Kind, ...]] = {"cpu": ("all_reduce", "reduce_scatter"), "cuda": ()}
"""Rings in which each member sends to the one before it. So gloo reduces, and gathers the other way: on four hosts
whose links carry 25 MB/s to the next and 100 MB/s back, an all-gather of 20 MB takes 630 ms, where links of 100 MB/s
both ways give 170; a reduce-scatter takes its 340 as ever. NCCL's direction has not been measured."""


def ring_shift(kind: Kind, device_kind: Literal["cuda", "cpu"]) -> int:
    """To which member of a ring each sends, counted from itself: 1 = the next, -1 = the one before."""
    return -1 if kind in _DOWNWARDS[device_kind] else 1


def num_steps(kind: Kind, size: int) -> int:
    """How many chunks each member of a group of `size` sends, one after the other."""
    if size < 2:
        return 0
    if kind == "send":
        return 1
    return 2 * (size - 1) if kind == "all_reduce" else size - 1


def library_share(kind: Kind, device_kind: Literal["cuda", "cpu"]) -> float:
    """How many times the steps of a ring the library is known to take: gloo runs a reduce-scatter as an all-reduce."""
    return 2.0 if device_kind == "cpu" and kind == "reduce_scatter" else 1.0


def chunk_share(kind: Kind, size: int) -> float:
    """The part of the tensor that one step moves."""
    return 1.0 if kind == "send" else 1.0 / size


def spread_over_hosts(host_GK: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Count the hosts of each group, and its members on the host with the fewest of them; 1 on a single host.

    Args:
        host_GK: the host of every member of every group.

    """
    if (host_GK[:, 1:] < host_GK[:, :-1]).any():
        host_GK = np.sort(host_GK, axis=1)
    begins_GK = np.ones(host_GK.shape, dtype=bool)
    np.not_equal(host_GK[:, 1:], host_GK[:, :-1], out=begins_GK[:, 1:])
    hosts_G = begins_GK.sum(axis=1)
    if hosts_G.max(initial=1) == 1 or host_GK.shape[1] == 2:
        return hosts_G, np.ones_like(hosts_G)
    first = np.flatnonzero(begins_GK)
    # In place: placements are priced by the million.
    members = np.empty_like(first)
    members[:-1] = first[1:]
    members[-1] = host_GK.size
    members -= first
    fewest_G = np.minimum.reduceat(members, hosts_G.cumsum() - hosts_G)
    fewest_G[hosts_G == 1] = 1
    return hosts_G, fewest_G


def links_together(kind: Kind, fewest: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many links between two hosts carry a group's traffic at the same time.

    Links are measured while all slots of two hosts send, so the rate of a link is one slot's share. A ring crosses each
    pair of hosts over the links of all members on a host: one wire that they share, or their own network cards. Each
    byte passes every host, so the host with the fewest members limits the ring: NCCL gives a host with one member one
    network card. Unequal shares of one wire are therefore priced too high. In an all-to-all all members send at once.

    Args:
        kind: of the collective.
        fewest: members on the host that has the fewest, from `spread_over_hosts`.

    """
    return np.ones_like(fewest) if kind == "all_to_all" else fewest


def most_links_together(kind: Kind, size: int, num_hosts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the largest `links_together` of any group of this size, by hosts: members in equal shares."""
    return links_together(kind, np.where(num_hosts > 1, np.maximum(size // np.maximum(num_hosts, 1), 1), 1))
