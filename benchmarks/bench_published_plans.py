"""Our plans, the layouts that NVIDIA published, and the picks of others, for the same published jobs.

`python -m benchmarks.bench_published_plans [--record] [--only TEXT ...]` takes the first row of each model and system
in benchmarks/data/nvidia_perf_dev.csv and in nvidia_recipes.csv beside it, plans that job on as many imagined devices,
and prices everything by one Predictor and one memory model. Nothing is run.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from benchmarks.planners.duel import MEMORY_MARGIN, Duel, Setting, duel
from benchmarks.rivals.pick import PlannerOptions, device_peak_bytes
from benchmarks.telling import processor, shown
from benchmarks.validation.latency import Machines
from benchmarks.validation.nvidia import SHAPES, refusal, run_of
from benchmarks.validation.nvidia_rows import read_rows, read_shapes
from benchmarks.validation.options import DATA, DEFAULT_FILES
from benchmarks.validation.tables import Row
from pipette_launch.cost.compute.device_model import imagined
from pipette_launch.cost.memory.overhead import allowed_bytes
from pipette_launch.cost.step.predictor import Predictor
from pipette_launch.errors import PipetteError
from pipette_launch.facts import Job, Layout
from pipette_launch.facts.co_location import Domains
from pipette_launch.facts.measurements import Measurements
from pipette_launch.search.layouts import base_layouts

RIVALS = ("megatron-rules", "amp", "amp-pipette", "varuna-any-size", "pipette")
FILES = (DEFAULT_FILES["nvidia"], DATA / "nvidia_recipes.csv")
RESULTS = Path(__file__).parent / "results"


def published() -> Iterator[tuple[str, Job, Machines]]:
    """The first row of each model and system that can be planned: its name, its job and its machines."""
    shapes = read_shapes(SHAPES)
    seen: set[str] = set()
    rows: list[Row] = [row for path in FILES for row in read_rows(path).rows]
    for row in rows:
        name = f"{row['model']}/{row['gpus']} {row['system']}/{row['precision']}"
        key = name.partition("/")[0] + row["system"]
        if key in seen or refusal(row, shapes, needs_time=False):
            continue
        try:
            job, machines = run_of(row, shapes[row["model"]])
        except PipetteError:
            continue
        seen.add(key)
        yield name, job, machines


def run(job: Job, machines: Machines, setting: Setting) -> tuple[Duel, float, bool]:
    """Plan one job by everybody; and the step of the published layout, and whether it fits."""
    hosts, devices = machines.num_hosts, machines.devices_per_host
    found = base_layouts(job, world_size=hosts * devices, domains=Domains(devices_per_host=devices), device_kind="cuda")
    layouts = (*map(found.columns.layout, range(len(found))), job.own)
    measured = imagined(job, machines.device, num_hosts=hosts, devices_per_host=devices, layouts=layouts)
    options = PlannerOptions(
        capacity_bytes=measured.cluster.memory_bytes,
        clock=time.process_time,
        budget_s=setting.pipette_budget_s,
        seed=setting.seed,
        switches_H=(),
    )
    step_s, fits = _priced(job, measured, job.own, options.capacity_bytes)
    return duel(job, measured, options, budget_s=setting.budget_s), step_s, fits


def _priced(job: Job, measured: Measurements, layout: Layout, capacity_bytes: int) -> tuple[float, bool]:
    step_s = Predictor(job, measured).step_time(layout, range(layout.world_size)).total_s
    limit = allowed_bytes(capacity_bytes, memory_margin=MEMORY_MARGIN)
    return step_s, device_peak_bytes(job, layout, measured) <= limit


def report(chosen: list[str], setting: Setting) -> Iterator[str]:
    """All of it, a line at a time."""
    yield (
        f"{time.strftime('%Y-%m-%d', time.gmtime())}; {processor()}, {os.cpu_count()} cores; Python "
        f"{platform.python_version()}, numpy {version('numpy')}; seed {setting.seed}; our search has "
        f"{setting.budget_s:g} s, each annealing of Pipette's {setting.pipette_budget_s:g} s"
    )
    yield ""
    yield (
        "Predicted, not run. Cells: step time over ours. `(n)`: Megatron refuses its pick, or that does not fit; this "
        "is the first of its ranking that can run, after n; `oom`: nothing in its ranking can; `-`: it finds nothing. "
        "*published*: NVIDIA's layout in torchrun's order, `*` where it is predicted not to fit (rows whose recompute "
        "the source does not state)."
    )
    yield ""
    yield f"| job | published | ours | s | published | {' | '.join(RIVALS)} |"
    yield f"|---|---|---|{'--:|' * (2 + len(RIVALS))}"
    ratios: dict[str, list[float]] = {}
    for name, job, machines in published():
        if chosen and not any(part in name for part in chosen):
            continue
        found, step_s, fits = run(job, machines, setting)
        if found.plan is None:
            yield f"| {name} | {job.own.words()} | nothing fits: {found.why_not.splitlines()[0][:80]} |"
            continue
        ours_s = found.plan.chosen.step_time_s
        cells = [f"{step_s / ours_s:.2f}{'' if fits else '*'}", *(_cell(found, rival) for rival in RIVALS)]
        ratios.setdefault("published", []).append(step_s / ours_s)
        for rival in RIVALS:
            if (ratio := found.ratio(rival)) is not None:
                ratios.setdefault(rival, []).append(ratio)
        words = found.plan.chosen.layout.words()
        yield f"| {name} | {job.own.words()} | {words} | {ours_s:.3f} | {' | '.join(cells)} |"
    yield ""
    for name, values in ratios.items():
        yield f"- {name}: {statistics.median(values):.2f} in the median of {len(values)}, at most {max(values):.2f}"


def _cell(found: Duel, rival: str) -> str:
    outcome, ratio = found.outcomes.get(rival), found.ratio(rival)
    if outcome is None:
        return "-"
    if ratio is None:
        return "oom"
    return f"{ratio:.2f}" + (f" ({outcome.rank})" if outcome.rank else "")


def main() -> None:
    """Print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/planners_published.md")
    parser.add_argument("--only", nargs="*", default=[], help="jobs with one of these in GPT3-175B/128 H100/FP8-DS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget-s", type=float, default=8.0, help="for our search")
    parser.add_argument("--pipette-budget-s", type=float, default=0.5, help="for each annealing of Pipette's")
    args = parser.parse_args()
    setting = Setting(seed=args.seed, budget_s=args.budget_s, pipette_budget_s=args.pipette_budget_s)
    text = shown(report(args.only, setting))
    if args.record:
        target = RESULTS / "planners_published.md"
        target.write_text(f"# Our plans, published layouts and the picks of others\n\n{text}")


if __name__ == "__main__":
    main()
