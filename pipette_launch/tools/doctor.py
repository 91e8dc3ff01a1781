"""`pipette doctor` says what on this machine would stop or slow a job."""

from __future__ import annotations

import os
import socket
import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from pipette_launch.errors import PipetteError, UsageError
from pipette_launch.installed import check_installed
from pipette_launch.tools import flags
from pipette_launch.tools.flags import Subcommand

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pipette_launch.facts import Host
    from pipette_launch.facts.health import Checkup, DeviceCondition, Finding

DEFAULT_PORT = 29500
MOST_PORTS = 1 << 16


def add_arguments(parser: ArgumentParser) -> None:
    """Add the flags of `pipette doctor`."""
    parser.add_argument(
        "--device", choices=("auto", "cuda", "cpu"), default="auto", help="what the job would run on (default auto)"
    )
    flags.add_size_flags(
        parser, nodes="nodes of the job (default 1)", gpus="workers of this node (default: all GPUs, or one on CPU)"
    )
    parser.set_defaults(nodes=1)
    parser.add_argument(
        "--port", metavar="N", type=int, default=DEFAULT_PORT, help=f"port of --rdzv-endpoint (default {DEFAULT_PORT})"
    )
    parser.add_argument("--json", action="store_true", help="print a document of kind `checkup` instead of a screen")


def run(args: Namespace) -> int:
    """Print what was found; returns 1 where something would stop a job, else 0."""
    # A missing torch alone is a finding beside others.
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
    """Look at everything, torch not imported."""
    from datetime import datetime, timezone

    from pipette_launch.facts.health import SEVERITIES, Checkup
    from pipette_launch.launch.cache import default_root
    from pipette_launch.tools.checks import software, surroundings

    found: list[Finding] = [*software.python(), *software.packages()]
    host, devices = _devices(args)
    found += devices
    num_devices = args.gpus_per_node or (len(host.devices) if host else 1)
    if host is not None and host.devices[0].kind == "cuda":
        found += software.driver_for_torch() if software.installed("torch") else ()
        found += surroundings.shared_memory(num_devices)
    found += surroundings.limits()
    found += surroundings.host_name(environ=os.environ, num_nodes=args.nodes)
    found += surroundings.interfaces(os.environ)
    found += surroundings.port(args.port)
    found += surroundings.folders(default_root())
    return Checkup(
        host=socket.gethostname(),
        taken_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        findings=tuple(sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))),
    )


def _devices(args: Namespace) -> tuple[Host | None, list[Finding]]:
    """List the devices as an agent would, and compare them with each other."""
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
    names = ", ".join(dict.fromkeys(device.name for device in host.devices))
    found = [Finding(severity="fine", what="devices", value=f"{len(host.devices)} x {names}")]
    if host.devices[0].kind == "cpu" and args.device == "auto":
        advice = "if there are GPUs, look at the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"
        found.append(Finding(severity="slows", what="GPUs", value="NVML shows none, jobs run on CPU", advice=advice))
    lost = () if host.devices[0].kind == "cpu" else inventory.lost_gpus()
    found += [Finding(severity="slows", what="GPUs", value=sentence) for sentence in lost]
    return host, [*found, *_conditions(host, told)]


def _conditions(host: Host, told: Sequence[DeviceCondition]) -> Iterator[Finding]:
    """Report faults of the devices, and whether the driver unloads their state between jobs."""
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
        value = f"off on {forgotten} of {len(told)} GPUs, so that every start waits for the driver"
        yield Finding(severity="slows", what="persistence mode", value=value, advice="nvidia-smi -pm 1")


COMMAND = Subcommand(
    summary="Check what on this machine would stop or slow a job.",
    add_arguments=add_arguments,
    run=run,
    examples=("pipette doctor", "pipette doctor --device cpu --gpus-per-node 2 --json"),
    exit_codes="0 nothing would stop a job; 1 something would, or could not be looked at; 2 the flags make no sense",
)
"""For `main.COMMANDS`."""
