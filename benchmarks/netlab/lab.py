"""A laboratory: hosts as namespaces, links as veth pairs, and functions that disturb them while a job runs."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path as FilePath
from types import FrameType, TracebackType
from typing import IO, Any, final

from benchmarks.netlab import leftovers, system, wires
from benchmarks.netlab.awake import awake
from benchmarks.netlab.brake import Brake
from benchmarks.netlab.delay import delayed
from benchmarks.netlab.selfcheck import Reading, measure
from benchmarks.netlab.system import LabError
from benchmarks.netlab.topology import Path, Topology

Link = tuple[str, str]
"""Two hosts; where a direction matters, the sender first."""
PORT = 29500
PAUSE_S = 0.2
"""Between two looks at links that miss their rate, longer by as much each time."""
# Runs on the new host: its name, the names of all, its quota, its cores; then this very process is the command.
ENTER = (
    'hostname "$1" && mount --bind "$2" /etc/hosts && { [ -z "$3" ] || echo $$ >"$3"; } && '
    '{ [ -z "$4" ] || taskset -pc "$4" $$ >/dev/null; } && shift 4 && exec "$@"'
)


@final
class Lab:
    """Hosts that exist while the `with` block runs; nothing of them is left after it, however it ends.

    SIGTERM ends the block as an interrupt does, so that it cleans up, too (in the main thread only: Python's rule).
    The next laboratory removes the remains of a laboratory that was killed.

    Raises:
        LabError: this machine can have no laboratory, or a link misses its rate (`check`).

    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._stack = ExitStack()
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Lab:
        reason = system.missing()
        if reason:
            raise LabError(reason)
        leftovers.remove()
        with ExitStack() as stack:
            stack.enter_context(_terminable())
            self.folder, self._prefix = stack.enter_context(leftovers.claim())
            self._homes = {host.name: f"{self._prefix}{host.name}" for host in self.topology.hosts}
            stack.callback(leftovers.clear, self.folder, self._prefix)
            self._build(stack)
            self._brake = stack.enter_context(Brake(self.topology, self._homes))
            stack.enter_context(awake(self._brake.fenced_cores))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A second interrupt must not stop the cleaning.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
        try:
            for process in self._processes:
                # It may not have entered its host yet, where it would be found.
                process.kill()
            self._stack.close()
            for process in self._processes:
                process.wait(timeout=system.KILL_DEADLINE_S)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def _build(self, stack: ExitStack) -> None:
        (self.folder / "hosts").write_text(wires.names(self.topology))
        system.batch("ip", wires.make(self.topology, self._homes))
        stack.enter_context(delayed(self.topology, self._homes, system.within))
        for host, home in self._homes.items():
            system.batch("ip", wires.furnish(self.topology, host), namespace=home)
            system.batch("tc", wires.limits(self.topology, host), namespace=home)
            system.within(home, wires.tune)
            for name in ("tmp", "cache"):
                (self.folder / host / name).mkdir(parents=True)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names, in the order of the file."""
        return tuple(self._homes)

    def address(self, host: str) -> str:
        """Address at which other hosts reach a host."""
        return wires.address(self.topology.index(host))

    def values(self, host: str) -> dict[str, str]:
        """Values that a command on this host can use, as text."""
        return {
            "host": host,
            "address": self.address(host),
            "index": str(self.topology.index(host)),
            "slots": str(self.topology.host(host).slots),
            "nnodes": str(len(self.hosts)),
            "head": self.address(self.hosts[0]),
            "port": str(PORT),
            "folder": str(self.folder / host),
        }

    def environment(self, host: str) -> dict[str, str]:
        """Variables of a process on this host in addition to its parent's.

        The PET_* ones are torchrun's flags, pipette-launch's too; NETLAB_* say the same to any other program.
        """
        values = self.values(host)
        return {
            **{f"NETLAB_{name.upper()}": value for name, value in values.items()},
            "PET_NNODES": values["nnodes"],
            "PET_NPROC_PER_NODE": values["slots"],
            "PET_RDZV_BACKEND": "c10d",
            "PET_RDZV_ENDPOINT": f"{values['head']}:{PORT}",
            "PET_RDZV_ID": self._prefix.rstrip("-"),
            "PET_LOCAL_ADDR": values["address"],
            "GLOO_SOCKET_IFNAME": wires.OWN,
            "NCCL_SOCKET_IFNAME": wires.OWN,
            "HOSTNAME": host,
            "TMPDIR": str(self.folder / host / "tmp"),
            "XDG_CACHE_HOME": str(self.folder / host / "cache"),
        }

    def run(
        self,
        host: str,
        argv: Sequence[object],
        env: Mapping[str, str] | None = None,
        *,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        cwd: FilePath | None = None,
    ) -> subprocess.Popen[str]:
        """Start a command on a host, in a session of its own; its process id is the command's own.

        Args:
            host: its name.
            argv: the command.
            env: changes to the environment that the host's own variables do not overrule.
            stdout: as for Popen; text.
            stderr: as for Popen; text.
            cwd: where it runs; the file system is the same on every host.

        """
        home = system.NETNS / self._homes[host]
        enter = ["nsenter", f"--net={home}", "unshare", "--uts", "--mount", "sh", "-c", ENTER, "enter"]
        words = [*enter, host, self.folder / "hosts", self._brake.entrance(host), self._brake.cores(host), *argv]
        process = subprocess.Popen(
            list(map(str, words)),
            env={**os.environ, **self.environment(host), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            cwd=cwd,
            text=True,
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    def remote_shell(self) -> FilePath:
        """Write a program that runs a command on a host, as `ssh HOST COMMAND` does."""
        enter = [
            f'set -- "$host" {self.folder}/hosts "{self._brake.entrance(host)}" "{self._brake.cores(host)}" sh -c "$*"'
            for host in self.hosts
        ]
        cases = "\n".join(f"{host}) {words} ;;" for host, words in zip(self.hosts, enter, strict=True))
        path = self.folder / "remote-shell"
        path.write_text(
            "#!/bin/sh\n"
            'while [ "${1#-}" != "$1" ]; do shift; done\n'
            f"host=$1 && shift && export GLOO_SOCKET_IFNAME={wires.OWN} TMPDIR={self.folder}/$host/tmp\n"
            f"case $host in\n{cases}\nesac\n"
            f"exec nsenter --net=/run/netns/{self._prefix}$host unshare --uts --mount sh -c '{ENTER}' enter \"$@\"\n"
        )
        path.chmod(0o755)
        return path

    def throttle(self, link: Link, rate_mbit: float, *, one_way: bool = False) -> None:
        """Set another rate, in both directions or only from the first host to the second."""
        for sender, receiver in self._ways(link, one_way=one_way):
            # Not changed in place: a packet in the queue that is larger than the new burst would wait there for ever.
            lines = [wires.free(receiver), wires.limit(receiver, Path(rate_mbit=rate_mbit))]
            system.batch("tc", lines, namespace=self._homes[sender])

    def cut(self, link: Link) -> None:
        """Take a wire down: packets vanish without an error."""
        for host, peer in self._ways(link):
            system.batch("ip", wires.disconnect(peer), namespace=self._homes[host])

    def mend(self, link: Link) -> None:
        """Bring a wire up again."""
        for host, peer in self._ways(link):
            system.batch("ip", wires.connect(self.topology, host, peer), namespace=self._homes[host])

    def kill(self, host: str) -> None:
        """Lose a host as when its power fails: it falls silent first, so no peer hears that its processes died."""
        for peer in self.hosts:
            if peer != host:
                self.cut((host, peer))
        system.kill_all([self._homes[host]])

    def end(self, host: str) -> None:
        """End all processes of a host; its kernel tells their peers."""
        system.kill_all([self._homes[host]])

    def slow(self, host: str, share: float) -> None:
        """Give a host only this share of the processor time that its slots would get; 1 = all of it again."""
        self._brake.slow(host, share)

    @property
    def slowed_by(self) -> str:
        """Return how this machine slows hosts, in words."""
        return self._brake.words

    def pids(self, host: str) -> list[int]:
        """Processes on a host."""
        return system.inhabitants(self._homes[host])

    def within(self, host: str, action: Callable[[], system.T]) -> system.T:
        """Do something from a host's point of view, in this process; sockets made there belong to the host."""
        return system.within(self._homes[host], action)

    def readings(self, *, tolerance: float = 0.10, tries: int = 8) -> tuple[Reading, ...]:
        """Measure every direction of every link with plain sockets.

        What misses its rate by more than the tolerance is measured again: a busy machine may have been the cause.
        """
        found = {(one.sender, one.receiver): one for one in measure(self.topology, self.within)}
        for turn in range(1, tries):
            wrong = [way for way, one in found.items() if not one.fits(tolerance)]
            if not wrong:
                break
            # Another virtual machine takes the processor away for seconds at a time.
            time.sleep(turn * PAUSE_S)
            found |= {(one.sender, one.receiver): one for one in measure(self.topology, self.within, wrong)}
        return tuple(found.values())

    def check(self, *, tolerance: float = 0.10) -> None:
        """See that every link has its rate.

        Raises:
            LabError: one misses it by more than the tolerance every time.

        """
        readings = self.readings(tolerance=tolerance)
        missed = [one.words() for one in readings if not one.fits(tolerance)]
        if missed:
            raise LabError(f"{len(missed)} of {len(readings)} links miss their rate: {'; '.join(missed[:5])}")

    def _ways(self, link: Link, *, one_way: bool = False) -> list[Link]:
        first, second = link
        if link not in self.topology.paths:
            raise LabError(f"no link {first} to {second}; hosts are {', '.join(self.hosts)}")
        return [(first, second)] if one_way else [(first, second), (second, first)]


@contextmanager
def _terminable() -> Any:
    """Let SIGTERM and SIGHUP unwind this process instead of ending it on the spot."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {}
    with suppress(ValueError):  # Only the main thread may set handlers, and it gets all signals.
        for number in (signal.SIGTERM, signal.SIGHUP):
            before[number] = signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
