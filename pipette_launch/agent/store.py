"""Messages between agents: texts under the keys of a TCPStore. Waits poll, so that Python can handle signals."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import math
import os
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

from torch.distributed import Store, TCPStore

from pipette_launch.agent.signals import STORE_THREAD
from pipette_launch.agent.signature import Signer, body_of
from pipette_launch.defaults import GOODBYE_S, HAND_ON_S, HOST_SILENCE_S
from pipette_launch.errors import ClusterError, FileFormatError
from pipette_launch.facts import files
from pipette_launch.facts.messages import Decision

FIRST_POLL_S, LAST_POLL_S = 0.02, 0.2
"""First and longest pause (s) between two polls. In a large job, the longest pause grows with the number of nodes."""
FAN_OUT = 16
"""Most agents that read long texts in one agent's store. The other agents read in stores of agents that have read."""
LONG_BYTES = 1 << 12
"""Texts with more bytes are compressed, because every node gets the same plan."""
MOST_BYTES = 4 << 20
"""Most bytes of one piece of a long text, because TCPStore accepts at most 8 MiB in one value."""
PACKED = b"\0"
"""First byte of a compressed text. The number of further pieces follows."""
ABSENT = b"\0\0absent"
"""Bytes that no agent stores: a compressed text without further pieces is a zlib stream, which begins otherwise."""
LOOKS_PER_S = 5000.0
"""Largest number of times a second that all nodes together look for one key."""
BROKEN = "the connection to its store broke"

Answer = TypeVar("Answer")
Report = TypeVar("Report", bound=files.Document)

logger = logging.getLogger(__name__)


class RoundOver(Exception):  # noqa: N818
    """All agents have to meet again, because an agent failed or is gone. It ends every wait for another agent."""


class StoreGone(RoundOver):
    """The agent that holds the store is gone, or does not answer."""


class ForgedError(ClusterError):
    """A text has no valid signature of this job."""


def open_store(address: str) -> TCPStore:
    """Open a store of this process on any free port of one address of this machine, by which the other nodes reach it.

    The store listens on all addresses, as torch's stores do, if `address` is a host name, which may stand for several
    addresses, or an address that is forwarded to this machine.
    """
    try:
        version = ipaddress.ip_address(address).version
        listening = socket.create_server((address, 0), family=socket.AF_INET if version == 4 else socket.AF_INET6)
    except (ValueError, OSError) as error:
        logger.info("a store listens on all addresses of this machine: %s", error)
        return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    port, handle = listening.getsockname()[1], listening.detach()
    try:
        # The store owns the socket from now on, and closes it.
        return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=handle)
    except NotImplementedError as error:
        # torch 2.6 and 2.7 take no socket.
        os.close(handle)
        logger.info("a store listens on all addresses of this machine: %s", str(error).partition("\n")[0])
        return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def growing_pauses(num_nodes: int = 1) -> Iterator[float]:
    """Yield the seconds to wait between two polls of a store that `num_nodes` nodes poll."""
    pause_s = FIRST_POLL_S
    while True:
        yield pause_s
        pause_s = min(1.5 * pause_s, max(LAST_POLL_S, num_nodes / LOOKS_PER_S))


def call_torch(do: Callable[[], Answer]) -> Future[Answer]:
    """Call a function of torch in a new thread. If the function never returns, the thread never ends."""
    call: Future[Answer] = Future()

    def run() -> None:
        try:
            call.set_result(do())
        except Exception as error:  # noqa: BLE001, the future raises the error again
            call.set_exception(error)

    threading.Thread(target=run, name=f"{STORE_THREAD}-call", daemon=True).start()
    return call


def within(seconds: float, do: Callable[[], Answer]) -> Answer:
    """Return the result of a call, or raise TimeoutError if the call takes longer than `seconds`."""
    call = call_torch(do)
    if not wait([call], seconds).done:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return call.result()


