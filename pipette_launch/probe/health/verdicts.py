"""Which hosts, devices and links of an allocation have a fault, by driver figures and by measurements. Pure.

Two rules avoid false alarms on idle machines. An idle device saves power, so its PCIe generation and its clock are
ignored; of NVML's reasons for a clock only those count that say that something holds it down. And what all peers have
in common is how the machines are built or run: it is a note, not a fault (`is_sick` of a Verdict is False).
"""

# H = hosts, S = slots, host by host.

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pipette_launch.facts import Device, Host
from pipette_launch.facts.health import NEARNESS, DeviceCondition, Verdict
from pipette_launch.probe.health.suspects import Matrix, SlowSlot, confirmed_hosts, confirmed_links
from pipette_launch.text import bytes_text, hertz_text, rate_text, seconds_text

BUSY_TOLERANCE_BYTES = 512 << 20
"""Less memory than this is held by a display server or a monitoring agent, and is ignored."""
IDLE_BYTES = 64 << 20
"""An idle device holds less, at most 8 MiB on A100 (rust-nvml/nvml-wrapper#57). A CUDA context needs more."""
BUSY_SHARE = 0.05
"""Other processes that use more than this part of the memory, or of the time, are a fault; less is a note."""
HELD_DOWN = {
    "HwSlowdown": "hardware slowdown",
    "HwThermalSlowdown": "too hot, by the hardware",
    "HwPowerBrakeSlowdown": "power brake, by the power supply",
    "SwThermalSlowdown": "too hot, by the driver",
}
"""Reasons that say that a clock is held down. Users set ApplicationsClocksSetting, SyncBoost and DisplayClockSetting,
and an idle GPU reports GpuIdle. A GPU under load reports SwPowerCap all the time, so it is not a fault."""
WAYS = {
    "switch": "by a PCIe switch",
    "root": "by the PCIe root",
    "node": "over the NUMA node",
    "across": "across the sockets",
}


@dataclass(frozen=True, slots=True)
class _PlacedDevice:
    """One device, with its host's name and its position there."""

    host: str
    index: int
    device: Device
    condition: DeviceCondition

    def verdict(self, kind: str, figure: str, **more: object) -> Verdict:
        """Return a verdict on this device."""
        facts: dict[str, object] = {"advice": exclude(self.host), **more}
        return Verdict(kind=kind, host=self.host, device=self.condition.uuid, figure=figure, **facts)  # type: ignore[arg-type]


def judge(hosts: Sequence[Host], conditions: Sequence[Sequence[DeviceCondition]]) -> tuple[Verdict, ...]:
    """Compare all devices by what their drivers reported before the job, and return the verdicts, faults first.

    Args:
        hosts: under their unique names.
        conditions: for each host, its devices' in the order of the local ranks; empty where they are not known.

    """
    devices = [
        _PlacedDevice(host.name, index, *figures)
        for host, of_host in zip(hosts, conditions, strict=True)
        for index, figures in enumerate(zip(host.devices, of_host, strict=False))
    ]
    found: list[Verdict] = []
    for name in dict.fromkeys(one.device.name for one in devices):
        peers = [one for one in devices if one.device.name == name]
        for rule in (_throttled, _ecc, _rows, _nvlinks, _pcie, _nics):
            found += rule(peers)
        found += [verdict for device in peers for verdict in _busy(device)]
    return faults_first(found)


def link_verdicts(names: Sequence[str], bandwidth_HH: Matrix, again_HH: Matrix) -> tuple[Verdict, ...]:
    """Return the hosts and links that two measurements found slow; matrices as for `suspects.confirmed_links`."""
    slow_hosts = confirmed_hosts(bandwidth_HH, again_HH)
    found = []
    for host in dict.fromkeys(one.host for one in slow_hosts):
        ways = [one for one in slow_hosts if one.host == host]
        found.append(
            Verdict(
                kind="slow-host",
                host=names[host],
                figure=" and ".join(f"{one.direction} at most {rate_text(one.bytes_per_s)}" for one in ways),
                peers=" and ".join(dict.fromkeys(rate_text(one.peers_bytes_per_s) for one in ways)),
                advice=f"check its NICs and where it is plugged in, or {exclude(names[host])}",
            )
        )
    slow_links = confirmed_links(bandwidth_HH, again_HH)
    by_pair = {(link.source, link.target): link for link in slow_links}
    for link in slow_links:
        # Both directions of a pair make one verdict, that of the slower one.
        back = by_pair.get((link.target, link.source))
        if back is not None and (back.bytes_per_s, back.source) < (link.bytes_per_s, link.source):
            continue
        other = f", and {rate_text(back.bytes_per_s)} the other way" if back else " this way only"
        source, target = names[link.source], names[link.target]
        found.append(
            Verdict(
                kind="slow-link",
                host=source,
                other_host=target,
                figure=f"sends {rate_text(link.bytes_per_s)}{other}",
                peers=rate_text(link.peers_bytes_per_s),
                advice=f"check cable and port, or {exclude(source, target)}",
            )
        )
    return tuple(found)


