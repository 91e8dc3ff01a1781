"""Wait for other nodes at torch's rendezvous, and print which nodes are missing.

torch's own client waits in C++ without a message, and for ever if another program holds the port.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, api
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from pipette_launch.agent import nodes_list
from pipette_launch.agent.peers import answers
from pipette_launch.agent.rendezvous import ADDRESS, Endpoint, RendezvousSettings
from pipette_launch.agent.store import StoreGone, call_torch, growing_pauses, within
from pipette_launch.defaults import ANSWER_S, CONNECT_S, HOST_GONE_S, HOST_SILENCE_S, NAME_S, PLACES_S, STORE_ANSWER_S
from pipette_launch.errors import ClusterError
from pipette_launch.facts.messages import Member
from pipette_launch.launch.addresses import loopback_of
from pipette_launch.text import listed, say

SAY_AFTER_S = 10.0
"""Seconds until a node prints that it waits for the host of the rendezvous."""
FOREIGN_S = 30.0
"""Seconds between two attempts while another program holds the port: each attempt leaves a thread of torch behind."""
PAUSE_S = 1.0
NO_STORE = "what listens there does not answer as a rendezvous of torch"
FIRST_LINE_S = 15.0
"""Seconds until a node prints the first line about missing nodes."""
LINE_GROWTH = 4
"""Factor between the waiting times at which two successive lines are printed."""
MOST_SPEAKERS = 8
"""Largest number of nodes that all print the missing nodes. In larger jobs only the host of the rendezvous prints."""
MOST_NAMES = 8
LOOK_S = 10.0
"""Seconds between two checks that the host of the rendezvous answers."""
GLANCE_S = 1.0
"""Seconds between two looks at the state of torch's rendezvous, which lives in this process."""
Answer = TypeVar("Answer")

logger = logging.getLogger(__name__)


def await_name(at: Endpoint, *, patience_s: float) -> None:
    """Wait until the endpoint's host name has an address; after `patience_s` raise ClusterError."""
    began_s = time.monotonic()
    why = _unresolved(at.host)
    if not why:
        return
    say(f"{at.flag} {at.host}: this node finds no address for that name ({why}); waiting up to {patience_s:.0f} s")
    while why:
        if time.monotonic() - began_s > patience_s:
            raise ClusterError(
                f"the nodes cannot meet: {at.flag} {at.host} has had no address on this node for {patience_s:.0f} s "
                f"({why}); correct the name, or give the first node's IP address"
            )
        time.sleep(PAUSE_S)
        why = _unresolved(at.host)
    say(f"{at.host} has an address now")


def note_unknown_address(local_addr: str | None) -> None:
    """Print a warning if --local-addr has no address. This is no error, because only some nodes need the address."""
    why = _unresolved(local_addr) if local_addr else ""
    if why:
        say(f"--local-addr {local_addr}: this node finds no address for that name ({why}), by which others reach it")


def _unresolved(host: str) -> str:
    """Return why a host name has no address; empty if the name has an address."""
    try:
        within(NAME_S, lambda: socket.getaddrinfo(host, None))
    except TimeoutError:
        return f"no answer of the name service in {NAME_S:.0f} s"
    except (OSError, UnicodeError) as error:
        return str(getattr(error, "strerror", None) or error)
    return ""


def await_store(settings: RendezvousSettings, environ: Mapping[str, str] = os.environ) -> None:
    """Wait until another process's rendezvous store answers, and print that this node waits.

    Raises ClusterError after torch's own time limit, or if another program of this machine holds the port.
    """
    host, port = settings.host_and_port
    if not settings.is_client:
        if settings.node_rank == 0 and not settings.is_here:
            say(
                f"{settings.flag} {host} is no address of this machine, where --node-rank 0 opens the rendezvous; give "
                f"all nodes this machine's name, unless {host} is forwarded to this machine"
            )
        return
    began_s, said, pauses_s = time.monotonic(), False, growing_pauses()
    while why := _unready(host, port, settings):
        waited_s = time.monotonic() - began_s
        words = f"{f'[{host}]' if ':' in host else host}:{port}, where the nodes meet: {why}"
        if waited_s > settings.connect_s:
            raise ClusterError(
                f"the nodes cannot meet: waited {waited_s:.0f} s for {words}; start the launcher of that node, or "
                f"correct {settings.flag}{advice(settings, environ)}"
            )
        is_foreign = why.startswith(NO_STORE)
        if (is_foreign or waited_s > SAY_AFTER_S) and not said:
            said = True
            say(f"waiting up to {settings.connect_s:.0f} s for {words}{advice(settings, environ)}")
        time.sleep(FOREIGN_S if is_foreign else next(pauses_s))


