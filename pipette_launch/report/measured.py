"""Screens with a warm-up's measurements, and with faults of machines from a warm-up or `pipette doctor`."""

# H = hosts.

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pipette_launch.facts import Cluster, ComputeTime, Links, Measurements, Plan
from pipette_launch.facts.health import Checkup, Verdict
from pipette_launch.facts.measurements import LAYERS
from pipette_launch.report.screen import Section, bullet, render, sheet, text
from pipette_launch.text import bytes_text, plural, rate_text, seconds_text

MOST_VERDICTS = 5
HEADINGS = {"stops": "Stops", "slows": "Slows", "fine": "Fine"}
UNSEEN = "not checked, because one machine alone cannot: clocks that differ between nodes, links, firewalls"


def health(
    verdicts: Sequence[Verdict], *, where: str = "cluster.json", most: int = MOST_VERDICTS
) -> Iterator[RenderableType]:
    """Return a sentence for each of the first faults. Devices of a host with the same kind of fault share a sentence.

    Args:
        where: file or page that lists the remaining faults.
        most: largest number of sentences.

    """
    groups: dict[tuple[bool, str, str, str], list[Verdict]] = {}
    for one in sorted(verdicts, key=lambda verdict: not verdict.is_sick):
        groups.setdefault((one.is_sick, one.host, one.other_host, one.kind), []).append(one)
    for shared in [*groups.values()][:most]:
        more = len(shared) - 1
        also = f" ({more} more {plural('device', more)} of {shared[0].host} likewise)" if more else ""
        row = Table.grid(padding=(0, 1, 0, 0))
        row.add_row(text("!", "bold red") if shared[0].is_sick else text("•", "dim"), text(shared[0].words() + also))
        yield row
    rest = len(groups) - most
    if rest > 0:
        sick = sum(key[0] for key in [*groups][most:])
        of_them = f", {sick} of them sick" if sick else ""
        yield text(f"… and {rest} more {plural('finding', rest)}{of_them}, in {where}", "dim")


def checkup_screen(
    checkup: Checkup, *, width: int | None = None, colour: bool | None = None, stream: TextIO | None = None
) -> str:
    """Draw the findings of `pipette doctor`. Findings that would stop a job come first."""
    sections: list[Section] = [
        (heading, [bullet(one.words()) for one in checkup.findings if one.severity == severity])
        for severity, heading in HEADINGS.items()
    ]
    answer = "nothing here would stop a job" if checkup.is_fit else "a job would stop here"
    sections.append(("Answer", [text(f"{checkup.host}: {answer}"), text(UNSEEN, "dim")]))
    return render("pipette doctor", sheet(sections), width=width, colour=colour, stream=stream or sys.stdout)


MOST_COLUMNS = 8
"""Most hosts in a matrix on a screen."""
MOST_ROWS = 12


def measured_screen(
    measurements: Measurements,
    *,
    title: str,
    saved_to: Path | None,
    width: int | None = None,
    colour: bool | None = None,
    stream: TextIO | None = None,
) -> str:
    """Draw the screen of a warm-up's measurements.

    Args:
        title: command that shows the screen.
        saved_to: path of the file with the measurements; None if there is no file.

    """
    cluster = measurements.cluster
    sections: tuple[Section, ...] = (
        ("Machines", _machines(measurements)),
        ("Health", health(measurements.verdicts, where="the file")),
        ("Links", [*link_lines(cluster), *_matrix(cluster)]),
        ("Groups", _groups(measurements)),
        ("Compute", _compute(measurements)),
        ("Memory", _memory(measurements)),
        ("Took", _took(measurements)),
        ("Notes", map(bullet, measurements.notes)),
        ("File", [] if saved_to is None else [text(str(saved_to), overflow="fold")]),
    )
    return render(title, sheet(sections), width=width, colour=colour, stream=stream or sys.stdout)


def what_the_plan_rests_on(plan: Plan, measurements: Measurements | None) -> Iterator[Text]:
    """Return lines on the measurements behind a plan, or on the plan's origin if this start measured nothing."""
    if measurements is None:
        origin = {
            "cached": "kept from an earlier start",
            "file": "read from a file",
            "imagined": "made for imagined machines",
            "measured": "measured before",
        }
        source, made_at = origin[plan.provenance.source], plan.provenance.made_at
        yield text(f"nothing in this start: the plan was {source}; it was made at {made_at}")
        return
    remark = ""
    if plan.provenance.source != "measured":
        remark = f"; kept from {plan.provenance.made_at}, not measured now"
    yield machines(measurements, remark=remark)
    yield from link_lines(measurements.cluster)
    coverage = measurements.coverage()
    if coverage.num_timed < coverage.num_wanted:
        yield text(f"compute: {coverage.words()}")
    yield from _chosen_layer(plan, measurements)


def _chosen_layer(plan: Plan, measurements: Measurements) -> Iterator[Text]:
    layout = plan.chosen.layout
    wanted = (layout.tp, layout.cp, layout.micro_batch_size)
    layers = [time for time in measurements.compute if time.part in LAYERS]
    for time in layers:
        if (time.case.tp, time.case.cp, time.case.micro_batch_size) == wanted:
            backward_s = time.input_grad.median_s + time.weight_grad.median_s
            yield text(
                f"one layer: {seconds_text(time.forward.median_s)} forward, {seconds_text(backward_s)} backward "
                f"(tp{time.case.tp} mbs{time.case.micro_batch_size})"
            )
            break
    yield from slow_slots(measurements.cluster)


