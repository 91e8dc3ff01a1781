"""One fault in one phase of one training, and what became of it."""

from __future__ import annotations

import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.faults.cases import FAULTS, PHASES, TRAIN_ITERS, inject, iterations_after
from benchmarks.faults.job import SAVED, Job, await_so
from benchmarks.netlab import Lab, topology

STARTS_S, ENDS_S = 150.0, 180.0
LEAVES_S = 20.0
BUDGET_S = 8


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of a training."""

    phase: str
    fault: str
    host: str
    ended: str
    """`trained` to its last iteration, `ended` with words, `hung`, or `not injected`."""
    recovered_s: float | None
    """From the fault to the next iteration, or to the end of the job."""
    words: str
    lost_checkpoint: str
    """What a checkpoint held and was trained again; empty for nothing."""
    left: tuple[str, ...]
    """Command lines of processes that were left on hosts that can be reached."""

    @property
    def is_well(self) -> bool:
        """Whether the job survived or ended with words, in time, and left nothing."""
        survived = self.ended == "trained" or (self.ended == "ended" and bool(self.words))
        return survived and not self.lost_checkpoint and not self.left


def run(phase: str, fault: str, host: str, *, cache: Path, keep: Path | None = None) -> Result:
    """Train on four hosts of which three must be there, and inject a fault."""
    when = PHASES[phase]
    with Lab(topology.uniform(4, rate_mbit=400)) as lab, tempfile.TemporaryDirectory() as name:
        saved = Path(name) / "checkpoints"
        job = Job(lab)
        job.start(
            "pipette_launch",
            [
                "--nnodes=3:4",
                "--max-restarts=3",
                f"--pipette-budget={BUDGET_S}",
                f"--pipette-cache={cache if when.is_cached else 'off'}",
            ],
            ["--train-iters", TRAIN_ITERS, "--save", saved, "--load", saved],
        )
        at_s = inject(job, when, FAULTS[fault], host, patience_s=STARTS_S)
        if at_s is None:
            return _result(job, phase, fault, host, ended="not injected")
        others = [process for one, process in job.launchers.items() if one != host]
        in_time = await_so(lambda: all(process.poll() is not None for process in others), ENDS_S)
        ended_s = time.monotonic()
        # The lost host's own launcher has its deadlines, too, where it lives on.
        last = job.launchers[host]
        if fault != "launcher stopped":
            await_so(lambda: last.poll() is not None, LEAVES_S)
        left = _left(lab, but=[host] if fault in ("launcher stopped", "host cut off", "launcher killed") else [])
        if keep is not None:
            job.write(keep, at_s)
        after = iterations_after(job, at_s)
        reached = max((iteration for _, iteration in job.iterations()), default=0)
        trained = in_time and reached == TRAIN_ITERS and all(process.returncode == 0 for process in others)
        first = after[0] if after else None
        return _result(
            job,
            phase,
            fault,
            host,
            ended="hung" if not in_time else "trained" if trained else "ended",
            recovered_s=(first[0] if first and trained else ended_s) - at_s,
            lost=_lost(job, at_s, first[1] if first else None),
            left=left,
            since_s=at_s,
        )


def _result(
    job: Job,
    phase: str,
    fault: str,
    host: str,
    *,
    ended: str,
    recovered_s: float | None = None,
    lost: str = "",
    left: tuple[str, ...] = (),
    since_s: float = 0.0,
) -> Result:
    told = job.matches(r"is lost|no longer|gone|fewer|failed|ended with|does not|Error:|wants|it ends here", since_s)
    words = [line.text for line, _ in told if "pipette-launch" in line.text] or [line.text for line, _ in told]
    return Result(
        phase=phase,
        fault=fault,
        host=host,
        ended=ended,
        recovered_s=recovered_s,
        words=words[0].removeprefix("pipette-launch: ") if words else "",
        lost_checkpoint=lost,
        left=left,
    )


def _lost(job: Job, at_s: float, first: int | None) -> str:
    """Say what had been saved before the fault and is trained again."""
    saved = [int(match.group(1)) for line, match in job.matches(SAVED) if line.at_s < at_s]
    if not saved or first is None or first > saved[-1]:
        return ""
    return f"iteration {saved[-1]} was saved, and training went on with {first}"


def _left(lab: Lab, *, but: list[str]) -> tuple[str, ...]:
    """Name the processes that are left on hosts, after a moment in which they may end."""
    hosts = [host for host in lab.hosts if host not in but]
    await_so(lambda: not any(lab.pids(host) for host in hosts), LEAVES_S)
    found = []
    for pid in (pid for host in hosts for pid in lab.pids(host)):
        with suppress(psutil.NoSuchProcess):
            found.append(f"{pid}: {' '.join(psutil.Process(pid).cmdline())[:150]}")
    return tuple(found)