def _unready(host: str, port: int, settings: RendezvousSettings) -> str:
    """Return why no rendezvous store answers at this address; empty if a store answers."""
    try:
        socket.create_connection((host, port), timeout=CONNECT_S).close()
    except TimeoutError:
        return "no answer"
    except (OSError, UnicodeError) as error:
        return str(getattr(error, "strerror", None) or error)
    if answers(Member(token="rendezvous", address=host, port=port, node_rank=-1), within_s=HOST_SILENCE_S):  # noqa: S106
        return ""
    if settings.may_host_store:
        raise ClusterError(port_held(port, settings))
    return NO_STORE


def advice(settings: RendezvousSettings, environ: Mapping[str, str]) -> str:
    """Return further possible reasons why the nodes do not meet, as text to append to an error message."""
    host, _ = settings.host_and_port
    found = []
    loopback = loopback_of(host) if settings.most_nodes > 1 else ""
    if loopback and host in (loopback, "localhost"):
        found.append(
            f"; {host} is this machine itself, so other machines need {settings.flag} with the first node's name"
        )
    elif loopback:
        found.append(
            f"; {host} means {loopback} here, this machine itself, as a line of Debian's /etc/hosts says: if {host} is "
            f"another machine, or other machines have this line too, give {settings.flag} the first node's address"
        )
    if host in ("0.0.0.0", "::"):  # noqa: S104  it is compared, not bound
        found.append(f"; {host} is the address of no machine, so give {settings.flag} the first node's name")
    named = environ.get("MASTER_ADDR", "")
    if settings.flag == ADDRESS and named not in ("", host):
        found.append(
            f"; MASTER_ADDR={named} is set, but torchrun's flags do not read it: add --master-addr=$MASTER_ADDR"
        )
    return "".join(found) + settings.advice


def explained(error: Exception, settings: RendezvousSettings) -> str:
    """Return a sentence about a store that cannot be opened or reached."""
    why = str(error.__cause__ or error).partition("\n")[0].rstrip(".")
    port = int(found[1]) if (found := re.search(r"port: (\d+)", why)) else 0
    if "EADDRINUSE" in why:
        return port_held(port, settings)
    if "EACCES" in why:
        return f"port {port} of this machine may be opened by root only; give a port above 1023"
    return f"the nodes cannot meet: {why}; correct {settings.flag}{advice(settings, os.environ)}"


def port_held(port: int, settings: RendezvousSettings) -> str:
    """Return a sentence about a port that another process holds."""
    flag = "--master-port" if settings.flag == ADDRESS else settings.flag
    cure = f"end it, or give another port with {flag}, the same on every node"
    if settings.most_nodes == 1:
        cure = f"a job of --nnodes 1 has one launcher; if that process belongs to another job, {cure}"
    elif settings.node_rank >= 0:
        cure = f"if it is this job's first node, give this launcher another --node-rank; if not, {cure}"
    return f"port {port} of this machine is held by another process (ss -ltnp names it); {cure}{settings.advice}"


