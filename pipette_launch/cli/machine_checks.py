"""Checks of `pipette doctor`: software, devices, shared memory, limits, names, interfaces, ports and folders."""

from __future__ import annotations

import ipaddress
import os
import re
import resource
import socket
import sys
import tempfile
from argparse import Namespace
from collections.abc import Collection, Iterator, Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import psutil
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from pipette_launch.errors import PipetteError
from pipette_launch.facts import Host
from pipette_launch.facts.health import SEVERITIES, Checkup, Finding, Severity
from pipette_launch.launch.cache import default_root, distrust
from pipette_launch.probe.health import inventory
from pipette_launch.probe.health.nvml import query, session
from pipette_launch.probe.health.verdicts import judge
from pipette_launch.text import bytes_text, counted

PYTHON = SpecifierSet(">=3.10,<3.14")
NEEDED = {"torch": SpecifierSet(">=2.6"), "megatron-core": SpecifierSet(">=0.16")}
KNOWN = {"torch": SpecifierSet("<2.16"), "megatron-core": SpecifierSet("<0.21")}
"""Tested releases of the packages. Later releases may work."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the kernel's own, not a temporary file of ours
INFINIBAND = Path("/sys/class/infiniband")
LEAST_SHARED_BYTES = 64 << 20
"""Shared memory for each device: NCCL's buffers for peers on the same host, and batches of data loaders."""
ENOUGH_SHARED_BYTES = 1 << 30
ENOUGH_FILES = 4096
"""Open files that a process may need: a rank connects to the ranks of its groups, the first agent to all ranks."""


def examine(args: Namespace) -> Checkup:
    """Check software, devices, limits, network and folders, without importing torch."""
    found: list[Finding] = [*python(), *packages()]
    host = _host(args, found)
    num_devices = args.gpus_per_node or (len(host.devices) if host else 1)
    if host is not None and host.devices[0].kind == "cuda":
        found += driver_for_torch() if installed("torch") else ()
        found += shared_memory(num_devices)
    found += limits()
    found += host_name(os.environ, args.nodes)
    found += interfaces(os.environ)
    found += port(args.port)
    found += folders(default_root())
    return Checkup(
        host=socket.gethostname(),
        taken_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        findings=tuple(sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))),
    )


def _found(severity: Severity, what: str, value: str, advice: str = "") -> Finding:
    return Finding(severity=severity, what=what, value=value, advice=advice)


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
        yield _found("fine", "Python", here)
    else:
        yield _found("slows", "Python", f"{here}, but only {PYTHON} is tested", "use a tested release")


def packages() -> Iterator[Finding]:
    """Compare torch and megatron-core with the required and the tested releases."""
    for name, needed in NEEDED.items():
        found, install = installed(name), f"pip install '{name}{needed}'"
        try:
            version = None if found is None else Version(found)
        except InvalidVersion:
            yield _found("slows", name, f"{found} is not a version number", "install a released version")
            continue
        if version is None:
            # A Megatron checkout beside the script, or on PYTHONPATH, replaces an installed megatron-core.
            hint = "" if name == "torch" else ", or keep a checkout of Megatron-LM beside the script"
            yield _found("stops" if name == "torch" else "slows", name, "not installed", f"{install}{hint}")
        elif not needed.contains(version, prereleases=True):
            yield _found("stops", name, f"{found}, but {needed} is required", install)
        elif not KNOWN[name].contains(version, prereleases=True):
            value = f"{found}, but only {KNOWN[name]} is tested"
            yield _found("slows", name, value, "update pipette-launch, which may refuse to plan with this release")
        else:
            yield _found("fine", name, str(found))


