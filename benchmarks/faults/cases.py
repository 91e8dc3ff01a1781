"""Phases of a job in which a fault can come, and the faults."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

import psutil

from benchmarks.faults.job import Job, await_so

TRAIN_ITERS = 40
SLOW_MBIT = 20.0
FURTHER = {"link cut": 1, "far link cut": 2}
"""Places from a host to the other end of its cut wire. A host's agent watches the agent of the next host."""
Fault: TypeAlias = Callable[[Job, str], None]
"""Causes a fault on one host of a job."""


class Case(NamedTuple):
    """A fault that comes to a host in a phase."""

    phase: str
    fault: str
    host: str


@dataclass(frozen=True, kw_only=True)
class Phase:
    """When a fault comes."""

    sign: str
    """The line, of any host, after which the job is in this phase."""
    wait_s: float = 0.0
    """So long after the line, at least."""
    lasts_s: float = 0.0
    """Length in seconds of the phase; the moment of the fault is drawn from it."""
    is_cached: bool = True
    """True if the job starts from a cached plan."""
    has_workers: bool = True


PHASES = {
    "rendezvous": Phase(sign="", wait_s=0.5, lasts_s=3.0, has_workers=False),
    "warm-up": Phase(sign="measuring", wait_s=5.0, lasts_s=5.0, is_cached=False),
    "search": Phase(sign=r"pipette-launch: stages", lasts_s=0.3, is_cached=False, has_workers=False),
    "spawn": Phase(sign="Plan file", wait_s=0.2, lasts_s=3.0),
    "training": Phase(sign=r"iteration\s+8/", lasts_s=0.2),
    "checkpoint": Phase(sign=r"iteration\s+10/", lasts_s=0.1),
    "exit": Phase(sign=rf"iteration\s+{TRAIN_ITERS}/", lasts_s=0.3),
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


def ends_of(job: Job, case: Case) -> tuple[str, ...]:
    """Name the hosts that a fault comes to: both ends of a wire, else one."""
    further = FURTHER.get(case.fault)
    return (case.host,) if further is None else (case.host, _after(job, case.host, further))


def _after(job: Job, host: str, further: int) -> str:
    hosts = job.lab.hosts
    return hosts[(hosts.index(host) + further) % len(hosts)]


def cut_link(job: Job, host: str, *, further: int) -> None:
    """Cut the wire to the host that is `further` places on; both ends still reach all other hosts."""
    job.lab.cut((host, _after(job, host, further)))


def slow_links(job: Job, host: str) -> None:
    """Give all wires of a host a twentieth of their rate."""
    for peer in job.lab.hosts:
        if peer != host:
            job.lab.throttle((host, peer), SLOW_MBIT)


def refuse_memory(job: Job, host: str) -> None:
    """Let no worker of a host have more memory than it has."""
    for one in _workers(job, host):
        one.rlimit(psutil.RLIMIT_AS, (one.memory_info().vms,) * 2)


def fill_disk(job: Job, _host: str) -> None:
    """Fill the file system that the checkpoints go to."""
    with suppress(OSError), (job.disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 20))


FAULTS: dict[str, Fault] = {
    "worker killed": kill_worker,
    "worker stopped": stop_worker,
    "memory refused": refuse_memory,
    "launcher killed": kill_launcher,
    "launcher stopped": stop_launcher,
    "launcher told to end": terminate_launcher,
    "host ended": end_host,
    "host silent": silence_host,
    "host cut off": cut_host,
    **{fault: partial(cut_link, further=further) for fault, further in FURTHER.items()},
    "links slowed": slow_links,
    "disk full": fill_disk,
}
NEED_WORKERS = ("worker killed", "worker stopped", "memory refused")


def cases(phases: Sequence[str], faults: Sequence[str], hosts: Sequence[str]) -> list[Case]:
    """List all cases but those whose fault has no worker to come to."""
    return [
        Case(phase, fault, host)
        for phase in phases
        for fault in faults
        for host in hosts
        if PHASES[phase].has_workers or fault not in NEED_WORKERS
    ]


def inject(job: Job, case: Case, *, share: float, patience_s: float) -> float | None:
    """Wait for a phase and inject a fault; returns when, or None where the phase did not come.

    Args:
        job: where.
        case: what.
        share: when within the phase, 0 to 1.
        patience_s: for so long the phase is awaited.

    """
    phase = PHASES[case.phase]
    if phase.sign and not await_so(lambda: bool(job.matches(phase.sign)), patience_s):
        return None
    time.sleep(phase.wait_s + share * phase.lasts_s)
    at_s = time.monotonic()
    FAULTS[case.fault](job, case.host)
    return at_s


def iterations_after(job: Job, at_s: float) -> list[tuple[float, int]]:
    """Iterations that were printed after a fault, but for those on their way when it came."""
    return job.iterations(at_s + 0.5)
