"""Jobs and machines on which the planner has something to decide."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from facts_for_tests import tiny_cluster, tiny_job, tiny_measurements
from search.fabrics import cluster_with, fat_tree
from search.toys import never

from pipette_launch.facts import Batch, Choice, Cluster, Job, Layout, Links, Measurements, Plan, Provenance
from pipette_launch.facts.cluster import in_device_order
from pipette_launch.facts.co_location import Domains, RankBlock, blocks_of
from pipette_launch.search.placement import ROUNDS, begin, improve
from pipette_launch.search.slots import IsLate, Placed, PlacementProblem
from pipette_launch.search.solve import SolveOptions, solve

PROVENANCE = Provenance(key="0123456789abcdef", made_at="2026-11-21T00:00:00Z", versions={}, source="measured")
ALL_FIELDS = tuple(sorted(Layout.__dataclass_fields__))


def still() -> float:
    """A clock on which no time passes, so that the budget is never the limit."""
    return 0.0


def on_gpus(cluster: Cluster) -> Cluster:
    """The same cluster, of GPUs."""
    hosts = tuple(
        replace(host, devices=tuple(replace(device, kind="cuda") for device in host.devices)) for host in cluster.hosts
    )
    return replace(cluster, hosts=hosts)


def named(cluster: Cluster, device: str) -> Cluster:
    """The same cluster, of devices of another name."""
    hosts = tuple(
        replace(host, devices=tuple(replace(one, name=device) for one in host.devices)) for host in cluster.hosts
    )
    return replace(cluster, hosts=hosts)


def is_in_device_order(placement: Sequence[int], devices: int) -> bool:
    """Whether a higher device has a higher rank on each host."""
    return list(placement) == in_device_order(placement, devices).tolist()


def nvlink_racks(hosts: int, rack: int, devices: int, *, seed: int = 0) -> Cluster:
    """Hosts of GB200 in NVLink domains of so many hosts, in a shuffled order."""
    fabric = fat_tree(hosts, sizes=(rack,), bytes_per_s=(7e11, 5e10), noise=0.05, seed=seed)
    return named(on_gpus(cluster_with(fabric.links, devices=devices)), "GB200-NVL72")


def with_experts(measured: Measurements) -> Measurements:
    """The same, with layers of experts that take as long as others."""
    moe = tuple(replace(one, part="moe_layer") for one in measured.compute if one.part == "layer")
    return replace(measured, compute=measured.compute + moe)


def splits(job: Job, cluster: Cluster, choice: Choice) -> RankBlock | None:
    """A block that a plan does not keep together though the job's flags demand it."""
    rooms = Domains.of(cluster)
    return rooms.split(blocks_of(job.model, job.options, choice.layout, rooms), choice.placement)


def two_racks(*, slow_bytes_per_s: float = 1e7) -> Cluster:
    """Four hosts of one device: 0 and 2 share a rack, so do 1 and 3; torchrun's order goes back and forth."""

    def speed(one: int, other: int) -> float:
        if one == other:
            return 0.0
        return 1e9 if one % 2 == other % 2 else slow_bytes_per_s

    links = Links(
        latency_s=tuple(tuple(0.0 if i == j else 1e-4 for j in range(4)) for i in range(4)),
        bandwidth_bytes_per_s=tuple(tuple(speed(i, j) for j in range(4)) for i in range(4)),
    )
    return replace(tiny_cluster(4, 1), between_hosts=links)


def pipeline_job() -> Job:
    """Four stages, and nothing else allowed."""
    return tiny_job(4, own=Layout(pp=4), batch=Batch(global_batch_size=8), pinned=ALL_FIELDS)


SLOW_BYTES_PER_S = 5e7
"""Bandwidth between hosts that makes the plain job's own data parallelism clearly slower than the best plan."""


def planned(job: Job, measurements: Measurements | None = None, **options: object) -> Plan:
    """Plan with all the time in the world; without measurements on hosts with slow links."""
    measurements = measurements or tiny_measurements(tiny_cluster(bandwidth_bytes_per_s=SLOW_BYTES_PER_S))
    return solve(
        job,
        measurements,
        options=SolveOptions(**options),  # type: ignore[arg-type]
        clock=still,
        provenance=PROVENANCE,
    )


def improvements(problem: PlacementProblem, *, seed: int = 0, is_late: IsLate = never) -> list[Placed]:
    """The best start of a layout's placement, and what each round of `improve` makes of it."""
    rng = random.Random(seed)
    found = [begin(problem)[0]]
    for turn in range(ROUNDS):
        if problem.meets_bound(found[-1]) or is_late():
            break
        found.append(improve(problem, found[-1], turn=turn, rng=rng, is_late=is_late))
    return found
