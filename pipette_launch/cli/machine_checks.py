"""Checks of `pipette doctor`: installed software, shared memory, limits, names, interfaces, ports and folders."""

from __future__ import annotations

import ipaddress
import os
import re
import resource
import socket
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib import metadata
from pathlib import Path

import psutil
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from pipette_launch.facts.health import Finding, Severity
from pipette_launch.launch.cache import distrust
from pipette_launch.probe.health.nvml import query, session
from pipette_launch.text import bytes_text

PYTHON = SpecifierSet(">=3.10,<3.14")
NEEDED = {"torch": SpecifierSet(">=2.6"), "megatron-core": SpecifierSet(">=0.14")}
KNOWN = {"torch": SpecifierSet("<2.16"), "megatron-core": SpecifierSet("<0.21")}
"""Tested releases of Python and packages. Later releases may work."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the kernel's own, not a temporary file of ours
LEAST_SHARED_BYTES = 64 << 20
"""Shared memory for each device: NCCL's buffers for peers on the same host, and batches of data loaders."""
ENOUGH_SHARED_BYTES = 1 << 30
ENOUGH_FILES = 4096
"""Open files that a process needs: a rank connects to all ranks of its groups, the first agent to every rank."""

VersionOf = Callable[[str], "str | None"]


def installed(package: str) -> str | None:
    """Return the version of a package; None if the package is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def python(version: str | None = None) -> Iterator[Finding]:
    """Compare this Python interpreter with the tested releases."""
    here = version or ".".join(map(str, sys.version_info[:3]))
    if Version(here) in PYTHON:
        yield Finding(severity="fine", what="Python", value=here)
    else:
        yield Finding(
            severity="slows", what="Python", value=f"{here}, tested is {PYTHON}", advice="use a tested release"
        )


def packages(version_of: VersionOf = installed) -> Iterator[Finding]:
    """Compare torch and megatron-core with the required and the tested releases."""
    for name, needed in NEEDED.items():
        found = version_of(name)
        if found is None:
            # A Megatron checkout beside the script, or on PYTHONPATH, works as well.
            severity: Severity = "stops" if name == "torch" else "slows"
            hint = "" if name == "torch" else ", or keep a checkout of Megatron-LM beside the script"
            advice = f"pip install '{name}{needed}'{hint}"
            yield Finding(severity=severity, what=name, value="not installed", advice=advice)
            continue
        yield _compared(name, found)


def _compared(name: str, found: str) -> Finding:
    try:
        version = Version(found)
    except InvalidVersion:
        value = f"{found} is not a version number"
        return Finding(severity="slows", what=name, value=value, advice="install a release")
    if not NEEDED[name].contains(version, prereleases=True):
        advice = f"pip install '{name}{NEEDED[name]}'"
        return Finding(severity="stops", what=name, value=f"{found}, needed is {NEEDED[name]}", advice=advice)
    if not KNOWN[name].contains(version, prereleases=True):
        value = f"{found}, newer than tested ({KNOWN[name]})"
        return Finding(severity="slows", what=name, value=value, advice="plans may be refused; update pipette-launch")
    return Finding(severity="fine", what=name, value=found)


def driver_for_torch(cuda_of_torch: Callable[[], str | None] | None = None) -> Iterator[Finding]:
    """Compare torch's CUDA version with the newest CUDA version that the driver supports."""
    built = (cuda_of_torch or _cuda_of_torch)()
    with session() as nvml:
        supported = query(nvml, "nvmlSystemGetCudaDriverVersion") if nvml is not None else None
    if supported is None:
        return
    at_most = f"{supported // 1000}.{supported % 1000 // 10}"
    severity: Severity = "fine"
    value, advice = f"torch is built for CUDA {built}, the driver supports {at_most}", ""
    if built is None:
        severity, value = "stops", f"torch is built without CUDA, the driver supports {at_most}"
        advice = "install a torch wheel for CUDA, or use --pipette-device=cpu"
    # A driver also supports newer minor releases of the same major CUDA release.
    elif int(built.split(".")[0]) > supported // 1000:
        severity, advice = "stops", "install a newer driver, or a torch wheel for an older CUDA"
    yield Finding(severity=severity, what="torch and the driver", value=value, advice=advice)