def _host(args: Namespace, found: list[Finding]) -> Host | None:
    """List the devices as a job's agent does, and add findings to `found`. Return None if listing the devices fails."""
    try:
        host = inventory.host(
            name=socket.gethostname(),
            address="127.0.0.1",
            num_devices=args.gpus_per_node or (0 if args.device == "cpu" else inventory.num_gpus()) or 1,
            device=args.device,
        )
        conditions = inventory.conditions(host)
    except PipetteError as error:
        found.append(_found("stops", "devices", str(error)))
        return None
    names = ", ".join(dict.fromkeys(device.name for device in host.devices))
    found.append(_found("fine", "devices", f"{len(host.devices)} x {names}"))
    if host.devices[0].kind == "cuda":
        found += [_found("slows", "GPUs", sentence) for sentence in inventory.lost_gpus()]
    elif args.device == "auto":
        advice = "if there are GPUs, check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"
        found.append(_found("slows", "GPUs", "NVML finds no GPU, so jobs run on CPU", advice))
    for verdict in judge([host], [conditions]):
        value = verdict.figure + (f", its peers {verdict.peers}" if verdict.peers else "")
        found.append(_found("slows" if verdict.is_sick else "fine", f"device {verdict.device}", value, verdict.advice))
    forgotten = sum(one.persistence_mode is False for one in conditions)
    if forgotten:
        value = f"off on {forgotten} of {counted(len(conditions), 'GPU')}; every start of a job waits for the driver"
        found.append(_found("slows", "persistence mode", value, "nvidia-smi -pm 1"))
    return host


def driver_for_torch() -> Iterator[Finding]:
    """Compare torch's CUDA version with the newest CUDA version that the driver supports."""
    built = _cuda_of_torch()
    with session() as nvml:
        supported = query(nvml, "nvmlSystemGetCudaDriverVersion") if nvml is not None else None
    if supported is None:
        return
    what, driver = "torch and the driver", f"the driver supports {supported // 1000}.{supported % 1000 // 10}"
    value = f"torch is built for CUDA {built}, {driver}"
    if built is None:
        advice = "install a torch wheel for CUDA, or use --pipette-device=cpu"
        yield _found("stops", what, f"torch is built without CUDA, {driver}", advice)
    # A driver also runs newer minor releases of the major CUDA release that it supports.
    elif int(built.split(".")[0]) > supported // 1000:
        yield _found("stops", what, value, "install a newer driver, or a torch wheel for an older CUDA")
    else:
        yield _found("fine", what, value)


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
        space = os.statvfs(folder)
    except OSError as error:
        yield _found("stops", str(folder), f"cannot be read ({error.strerror})", f"mount a tmpfs at {folder}")
        return
    free = space.f_bavail * space.f_frsize
    value = f"{bytes_text(free)} free for {counted(num_devices, 'device')}"
    is_little = num_devices > 1 and free < num_devices * LEAST_SHARED_BYTES
    if free >= ENOUGH_SHARED_BYTES and not is_little:
        yield _found("fine", str(folder), value)
    else:
        advice = "start the container with --shm-size=16g or --ipc=host"
        yield _found("stops" if is_little else "slows", str(folder), value, advice)


def limits() -> Iterator[Finding]:
    """Check the limits of open files and pinned memory."""
    files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    value = f"{_limit(files)} for this process, {_limit(most_files)} at most"
    if files != resource.RLIM_INFINITY and files < ENOUGH_FILES:
        yield _found("slows", "open files", f"{value}; large jobs need more", "ulimit -n 65536 before the job")
    else:
        yield _found("fine", "open files", value)
    if any(INFINIBAND.glob("*")):
        pinned = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        if pinned == resource.RLIM_INFINITY:
            yield _found("fine", "pinned memory", "no limit")
        else:
            advice = "ulimit -l unlimited, or --ulimit memlock=-1 for the container: InfiniBand pins its buffers"
            yield _found("stops", "pinned memory", f"{bytes_text(pinned)} at most", advice)


def _limit(value: int) -> str:
    return "no limit" if value == resource.RLIM_INFINITY else str(value)


