"""Compute times for shapes (tp, cp, micro-batch size) and flags that the warm-up did not time.

The device model (`device_model`) predicts times for two shapes or two sets of flags, and their ratio multiplies the
measured time. Times of unmeasured cases may also come from an earlier warm-up of the same machines and model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import NamedTuple

from pipette_launch.cost.compute.device_model import modelled_compute
from pipette_launch.errors import FactError
from pipette_launch.facts.cluster import Device
from pipette_launch.facts.devices import DeviceSpec, Efficiency, Link, devices_like, known_device
from pipette_launch.facts.job import MODELLED, Job, PerformanceOptions, flag_of
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.measurements import LAYERS, ComputeCase, ComputeTime, Measurements, Samples
from pipette_launch.megatron.performance import options_of_flags
from pipette_launch.text import listed

_MODELLED_OPTIONS = [each.name for each in fields(PerformanceOptions) if flag_of(each.name).startswith(MODELLED)]
_LOCAL = Link(latency_s=1e-6, bytes_per_s=1e10)
GENERIC = DeviceSpec(
    name="any",
    flops_per_s=dict.fromkeys(("fp32", "fp16", "bf16", "fp8", "fp4"), 5e10),
    memory_bytes_per_s=1e10,
    memory_bytes=1 << 34,
    within_host=_LOCAL,
    between_hosts=_LOCAL,
    # Figures of a CPU core: large products run near the peak, and torch's dispatcher takes 10 microseconds a kernel.
    efficiency=Efficiency(matmul_share=0.8, half_size=16, attention_share=0.5, memory_share=0.8, launch_s=1e-5),
    source="A core of 50 GFLOP/s and 10 GB/s, of which only ratios are used.",
)
"""Device model for a device whose figures are unknown. Only ratios of the times that it predicts are used."""


def spec_of(device: Device) -> DeviceSpec:
    """Return the known device with the driver's name, else the device with the most similar name, else GENERIC."""
    return known_device(device.name) or next(iter(devices_like(device.name)), GENERIC)


def layout_of(job: Job, case: ComputeCase) -> Layout:
    """Return a layout with the tp, cp and micro-batch size of a compute case, and with ep of the user's own layout."""
    own = Layout(dp=job.own.ep, ep=job.own.ep)
    return replace(own, tp=case.tp, cp=case.cp, micro_batch_size=case.micro_batch_size, sequence_parallel=case.tp > 1)


def as_timed(job: Job, measurements: Measurements) -> Job:
    """Return the job with the options of FP8, FP4 and graphs that the timed layers had."""
    timed = options_of_flags(measurements.timed_flags, job.megatron_version)
    return replace(job, options=replace(job.options, **{name: getattr(timed, name) for name in _MODELLED_OPTIONS}))


def with_extrapolated_times(job: Job, measurements: Measurements) -> Measurements:
    """Add times of the cases that the warm-up did not reach, marked as modelled.

    An added time is the time of the nearest measured case, multiplied by the ratio of the device model's times for the
    two shapes. A case gets no time if it may run out of memory, like a similar case that the warm-up refused.
    """
    known = _middle_times(measurements)
    ran = {time.case.cp for time in measurements.compute}
    refused = [(one.cp, one.tp, one.micro_batch_size) for one in measurements.refused]
    # A case may run out of memory if a refused case of equal cp needs the same memory or less, or if no case of its cp
    # ran.
    missing = [
        case
        for case in measurements.unmeasured
        if not any(
            cp == case.cp and (cp not in ran or (tp >= case.tp and size <= case.micro_batch_size))
            for cp, tp, size in refused
        )
    ]
    if not known or not missing:
        return measurements
    spec = spec_of(measurements.cluster.hosts[0].devices[0])
    modelled = _modelled(as_timed(job, measurements), spec, [layout_of(job, one) for one in (*known, *missing)])
    added = []
    for case in missing:
        source = min(known, key=lambda other, case=case: (_doublings(case, other), other))  # type: ignore[misc]
        for part, time in known[source].items():
            here, there = modelled.get((source, part)), modelled.get((case, part))
            if here is not None and there is not None:
                added.append(replace(times_ratio(time, there, here), case=case, source="modelled"))
    names = listed([f"tp{case.tp} cp{case.cp} mbs{case.micro_batch_size}" for case in missing], 3)
    note = f"compute: {names} were not measured; a device model carried over the times of measured cases"
    return replace(measurements, compute=(*measurements.compute, *added), notes=(*measurements.notes, note))


