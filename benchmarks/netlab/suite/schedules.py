"""Pipeline schedules on hosts that compute apart: simulated and measured step times."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.netlab.compare import launched
from benchmarks.netlab.lab import Lab
from benchmarks.netlab.suite.cases import NUM_HOSTS, SCRIPT, TOPOLOGIES, gpt
from benchmarks.netlab.suite.contenders import Case, first_plan
from benchmarks.netlab.suite.direct import trained
from benchmarks.netlab.suite.parts import PartResult, Say, Setting
from benchmarks.netlab.suite.prediction import Pair, mean_error, spearman
from benchmarks.netlab.system import LabError
from benchmarks.rivals.pick import torchrun_order
from pipette_launch.cost.learned import CorrectedPredictor
from pipette_launch.cost.pipeline.zero_bubble import SCHEDULES, named_schedule
from pipette_launch.facts import Layout, Provenance, files
from pipette_launch.facts.schedule import Schedule, ScheduleFile
from pipette_launch.search.candidates import SearchInputs
from pipette_launch.search.solve import SolveOptions, solve
from pipette_launch.text import bytes_text

TOPOLOGY = "uniform"
MODEL = (*gpt(layers=8, hidden=384, seq=128, batch=4), "--untie-embeddings-and-output-weights")
MICRO_BATCH = 1
"""As many sequences as there are hosts: the bubble is long, and no smaller micro-batch makes it shorter."""
LIMIT = 0.95
"""The part of the memory of 1F1B without recompute that a device has in the second table."""
FOLDED = ("v-zb", "v-half", "v-min")
ITERATIONS, SKIP = 8, 3
ROUNDS = 3
BUDGET_S = 40.0
SEED = 19
RUNS: tuple[tuple[str, int], ...] = (
    ("1f1b", 1),
    ("interleaved-1f1b", 2),
    ("zb-1p", 1),
    *((name, 2) for name in FOLDED),
)
"""Schedule, and chunks on each rank."""

MEGATRONS = ", Megatron's"


@dataclass(kw_only=True)
class Run:
    """One schedule, and what its steps took."""

    name: str
    layout: Layout
    placement: Sequence[int]
    words: tuple[str, ...]
    predicted_s: float
    schedule: Schedule | None
    """None where Megatron runs its own."""
    peak_bytes: int = 0
    """Predicted, of the fullest rank."""
    step_s: list[float] = field(default_factory=list)

    @property
    def measured_s(self) -> float:
        """The median step."""
        return statistics.median(self.step_s)


def run(setting: Setting, say: Say) -> PartResult:
    """Train under every schedule, in turns; raises LabError where one fails."""
    rounds = 1 if setting.quick else ROUNDS
    with Lab(TOPOLOGIES[TOPOLOGY]()) as lab, setting.python(lab) as python:
        lab.check()
        say("schedules: warm-up")
        start = launched(lab.folder / "plans", setting.budget_s(BUDGET_S))
        _, measurements = first_plan(lab, start, _words(1), cache=lab.folder / "plans", python=python)
        case = Case.of(_words(ITERATIONS), measurements)
        runs, (limit_bytes, fitting) = _runs(case), _fitting(case)
        everything = [*runs, *fitting]
        order = random.Random(SEED)
        for number in range(rounds):
            for one in order.sample(everything, len(everything)):
                path = None
                if one.schedule is not None:
                    path = lab.folder / "schedule.json"
                    files.write(path, ScheduleFile.of(one.schedule))
                one.step_s += trained(lab, one.words, one.placement, python=python, schedule=path).step_s[SKIP:]
            say(f"schedules: round {number + 1} of {rounds}")
    pairs = [Pair(what=one.name, predicted_s=one.predicted_s, measured_s=one.measured_s) for one in runs]
    stock_s = next(one.measured_s for one in runs if one.name == f"1f1b{MEGATRONS}")
    best = min((one for one in runs if one.schedule is not None), key=lambda one: one.measured_s)
    folded, *stock = sorted(fitting, key=lambda one: (one.schedule is None, one.measured_s))
    return PartResult(
        name="schedules",
        lines=(*_lines(runs, stock_s, rounds), "", *_lines_of_fitting(fitting, limit_bytes, stock[0].measured_s)),
        raw={
            "runs": [_raw(one) for one in runs],
            "limit_bytes": limit_bytes,
            "fitting": [_raw(one) for one in fitting],
        },
        headline=(
            f"mean error of {len(pairs)} predictions {mean_error(pairs):.1%} (aim: 10 %), rank correlation "
            f"{spearman(pairs):.2f} (aim: 0.9); {best.name} is {stock_s / best.measured_s:.2f} times as fast as "
            f"Megatron's 1F1B (aim: 1.05); under a memory limit {folded.name} is "
            f"{stock[0].measured_s / folded.measured_s:.2f} times as fast as the best under Megatron's own (aim: 1.10)"
        ),
    )


def _words(iterations: int) -> tuple[str, ...]:
    return (str(SCRIPT), *MODEL, "--micro-batch-size", str(MICRO_BATCH), "--train-iters", str(iterations))


def _runs(case: Case) -> list[Run]:
    """Make each schedule for the times that the warm-up measured, and price it."""
    found = []
    placement = torchrun_order(NUM_HOSTS)
    for name, vpp in RUNS:
        layout = Layout(pp=NUM_HOSTS, vpp=vpp, micro_batch_size=MICRO_BATCH)
        schedule = None
        if name in SCHEDULES:
            schedule = named_schedule(
                name,
                pp=layout.pp,
                num_microbatches=layout.num_microbatches(case.job.batch.global_batch_size),
                times=case.predictor.stage_times(layout, placement),
            )
        made = case.contender("", layout, placement)
        found.append(
            Run(
                name=f"{name}{'' if schedule else MEGATRONS}",
                layout=layout,
                placement=placement,
                words=made.words,
                schedule=schedule,
                predicted_s=case.predictor.step_time(layout, placement, schedule).total_s,
            )
        )
    return found


def _fitting(case: Case) -> tuple[int, list[Run]]:
    """Plan with less memory, with and without folded schedules; return the limit and the runs."""
    layout = Layout(pp=NUM_HOSTS, micro_batch_size=MICRO_BATCH)
    cluster = case.measurements.cluster
    predictor = CorrectedPredictor(case.job, case.measurements)
    room_bytes = SearchInputs.of(case.job, case.measurements, memory_margin=0.0).limit_bytes(layout)
    limit_bytes = int(LIMIT * max(predictor.peaks(layout)))
    free_bytes = cluster.memory_bytes - (room_bytes - limit_bytes)
    hosts = tuple(
        replace(host, devices=tuple(replace(each, memory_free_bytes=free_bytes) for each in host.devices))
        for host in cluster.hosts
    )
    short = replace(case.measurements, cluster=replace(cluster, hosts=hosts))
    stock, ours = (
        solve(
            case.job,
            short,
            options=SolveOptions(margin=0.0, memory_margin=0.0, schedules=schedules),
            clock=time.monotonic,
            provenance=Provenance(key="", made_at="", versions={}, source="measured"),
        )
        for schedules in ((), FOLDED)
    )
    if ours.chosen.order is None:
        raise LabError(f"under {limit_bytes} bytes no folded schedule was chosen, but {ours.chosen.layout.words()}")
    found = []
    for choice in (stock.chosen, *stock.alternatives, ours.chosen):
        made = case.contender("", choice.layout, choice.placement)
        found.append(
            Run(
                name=f"{choice.schedule}, {choice.layout.words()}",
                layout=choice.layout,
                placement=choice.placement,
                words=made.words,
                schedule=choice.order.schedule() if choice.order else None,
                predicted_s=choice.step_time_s,
                peak_bytes=max(choice.memory.model_bytes),
            )
        )
    return limit_bytes, found


def _lines_of_fitting(fitting: Sequence[Run], limit_bytes: int, stock_s: float) -> Iterator[str]:
    yield (
        f"The same job where the tensors of a rank may take {bytes_text(limit_bytes)}, {LIMIT:.0%} of what 1F1B is "
        f"predicted to need without recompute: the plan with folded schedules, and the plan with Megatron's own and "
        f"its alternatives. Layouts and places are free."
    )
    yield ""
    yield "| plan | predicted peak | predicted ms | measured ms | error | times as fast as the best of Megatron's |"
    yield "|---|--:|--:|--:|--:|--:|"
    for one in sorted(fitting, key=lambda each: each.measured_s):
        yield f"| {one.name} | {bytes_text(one.peak_bytes)} | {_cells(one, stock_s)} |"


def _lines(runs: Sequence[Run], stock_s: float, rounds: int) -> Iterator[str]:
    yield (
        f"{' '.join(MODEL)} --micro-batch-size {MICRO_BATCH}: {NUM_HOSTS} pipeline ranks on the network "
        f"{TOPOLOGY!r}, one on each host; {rounds} rounds of {ITERATIONS} iterations in changing order, {SKIP} not "
        f"counted."
    )
    yield ""
    yield "| schedule | chunks | predicted ms | measured ms | error | times as fast as Megatron's 1F1B |"
    yield "|---|--:|--:|--:|--:|--:|"
    for one in sorted(runs, key=lambda each: each.measured_s):
        yield f"| {one.name} | {one.layout.vpp} | {_cells(one, stock_s)} |"


def _cells(one: Run, stock_s: float) -> str:
    """Predicted and measured ms, the error, and how many times as fast as stock."""
    return (
        f"{one.predicted_s * 1e3:.0f} | {one.measured_s * 1e3:.0f} | {one.predicted_s / one.measured_s - 1:+.1%} "
        f"| {stock_s / one.measured_s:.2f}"
    )


def _raw(one: Run) -> Mapping[str, Any]:
    return {
        "name": one.name,
        "layout": one.layout.words(),
        "predicted_s": one.predicted_s,
        "measured_s": one.measured_s,
        "step_s": one.step_s,
    }
