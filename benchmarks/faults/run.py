"""One fault in one phase of one training, and what became of it."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.faults.cases import PHASES, TRAIN_ITERS, Case, ends_of, inject, iterations_after
from benchmarks.faults.job import SAVED, Job, await_so, small_disk
from benchmarks.netlab import Lab, topology

STARTS_S, ENDS_S = 150.0, 180.0
LEAVES_S = 20.0
BUDGET_S = 8
NEVER_ENDS = ("launcher stopped",)
ALONE = ("host silent", "host cut off")
"""After these the host itself is right that the others are lost."""
LEAVES_PROCESSES = ("launcher stopped", "launcher killed", "host cut off")
"""After these the host itself is not looked at: what lives on there does so behind a cut wire, or is stopped."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of a training."""

    case: Case
    ended: str
    """`trained` to its last iteration, `ended` with words, `hung`, or `not injected`."""
    recovered_s: float | None = None
    """From the fault to the next iteration, or to the end of the job."""
    words: str = ""
    false_alarms: tuple[str, ...] = ()
    """Reports of a loss before the fault, or of a host without a fault."""
    lost_checkpoint: str = ""
    """Steps of a checkpoint that were trained again; empty without such steps."""
    left: tuple[str, ...] = ()
    """Command lines of processes that were left on hosts that can be reached."""

    @property
    def is_well(self) -> bool:
        """True if the job survived or ended with a message, in time, and left no process."""
        survived = self.ended == "trained" or (self.ended == "ended" and bool(self.words))
        return survived and not self.lost_checkpoint and not self.left and not self.false_alarms


def run(case: Case, *, cache: Path, share: float = 0.5, keep: Path | None = None) -> Result:
    """Train on four hosts of which three must be there, and inject a fault."""
    with Lab(topology.uniform(4, rate_mbit=400)) as lab, small_disk() as disk:
        job = Job(lab, disk)
        flags = [
            "--nnodes=3:4",
            "--max-restarts=3",
            f"--pipette-budget={BUDGET_S}",
            f"--pipette-cache={cache if PHASES[case.phase].is_cached else 'off'}",
        ]
        job.start("pipette_launch", flags, ["--train-iters", TRAIN_ITERS])
        at_s = inject(job, case, share=share, patience_s=STARTS_S)
        result = Result(case=case, ended="not injected") if at_s is None else _await_end(job, case, at_s)
        if keep is not None:
            job.write(keep, at_s or time.monotonic())
    return result


def _await_end(job: Job, case: Case, at_s: float) -> Result:
    others = [process for one, process in job.launchers.items() if one not in ends_of(job, case)]
    in_time = await_so(lambda: all(process.poll() is not None for process in others), ENDS_S)
    ended_s = time.monotonic()
    if case.fault not in NEVER_ENDS:
        # The launchers there have their deadlines, too, where they live on.
        await_so(lambda: all(job.launchers[one].poll() is not None for one in ends_of(job, case)), LEAVES_S)
    reached = max((iteration for _, iteration in job.iterations()), default=0)
    trained = in_time and reached == TRAIN_ITERS and all(process.returncode == 0 for process in others)
    after = iterations_after(job, at_s)
    return Result(
        case=case,
        ended="hung" if not in_time else "trained" if trained else "ended",
        recovered_s=(after[0][0] if after and trained else ended_s) - at_s,
        words=_words(job, at_s),
        false_alarms=_false_alarms(job, case, at_s),
        lost_checkpoint=_lost(job, at_s, after[0][1] if after else None),
        left=_left(job.lab, but=[case.host] if case.fault in LEAVES_PROCESSES else []),
    )


def _words(job: Job, at_s: float) -> str:
    """Return the first line of the launchers about the fault."""
    told = job.matches(r"^pipette-launch: (.*(?:is lost|failed|ended with|does not|error: |ends here).*)", at_s)
    return told[0][1].group(1) if told else ""


def _false_alarms(job: Job, case: Case, at_s: float) -> tuple[str, ...]:
    """Return lines of other hosts that report a loss before the fault, or the loss of a host without a fault."""
    hit = ends_of(job, case)
    told = job.matches(r"(\w+) is lost")
    return tuple(
        line.text
        for line, _ in told
        if (line.host != case.host or case.fault not in ALONE)
        and (line.at_s < at_s or not set(re.findall(r"(\w+) is lost", line.text)).issubset(hit))
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
