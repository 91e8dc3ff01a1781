"""Our plans against the picks of AMP, Varuna, Pipette, Megatron's rules and placement-only orders, over Pipette's zoo.

`python -m benchmarks.bench_planners [--record] [--quick] [--all] [--plain] [--only TEXT ...]` plans every model on 64,
128 and 512 GPUs of Pipette's two clusters with three kinds of links, prices everything by one Predictor and one memory
model, and prints the ratio of each rival's step to ours.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.planners import show
from benchmarks.planners.duel import Duel, Setting, duel
from benchmarks.planners.machines import DEVICES_PER_HOST, MACHINES, NETWORKS, with_network
from benchmarks.planners.zoo import FOR_EACH_WIDTH, MODELS, job_of, plain
from benchmarks.rivals.pick import PlannerOptions
from benchmarks.telling import shown
from pipette_launch.cost.compute.device_model import imagined
from pipette_launch.facts import Measurements
from pipette_launch.facts.co_location import Domains
from pipette_launch.search.layouts import base_layouts

GPUS = (64, 128, 512)
QUICK = ("A100/tiered/8.1B/64", "V100/measured/2.5B/64")
RESULTS = Path(__file__).parent / "results"


def names(*, every: bool) -> Iterator[str]:
    """The cases, ordered by model and size."""
    models = MODELS if every else FOR_EACH_WIDTH
    for machine, model, gpus, links in itertools.product(MACHINES, models, GPUS, NETWORKS):
        yield f"{machine}/{links}/{model}/{gpus}"


class Bench:
    """Runs cases by name; what cases of one model and size share is imagined once."""

    def __init__(self, setting: Setting, *, is_plain: bool) -> None:
        self._setting = setting
        self._is_plain = is_plain
        self._imagined: tuple[tuple[str, str, str], Measurements] | None = None

    def run(self, name: str) -> Duel:
        """Plan one case by everybody."""
        machine, links, model, gpus = name.split("/")
        hosts = int(gpus) // DEVICES_PER_HOST
        job = job_of(model, MACHINES[machine], int(gpus))
        if self._imagined is None or self._imagined[0] != (machine, model, gpus):
            found = base_layouts(
                job, world_size=int(gpus), domains=Domains(devices_per_host=DEVICES_PER_HOST), device_kind="cuda"
            )
            measured = imagined(
                job,
                MACHINES[machine].spec,
                num_hosts=hosts,
                devices_per_host=DEVICES_PER_HOST,
                layouts=[*map(found.columns.layout, range(len(found)))],
            )
            self._imagined = (machine, model, gpus), measured
        # Every model of a size meets the same network.
        rng = np.random.default_rng([self._setting.seed, hosts, list(NETWORKS).index(links)])
        network = NETWORKS[links](hosts, rng)
        measurements = with_network(self._imagined[1], network)
        options = PlannerOptions(
            capacity_bytes=measurements.cluster.memory_bytes,
            clock=time.process_time,
            budget_s=self._setting.pipette_budget_s,
            seed=self._setting.seed,
            switches_H=network.switches_H,
        )
        return duel(plain(job) if self._is_plain else job, measurements, options, budget_s=self._setting.budget_s)


def report(chosen: list[str], setting: Setting, *, is_plain: bool) -> Iterator[str]:
    """All of it, a line at a time."""
    began = time.perf_counter()
    yield from show.conditions(setting, is_plain=is_plain)
    yield from show.head()
    bench = Bench(setting, is_plain=is_plain)
    duels: dict[str, Duel] = {}
    for name in chosen:
        duels[name] = bench.run(name)
        yield show.row(name, duels[name])
    yield from show.summary(duels)
    yield f"{len(duels)} cases in {time.perf_counter() - began:.0f} s"


def main() -> None:
    """Print the tables, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/planners.md as well")
    parser.add_argument("--quick", action="store_true", help="two cases")
    parser.add_argument("--all", action="store_true", help="all ten models, not one of each hidden size")
    parser.add_argument("--plain", action="store_true", help="nothing but degrees, micro-batch and order")
    parser.add_argument("--only", nargs="*", default=[], help="cases with one of these in A100/tiered/8.1B/64")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget-s", type=float, default=5.0, help="for our search")
    parser.add_argument("--pipette-budget-s", type=float, default=0.5, help="for each annealing of Pipette's")
    args = parser.parse_args()
    chosen = [name for name in names(every=args.all) if not args.only or any(part in name for part in args.only)]
    if args.quick:
        chosen = [name for name in chosen if name in QUICK]
    setting = Setting(seed=args.seed, budget_s=args.budget_s, pipette_budget_s=args.pipette_budget_s)
    text = shown(report(chosen, setting, is_plain=args.plain))
    if args.record:
        suffix = "_plain" if args.plain else ""
        target = RESULTS / f"planners{suffix}.md"
        target.write_text(f"# Our plans against the picks of others\n\n{text}")


if __name__ == "__main__":
    main()
