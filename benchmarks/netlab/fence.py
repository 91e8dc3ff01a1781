"""Processor quota and cores of a fenced host, computed from the topology alone. Pure.

A host keeps to cores of its own choice, so that its quota is never split over processors that take turns in using it
up, and the quotas on one core never add up to more than the core.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from benchmarks.netlab.topology import Topology, TopologyError

PERIOD_US = 5_000
"""Period of the quota in microseconds: short, because the messages of a step take tens of milliseconds."""
LEAST_US = 1_000
"""The kernel takes no smaller quota and no shorter period."""
ROUNDING = 1e-9


def processors(topology: Topology, host: str) -> float:
    """Return how many processors all slots of a host have together, its share left aside.

    Raises:
        TopologyError: the topology has no fence.

    """
    if topology.cores_per_slot is None:
        raise TopologyError("a topology without cores_per_slot has no fence")
    return topology.host(host).slots * topology.cores_per_slot


def timing_us(wanted: float, period_us: int) -> tuple[int, int]:
    """Return quota and period for a number of processors; a small quota gets a longer period."""
    period_us = max(period_us, math.ceil(LEAST_US / wanted))
    return round(wanted * period_us), period_us


def places(topology: Topology, cores: Sequence[int]) -> Mapping[str, tuple[int, ...]]:
    """Give each host the cores that it keeps to: as few as hold its processors, the emptiest first.

    Raises:
        TopologyError: the hosts want more than these cores have.

    """
    filled = dict.fromkeys(cores, 0.0)
    found = {}
    wanted = {host.name: processors(topology, host.name) for host in topology.hosts}
    for name in sorted(wanted, key=lambda name: -wanted[name]):
        number = math.ceil(wanted[name] - ROUNDING)
        taken = sorted(filled, key=lambda core: (filled[core], core))[:number]
        for core in taken:
            filled[core] += wanted[name] / number
        found[name] = tuple(sorted(taken))
        if len(taken) < number or any(filled[core] > 1 + ROUNDING for core in taken):
            raise TopologyError(
                f"cores_per_slot={topology.cores_per_slot}: the hosts want {sum(wanted.values()):g} processors, "
                f"each of {len(cores)} cores for itself or beside others; make it smaller"
            )
    return found
