"""Cost of pipette-launch beside torchrun: a later start, a warm-up, memory and processor time of the agent.

All of it with real interpreters, which import torch anew, as users' do.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from benchmarks.bench_start import MODEL as TINY
from benchmarks.bench_start import SCRIPT as FIRST_LINE
from benchmarks.netlab import everywhere, topology
from benchmarks.netlab.compare import PATIENCE_S, TORCHRUN, environment, in_turns, launched
from benchmarks.netlab.lab import Lab
from benchmarks.netlab.suite.cases import NUM_HOSTS, USUAL_MBIT, training
from benchmarks.netlab.suite.contenders import new_plan
from benchmarks.netlab.suite.parts import PartResult, Say, Setting
from benchmarks.netlab.system import LabError
from benchmarks.warmup.trial import Trial, warm_up
from pipette_launch.megatron import parse_iteration
from pipette_launch.text import MIB

PAIRS = 4
BUDGETS_S = (10.0, 30.0, 60.0)
WATCH_S = 20.0
BEGIN_S = 240.0
"""The most that a training may take to its second iteration, warm-up included."""
SHORT_BUDGET_S = 10.0
"""Budget of warm-ups if any plan is enough."""
WATCHED = "balanced"


@dataclass(frozen=True, kw_only=True)
class Starts:
    """Seconds until the last worker reached the first line of its script after `import torch`."""

    num_hosts: int
    pairs: tuple[tuple[float, float], ...]
    """torchrun's seconds and pipette-launch's, in turns."""

    def row(self) -> str:
        """For the table."""
        stock_s, ours_s = (statistics.median(column) for column in zip(*self.pairs, strict=True))
        later = [ours - stock for stock, ours in self.pairs]
        return (
            f"| {self.num_hosts} | {len(self.pairs)} | {stock_s:.2f} | {ours_s:.2f} | {statistics.median(later):+.2f} "
            f"| {min(later):+.2f} to {max(later):+.2f} |"
        )


@dataclass(frozen=True, kw_only=True)
class Agent:
    """Memory and processor time of the launcher's process on a host during training."""

    launcher: str
    host: str
    rss_bytes: int
    cpu_s: float
    watched_s: float

    @property
    def cpu_s_per_minute(self) -> float:
        """Processor seconds in a minute of training."""
        return self.cpu_s / self.watched_s * 60


def run(setting: Setting, say: Say) -> PartResult:
    """Measure starts, warm-ups and agents."""
    if setting.quick:
        hosts, starts = 1, [_starts(1, 1, say)]
        warmups, agents = _warmups(hosts, BUDGETS_S[:1], say), _agents(hosts, WATCH_S / 4, say)
    else:
        hosts, starts = NUM_HOSTS, [_starts(number, PAIRS, say) for number in (1, NUM_HOSTS)]
        warmups, agents = _warmups(hosts, BUDGETS_S, say), _agents(hosts, WATCH_S, say)
    return PartResult(
        name="overhead",
        lines=(*_start_lines(starts), "", *_warmup_lines(hosts, warmups), "", *_agent_lines(agents)),
        raw={
            "starts": [asdict(one) for one in starts],
            "warmups": [_warmup_raw(budget_s, trial) for budget_s, trial in warmups.items()],
            "agents": [asdict(one) for one in agents],
        },
        headline=headline(starts, {budget_s: measured_s(trial) for budget_s, trial in warmups.items()}, agents),
    )


def headline(starts: Sequence[Starts], warmups_s: Mapping[float, float | None], agents: Sequence[Agent]) -> str:
    """One sentence of each."""
    later = [
        f"{statistics.median(ours - stock for stock, ours in one.pairs):+.2f} s on {one.num_hosts} "
        f"host{'s' if one.num_hosts > 1 else ''}"
        for one in starts
    ]
    warmups = [
        f"{took_s:.0f} s of {budget_s:.0f} s" if took_s is not None else f"failed with {budget_s:.0f} s"
        for budget_s, took_s in warmups_s.items()
    ]
    stock, ours = (_worst(agents, launcher) for launcher in ("torchrun", "pipette-launch"))
    return (
        f"start from a cached plan: {', '.join(later)} against torchrun; warm-up: {', '.join(warmups)}; agent: "
        f"{ours.rss_bytes / MIB:.0f} MiB and {ours.cpu_s_per_minute:.1f} s of processor a minute, torchrun's "
        f"{stock.rss_bytes / MIB:.0f} MiB and {stock.cpu_s_per_minute:.1f} s"
    )


