"""Orders of RANKs that look at no measurement: torchrun's own, sorted by declared switches, and random."""

# N = hosts, D = devices of one host.

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from benchmarks.rivals.inputs import slot_of_rank
from benchmarks.rivals.pick import Pick, Placement, PlannerOptions, Ranking, torchrun_order
from pipette_launch.errors import PlanError
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.measurements import Measurements

Placer = Callable[[Layout, Measurements, PlannerOptions], Placement]


def by_torchrun(layout: Layout, measurements: Measurements, options: PlannerOptions) -> Placement:
    """Return torchrun's order: hosts as they registered, and their devices in a row.

    Raises:
        PlanError: the layout does not fill the cluster.

    """
    del options
    slot_of_rank(layout, measurements, None)
    return torchrun_order(layout.world_size)


def by_switches(layout: Layout, measurements: Measurements, options: PlannerOptions) -> Placement:
    """Sort the hosts by their declared switches, as DLRover does, so that neighbours in RANK share a switch.

    DLRover (intelligent-machine-learning/dlrover, pull requests 1740 and 1741) reads a map of access and pod switches
    and measures nothing. Hosts of one switch stay in torchrun's order; without a map that is the whole order.

    Raises:
        PlanError: the layout does not fill the cluster, or switches are declared for another number of hosts.

    """
    slot_of_rank(layout, measurements, None)
    num_hosts = len(measurements.cluster.hosts)
    switches_H = options.switches_H or ((),) * num_hosts
    if len(switches_H) != num_hosts:
        raise PlanError(f"switches are declared for {len(switches_H)} hosts, the cluster has {num_hosts}")
    order = sorted(range(num_hosts), key=lambda host: (switches_H[host], host))
    return in_host_order(order, measurements.cluster.devices_per_host)


def at_random(layout: Layout, measurements: Measurements, options: PlannerOptions) -> Placement:
    """Shuffle the hosts, each with its devices in a row: a random order of devices would tear TP groups apart.

    Raises:
        PlanError: the layout does not fill the cluster.

    """
    slot_of_rank(layout, measurements, None)
    order = list(range(len(measurements.cluster.hosts)))
    random.Random(options.seed).shuffle(order)
    return in_host_order(order, measurements.cluster.devices_per_host)


PLACERS: Mapping[str, Placer] = {
    "topology-sorted": by_switches,
    "torchrun-order": by_torchrun,
    "random": at_random,
}


def in_host_order(order: Sequence[int], devices_per_host: int) -> Placement:
    """Return the RANK of each slot where the hosts have their RANKs in this order."""
    rank_ND = np.empty((len(order), devices_per_host), dtype=np.int64)
    rank_ND[list(order)] = np.arange(rank_ND.size).reshape(rank_ND.shape)
    return tuple(rank_ND.ravel().tolist())


def ranking_of(name: str) -> Ranking:
    """Make a ranking of one of `PLACERS`: the user's own layout, placed."""
    placer = PLACERS[name]

    def ranking(job: Job, measurements: Measurements, options: PlannerOptions) -> tuple[Pick, ...]:
        note = f"The user's own layout with RANKs in the order {name}."
        placement = placer(job.own, measurements, options)
        return (Pick(layout=job.own, placement=placement, claimed_s=None, note=note),)

    return ranking