class AgentStore:
    """Reads and writes keys with one prefix in an agent's store; raises StoreGone if the store does not answer.

    In a signed job, a text without a valid signature counts as not published. Counters have no signatures.
    """

    def __init__(
        self, store: Store, prefix: str, *, limit_s: float | None, num_nodes: int = 1, signer: Signer | None = None
    ) -> None:
        """Use a store; `limit_s` is the longest wait for an answer, None if this process holds the store.

        `num_nodes` is the number of nodes that wait for the same keys. Without a `signer`, texts are never signed.
        """
        self._signer = signer or Signer()
        self._store = store
        self._prefix = prefix
        self._limit_s = limit_s
        self._num_nodes = num_nodes
        self.gone = ""
        """Reason why the agent that holds the store is believed gone; empty while the store answers."""

    def _call(self, do: Callable[[], Answer]) -> Answer:
        if self._limit_s is None:
            return do()
        # After one call without an answer, each further call would wait until its deadline too.
        self.check_is_there()
        try:
            return within(self._limit_s, do)
        except (TimeoutError, RuntimeError) as error:
            self.gone = f"silent for {self._limit_s:.0f} s" if isinstance(error, TimeoutError) else BROKEN
            raise StoreGone(self.gone) from error

    def check_is_there(self) -> None:
        """Raise StoreGone if an earlier call had no answer."""
        if self.gone:
            raise StoreGone(self.gone)

    def put(self, key: str, text: str) -> None:
        """Publish a text. A long text is compressed, and cut into pieces that a store accepts."""
        data, others = text.encode(), []
        if len(data) > LONG_BYTES:
            packed = zlib.compress(data, level=1)
            first, *others = (packed[start : start + MOST_BYTES] for start in range(0, len(packed), MOST_BYTES))
            data = PACKED + bytes([len(others)]) + first
        self.put_pieces(key, [self._signed(key, data, *others), *others])

    def _signed(self, key: str, first: bytes, *others: bytes) -> bytes:
        """Return the first piece of a text, with the signature of the whole text."""
        whole = self._signer.signed(f"{self._prefix}/{key}", b"".join((first, *others)))
        return whole[: len(whole) - sum(map(len, others))]

    def put_pieces(self, key: str, pieces: Sequence[bytes]) -> None:
        """Publish a text that another store holds in these pieces, with its signature."""
        for index, piece in enumerate(pieces[1:]):
            self._set(f"{key}/{index}", piece)
        self._set(key, pieces[0])

    def _set(self, key: str, data: bytes) -> None:
        # The store takes bytes too, although torch declares only str.
        self._call(lambda: self._store.set(f"{self._prefix}/{key}", data))  # type: ignore[arg-type]

    def exists(self, key: str) -> bool:
        """Return True if the store has any text under a key, maybe without a valid signature; never blocks."""
        return bool(self._call(lambda: self._store.check([f"{self._prefix}/{key}"])))

    def has(self, key: str) -> bool:
        """Return True if a text was published; never blocks."""
        return self.exists(key) and not (self._signer.is_on and self.opened(key, self.pieces(key)) is None)

    def peek(self, key: str) -> str | None:
        """Return a text, or None if the text is not published yet, or is empty; never blocks."""
        return (self.opened(key, self.pieces(key)) if self.exists(key) else "") or None

    def pieces(self, key: str) -> list[bytes]:
        """Return a published text in the pieces in which the store holds the text."""
        first = self._read(key)
        _, body = body_of(first)
        names = [f"{key}/{index}" for index in range(body[1])] if body[:1] == PACKED and body[1:] else []
        return [first, *(self._read(name) for name in names if self.exists(name))]

    def _read(self, key: str) -> bytes:
        """Return the bytes under a key; empty if another agent has just deleted them."""
        # torch's `get` waits for minutes for a key that is gone. A comparison with a text that no agent stores returns
        # this text at once if the key is gone, and changes nothing.
        found = self._compare_set(f"{self._prefix}/{key}", ABSENT, ABSENT)
        return b"" if found == ABSENT else found

    def opened(self, key: str, pieces: Sequence[bytes]) -> str | None:
        """Return the text of these pieces of a message; None if the message has no valid signature."""
        data = self._signer.opened(f"{self._prefix}/{key}", b"".join(pieces))
        return None if data is None else _unpacked(key, data)

    def drop(self, key: str) -> None:
        """Delete a text."""
        self._call(lambda: self._store.delete_key(f"{self._prefix}/{key}"))

    def count(self, key: str, amount: int = 1) -> int:
        """Add `amount` to a counter and return the sum; an amount of 0 only reads the counter."""
        return int(self._call(lambda: self._store.add(f"{self._prefix}/{key}", amount)))

    def take(self, key: str, *, what: str, deadline_s: float, reader: Reader | None = None) -> str:
        """Wait for a text, and let `reader`, if any, read it; error messages name the text by `what`.

        Raises ClusterError if the text was not published in time. Raises RoundOver if an agent called a meeting.
        """
        end = time.monotonic() + deadline_s
        pauses_s = growing_pauses(self._num_nodes)
        while (text := self._found(key, reader)) is None:
            self.check_goes_on()
            if time.monotonic() > end:
                raise ClusterError(f"waited {deadline_s:.0f} s in vain for {what}; look at the log of that node")
            time.sleep(next(pauses_s))
        return text

    def _found(self, key: str, reader: Reader | None) -> str | None:
        """Return a text if it is published, also if it is empty; else None."""
        if not self.exists(key):
            return None
        try:
            return reader.read(key, self) if reader else self.opened(key, self.pieces(key))
        except ForgedError:
            return None

    def is_over(self) -> bool:
        """Return True if the awaited text can no longer come; always False in the base class."""
        return False

    def check_goes_on(self) -> None:
        """Raise RoundOver if the awaited text can no longer come."""
        if self.is_over():
            raise RoundOver("the agents have to meet again")

    def settle(self, key: str, text: str) -> str:
        """Publish a text, also during a meeting, unless another agent was first; return the first text."""
        # Compare and set in one call, because the agent that holds the store may end before a second call.
        name, mine, first = f"{self._prefix}/{key}", self._signed(key, text.encode()), b""
        while (found := self.opened(key, [now := self._compare_set(name, first, mine)])) is None:
            # Replace a text without a valid signature.
            first = now
        return found

    def _compare_set(self, name: str, expected: bytes, data: bytes) -> bytes:
        return self._call(lambda: self._store.compare_set(name, expected, data))  # type: ignore[arg-type]