def device_verdicts(hosts: Sequence[Host], slow: Sequence[SlowSlot]) -> tuple[Verdict, ...]:
    """Return which devices compute slowly; a host all of whose devices do is one verdict."""
    devices = [(host, device) for host in hosts for device in host.devices]
    found = []
    for host in hosts:
        mine = [one for one in slow if devices[one.slot][0] is host]
        together = len(mine) == len(host.devices) > 1
        if together:
            mine = [max(mine, key=lambda one: one.seconds / one.peers_seconds)]
        for one in mine:
            speed = one.peers_seconds / one.seconds
            figure = f"takes {seconds_text(one.seconds)} for the same layer, {speed:.2f} of its peers' speed"
            found.append(
                Verdict(
                    kind="slow-host" if together else "slow-device",
                    host=host.name,
                    device="" if together else devices[one.slot][1].uuid,
                    figure=f"each of its {len(host.devices)} devices {figure}" if together else figure,
                    peers=f"take {seconds_text(one.peers_seconds)}",
                    advice=exclude(host.name),
                )
            )
    return tuple(found)


def faults_first(verdicts: Sequence[Verdict]) -> tuple[Verdict, ...]:
    """Put faults before notes, and keep the order among each."""
    return tuple(sorted(dict.fromkeys(verdicts), key=lambda verdict: not verdict.is_sick))


def exclude(*hosts: str) -> str:
    """Advise to start without a host, or one of several."""
    return f"start without it (sbatch --exclude={' or --exclude='.join(hosts)})"


def _busy(device: _PlacedDevice) -> Iterator[Verdict]:
    """Other processes that hold memory or compute."""
    condition = device.condition
    used = condition.used_bytes or 0
    # In a container NVML hides the size, or the whole process; then the device's own count is used.
    held = [(one, used if one.used_bytes is None else one.used_bytes) for one in condition.holders]
    share_bytes = BUSY_SHARE * device.device.memory_total_bytes
    advice = f"end it, take the device out of CUDA_VISIBLE_DEVICES, or {exclude(device.host)}"
    named = [(one, size) for one, size in held if size > BUSY_TOLERANCE_BYTES]
    for one, size in named:
        figure = f"process {one.pid} ({one.name}) holds {bytes_text(size)}"
        yield device.verdict("busy", figure, advice=advice, is_sick=size > share_bytes)
    if not condition.holders and used > BUSY_TOLERANCE_BYTES:
        figure = f"{bytes_text(used)} are held by a process that NVML does not name (another container?)"
        yield device.verdict("busy", figure, advice=advice, is_sick=used > share_bytes)
    # A busy device that nobody holds is one whose memory the driver still scrubs.
    is_held = bool(condition.holders) or used > IDLE_BYTES
    if not named and is_held and (condition.utilisation or 0) > BUSY_SHARE:
        yield device.verdict("busy", f"others keep it busy {condition.utilisation:.0%} of the time", advice=advice)


def _throttled(peers: Sequence[_PlacedDevice]) -> Iterator[Verdict]:
    held = [
        (device, [HELD_DOWN[reason] for reason in device.condition.clock_reasons or () if reason in HELD_DOWN])
        for device in peers
    ]
    # Most of several peers.
    common = len(peers) > 2 and 2 * sum(bool(reasons) for _, reasons in held) > len(peers)
    for device, reasons in held:
        if not reasons:
            continue
        clock = ""
        if device.condition.sm_clock_hz and device.condition.sm_clock_max_hz:
            clock = f" at {hertz_text(device.condition.sm_clock_hz)} of {hertz_text(device.condition.sm_clock_max_hz)}"
        heat = f", {device.condition.temperature_c} °C" if device.condition.temperature_c is not None else ""
        yield device.verdict(
            "throttled",
            f"its clock is held down{clock} ({', '.join(reasons)}{heat})",
            peers="are held down too" if common else "" if len(peers) == 1 else "run freely",
            advice=f"check its cooling and power supply, or {exclude(device.host)}",
            is_sick=not common,
        )


