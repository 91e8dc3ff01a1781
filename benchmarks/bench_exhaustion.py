"""Plans and bounds beside the best of all placements, on few slots, where every placement can be tried.

`python -m benchmarks.bench_exhaustion [--record]` plans jobs on four imagined hosts of two devices, then prices every
placement of every legal layout that fits and whose bound is below the plan's step.
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path

import numpy as np

from benchmarks.gpt import gpt_job
from benchmarks.networks import NETWORKS, with_network
from benchmarks.telling import processor
from pipette_launch.cost.compute.device_model import imagined
from pipette_launch.cost.step.step_bounds import BoundColumns
from pipette_launch.facts import Job, Layout, Measurements, Plan, Provenance
from pipette_launch.facts.co_location import Domains
from pipette_launch.facts.devices import Link, device_named
from pipette_launch.search.candidates import SearchInputs
from pipette_launch.search.frontier import Frontier
from pipette_launch.search.layouts import base_layouts
from pipette_launch.search.slots import Placed, Placement, PlacementProblem, Slots, host_order
from pipette_launch.search.solve import SolveOptions, solve

HOSTS, DEVICES = 4, 2
DEVICE = "A100-80GB"
BETWEEN_HOSTS_BYTES_PER_S = 25e9
"""Bandwidth of one device's own network card in Pipette's cluster of A100."""
GLOBAL_BATCH = 64
SEEDS = (0, 1, 2)
MODELS: dict[str, tuple[tuple[int, int, int], dict[str, object]]] = {
    "GPT of 2.7B": ((56, 1920, 24), {}),
    "MoE, 8 experts": ((24, 1024, 16), {"num_experts": 8, "moe_layer_freq": (1,) * 24, "moe_ffn_hidden_size": 4096}),
}
"""Layers, hidden size, heads; and differences from a plain GPT."""
BUDGET_S = 60.0
AT_ONCE = 128
"""Number of placements that are priced together."""
MEMORY_MARGIN = 0.08
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One job on one network."""

    network: str
    model: str
    seed: int
    legal: int
    tried: int
    """Layouts of which every placement was priced."""
    plan_s: float
    floor_s: float
    least_s: float
    """No placement of any legal layout that fits is faster."""
    chosen: str
    fastest: str


def job_of(model: str) -> Job:
    """A small job, fp16 with Adam."""
    shape, extra = MODELS[model]
    job = gpt_job(
        shape,
        seq_length=1024,
        vocab_size=50256,
        params_dtype="fp16",
        transformer_impl="transformer_engine",
        attention_backend="flash",
        global_batch_size=GLOBAL_BATCH,
        own=Layout(dp=HOSTS * DEVICES),
    )
    return replace(job, model=replace(job.model, **extra))  # type: ignore[arg-type]


def run_one(network: str, model: str, seed: int) -> Row:
    """Plan, then try everything that could be faster."""
    job = job_of(model)
    found = base_layouts(job, world_size=HOSTS * DEVICES, domains=Domains(devices_per_host=DEVICES), device_kind="cuda")
    spec = device_named(DEVICE)
    between_hosts = Link(latency_s=spec.between_hosts.latency_s, bytes_per_s=BETWEEN_HOSTS_BYTES_PER_S)
    spec = replace(spec, between_hosts=between_hosts)
    measured = imagined(
        job, spec, num_hosts=HOSTS, devices_per_host=DEVICES, layouts=[*map(found.columns.layout, range(len(found)))]
    )
    measured = with_network(measured, NETWORKS[network](HOSTS, np.random.default_rng([seed, HOSTS])))
    plan = solve(
        job,
        measured,
        options=SolveOptions(margin=0.0, memory_margin=MEMORY_MARGIN, budget_s=BUDGET_S),
        clock=time.monotonic,
        provenance=Provenance(key="bench", made_at="", versions={}, source="measured"),
    )
    tried, least_s, fastest = try_all(job, measured, plan)
    return Row(
        network=network,
        model=model,
        seed=seed,
        legal=plan.num_layouts,
        tried=tried,
        plan_s=plan.chosen.step_time_s,
        floor_s=plan.floor_s,
        least_s=least_s,
        chosen=plan.chosen.layout.words(),
        fastest=fastest.words(),
    )


