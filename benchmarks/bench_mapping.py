"""Quality of placements over time: Pipette's links, synthetic fabrics, and 200 instances with known optimum.

`python -m benchmarks.bench_mapping [--record] [--quick]` prints three tables. Times are processor seconds, as other
processes may share the cores.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import time
from collections.abc import Iterator
from importlib.metadata import version
from itertools import permutations
from pathlib import Path

import numpy as np

from benchmarks.mapping.fabrics import Fabric, grid_flows
from benchmarks.mapping.gilmore_lawler import gilmore_bound
from benchmarks.mapping.pipette_cost import PipetteCost, measured_ms_per_mb, shortest_path_ms
from benchmarks.mapping.small import problems
from benchmarks.mapping.swap_annealing import annealed
from benchmarks.mapping.tiles import best_tiled
from benchmarks.rivals import pipette_annealer
from benchmarks.telling import processor, shown
from pipette_launch.search.assignment.descent import Flows, descend
from pipette_launch.search.placement import DESCENT_STEPS, NEAR
from pipette_launch.search.slots import tiers_of

RESULTS = Path(__file__).parent / "results"
TARGETS_MS = {2: 232.381, 4: 116.735, 8: 72.422, 16: 77.3007}
"""Their annealer in 10 s at pp 2, 4 and 8; the optimum at 16."""
# Nodes, stages, what to reach over the bound, and topology-sorted order as it was measured before.
SIZES = ((128, 8, 1.07, 1.131), (512, 8, 1.09, 1.182), (1024, 8, 1.10, 1.244), (1280, 8, 1.10, 1.208))
SIZES_TOO = ((128, 4, 1.07, 1.131), (512, 16, 1.09, 1.182), (1024, 16, 1.10, 1.244), (1280, 16, 1.10, 1.208))
SHORT, LONG = 300_000, 3_000_000
INSTANCES = 200
SMALL_DESCENTS = 50
"""Descents on each of the small instances."""


def clock() -> float:
    """Processor seconds of this process."""
    return time.process_time()


def pipette_table(seeds: range, theirs_s: float) -> Iterator[str]:
    """Pipette's matrix and cost function: host order, its annealer, and ours within a second."""
    ms_HH = measured_ms_per_mb()
    yield f"### Pipette's 16 hosts and cost function, ms; seeds {seeds.start} to {seeds.stop - 1}, start: host order"
    yield ""
    yield (
        f"| pp | host order | their annealer, {theirs_s:g} s: best, worst (moves) | target "
        "| ours, 1 s: best, worst | ours, 0.1 s: worst | seconds to the target: median, worst |"
    )
    yield "|--:|--:|---|--:|---|--:|---|"
    for stages, target_ms in TARGETS_MS.items():
        problem = PipetteCost.of_gpt(ms_HH, stages)
        flows = problem.flows()
        theirs = [
            pipette_annealer.anneal(
                problem.cost, pipelines=16 // stages, stages=stages, seed=seed, budget_s=theirs_s, clock=clock
            )
            for seed in seeds
        ]
        ours = [_within(flows, seed, 1.0) for seed in seeds]
        early = [_within(flows, seed, 0.1) for seed in seeds]
        hits = [_seconds_to(flows, seed, target_ms) for seed in seeds]
        yield (
            f"| {stages} | {flows.cost(np.arange(16)):.3f} | {_span([run.cost for run in theirs])} "
            f"({_span([run.iterations for run in theirs], 0)}) | {target_ms} | {_span(ours)} "
            f"| {max(early):.3f} "
            f"| {np.median(hits):.3f}, {max(hits):.3f} |"
        )
    optimum_ms = 2 * PipetteCost.of_gpt(ms_HH, 16).pipeline_mb * shortest_path_ms(ms_HH)
    yield ""
    yield f"The optimum at pp 16 by Held and Karp's dynamic program: {optimum_ms:.4f} ms."


def _within(flows: Flows, seed: int, seconds: float) -> float:
    """Milliseconds of the best of all descents from host order within some processor seconds."""
    began_s = clock()
    return min(itertools.takewhile(lambda _: clock() - began_s < seconds, _descents(flows, seed)))


def _descents(flows: Flows, seed: int) -> Iterator[float]:
    """Cost of the start, then of descents from it, without end."""
    start_Q, rng = np.arange(flows.num_seats), np.random.default_rng(seed)
    near_HK = np.argsort(flows.seconds_THH.sum(axis=0) + np.diag(np.full(flows.num_seats, np.inf)), axis=1)[:, :NEAR]
    yield flows.cost(start_Q)
    while True:
        found = descend(flows, start_Q, near_HK=near_HK, steps=DESCENT_STEPS, rng=rng, is_late=lambda: False)
        yield found.cost_s


def _seconds_to(flows: Flows, seed: int, target_ms: float) -> float:
    """Processor seconds until a descent meets the target; infinite where that takes more than 10."""
    began_s = clock()
    for cost in _descents(flows, seed):
        passed_s = clock() - began_s
        # Digits of the published targets.
        if cost <= target_ms + 1e-4:
            return passed_s
        if passed_s > 10.0:
            break
    return float("inf")