def host_name(environ: Mapping[str, str], num_nodes: int) -> Iterator[Finding]:
    """Check the address of this host's name, because gloo sends that address to its peers.

    GLOO_SOCKET_IFNAME selects another address. A job of one node may use the loopback address.
    """
    name = socket.gethostname()
    found = _resolved(name)
    value, what = f"{name} is {', '.join(found) or 'unknown'}", "host name"
    if environ.get("GLOO_SOCKET_IFNAME"):
        yield _found("fine", what, f"{value}, and GLOO_SOCKET_IFNAME={environ['GLOO_SOCKET_IFNAME']}")
    elif not found:
        advice = "add the name to /etc/hosts, or export GLOO_SOCKET_IFNAME"
        yield _found("stops" if num_nodes > 1 else "slows", what, f"{name} cannot be resolved", advice)
    elif num_nodes > 1 and all(ipaddress.ip_address(address).is_loopback for address in found):
        value = f"{value}; other nodes use this address for themselves"
        advice = "export GLOO_SOCKET_IFNAME with the interface to use, or correct /etc/hosts"
        yield _found("stops", what, value, advice)
    else:
        yield _found("fine", what, value)


def _resolved(name: str) -> list[str]:
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(answer[4][0]).partition("%")[0] for answer in answers))


def interfaces(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check that the interfaces named in the environment exist and are up."""
    present = [name for name, state in psutil.net_if_stats().items() if state.isup]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wanted = environ.get(variable, "")
        missing = _missing(wanted, present, is_prefix=variable.startswith("NCCL"))
        if missing:
            value = f"no interface {', '.join(missing)} is up (only {', '.join(sorted(present))})"
            yield _found("stops", variable, value, "unset the variable, or name an interface that is up")
        elif wanted:
            yield _found("fine", variable, wanted)


def _missing(wanted: str, present: Collection[str], *, is_prefix: bool) -> list[str]:
    """Return the names without a matching interface.

    In NCCL_SOCKET_IFNAME, names are prefixes of interfaces. After `=`, names are full names, and after `^`, excluded
    names.
    """
    if is_prefix and wanted.startswith("^"):
        return []
    whole = not is_prefix or wanted.startswith("=")
    # Drop the port, because NCCL also accepts name:port.
    names = [part.strip().partition(":")[0] for part in wanted.removeprefix("=").split(",") if part.strip()]
    found = [name for name in names if any(name == one if whole else one.startswith(name) for one in present)]
    # NCCL needs only one name with a matching interface.
    return [name for name in names if name not in found] if not (is_prefix and found) else []


def port(number: int) -> Iterator[Finding]:
    """Try to bind the port of the rendezvous."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("", number))
        except OSError as error:
            advice = "if the agents meet on this node, name another port in --rdzv-endpoint and --port"
            yield _found("stops", f"port {number}", f"cannot be bound ({error.strerror})", advice)
            return
    yield _found("fine", f"port {number}", "can be bound")


def folders(cache: Path | None) -> Iterator[Finding]:
    """Try to write to the cache of plans and to the folder of temporary files."""
    again = "every start of a job measures again"
    advice = f"{again}; name a folder with --pipette-cache"
    if cache is None:
        yield _found("slows", "cache", "there is no home folder", advice)
    elif trouble := distrust(cache):
        yield _found("slows", "cache", trouble, again)
    elif trouble := _unwritable(cache):
        yield _found("slows", "cache", f"{cache} {trouble}", advice)
    else:
        yield _found("fine", "cache", str(cache))
    temporary = Path(tempfile.gettempdir())
    if trouble := _unwritable(temporary):
        yield _found("stops", "temporary files", f"{temporary} {trouble}", "set TMPDIR to another folder")
    else:
        yield _found("fine", "temporary files", str(temporary))


def _unwritable(folder: Path) -> str:
    """Return why a folder, which may not exist yet, cannot be written; empty if the folder is writable."""
    place = next((one for one in (folder, *folder.parents) if one.exists()), folder)
    try:
        with tempfile.TemporaryFile(dir=place):
            return ""
    except OSError as error:
        return f"cannot be written ({error.strerror})"