def _worst(agents: Sequence[Agent], launcher: str) -> Agent:
    return max((one for one in agents if one.launcher == launcher), key=lambda one: one.cpu_s)


# -- starts ---------------------------------------------------------------------------------------------------------


def _starts(num_hosts: int, pairs: int, say: Say) -> Starts:
    say(f"overhead: starts on {num_hosts} hosts")
    words = [str(FIRST_LINE), *TINY]
    with Lab(topology.uniform(num_hosts, rate_mbit=USUAL_MBIT)) as lab:
        ours = _ours(lab)
        _first_line_s(lab, [*ours, *words])
        new_plan(lab.folder / "plans")
        found = in_turns(
            lambda: _first_line_s(lab, [*TORCHRUN, *words]), lambda: _first_line_s(lab, [*ours, *words]), pairs=pairs
        )
    return Starts(num_hosts=num_hosts, pairs=found)


def _ours(lab: Lab) -> tuple[str, ...]:
    return launched(lab.folder / "plans", SHORT_BUDGET_S)


def _first_line_s(lab: Lab, words: Sequence[str]) -> float:
    """Start on every host; seconds until the last worker was at its first line."""
    said = lab.folder / "first-lines"
    said.mkdir(exist_ok=True)
    for path in said.iterdir():
        path.unlink()
    env = {**environment(), "BENCH_OUT": str(said)}
    began = time.time()
    with (lab.folder / "start-output").open("w") as output:
        jobs = {
            host: lab.run(host, [sys.executable, *words], env, stdout=output, stderr=subprocess.STDOUT)
            for host in lab.hosts
        }
        code, blamed = everywhere.finish(jobs, PATIENCE_S)
    lines = [float(path.read_text()) for path in said.iterdir()]
    if code or len(lines) != len(lab.hosts):
        text = (lab.folder / "start-output").read_text(errors="replace")[-2000:]
        raise LabError(f"{' '.join(words[:4])}: {blamed or 'nobody'} failed, exit code {code}\n{text}")
    return max(lines) - began


def _start_lines(starts: Sequence[Starts]) -> Iterator[str]:
    yield "Start: seconds until the last worker's script has imported torch, real interpreters on two shared cores;"
    yield "torchrun with the same `--patch cpu_backend`, pipette-launch from a cached plan, medians of pairs in turns."
    yield ""
    yield "| hosts | pairs | torchrun s | pipette-launch s | later by, median | least to most |"
    yield "|--:|--:|--:|--:|--:|---|"
    yield from (one.row() for one in starts)


# -- warm-ups -------------------------------------------------------------------------------------------------------


def _warmups(hosts: int, budgets_s: Sequence[float], say: Say) -> dict[float, Trial]:
    with Lab(topology.uniform(hosts, rate_mbit=USUAL_MBIT)) as lab:
        found = {}
        for budget_s in budgets_s:
            say(f"overhead: warm-up of {budget_s:g} s")
            found[budget_s] = warm_up(lab, f"budget{budget_s:g}", budget_s=budget_s)
        return found


def measured_s(trial: Trial) -> float | None:
    """Seconds that the budget is meant to bound: all phases but the workers' imports; None where it failed."""
    if trial.failure or trial.measurements is None:
        return None
    return sum(seconds for phase, seconds in trial.measurements.phase_s.items() if phase != "start")


def _warmup_lines(hosts: int, warmups: Mapping[float, Trial]) -> Iterator[str]:
    yield (
        f"Cold warm-up of {hosts} hosts of one slot, real interpreters: seconds by phase, of the slowest worker. "
        "The budget bounds what follows the imports; the whole command adds those of the launchers, rendezvous, search "
        "and screen."
    )
    yield ""
    yield "| budget s | measured for s | imports s | phases | whole command s | processor s |"
    yield "|--:|--:|--:|---|--:|--:|"
    for budget_s, trial in warmups.items():
        took_s = measured_s(trial)
        if took_s is None or trial.measurements is None:
            yield f"| {budget_s:g} | {trial.failure} |"
            continue
        phase_s = trial.measurements.phase_s
        phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in phase_s.items() if phase != "start")
        yield (
            f"| {budget_s:g} | {took_s:.1f} | {phase_s.get('start', 0.0):.1f} | {phases} | {trial.wall_s:.1f} "
            f"| {trial.cpu_s:.1f} |"
        )


