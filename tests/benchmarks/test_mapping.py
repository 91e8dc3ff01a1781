"""The mapping benchmark's problems are what they claim to be."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from benchmarks.mapping.fabrics import Fabric, grid_flows
from benchmarks.mapping.pipette_cost import PipetteCost, measured_ms_per_mb, shortest_path_ms
from benchmarks.mapping.small import problems


@pytest.mark.parametrize(("stages", "host_order_ms"), [(2, 233.61), (4, 117.31), (8, 73.53), (16, 78.59)])
def test_host_order_costs_what_was_measured_before(stages: int, host_order_ms: float) -> None:
    """What Pipette's objective gives on its published bandwidths, by the direct formula and by flows."""
    problem = PipetteCost.of_gpt(measured_ms_per_mb(), stages)
    state_PS = np.arange(16).reshape(-1, stages)

    assert host_order_ms == round(problem.cost(state_PS), 2)
    assert problem.cost(state_PS) == pytest.approx(problem.flows().cost(state_PS.ravel()), rel=1e-12)


def test_the_shortest_path_is_the_shortest() -> None:
    """Against every order of six hosts."""
    ms_HH = np.random.default_rng(0).uniform(1, 2, (6, 6))
    orders_KH = np.array(list(permutations(range(6))))

    assert shortest_path_ms(ms_HH) == pytest.approx(ms_HH[orders_KH[:, :-1], orders_KH[:, 1:]].sum(axis=1).min())


@pytest.mark.parametrize("instance", range(8))
def test_judges_agree_with_flows(instance: int) -> None:
    """On some permutations of each objective of an instance."""
    rng = np.random.default_rng(instance)
    for problem in problems(instance):
        place_KQ = np.array([rng.permutation(problem.flows.num_seats) for _ in range(5)])

        assert problem.judge(place_KQ) == pytest.approx(problem.flows.costs(place_KQ), rel=1e-12)


def test_a_fabric_is_shuffled_and_known() -> None:
    """Sorted order brings leaves together again, and the ring of each stage and the paths are in the flows."""
    fabric = Fabric.drawn(64, seed=0)
    flows = grid_flows(fabric.seconds_HH, stages=4)

    assert (64 + 48, 64 * 1.0 + 48 * 0.3) == (flows.num_flows, pytest.approx(flows.weight_F.sum()))
    assert flows.cost(fabric.sorted_H) < flows.cost(np.arange(64))
