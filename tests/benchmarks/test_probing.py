"""The adaptive scheme keeps most of the gain of full probing, in few rounds, on a fabric of 128 hosts."""

import pytest

from benchmarks.bench_probing import Scheme, World, fabric, noisy
from pipette_launch.probe.links.selection import MOST_ROUNDS, SCOUTED_ROUNDS


@pytest.mark.parametrize("knows_switches", [True, False])
def test_few_rounds_keep_most_of_the_gain(*, knows_switches: bool) -> None:
    """Of 127 rounds' gain over the order by switches, 30 keep 70 %, whether or not a scheduler names the switches."""
    drawn = fabric(128, noisy, 0)
    full, world = (World(fabric=drawn, seed=0) for _ in range(2))
    sorted_cost, full_cost = full.cost(drawn.sorted_H), full.cost_with(drawn.links)
    cost = Scheme(knows_switches=knows_switches).run(world)

    assert world.rounds <= MOST_ROUNDS
    assert full_cost < sorted_cost
    assert sorted_cost - cost >= 0.7 * (sorted_cost - full_cost)


def test_slow_hosts_do_not_join_racks() -> None:
    """The links of slow hosts, corrected for the host's speed, come last when racks are joined: 40 rounds keep 85 %."""
    drawn = fabric(256, noisy, 109)
    full, world = (World(fabric=drawn, seed=109) for _ in range(2))
    sorted_cost, full_cost = full.cost(drawn.sorted_H), full.cost_with(drawn.links)
    cost = Scheme(knows_switches=False, rounds=SCOUTED_ROUNDS).run(world)

    assert sorted_cost - cost >= 0.85 * (sorted_cost - full_cost)
