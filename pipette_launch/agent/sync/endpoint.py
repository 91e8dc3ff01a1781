"""The endpoint of the rendezvous before torch connects to it: its name, its port, and the store behind it.

torch's own client waits in C++ without a line on the screen, and for ever where something else holds the port.
"""

from __future__ import annotations

import os
import pwd
import re
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from pipette_launch.agent.sync.meeting_flags import ADDRESS, C10D_PORT
from pipette_launch.agent.sync.peer_watch import answers
from pipette_launch.agent.sync.store import growing_pauses, within
from pipette_launch.defaults import HOST_SILENCE_S
from pipette_launch.errors import ClusterError
from pipette_launch.facts.messages import Member
from pipette_launch.text import printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipette_launch.agent.sync.meeting_flags import Endpoint
    from pipette_launch.agent.sync.rendezvous import RendezvousSettings

NAME_S = 5.0
"""Seconds for a name service to answer; the user reads that a later answer is slow."""
CONNECT_S = 3.0
SAY_AFTER_S = 10.0
"""Seconds until a node prints that it waits for the host of the rendezvous."""
FOREIGN_S = 30.0
"""Seconds between two attempts where a foreign program listens: each attempt leaves a thread of torch's."""
PAUSE_S = 1.0
NO_STORE = "what listens there does not answer as a rendezvous of torch"
LISTENS = "0A"
"""State of a listening socket in /proc/net/tcp."""
LAUNCHERS = ("pipette-launch", "pipette_launch", "torchrun", "torch.distributed")
MOST_LETTERS = 120


def say(words: str) -> None:
    """Print one line; what waits for other nodes has no terminal yet."""
    sys.stderr.write(f"pipette-launch: {printable(words)}\n")
    sys.stderr.flush()


def await_name(at: Endpoint, *, patience_s: float) -> None:
    """Wait until the endpoint's host name has an address, as torch does, but print at once if it has no address.

    Raises:
        ClusterError: it had none for `patience_s`.

    """
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
    """Print that --local-addr has no address; only some nodes need one, so torch decides what comes of it."""
    why = _unresolved(local_addr) if local_addr else ""
    if why:
        say(f"--local-addr {local_addr}: this node finds no address for that name ({why}), by which others reach it")


def _unresolved(host: str) -> str:
    """Return why a host name has no address; empty where it has one."""
    try:
        within(NAME_S, lambda: socket.getaddrinfo(host, None))
    except TimeoutError:
        return f"no answer of the name service in {NAME_S:.0f} s"
    except (OSError, UnicodeError) as error:
        return str(getattr(error, "strerror", None) or error)
    return ""


def await_store(settings: RendezvousSettings, environ: Mapping[str, str] = os.environ) -> None:
    """Wait until the store of the rendezvous answers, where another process holds it; print whom this node waits for.

    Raises:
        ClusterError: it does not answer as long as torch would wait, or another program of this machine has the port.

    """
    host, port = parse_rendezvous_endpoint(settings.endpoint, default_port=C10D_PORT)
    if not settings.is_client:
        if settings.node_rank == 0 and not settings.is_here:
            say(
                f"{settings.flag} {host} is no address of this machine, where --node-rank 0 opens the rendezvous; give "
                f"all nodes this machine's name, unless {host} leads here by a way that it does not know"
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
    """Return why no store answers; empty where one does."""
    try:
        socket.create_connection((host, port), timeout=CONNECT_S).close()
    except TimeoutError:
        return "no answer"
    except (OSError, UnicodeError) as error:
        if settings.may_host_store and _owners(port) and not holder(port)[1]:
            # It listens on another address of this machine, and keeps a store from opening there.
            raise ClusterError(port_held(port, settings)) from error
        return str(getattr(error, "strerror", None) or error)
    if answers(Member(token="rendezvous", address=host, port=port, node_rank=-1), within_s=HOST_SILENCE_S):  # noqa: S106
        return ""
    if settings.may_host_store:
        raise ClusterError(port_held(port, settings))
    return f"{NO_STORE} ({holder(port)[0]})" if settings.is_here else NO_STORE


def advice(settings: RendezvousSettings, environ: Mapping[str, str]) -> str:
    """Return further reasons that may keep the nodes apart, as ends of a sentence."""
    host = parse_rendezvous_endpoint(settings.endpoint, default_port=C10D_PORT)[0]
    found = []
    if host in ("localhost", "127.0.0.1", "::1") and settings.most_nodes > 1:
        found.append(
            f"; {host} is this machine itself, so other machines need {settings.flag} with the first node's name"
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
    """Return a sentence for a store that could not be opened or reached."""
    why = str(error.__cause__ or error).partition("\n")[0].rstrip(".")
    port = int(found[1]) if (found := re.search(r"port: (\d+)", why)) else 0
    if "EADDRINUSE" in why:
        return port_held(port, settings)
    if "EACCES" in why:
        return f"port {port} of this machine may be opened by root only; give a port above 1023"
    return f"the nodes cannot meet: {why}; correct {settings.flag}{advice(settings, os.environ)}"


def port_held(port: int, settings: RendezvousSettings) -> str:
    """Return a sentence about a port that another process holds."""
    who, is_launcher = holder(port)
    flag = "--master-port" if settings.flag == ADDRESS else settings.flag
    cure = f"end it, or give another port with {flag}, the same on every node"
    if is_launcher and settings.most_nodes == 1:
        cure = f"a job of --nnodes 1 has one launcher, so if that one is of another job, {cure}"
    elif is_launcher and settings.node_rank >= 0:
        cure = f"if it is this job's first node, give this launcher another --node-rank; if not, {cure}"
    return f"port {port} of this machine is held by {who}; {cure}{settings.advice}"


def holder(port: int) -> tuple[str, bool]:
    """Return who holds a TCP port of this machine as far as /proc shows it, and whether it is a launcher."""
    with suppress(OSError, psutil.Error):
        for one in sorted(psutil.net_connections("tcp"), key=lambda one: one.status != psutil.CONN_LISTEN):
            if one.pid and one.laddr and one.laddr.port == port:
                return _described(one.pid)
    users = _owners(port)
    return (f"a process of user {', '.join(sorted(users))}" if users else "another process"), False


def _described(pid: int) -> tuple[str, bool]:
    process = psutil.Process(pid)
    command = " ".join(process.cmdline()) or process.name()
    is_launcher = any(name in command for name in LAUNCHERS)
    shown = command if len(command) <= MOST_LETTERS else f"{command[:MOST_LETTERS]}..."
    return f"process {pid} of user {process.username()} ({shown})", is_launcher


def _owners(port: int) -> set[str]:
    """Return the owners of sockets that listen on a port, which the kernel shows to everybody."""
    found: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if int(fields[1].rpartition(":")[2], 16) == port and fields[3] == LISTENS:
                    found.add(_user(int(fields[7])))
    return found


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)
