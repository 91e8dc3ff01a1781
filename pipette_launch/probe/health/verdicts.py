"""What is amiss with an allocation, by what drivers tell of devices beside their peers and by what was measured. Pure.

Two rules keep idle machines quiet. An idle device saves power, so its PCIe generation and its clock are never held
against it; of NVML's reasons for a clock only those count that say that something holds it down. And what all peers
share is how the machines are built or run: a note, not a sickness.
"""

# H = hosts, S = slots, host by host.

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pipette_launch.facts import Host
from pipette_launch.facts.health.condition import NEARNESS, DeviceCondition
from pipette_launch.facts.health.verdict import Verdict
from pipette_launch.probe.health.suspects import Matrix, SlowHost, SlowLink, SlowSlot, confirmed_hosts, confirmed_links
from pipette_launch.units import bytes_text, hertz_text, rate_text, seconds_text

BUSY_TOLERANCE_BYTES = 512 << 20
"""Less than this is a display server or a monitoring agent, and no reason to hesitate."""
BUSY_SHARE = 0.05
"""Others that hold more than this part of the memory, or of the time, make a device sick; less is a note."""
HELD_DOWN = {
    "HwSlowdown": "hardware slowdown",
    "HwThermalSlowdown": "too hot, by the hardware",
    "HwPowerBrakeSlowdown": "power brake, by the power supply",
    "SwThermalSlowdown": "too hot, by the driver",
}
"""Reasons that say that a clock is held down. GpuIdle, ApplicationsClocksSetting, SyncBoost and DisplayClockSetting
are somebody's wish; SwPowerCap is the daily bread of a GPU under load."""
WAYS = {
    "switch": "by a PCIe switch",
    "root": "by the PCIe root",
    "node": "over the NUMA node",
    "across": "across the sockets",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seat:
    """One device in its place."""

    host: str
    index: int
    """Among its host's devices."""
    name: str
    memory_bytes: int
    told: DeviceCondition

    def verdict(self, kind: str, figure: str, **more: object) -> Verdict:
        """Say something of this device."""
        facts: dict[str, object] = {"advice": exclude(self.host), **more}
        return Verdict(kind=kind, host=self.host, device=self.told.uuid, figure=figure, **facts)  # type: ignore[arg-type]


def judge(hosts: Sequence[Host], conditions: Sequence[Sequence[DeviceCondition]]) -> tuple[Verdict, ...]:
    """Compare all devices by what their drivers told before the job, and return what is amiss, sick ones first.

    Args:
        hosts: under their unique names.
        conditions: for each host, its devices' in the order of the local ranks; empty where nobody asked.

    """
    seats = [
        _Seat(host=host.name, index=index, name=device.name, memory_bytes=device.memory_total_bytes, told=told)
        for host, of_host in zip(hosts, conditions, strict=True)
        for index, (device, told) in enumerate(zip(host.devices, of_host, strict=False))
    ]
    found: list[Verdict] = []
    for name in dict.fromkeys(seat.name for seat in seats):
        peers = [seat for seat in seats if seat.name == name]
        for rule in (_throttled, _ecc, _rows, _nvlinks, _pcie, _nics):
            found += rule(peers)
        found += [verdict for seat in peers for verdict in _busy(seat)]
    return sick_first(found)


def link_verdicts(
    names: Sequence[str],
    bandwidth_HH: Matrix,
    again_HH: Matrix,
    *,
    times: int = 1,
    expected_HH: Matrix | None = None,
) -> tuple[Verdict, ...]:
    """Say which hosts and links two measurements found slow; arguments as for `suspects.confirmed_links`."""
    hosts = confirmed_hosts(bandwidth_HH, again_HH)
    links = confirmed_links(bandwidth_HH, again_HH, times=times, expected_HH=expected_HH)
    return (*_host_verdicts(names, hosts), *_pair_verdicts(names, links))


def device_verdicts(hosts: Sequence[Host], slow: Sequence[SlowSlot]) -> tuple[Verdict, ...]:
    """Say which devices compute slowly; a host all of whose devices do is one verdict."""
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


def sick_first(verdicts: Sequence[Verdict]) -> tuple[Verdict, ...]:
    """Put the sick ones first, each kind of thing in the order in which it was found."""
    return tuple(sorted(dict.fromkeys(verdicts), key=lambda verdict: not verdict.is_sick))


def exclude(*hosts: str) -> str:
    """Advise to start without a host, or one of several."""
    return f"start without it (sbatch --exclude={' or --exclude='.join(hosts)})"


def _busy(seat: _Seat) -> Iterator[Verdict]:
    """Others who hold memory or compute."""
    told = seat.told
    used = told.used_bytes or 0
    # In a container NVML hides the size, or the whole process; then the device's own count has to do.
    held = [(one, used if one.used_bytes is None else one.used_bytes) for one in told.holders]
    advice = f"end it, take the device out of CUDA_VISIBLE_DEVICES, or {exclude(seat.host)}"
    named = [(one, size) for one, size in held if size > BUSY_TOLERANCE_BYTES]
    for one, size in named:
        sick = size > BUSY_SHARE * seat.memory_bytes
        yield seat.verdict(
            "busy", f"process {one.pid} ({one.name}) holds {bytes_text(size)}", advice=advice, is_sick=sick
        )
    if not told.holders and used > BUSY_TOLERANCE_BYTES:
        figure = f"{bytes_text(used)} are held by a process that NVML does not name (another container?)"
        yield seat.verdict("busy", figure, advice=advice, is_sick=used > BUSY_SHARE * seat.memory_bytes)
    if not named and (told.utilisation or 0) > BUSY_SHARE:
        yield seat.verdict("busy", f"others keep it busy {told.utilisation:.0%} of the time", advice=advice)


def _throttled(peers: Sequence[_Seat]) -> Iterator[Verdict]:
    held = [
        (seat, [HELD_DOWN[reason] for reason in seat.told.clock_reasons or () if reason in HELD_DOWN]) for seat in peers
    ]
    common = _is_common(sum(bool(reasons) for _, reasons in held), len(peers))
    for seat, reasons in held:
        if not reasons:
            continue
        clock = ""
        if seat.told.sm_clock_hz and seat.told.sm_clock_max_hz:
            clock = f" at {hertz_text(seat.told.sm_clock_hz)} of {hertz_text(seat.told.sm_clock_max_hz)}"
        heat = f", {seat.told.temperature_c} °C" if seat.told.temperature_c is not None else ""
        yield seat.verdict(
            "throttled",
            f"its clock is held down{clock} ({', '.join(reasons)}{heat})",
            peers="are held down too" if common else "" if len(peers) == 1 else "run freely",
            advice=f"check its cooling and power supply, or {exclude(seat.host)}",
            is_sick=not common,
        )


def _ecc(peers: Sequence[_Seat]) -> Iterator[Verdict]:
    for seat in peers:
        if seat.told.ecc_volatile:
            yield seat.verdict(
                "ecc",
                f"{seat.told.ecc_volatile} uncorrected memory errors since its driver was loaded",
                peers=_usual_text(peers, lambda told: told.ecc_volatile),
                advice=f"drain the node and reset the device, or {exclude(seat.host)}",
            )
        elif seat.told.ecc_aggregate:
            yield seat.verdict(
                "ecc",
                f"{seat.told.ecc_aggregate} uncorrected memory errors in its life, none since its driver was loaded",
                peers=_usual_text(peers, lambda told: told.ecc_aggregate),
                advice="keep an eye on it",
                is_sick=False,
            )


def _rows(peers: Sequence[_Seat]) -> Iterator[Verdict]:
    """Rows of memory that wait to be replaced, or cannot be."""
    for seat in peers:
        if seat.told.rows_failed:
            yield seat.verdict(
                "remapped-rows",
                "a faulty row of its memory could not be replaced",
                advice=f"have the device replaced, and {exclude(seat.host)}",
            )
        elif seat.told.rows_pending:
            yield seat.verdict(
                "remapped-rows",
                "a faulty row of its memory waits to be replaced",
                advice=f"drain the node and reset the device (nvidia-smi --gpu-reset), or {exclude(seat.host)}",
            )


def _nvlinks(peers: Sequence[_Seat]) -> Iterator[Verdict]:
    usual = _usual(peers, lambda told: told.nvlinks_up)
    for seat in peers:
        up = seat.told.nvlinks_up
        if usual is not None and up is not None and up < usual:
            of_all = f" of {seat.told.nvlinks_total}" if seat.told.nvlinks_total else ""
            yield seat.verdict("nvlink", f"{up}{of_all} NVLinks are up", peers=f"have {usual:g}")


def _pcie(peers: Sequence[_Seat]) -> Iterator[Verdict]:
    """Fewer lanes than the slot allows, or a slot that allows less than others': both stay when the device idles."""
    lanes = _usual(peers, lambda told: told.pcie_width)
    best = _usual(peers, lambda told: told.pcie_generation_max)
    for seat in peers:
        told = seat.told
        width, at_most = told.pcie_width, told.pcie_width_max
        if width is not None and lanes is not None and (width < lanes or (at_most is not None and width < at_most)):
            of_all = f" of {at_most}" if at_most is not None and at_most > width else ""
            yield seat.verdict(
                "pcie",
                f"uses {width}{of_all} PCIe lanes",
                peers=f"use {lanes:g}" if len(peers) > 1 else "",
                advice=f"reseat or reset it, or {exclude(seat.host)}",
                is_sick=width < lanes or len(peers) == 1,
            )
        if best is not None and told.pcie_generation_max is not None and told.pcie_generation_max < best:
            yield seat.verdict(
                "pcie",
                f"its slot allows PCIe generation {told.pcie_generation_max} at most",
                peers=f"generation {best:g}",
                advice=f"check the slot and the BIOS, or {exclude(seat.host)}",
            )


def _nics(peers: Sequence[_Seat]) -> Iterator[Verdict]:
    """NICs farther away than those of the same device of other hosts; a host's own devices may differ by design."""
    for index in dict.fromkeys(seat.index for seat in peers):
        same = [seat for seat in peers if seat.index == index and seat.told.nic_distance is not None]
        ranks = [NEARNESS.index(seat.told.nic_distance) for seat in same if seat.told.nic_distance]
        usual = statistics.median_low(ranks) if ranks else 0
        for seat, rank in zip(same, ranks, strict=True):
            if rank > usual:
                yield seat.verdict(
                    "nic",
                    f"reaches its nearest NIC ({seat.told.nic}) {WAYS[NEARNESS[rank]]}",
                    peers=f"theirs {WAYS[NEARNESS[usual]]}",
                    advice="check that its own NIC is up (ibstat, ip link)",
                    is_sick=False,
                )


def _host_verdicts(names: Sequence[str], slow: Sequence[SlowHost]) -> Iterator[Verdict]:
    for host in dict.fromkeys(one.host for one in slow):
        ways = [one for one in slow if one.host == host]
        figure = " and ".join(f"{one.direction} at most {rate_text(one.bytes_per_s)}" for one in ways)
        yield Verdict(
            kind="slow-host",
            host=names[host],
            figure=figure,
            peers=" and ".join(dict.fromkeys(rate_text(one.peers_bytes_per_s) for one in ways)),
            advice=f"check its NICs and where it is plugged in, or {exclude(names[host])}",
        )


def _pair_verdicts(names: Sequence[str], slow: Sequence[SlowLink]) -> Iterator[Verdict]:
    """Both directions of a pair make one verdict; a single one says that the way back is well."""
    by_pair = {(link.source, link.target): link for link in slow}
    for link in slow:
        back = by_pair.get((link.target, link.source))
        if back is not None and (back.bytes_per_s, back.source) < (link.bytes_per_s, link.source):
            continue
        other = f", and {rate_text(back.bytes_per_s)} the other way" if back else " this way only"
        source, target = names[link.source], names[link.target]
        yield Verdict(
            kind="slow-link",
            host=source,
            other_host=target,
            figure=f"sends {rate_text(link.bytes_per_s)}{other}",
            peers=rate_text(link.peers_bytes_per_s),
            advice=f"check cable and port, or {exclude(source, target)}",
        )


def _usual(peers: Sequence[_Seat], figure: Callable[[DeviceCondition], int | None]) -> float | None:
    """The median of what the peers tell, of two middle ones the higher; None where nobody tells."""
    values = [value for value in (figure(seat.told) for seat in peers) if value is not None]
    return statistics.median_high(values) if values else None


def _usual_text(peers: Sequence[_Seat], figure: Callable[[DeviceCondition], int | None]) -> str:
    usual = _usual(peers, figure)
    return f"usually {usual:g}" if len(peers) > 1 and usual is not None else ""


def _is_common(count: int, total: int) -> bool:
    """Whether most of several peers share it."""
    return total > 2 and 2 * count > total
