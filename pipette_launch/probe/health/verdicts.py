"""Pure functions that find faulty hosts, devices and links, from driver figures and from measurements.

Links differ for good reasons: islands joined by slow links, tiers of a fat tree, hosts with slower NICs. In any network
of switches the narrowest point on the way sets the rate between two hosts. So a detour over a third host is not faster
than the direct link: b[i, j] >= min(b[i, k], b[k, j]). So a link that is much slower than its best detour is faulty. If
many links are slower than their detours, rates differ at random, as on the internet, so no link is suspected.

Detours to a slow host are as slow as its direct links, so hosts are compared by their best links. Some faults look like
intended differences and are not found: slow links between two racks, or a single host behind a narrow uplink. With two
hosts, only the two directions can be compared. Suspected links, hosts and slots are measured again before a verdict.

Three rules avoid false alarms from the reports of drivers. An idle device saves power, so its PCIe generation and clock
are ignored. A driver gives reasons for a clock frequency, and only reasons that hold the clock down count. If most
peers share a deviation, the machines are built or run that way, so it is a note and not a fault (`is_sick` is False).
"""

# H = hosts, S = slots, host by host; row sends to column; nan = not measured; logarithms are natural.

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipette_launch.facts import Device, Host
from pipette_launch.facts.health import DeviceCondition, Verdict, VerdictKind
from pipette_launch.text import bytes_text, hertz_text, rate_text, seconds_text

Matrix = NDArray[np.float64]
Vector = NDArray[np.float64]
Pair = tuple[int, int]

SUSPECT_RATIO = 0.8
"""A link below this share of its peers' rate is measured again."""
FAULT_RATIO = 0.75
"""A link is faulty if two measurements together are below this share of its peers' rate."""
RANDOM_SCALE = 0.2
"""Largest scatter of ln(link rate / detour rate). With more, links differ at random, and no link is suspected."""
MOST_SHARE = 0.25
"""If more than this share of hosts or slots is slow, the slow hosts or slots do not count as faulty."""
SUSPECT_SCALES = 2.0
"""A link is measured again only if it is slower than its peers by this number of standard deviations."""
FALSE_ALARMS = 2e-4
"""Accepted probability that any link of a healthy cluster is called faulty."""
MIN_SCALE = 0.02
FEW = 12  # With fewer links or hosts, the scatter cannot be estimated, so `FEW_SCALE` is used
FEW_SCALE = 0.12
DETOUR_SHARE = 0.15
"""Share of the variance of ln(link rate / detour rate) that comes from the detours. Measuring the link again, but not
its detours, does not reduce this share."""
MOST_LINKS = 4
MOST_LINKS_SHARE = 1 / 16
"""If more links than `MOST_LINKS` and more than this share of all links are slow, the network is built that way."""
ALIKE_SCATTERS = 4.0
"""Detours whose log rates differ by less than this number of standard deviations count as equally good."""
MAX_DETOURS = 64
"""Number of a sender's fastest links that are tried as detours."""
RETRIED_LINKS = 3
"""A slow host is measured again on this number of links in each direction."""
SUSPECT_SPEED = {"cuda": 0.92, "cpu": 0.75}
FAULT_SPEED = {"cuda": 0.9, "cpu": 0.7}
MIN_SLOT_SCALE = {"cuda": 0.01, "cpu": 0.05}
BUSY_TOLERANCE_BYTES = 512 << 20
"""Smaller amounts of used memory are ignored, because a display server or a monitoring agent may hold them."""
IDLE_BYTES = 64 << 20
"""Largest used memory of an idle device. An idle A100 holds at most 8 MiB (rust-nvml/nvml-wrapper#57), and a CUDA
context needs more than this limit."""
BUSY_SHARE = 0.05
"""If other processes use more than this share of memory or time, the verdict is a fault, else a note."""
HELD_DOWN = {
    "HwSlowdown": "hardware slowdown",
    "HwThermalSlowdown": "too hot, by the hardware",
    "HwPowerBrakeSlowdown": "power brake, by the power supply",
    "SwThermalSlowdown": "too hot, by the driver",
}
"""Reasons that hold a clock down. The set excludes settings of users (ApplicationsClocksSetting, SyncBoost,
DisplayClockSetting), GpuIdle, and SwPowerCap, which a GPU under load reports all the time."""


