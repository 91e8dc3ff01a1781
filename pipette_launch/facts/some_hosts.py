"""Measurements of some hosts of a job, taken from those of all of them."""

# H = hosts, D = devices of one host, S = slots (all devices of all hosts, host by host); kept ones come in their order.

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from pipette_launch.errors import FactError
from pipette_launch.facts.machines.cluster import Cluster, Links
from pipette_launch.facts.machines.link_survey import LinkSurvey
from pipette_launch.facts.measurements import ComputeTime, Measurements


def without_hosts(measurements: Measurements, names: Collection[str]) -> Measurements:
    """Leave out hosts, as if the job had never had them; slots are numbered anew.

    A shape of computation that only a host left out has timed is kept, as that slot of the remaining hosts would have
    taken that is nearest to it in speed: the times of the warm-up are dealt out over all slots.

    Args:
        measurements: of all hosts.
        names: the hosts to leave out; at least one other must remain.

    Raises:
        FactError: a name is none of a host, or no host remains.

    """
    cluster = measurements.cluster
    unknown = sorted(set(names) - {host.name for host in cluster.hosts})
    if unknown:
        raise FactError(f"{', '.join(unknown)}: no such host among {', '.join(host.name for host in cluster.hosts)}")
    kept_H = [index for index, host in enumerate(cluster.hosts) if host.name not in names]
    if not kept_H:
        raise FactError("no host remains")
    if len(kept_H) == len(cluster.hosts):
        return measurements
    size = cluster.devices_per_host
    kept_HH = np.ix_(kept_H, kept_H)
    links, survey = cluster.between_hosts, measurements.survey
    slots = {host * size + local: new * size + local for new, host in enumerate(kept_H) for local in range(size)}
    read = {reading.case for reading in measurements.memory if reading.slot in slots}
    speeds = [cluster.slot_speed[slot] for slot in slots]
    middle = statistics.median(speeds)
    return replace(
        measurements,
        cluster=Cluster(
            hosts=tuple(cluster.hosts[host] for host in kept_H),
            between_hosts=Links(
                latency_s=links.latency_s[kept_HH], bandwidth_bytes_per_s=links.bandwidth_bytes_per_s[kept_HH]
            ),
            within_host=tuple(cluster.within_host[host] for host in kept_H),
            # 1.0 is the median slot, of those that are left.
            slot_speed=tuple(speed / middle for speed in speeds),
            imagined=cluster.imagined,
        ),
        compute=_compute(measurements, slots),
        collectives=tuple(
            replace(time, slots=tuple(slots[slot] for slot in time.slots))
            for time in measurements.collectives
            if slots.keys() >= set(time.slots)
        ),
        # Memory is the same on any device, so readings of slots left out count where there are no others of a case.
        memory=tuple(
            replace(reading, slot=slots.get(reading.slot, 0))
            for reading in measurements.memory
            if reading.slot in slots or reading.case not in read
        ),
        stages=tuple(replace(reading, slot=slots.get(reading.slot, 0)) for reading in measurements.stages),
        conditions=tuple(measurements.conditions[slot] for slot in slots) if measurements.conditions else (),
        verdicts=tuple(one for one in measurements.verdicts if one.host not in names and one.other_host not in names),
        survey=_survey(survey, kept_H) if survey else None,
        notes=(*measurements.notes, f"measured with {', '.join(sorted(names))}, and planned without"),
    )


def _survey(survey: LinkSurvey, kept_H: Sequence[int]) -> LinkSurvey:
    new = {host: index for index, host in enumerate(kept_H)}
    return replace(
        survey,
        spread_HH=survey.spread_HH[np.ix_(kept_H, kept_H)],
        origin_HH=tuple("".join(survey.origin_HH[host][other] for other in kept_H) for host in kept_H),
        rails=tuple(
            replace(rail, source=new[rail.source], target=new[rail.target])
            for rail in survey.rails
            if {rail.source, rail.target} <= new.keys()
        ),
    )


def _compute(measurements: Measurements, slots: dict[int, int]) -> tuple[ComputeTime, ...]:
    """Times of the slots that are left, and of others what was timed nowhere else, as one of those would have it."""
    speed = measurements.cluster.slot_speed
    timed = {(time.case, time.part) for time in measurements.compute if time.slot in slots}
    times = []
    for time in measurements.compute:
        if time.slot in slots:
            times.append(replace(time, slot=slots[time.slot]))
        elif (time.case, time.part) not in timed:
            # Speed times seconds is what a slot of speed 1 would take.
            stand_in = min(slots, key=lambda slot: abs(speed[slot] - speed[time.slot]))
            factor = speed[time.slot] / speed[stand_in]
            idle = {name: factor * getattr(time, name) for name in ("forward_idle_s", "backward_idle_s")}
            times.append(replace(time.times(factor), slot=slots[stand_in], **idle))
    return tuple(times)
