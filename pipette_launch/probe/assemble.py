"""From the workers' results to the one file: matrices, fits, slot speeds, and what is to be doubted. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipette_launch.errors import ProbeError
from pipette_launch.facts import Cluster, CollectiveTime, ComputeTime, Links, Measurements, Samples, files
from pipette_launch.facts.advice import Dimension
from pipette_launch.facts.measurements import UNSTABLE_SPREAD
from pipette_launch.probe.group_fits import group_times
from pipette_launch.probe.harness import Line, fit_line
from pipette_launch.probe.options import LinkSamples, ProbeOptions, WorkerResult
from pipette_launch.units import rate_text

MAX_SEND_ENTRIES = 4096
"""Above this many pairs only the unstable ones get an entry of their own beside the matrices."""
SAME_SPEED = {"cuda": 0.05, "cpu": 0.2}
"""Slots this close to the median count as equally fast: workers that share cores do not share them evenly."""
PHASES = ("start", "compute", "memory", "links", "advice", "collectives", "stages")
MAX_NAMED = 5
"""A note names so many and counts the rest."""

LinkFit = tuple[Line, float]
LinkFits = Mapping[tuple[int, int], LinkFit]


def assemble(
    options: ProbeOptions,
    results: Sequence[WorkerResult],
    *,
    dimensions: Sequence[Dimension] = (),
    versions: dict[str, str],
    taken_at: str,
) -> Measurements:
    """Join what all workers found.

    Args:
        options: what they were asked for.
        results: one for each slot, in slot order.
        dimensions: whose groups' collectives they timed.
        versions: from `inventory.versions`.
        taken_at: UTC, ISO 8601.

    """
    fits = {(link.source, link.target): fit_link(link) for result in results for link in result.links}
    between, notes_between = _matrix(
        fits, [host * options.devices_per_host for host in range(len(options.hosts))], "between hosts"
    )
    within, notes_within = _within_hosts(fits, options)
    said = tuple(dict.fromkeys(note for result in results for note in result.notes))
    if not any(result.compute for result in results):
        raise ProbeError(f"no slot could measure a layer: {'; '.join(said) or 'no reason was given'}")
    speeds, notes_speed = slot_speeds(
        options, [stretched(time, result.stretch) for result in results for time in result.compute]
    )
    # Uneven sharing of cores is chance, and must not make the case that one slot measured dearer than another's.
    refused = tuple(sorted({case for result in results for case in result.refused}))
    reached = {*refused, *(time.case for result in results for time in result.compute)}
    usual_stretch = statistics.median(result.stretch for result in results)
    compute = tuple(
        stretched(time, usual_stretch if speeds[result.slot] == 1 else result.stretch)
        for result in results
        for time in result.compute
    )
    return Measurements(
        cluster=Cluster(hosts=options.hosts, between_hosts=between, within_host=within, slot_speed=speeds),
        compute=compute,
        collectives=_sends(fits, options) + group_times(dimensions, results),
        memory=tuple(reading for result in results for reading in result.memory),
        optimizer_s_per_parameter=_median(
            [
                result.optimizer_s_per_parameter * usual_stretch
                for result in results
                if result.optimizer_s_per_parameter is not None
            ]
        ),
        refused=refused,
        unmeasured=tuple(case for case in options.cases if case not in reached),
        model_digest=files.digest(options.job.model),
        overhead_bytes=max(result.overhead_bytes for result in results),
        versions=versions,
        taken_at=taken_at,
        phase_s={phase: max(result.phase_s.get(phase, 0.0) for result in results) for phase in PHASES},
        notes=(
            *said,
            *notes_between,
            *notes_within,
            *_unstable_links(fits, options),
            *_missing_cases(options, compute),
            *notes_speed,
            *_unstable_compute(options, compute),
        ),
    )


def fit_link(link: LinkSamples) -> LinkFit:
    """The line through one link's medians, and the spread of its largest message."""
    return fit_line(link.sizes_bytes, [samples.median_s for samples in link.samples]), link.samples[-1].spread


def slot_speeds(options: ProbeOptions, compute: Sequence[ComputeTime]) -> tuple[tuple[float, ...], tuple[str, ...]]:
    """Speed of each slot on the reference case's layers relative to the median slot, and notes on the slow ones.

    A difference below 5 % (20 % on CPU), or below three times the spread of the slot or of the median slot, counts as
    none: it is noise.
    """
    seconds: dict[int, float] = {}
    spreads: dict[int, float] = {}
    for time in compute:
        if time.case == options.cases[0] and time.part in ("layer", "moe_layer"):
            parts = (time.forward, time.input_grad, time.weight_grad)
            seconds[time.slot] = seconds.get(time.slot, 0.0) + sum(part.median_s for part in parts)
            spreads[time.slot] = max(spreads.get(time.slot, 0.0), time.forward.spread, time.input_grad.spread)
    if not seconds or min(seconds.values()) <= 0:
        return (1.0,) * options.num_slots, ("slot speeds are assumed equal: no slot measured the reference case",)
    median_s = statistics.median(seconds.values())
    usual_spread = statistics.median(spreads.values())
    speeds, notes = [], []
    for slot in range(options.num_slots):
        speed = median_s / seconds.get(slot, median_s)
        if abs(speed - 1) < max(SAME_SPEED[options.device_kind], 3 * max(spreads.get(slot, 0.0), usual_spread)):
            speed = 1.0
        elif speed < 1:
            notes.append(f"slot {options.slot_name(slot)} computes at {speed:.2f} of the median slot's speed")
        speeds.append(speed)
    return tuple(speeds), tuple(notes)