class SlowLink(NamedTuple):
    """A direction between two hosts that is slower than a detour over a third host."""

    source: int
    target: int
    bytes_per_s: float
    peers_bytes_per_s: float


class SlowHost(NamedTuple):
    """A host whose best links are slower than other hosts' best links."""

    host: int
    direction: Literal["sends", "receives"]
    bytes_per_s: float
    peers_bytes_per_s: float


class SlowSlot(NamedTuple):
    """A device that computes slower than others of its type."""

    slot: int
    seconds: float
    peers_seconds: float


def suspect_links(bandwidth_HH: Matrix) -> tuple[Pair, ...]:
    """Return the directed links to measure again, worst first, from rates in bytes/s; some links of a slow host."""
    known = _links(bandwidth_HH)
    excess, scale = _excess(known)
    if scale > RANDOM_SCALE:
        return ()
    low = (excess < math.log(SUSPECT_RATIO)) & (excess < -SUSPECT_SCALES * scale)
    found = sorted((float(excess[i, j]), (int(i), int(j))) for i, j in np.argwhere(low))
    again = [pair for _, pair in found]
    for rates, turned in ((known, False), (known.T, True)):
        for host in _slow_hosts(rates):
            peers = [int(peer) for peer in np.argsort(-np.nan_to_num(rates[host]))[:RETRIED_LINKS]]
            pairs = [(peer, host) if turned else (host, peer) for peer in peers]
            again += [pair for pair in pairs if not math.isnan(known[pair])]
    return tuple(dict.fromkeys(again))


def confirmed_links(bandwidth_HH: Matrix, again_HH: Matrix) -> tuple[SlowLink, ...]:
    """Return the links that two measurements together show as slow, worst first; without links of slow hosts.

    If measurements scatter by 10 %, they detect half of the links that run at 0.6 of their peers' rate.
    """
    known, second = _links(bandwidth_HH), _links(again_HH)
    excess, scale = _excess(known)
    again = excess + np.log(second) - np.log(known)
    together = (excess + again) / 2
    limit = min(math.log(FAULT_RATIO), -_needed(excess) * scale)
    faulty = (together < limit) & (again < math.log(SUSPECT_RATIO)) & (scale <= RANDOM_SCALE)
    for slow in confirmed_hosts(bandwidth_HH, again_HH):
        faulty[(slow.host, slice(None)) if slow.direction == "sends" else (slice(None), slow.host)] = False
    if faulty.sum() > max(MOST_LINKS, MOST_LINKS_SHARE * np.isfinite(excess).sum()):
        return ()
    rate = np.exp(np.log(known) - excess + together)
    return tuple(
        SlowLink(i, j, float(rate[i, j]), float(rate[i, j] / math.exp(x)))
        for x, i, j in sorted((float(together[i, j]), int(i), int(j)) for i, j in np.argwhere(faulty))
    )


def confirmed_hosts(bandwidth_HH: Matrix, again_HH: Matrix) -> tuple[SlowHost, ...]:
    """Return the hosts whose best links are slow in two measurements, with one entry for each slow direction."""
    known, second = _links(bandwidth_HH), _links(again_HH)
    if _excess(known)[1] > RANDOM_SCALE:
        return ()
    found = []
    directions: tuple[tuple[Literal["sends", "receives"], Matrix, Matrix], ...] = (
        ("sends", known, second),
        ("receives", known.T, second.T),
    )
    for direction, first, again in directions:
        best, best_again = _best(first), _best(again)
        usual = _centre(best)
        for host in _slow_hosts(first):
            together = (best[host] + best_again[host]) / 2
            # Without a second measurement (nan), this comparison is false.
            if best_again[host] - usual < math.log(SUSPECT_RATIO) and together - usual < math.log(FAULT_RATIO):
                found.append(SlowHost(host, direction, math.exp(together), math.exp(usual)))
    return tuple(found)