class Waiting:
    """Watches torch's rendezvous while this node waits in it."""

    def __init__(self, inner: RendezvousHandler, settings: RendezvousSettings) -> None:
        self._inner: Any = inner
        self._settings = settings
        self._next_line_s = FIRST_LINE_S
        self.is_spare = False
        """True if the job had started when this node came. A spare trains only after the other nodes meet again."""
        self._names: list[str] = []
        """Nodes present at the last look, kept because torch forgets these nodes after its time limit."""

    def announce(self) -> None:
        """Put this node's --node-rank into the store."""
        store = getattr(self._inner, "_store", None)
        if store is not None and self._settings.node_rank >= 0:
            with suppress(RuntimeError):
                store.set(self._key(self._settings.node_rank), "here")

    def look(self, waited_s: float) -> None:
        """Print the missing nodes when a line is due; raise ClusterError in a second launcher of a job of one node."""
        # Only torch's c10d rendezvous has a state.
        state = getattr(getattr(self._inner, "_state_holder", None), "state", None)
        if state is None:
            return
        settings = self._settings
        # Copy the participants in one step, because torch's thread adds participants meanwhile.
        self._names = sorted(one.addr for one in list(state.participants))
        this_node = getattr(self._inner, "_this_node", None)
        # Nodes that rejoin torch's rendezvous are on its waiting list for a moment.
        if this_node in state.wait_list and waited_s >= FIRST_LINE_S and not self.is_spare:
            self.is_spare = True
            say(
                f"the job at {settings.endpoint} with --rdzv-id {settings.run_id} has started without this launcher, "
                f"on {listed(self._names, MOST_NAMES)}; waiting up to {settings.join_s:.0f} s until its nodes meet "
                f"again after a failure{settings.advice}"
            )
        if this_node in state.redundancy_list and not self.is_spare:
            self.is_spare = True
            nodes = "its one node" if settings.most_nodes == 1 else f"all its {settings.most_nodes} nodes"
            words = (
                f"the job at {settings.endpoint} with --rdzv-id {settings.run_id} already has {nodes} "
                f"({listed(self._names, MOST_NAMES)}), so this launcher is one too many; raise --nnodes if it belongs "
                f"to that job, or give another --rdzv-endpoint if it is another job"
            )
            if settings.most_nodes == 1:
                raise ClusterError(f"{words}{settings.advice}")
            say(f"{words}; waiting to take the place of a lost node{settings.advice}")
        speaks = settings.may_host_store or settings.most_nodes <= MOST_SPEAKERS
        if speaks and len(self._names) < settings.least_nodes and waited_s >= self._next_line_s:
            self._next_line_s *= LINE_GROWTH
            say(f"{self.missing(waited_s)}; waiting up to {settings.join_s:.0f} s{advice(settings, os.environ)}")

    def missing(self, waited_s: float) -> str:
        """Return a sentence about the missing nodes, with their ranks if known, else with their number."""
        settings, least, most = self._settings, self._settings.least_nodes, self._settings.most_nodes
        nodes = f"{least} nodes" if least == most else f"{least} to {most} nodes"
        there = f" ({listed(self._names, MOST_NAMES)})" if self._names else ""
        where = f"{len(self._names)} of {nodes} have come to {settings.endpoint} in {waited_s:.0f} s{there}"
        store = getattr(self._inner, "_store", None)
        if store is not None and settings.node_rank >= 0:
            with suppress(TimeoutError, RuntimeError):
                keys = {str(rank): self._key(rank) for rank in range(most)}
                ranks = within(STORE_ANSWER_S, lambda: [rank for rank, key in keys.items() if not store.check([key])])
                if ranks:
                    return f"{where}; missing: --node-rank {listed(ranks, MOST_NAMES)}"
        return f"{where}; each launcher needs the same --rdzv-endpoint and --rdzv-id ({settings.run_id})"

    def _key(self, node_rank: int) -> str:
        return f"pipette/{self._settings.run_id}/node-rank/{node_rank}"