class RoundStore(AgentStore):
    """Reads and writes the keys of one round, which lasts from one meeting of the agents to the next meeting."""

    def __init__(
        self,
        store: Store,
        group_size: int,
        *,
        is_coordinator: bool,
        generation: str = "round",
        find_lost: Callable[[], str] = lambda: "",
        reader: Reader | None = None,
        signer: Signer | None = None,
    ) -> None:
        """Begin a round; the coordinator decides for all agents and holds the store.

        `find_lost` returns which agent is gone and why, or "". `reader` reads long texts; None if the agent leads.
        """
        prefix = f"pipette/{generation}"
        limit_s = None if is_coordinator else HOST_SILENCE_S
        super().__init__(store, prefix, limit_s=limit_s, num_nodes=group_size, signer=signer)
        self.generation = generation
        self.group_size = group_size
        self.is_coordinator = is_coordinator
        self._find_lost = find_lost
        self.reader = reader
        self._glances: dict[str, tuple[float, bool]] = {}
        """Time (s) of the last look for a key, and the result."""

    def glance(self, key: str) -> bool:
        """Return True if a text was published. In a large job, the answer may be out of date by a part of a second."""
        looked_s, found = self._glances.get(key, (-math.inf, False))
        now_s = time.monotonic()
        if not found and now_s - looked_s > self.group_size / LOOKS_PER_S:
            found = self.has(key)
            self._glances[key] = now_s, found
        return found

    def is_over(self) -> bool:
        """Return True if an agent called a meeting; call a meeting if another agent is lost."""
        lost = self._find_lost()
        if lost:
            self.put("alarm", lost)
        return bool(lost) or self.glance("alarm")

    def say(self, key: str, text: str) -> None:
        """Publish a text for which no agent waits; ignore a store that is gone."""
        with contextlib.suppress(StoreGone):
            self.put(key, text)


def parent_of(place: int) -> int:
    """Return the place of the agent in whose store an agent reads long texts. The first agent has place 0."""
    return max(place - 1, 0) // FAN_OUT


def patience_s(place: int) -> float:
    """Return how long an agent waits for its parent, before it reads a text in the first agent's store.

    An agent further from the first agent waits longer. So only the children of a lost agent read in the first store.
    """
    parent = parent_of(place)
    return HAND_ON_S + patience_s(parent) if parent else 0.0