def suspect_slots(
    seconds_S: Vector, *, device_kind: Literal["cuda", "cpu"] = "cuda", alike_S: Sequence[str] = ()
) -> dict[int, float]:
    """Return the slots to time again, slowest first, each with the usual seconds of its peers.

    All slots did the same work in `seconds_S`. Only slots of one device type, `alike_S`, are peers; empty = all slots.
    CPUs share cores and so differ more.
    """
    name_S = np.array(alike_S or [""] * len(seconds_S))
    found: list[tuple[float, int, float]] = []
    for name in np.unique(name_S):
        members = np.flatnonzero(name_S == name)
        logs = np.log(seconds_S[members])
        # With many values, leaving one value out does not change the median.
        others = [logs] * len(logs) if len(logs) >= FEW else [np.delete(logs, at) for at in range(len(logs))]
        usual = np.array([_centre(values) for values in others])
        lag = logs - usual
        count, scale = int(np.isfinite(lag).sum()), MIN_SLOT_SCALE[device_kind]
        # The scatter of few slots cannot be estimated, because a slow slot would itself be a large part of the scatter.
        if count >= FEW:
            scale = max(scale, _scatter(lag, 0.0))
        slow = (lag > -math.log(SUSPECT_SPEED[device_kind])) & (lag > SUSPECT_SCALES * scale)
        if slow.sum() <= max(1, int(MOST_SHARE * count)):
            found += [(-lag[at], int(members[at]), math.exp(usual[at])) for at in np.flatnonzero(slow)]
    return {slot: usual_s for _, slot, usual_s in sorted(found)}


def confirmed_slots(
    seconds_S: Vector, again_S: Vector, *, device_kind: Literal["cuda", "cpu"] = "cuda", alike_S: Sequence[str] = ()
) -> tuple[SlowSlot, ...]:
    """Return the slots that two measurements find slow, slowest first; arguments as for `suspect_slots`."""
    found = []
    for slot, usual_s in suspect_slots(seconds_S, device_kind=device_kind, alike_S=alike_S).items():
        together_s = math.sqrt(seconds_S[slot] * again_S[slot])
        # Without a second measurement (nan), this comparison is false.
        slow_again = usual_s / again_S[slot] < SUSPECT_SPEED[device_kind]
        if slow_again and usual_s / together_s < FAULT_SPEED[device_kind]:
            found.append(SlowSlot(slot, together_s, usual_s))
    return tuple(sorted(found, key=lambda slow: (slow.peers_seconds / slow.seconds, slow.slot)))


def _links(bandwidth_HH: Matrix) -> Matrix:
    """Return a copy of the rates with nan for every missing rate and on the diagonal."""
    rates = np.array(bandwidth_HH, dtype=np.float64)
    np.fill_diagonal(rates, np.nan)
    rates[~(rates > 0)] = np.nan
    return rates


