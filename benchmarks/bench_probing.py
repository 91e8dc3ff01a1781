"""Simulates how much slower a plan gets if few links are measured: the warm-up's rounds against all pairs.

`python -m benchmarks.bench_probing [--record] [--quick]` prints a table for each kind of fabric. Rounds and estimates
are the warm-up's own (`probe.links.selection`). The planner only places hosts, for one layout, and measurements are
exact.
"""

# H = hosts, N = links, Q = seats.

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.mapping.fabrics import BAD_SHARE, BAD_SPEED, LEAF, NOISE, POD, TIERS, Fabric, grid_flows
from benchmarks.mapping.swap_annealing import annealed
from benchmarks.mapping.tiles import best_tiled
from benchmarks.networks import measured_shares
from benchmarks.telling import processor, shown
from pipette_launch.facts import Links
from pipette_launch.probe.links.selection import (
    TREE_ROUNDS,
    Line,
    Pair,
    Place,
    Round,
    blind_rounds,
    estimate,
    scout,
    switch_groups,
)
from pipette_launch.probe.messages import BLIND_ROUNDS
from pipette_launch.search.assignment.descent import Flows
from pipette_launch.search.slots import tiers_of

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
RESULTS = Path(__file__).parent / "results"
STAGES = 8
MOVES = 300_000
"""Moves of the annealer that places hosts."""
UNIT = 1e-10
"""Seconds per byte of the fastest link: 10 GB/s. Only ratios matter."""
WIRE_S, CONTACT_S = 0.008, (0.01, 0.1)
"""Modelled seconds of a round (6 messages of 64 MiB at 50 GB/s), and of the first contact with a peer."""
LEAST_GAIN = 0.01
"""Shares of a smaller gain are chance."""
ERROR = 0.02
"""Usual error of a measured link, for a plan made with all links, measured with this error."""
Unlike = Callable[[int, np.random.Generator], Floats]
"""Draws the bandwidth of each link (H x H) as a share of its tier's, for a number of hosts."""


def noisy(hosts: int, rng: np.random.Generator) -> Floats:
    """Return links with independent noise: only a measurement shows it."""
    noise_HH = np.triu(np.abs(rng.normal(0, NOISE, (hosts, hosts))), 1)
    return _with_bad_hosts(1 - np.minimum(noise_HH + noise_HH.T, 0.9), rng)


def of_ends(hosts: int, rng: np.random.Generator) -> Floats:
    """Return links as fast as their slower host: a few rounds show everything."""
    speed_H = 1 - np.minimum(np.abs(rng.normal(0, NOISE, hosts)), 0.9)
    return _with_bad_hosts(np.minimum(speed_H[:, None], speed_H), rng)


def resampled(hosts: int, rng: np.random.Generator) -> Floats:
    """Return links drawn from the 240 directed links that Pipette's authors measured between 16 hosts."""
    share_HH = measured_shares()
    share_N = share_HH[~np.eye(len(share_HH), dtype=bool)]
    drawn_HH = np.triu(rng.choice(share_N, (hosts, hosts)), 1)
    both_HH: Floats = drawn_HH + drawn_HH.T + np.eye(hosts)
    return both_HH


def _with_bad_hosts(speed_HH: Floats, rng: np.random.Generator) -> Floats:
    bad_H = np.zeros(len(speed_HH), dtype=bool)
    bad_H[rng.choice(len(bad_H), max(1, round(BAD_SHARE * len(bad_H))), replace=False)] = True
    slowed_HH: Floats = speed_HH * np.where(bad_H[:, None] | bad_H, BAD_SPEED, 1.0)
    return slowed_HH


def fabric(hosts: int, unlike: Unlike, seed: int) -> Fabric:
    """Return hosts in leaves and pods, in shuffled order."""
    rng = np.random.default_rng(seed)
    leaf_H = np.arange(hosts) // LEAF
    pod_H = leaf_H // POD
    near_HH, same_HH = pod_H[:, None] == pod_H, leaf_H[:, None] == leaf_H
    speed_HH = np.where(same_HH, TIERS[0], np.where(near_HH, TIERS[1], TIERS[2])) * unlike(hosts, rng)
    shuffled_H = rng.permutation(hosts)
    seconds_HH = 1.0 / speed_HH[shuffled_H][:, shuffled_H]
    np.fill_diagonal(seconds_HH, 0.0)
    return Fabric(seconds_HH=seconds_HH, sorted_H=np.argsort(shuffled_H))


