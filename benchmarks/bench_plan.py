"""Time and memory of a whole plan, from 16 hosts of eight devices to 1,280.

`python -m benchmarks.bench_plan [--hosts 16,64,...] [--repeat 3] [--record]` plans a GPT of 175B parameters on imagined
A100s whose links and speeds are drawn, each size in a process of its own, and prints seconds by part of the search,
memory and the gap to the bound.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from operator import attrgetter
from pathlib import Path
from typing import Any

from benchmarks.plan_machines import DEVICES_PER_HOST, SEED, TIERS, WORDS, job_of, measured
from benchmarks.telling import processor
from pipette_launch.defaults import TOP
from pipette_launch.facts import Plan, Provenance
from pipette_launch.search.solve import SolveOptions, solve

HOSTS = (16, 64, 128, 256, 512, 1024, 1280)
TARGETS_S = {64: 1.0, 1280: 5.0}
ANYTIME_HOSTS = (64, 256, 512, 1280)
BUDGETS_S = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Budgets that stop the search, up to the first that does not."""
RESULTS = Path(__file__).parent / "results"

PARTS = {
    "enumerate": ("search.solve:base_layouts", "search.frontier:Frontier._open"),
    "memory": (
        "cost.learned:CorrectedPredictor.all_peaks",
        "cost.learned:CorrectedPredictor.peaks",
        "cost.learned:CorrectedPredictor.fullest_N",
    ),
    "bounds": (
        "search.solve:BoundColumns.of_columns",
        "search.solve:BoundColumns.rough_of_columns",
        "cost.learned:CorrectedPredictor.bound_s",
    ),
    "placing": (
        "search.candidates:SearchInputs.price",
        "search.candidates:SearchInputs.with_better_placement",
    ),
    "worst hosts": ("search.candidates:worst_hosts_bound_s",),
}
"""Functions of each part, by the module that calls them. A nested call counts for its own part only."""


REMARK = (
    "Parts leave out what they call of other parts. Peak RSS is of the whole process: Python, numpy and imagining "
    "the machines included."
)


class Watch:
    """Seconds spent in the named functions, without nested calls of other named functions."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner: list[float] = []

    def wrap(self, part: str, where: str) -> None:
        """Time a function or method, given as `module:name` or `module:Class.name`."""
        module, path = where.split(":")
        owner: Any = import_module(f"pipette_launch.{module}")
        *outer, name = path.split(".")
        owner = attrgetter(".".join(outer))(owner) if outer else owner
        setattr(owner, name, self._timed(part, getattr(owner, name)))

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **keywords: Any) -> Any:
            self._inner.append(0.0)
            started = time.perf_counter()
            try:
                return function(*args, **keywords)
            finally:
                took_s = time.perf_counter() - started
                self.seconds[part] += took_s - self._inner.pop()
                if self._inner:
                    self._inner[-1] += took_s

        return timed


@dataclass(frozen=True, kw_only=True)
class Row:
    """One size."""

    hosts: int
    plan_s: float
    cpu_s: float
    parts_s: dict[str, float]
    imagine_s: float
    peak_bytes: int
    """Peak of the whole process, with the memory that describes the imagined machines."""
    num_layouts: int
    chosen: str
    step_s: float
    gap: float
    floor_gap: float
    own_s: float
    is_cut_short: bool


def run_one(hosts: int, budget_s: float) -> Row:
    """Plan one size in this process."""
    watch = Watch()
    for part, functions in PARTS.items():
        for where in functions:
            watch.wrap(part, where)
    job = job_of(hosts)
    started = time.perf_counter()
    machines = measured(job, hosts)
    imagine_s = time.perf_counter() - started
    started, cpu = time.perf_counter(), time.process_time()
    plan = solve(
        job,
        machines,
        options=SolveOptions(budget_s=budget_s, seed=SEED, num_ranked=TOP),
        clock=time.monotonic,
        provenance=Provenance(key="bench", made_at="", versions={}, source="measured"),
    )
    plan_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    watch.seconds["rest"] = plan_s - sum(watch.seconds.values())
    return _row(hosts, plan, plan_s=plan_s, cpu_s=cpu_s, imagine_s=imagine_s, parts_s=dict(watch.seconds))


def _row(hosts: int, plan: Plan, **seconds: Any) -> Row:
    chosen = plan.chosen
    return Row(
        hosts=hosts,
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        num_layouts=plan.num_layouts,
        chosen=chosen.layout.words(),
        step_s=chosen.step_time_s,
        gap=chosen.step_time_s / chosen.bound_s - 1,
        floor_gap=chosen.step_time_s / plan.floor_s - 1 if plan.floor_s else float("inf"),
        own_s=plan.own.step_time_s,
        is_cut_short=any("stopped at its budget" in reason for reason in plan.reasons),
        **seconds,
    )


def run_apart(hosts: int, *, budget_s: float, repeat: int) -> Row:
    """Plan one size in processes of its own, and return the quickest."""
    command = [sys.executable, "-m", "benchmarks.bench_plan", "--one", str(hosts), "--budget", str(budget_s)]
    rows = []
    for _ in range(repeat):
        told = subprocess.run(command, check=True, capture_output=True, text=True)
        rows.append(Row(**json.loads(told.stdout.splitlines()[-1])))
    return min(rows, key=lambda row: row.plan_s)


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Lines of markdown."""
    names = [*PARTS, "rest"]
    yield "| hosts | devices | plan | target | " + " | ".join(names) + " | CPU | imagined in | peak RSS | growth |"
    yield "|" + "--:|" * (len(names) + 8)
    last: Row | None = None
    for row in rows:
        target = f"{TARGETS_S[row.hosts]:g} s" if row.hosts in TARGETS_S else ""
        parts = " | ".join(f"{row.parts_s.get(name, 0.0):.2f}" for name in names)
        growth = f"x{row.plan_s / last.plan_s:.2f} for x{row.hosts / last.hosts:g}" if last else ""
        yield (
            f"| {row.hosts:,} | {row.hosts * DEVICES_PER_HOST:,} | {row.plan_s:.2f} s | {target} | {parts} "
            f"| {row.cpu_s:.2f} | {row.imagine_s:.2f} | {row.peak_bytes / 2**20:.0f} MiB | {growth} |"
        )
        last = row
    yield ""
    yield "| hosts | legal layouts | chosen | step | its bound | floor of the plan | torchrun's own | cut short |"
    yield "|--:|--:|---|--:|--:|--:|--:|---|"
    for row in rows:
        yield (
            f"| {row.hosts:,} | {row.num_layouts:,} | {row.chosen} | {row.step_s:.3f} s | +{row.gap:.2%} "
            f"| +{row.floor_gap:.2%} | {row.own_s / row.step_s:.3f}x | {'yes' if row.is_cut_short else 'no'} |"
        )