def _ecc(peers: Sequence[_PlacedDevice]) -> Iterator[Verdict]:
    for device in peers:
        if device.condition.ecc_volatile:
            yield device.verdict(
                "ecc",
                f"{device.condition.ecc_volatile} uncorrected memory errors since its driver was loaded",
                peers=_usual_text(peers, lambda condition: condition.ecc_volatile),
                advice=f"drain the node and reset the device, or {exclude(device.host)}",
            )
        elif device.condition.ecc_aggregate:
            yield device.verdict(
                "ecc",
                f"{device.condition.ecc_aggregate} uncorrected memory errors in its life, "
                f"none since its driver was loaded",
                peers=_usual_text(peers, lambda condition: condition.ecc_aggregate),
                advice="keep an eye on it",
                is_sick=False,
            )


def _rows(peers: Sequence[_PlacedDevice]) -> Iterator[Verdict]:
    """Rows of memory that wait to be replaced, or cannot be."""
    for device in peers:
        if device.condition.rows_failed:
            yield device.verdict(
                "remapped-rows",
                "a faulty row of its memory could not be replaced",
                advice=f"have the device replaced, and {exclude(device.host)}",
            )
        elif device.condition.rows_pending:
            yield device.verdict(
                "remapped-rows",
                "a faulty row of its memory waits to be replaced",
                advice=f"drain the node and reset the device (nvidia-smi --gpu-reset), or {exclude(device.host)}",
            )


def _nvlinks(peers: Sequence[_PlacedDevice]) -> Iterator[Verdict]:
    usual = _usual(peers, lambda condition: condition.nvlinks_up)
    for device in peers:
        up = device.condition.nvlinks_up
        if usual is not None and up is not None and up < usual:
            of_all = f" of {device.condition.nvlinks_total}" if device.condition.nvlinks_total else ""
            yield device.verdict("nvlink", f"{up}{of_all} NVLinks are up", peers=f"have {usual:g}")


def _pcie(peers: Sequence[_PlacedDevice]) -> Iterator[Verdict]:
    """Fewer lanes than the slot allows, or a slot that allows less than others': both stay when the device idles."""
    lanes = _usual(peers, lambda condition: condition.pcie_width)
    best = _usual(peers, lambda condition: condition.pcie_generation_max)
    for device in peers:
        condition = device.condition
        width, at_most = condition.pcie_width, condition.pcie_width_max
        if width is not None and lanes is not None and (width < lanes or (at_most is not None and width < at_most)):
            of_all = f" of {at_most}" if at_most is not None and at_most > width else ""
            yield device.verdict(
                "pcie",
                f"uses {width}{of_all} PCIe lanes",
                peers=f"use {lanes:g}" if len(peers) > 1 else "",
                advice=f"reseat or reset it, or {exclude(device.host)}",
                is_sick=width < lanes or len(peers) == 1,
            )
        if best is not None and condition.pcie_generation_max is not None and condition.pcie_generation_max < best:
            yield device.verdict(
                "pcie",
                f"its slot allows PCIe generation {condition.pcie_generation_max} at most",
                peers=f"generation {best:g}",
                advice=f"check the slot and the BIOS, or {exclude(device.host)}",
            )


def _nics(peers: Sequence[_PlacedDevice]) -> Iterator[Verdict]:
    """NICs farther away than that of the same device of other hosts; devices of one host may differ by design."""
    for index in dict.fromkeys(device.index for device in peers):
        same = [device for device in peers if device.index == index and device.condition.nic_distance is not None]
        ranks = [NEARNESS.index(device.condition.nic_distance) for device in same if device.condition.nic_distance]
        usual = statistics.median_low(ranks) if ranks else 0
        for device, rank in zip(same, ranks, strict=True):
            if rank > usual:
                yield device.verdict(
                    "nic",
                    f"reaches its nearest NIC ({device.condition.nic}) {WAYS[NEARNESS[rank]]}",
                    peers=f"theirs {WAYS[NEARNESS[usual]]}",
                    advice="check that its own NIC is up (ibstat, ip link)",
                    is_sick=False,
                )


def _usual(peers: Sequence[_PlacedDevice], figure: Callable[[DeviceCondition], int | None]) -> float | None:
    """The median of the peers' known figures, of two middle ones the higher; None where no figure is known."""
    values = [value for value in (figure(device.condition) for device in peers) if value is not None]
    return statistics.median_high(values) if values else None


def _usual_text(peers: Sequence[_PlacedDevice], figure: Callable[[DeviceCondition], int | None]) -> str:
    usual = _usual(peers, figure)
    return f"usually {usual:g}" if len(peers) > 1 and usual is not None else ""
