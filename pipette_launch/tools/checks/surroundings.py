"""What the machine offers a job: shared memory, limits, names, interfaces, ports and folders."""

from __future__ import annotations

import ipaddress
import os
import resource
import socket
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import psutil

from pipette_launch.facts.health import Finding, Severity
from pipette_launch.launch.cache import distrust
from pipette_launch.text import bytes_text

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the kernel's own, not a temporary file of ours
LEAST_SHARED_BYTES = 64 << 20
"""For each device: NCCL keeps its buffers for peers of the same host there, and data loaders their batches."""
ENOUGH_SHARED_BYTES = 1 << 30
ENOUGH_FILES = 4096
"""A rank holds a connection to every other of its groups, and the first agent one to every rank."""


def shared_memory(num_devices: int, folder: Path = SHARED_MEMORY) -> Iterator[Finding]:
    """Look at what is free of /dev/shm; a container's usual 64 MiB stop NCCL."""
    try:
        free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    except OSError as error:
        advice = "mount a tmpfs there"
        yield Finding(severity="stops", what=str(folder), value=f"not there ({error.strerror})", advice=advice)
        return
    value = f"{bytes_text(free)} free for {num_devices} devices"
    advice = "start the container with --shm-size=16g or --ipc=host"
    if num_devices > 1 and free < num_devices * LEAST_SHARED_BYTES:
        yield Finding(severity="stops", what=str(folder), value=value, advice=advice)
    elif free < ENOUGH_SHARED_BYTES:
        yield Finding(severity="slows", what=str(folder), value=value, advice=advice)
    else:
        yield Finding(severity="fine", what=str(folder), value=value)


def limits(*, has_infiniband: bool | None = None) -> Iterator[Finding]:
    """Look at how many files may be open, and how much memory may be pinned."""
    files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    value = f"{_limit(files)} for this process, {_limit(most_files)} at most"
    if files != resource.RLIM_INFINITY and files < ENOUGH_FILES:
        advice = "ulimit -n 65536 before the job"
        yield Finding(severity="slows", what="open files", value=f"{value}; large jobs need more", advice=advice)
    else:
        yield Finding(severity="fine", what="open files", value=value)
    if has_infiniband if has_infiniband is not None else any(Path("/sys/class/infiniband").glob("*")):
        pinned = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        if pinned == resource.RLIM_INFINITY:
            yield Finding(severity="fine", what="pinned memory", value="without limit")
        else:
            advice = "ulimit -l unlimited, or --ulimit memlock=-1 for the container: InfiniBand pins its buffers"
            yield Finding(severity="stops", what="pinned memory", value=f"{bytes_text(pinned)} at most", advice=advice)


def host_name(
    *, name: str | None = None, addresses: Collection[str] | None = None, environ: Mapping[str, str], num_nodes: int
) -> Iterator[Finding]:
    """Check which address this host's name resolves to: gloo sends that address to its peers.

    Args:
        name: of this host; None asks the system.
        addresses: what the name resolves to; None asks the resolver.
        environ: GLOO_SOCKET_IFNAME chooses another address.
        num_nodes: a job of one node may well talk to itself over the loopback.

    """
    name = name or socket.gethostname()
    found = _resolved(name) if addresses is None else addresses
    if environ.get("GLOO_SOCKET_IFNAME"):
        value = f"{name} is {', '.join(found) or 'unknown'}, and GLOO_SOCKET_IFNAME={environ['GLOO_SOCKET_IFNAME']}"
        yield Finding(severity="fine", what="host name", value=value)
    elif not found:
        advice = "add it to /etc/hosts, or export GLOO_SOCKET_IFNAME"
        severity: Severity = "stops" if num_nodes > 1 else "slows"
        yield Finding(severity=severity, what="host name", value=f"{name} cannot be resolved", advice=advice)
    elif num_nodes > 1 and all(ipaddress.ip_address(address).is_loopback for address in found):
        yield Finding(
            severity="stops",
            what="host name",
            value=f"{name} is {', '.join(found)}, which on every other node is that node itself",
            advice="export GLOO_SOCKET_IFNAME with the interface to use, or mend /etc/hosts",
        )
    else:
        yield Finding(severity="fine", what="host name", value=f"{name} is {', '.join(found)}")


def interfaces(environ: Mapping[str, str], present: Collection[str] | None = None) -> Iterator[Finding]:
    """Look whether the interfaces that the environment names exist and are up."""
    if present is None:
        present = [name for name, state in psutil.net_if_stats().items() if state.isup]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wanted = environ.get(variable)
        if not wanted:
            continue
        missing = _missing(wanted, present, is_prefix=variable.startswith("NCCL"))
        if missing:
            value = f"no interface {', '.join(missing)} is up here (up are {', '.join(sorted(present))})"
            yield Finding(severity="stops", what=variable, value=value, advice="unset it, or name one of these")
        else:
            yield Finding(severity="fine", what=variable, value=wanted)


def port(number: int) -> Iterator[Finding]:
    """Try to bind the port at which the agents would meet."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("", number))
        except OSError as error:
            yield Finding(
                severity="stops",
                what=f"port {number}",
                value=f"cannot be bound ({error.strerror})",
                advice="if the agents are to meet here, name another port in --rdzv-endpoint and --port",
            )
            return
    yield Finding(severity="fine", what=f"port {number}", value="can be bound")


def folders(cache: Path | None) -> Iterator[Finding]:
    """Try to write where plans are kept, and where the launcher keeps its files while a job runs."""
    temporary = Path(tempfile.gettempdir())
    if cache is None:
        advice = "every start measures anew; --pipette-cache names a folder"
        yield Finding(severity="slows", what="cache", value="there is no home folder", advice=advice)
    elif trouble := distrust(cache):
        yield Finding(severity="slows", what="cache", value=trouble, advice="every start measures anew")
    elif trouble := _unwritable(cache):
        advice = "every start measures anew; --pipette-cache names another folder"
        yield Finding(severity="slows", what="cache", value=f"{cache} {trouble}", advice=advice)
    else:
        yield Finding(severity="fine", what="cache", value=str(cache))
    if trouble := _unwritable(temporary):
        value = f"{temporary} {trouble}"
        yield Finding(severity="stops", what="temporary files", value=value, advice="set TMPDIR to another folder")
    else:
        yield Finding(severity="fine", what="temporary files", value=str(temporary))


def _resolved(name: str) -> list[str]:
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(answer[4][0]).partition("%")[0] for answer in answers))


def _missing(wanted: str, present: Collection[str], *, is_prefix: bool) -> list[str]:
    """Which of the names match no interface; NCCL takes beginnings of names, `=` for whole ones and `^` for others."""
    if is_prefix and wanted.startswith("^"):
        return []
    whole = not is_prefix or wanted.startswith("=")
    # NCCL allows name:port.
    names = [part.strip().partition(":")[0] for part in wanted.removeprefix("=").split(",") if part.strip()]
    found = [name for name in names if any(name == one if whole else one.startswith(name) for one in present)]
    # NCCL is content with one of several.
    return [name for name in names if name not in found] if not (is_prefix and found) else []


def _unwritable(folder: Path) -> str:
    """Why nothing can be written below a folder that may yet have to be made; empty where something can."""
    place = next((one for one in (folder, *folder.parents) if one.exists()), folder)
    try:
        with tempfile.TemporaryFile(dir=place):
            return ""
    except OSError as error:
        return f"cannot be written ({error.strerror})"


def _limit(value: int) -> str:
    return "no limit" if value == resource.RLIM_INFINITY else str(value)