def stretched(timed: ComputeTime, factor: float) -> ComputeTime:
    """All times multiplied."""
    return replace(
        timed,
        forward=_times(timed.forward, factor),
        input_grad=_times(timed.input_grad, factor),
        weight_grad=_times(timed.weight_grad, factor),
    )


def _times(samples: Samples, factor: float) -> Samples:
    return Samples(
        values_s=tuple(value * factor for value in samples.values_s),
        warmup_s=tuple(value * factor for value in samples.warmup_s),
    )


def _within_hosts(fits: LinkFits, options: ProbeOptions) -> tuple[tuple[Links, ...], list[str]]:
    """Fill the matrix of every host's own devices, and say what had to be assumed."""
    size = options.devices_per_host
    filled = [
        _matrix(fits, range(index * size, (index + 1) * size), f"within {host.name}")
        for index, host in enumerate(options.hosts)
    ]
    return tuple(links for links, _ in filled), [note for _, notes in filled for note in notes]


def _matrix(fits: LinkFits, slots: Sequence[int], where: str) -> tuple[Links, list[str]]:
    """Lay the fits of these slots out as matrices; unmeasured pairs get the medians of their ends."""
    if len(slots) == 1:
        return Links(latency_s=((0.0,),), bandwidth_bytes_per_s=((0.0,),)), []
    known = {
        (i, j): fits[a, b][0] for i, a in enumerate(slots) for j, b in enumerate(slots) if a != b and (a, b) in fits
    }
    if not known:
        raise ProbeError(f"no link {where} was measured; raise --pipette-budget")
    pairs = [(i, j) for i in range(len(slots)) for j in range(len(slots)) if i != j]
    lines = {pair: known.get(pair) or _assumed(known, *pair) for pair in pairs}
    missing = len(pairs) - len(known)
    notes = [f"links: {missing} of {len(pairs)} pairs {where} were assumed from the others"] if missing else []

    def matrix(value: Any) -> tuple[tuple[float, ...], ...]:
        size = range(len(slots))
        return tuple(tuple(0.0 if i == j else value(lines[i, j]) for j in size) for i in size)

    return Links(
        latency_s=matrix(lambda line: line.latency_s),
        bandwidth_bytes_per_s=matrix(lambda line: 1 / line.seconds_per_byte),
    ), notes


def _assumed(known: Mapping[tuple[int, int], Line], source: int, target: int) -> Line:
    """A link that nobody measured is as slow as the slower of its ends usually is."""
    of_source = [line for (i, _), line in known.items() if i == source]
    of_target = [line for (_, j), line in known.items() if j == target]
    ends = [lines for lines in (of_source, of_target) if lines] or [list(known.values())]
    return Line(
        max(statistics.median(line.latency_s for line in lines) for lines in ends),
        max(statistics.median(line.seconds_per_byte for line in lines) for lines in ends),
    )


def _sends(fits: LinkFits, options: ProbeOptions) -> tuple[CollectiveTime, ...]:
    """One entry for each measured pair, so that each link's spread is on file."""
    sizes = options.sizes_bytes()
    return tuple(
        CollectiveTime(
            kind="send",
            slots=pair,
            latency_s=line.latency_s,
            seconds_per_byte=line.seconds_per_byte,
            spread=spread,
            sizes_bytes=sizes,
        )
        for pair, (line, spread) in sorted(fits.items())
        if len(fits) <= MAX_SEND_ENTRIES or spread > UNSTABLE_SPREAD
    )


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _missing_cases(options: ProbeOptions, compute: Sequence[ComputeTime]) -> tuple[str, ...]:
    measured = {time.case for time in compute}
    missing = [case for case in options.cases if case not in measured]
    if not missing:
        return ()
    first = f"tp{missing[0].tp} cp{missing[0].cp} mbs{missing[0].micro_batch_size}"
    return (f"compute: {len(missing)} of {len(options.cases)} cases were not measured, first of them {first}",)


def _unstable_links(fits: LinkFits, options: ProbeOptions) -> tuple[str, ...]:
    unstable = sorted(((spread, pair) for pair, (_, spread) in fits.items() if spread > UNSTABLE_SPREAD), reverse=True)
    if not unstable:
        return ()
    spread, (source, target) = unstable[0]
    rate = rate_text(1 / fits[source, target][0].seconds_per_byte)
    worst = f"{options.slot_name(source)} -> {options.slot_name(target)} ({rate} +- {spread:.0%})"
    return (f"links: {len(unstable)} of {len(fits)} scatter by more than {UNSTABLE_SPREAD:.0%}, most of all {worst}",)


def _unstable_compute(options: ProbeOptions, compute: Sequence[ComputeTime]) -> tuple[str, ...]:
    shaky = [time for time in compute if time.part in ("layer", "moe_layer") and _layer_spread(time) > UNSTABLE_SPREAD]
    if not shaky:
        return ()
    names = list(dict.fromkeys(options.slot_name(time.slot) for time in shaky))
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    note = (
        f"compute: layer times scatter by more than {UNSTABLE_SPREAD:.0%} on {', '.join(names[:MAX_NAMED])}{more}; "
        f"something else may be running there"
    )
    return (note,)


def _layer_spread(time: ComputeTime) -> float:
    forward: Samples = time.forward
    return max(forward.spread, time.input_grad.spread)
