"""Screens with a warm-up's measurements, and with faults of machines from a warm-up or `pipette doctor`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from pipette_launch.facts import Cluster, ComputeCase, ComputeTime, Links, Measurements, Plan
from pipette_launch.facts.health import Checkup, Verdict
from pipette_launch.facts.measurements import LAYERS
from pipette_launch.report.screen import Line, Section, bullet, grid, screen, text
from pipette_launch.text import bytes_text, plural, rate_text, seconds_text

MOST_VERDICTS = 5
HEADINGS = {"stops": "Stops", "slows": "Slows", "fine": "Fine"}
UNSEEN = "not checked, because one machine alone cannot: clocks that differ between nodes, links, firewalls"
MOST_COLUMNS = 8
"""Largest number of hosts in a matrix of links on a screen."""
MOST_ROWS = 12
ORIGINS = {
    "cached": "kept from an earlier start",
    "file": "read from a file",
    "imagined": "made for imagined machines",
    "measured": "measured before",
}


def health(verdicts: Sequence[Verdict], *, where: str = "cluster.json", most: int = MOST_VERDICTS) -> Iterator[Line]:
    """Return at most `most` sentences on faults, and a line that names the file (`where`) with the other faults.

    If several devices of a host have the same kind of fault, one sentence covers all of them.
    """
    groups: dict[tuple[bool, str, str, str], list[Verdict]] = {}
    for one in sorted(verdicts, key=lambda verdict: not verdict.is_sick):
        groups.setdefault((one.is_sick, one.host, one.other_host, one.kind), []).append(one)
    for first, *others in [*groups.values()][:most]:
        more = len(others)
        also = f" ({more} more {plural('device', more)} of {first.host} likewise)" if more else ""
        mark, style = ("!", "bold red") if first.is_sick else ("•", "dim")
        yield bullet(first.words() + also, mark, style)
    rest = [key[0] for key in [*groups][most:]]
    if rest:
        of_them = f", {sum(rest)} of them sick" if any(rest) else ""
        yield text(f"… and {len(rest)} more {plural('finding', len(rest))}{of_them}, in {where}", "dim")


def checkup_screen(checkup: Checkup) -> str:
    """Draw the findings of `pipette doctor`. Findings that would stop a job come first."""
    sections: list[Section] = [
        (heading, [bullet(one.words()) for one in checkup.findings if one.severity == severity])
        for severity, heading in HEADINGS.items()
    ]
    answer = "nothing here would stop a job" if checkup.is_fit else "a job would stop here"
    sections.append(("Answer", [f"{checkup.host}: {answer}", text(UNSEEN, "dim")]))
    return screen("pipette doctor", sections)


def measured_screen(measurements: Measurements, *, title: str, saved_to: Path) -> str:
    """Draw the screen of a warm-up's measurements."""
    cluster = measurements.cluster
    versions = ", ".join(f"{name} {version}" for name, version in sorted(measurements.versions.items()))
    took = " · ".join(f"{phase} {seconds_text(seconds)}" for phase, seconds in measurements.phase_s.items() if seconds)
    machines = _machines(measurements, f", at {measurements.taken_at}")
    sections: tuple[Section, ...] = (
        ("Machines", [machines, text(versions, "dim")]),
        ("Health", health(measurements.verdicts, where="the file")),
        ("Links", [*_link_lines(cluster), *_matrix(cluster)]),
        ("Groups", _groups(measurements)),
        ("Compute", _compute(measurements)),
        ("Memory", _memory(measurements)),
        ("Took", [took] if took else []),
        ("Notes", map(bullet, measurements.notes)),
        ("File", [text(str(saved_to), overflow="fold")]),
    )
    return screen(title, sections)


def what_the_plan_rests_on(plan: Plan, measurements: Measurements | None) -> Iterator[Line]:
    """Return lines on the measurements behind a plan, or on the plan's origin if nothing was measured now."""
    source, made_at = plan.provenance.source, plan.provenance.made_at
    if measurements is None:
        yield f"nothing in this start: the plan was {ORIGINS[source]}; it was made at {made_at}"
        return
    yield _machines(measurements, "" if source == "measured" else f"; kept from {made_at}, not measured now")
    yield from _link_lines(measurements.cluster)
    coverage = measurements.coverage()
    if coverage.num_timed < coverage.num_wanted:
        yield f"compute: {coverage.words()}"
    layout = plan.chosen.layout
    wanted = ComputeCase(tp=layout.tp, cp=layout.cp, micro_batch_size=layout.micro_batch_size)
    times = next((times for (case, _), times in layer_times(measurements).items() if case == wanted), [])
    if times:
        yield f"one layer: {_passes(times[:1])} (tp{layout.tp} mbs{layout.micro_batch_size})"
    yield from _slow_slots(measurements.cluster)


def layer_times(measurements: Measurements) -> Mapping[tuple[ComputeCase, str], list[ComputeTime]]:
    """Return the measured times of layers by (compute case, kind of layer)."""
    found: dict[tuple[ComputeCase, str], list[ComputeTime]] = {}
    for time in measurements.compute:
        if time.part in LAYERS:
            found.setdefault((time.case, time.part), []).append(time)
    return found