def _cuda_of_torch() -> str | None:
    """Read `torch.version.cuda` as text, because importing torch takes seconds."""
    try:
        text = Path(str(metadata.distribution("torch").locate_file("torch/version.py"))).read_text(encoding="utf-8")
    except (metadata.PackageNotFoundError, OSError):
        return None
    match = re.search(r"^cuda\b.*?=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return match[1] if match else None


def shared_memory(num_devices: int, folder: Path = SHARED_MEMORY) -> Iterator[Finding]:
    """Check the free space of /dev/shm; NCCL fails with the usual 64 MiB of a container."""
    try:
        free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    except OSError as error:
        value = f"not there ({error.strerror})"
        yield Finding(severity="stops", what=str(folder), value=value, advice="mount a tmpfs there")
        return
    value = f"{bytes_text(free)} free for {num_devices} devices"
    severity: Severity = "slows"
    if num_devices > 1 and free < num_devices * LEAST_SHARED_BYTES:
        severity = "stops"
    elif free >= ENOUGH_SHARED_BYTES:
        severity = "fine"
    advice = "" if severity == "fine" else "start the container with --shm-size=16g or --ipc=host"
    yield Finding(severity=severity, what=str(folder), value=value, advice=advice)


def limits(*, has_infiniband: bool | None = None) -> Iterator[Finding]:
    """Check the limits of open files and pinned memory."""
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
            yield Finding(severity="fine", what="pinned memory", value="no limit")
        else:
            advice = "ulimit -l unlimited, or --ulimit memlock=-1 for the container: InfiniBand pins its buffers"
            yield Finding(severity="stops", what="pinned memory", value=f"{bytes_text(pinned)} at most", advice=advice)


def _limit(value: int) -> str:
    return "no limit" if value == resource.RLIM_INFINITY else str(value)


def host_name(
    *, name: str | None = None, addresses: Collection[str] | None = None, environ: Mapping[str, str], num_nodes: int
) -> Iterator[Finding]:
    """Check the address of this host's name, because gloo sends that address to its peers.

    Args:
        name: name of this host; None for the system's host name.
        addresses: addresses of the name; None for the resolver's addresses.
        environ: environment variables; GLOO_SOCKET_IFNAME selects another address.
        num_nodes: number of the job's nodes; a job of one node may use the loopback address.

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
            value=f"{name} is {', '.join(found)}; on every other node this address is that node itself",
            advice="export GLOO_SOCKET_IFNAME with the interface to use, or correct /etc/hosts",
        )
    else:
        yield Finding(severity="fine", what="host name", value=f"{name} is {', '.join(found)}")


def _resolved(name: str) -> list[str]:
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(answer[4][0]).partition("%")[0] for answer in answers))


def interfaces(environ: Mapping[str, str], present: Collection[str] | None = None) -> Iterator[Finding]:
    """Check that the interfaces named in the environment exist and are up."""
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


def _missing(wanted: str, present: Collection[str], *, is_prefix: bool) -> list[str]:
    """Return the names without a matching interface. NCCL's names are prefixes, `=` starts full names, `^` excludes."""
    if is_prefix and wanted.startswith("^"):
        return []
    whole = not is_prefix or wanted.startswith("=")
    # NCCL allows name:port.
    names = [part.strip().partition(":")[0] for part in wanted.removeprefix("=").split(",") if part.strip()]
    found = [name for name in names if any(name == one if whole else one.startswith(name) for one in present)]
    # NCCL needs only one matching name.
    return [name for name in names if name not in found] if not (is_prefix and found) else []


def port(number: int) -> Iterator[Finding]:
    """Try to bind the port at which agents meet."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("", number))
        except OSError as error:
            yield Finding(
                severity="stops",
                what=f"port {number}",
                value=f"cannot be bound ({error.strerror})",
                advice="if the agents meet on this node, name another port in --rdzv-endpoint and --port",
            )
            return
    yield Finding(severity="fine", what=f"port {number}", value="can be bound")


def folders(cache: Path | None) -> Iterator[Finding]:
    """Try to write to the cache of plans and to the folder of temporary files."""
    advice = "every start measures again; name a folder with --pipette-cache"
    if cache is None:
        yield Finding(severity="slows", what="cache", value="there is no home folder", advice=advice)
    elif trouble := distrust(cache):
        yield Finding(severity="slows", what="cache", value=trouble, advice="every start measures again")
    elif trouble := _unwritable(cache):
        yield Finding(severity="slows", what="cache", value=f"{cache} {trouble}", advice=advice)
    else:
        yield Finding(severity="fine", what="cache", value=str(cache))
    temporary = Path(tempfile.gettempdir())
    if trouble := _unwritable(temporary):
        value = f"{temporary} {trouble}"
        yield Finding(severity="stops", what="temporary files", value=value, advice="set TMPDIR to another folder")
    else:
        yield Finding(severity="fine", what="temporary files", value=str(temporary))


def _unwritable(folder: Path) -> str:
    """Return why a folder, which may not exist yet, cannot be written; empty if the folder is writable."""
    place = next((one for one in (folder, *folder.parents) if one.exists()), folder)
    try:
        with tempfile.TemporaryFile(dir=place):
            return ""
    except OSError as error:
        return f"cannot be written ({error.strerror})"
