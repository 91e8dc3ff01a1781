"""Phases of a job in which a fault can come, and the faults."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import psutil

from benchmarks.faults.job import ITERATION, Job

TRAIN_ITERS = 40
Fault: TypeAlias = Callable[[Job, str], None]
"""What it does to one host of a job."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """When a fault comes."""

    sign: str
    """The line, of any host, after which the job is in this phase."""
    wait_s: float = 0.0
    """So long after the line."""
    is_cached: bool = True
    """Whether the job starts from a cached plan."""


PHASES = {
    "rendezvous": Phase(sign="", wait_s=1.5),
    "warm-up": Phase(sign="measuring", wait_s=7.0, is_cached=False),
    "search": Phase(sign=r"pipette-launch: stages", is_cached=False),
    "spawn": Phase(sign="Plan file", wait_s=1.0),
    "training": Phase(sign=r"iteration\s+8/"),
    "checkpoint": Phase(sign=r"iteration\s+10/"),
    "exit": Phase(sign=rf"iteration\s+{TRAIN_ITERS}/"),
}


def _agent(job: Job, host: str) -> psutil.Process:
    # The lab's command becomes the launcher: its process id is the launcher's.
    return psutil.Process(job.launchers[host].pid)


def _workers(job: Job, host: str) -> list[psutil.Process]:
    # Beside them there is the shell that ends them when the launcher is killed.
    found = _agent(job, host).children()
    return [one for one in found if one.status() != psutil.STATUS_ZOMBIE and one.name() != "sh"]


def kill_worker(job: Job, host: str) -> None:
    """SIGKILL one worker, where there is one."""
    for one in _workers(job, host)[:1]:
        one.kill()


def stop_worker(job: Job, host: str) -> None:
    """SIGSTOP one worker for ever, where there is one."""
    for one in _workers(job, host)[:1]:
        one.suspend()


def kill_launcher(job: Job, host: str) -> None:
    """SIGKILL the launcher alone: its workers are orphans."""
    _agent(job, host).kill()


def stop_launcher(job: Job, host: str) -> None:
    """SIGSTOP the launcher for ever, and its workers."""
    for one in [_agent(job, host), *_workers(job, host)]:
        one.suspend()


def terminate_launcher(job: Job, host: str) -> None:
    """SIGTERM the launcher, as when a batch system takes the node back."""
    _agent(job, host).send_signal(signal.SIGTERM)


def end_host(job: Job, host: str) -> None:
    """End all processes of a host; its kernel tells the others."""
    job.lab.end(host)


def silence_host(job: Job, host: str) -> None:
    """Cut a host's power: no word, no reset."""
    job.lab.kill(host)


def cut_host(job: Job, host: str) -> None:
    """Cut a host's wires: its processes live on by themselves."""
    for peer in job.lab.hosts:
        if peer != host:
            job.lab.cut((host, peer))


FAULTS: dict[str, Fault] = {
    "worker killed": kill_worker,
    "worker stopped": stop_worker,
    "launcher killed": kill_launcher,
    "launcher stopped": stop_launcher,
    "launcher told to end": terminate_launcher,
    "host ended": end_host,
    "host silent": silence_host,
    "host cut off": cut_host,
}


def inject(job: Job, phase: Phase, fault: Fault, host: str, *, patience_s: float) -> float | None:
    """Wait for a phase and inject a fault; returns when, or None where the phase did not come."""
    ends_s = time.monotonic() + patience_s
    while phase.sign and not job.matches(phase.sign):
        if time.monotonic() > ends_s:
            return None
        time.sleep(0.01)
    time.sleep(phase.wait_s)
    at_s = time.monotonic()
    fault(job, host)
    return at_s


def iterations_after(job: Job, at_s: float) -> list[tuple[float, int]]:
    """Iterations that were printed after a fault, but for those on their way when it came."""
    return [(line.at_s, int(match.group(1))) for line, match in job.matches(ITERATION, at_s + 0.5)]