def _warmup_raw(budget_s: float, trial: Trial) -> Mapping[str, object]:
    return {
        "budget_s": budget_s,
        "measured_s": measured_s(trial),
        "phase_s": trial.measurements.phase_s if trial.measurements else {},
        "wall_s": trial.wall_s,
        "cpu_s": trial.cpu_s,
        "failure": trial.failure,
    }


# -- agents ---------------------------------------------------------------------------------------------------------


def _agents(hosts: int, watch_s: float, say: Say) -> list[Agent]:
    words = training(WATCHED, iterations=100_000)
    found = []
    with Lab(topology.uniform(hosts, rate_mbit=USUAL_MBIT)) as lab:
        for launcher, start in (("torchrun", TORCHRUN), ("pipette-launch", _ours(lab))):
            say(f"overhead: {launcher} while it trains")
            found += _watched(lab, launcher, [*start, *words], watch_s)
    return found


def _watched(lab: Lab, launcher: str, words: Sequence[str], watch_s: float) -> list[Agent]:
    """Train, watch the launcher's own process on every host from the second iteration on, and end it."""
    outputs = [lab.folder / f"watched-{host}" for host in lab.hosts]
    with ExitStack() as stack:
        files = [stack.enter_context(path.open("w")) for path in outputs]
        jobs = [
            lab.run(host, [sys.executable, *words], environment(), stdout=file, stderr=subprocess.STDOUT)
            for host, file in zip(lab.hosts, files, strict=True)
        ]
        try:
            _await_iterations(outputs, jobs)
            processes = [psutil.Process(job.pid) for job in jobs]
            began_s, before = time.monotonic(), [_cpu_s(process) for process in processes]
            time.sleep(watch_s)
            watched_s, after = time.monotonic() - began_s, [_cpu_s(process) for process in processes]
            return [
                Agent(
                    launcher=launcher,
                    host=host,
                    rss_bytes=process.memory_info().rss,
                    cpu_s=then - first,
                    watched_s=watched_s,
                )
                for host, process, first, then in zip(lab.hosts, processes, before, after, strict=True)
            ]
        finally:
            _end(jobs)


def _await_iterations(outputs: Sequence[Path], jobs: Sequence[subprocess.Popen[str]]) -> None:
    deadline_s = time.monotonic() + BEGIN_S
    while time.monotonic() < deadline_s and all(job.poll() is None for job in jobs):
        lines = [line for path in outputs for line in path.read_text(errors="replace").splitlines()]
        if sum(parse_iteration(line) is not None for line in lines) > 1:
            return
        time.sleep(0.5)
    text = outputs[0].read_text(errors="replace")[-2000:]
    raise LabError(f"no two iterations within {BEGIN_S:g} s:\n{text}")


def _cpu_s(process: psutil.Process) -> float:
    """All threads', without children."""
    times = process.cpu_times()
    return float(times.user + times.system)


def _end(jobs: Sequence[subprocess.Popen[str]]) -> None:
    for job in jobs:
        job.terminate()
    everywhere.finish(dict(zip(map(str, range(len(jobs))), jobs, strict=True)), PATIENCE_S)


def _agent_lines(agents: Sequence[Agent]) -> Iterator[str]:
    yield (
        f"The launcher's own process on each host while the {WATCHED} model trains, watched for "
        f"{agents[0].watched_s:.0f} s; n0 hosts the rendezvous."
    )
    yield ""
    yield "| launcher | host | resident MiB | processor s in a minute |"
    yield "|---|---|--:|--:|"
    for one in agents:
        yield f"| {one.launcher} | {one.host} | {one.rss_bytes / MIB:.0f} | {one.cpu_s_per_minute:.2f} |"
