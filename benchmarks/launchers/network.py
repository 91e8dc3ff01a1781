"""Hosts as network namespaces behind one router, so that each host has one wire and one neighbour."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.netlab.system import NETNS, LabError, batch, kill_until_gone, namespaces

GATEWAY = "169.254.1.1"
FIREWALL = Path(__file__).parent / "firewall.py"
ZONES = 4
"""Parts of the network between which packets can be dropped."""


class Network:
    """N hosts, for the time of the `with` block; `prefix` begins the names of its namespaces."""

    def __init__(self, size: int) -> None:
        self._prefix = f"many{os.getpid()}-"
        self._router = f"{self._prefix}router"
        self._names = [f"{self._prefix}{index}" for index in range(size)]
        self.addresses = [f"10.77.{index * ZONES // size}.{index + 1}" for index in range(size)]
        self._homes: dict[tuple[int, int], int] = {}
        self._silent: set[int] = set()
        self._cut: list[str] = []
        self._firewall: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Network:  # noqa: PYI034 - typing.Self needs Python 3.11
        """Make the hosts, and give each a route to all others."""
        try:
            batch("ip", [f"netns add {name}" for name in (self._router, *self._names)])
            forward = ["ip", "netns", "exec", self._router, "sysctl", "-qw", "net.ipv4.ip_forward=1"]
            subprocess.run(forward, check=True)
            for index, name in enumerate(self._names):
                lines = [
                    f"link add p{index} type veth peer name eth0 netns {name}",
                    f"address add {GATEWAY}/32 dev p{index}",
                    f"link set p{index} up",
                ]
                batch("ip", lines, namespace=self._router)
            for name, address in zip(self._names, self.addresses, strict=True):
                lines = [
                    "link set lo up", f"address add {address}/32 dev eth0", "link set eth0 up",
                    f"route add {GATEWAY}/32 dev eth0", f"route add default via {GATEWAY} dev eth0",
                ]  # fmt: skip
                batch("ip", lines, namespace=name)
            routes = [f"route add {address}/32 dev p{index}" for index, address in enumerate(self.addresses)]
            batch("ip", routes, namespace=self._router)
        except BaseException:
            self.__exit__()
            raise
        self._homes = {_identity(NETNS / name): index for index, name in enumerate(self._names)}
        return self

    def __exit__(self, *_: object) -> None:
        """Remove everything, also the processes that are left."""
        self._homes = self._homes or {_identity(NETNS / name): 0 for name in namespaces(self._prefix)}
        self.kill(range(len(self._names)))
        batch("ip", [f"netns del {name}" for name in namespaces(self._prefix)])

    def enter(self, index: int) -> None:
        """Move this process, which has one thread, to a host."""
        with (NETNS / self._names[index]).open() as home:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(home.fileno(), 0):
                raise LabError(f"cannot enter {self._names[index]}: {os.strerror(ctypes.get_errno())}")

    # -- faults -------------------------------------------------------------------------------------------------------

    def silence(self, hosts: Collection[int]) -> None:
        """Drop all packets to and from hosts, without an error to anybody."""
        self._silent |= set(hosts)
        addresses = [self.addresses[one] for one in hosts]
        lines = [f"rule add {way} {address}/32 blackhole" for address in addresses for way in ("from", "to")]
        batch("ip", lines, namespace=self._router)

    def cut(self, zones: Sequence[int], *, rejects: bool = False) -> None:
        """Drop all packets between these zones and the other zones; a firewall that `rejects` answers with RST."""
        rest = [zone for zone in range(ZONES) if zone not in zones]
        ways = [pair for one in zones for other in rest for pair in ((one, other), (other, one))]
        self._cut = [f"from 10.77.{one}.0/24 to 10.77.{other}.0/24 blackhole" for one, other in ways]
        batch("ip", [f"rule add {rule}" for rule in self._cut], namespace=self._router)
        if rejects:
            cuts = [f"10.77.{one}>10.77.{other}" for one, other in ways]
            command = ["ip", "netns", "exec", self._router, sys.executable, "-IS", str(FIREWALL), *cuts]
            self._firewall = subprocess.Popen(command, stdout=subprocess.PIPE)
            assert self._firewall.stdout is not None
            self._firewall.stdout.readline()

    def mend(self) -> None:
        """Let all packets pass again."""
        if self._firewall is not None:
            self._firewall.kill()
            self._firewall.communicate()
            self._firewall = None
        lines = [f"rule del {rule}" for rule in self._cut]
        addresses = [self.addresses[one] for one in self._silent]
        lines += [f"rule del {way} {address}/32 blackhole" for address in addresses for way in ("from", "to")]
        batch("ip", lines, namespace=self._router)
        self._silent, self._cut = set(), []

    # -- processes ----------------------------------------------------------------------------------------------------

    def processes(self) -> dict[int, int]:
        """Host of each living process on a host, by process id. Zombies have left their namespaces."""
        found = {}
        for entry in os.scandir("/proc"):
            if entry.name.isdigit():
                with suppress(OSError):
                    index = self._homes.get(_identity(Path(entry.path, "ns/net")))
                    if index is not None:
                        found[int(entry.name)] = index
        return found

    def kill(self, hosts: Collection[int]) -> None:
        """End all processes of these hosts at once, and wait until they are gone."""
        wanted = set(hosts)
        kill_until_gone(lambda: [pid for pid, host in self.processes().items() if host in wanted], pause_s=0.01)


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino
