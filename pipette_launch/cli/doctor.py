"""`pipette doctor` checks this machine for problems that would stop or slow a job."""

from __future__ import annotations

import os
import socket
import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from pipette_launch.cli import flags
from pipette_launch.cli.flags import Subcommand
from pipette_launch.errors import PipetteError, UsageError
from pipette_launch.installed import check_installed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pipette_launch.facts import Host
    from pipette_launch.facts.health import Checkup, DeviceCondition, Finding

DEFAULT_PORT = 29500
MOST_PORTS = 1 << 16


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--device", choices=("auto", "cuda", "cpu"), default="auto", help="device of the job (default auto)"
    )
    flags.add_size_flags(
        parser, nodes="nodes of the job (default 1)", gpus="workers of this node (default: all GPUs, or one on CPU)"
    )
    parser.set_defaults(nodes=1)
    parser.add_argument(
        "--port", metavar="N", type=int, default=DEFAULT_PORT, help=f"port of --rdzv-endpoint (default {DEFAULT_PORT})"
    )
    parser.add_argument("--json", action="store_true", help="print a document of kind `checkup` instead of a screen")


def _run(args: Namespace) -> int:
    """Print the findings; return 1 if a finding would stop a job."""
    # A missing torch gives a finding and does not end the check.
    check_installed(but=frozenset({"torch"}))
    from pipette_launch.facts import files
    from pipette_launch.report import checkup_screen

    if not 0 < args.port < MOST_PORTS:
        raise UsageError(f"--port must be from 1 to {MOST_PORTS - 1}, got {args.port}")
    for flag, value in (("--gpus-per-node", args.gpus_per_node), ("--nodes", args.nodes)):
        if value is not None and value < 1:
            raise UsageError(f"{flag} must be at least 1, got {value}")
    found = examine(args)
    sys.stdout.write(files.dumps(found) + "\n" if args.json else checkup_screen(found))
    return 0 if found.is_fit else 1


def examine(args: Namespace) -> Checkup:
    """Check software, devices, limits, network and folders, without importing torch."""
    from datetime import datetime, timezone

    from pipette_launch.cli import machine_checks as checks
    from pipette_launch.facts.health import SEVERITIES, Checkup
    from pipette_launch.launch.cache import default_root

    found: list[Finding] = [*checks.python(), *checks.packages()]
    host, devices = _devices(args)
    found += devices
    num_devices = args.gpus_per_node or (len(host.devices) if host else 1)
    if host is not None and host.devices[0].kind == "cuda":
        found += checks.driver_for_torch() if checks.installed("torch") else ()
        found += checks.shared_memory(num_devices)
    found += checks.limits()
    found += checks.host_name(environ=os.environ, num_nodes=args.nodes)
    found += checks.interfaces(os.environ)
    found += checks.port(args.port)
    found += checks.folders(default_root())
    return Checkup(
        host=socket.gethostname(),
        taken_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        findings=tuple(sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))),
    )


def _devices(args: Namespace) -> tuple[Host | None, list[Finding]]:
    """List the devices as an agent does, and compare the devices with each other. After a failure the host is None."""
    from pipette_launch.facts.health import Finding
    from pipette_launch.probe.health import inventory

    try:
        gpus = 0 if args.device == "cpu" else inventory.num_gpus()
        host = inventory.host(
            name=socket.gethostname(),
            address="127.0.0.1",
            num_devices=args.gpus_per_node or gpus or 1,
            device=args.device,
        )
        told = inventory.conditions(host)
    except PipetteError as error:
        return None, [Finding(severity="stops", what="devices", value=str(error))]
    is_cpu = host.devices[0].kind == "cpu"
    names = ", ".join(dict.fromkeys(device.name for device in host.devices))
    found = [Finding(severity="fine", what="devices", value=f"{len(host.devices)} x {names}")]
    if is_cpu and args.device == "auto":
        advice = "if there are GPUs, check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"
        found.append(Finding(severity="slows", what="GPUs", value="NVML finds none, jobs run on CPU", advice=advice))
    lost = () if is_cpu else inventory.lost_gpus()
    found += [Finding(severity="slows", what="GPUs", value=sentence) for sentence in lost]
    return host, [*found, *_conditions(host, told)]


def _conditions(host: Host, told: Sequence[DeviceCondition]) -> Iterator[Finding]:
    """Yield faults of the devices, and GPUs whose driver unloads between jobs."""
    from pipette_launch.facts.health import Finding
    from pipette_launch.probe.health.verdicts import judge

    for verdict in judge([host], [told]):
        compared = f", its peers {verdict.peers}" if verdict.peers else ""
        yield Finding(
            severity="slows" if verdict.is_sick else "fine",
            what=f"device {verdict.device}",
            value=f"{verdict.figure}{compared}",
            advice=verdict.advice,
        )
    forgotten = sum(one.persistence_mode is False for one in told)
    if forgotten:
        value = f"off on {forgotten} of {len(told)} GPUs; every start waits for the driver"
        yield Finding(severity="slows", what="persistence mode", value=value, advice="nvidia-smi -pm 1")


DOCTOR = Subcommand(
    summary="Check this machine for problems that would stop or slow a job.",
    add_arguments=_add_arguments,
    run=_run,
    examples=("pipette doctor", "pipette doctor --device cpu --gpus-per-node 2 --json"),
    exit_codes="0 nothing would stop a job; 1 something would, or cannot be checked; 2 the flags are wrong",
)