class AgentStoreHandler(RendezvousHandler):
    """Forwards calls of torch's loop to torch's own handler, except calls that Pipette's agents answer."""

    def __init__(
        self, inner: RendezvousHandler, settings: RendezvousSettings, *, is_round_over: Callable[[], bool]
    ) -> None:
        """Wrap torch's handler; `is_round_over` returns True if the agents have to meet again."""
        self._inner = inner
        self._settings = settings
        self._is_round_over = is_round_over
        self._host = settings.store_elsewhere() if inner.get_backend() == "c10d" else None
        self._waiting = Waiting(inner, settings)
        self._was_closed: bool | None = None
        """Result of the first call of `shutdown`; None before."""
        self._is_known = isinstance(inner, DynamicRendezvousHandler) and nodes_list.is_known(inner)
        if self._is_known:
            nodes_list.share_writes(inner, settings.most_nodes)

    @property
    def use_agent_store(self) -> bool:
        """Return True, because the agent of RANK 0 hosts the workers' store in every phase."""
        return True

    def get_backend(self) -> str:
        """Return the name of torch's rendezvous backend."""
        return self._inner.get_backend()

    def next_rendezvous(self) -> RendezvousInfo:
        """Join torch's rendezvous. torch's own call never returns if a wire is cut during the call.

        Raises ClusterError if too few nodes came in time, or the job ended without this node. Raises
        RendezvousConnectionError if the store did not answer for `HOST_GONE_S`.
        """
        began_s = time.monotonic()
        try:
            return self._met(began_s)
        except api.RendezvousTimeoutError as error:
            waited_s = time.monotonic() - began_s
            if self._waiting.is_spare:
                raise ClusterError(
                    f"the job went on without this launcher for {waited_s:.0f} s, as long as --rdzv-conf join_timeout "
                    "allows"
                ) from error
            missing = self._waiting.missing(waited_s)
            hints = advice(self._settings, os.environ)
            raise ClusterError(f"the nodes cannot meet: {missing}{hints}") from error
        except (api.RendezvousGracefulExitError, api.RendezvousClosedError, api.RendezvousConnectionError) as error:
            if self._waiting.is_spare:
                raise ClusterError(
                    "the job has ended with its own nodes, and this launcher took no part in it"
                ) from error
            if isinstance(error, api.RendezvousConnectionError):
                raise
            raise ClusterError(
                f"the job with --rdzv-id {self._inner.get_run_id()} has ended before this launcher joined it, and its "
                "id cannot be used again; start all launchers of a job together, and give each job an id of its own"
            ) from error

    def _met(self, began_s: float) -> RendezvousInfo:
        def join() -> RendezvousInfo:
            self._waiting.announce()
            # Until the agents meet, each node renews itself.
            vars(self._inner).pop("_keep_alive", None)
            # torch's rank 0 writes its address in its first round only, and a node that comes later waits for it.
            vars(self._inner).update(_bootstrap_store_info=None)
            return self._inner.next_rendezvous()

        call = call_torch(join)
        answered_s = looked_s = began_s
        while not concurrent.futures.wait([call], min(GLANCE_S, LOOK_S)).done:
            now_s = time.monotonic()
            self._waiting.look(now_s - began_s)
            if now_s - looked_s < LOOK_S:
                continue
            looked_s = now_s
            if self._host is None or answers(self._host, within_s=HOST_SILENCE_S):
                answered_s = time.monotonic()
            elif time.monotonic() - answered_s > HOST_GONE_S:
                raise api.RendezvousConnectionError(
                    f"{self._host.address}:{self._host.port} was there, and has not answered for {HOST_GONE_S:.0f} s"
                )
        met = call.result()
        self._waiting.is_spare = False
        return met

    def renew(self, ranks: Collection[int]) -> None:
        """Renew the nodes with these torch ranks in torch's list from now on. torch drops nodes that no agent renews.

        Under torch alone each node renews itself. As each renewal writes the whole list, 128 nodes send 5 MB/s.
        """
        if self._is_known:
            self._asked(lambda: nodes_list.renew(self._inner, ranks), otherwise=None)

    def is_closed(self) -> bool:
        """Return True if the rendezvous is closed."""
        return self._asked(self._inner.is_closed, otherwise=False)

    def set_closed(self) -> None:
        """Close the rendezvous."""
        self._asked(self._inner.set_closed, otherwise=None)

    def num_nodes_waiting(self) -> int:
        """Return 1 if the agents have to meet, so that torch's loop restarts; else 0, even if new nodes wait."""
        return int(self._is_round_over())

    def num_nodes_joining(self) -> int:
        """Return the number of nodes that wait in torch's rendezvous; 0 if the rendezvous does not answer."""
        return self._asked(self._inner.num_nodes_waiting, otherwise=0)

    def get_run_id(self) -> str:
        """Return --rdzv-id."""
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        """Close the rendezvous in the first call, unless this launcher took no part in the job."""
        if self._was_closed is None:
            self._was_closed = not self._waiting.is_spare and self._asked(self._inner.shutdown, otherwise=False)
        return self._was_closed

    def _asked(self, do: Callable[[], Answer], *, otherwise: Answer) -> Answer:
        try:
            return within(ANSWER_S, do)
        except (TimeoutError, RuntimeError, api.RendezvousError) as error:
            logger.info("torch's rendezvous cannot be reached: %s", error)
            return otherwise

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of torch's handler."""
        return getattr(self._inner, name)


def first_meeting(assign: Callable[[], Answer], join: Callable[[], None]) -> Answer:
    """Let torch assign ranks to the nodes, then let the agents exchange addresses.

    Raises ClusterError if the store of torch's rendezvous is lost during the wait. torch alone would wait for ever.
    """
    try:
        places = within(PLACES_S, assign)
        join()
    except (TimeoutError, DistError, StoreGone) as error:
        why = str(error).partition("\n")[0].rstrip(".")
        raise ClusterError(
            f"the nodes have met, and then lost each other: {why}; look at the host of the rendezvous, its agent and "
            f"the network between it and the other nodes"
        ) from error
    return places
