"""`pipette devices` lists the devices that --gpu knows by name, and prints one as a file to start another from."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from pipette_launch.tools.flags import Subcommand

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipette_launch.facts.accelerators import DeviceSpec

HEADINGS = ("device", "memory", "16-bit peak", "in a host", "between hosts", "per host")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the words of `pipette devices`."""
    parser.add_argument(
        "name", metavar="NAME", nargs="?", help="show this device alone, with the source of its figures"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print a document instead: of kind `device`, which --gpu reads, or without NAME of kind `devices`",
    )


def run(args: Namespace) -> int:
    """Print the table or the document; returns 0."""
    from pipette_launch.facts import files
    from pipette_launch.facts.known_devices import DeviceFiles, device_named, file_of, known_devices, other_meanings

    shown = known_devices().values() if args.name is None else (device_named(args.name),)
    if not args.json:
        sys.stdout.writelines(_table(*shown))
        note = other_meanings(args.name) if args.name else ""
        sys.stdout.write(f"{note}\n" if note else "")
        return 0
    described = tuple(file_of(device) for device in shown)
    sys.stdout.write(files.dumps(described[0] if args.name else DeviceFiles(devices=described)) + "\n")
    return 0


def _table(*devices: DeviceSpec) -> Iterator[str]:
    """Yield a line for each device; a device alone also has its peaks and its source."""
    yield _line(*HEADINGS)
    yield from (_line(*_row(device)) for device in devices)
    if len(devices) == 1:
        peaks = devices[0].flops_per_s
        yield f"\n{', '.join(f'{name} {peak / 1e12:g}' for name, peak in peaks.items())} TFLOP/s without sparsity\n"
        yield f"{devices[0].source}\n"


def _row(device: DeviceSpec) -> tuple[str, ...]:
    from pipette_launch.text import bytes_text, rate_text

    domain = f", {device.domain_hosts} hosts in an NVLink domain" if device.domain_hosts > 1 else ""
    return (
        device.name.lower(),
        bytes_text(device.memory_bytes),
        f"{device.peak_flops_per_s('fp16') / 1e12:g} TFLOP/s",
        rate_text(device.within_host.fair_bytes_per_s),
        rate_text(device.between_hosts.fair_bytes_per_s),
        f"{device.devices_per_host}{domain}",
    )


def _line(name: str, *columns: str) -> str:
    """Set one row; figures are right-aligned."""
    return f"{name:<25}" + "".join(f"{column:>15}" for column in columns[:-1]) + f"   {columns[-1]}\n"


COMMAND = Subcommand(
    summary="List the devices that --gpu knows by name, or print one as a file to describe another.",
    add_arguments=add_arguments,
    run=run,
    examples=(
        "pipette devices",
        "pipette devices h20",
        "pipette devices h100-sxm --json   # a file for --gpu FILE: change the figures that differ",
    ),
)
"""For `main.COMMANDS`."""
