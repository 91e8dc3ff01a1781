"""Wires that take time: a tap at either end, and one process that holds every frame for as long as its way is long.

The kernels of small machines have no netem. The token buckets sit on the taps as on any other wire, so rates hold; what
the process can move is some Gbit/s in all, and it needs a processor for that.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.netlab import wires
from benchmarks.netlab.topology import Topology

TUN = "/dev/net/tun"
TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
FRAME_BYTES = wires.MTU + 18
AT_ONCE = 64
"""Frames read from one tap before the others have their turn."""
ROOT = Path(__file__).parent.parent.parent


@contextmanager
def delayed(
    topology: Topology, homes: Mapping[str, str], within: Callable[[str, Callable[[], int]], int]
) -> Iterator[None]:
    """Make the wires that have a latency, and let a process carry their frames while the block runs.

    Args:
        topology: whose.
        homes: the namespace of each host.
        within: does something inside a namespace.

    """
    taps: list[int] = []
    words: list[str] = []
    try:
        for a, b in wires.delayed_pairs(topology):
            near = within(homes[a], partial(tap, wires.device(b)))
            taps.append(near)
            far = within(homes[b], partial(tap, wires.device(a)))
            taps.append(far)
            there_s, back_s = (topology.paths[way].latency_ms / 1e3 for way in ((a, b), (b, a)))
            words += [f"{near}:{far}:{there_s}", f"{far}:{near}:{back_s}"]
        if not words:
            yield
            return
        # It ends with its standard input, that is, with this process, however that ends.
        command = [sys.executable, "-m", "benchmarks.netlab.delay", *words]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, pass_fds=taps, cwd=ROOT, start_new_session=True
        ) as carrier:
            try:
                yield
            finally:
                carrier.kill()
    finally:
        for number in taps:
            os.close(number)


def tap(name: str) -> int:
    """Make a tap in the namespace of the calling thread; it is there as long as somebody holds the file."""
    number = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(number, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    except OSError:
        os.close(number)
        raise
    return number


@dataclass(frozen=True, kw_only=True)
class Way:
    """One direction of a wire, and the frames that are on it, with the moment when each arrives."""

    source: int
    target: int
    latency_s: float
    frames: deque[tuple[float, bytes]]

    def take(self) -> None:
        """Let in what has been sent."""
        with suppress(BlockingIOError, OSError):  # Nothing more, or this end is down.
            for _ in range(AT_ONCE):
                frame = os.read(self.source, FRAME_BYTES)
                self.frames.append((time.monotonic() + self.latency_s, frame))

    def deliver(self, now_s: float) -> float:
        """Send the frames that are due; return the time of the next frame, or infinity."""
        while self.frames and self.frames[0][0] <= now_s:
            with suppress(OSError):  # The other end is down: the frame is lost.
                os.write(self.target, self.frames[0][1])
            self.frames.popleft()
        return self.frames[0][0] if self.frames else float("inf")


def carry(ways: Sequence[Way], until: int) -> None:
    """Carry frames until this file ends."""
    by_source = {way.source: way for way in ways}
    watched = [until, *by_source]
    while True:
        now_s = time.monotonic()
        next_s = min(way.deliver(now_s) for way in ways)
        # select, as epoll's time-outs are whole milliseconds.
        patience_s = None if next_s == float("inf") else max(0.0, next_s - time.monotonic())
        ready, _, _ = select.select(watched, [], [], patience_s)
        if until in ready:
            return
        for number in ready:
            by_source[number].take()


def main(words: Sequence[str]) -> None:
    """Carry frames for the ways `source:target:seconds` until standard input ends."""
    ways = []
    for word in words:
        source, target, latency_s = word.split(":")
        ways.append(Way(source=int(source), target=int(target), latency_s=float(latency_s), frames=deque()))
    carry(ways, sys.stdin.fileno())


if __name__ == "__main__":
    main(sys.argv[1:])