def _span(values: list[float] | list[int], digits: int = 3) -> str:
    return f"{min(values):.{digits}f}, {max(values):.{digits}f}"


def fabric_table(sizes: tuple[tuple[int, int, float, float], ...], seeds: range, *, long: int) -> Iterator[str]:
    """Synthetic fabrics: what each order costs over the bound, and in which time."""
    span = f"{seeds.start} to {seeds.stop - 1}"
    yield f"### Synthetic fabrics, cost / sparse Gilmore-Lawler bound; mean (worst) of seeds {span}"
    yield ""
    yield (
        f"| nodes | pp x dp | torchrun, shuffled | topology-sorted (before) | tiers + tiles | + {SHORT:,} moves "
        f"| + {long:,} moves | target | seconds: bound, tiers, tiles, moves, long |"
    )
    yield "|--:|---|--:|--:|--:|--:|--:|--:|---|"
    for nodes, stages, target, before in sizes:
        ratios, times = zip(*(_fabric(nodes, stages, seed, long) for seed in seeds), strict=True)
        mean, worst = np.mean(ratios, axis=0), np.max(ratios, axis=0)
        cells = [f"{one:.3f} ({other:.3f})" for one, other in zip(mean, worst, strict=True)]
        cells[1] = f"{mean[1]:.3f} ({before})"
        seconds = ", ".join(f"{value:.2f}" for value in np.min(times, axis=0))
        yield f"| {nodes} | {stages} x {nodes // stages} | {' | '.join(cells)} | {target:.2f} | {seconds} |"


def _fabric(nodes: int, stages: int, seed: int, long: int) -> tuple[list[float], list[float]]:
    """Ratios to the bound, and processor seconds of each piece of work."""
    fabric = Fabric.drawn(nodes, seed)
    flows, marks = grid_flows(fabric.seconds_HH, stages), [clock()]
    bound = gilmore_bound(flows)
    marks.append(clock())
    tiers = tiers_of(fabric.links)
    marks.append(clock())
    start_Q = best_tiled(flows, tiers, rows=stages, columns=nodes // stages)
    marks.append(clock())
    costs = [flows.cost(np.arange(nodes)), flows.cost(fabric.sorted_H), flows.cost(start_Q)]
    for moves in (SHORT, long):
        costs.append(annealed(flows, start_Q, moves=moves, rng=np.random.default_rng(seed)).cost_s)
        marks.append(clock())
    return [cost / bound for cost in costs], np.diff(marks).tolist()


def small_table(instances: int) -> Iterator[str]:
    """Random heterogeneous instances of up to 9 hosts: how many optima are found, by brute force."""
    tried = {name: [0, 0] for name in ("Pipette's cost", "ring + path")}
    excess, spent_s = 0.0, np.zeros(2)
    for instance in range(instances):
        for problem in problems(instance):
            flows, marks = problem.flows, [clock()]
            every_KQ = np.array(list(permutations(range(flows.num_seats))))
            least = float(min(problem.judge(block_KQ).min() for block_KQ in np.array_split(every_KQ, 9)))
            marks.append(clock())
            cost = min(itertools.islice(_descents(flows, instance), SMALL_DESCENTS))
            marks.append(clock())
            found = tried[problem.objective]
            found[0] += 1
            found[1] += cost <= least * (1 + 1e-9)
            excess, spent_s = max(excess, cost / least - 1), spent_s + np.diff(marks)
    yield f"### {instances} random instances of 4 to 9 hosts, each with every objective that fits"
    yield ""
    yield f"| objective | problems | optimum found in {SMALL_DESCENTS} descents |"
    yield "|---|--:|--:|"
    yield from (f"| {name} | {all_} | {found} |" for name, (all_, found) in tried.items())
    yield ""
    yield (
        f"Judge: every permutation, priced without `Flows`. Largest excess {excess:.2%}. Seconds in all: brute force "
        f"{spent_s[0]:.1f}, descents {spent_s[1]:.1f}."
    )


def report(*, quick: bool) -> Iterator[str]:
    """All of it, a line at a time."""
    yield "# Mapping: quality, bounds, time"
    yield ""
    yield (
        f"`python -m benchmarks.bench_mapping{' --quick' if quick else ''}`, "
        f"{time.strftime('%Y-%m-%d', time.gmtime())}; {processor()}, {os.cpu_count()} cores of which one is used, "
        f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')}; "
        f"Python {platform.python_version()}, numpy {version('numpy')}, no compiled code of ours. Processor seconds, "
        "as other processes shared the cores and slowed each other."
    )
    tables = (
        pipette_table(range(1 if quick else 3), 1.0 if quick else 10.0),
        fabric_table(SIZES[:2] if quick else SIZES + SIZES_TOO, range(1 if quick else 3), long=LONG),
        small_table(20 if quick else INSTANCES),
    )
    for table in tables:
        yield ""
        yield from table


def main() -> None:
    """Print the tables, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed, two sizes, 20 instances")
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/mapping.md as well")
    args = parser.parse_args()
    text = shown(report(quick=args.quick))
    if args.record:
        (RESULTS / "mapping.md").write_text(text)


if __name__ == "__main__":
    main()