class Reader:
    """Reads the long texts of one round in the store of another agent, the parent, and keeps them in the own store.

    So no store sends a text to more than `FAN_OUT` agents.
    """

    def __init__(
        self, own: Store, name: str, place: int, connect: Callable[[], Store], *, signer: Signer | None = None
    ) -> None:
        """Take this agent's store, the unique name of the round, and the agent's place; connect to the parent later."""
        self._prefix, self._connect = f"pipette/{name}", connect
        self._own = AgentStore(own, self._prefix, limit_s=None, signer=signer)
        self._parent: AgentStore | None = None
        self._patience_s = patience_s(place)
        """Longest wait (s) for the parent; 0 = read in the first agent's store, as after a failure of the parent."""

    def read(self, key: str, first: AgentStore) -> str:
        """Return a text that the first agent's store has: from the parent's store, else from the first agent's.

        Raises ForgedError if neither store has the text with a valid signature.
        """
        pieces = self._from_parent(key, first.is_over)
        text = self._own.opened(key, pieces) if pieces else None
        if text is None:
            pieces = first.pieces(key)
            text = self._own.opened(key, pieces)
        if text is None:
            raise ForgedError(
                f"the first node's store has no {key} with this job's signature, because others write there"
            )
        # Hand on only a text whose signature is valid.
        self._own.put_pieces(key, pieces)
        return text

    def _from_parent(self, key: str, is_over: Callable[[], bool]) -> list[bytes]:
        """Return the pieces of a text in the parent's store; empty if the parent is lost or late, or if `is_over`."""
        if not self._patience_s:
            return []
        ends_s = time.monotonic() + self._patience_s
        call = call_torch(lambda: self._look(key, ends_s))
        while not wait([call], LAST_POLL_S).done and time.monotonic() < ends_s and not is_over():
            pass
        if call.done() and not call.exception():
            return call.result()
        why = call.exception() if call.done() else "it is late"
        logger.info("the first agent's store sends %s, as the agent that should hand it on does not: %s", key, why)
        self._patience_s = 0.0
        return []

    def _look(self, key: str, ends_s: float) -> list[bytes]:
        # Only this thread waits for the parent, and `_from_parent` limits the wait.
        parent = self._parent = self._parent or AgentStore(self._connect(), self._prefix, limit_s=None)
        pauses_s = growing_pauses()
        while not parent.exists(key):
            if time.monotonic() > ends_s:
                raise TimeoutError("it has not read the text yet")
            time.sleep(next(pauses_s))
        return parent.pieces(key)


def _unpacked(key: str, data: bytes) -> str:
    """Return the text of a message."""
    if data[:1] == PACKED:
        try:
            data = files.inflate(data[2:], key)
        except FileFormatError as error:
            raise ClusterError(f"the message of another node under {error}") from error
    return _text(key, data)


def _text(key: str, found: bytes) -> str:
    try:
        return found.decode()
    except UnicodeDecodeError as error:
        raise ClusterError(f"the message of another node under {key} is no text ({error})") from error


def reports(
    round_store: RoundStore, decision: Decision, kind: type[Report], *, prefix: str, patience_s: float
) -> tuple[list[Report], list[str]]:
    """Collect the reports of a decision's agents; return the reports, and the hosts without a report.

    `prefix` is the key of each report before the agent's token, and `patience_s` limits the wait for all reports.
    Raises RoundOver if an agent called a meeting.
    """
    ends_s = time.monotonic() + patience_s
    found, absent = [], []
    for node in decision.nodes:
        left_s = max(ends_s - time.monotonic(), 0.0)
        try:
            text = round_store.take(f"{prefix}/{node.token}", what=f"a report of {node.host}", deadline_s=left_s)
            found.append(files.loads(kind, text, f"report of {node.host}"))
        except ClusterError:
            absent.append(node.host)
    return found, absent


def await_all(round_store: RoundStore, phase: str, *, num_nodes: int) -> bool:
    """Wait until all nodes with workers have finished a phase; return False if an agent called a meeting instead.

    The wait has no deadline, because nodes that still train would treat an agent that exits early as lost.
    """
    try:
        # The last node publishes the end, for which also nodes on standby wait.
        if round_store.count(f"done/{phase}") >= num_nodes:
            round_store.put(f"over/{phase}", "yes")
        while not round_store.glance(f"over/{phase}"):
            if round_store.is_over():
                return False
            time.sleep(0.1)
    except StoreGone as error:
        # The agent with the store leaves only after its work is done, so no wait is needed.
        logger.info("the wait for the other nodes' end stops early: %s", error)
    return True


def say_goodbye(round_store: RoundStore, *, holds_store: bool) -> None:
    """Leave the round. The agent that holds the store first waits for the agents that still read from it."""
    try:
        round_store.count("bye")
        end = time.monotonic() + GOODBYE_S
        while holds_store and round_store.count("bye", 0) < round_store.group_size and time.monotonic() < end:
            time.sleep(0.05)
    except StoreGone as error:
        logger.info("the store of the round is gone: %s", error)