def run_anytime(hosts: int, *, repeat: int) -> Iterator[tuple[float, Row]]:
    """Plan one size with each budget, up to the first that is enough."""
    for budget_s in BUDGETS_S:
        row = run_apart(hosts, budget_s=budget_s, repeat=repeat)
        yield budget_s, row
        if not row.is_cut_short:
            return


def anytime_table(found: dict[int, list[tuple[float, Row]]]) -> Iterator[str]:
    """Gap to the bound by budget."""
    yield "The same search stopped at a budget, against what the largest budget finds and the best floor proven:"
    yield ""
    yield "| hosts | budget | took | chosen | step | above the last | above the floor | ended | peak RSS |"
    yield "|--:|--:|--:|---|--:|--:|--:|---|--:|"
    for hosts, rows in found.items():
        last_s = rows[-1][1].step_s
        floor_s = max(row.step_s / (1 + row.floor_gap) for _, row in rows)
        for budget_s, row in rows:
            yield (
                f"| {hosts:,} | {budget_s:g} s | {row.plan_s:.2f} s | {row.chosen} | {row.step_s:.3f} s "
                f"| {row.step_s / last_s - 1:+.2%} | +{row.step_s / floor_s - 1:.2%} "
                f"| {'at its budget' if row.is_cut_short else 'by itself'} | {row.peak_bytes / 2**20:.0f} MiB |"
            )


def report(rows: Sequence[Row], anytime: dict[int, list[tuple[float, Row]]], *, budget_s: float, repeat: int) -> str:
    """The whole report, its conditions first."""
    cores = len(os.sched_getaffinity(0))
    conditions = (
        f"`python -m benchmarks.bench_plan --repeat {repeat} --budget {budget_s:g}` on {time.strftime('%Y-%m-%d')}: "
        f"{processor()}, {cores} cores, Python {platform.python_version()}, numpy {version('numpy')}, seed {SEED}; "
        f"the quickest of {repeat}, each in a process of its own; seconds of the wall clock; load average "
        f"{os.getloadavg()[1]:.1f}."
    )
    lines = [
        "# Whole plans from 16 to 1,280 hosts",
        "",
        conditions,
        "",
        WORDS + f" Tiers of bandwidth: {', '.join(f'{share:g}' for share in TIERS)}.",
        "",
        *table(rows),
        "",
        *anytime_table(anytime),
        "",
        REMARK,
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", default=",".join(map(str, HOSTS)), help="sizes, comma-separated")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds that a plan may take at most")
    parser.add_argument("--record", action="store_true", help="write the report into benchmarks/results")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        sys.stdout.write(json.dumps(run_one(args.one, args.budget).__dict__) + "\n")
        return
    rows = []
    for hosts in map(int, args.hosts.split(",")):
        rows.append(run_apart(hosts, budget_s=args.budget, repeat=args.repeat))
        sys.stderr.write(f"{hosts} hosts: {rows[-1].plan_s:.2f} s\n")
    anytime = {row.hosts: list(run_anytime(row.hosts, repeat=1)) for row in rows if row.hosts in ANYTIME_HOSTS}
    text = report(rows, anytime, budget_s=args.budget, repeat=args.repeat)
    sys.stdout.write(text)
    if args.record:
        (RESULTS / "plan.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
