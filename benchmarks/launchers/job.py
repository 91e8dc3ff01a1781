"""One job of many real launchers, each forked from this warm interpreter onto a host of its own."""

from __future__ import annotations

import atexit
import os
import selectors
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from benchmarks.launchers.network import Network
from pipette_launch.cli import launcher

WRITES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"}
LOOK_S = 0.05


class Line(NamedTuple):
    """One line of a launcher or its workers."""

    at_s: float
    host: int
    text: str


class Event(NamedTuple):
    """One event of a worker, by the clock of this machine."""

    at_s: float
    name: str
    rank: int
    world: int


@dataclass
class Job:
    """Launchers on the hosts of a network, and their output."""

    network: Network
    folder: Path
    """Shared folder of the job, with events of its workers."""
    began_s: float = field(default_factory=time.monotonic)
    lines: list[Line] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    running: dict[int, int] = field(default_factory=dict)
    """Process ids of launchers, by host."""
    codes: dict[int, int] = field(default_factory=dict)
    """Exit codes of ended launchers, by host."""
    cpu_s: dict[int, float] = field(default_factory=dict)
    """Processor seconds of ended launchers and their workers, by host."""
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _rests: dict[int, bytes] = field(default_factory=dict)
    _read_bytes: int = 0

    def start(self, words: Sequence[str], environment: Mapping[str, str], *, slow_disks: Mapping[int, float]) -> None:
        """Start a launcher on every host; `slow_disks` has the seconds that each write takes there."""
        for host in range(len(self.network.addresses)):
            reader, writer = os.pipe()
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if pid == 0:
                try:
                    become(self.network, host, self.folder, writer, environment, slow_disks.get(host, 0.0))
                    run(words)
                finally:
                    os._exit(3)
            os.close(writer)
            os.set_blocking(reader, False)
            self._selector.register(reader, selectors.EVENT_READ, host)
            self.running[host] = pid

    def pump(self, is_so: Callable[[], object], patience_s: float) -> bool:
        """Read output until something is so; return false if it was not so in time."""
        ends_s = time.monotonic() + patience_s
        while True:
            for key, _ in self._selector.select(LOOK_S):
                self._read(key.fd, key.data)
            self._read_events()
            for host, pid in list(self.running.items()):
                found, status, used = os.wait4(pid, os.WNOHANG)
                if found:
                    self.codes[host] = os.waitstatus_to_exitcode(status)
                    self.cpu_s[host] = used.ru_utime + used.ru_stime
                    del self.running[host]
            if is_so():
                return True
            if time.monotonic() > ends_s:
                return False

    def _read(self, reader: int, host: int) -> None:
        with suppress(BlockingIOError):
            data = os.read(reader, 1 << 20)
            if not data:
                self._selector.unregister(reader)
                os.close(reader)
                return
            *whole, self._rests[host] = (self._rests.get(host, b"") + data).split(b"\n")
            now_s = time.monotonic()
            self.lines += [Line(now_s, host, line.decode(errors="replace")) for line in whole]

    def _read_events(self) -> None:
        with suppress(FileNotFoundError), (self.folder / "events").open("rb") as file:
            file.seek(self._read_bytes)
            text = file.read()
            self._read_bytes += len(text)
            for line in text.decode().splitlines():
                at_s, name, rank, world = line.split()
                self.events.append(Event(float(at_s), name, int(rank), int(world)))

    def times(self, name: str, since_s: float = 0.0) -> list[float]:
        """Times of the events of this name, in order."""
        return sorted(one.at_s for one in self.events if one.name == name and one.at_s >= since_s)

    def close(self) -> None:
        """End what is left, and read the last output."""
        self.network.kill(range(len(self.network.addresses)))
        self.pump(lambda: not self.running and not self._selector.get_map(), 10.0)
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        self._selector.close()

    def write(self, path: Path) -> None:
        """Write all lines and events, with seconds since the start."""
        lines = [(one.at_s, f"{one.host:3} {one.text}") for one in self.lines]
        lines += [(one.at_s, f"  * {one.name} {one.rank}/{one.world}") for one in self.events]
        path.write_text("".join(f"{at_s - self.began_s:8.2f} {text}\n" for at_s, text in sorted(lines)))


# -- inside a fork ------------------------------------------------------------------------------------------------


def become(
    network: Network, host: int, folder: Path, output: int, environment: Mapping[str, str], slow_s: float
) -> None:
    """Turn this fork into a process on a host, with an environment, an output and a disk of its own."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()
    network.enter(host)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number, file in enumerate((nothing, output, output)):
        os.dup2(file, number)
    os.closerange(3, 4096)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    home = folder / f"h{host:03}"
    home.mkdir()
    os.environ.clear()
    os.environ.update(environment, HOME=str(home), TMPDIR=str(home), PIPETTE_NODE=f"h{host:03}")
    os.chdir(home)
    tempfile.tempdir = None
    if slow_s:
        sys.addaudithook(lambda event, given: delay(event, given, slow_s))


def delay(event: str, given: tuple[Any, ...], slow_s: float) -> None:
    """Make each write of a file or folder take longer. Only the thread that writes waits."""
    opens = event == "open" and (given[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if event in WRITES or (opens and not str(given[0]).startswith(("/dev", "/proc"))):
        time.sleep(slow_s)


def run(words: Sequence[str]) -> NoReturn:
    """Run the command `pipette-launch` to its end; the interpreter is not taken apart."""
    sys.argv = ["pipette-launch", *words]
    code: object = 0
    try:
        launcher.main()
    except SystemExit as leaving:
        code = leaving.code
    except BaseException:  # noqa: BLE001 - what Python does with what nobody catches
        sys.excepthook(*sys.exc_info())
        code = 1
    if isinstance(code, str):
        sys.stderr.write(f"{code}\n")
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001
    atexit._run_exitfuncs()  # noqa: SLF001
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