@dataclass(kw_only=True)
class World:
    """A fabric that can be measured and planned for, with counts of both."""

    fabric: Fabric
    seed: int
    rounds: int = 0
    pairs: set[Pair] = field(default_factory=set)
    plans: int = 0

    @property
    def places(self) -> list[Place]:
        """The switches above each host, as a scheduler names them."""
        position_H = np.empty(len(self.fabric.sorted_H), dtype=np.int64)
        position_H[self.fabric.sorted_H] = np.arange(len(position_H))
        return [("root", f"pod{at // LEAF // POD}", f"leaf{at // LEAF}") for at in position_H.tolist()]

    def measure(self, rounds: Sequence[Round]) -> dict[Pair, Line]:
        """Measure both directions of each pair exactly."""
        self.rounds += len(rounds)
        pairs = [pair for one in rounds for pair in one]
        self.pairs.update(pairs)
        seconds_HH = self.fabric.seconds_HH
        return {way: Line(0.0, UNIT * float(seconds_HH[way])) for pair in pairs for way in (pair, pair[::-1])}

    def planned(self, links: Links, *, moves: int) -> tuple[Flows, Ints]:
        """Place the grid of pipelines and replicas, given these links."""
        flows = grid_flows(links.seconds_per_byte / UNIT, STAGES)
        columns = flows.num_seats // STAGES
        start_Q = best_tiled(flows, tiers_of(links), rows=STAGES, columns=columns)
        rng = np.random.default_rng([self.seed, self.plans])
        return flows, annealed(flows, start_Q, moves=moves, rng=rng).place_Q

    def cost(self, place_Q: Ints) -> float:
        """Return the cost of a placement on the true links."""
        return grid_flows(self.fabric.seconds_HH, STAGES).cost(place_Q)

    def cost_with(self, links: Links) -> float:
        """Return the true cost of the plan made with these links."""
        return self.cost(self.planned(links, moves=MOVES)[1])


Scheme = Callable[[World], float]
"""Measures links, and returns the true cost of the plan."""


def scouted(world: World) -> float:
    """Measure as the warm-up does below unknown switches."""
    hosts = len(world.fabric.sorted_H)
    known = world.measure(blind_rounds(hosts, (), BLIND_ROUNDS, np.random.default_rng([world.seed, 1])))
    found = scout(hosts, known, measure=world.measure, seed=world.seed)
    return world.cost_with(estimate(hosts, found.lines))


def blind(world: World) -> float:
    """Measure as the warm-up does below known switches: a random sample of links."""
    places, hosts = world.places, len(world.fabric.sorted_H)
    groups = switch_groups(hosts, places)
    known = world.measure(blind_rounds(hosts, groups, TREE_ROUNDS, np.random.default_rng([world.seed, 1])))
    return world.cost_with(estimate(hosts, known, places))


def everything(world: World) -> float:
    """Measure all links with an error: the plan differs from the plan made with exact links."""
    links, hosts = world.fabric.links, len(world.fabric.sorted_H)
    world.rounds = hosts - 1
    error_HH = np.triu(np.random.default_rng([world.seed, 2]).normal(0, ERROR, (hosts, hosts)), 1)
    rates_HH = np.asarray(links.bandwidth_bytes_per_s) * np.exp(error_HH + error_HH.T)
    return world.cost_with(Links(latency_s=links.latency_s, bandwidth_bytes_per_s=rates_HH))


def again(world: World) -> float:
    """Plan once more with all links: only the chance of the planner differs."""
    world.rounds, world.plans = len(world.fabric.sorted_H) - 1, 1
    return world.cost_with(world.fabric.links)


SCHEMES: dict[str, Scheme] = {
    f"switches known: {TREE_ROUNDS} blind rounds": blind,
    "not known: blind, scouting and random rounds": scouted,
    f"every link, with an error of {ERROR:.0%}": everything,
    "every link, planned again": again,
}


def table(unlike: Unlike, sizes: Sequence[int], seeds: Sequence[int]) -> Iterator[str]:
    """Yield one row for each size: the gain of measuring all pairs, and the share of it that each scheme keeps."""
    names = " | ".join(SCHEMES)
    yield f"| hosts | seeds | rounds of full probing | its gain over sorted order | {names} | CPU s of one |"
    yield f"|--:|--:|--:|--:|{'---|' * len(SCHEMES)}--:|"
    for hosts, count in zip(sizes, seeds, strict=True):
        trials = [_trial(fabric(hosts, unlike, seed), seed) for seed in range(count)]
        gain = float(np.mean([trial.gain for trial in trials]))
        cells = []
        for index in range(len(SCHEMES)):
            excess = [trial.excess[index] for trial in trials]
            kept = [1 - more / trial.gain for more, trial in zip(excess, trials, strict=True)]
            error = np.std(kept, ddof=1) / np.sqrt(count) if count > 1 else np.nan
            share = f"{np.mean(kept):.0%} ± {error:.1%} (worst {min(kept):.0%}), " if gain >= LEAST_GAIN else ""
            cells.append(f"{share}{np.mean(excess):+.1%}, {max(trial.rounds[index] for trial in trials)} rounds")
        spent_s = np.mean([trial.spent_s for trial in trials])
        yield f"| {hosts} | {count} | {hosts - 1} | {gain:.1%} | {' | '.join(cells)} | {spent_s:.1f} |"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Results of all schemes on one fabric."""

    gain: float
    """Extra cost of sorted order, relative to the plan made with all links."""
    excess: tuple[float, ...]
    """The same for each scheme's plan."""
    rounds: tuple[int, ...]
    spent_s: float
    """Processor seconds of a scheme, on average."""


