"""What agents say to each other through a store; every wait polls, so that signals get through."""

from __future__ import annotations

import base64
import contextlib
import logging
import threading
import time
import zlib
from typing import TYPE_CHECKING, Generic, TypeVar

from pipette_launch.agent.signals import STORE_THREAD
from pipette_launch.defaults import HOST_SILENCE_S
from pipette_launch.errors import ClusterError
from pipette_launch.facts import files
from pipette_launch.facts.messages import Decision

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed import Store

FIRST_POLL_S = 0.02
LAST_POLL_S = 0.2
"""Waits grow, so that hundreds of nodes that wait for one do not keep the store busy."""
MOST_BYTES = 4 << 20
"""Of one value that holds a part of a long text; TCPStore takes 8 MiB in one value."""
BROKEN = "the connection to its store broke"

Answer = TypeVar("Answer")


class RoundOver(Exception):  # noqa: N818
    """The agents are to meet again: one of them failed or is gone. Unwinds whatever waits for the others."""


class StoreGone(RoundOver):
    """The agent that holds the store is gone, or does not answer."""


def growing_pauses() -> Iterator[float]:
    """Return how long to wait between one look and the next, in seconds."""
    pause_s = FIRST_POLL_S
    while True:
        yield pause_s
        pause_s = min(1.5 * pause_s, LAST_POLL_S)


