"""From the workers' results to the one file: matrices, fits, slot speeds, and what is to be doubted. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from pipette_launch.errors import ProbeError
from pipette_launch.facts import (
    Cluster,
    ComputeCase,
    ComputeTime,
    DeviceOverhead,
    LoadingTime,
    Measurements,
    Samples,
)
from pipette_launch.facts.health.verdict import Verdict
from pipette_launch.facts.machines.link_survey import UNSTABLE_SPREAD
from pipette_launch.facts.measurements import LAYERS, layers_digest
from pipette_launch.facts.messages.measuring_advice import Dimension
from pipette_launch.probe.compute.slot_speeds import Speeds, factors, on_the_wall, speeds
from pipette_launch.probe.health.verdicts import device_verdicts, judge, link_verdicts, sick_first
from pipette_launch.probe.links.fits import EarlierLinks, FoundLinks, found_links, group_times
from pipette_launch.probe.options import ProbeOptions, WorkerResult

PHASES = ("start", "compute", "memory", "links", "advice", "collectives", "stages")
MAX_NAMED = 5
"""A note names so many and counts the rest."""


def assemble(
    options: ProbeOptions,
    results: Sequence[WorkerResult],
    *,
    dimensions: Sequence[Dimension] = (),
    earlier: EarlierLinks | None = None,
    versions: dict[str, str],
    taken_at: str,
) -> Measurements:
    """Join what all workers found.

    Args:
        options: what they were asked for.
        results: one for each slot, in slot order.
        dimensions: whose groups' collectives they timed.
        earlier: links of an earlier warm-up, for those that were not measured now.
        versions: from `inventory.versions`.
        taken_at: UTC, ISO 8601.

    """
    links = found_links(
        options,
        [link for result in results for link in result.links],
        rounds=sum(results[0].link_rounds),
        rounds_again=sum(results[0].link_rounds_again),
        earlier=earlier,
    )
    said = tuple(dict.fromkeys(note for result in results for note in result.notes))
    if not any(result.compute for result in results):
        raise ProbeError(f"no slot could measure a layer: {'; '.join(said) or 'no reason was given'}")
    found = speeds(options, [result.paces for result in results])
    refused = tuple(sorted({case for result in results for case in result.refused}))
    compute = _compute(options, results, found)
    overhead = _largest([result.overhead for result in results])
    wall = on_the_wall(results, found)
    return Measurements(
        cluster=Cluster(
            hosts=options.hosts, between_hosts=links.between, within_host=links.within, slot_speed=found.speed_S
        ),
        compute=compute,
        collectives=links.sends + group_times(dimensions, results),
        memory=tuple(reading for result in results for reading in result.memory),
        optimizer_s_per_parameter=_usual([one.optimizer_s_per_parameter for one in results], wall),
        wake_s=_usual([one.wake_s for one in results], wall) or 0.0,
        loading=_usual_loading([one.loading for one in results]),
        refused=refused,
        unmeasured=tuple(case for case in _missing(options, compute) if case not in refused),
        model_digest=layers_digest(options.job.model),
        overhead_bytes=overhead.total_bytes if overhead else 0,
        overhead=overhead if options.device_kind == "cuda" else None,
        stages=tuple(reading for result in results for reading in result.stages),
        versions=versions,
        taken_at=taken_at,
        phase_s={phase: max(result.phase_s.get(phase, 0.0) for result in results) for phase in PHASES},
        notes=(*said, *links.notes, *_doubts(options, compute), *found.notes),
        survey=links.survey,
        conditions=options.conditions,
        verdicts=_verdicts(options, links, found),
    )


def _compute(options: ProbeOptions, results: Sequence[WorkerResult], found: Speeds) -> tuple[ComputeTime, ...]:
    """All slots' times, on the wall."""
    of_slots = zip(results, factors(options, results, found), strict=True)
    return tuple(time.times(factor) for result, factor in of_slots for time in result.compute)


def _slow_links(options: ProbeOptions, links: FoundLinks) -> tuple[Verdict, ...]:
    """What two measurements find slow; a link that scatters is no ground to accuse anybody."""
    first_HH = links.first_HH
    if links.survey is not None:
        first_HH = np.where(links.survey.spread_HH > UNSTABLE_SPREAD, np.nan, first_HH)
    return link_verdicts([host.name for host in options.hosts], first_HH, links.again_HH)


def _verdicts(options: ProbeOptions, links: FoundLinks, found: Speeds) -> tuple[Verdict, ...]:
    """What drivers tell of the devices beside their peers, what links do, and how fast slots compute."""
    told = judge(options.hosts, options.conditions_of_hosts())
    return sick_first([*told, *_slow_links(options, links), *device_verdicts(options.hosts, found.slow)])


def _largest(overheads: Sequence[DeviceOverhead | None]) -> DeviceOverhead | None:
    return max((one for one in overheads if one), key=lambda one: one.total_bytes, default=None)


def _usual(seconds_S: Sequence[float | None], factor: float) -> float | None:
    """The median slot's, times a factor; None where no slot knows it."""
    known = [seconds for seconds in seconds_S if seconds is not None]
    return statistics.median(known) * factor if known else None


def _usual_loading(times: Sequence[LoadingTime | None]) -> LoadingTime | None:
    """Return the median slot's, which is on the wall already; None where no slot knows it."""
    known = [one for one in times if one is not None]
    if not known:
        return None
    return LoadingTime(
        batch_s=statistics.median(one.batch_s for one in known),
        sample_s=statistics.median(one.sample_s for one in known),
    )


def _missing(options: ProbeOptions, compute: Sequence[ComputeTime]) -> list[ComputeCase]:
    measured = {time.case for time in compute}
    return [case for case in options.cases if case not in measured]


def _doubts(options: ProbeOptions, compute: Sequence[ComputeTime]) -> tuple[str, ...]:
    """What is missing of the compute times, and what scatters."""
    return (*_missing_cases(options, compute), *_unstable_compute(options, compute))


def _missing_cases(options: ProbeOptions, compute: Sequence[ComputeTime]) -> tuple[str, ...]:
    missing = _missing(options, compute)
    if not missing:
        return ()
    first = f"tp{missing[0].tp} cp{missing[0].cp} mbs{missing[0].micro_batch_size}"
    return (f"compute: {len(missing)} of {len(options.cases)} cases were not measured, first of them {first}",)


def _unstable_compute(options: ProbeOptions, compute: Sequence[ComputeTime]) -> tuple[str, ...]:
    shaky = [time for time in compute if time.part in LAYERS and _layer_spread(time) > UNSTABLE_SPREAD]
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