def _doublings(case: ComputeCase, other: ComputeCase) -> float:
    """Return the distance between two cases: doublings of tokens, plus twice the doublings of tp."""
    tokens = case.micro_batch_size * other.cp / (case.cp * other.micro_batch_size)
    return 2 * abs(math.log2(case.tp / other.tp)) + abs(math.log2(tokens))


def _middle_times(measurements: Measurements) -> dict[ComputeCase, dict[str, ComputeTime]]:
    """Return each case's times by part of the model, on the slot of median speed; leave out cases without layers."""
    times: dict[ComputeCase, dict[str, list[ComputeTime]]] = {}
    speed = measurements.cluster.slot_speed
    for time in measurements.compute:
        times.setdefault(time.case, {}).setdefault(time.part, []).append(time)
    for group in (group for parts in times.values() for group in parts.values()):
        group.sort(key=lambda time: speed[time.slot] * time.forward.median_s)
    return {
        case: {part: group[(len(group) - 1) // 2] for part, group in parts.items()}
        for case, parts in times.items()
        if not parts.keys().isdisjoint(LAYERS)
    }


def _modelled(job: Job, spec: DeviceSpec, layouts: Sequence[Layout]) -> dict[tuple[ComputeCase, str], ComputeTime]:
    return {(time.case, time.part): time for time in modelled_compute(job, spec, layouts) if not time.ep}


def times_ratio(time: ComputeTime, there: ComputeTime, here: ComputeTime) -> ComputeTime:
    """Return `time` with each pass multiplied by the ratio of its seconds in `there` to its seconds in `here`."""

    def scaled(samples: Samples, name: str) -> Samples:
        before_s, after_s = getattr(here, name).median_s, getattr(there, name).median_s
        return Samples(values_s=(samples.median_s * (after_s / before_s if before_s else 1.0),))

    return replace(
        time,
        forward=scaled(time.forward, "forward"),
        input_grad=scaled(time.input_grad, "input_grad"),
        weight_grad=scaled(time.weight_grad, "weight_grad"),
        recompute=time.recompute and scaled(time.recompute, "forward"),
    )


class Repriced(NamedTuple):
    """Compute times with all of a job's flags."""

    compute: tuple[ComputeTime, ...]
    factors: Mapping[ComputeCase, float]
    """For each case: time of the layers with all flags, divided by the measured time; empty if no time was changed."""
    flags: str = ""
    """Flags that the timed layers did not have; empty if no flag changes the time of layers."""
    origin: str = ""
    """Name of the device model, or the reason why the times were not changed."""


def repriced(job: Job, measurements: Measurements) -> Repriced:
    """Multiply measured times by the device model's ratio for the flags that the timed layers did not have.

    seconds = measured seconds * model(with all flags) / model(as timed), for each pass of each part in each case. The
    two modelled times are for the same layer, shape and device, so most errors of the device model cancel. The ratio
    covers FP8 or FP4 with casts, first and last layers in BF16, and CUDA graphs of parts or of the whole iteration.
    Times of imagined machines include all flags already, and are returned unchanged.
    """
    plain = as_timed(job, measurements)
    if not measurements.versions or job.options == plain.options:
        return Repriced(measurements.compute, {})
    untimed = (flag for flag in job.performance_flags if flag not in measurements.timed_flags)
    flags = ", ".join(flag for flag in untimed if flag.startswith(MODELLED))
    device = measurements.cluster.hosts[0].devices[0]
    if (spec := spec_of(device)) is GENERIC:
        return Repriced(measurements.compute, {}, flags, f"no figures of {device.name} are known")
    layouts = [layout_of(job, case) for case in measurements.compute_cases()]
    try:
        here, there = _modelled(plain, spec, layouts), _modelled(job, spec, layouts)
    except FactError as error:
        return Repriced(measurements.compute, {}, flags, str(error))
    compute = tuple(
        times_ratio(time, there[key], here[key]) if (key := (time.case, time.part)) in there else time
        for time in measurements.compute
    )
    before, after = _layers_s(measurements.compute), _layers_s(compute)
    factors = {case: after[case] / seconds for case, seconds in before.items() if seconds}
    return Repriced(compute, factors, flags, spec.name)


def _layers_s(times: Sequence[ComputeTime]) -> dict[ComputeCase, float]:
    """Return the seconds of all passes of all timed layers, for each case."""
    found: dict[ComputeCase, float] = {}
    for time in times:
        if time.part in LAYERS:
            passes = (time.forward, time.input_grad, time.weight_grad)
            found[time.case] = found.get(time.case, 0.0) + sum(samples.median_s for samples in passes)
    return found
