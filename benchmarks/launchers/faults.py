"""Injections into a running job of many launchers: their moment, their hosts, and the expected end of the job."""

from __future__ import annotations

import math
import os
import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.launchers.job import Job
from benchmarks.launchers.network import ZONES
from pipette_launch.agent.rendezvous import LAST_CALL_S
from pipette_launch.defaults import (
    END_S,
    FIRST_ANSWER_S,
    GOODBYE_S,
    HOST_SILENCE_S,
    NEWS_S,
    PROBE_S,
    PROOF_S,
    SEARCH_BUDGET_S,
    START_S,
)

How = Literal["killed", "silent", "stopped", "told", "cut", "rejected", "nothing"]
FOUND_S = {
    "killed": NEWS_S + PROBE_S + PROOF_S,
    "silent": 2 * HOST_SILENCE_S + PROOF_S,
    "stopped": 2 * HOST_SILENCE_S + PROOF_S,
    "told": NEWS_S + PROBE_S + PROOF_S,
    "cut": 2 * HOST_SILENCE_S + PROOF_S,
    "rejected": 2 * HOST_SILENCE_S + PROOF_S,
    "nothing": 0.0,
}
"""Longest time (s) until all healthy launchers have met: the sum of the deadlines of the waits that follow each other.
A silence is found (HOST_SILENCE_S), and proved at the meeting."""
ENDS_S = END_S + GOODBYE_S
"""Longest end of a job after its last iteration, or after a signal."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One injection."""

    name: str
    how: How
    share: float = 0.0
    """Share of the hosts that are hit; at least one host, unless 0."""
    first: bool = False
    """True if the first host is hit too."""
    phase: Literal["rendezvous", "measure", "plan", "spawn", "training", "end"] = "training"
    is_cold: bool = False
    slow_disks: float = 0.0
    """Seconds of each write to a disk; of the first host, or of all hosts if `share` is 1."""
    goes_on: bool | None = True
    """False if the job must end; None if the job may go on, or end with a sentence."""
    after_s: float = 0.0
    """Seconds between the begin of the phase and the injection."""
    again_s: float = 0.0
    """Seconds until as many other hosts are lost; 0 = no second loss."""

    def hosts(self, size: int, draw: random.Random) -> list[int]:
        """Draw the hosts that are hit."""
        if self.how in ("cut", "rejected"):
            return [host for host in range(size) if host * ZONES // size >= ZONES - round(self.share * ZONES)]
        if self.how == "nothing":
            return []
        if self.share == 1:
            return list(range(size))
        number = max(round(self.share * size), 1) if self.share else 0
        return sorted([0] * self.first + draw.sample(range(1, size), number))

    def limit_s(self) -> float:
        """Return the longest time from the injection to the last new worker, or to the end of the job."""
        if self.phase == "rendezvous":
            return (LAST_CALL_S if self.goes_on is None else FIRST_ANSWER_S) + ENDS_S
        if self.how == "nothing" or not self.goes_on:
            return FOUND_S[self.how] + ENDS_S
        measures_s = START_S if self.phase in ("measure", "plan") else 0.0
        return FOUND_S[self.how] + measures_s + SEARCH_BUDGET_S

    def hit_limit_s(self, size: int) -> float:
        """Return the longest time from the injection to the end of the launchers that were hit and still run."""
        cut_s = HOST_SILENCE_S * math.ceil(math.log(size, 4)) if self.how in ("cut", "rejected") else 0.0
        return FOUND_S[self.how] + cut_s + ENDS_S


def inject(job: Job, case: Case, hosts: Sequence[int]) -> None:
    """Cause the fault."""
    network = job.network
    pids = [job.running[host] for host in hosts if host in job.running]
    if case.how == "silent":
        network.silence(hosts)
    if case.how in ("killed", "silent"):
        network.kill(hosts)
    elif case.how in ("cut", "rejected"):
        network.cut(range(ZONES - round(case.share * ZONES), ZONES), rejects=case.how == "rejected")
    elif case.how == "told":
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
    elif case.how == "stopped":
        stop(job, hosts, signal.SIGSTOP)


def stop(job: Job, hosts: Sequence[int], number: signal.Signals) -> None:
    """Send a signal to all processes of hosts."""
    for pid, host in job.network.processes().items():
        if host in hosts:
            os.kill(pid, number)


ONE, FEW, MANY = 0.01, 0.05, 0.20
CASES = (
    Case(name="normal end", how="nothing"),
    Case(name="1 % killed", how="killed", share=ONE),
    Case(name="5 % killed", how="killed", share=FEW),
    Case(name="20 % killed", how="killed", share=MANY),
    Case(name="1 % silent", how="silent", share=ONE),
    Case(name="5 % silent", how="silent", share=FEW),
    Case(name="20 % silent", how="silent", share=MANY),
    Case(name="first host killed", how="killed", first=True),
    Case(name="first host silent", how="silent", first=True),
    Case(name="first host and 5 % killed", how="killed", share=FEW, first=True),
    Case(name="5 % killed, and 5 % more 2 s later", how="killed", share=FEW, again_s=2.0),
    Case(name="5 % stopped, then continued", how="stopped", share=FEW),
    Case(name="5 % told to end (SIGTERM)", how="told", share=FEW),
    Case(name="all told to end (SIGTERM)", how="told", share=1, goes_on=False),
    Case(name="a quarter cut off", how="cut", share=0.25),
    Case(name="the network cut into halves", how="cut", share=0.5),
    Case(name="a firewall rejects between halves", how="rejected", share=0.5),
    Case(name="a firewall rejects a quarter", how="rejected", share=0.25),
    Case(name="slow disk of the first host, 5 % killed", how="killed", share=FEW, slow_disks=0.2),
    Case(name="slow disk of the first host", how="nothing", is_cold=True, slow_disks=0.2),
    Case(name="5 % killed in the rendezvous", how="killed", share=FEW, phase="rendezvous", after_s=1.0,
         goes_on=None),
    Case(name="first host killed in the rendezvous", how="killed", first=True, phase="rendezvous", after_s=1.0,
         goes_on=False),
    Case(name="5 % killed in the warm-up", how="killed", share=FEW, phase="measure", is_cold=True),
    Case(name="first host killed in the warm-up", how="killed", first=True, phase="measure", is_cold=True),
    Case(name="5 % silent in the warm-up", how="silent", share=FEW, phase="measure", is_cold=True),
    Case(name="20 % killed during the search", how="killed", share=MANY, phase="plan", is_cold=True, after_s=0.5),
    Case(name="5 % killed while workers start", how="killed", share=FEW, phase="spawn"),
    Case(name="5 % killed at the end", how="killed", share=FEW, phase="end"),
)  # fmt: skip
