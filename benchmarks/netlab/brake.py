"""Holds hosts back: a processor quota where control groups can be written, else stop and go.

A quota lets all of a host's processes run for a share of every period, a weight keeps the ratio to its peers where all
processors are busy; nothing else on the machine changes. A fence (`cores_per_slot`) gives every host a quota with a
short period, cores to keep to, and more weight than the rest of the machine. Where no control group can be made, a
thread stops the host's processes for the rest of every period and lets them go on: coarser, and visible to a parent
that watches for stopped children.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import final

from benchmarks.netlab import fence, system
from benchmarks.netlab.system import LabError
from benchmarks.netlab.topology import Topology

GROUPS = Path("/sys/fs/cgroup/cpu")
"""Folder of control groups version 1. In version 2 a process below the root cannot limit others."""
GROUP_PERIOD_US = 20_000
USUAL_WEIGHT = 1024
FENCE_WEIGHT = 64 * USUAL_WEIGHT
"""Weight of a fenced host, so that it gets its quota beside any other load."""
SIGNAL_PERIOD_S = 0.05
LOOK_EVERY = 4
"""Periods between two looks at who lives in a host: that reads all of /proc."""


@final
class Brake:
    """Holds hosts of one lab back while its block runs.

    Args:
        topology: whose hosts, slots and shares.
        homes: the namespace of each host.
        by_signals: do not try control groups.

    Raises:
        LabError: the topology has a fence, which needs a control group, and none can be made.
        TopologyError: the fence is larger than the machine.

    """

    def __init__(self, topology: Topology, homes: Mapping[str, str], *, by_signals: bool = False) -> None:
        self._topology = topology
        self._homes = homes
        self._places = fence.places(topology, sorted(os.sched_getaffinity(0))) if self._fenced else {}
        self._groups = {} if by_signals else _made(homes)
        if self._fenced and not self._groups:
            raise LabError(
                f"cores_per_slot needs a control group for each host, and none can be made in {GROUPS} "
                "(version 1, controller cpu); leave cores_per_slot out"
            )
        self._shares: dict[str, float] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._stop_and_go, daemon=True)

    @property
    def _fenced(self) -> bool:
        return self._topology.cores_per_slot is not None

    @property
    def words(self) -> str:
        """The way in which this machine slows hosts."""
        return "cpu.cfs_quota_us and cpu.shares of a control group" if self._groups else "SIGSTOP and SIGCONT in turns"

    def __enter__(self) -> Brake:
        for host in self._topology.hosts:
            if host.share < 1 or self._fenced:
                self.slow(host.name, host.share)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def fenced_cores(self) -> tuple[int, ...]:
        """All cores to which some host keeps; none without a fence."""
        return tuple(sorted({core for cores in self._places.values() for core in cores}))

    def entrance(self, host: str) -> str:
        """Return the file into which a process of this host writes its id; empty without a control group."""
        return str(self._groups[host] / "cgroup.procs") if self._groups else ""

    def cores(self, host: str) -> str:
        """The cores that a process of this host keeps to, as taskset lists them; empty = all."""
        return ",".join(map(str, self._places.get(host, ())))

    def slow(self, host: str, share: float) -> None:
        """Limit a host to this share of its part of the machine or of its fence; 1 = no limit."""
        self._topology.host(host)
        if self._fenced:
            quota = fence.timing_us(share * fence.processors(self._topology, host), fence.PERIOD_US)
            self._hold(host, *quota, FENCE_WEIGHT)
        elif self._groups:
            quota = fence.timing_us(share * self._part(host), GROUP_PERIOD_US) if share < 1 else (-1, GROUP_PERIOD_US)
            # The quota holds where processors are idle; where all compute, the weight keeps the ratio to its peers.
            self._hold(host, *quota, max(2, int(share * USUAL_WEIGHT)))
        else:
            self._shares[host] = share
            if not self._thread.is_alive():
                self._thread.start()

    def _hold(self, host: str, quota_us: int, period_us: int, weight: int) -> None:
        for name, value in (("cfs_period_us", period_us), ("cfs_quota_us", quota_us), ("shares", weight)):
            (self._groups[host] / f"cpu.{name}").write_text(str(value))

    def _part(self, host: str) -> float:
        """Processors that a host has when every slot of the lab computes: a fair part, at most one a slot."""
        slots = sum(one.slots for one in self._topology.hosts)
        cores = len(os.sched_getaffinity(0))
        return self._topology.host(host).slots * min(1.0, cores / slots)

    def _stop_and_go(self) -> None:
        """Stop the processes of slow hosts for a part of each period, all in one thread."""
        turns = 0
        lived: dict[str, list[int]] = {}
        while not self._done.is_set():
            shares = dict(self._shares)
            if turns % LOOK_EVERY == 0:
                lived = {host: system.inhabitants(self._homes[host]) for host in shares}
            turns += 1
            slow = sorted((share, host) for host, share in shares.items() if share < 1)
            _signal((pid for _, host in slow for pid in lived.get(host, ())), signal.SIGSTOP)
            passed_s = 0.0
            # The most held back goes on last.
            for share, host in reversed(slow):
                rest_s = (1 - share) * SIGNAL_PERIOD_S
                self._done.wait(rest_s - passed_s)
                passed_s = rest_s
                _signal(lived.get(host, ()), signal.SIGCONT)
            self._done.wait(SIGNAL_PERIOD_S - passed_s)
        _signal((pid for pids in lived.values() for pid in pids), signal.SIGCONT)


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _made(homes: Mapping[str, str]) -> dict[str, Path]:
    """A control group for each host; none where this machine has no such thing to write."""
    groups = {host: GROUPS / home for host, home in homes.items()}
    try:
        for group in groups.values():
            group.mkdir()
            (group / "cpu.cfs_quota_us").write_text("-1")
    except OSError:
        for group in groups.values():
            with suppress(OSError):
                group.rmdir()
        return {}
    return groups


def release(prefix: str) -> None:
    """Remove the control groups of a lab; nobody may live in them any more."""
    with suppress(FileNotFoundError):
        for group in GROUPS.iterdir():
            if group.name.startswith(prefix):
                with suppress(OSError):
                    group.rmdir()
