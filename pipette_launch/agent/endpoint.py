"""The store at the endpoint of the rendezvous: open it, or wait for it, and explain why it cannot be reached.

torch's own client waits in C++ without a message, and for ever if another program holds the port.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping
from datetime import timedelta

from torch.distributed import Store, TCPStore

from pipette_launch.agent.peers import answers, connected
from pipette_launch.agent.rendezvous import ADDRESS, Endpoint, RendezvousSettings
from pipette_launch.agent.store import growing_pauses, within
from pipette_launch.defaults import CONNECT_S, HOST_SILENCE_S, NAME_S
from pipette_launch.errors import ClusterError
from pipette_launch.facts.messages import Member
from pipette_launch.launch.addresses import can_bind, loopback_of
from pipette_launch.text import say

SAY_AFTER_S = 10.0
"""Seconds until a node prints that it waits for the host of the rendezvous."""
FOREIGN_S = 30.0
"""Seconds between two attempts while another program holds the port: each attempt leaves a thread of torch behind."""
PAUSE_S = 1.0
NO_STORE = "what listens there does not answer as a rendezvous of torch"


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


def open_store(settings: RendezvousSettings) -> tuple[Store, bool]:
    """Open the store of the rendezvous, or connect to the store of another process; return also whether it is opened.

    Raises ClusterError if the store cannot be opened, or does not answer in time.
    """
    host, port = settings.host_and_port
    if not settings.is_client:
        if settings.node_rank == 0 and not settings.is_here:
            say(
                f"{settings.flag} {host} is no address of this machine, where --node-rank 0 opens the rendezvous; give "
                f"all nodes this machine's name, unless {host} is forwarded to this machine"
            )
        try:
            timeout = timedelta(seconds=settings.connect_s)
            return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timeout), True
        except RuntimeError as error:
            # Another agent of this machine may have been faster, unless this agent alone may hold the store.
            if settings.must_host or "EADDRINUSE" not in str(error):
                raise ClusterError(explained(error, settings)) from error
    ends_s = time.monotonic() + settings.connect_s
    while True:
        await_store(settings)
        try:
            return connected(_listener(host, port), within_s=settings.connect_s), False
        except (OSError, RuntimeError) as error:
            # Another store may open after the end of the launcher that held this store.
            if time.monotonic() > ends_s:
                raise ClusterError(explained(error, settings)) from error


def _listener(host: str, port: int) -> Member:
    return Member(token="rendezvous", address=host, port=port, node_rank=-1)  # noqa: S106  a name, no secret


def await_store(settings: RendezvousSettings, environ: Mapping[str, str] = os.environ) -> None:
    """Wait until another process's rendezvous store answers, and print that this node waits.

    Raises ClusterError after torch's own time limit, or if another program of this machine holds the port.
    """
    host, port = settings.host_and_port
    began_s, said, pauses_s = time.monotonic(), False, growing_pauses()
    while why := _unready(host, port, settings):
        waited_s = time.monotonic() - began_s
        words = f"{f'[{host}]' if ':' in host else host}:{port}, where the nodes meet: {why}"
        if waited_s > settings.connect_s:
            raise ClusterError(
                f"the nodes cannot meet: waited {waited_s:.0f} s for {words}; start the launcher of that node, or "
                f"correct {settings.flag}{advice(settings, environ)}"
            )
        is_foreign = why == NO_STORE
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
        if settings.may_host_store and not can_bind(port):
            # A program listens on another address of this machine, so no store can open on this port.
            raise ClusterError(port_held(port, settings)) from error
        return str(getattr(error, "strerror", None) or error)
    if answers(_listener(host, port), within_s=HOST_SILENCE_S):
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
