"""The rounds of a warm-up keep most of the gain of full probing."""

import pytest

from benchmarks.bench_probing import Unlike, World, blind, fabric, noisy, of_ends, scouted


@pytest.mark.parametrize(
    ("unlike", "hosts", "seed", "knows_switches", "rounds", "kept"),
    [
        (noisy, 128, 0, True, 30, 0.7),
        (noisy, 128, 0, False, 50, 0.7),
        (noisy, 256, 109, False, 50, 0.85),
        (of_ends, 256, 106, False, 50, 0.85),
        (of_ends, 512, 200, True, 30, 0.9),
    ],
    ids=[
        "switches known",
        "switches unknown",
        "slow hosts do not join racks",
        "each host has its own speed",
        "leaves are found though hosts differ in speed",
    ],
)
def test_few_rounds_keep_most_of_the_gain(
    unlike: Unlike, hosts: int, seed: int, rounds: int, kept: float, *, knows_switches: bool
) -> None:
    """A few rounds keep most of the gain of all rounds over the order by switches."""
    drawn = fabric(hosts, unlike, seed)
    full, world = (World(fabric=drawn, seed=seed) for _ in range(2))
    sorted_cost, full_cost = full.cost(drawn.sorted_H), full.cost_with(drawn.links)
    cost = (blind if knows_switches else scouted)(world)

    assert world.rounds <= rounds
    assert full_cost < sorted_cost
    assert sorted_cost - cost >= kept * (sorted_cost - full_cost)