def _trial(drawn: Fabric, seed: int) -> Trial:
    full = World(fabric=drawn, seed=seed)
    full_cost = full.cost_with(drawn.links)
    worlds = [World(fabric=drawn, seed=seed) for _ in SCHEMES]
    began_s = time.process_time()
    costs = [scheme(world) for scheme, world in zip(SCHEMES.values(), worlds, strict=True)]
    return Trial(
        gain=full.cost(drawn.sorted_H) / full_cost - 1,
        excess=tuple(cost / full_cost - 1 for cost in costs),
        rounds=tuple(world.rounds for world in worlds),
        spent_s=(time.process_time() - began_s) / len(SCHEMES),
    )


def report(*, quick: bool) -> Iterator[str]:
    """Yield the report line by line."""
    sizes, seeds = ((128, 256), (1, 1)) if quick else ((128, 256, 512, 1024, 1280), (3, 3, 8, 3, 3))
    yield "# Probing: how much of the gain of measuring every link a few rounds keep"
    yield ""
    yield (
        f"`python -m benchmarks.bench_probing{' --quick' if quick else ''}`, "
        f"{time.strftime('%Y-%m-%d', time.gmtime())}; {processor()}, {os.cpu_count()} cores of which one is used, load "
        f"{os.getloadavg()[0]:.1f}, Python {platform.python_version()}, numpy {version('numpy')}. Simulated: no "
        f"network was touched, measurements are exact, and a plan is the placing of hosts for one layout of {STAGES} "
        f"pipeline ranks ({MOVES:,} moves)."
    )
    yield ""
    yield (
        f"Fabrics: leaves of {LEAF} hosts, pods of {POD} leaves, bandwidths {TIERS}, {BAD_SHARE:.0%} bad hosts at "
        f"{BAD_SPEED}; flows: data-parallel ring 1.0, pipeline 0.3. Gain: extra cost of topology-sorted order, "
        f"which uses the switches and no link, relative to the plan made with all links. Cells: share of the gain "
        f"that a scheme's plan keeps on the true links, mean ± error of the mean (and worst seed), if the gain is at "
        f"least {LEAST_GAIN:.0%}; its extra cost relative to the plan made with all links; the largest number of "
        f"rounds. A share below 0 % is worse than sorted order, which needs the switches. The last two schemes show "
        f"the chance in these figures: every link is measured, with an error of {ERROR:.0%}; and exact links are "
        f"planned for once more."
    )
    for title, unlike in (
        (f"Independent noise of {NOISE:.0%} on each link (the hard case)", noisy),
        ("A link is as fast as its slower host", of_ends),
        ("Noise of real links (drawn from Pipette's 16 hosts)", resampled),
    ):
        yield from ("", f"### {title}", "")
        yield from table(unlike, sizes, seeds)
    yield from ("", "### Seconds, modelled", "")
    yield from modelled(sizes)


def modelled(sizes: Sequence[int]) -> Iterator[str]:
    """Yield the time of the rounds on a cluster: arithmetic, not measured."""
    low, high = CONTACT_S
    yield (
        f"A round: {WIRE_S * 1e3:.0f} ms on the wire (6 messages of 64 MiB at 50 GB/s), plus the first contact with a "
        f"peer, assumed to take {low * 1e3:.0f} to {high * 1e3:.0f} ms. Not included: gathering the measurements."
    )
    yield ""
    yield f"| hosts | all pairs | {TREE_ROUNDS} rounds |"
    yield "|--:|---|---|"
    for hosts in sizes:
        spans = [
            f"{count * (WIRE_S + low):.1f} to {count * (WIRE_S + high):.0f} s" for count in (hosts - 1, TREE_ROUNDS)
        ]
        yield f"| {hosts} | {spans[0]} | {spans[1]} |"


def main() -> None:
    """Print the tables, and write them with --record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed, two sizes")
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/probing.md as well")
    args = parser.parse_args()
    text = shown(report(quick=args.quick))
    if args.record:
        (RESULTS / "probing.md").write_text(text)


if __name__ == "__main__":
    main()