def machines(measurements: Measurements, *, remark: str = "") -> Text:
    """Return a line with the hosts and the duration of the warm-up."""
    cluster = measurements.cluster
    names = sorted({device.name for host in cluster.hosts for device in host.devices})
    hosts, devices = len(cluster.hosts), cluster.devices_per_host
    took_s = sum(measurements.phase_s.values())
    return text(
        f"{hosts} {plural('host', hosts)} x {devices} {cluster.device_kind} ({', '.join(names)}, "
        f"{bytes_text(cluster.memory_bytes)} free)" + (f" in {seconds_text(took_s)}" if took_s else "") + remark
    )


def link_lines(cluster: Cluster) -> Iterator[Text]:
    """Return lines that name the slowest and the fastest link, between hosts and inside hosts."""
    size = cluster.devices_per_host
    yield from _links("between hosts", [cluster.between_hosts], lambda _, index: cluster.hosts[index].name)
    yield from _links("in a host", cluster.within_host, lambda host, device: cluster.slot_name(host * size + device))


def _links(where: str, matrices: Sequence[Links], name: Callable[[int, int], str]) -> Iterator[Text]:
    found = [
        (float(links.bandwidth_bytes_per_s[pair]), f"{name(index, pair[0])} → {name(index, pair[1])}")
        for index, links in enumerate(matrices)
        for pair in links.extremes
    ]
    if found:
        slowest, fastest = min(found), max(found)
        if slowest[0] == fastest[0]:
            yield text(f"{where}: {rate_text(slowest[0])} on every link")
            return
        yield text(f"{where}: {rate_text(slowest[0])} ({slowest[1]}) to {rate_text(fastest[0])} ({fastest[1]})")


def _machines(measurements: Measurements) -> Iterator[Text]:
    yield machines(measurements, remark=f", at {measurements.taken_at}")
    yield text(", ".join(f"{name} {version}" for name, version in sorted(measurements.versions.items())), "dim")


def _matrix(cluster: Cluster) -> Iterator[RenderableType]:
    """Return the matrix of bandwidths from the row's host to the column's host, if there are few hosts."""
    names = [host.name for host in cluster.hosts]
    if not 2 < len(names) <= MOST_COLUMNS:
        return
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(len(names) + 1):
        table.add_column(justify="right", no_wrap=True)
    table.add_row(text("from \\ to", "dim"), *(text(name, "dim") for name in names))
    for row, name in enumerate(names):
        rates = cluster.between_hosts.bandwidth_bytes_per_s[row]
        cells = [text("" if row == column else rate_text(float(rate))) for column, rate in enumerate(rates)]
        table.add_row(text(name, "dim"), *cells)
    yield table


def _groups(measurements: Measurements) -> Iterator[RenderableType]:
    """Return a line for each kind of collective, with the rate at a large size: bytes of the full tensor per second."""
    timed = [entry for entry in measurements.collectives if entry.kind != "send"]
    table = Table.grid(padding=(0, 2, 0, 0))
    for entry in timed[:MOST_ROWS]:
        hosts = {measurements.cluster.host_of(slot) for slot in entry.slots}
        rate = f"{rate_text(1 / entry.seconds_per_byte)}" if entry.seconds_per_byte else "no time per byte"
        table.add_row(
            text(entry.kind.replace("_", "-")),
            text(f"{len(entry.slots)} slots on {len(hosts)} {plural('host', len(hosts))}"),
            text(f"{rate}, {seconds_text(entry.latency_s)} latency"),
        )
    if timed:
        yield table
    if len(timed) > MOST_ROWS:
        yield text(f"… and {len(timed) - MOST_ROWS} more", "dim")


def _compute(measurements: Measurements) -> Iterator[RenderableType]:
    """Return the times of a layer's passes for each timed set of sizes, as medians over devices."""
    cases: dict[object, list[ComputeTime]] = {}
    for time in measurements.compute:
        if time.part in LAYERS:
            cases.setdefault((time.case, time.part), []).append(time)
    table = Table.grid(padding=(0, 2, 0, 0))
    for times in list(cases.values())[:MOST_ROWS]:
        case = times[0].case
        forward_s = statistics.median(time.forward.median_s for time in times)
        backward_s = statistics.median(time.input_grad.median_s + time.weight_grad.median_s for time in times)
        table.add_row(
            text(f"tp{case.tp} cp{case.cp} mbs{case.micro_batch_size}"),
            text(times[0].part.replace("_", " ")),
            text(f"{seconds_text(forward_s)} forward, {seconds_text(backward_s)} backward"),
            text(f"on {len(times)} {plural('slot', len(times))}", "dim"),
        )
    yield table
    if len(cases) > MOST_ROWS:
        yield text(f"… and {len(cases) - MOST_ROWS} more", "dim")
    yield text(measurements.coverage().words())
    yield from slow_slots(measurements.cluster)


def slow_slots(cluster: Cluster) -> Iterator[Text]:
    """Return a line on the slowest device slot, if slots differ in speed."""
    slowest = min(cluster.slot_speed)
    if slowest < 1:
        slot = cluster.slot_speed.index(slowest)
        yield text(f"slowest slot: {cluster.slot_name(slot)} at {slowest:.2f} x the median")


def _memory(measurements: Measurements) -> Iterator[Text]:
    for reading in measurements.memory[:1]:
        case = reading.case
        yield text(
            f"one layer: {bytes_text(reading.allocator_peak_bytes)} at its peak "
            f"(tp{case.tp} cp{case.cp} mbs{case.micro_batch_size})"
        )
    if measurements.overhead_bytes:
        yield text(f"beside the model: {bytes_text(measurements.overhead_bytes)} of context and communicators")


def _took(measurements: Measurements) -> Iterator[Text]:
    parts = [f"{phase} {seconds_text(seconds)}" for phase, seconds in measurements.phase_s.items() if seconds]
    if parts:
        yield text(" · ".join(parts))