def _detours(known_HH: Matrix, scatter: float) -> Matrix:
    """Return the usual rate of the best detours over one other host; nan if no detour was measured.

    The best of many noisy detours is the best by chance. So the result is the median of the detours that are equally
    good within `scatter`. With two hosts there are no detours, so each link is compared with the opposite direction.
    """
    if len(known_HH) == 2:
        return np.array(known_HH.T)
    rates = np.nan_to_num(known_HH, nan=0.0)
    usual = np.full_like(rates, np.nan)
    for host, row in enumerate(rates):
        over, to = np.argsort(-row)[:MAX_DETOURS], np.flatnonzero(row)
        via = np.minimum(row[over][:, None], rates[np.ix_(over, to)])
        if not scatter:
            usual[host, to] = via.max(axis=0, initial=0.0)
            continue
        # Sort the detours to each target, best first.
        via = -np.sort(-via, axis=0)
        count = (via >= via[0] * math.exp(-ALIKE_SCATTERS * scatter)).sum(axis=0)
        usual[host, to] = via[(count - 1) // 2, np.arange(len(to))]
    usual[usual == 0] = np.nan
    return usual


def _excess(known_HH: Matrix) -> tuple[Matrix, float]:
    """Return ln(rate / rate of its detours) of each link, centred, and the scatter of these values."""
    scale = 0.0
    # The first turn estimates the scatter, with the best detours. The second turn uses this scatter to choose detours.
    for _ in range(2):
        excess: Matrix = np.log(known_HH) - np.log(_detours(known_HH, scale))
        finite = excess[np.isfinite(excess)]
        if finite.size < FEW:
            # With two hosts, each link is compared with a single other link, which scatters equally.
            return excess, FEW_SCALE * (math.sqrt(2) if len(known_HH) == 2 else 1)
        # Detours that are slower than their links must not shift the centre.
        centre = min(0.0, float(np.median(finite)))
        scale = max(MIN_SCALE, _scatter(finite, centre))
    return excess - centre, scale


def _needed(excess_HH: Matrix) -> float:
    """Return the number of standard deviations below its peers at which a link counts as faulty, not slow by chance."""
    count = max(1, int(np.isfinite(excess_HH).sum()))
    # The scatter is estimated from the links. With few links the estimate may be too small, so the limit is higher.
    doubt = 1 + 1.5 / math.sqrt(count) if count >= FEW else 1.0
    left = math.sqrt((1 - DETOUR_SHARE) / 2 + DETOUR_SHARE)
    return -NormalDist().inv_cdf(FALSE_ALARMS / count) * left * doubt


def _best(rates_HH: Matrix) -> Vector:
    """Return the logarithm of the usual rate of each sender's best links; nan for a sender without links."""
    logs = np.log(rates_HH)
    # The best of many rates is higher by chance than the best of few, so the result is the median of good rates.
    floor = np.nan_to_num(rates_HH).max(axis=1, keepdims=True) * SUSPECT_RATIO
    logs[~(rates_HH >= floor)] = np.nan
    return np.array([_centre(row) for row in logs])


def _slow_hosts(rates_HH: Matrix) -> list[int]:
    """Return the hosts (rows) whose best rate is far below other hosts' best; empty if many hosts are slow."""
    best = _best(rates_HH)
    count = int(np.isfinite(best).sum())
    if count < 3:
        return []
    usual = _centre(best)
    scale = max(MIN_SCALE, _scatter(best, usual))
    slow = np.flatnonzero((best - usual < math.log(SUSPECT_RATIO)) & (best - usual < -SUSPECT_SCALES * scale))
    return slow.tolist() if len(slow) <= max(1, int(MOST_SHARE * count)) else []


def _centre(values: Vector) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if finite.size else math.nan


def _scatter(values: Vector, centre: float) -> float:
    """Return a robust standard deviation: the median distance from the centre, scaled as for a normal distribution."""
    finite = values[np.isfinite(values)]
    return 1.4826 * float(np.median(np.abs(finite - centre))) if finite.size else 0.0


class _PlacedDevice(NamedTuple):
    """One device, with the name of its host."""

    host: str
    device: Device
    condition: DeviceCondition

    def verdict(
        self, kind: VerdictKind, figure: str, advice: str = "", peers: str = "", *, is_sick: bool = True
    ) -> Verdict:
        """Return a verdict on this device; the default advice is to start without the device's host."""
        return Verdict(
            kind=kind,
            host=self.host,
            device=self.condition.uuid,
            figure=figure,
            peers=peers,
            advice=advice or exclude(self.host),
            is_sick=is_sick,
        )


def judge(hosts: Sequence[Host], conditions: Sequence[Sequence[DeviceCondition]]) -> tuple[Verdict, ...]:
    """Compare the driver reports of all devices before the job, and return the verdicts, faults first.

    `conditions` has the driver reports by host, then by device in the order of the local ranks; empty = unknown.
    """
    devices = [
        _PlacedDevice(host.name, *figures)
        for host, of_host in zip(hosts, conditions, strict=True)
        for figures in zip(host.devices, of_host, strict=False)
    ]
    found: list[Verdict] = []
    for name in dict.fromkeys(one.device.name for one in devices):
        peers = [one for one in devices if one.device.name == name]
        for rule in (_throttled, _ecc, _rows, _nvlinks, _pcie, _busy):
            found += rule(peers)
    return faults_first(found)


def link_verdicts(names: Sequence[str], bandwidth_HH: Matrix, again_HH: Matrix) -> Iterator[Verdict]:
    """Yield the hosts and links that two measurements find slow; matrices as for `confirmed_links`."""
    slow_hosts = confirmed_hosts(bandwidth_HH, again_HH)
    for host in dict.fromkeys(one.host for one in slow_hosts):
        ways = [one for one in slow_hosts if one.host == host]
        yield Verdict(
            kind="slow-host",
            host=names[host],
            figure=" and ".join(f"{one.direction} at most {rate_text(one.bytes_per_s)}" for one in ways),
            peers=" and ".join(dict.fromkeys(rate_text(one.peers_bytes_per_s) for one in ways)),
            advice=f"check its NICs and where it is plugged in, or {exclude(names[host])}",
        )
    by_pair = {(link.source, link.target): link for link in confirmed_links(bandwidth_HH, again_HH)}
    for (source, target), link in by_pair.items():
        # The two directions of a pair make one verdict, on the slower direction.
        back = by_pair.get((target, source))
        if back is not None and (back.bytes_per_s, back.source) < (link.bytes_per_s, source):
            continue
        other = f", and {rate_text(back.bytes_per_s)} the other way" if back else " this way only"
        yield Verdict(
            kind="slow-link",
            host=names[source],
            other_host=names[target],
            figure=f"sends {rate_text(link.bytes_per_s)}{other}",
            peers=rate_text(link.peers_bytes_per_s),
            advice=f"check cable and port, or {exclude(names[source], names[target])}",
        )


def device_verdicts(hosts: Sequence[Host], slow: Sequence[SlowSlot]) -> Iterator[Verdict]:
    """Yield a verdict on each device that computes slowly, or one verdict on a host if all its devices do."""
    first_slot = 0
    for host in hosts:
        mine = [one for one in slow if 0 <= one.slot - first_slot < len(host.devices)]
        together = len(mine) == len(host.devices) > 1
        if together:
            mine = [max(mine, key=lambda one: one.seconds / one.peers_seconds)]
        for one in mine:
            speed = one.peers_seconds / one.seconds
            figure = f"takes {seconds_text(one.seconds)} for the same layer, {speed:.2f} of its peers' speed"
            yield Verdict(
                kind="slow-host" if together else "slow-device",
                host=host.name,
                device="" if together else host.devices[one.slot - first_slot].uuid,
                figure=f"each of its {len(host.devices)} devices {figure}" if together else figure,
                peers=f"take {seconds_text(one.peers_seconds)}",
                advice=exclude(host.name),
            )
        first_slot += len(host.devices)


def faults_first(verdicts: Sequence[Verdict]) -> tuple[Verdict, ...]:
    """Put faults before notes, and keep the order within faults and within notes."""
    return tuple(sorted(dict.fromkeys(verdicts), key=lambda verdict: not verdict.is_sick))


def exclude(*hosts: str) -> str:
    """Return the advice to start without a host, or without one of several hosts."""
    return f"start without it (sbatch --exclude={' or --exclude='.join(hosts)})"


def _busy(peers: Sequence[_PlacedDevice]) -> Iterator[Verdict]:
    for one in peers:
        condition, used = one.condition, one.condition.used_bytes or 0
        # In a container NVML may hide a process or the size of its memory. Then all used memory of the device counts.
        held = [(holder, used if holder.used_bytes is None else holder.used_bytes) for holder in condition.holders]
        named = [
            (f"process {holder.pid} ({holder.name}) holds {bytes_text(size)}", size)
            for holder, size in held
            if size > BUSY_TOLERANCE_BYTES
        ]
        if not held and used > BUSY_TOLERANCE_BYTES:
            figure = f"{bytes_text(used)} are held by a process that NVML does not name (another container?)"
            named.append((figure, used))
        advice = f"end it, take the device out of CUDA_VISIBLE_DEVICES, or {exclude(one.host)}"
        for figure, size in named:
            yield one.verdict("busy", figure, advice, is_sick=size > BUSY_SHARE * one.device.memory_total_bytes)
        # If no process holds memory, a busy device is busy because its driver scrubs the memory.
        is_held = bool(held) or used > IDLE_BYTES
        if (not named or not held) and is_held and (condition.utilisation or 0) > BUSY_SHARE:
            yield one.verdict("busy", f"others keep it busy {condition.utilisation:.0%} of the time", advice)


def _throttled(peers: Sequence[_PlacedDevice]) -> Iterator[Verdict]:
    held = [
        (one, [HELD_DOWN[reason] for reason in one.condition.clock_reasons or () if reason in HELD_DOWN])
        for one in peers
    ]
    # True if the clocks of most peers are held down, out of at least three peers.
    common = len(peers) > 2 and 2 * sum(bool(reasons) for _, reasons in held) > len(peers)
    others = "are held down too" if common else "" if len(peers) == 1 else "run freely"
    for one, reasons in held:
        if reasons:
            clock_hz, most_hz = one.condition.sm_clock_hz, one.condition.sm_clock_max_hz
            heat_c = one.condition.temperature_c
            clock = f" at {hertz_text(clock_hz)} of {hertz_text(most_hz)}" if clock_hz and most_hz else ""
            heat = f", {heat_c} °C" if heat_c is not None else ""
            figure = f"its clock is held down{clock} ({', '.join(reasons)}{heat})"
            advice = f"check its cooling and power supply, or {exclude(one.host)}"
            yield one.verdict("throttled", figure, advice, others, is_sick=not common)


def _ecc(peers: Sequence[_PlacedDevice]) -> Iterator[Verdict]:
    for one in peers:
        now, ever = one.condition.ecc_volatile, one.condition.ecc_aggregate
        if now:
            figure = f"{now} uncorrected memory errors since its driver was loaded"
            advice = f"drain the node and reset the device, or {exclude(one.host)}"
            yield one.verdict("ecc", figure, advice, _usual_text(peers, "ecc_volatile"))
        elif ever:
            figure = f"{ever} uncorrected memory errors in its life, none since its driver was loaded"
            yield one.verdict("ecc", figure, "keep an eye on it", _usual_text(peers, "ecc_aggregate"), is_sick=False)


def _rows(peers: Sequence[_PlacedDevice]) -> Iterator[Verdict]:
    """Report rows of memory that wait to be replaced, or cannot be replaced."""
    for one in peers:
        if one.condition.rows_failed:
            advice = f"have the device replaced, and {exclude(one.host)}"
            yield one.verdict("remapped-rows", "a faulty row of its memory could not be replaced", advice)
        elif one.condition.rows_pending:
            advice = f"drain the node and reset the device (nvidia-smi --gpu-reset), or {exclude(one.host)}"
            yield one.verdict("remapped-rows", "a faulty row of its memory waits to be replaced", advice)


def _nvlinks(peers: Sequence[_PlacedDevice]) -> Iterator[Verdict]:
    usual = _usual(peers, "nvlinks_up")
    for one in peers:
        up, total = one.condition.nvlinks_up, one.condition.nvlinks_total
        if usual is not None and up is not None and up < usual:
            yield one.verdict(
                "nvlink", f"{up}{f' of {total}' if total else ''} NVLinks are up", peers=f"have {usual:g}"
            )


def _pcie(peers: Sequence[_PlacedDevice]) -> Iterator[Verdict]:
    """Report fewer PCIe lanes than the PCIe slot allows, or a slot that allows less than its peers."""
    lanes, best = _usual(peers, "pcie_width"), _usual(peers, "pcie_generation_max")
    is_alone = len(peers) == 1
    for one in peers:
        condition = one.condition
        width, at_most, newest = condition.pcie_width, condition.pcie_width_max, condition.pcie_generation_max
        if width is not None and lanes is not None and width < max(lanes, at_most or 0):
            figure = f"uses {width}{f' of {at_most}' if at_most and at_most > width else ''} PCIe lanes"
            advice = f"reseat or reset it, or {exclude(one.host)}"
            others = "" if is_alone else f"use {lanes:g}"
            yield one.verdict("pcie", figure, advice, others, is_sick=width < lanes or is_alone)
        if best is not None and newest is not None and newest < best:
            advice = f"check the slot and the BIOS, or {exclude(one.host)}"
            yield one.verdict(
                "pcie", f"its slot allows PCIe generation {newest} at most", advice, f"generation {best:g}"
            )


def _usual(peers: Sequence[_PlacedDevice], name: str) -> float | None:
    """Return the median (the higher of two middle values) of the peers' known figures; None if none is known."""
    values = [value for value in (getattr(one.condition, name) for one in peers) if value is not None]
    return statistics.median_high(values) if values else None


def _usual_text(peers: Sequence[_PlacedDevice], name: str) -> str:
    usual = _usual(peers, name)
    return f"usually {usual:g}" if len(peers) > 1 and usual is not None else ""