class TorchCall(Generic[Answer]):
    """A call of torch's in a thread of its own, which is left behind there where it never returns."""

    def __init__(self, do: Callable[[], Answer]) -> None:
        """Begin."""
        self._answers: list[Answer] = []
        self._errors: list[Exception] = []
        self._do = do
        self._thread = threading.Thread(target=self._run, name=f"{STORE_THREAD}-call", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._answers.append(self._do())
        except Exception as error:  # noqa: BLE001, it is raised again where the answer is awaited
            self._errors.append(error)

    def returns_within(self, seconds: float) -> bool:
        """Wait for it; say whether it returned, or raised."""
        self._thread.join(seconds)
        return bool(self._answers or self._errors)

    def answer(self) -> Answer:
        """Return what it returned, or raise what it raised."""
        if self._errors:
            raise self._errors[0]
        return self._answers[0]


def within(seconds: float, do: Callable[[], Answer]) -> Answer:
    """Return what `do` returns; a call of torch's that never returns is left behind in its thread.

    Raises:
        TimeoutError: it did not return in time.

    """
    call = TorchCall(do)
    if not call.returns_within(seconds):
        raise TimeoutError(f"no answer within {seconds:g} s")
    return call.answer()


class AgentStore:
    """The keys with one prefix in a store that this agent or another holds."""

    def __init__(self, store: Store, prefix: str, *, is_own: bool) -> None:
        """Begin.

        Args:
            store: torch's.
            prefix: of all keys.
            is_own: whether this process holds the store, which then always answers.

        """
        self._store = store
        self._prefix = prefix
        self._is_own = is_own
        self.gone = ""
        """Why the agent that holds the store is believed gone; empty while it answers."""

    def _ask(self, do: Callable[[], Answer]) -> Answer:
        if self._is_own:
            return do()
        # Each question would take as long again.
        self.check_is_there()
        try:
            return within(HOST_SILENCE_S, do)
        except TimeoutError as error:
            self.gone = f"silent for {HOST_SILENCE_S:.0f} s"
            raise StoreGone(self.gone) from error
        except RuntimeError as error:
            self.gone = BROKEN
            raise StoreGone(self.gone) from error

    def check_is_there(self) -> None:
        """Raise StoreGone where an earlier call had no answer."""
        if self.gone:
            raise StoreGone(self.gone)

    def put(self, key: str, text: str) -> None:
        """Publish a text."""
        self._ask(lambda: self._store.set(f"{self._prefix}/{key}", text))

    def has(self, key: str) -> bool:
        """Whether a text was published; never blocks."""
        return bool(self._ask(lambda: self._store.check([f"{self._prefix}/{key}"])))

    def peek(self, key: str) -> str | None:
        """Return a text, or None where it was not published yet; never blocks."""
        return self._get(key) if self.has(key) else None

    def _get(self, key: str) -> str:
        return _text(key, self._ask(lambda: self._store.get(f"{self._prefix}/{key}")))

    def drop(self, key: str) -> None:
        """Forget a text."""
        self._ask(lambda: self._store.delete_key(f"{self._prefix}/{key}"))

    def count(self, key: str, amount: int = 1) -> int:
        """Add to a counter and return it; 0 reads it."""
        return int(self._ask(lambda: self._store.add(f"{self._prefix}/{key}", amount)))

    def take(self, key: str, *, what: str, deadline_s: float) -> str:
        """Wait for a text.

        Raises:
            ClusterError: it did not come in time.
            RoundOver: it never will.

        """
        end = time.monotonic() + deadline_s
        pauses_s = growing_pauses()
        while not self.has(key):
            self.check_goes_on()
            if time.monotonic() > end:
                raise ClusterError(f"waited {deadline_s:.0f} s in vain for {what}; look at the log of that node")
            time.sleep(next(pauses_s))
        return self._get(key)

    def check_goes_on(self) -> None:
        """Raise RoundOver where waiting has become vain."""

    def settle(self, key: str, text: str) -> str:
        """Return what the first agent to call this said, whoever it was; also while a meeting is called."""
        # In one step: whoever is first may end before the next.
        return _text(key, self._ask(lambda: self._store.compare_set(f"{self._prefix}/{key}", "", text)))


class RoundStore(AgentStore):
    """The keys of one round: from one meeting of the agents to the next."""

    def __init__(
        self,
        store: Store,
        group_rank: int,
        group_size: int,
        *,
        is_coordinator: bool,
        generation: str = "round",
        find_lost: Callable[[], str] = lambda: "",
    ) -> None:
        """Begin.

        Args:
            store: of the agent that decides for all.
            group_rank: this agent's place among those of the round.
            group_size: how many they are.
            is_coordinator: whether this agent decides for all, and holds the store.
            generation: names the round.
            find_lost: says which other agent is gone, and why; empty while none is known to be.

        """
        super().__init__(store, f"pipette/{generation}", is_own=is_coordinator)
        self.generation = generation
        self.group_rank = group_rank
        self.group_size = group_size
        self.is_coordinator = is_coordinator
        self._find_lost = find_lost

    def call_all(self, why: str) -> None:
        """Call all agents to a meeting."""
        self.put("alarm", why)

    def is_over(self) -> bool:
        """Whether some agent has called all to a meeting; whoever learns of a lost one does."""
        lost = self._find_lost()
        if lost:
            self.call_all(lost)
        return bool(lost) or self.has("alarm")

    def check_goes_on(self) -> None:
        """Raise RoundOver where a meeting was called."""
        if self.is_over():
            raise RoundOver("the agents are to meet again")

    def say(self, key: str, text: str) -> None:
        """Publish a text that nobody waits for: a store that is gone needs it no more."""
        with contextlib.suppress(StoreGone):
            self.put(key, text)


def _text(key: str, found: bytes) -> str:
    try:
        return found.decode()
    except UnicodeDecodeError as error:
        raise ClusterError(f"what another node said of {key} is no text ({error})") from error


def pack(text: str) -> str:
    """Make a text small; matrices of links are long."""
    return base64.b64encode(zlib.compress(text.encode(), level=1)).decode()


def unpack(packed: str) -> str:
    """Undo `pack`; raises ClusterError for what `pack` has not made, and for a text of more than files.MOST_BYTES."""
    stream = zlib.decompressobj()
    try:
        text = stream.decompress(base64.b64decode(packed, validate=True), files.MOST_BYTES).decode()
    except (ValueError, zlib.error) as error:
        raise ClusterError(f"what another node sent cannot be unpacked ({error})") from error
    if not stream.eof:
        raise ClusterError(f"what another node sent is cut off, or has more than {files.MOST_BYTES} bytes unpacked")
    return text


if TYPE_CHECKING:
    from collections.abc import Callable

    from pipette_launch.agent.store import RoundStore

PEER_WAIT_S = 120.0
"""How long agents of one round wait for each other's word; one whose workers are ended may take half a minute."""
Report = TypeVar("Report", bound=files.Document)


def plan_of_first(round_store: RoundStore, *, make: Callable[[], Decision], deadline_s: float) -> Decision:
    """Return the plan of the first node, for which the others wait.

    Args:
        round_store: the keys of this round.
        make: makes the plan, called on the first node alone.
        deadline_s: how long the others wait, in seconds.

    Raises:
        ClusterError: the plan did not come in time.
        RoundOver: it never will.

    """
    if round_store.is_coordinator:
        round_store.put("plan", files.dumps(make()))
    text = round_store.take("plan", what="the plan of the first node", deadline_s=deadline_s)
    return files.loads(Decision, text, "plan of the first node")


def reports(
    round_store: RoundStore, decision: Decision, kind: type[Report], *, prefix: str, patience_s: float
) -> tuple[list[Report], list[str]]:
    """Collect what the agents of a decision say, and the hosts of those that say nothing.

    Args:
        round_store: the keys of this round.
        decision: whose agents are asked.
        kind: of a report.
        prefix: of the key of each, before the agent's token.
        patience_s: for all of them together.

    Raises:
        RoundOver: one of them is known to be lost.

    """
    ends_s = time.monotonic() + patience_s
    found, absent = [], []
    for host, token in zip(decision.hosts, decision.tokens, strict=True):
        left_s = max(ends_s - time.monotonic(), 0.0)
        try:
            text = round_store.take(f"{prefix}/{token}", what=f"a report of {host}", deadline_s=left_s)
        except ClusterError:
            absent.append(host)
            continue
        found.append(files.loads(kind, text, f"report of {host}"))
    return found, absent


if TYPE_CHECKING:
    from pipette_launch.agent.store import RoundStore

GOODBYE_S = 10.0
"""How long an agent that holds a store waits for the others to leave first."""

logger = logging.getLogger(__name__)


def await_all(round_store: RoundStore, phase: str, *, num_nodes: int) -> bool:
    """Wait for all nodes that run workers to finish a phase; false when one failed instead, and calls a meeting.

    However long it takes: an agent that leaves is lost to those whose workers still run, and whoever is lost is found.
    """
    try:
        round_store.count(f"done/{phase}")
        while round_store.count(f"done/{phase}", 0) < num_nodes:
            if round_store.is_over():
                return False
            time.sleep(0.1)
        # Nodes on standby have nothing to count, and wait for this.
        round_store.put(f"over/{phase}", "yes")
    except StoreGone as error:
        # The store went with its agent, whose work was done too: nothing is left to wait for.
        logger.info("exit barrier ended early: %s", error)
    return True


def say_goodbye(round_store: RoundStore, *, holds_store: bool) -> None:
    """Leave; an agent that holds a store waits for the others, who still read from it."""
    try:
        round_store.count("bye")
        end = time.monotonic() + GOODBYE_S
        while holds_store and round_store.count("bye", 0) < round_store.group_size and time.monotonic() < end:
            time.sleep(0.05)
    except StoreGone as error:
        logger.info("the store of the round is gone: %s", error)
