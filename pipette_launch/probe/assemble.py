"""From the workers' results to the one file: matrices, fits, slot speeds, and notes on what is uncertain. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from pipette_launch.errors import ProbeError
from pipette_launch.facts import Cluster, ComputeCase, ComputeTime, LoadingTime, Measurements
from pipette_launch.facts.health import Verdict
from pipette_launch.facts.measurements import LAYERS, UNSTABLE_SPREAD, layers_digest
from pipette_launch.facts.messages import Dimension
from pipette_launch.probe.compute.slot_speeds import Speeds, factors, on_the_wall, speeds
from pipette_launch.probe.health.verdicts import device_verdicts, faults_first, judge, link_verdicts
from pipette_launch.probe.links.fits import EarlierLinks, FoundLinks, found_links, group_times
from pipette_launch.probe.options import ProbeOptions, WorkerResult
from pipette_launch.text import hertz_text

PHASES = ("start", "compute", "memory", "links", "search", "collectives", "stages")
MAX_NAMED = 5
"""A note names so many slots and counts the others."""


def assemble(
    options: ProbeOptions,
    results: Sequence[WorkerResult],
    *,
    dimensions: Sequence[Dimension] = (),
    earlier: EarlierLinks | None = None,
    versions: dict[str, str],
    taken_at: str,
) -> Measurements:
    """Join the results of all workers.

    Args:
        options: the order of the warm-up.
        results: one for each slot, in slot order.
        dimensions: the groups of slots whose collectives they timed.
        earlier: links of an earlier warm-up, used where a link was not measured now.
        versions: from `inventory.versions`.
        taken_at: UTC, ISO 8601.

    """
    links = found_links(options, results, earlier)
    notes = tuple(dict.fromkeys(note for result in results for note in result.notes))
    if not any(result.compute for result in results):
        raise ProbeError(f"no slot could measure a layer: {'; '.join(notes) or 'no reason was given'}")
    found = speeds(options, [result.paces for result in results])
    of_slots = zip(results, factors(options, results, found), strict=True)
    compute = tuple(time.times(factor) for result, factor in of_slots for time in result.compute)
    measured = {time.case for time in compute}
    missing = [case for case in options.cases if case not in measured]
    refused = tuple(sorted({case for result in results for case in result.refused}))
    overheads = (result.overhead for result in results if result.overhead)
    overhead = max(overheads, key=lambda one: one.total_bytes, default=None)
    wall = on_the_wall(results, found)
    return Measurements(
        cluster=Cluster(
            hosts=options.hosts, between_hosts=links.between, within_host=links.within, slot_speed=found.speed_S
        ),
        compute=compute,
        collectives=links.sends + group_times(dimensions, results),
        memory=tuple(reading for result in results for reading in result.memory),
        optimizer_s_per_parameter=_median([one.optimizer_s_per_parameter for one in results], wall),
        gradient_s_per_byte=_median([one.gradient_s_per_byte for one in results], wall) or 0.0,
        wake_s=_median([one.wake_s for one in results], wall) or 0.0,
        loading=_median_loading([result.loading for result in results if result.loading]),
        refused=refused,
        unmeasured=tuple(case for case in missing if case not in refused),
        model_digest=layers_digest(options.job.model),
        overhead_bytes=overhead.total_bytes if overhead else 0,
        overhead=overhead if options.device_kind == "cuda" else None,
        stages=tuple(reading for result in results for reading in result.stages),
        versions=versions,
        taken_at=taken_at,
        phase_s={phase: max(result.phase_s.get(phase, 0.0) for result in results) for phase in PHASES},
        notes=(*notes, *links.notes, *_compute_notes(options, compute, missing), *_load_notes(results), *found.notes),
        survey=links.survey,
        conditions=options.conditions,
        verdicts=_verdicts(options, links, found),
    )


def _verdicts(options: ProbeOptions, links: FoundLinks, found: Speeds) -> tuple[Verdict, ...]:
    """Compare devices by what their drivers report and by their speeds, and links by two measurements."""
    first_HH, size = links.first_HH, options.devices_per_host
    conditions = [options.conditions[first : first + size] for first in range(0, options.num_slots, size)]
    if links.survey is not None:
        # A link that scatters is not reported.
        first_HH = np.where(links.survey.spread_HH > UNSTABLE_SPREAD, np.nan, first_HH)
    return faults_first(
        [
            *judge(options.hosts, conditions),
            *link_verdicts([host.name for host in options.hosts], first_HH, links.again_HH),
            *device_verdicts(options.hosts, found.slow),
        ]
    )


def _median(seconds_S: Sequence[float | None], factor: float) -> float | None:
    """The median slot's time, times a factor; None where no slot measured it."""
    known = [seconds for seconds in seconds_S if seconds is not None]
    return statistics.median(known) * factor if known else None


def _median_loading(times: Sequence[LoadingTime]) -> LoadingTime | None:
    """The median slot's times, which are wall times already; None where no slot measured them."""
    if not times:
        return None
    return LoadingTime(
        batch_s=statistics.median(one.batch_s for one in times),
        sample_s=statistics.median(one.sample_s for one in times),
    )


def _load_notes(results: Sequence[WorkerResult]) -> Iterator[str]:
    """Report the clocks and the power of GPUs under load, and what holds the clocks down."""
    readings = [result.under_load for result in results if result.under_load]
    clocks_hz = [reading.sm_clock_hz for reading in readings if reading.sm_clock_hz]
    if not clocks_hz:
        return
    most_hz = max(reading.sm_clock_max_hz for reading in readings)
    least_w, most_w = min(reading.power_w for reading in readings), max(reading.power_w for reading in readings)
    counts = Counter(reason for reading in readings for reason in reading.clock_reasons)
    held = "".join(f", {reason} on {count} of {len(readings)}" for reason, count in counts.most_common())
    slowest, fastest, most = map(hertz_text, (min(clocks_hz), max(clocks_hz), most_hz))
    yield (
        f"compute: with all slots at work SM clocks are {slowest} to {fastest} of {most}, power is {least_w:.0f} to "
        f"{most_w:.0f} W{held}"
    )


def _compute_notes(
    options: ProbeOptions, compute: Sequence[ComputeTime], missing: Sequence[ComputeCase]
) -> Iterator[str]:
    """Which compute times are missing, and which scatter."""
    if missing:
        first = f"tp{missing[0].tp} cp{missing[0].cp} mbs{missing[0].micro_batch_size}"
        yield f"compute: {len(missing)} of {len(options.cases)} cases were not measured, first of them {first}"
    unstable = [
        time
        for time in compute
        if time.part in LAYERS and max(time.forward.spread, time.input_grad.spread) > UNSTABLE_SPREAD
    ]
    names = list(dict.fromkeys(options.slot_name(time.slot) for time in unstable))
    if names:
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        yield (
            f"compute: layer times scatter by more than {UNSTABLE_SPREAD:.0%} on {', '.join(names[:MAX_NAMED])}{more}; "
            f"something else may be running there"
        )
