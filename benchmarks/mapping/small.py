"""Random heterogeneous instances of a few hosts, and judges that price every permutation without `Flows`."""

# H = hosts, K = permutations, F = flows.

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.mapping.pipette_cost import Floats, Ints, PipetteCost
from pipette_launch.search.assignment.descent import Flows


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """An objective on an instance."""

    objective: str
    flows: Flows
    judge: Callable[[Ints], Floats]
    """Costs of permutations (K, H)."""


def problems(instance: int) -> Iterator[Problem]:
    """Pipette's cost for each number of stages that divides the hosts, and a ring and a path in one sum."""
    rng = np.random.default_rng(instance)
    ms_HH = _links(rng)
    hosts = len(ms_HH)
    for stages in range(1, hosts + 1):
        if hosts % stages == 0:
            # The message sizes are drawn too, so that neither pipelines nor rings decide always.
            sizes = rng.uniform(10, 100, size=2)
            pipette = PipetteCost(ms_HH=ms_HH, stages=stages, pipeline_mb=float(sizes[0]), gradient_mb=float(sizes[1]))
            yield Problem(objective="Pipette's cost", flows=pipette.flows(), judge=_judge_of(pipette))
    yield _ring_and_path(ms_HH, float(rng.uniform(0.1, 2.0)))


def _judge_of(pipette: PipetteCost) -> Callable[[Ints], Floats]:
    return lambda place_KH: pipette.costs(place_KH.reshape(len(place_KH), -1, pipette.stages))


def _ring_and_path(ms_HH: Floats, weight: float) -> Problem:
    hosts = len(ms_HH)
    ring = np.arange(hosts)
    flows = Flows(
        seconds_THH=ms_HH[None],
        sender_F=np.concatenate([ring, ring[:-1]]),
        receiver_F=np.concatenate([np.roll(ring, -1), ring[1:]]),
        type_F=np.zeros(2 * hosts - 1, dtype=np.int64),
        weight_F=np.repeat([1.0, weight], [hosts, hosts - 1]),
        group_F=np.zeros(2 * hosts - 1, dtype=np.int64),
        offset_G=np.zeros(1),
        family_G=np.zeros(1, dtype=np.int64),
    )

    def judge(place_KH: Ints) -> Floats:
        path_K = ms_HH[place_KH[:, :-1], place_KH[:, 1:]].sum(axis=1)
        cost_K: Floats = (1 + weight) * path_K + ms_HH[place_KH[:, -1], place_KH[:, 0]]
        return cost_K

    return Problem(objective="ring + path", flows=flows, judge=judge)


def _links(rng: np.random.Generator) -> Floats:
    """4 to 9 hosts in one to three racks; directed noise on every link, and now and then a bad host. ms per MB."""
    hosts = int(rng.integers(4, 10))
    rack_H = rng.integers(int(rng.integers(1, 4)), size=hosts)
    speed_HH = np.where(rack_H[:, None] == rack_H, 20.0, 20.0 * rng.uniform(0.3, 1.0))
    speed_HH = speed_HH * (1 - np.minimum(np.abs(rng.normal(0, rng.uniform(0.02, 0.3), (hosts, hosts))), 0.9))
    bad_H = rng.random(hosts) < 0.1
    ms_HH = 1 / (speed_HH * np.where(bad_H[:, None] | bad_H, 0.6, 1.0))
    np.fill_diagonal(ms_HH, 0.0)
    return ms_HH
