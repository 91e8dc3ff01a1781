"""Check by plain sockets that the links of a laboratory have the rates of its file.

One process plays both ends: a socket belongs to the namespace in which it was made. Rounds of disjoint pairs keep the
machine's few processors from being what is measured; what passes at once by the token bucket's burst is not counted.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from benchmarks.netlab import wires
from benchmarks.netlab.system import LabError
from benchmarks.netlab.topology import Path, Topology

Way = tuple[str, str]
Within = Callable[[str, Callable[[], Any]], Any]
SEND_S = 0.2
"""Seconds of traffic in each direction."""
SKIPPED = 0.3
"""Share of the bytes at the start that does not count: burst and TCP's slow start."""
CHUNK_BYTES = 1 << 20
PATIENCE_S = 10.0
AT_ONCE = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """One direction of a link: the rate in the file, and the rate that plain sockets reached."""

    sender: str
    receiver: str
    asked_mbit: float
    got_mbit: float
    round_trip_ms: float
    """Time of a tiny message, the fastest of several."""

    @property
    def ratio(self) -> float:
        """Got over asked."""
        return self.got_mbit / self.asked_mbit

    def fits(self, tolerance: float) -> bool:
        """Return whether the link has its rate."""
        return abs(self.ratio - 1) <= tolerance

    def words(self) -> str:
        """For people."""
        return f"{self.sender} to {self.receiver}: {self.got_mbit:.1f} of {self.asked_mbit:g} Mbit/s"


def measure(topology: Topology, within: Within, ways: Iterable[Way] | None = None) -> tuple[Reading, ...]:
    """Every direction of every link, or only these, a few disjoint ones at a time, in the topology's order.

    Raises:
        LabError: a link does not answer.

    """
    asked = list(topology.directions() if ways is None else ways)
    found: dict[Way, Reading] = {}
    for batch in _batches(asked):
        threads = [threading.Thread(target=_read, args=(topology, within, way, found)) for way in batch]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    lost = [f"{a} to {b}" for a, b in asked if (a, b) not in found]
    if lost:
        raise LabError(f"{len(lost)} of {len(asked)} links do not answer: {', '.join(lost[:5])}")
    return tuple(found[way] for way in asked)


def _batches(ways: Iterable[Way]) -> Iterator[list[Way]]:
    """Directions in batches of disjoint hosts."""
    left = list(ways)
    while left:
        batch: list[Way] = []
        for way in left:
            if len(batch) < AT_ONCE and not any(set(way) & set(other) for other in batch):
                batch.append(way)
        left = [way for way in left if way not in batch]
        yield batch


def _read(topology: Topology, within: Within, way: Way, found: dict[Way, Reading]) -> None:
    with suppress(OSError):  # A link that is cut; the caller misses its reading.
        found[way] = _reading(topology, within, way)


def _reading(topology: Topology, within: Within, way: Way) -> Reading:
    sender, receiver = way
    path = topology.paths[way]
    where = (wires.address(topology.index(receiver)), 0)
    with within(receiver, lambda: socket.create_server(where)) as server:
        server.settimeout(PATIENCE_S)
        near = within(sender, lambda: socket.create_connection(server.getsockname(), timeout=PATIENCE_S))
        far, _ = server.accept()
        far.settimeout(PATIENCE_S)
        with near, far:
            round_trip_s = min(_ping(near, far) for _ in range(5))
            rate_bytes_per_s = _rate(near, far, path)
    return Reading(
        sender=sender,
        receiver=receiver,
        asked_mbit=path.rate_mbit,
        got_mbit=rate_bytes_per_s * 8e-6,
        round_trip_ms=round_trip_s * 1e3,
    )


def _ping(near: socket.socket, far: socket.socket) -> float:
    before_s = time.perf_counter()
    near.sendall(b"x")
    far.recv(1)
    far.sendall(b"x")
    near.recv(1)
    return time.perf_counter() - before_s


def _rate(near: socket.socket, far: socket.socket, path: Path) -> float:
    """Bytes per second that arrive, after the first part of them."""
    total = int(path.rate_mbit * 1e6 / 8 * SEND_S) + (64 << 10)
    sending = threading.Thread(target=_send, args=(near, total), daemon=True)
    sending.start()
    got = mark = 0
    mark_s = time.perf_counter()
    chunk = bytearray(CHUNK_BYTES)
    while got < total:
        count = far.recv_into(chunk)
        if count == 0:
            break
        got += count
        if mark == 0 and got >= SKIPPED * total:
            mark, mark_s = got, time.perf_counter()
    took_s = time.perf_counter() - mark_s
    sending.join()
    return (got - mark) / took_s


def _send(near: socket.socket, total: int) -> None:
    chunk = bytes(CHUNK_BYTES)
    for start in range(0, total, CHUNK_BYTES):
        near.sendall(chunk[: min(CHUNK_BYTES, total - start)])