def try_all(job: Job, measured: Measurements, plan: Plan) -> tuple[int, float, Layout]:
    """Price every placement of every layout whose bound is below the plan's step; return the fastest."""
    inputs = SearchInputs.of(job, measured, memory_margin=MEMORY_MARGIN)
    found = base_layouts(
        job,
        world_size=HOSTS * DEVICES,
        device_kind="cuda",
        table=inputs.predictor.compute,
        domains=inputs.domains,
    )
    frontier = Frontier(inputs, found, BoundColumns(job, measured, inputs.predictor))
    least_s, fastest = plan.chosen.step_time_s, plan.chosen.layout
    layouts = [job.own] if inputs.own_dropped is None else []
    while batch := frontier.take(64, below_s=plan.chosen.step_time_s):
        layouts += [one.layout for one in batch]
    for layout in layouts:
        problem = inputs.placement_problem(layout, 0.0)
        best = exhaustion(problem)
        if best.cost_s < least_s:
            least_s, fastest = best.cost_s, layout
    return len(layouts), least_s, fastest


def exhaustion(problem: PlacementProblem) -> Placed:
    """Return the best of all placements, priced in a fixed order; of rotated rings, one is priced."""
    best, todo = problem.best_of([host_order(problem.slots.num_slots)]), placements(problem.layout, problem.slots)
    while piece := list(islice(todo, AT_ONCE)):
        best = best.or_faster(problem.best_of(piece))
    return best


def placements(layout: Layout, slots: Slots) -> Iterator[Placement]:
    """Yield all allowed placements; rotated rings are yielded once.

    If all data-parallel or all tensor-parallel indices grow by one, every group keeps its ranks and the order of its
    ring. Therefore only placements with data-parallel and tensor-parallel index 0 on slot 0 are yielded. With expert
    parallelism all placements are yielded, because rotation changes the expert groups. With several devices per host
    all placements are yielded too, because two rotated ranks of a host may be equal modulo its number of devices.
    """
    is_cyclic = slots.devices_per_host == 1 and layout.ep == 1 and layout.etp == layout.tp
    cells = [layout.cell_of(rank) for rank in range(slots.num_slots)]
    first = [rank for rank, cell in enumerate(cells) if not is_cyclic or cell.dp == cell.tp == 0]
    chosen: list[int] = []

    def extend() -> Iterator[Placement]:
        if len(chosen) == slots.num_slots:
            if not slots.blocks or slots.allows(chosen):
                yield tuple(chosen)
            return
        size = slots.devices_per_host
        beside = chosen[len(chosen) // size * size :]
        taken = {rank % size for rank in beside} if slots.keeps_residues else set()
        for rank in first if not chosen else range(slots.num_slots):
            if rank not in chosen and rank % size not in taken and (not beside or rank > beside[-1]):
                chosen.append(rank)
                yield from extend()
                chosen.pop()

    return extend()


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Lines of markdown."""
    yield (
        "| network | model | seed | legal layouts | of these tried | plan | fastest of all | plan above it "
        "| floor below it | chosen | fastest |"
    )
    yield "|---|---|--:|--:|--:|--:|--:|--:|--:|---|---|"
    for row in rows:
        yield (
            f"| {row.network} | {row.model} | {row.seed} | {row.legal:,} | {row.tried:,} | {row.plan_s:.4f} s "
            f"| {row.least_s:.4f} s | {row.plan_s / row.least_s - 1:.2%} | {1 - row.floor_s / row.least_s:.2%} "
            f"| {row.chosen} | {row.fastest} |"
        )


def report(rows: Sequence[Row]) -> str:
    """The whole report, its conditions first."""
    above = [row.plan_s / row.least_s - 1 for row in rows]
    below = [1 - row.floor_s / row.least_s for row in rows]
    placements = math.factorial(HOSTS) ** DEVICES * math.factorial(DEVICES) ** HOSTS
    conditions = (
        f"`python -m benchmarks.bench_exhaustion` on {time.strftime('%Y-%m-%d')}: {processor()}, Python "
        f"{platform.python_version()}, numpy {version('numpy')}. {HOSTS} imagined hosts of {DEVICES} {DEVICE}, links "
        f"as in `benchmarks/networks.py`, steps of {GLOBAL_BATCH} sequences. Tried: all {placements:,} "
        "allowed placements, less those that only turn rings, of each layout that fits and whose bound is below the "
        "plan's step. Whatever else is legal is slower by its bound."
    )
    result = f"Plans are at most {max(above):.2%} above the fastest of all, floors at most {max(below):.2%} below it."
    heading = "# Plans and their floors against all there is"
    return "\n".join([heading, "", conditions, "", result, "", *table(rows), ""])


def main() -> None:
    """Run all cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="write the report into benchmarks/results")
    args = parser.parse_args()
    rows = []
    for network in NETWORKS:
        for model in MODELS:
            for seed in SEEDS:
                rows.append(run_one(network, model, seed))
                sys.stderr.write(f"{network}, {model}, seed {seed}: {rows[-1].tried} layouts tried\n")
    text = report(rows)
    sys.stdout.write(text)
    if args.record:
        (RESULTS / "exhaustion.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