def pass_times_s(times: Sequence[ComputeTime]) -> tuple[float, float]:
    """Return the forward and backward time of one micro-batch, as medians over devices."""
    forward_s = statistics.median(time.forward.median_s for time in times)
    return forward_s, statistics.median(time.input_grad.median_s + time.weight_grad.median_s for time in times)


def _passes(times: Sequence[ComputeTime]) -> str:
    forward, backward = map(seconds_text, pass_times_s(times))
    return f"{forward} forward, {backward} backward"


def _machines(measurements: Measurements, remark: str) -> str:
    cluster, took_s = measurements.cluster, sum(measurements.phase_s.values())
    names = sorted({device.name for host in cluster.hosts for device in host.devices})
    hosts = len(cluster.hosts)
    kinds = f"{cluster.device_kind} ({', '.join(names)}, {bytes_text(cluster.memory_bytes)} free)"
    took = f" in {seconds_text(took_s)}" if took_s else ""
    return f"{hosts} {plural('host', hosts)} x {cluster.devices_per_host} {kinds}{took}{remark}"


def _link_lines(cluster: Cluster) -> Iterator[Line]:
    size = cluster.devices_per_host
    yield from _extremes("between hosts", [cluster.between_hosts], lambda _, index: cluster.hosts[index].name)
    yield from _extremes("in a host", cluster.within_host, lambda host, device: cluster.slot_name(host * size + device))


def _extremes(where: str, matrices: Sequence[Links], name: Callable[[int, int], str]) -> Iterator[Line]:
    found = [
        (float(links.bandwidth_bytes_per_s[pair]), f"{name(index, pair[0])} → {name(index, pair[1])}")
        for index, links in enumerate(matrices)
        for pair in links.extremes
    ]
    if found:
        (low, slowest), (high, fastest) = min(found), max(found)
        if low == high:
            yield f"{where}: {rate_text(low)} on every link"
        else:
            yield f"{where}: {rate_text(low)} ({slowest}) to {rate_text(high)} ({fastest})"


def _matrix(cluster: Cluster) -> Iterator[Line]:
    """Return the matrix of bandwidths from the row's host to the column's host, if there are few hosts."""
    names = [host.name for host in cluster.hosts]
    if not 2 < len(names) <= MOST_COLUMNS:
        return
    rows: list[list[Line]] = [[text("from \\ to", "dim"), *(text(name, "dim") for name in names)]]
    for row, rates in enumerate(cluster.between_hosts.bandwidth_bytes_per_s.tolist()):
        cells = ["" if row == column else rate_text(rate) for column, rate in enumerate(rates)]
        rows.append([text(names[row], "dim"), *cells])
    yield grid("r" * (len(names) + 1), rows)


def _groups(measurements: Measurements) -> Iterator[Line]:
    """Return a line for each kind of collective, with the rate at a large size: bytes of the full tensor per second."""
    timed = measurements.group_times
    rows = []
    for entry in timed[:MOST_ROWS]:
        hosts = len({measurements.cluster.host_of(slot) for slot in entry.slots})
        rate = rate_text(1 / entry.seconds_per_byte) if entry.seconds_per_byte else "no time per byte"
        where = f"{len(entry.slots)} slots on {hosts} {plural('host', hosts)}"
        rows.append((entry.kind.replace("_", "-"), where, f"{rate}, {seconds_text(entry.latency_s)} latency"))
    if timed:
        yield grid("www", rows)
    if len(timed) > MOST_ROWS:
        yield text(f"… and {len(timed) - MOST_ROWS} more", "dim")


def _compute(measurements: Measurements) -> Iterator[Line]:
    timed = layer_times(measurements)
    rows = [
        (
            f"tp{case.tp} cp{case.cp} mbs{case.micro_batch_size}",
            part.replace("_", " "),
            _passes(times),
            text(f"on {len(times)} {plural('slot', len(times))}", "dim"),
        )
        for (case, part), times in [*timed.items()][:MOST_ROWS]
    ]
    yield grid("wwww", rows)
    if len(timed) > MOST_ROWS:
        yield text(f"… and {len(timed) - MOST_ROWS} more", "dim")
    yield measurements.coverage().words()
    yield from _slow_slots(measurements.cluster)


def _slow_slots(cluster: Cluster) -> Iterator[Line]:
    slowest = min(cluster.slot_speed)
    if slowest < 1:
        slot = cluster.slot_name(cluster.slot_speed.index(slowest))
        yield f"slowest slot: {slot} at {slowest:.2f} x the median"


def _memory(measurements: Measurements) -> Iterator[Line]:
    for reading in measurements.memory[:1]:
        case, peak = reading.case, bytes_text(reading.allocator_peak_bytes)
        yield f"one layer: {peak} at its peak (tp{case.tp} cp{case.cp} mbs{case.micro_batch_size})"
    if measurements.overhead_bytes:
        yield f"beside the model: {bytes_text(measurements.overhead_bytes)} of context and communicators"
