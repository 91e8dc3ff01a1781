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


def links_together(kind: Kind, size: int, num_hosts: NDArray[np.int64]) -> NDArray[np.float64]:
    """How many slots' links between two hosts a group has for itself where it lies on so many hosts.

    Links are measured while all slots of two hosts send, so each slot's is its part. A ring crosses each pair of hosts
    once, and the links of all its members on a host carry that: one wire that they share, or their own network cards.
    In an all-to-all all members send at once.
    """
    if kind == "all_to_all":
        return np.ones(num_hosts.shape)
    return np.where(num_hosts > 1, np.maximum(size / num_hosts, 1.0), 1.0)
