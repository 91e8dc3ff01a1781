"""Shapes of computation that a warm-up times, and the flags that its layers do not have."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeAlias

from pipette_launch.cost.compute.device_model import modelled_compute
from pipette_launch.errors import FactError
from pipette_launch.facts.accelerators import DeviceSpec, Efficiency, Link
from pipette_launch.facts.cluster import Device
from pipette_launch.facts.job import MODELLED, Job
from pipette_launch.facts.known_devices import device_of_driver, devices_like
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.measurements import LAYERS, ComputeCase, ComputeTime, Measurements, Samples
from pipette_launch.megatron.performance import performance_options


def layout_of(job: Job, case: ComputeCase) -> Layout:
    """Return a layout that runs a case, with the experts of the user's own."""
    own = Layout(dp=job.own.ep, ep=job.own.ep)
    return replace(own, tp=case.tp, cp=case.cp, micro_batch_size=case.micro_batch_size, sequence_parallel=case.tp > 1)


def as_timed(job: Job) -> Job:
    """Return the job as its layers were timed: in 16 bits, without CUDA graphs and attention windows."""
    kept = tuple(flag for flag in job.performance_flags if not flag.startswith(MODELLED))
    return replace(job, performance_flags=kept, model=replace(job.model, attention_windows=()))


Model: TypeAlias = Mapping[tuple[ComputeCase, str], ComputeTime]

_LOCAL = Link(latency_s=1e-6, bytes_per_s=1e10)
_PEAKS = dict.fromkeys(("fp32", "fp16", "bf16", "fp8", "fp4"), 5e10)
GENERIC = DeviceSpec(
    name="any",
    flops_per_s=_PEAKS,
    memory_bytes_per_s=1e10,
    memory_bytes=1 << 34,
    within_host=_LOCAL,
    between_hosts=_LOCAL,
    # A core's: wide products near the peak, ten microseconds of torch's dispatcher for each kernel.
    efficiency=Efficiency(matmul_share=0.8, half_size=16, attention_share=0.5, memory_share=0.8, launch_s=1e-5),
    source="A core of 50 GFLOP/s and 10 GB/s, of which only ratios are used.",
)
"""Used for a device whose figures are unknown."""


def with_extrapolated_times(job: Job, measurements: Measurements) -> Measurements:
    """Add the times of the cases that the warm-up did not come to, marked as modelled.

    Args:
        job: whose model was measured.
        measurements: with one complete case at least, else they are returned as they are.

    """
    known = _complete(measurements)
    ran = {time.case.cp for time in measurements.compute}

    def may_fail(case: ComputeCase) -> bool:
        """Whether a case may fail as a refused one did: it needs as much memory, or no case with its cp ran."""
        alike = (refused for refused in measurements.refused if refused.cp == case.cp)
        return any(
            case.cp not in ran or (refused.tp >= case.tp and refused.micro_batch_size <= case.micro_batch_size)
            for refused in alike
        )

    missing = [case for case in measurements.unmeasured if not may_fail(case)]
    if not known or not missing:
        return measurements
    spec = spec_of(measurements.cluster.hosts[0].devices[0])
    layouts = [layout_of(job, one) for one in (*known, *missing)]
    model: Model = {(time.case, time.part): time for time in modelled_compute(as_timed(job), spec, layouts)}

    def apart(case: ComputeCase, other: ComputeCase) -> tuple[float, ComputeCase]:
        """Doublings between two cases; one of tp counts twice, as it changes the kernels."""
        tokens = case.micro_batch_size * other.cp / (case.cp * other.micro_batch_size)
        return 2 * abs(math.log2(case.tp / other.tp)) + abs(math.log2(tokens)), other

    nearest = {case: min(known, key=partial(apart, case)) for case in missing}
    added = [time for case in missing for time in _carried(case, nearest[case], known, model)]
    names = ", ".join(f"tp{case.tp} cp{case.cp} mbs{case.micro_batch_size}" for case in missing[:3])
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    note = f"compute: {names}{more} were not measured; their times are measured ones, carried over by a device model"
    return replace(measurements, compute=(*measurements.compute, *added), notes=(*measurements.notes, note))


def spec_of(device: Device) -> DeviceSpec:
    """Return the known device of the driver's name, else the one of its chip with the nearest memory, else GENERIC."""
    known = device_of_driver(device.name)
    if known is not None:
        return known
    alike = devices_like(device.name)
    return min(alike, key=lambda spec: abs(spec.memory_bytes - device.memory_total_bytes), default=GENERIC)


def _complete(measurements: Measurements) -> dict[ComputeCase, dict[str, ComputeTime]]:
    """The measured times of each case by part, of the slot that is in the middle; cases without a layer left out."""
    times: dict[ComputeCase, dict[str, list[ComputeTime]]] = {}
    for time in measurements.compute:
        times.setdefault(time.case, {}).setdefault(time.part, []).append(time)
    speed = measurements.cluster.slot_speed

    def middle(group: Sequence[ComputeTime]) -> ComputeTime:
        ranked = sorted(group, key=lambda time: speed[time.slot] * time.forward.median_s)
        return ranked[(len(ranked) - 1) // 2]

    return {
        case: {part: middle(group) for part, group in parts.items()}
        for case, parts in times.items()
        if not parts.keys().isdisjoint(LAYERS)
    }


def _carried(
    case: ComputeCase,
    source: ComputeCase,
    known: Mapping[ComputeCase, Mapping[str, ComputeTime]],
    model: Model,
) -> list[ComputeTime]:
    """The parts of a measured case, each pass multiplied by what the model makes of the step to another case."""
    carried = []
    for part, time in known[source].items():
        here, there = model.get((source, part)), model.get((case, part))
        if here is not None and there is not None:
            carried.append(replace(times_ratio(time, there, here), case=case, source="modelled"))
    return carried


def times_ratio(time: ComputeTime, there: ComputeTime, here: ComputeTime) -> ComputeTime:
    """Multiply the passes of a time by the ratio of two others."""
    return replace(
        time,
        forward=_scaled(time.forward, there.forward, here.forward),
        input_grad=_scaled(time.input_grad, there.input_grad, here.input_grad),
        weight_grad=_scaled(time.weight_grad, there.weight_grad, here.weight_grad),
        recompute=time.recompute and _scaled(time.recompute, there.forward, here.forward),
    )


def _scaled(samples: Samples, there: Samples, here: Samples) -> Samples:
    factor = there.median_s / here.median_s if here.median_s else 1.0
    return Samples(values_s=(samples.median_s * factor,))


Factors: TypeAlias = Mapping[ComputeCase, float]


class Repriced(NamedTuple):
    """Compute times with all of a job's flags."""

    compute: tuple[ComputeTime, ...]
    factors: Factors
    """Layers' time over their time as timed, by case; empty if the times were left as they are."""
    flags: str = ""
    """Flags that the timed layers did not have; empty if no flag changes their time."""
    origin: str = ""
    """Name of the device model, or the reason why the times were left as they are."""


def repriced(job: Job, measurements: Measurements) -> Repriced:
    """Multiply the times of a warm-up by the factor of the flags that its layers did not have.

    Times of imagined machines, which have no versions, hold all flags already.
    """
    plain = as_timed(job)
    same_options = performance_options(job) == performance_options(plain)
    if not measurements.versions or (same_options and job.model == plain.model):
        return Repriced(measurements.compute, {})
    flags = ", ".join(flag for flag in job.performance_flags if flag not in plain.performance_flags)
    device = measurements.cluster.hosts[0].devices[0]
    spec = spec_of(device)
    if spec is GENERIC:
        return Repriced(measurements.compute, {}, flags, f"no figures of {device.name} are known")
    try:
        compute, factors = _by_model(job, measurements, spec)
    except FactError as error:
        return Repriced(measurements.compute, {}, flags, str(error))
    return Repriced(compute, factors, flags, spec.name)


def _by_model(job: Job, measurements: Measurements, spec: DeviceSpec) -> tuple[tuple[ComputeTime, ...], Factors]:
    layouts = [layout_of(job, case) for case in measurements.compute_cases()]
    here, there = (
        {(time.case, time.part): time for time in modelled_compute(one, spec, layouts) if not time.ep}
        for one in (as_timed(job), job)
    )
    compute = tuple(
        times_ratio(time, there[time.case, time.part], here[time.case, time.part])
        if (time.case, time.part) in there
        else time
        for time in measurements.compute
    )
    before, after = _layers_s(measurements.compute), _layers_s(compute)
    return compute, {case: after[case] / seconds for case, seconds in before.items() if seconds}


def _layers_s(times: Sequence[ComputeTime]) -> dict[ComputeCase, float]:
    """Add up the passes of all layers that were timed, by case."""
    found: dict[ComputeCase, float] = {}
    for time in times:
        if time.part in LAYERS:
            passes = (time.forward, time.input_grad, time.weight_grad)
            found[time.case] = found.get(time.case, 0.0) + sum(samples.median_s for samples in passes)
    return found


CHANGED = 0.25
"""If a case that was measured both times changed by more than this part, no earlier time is used."""


def with_cached_times(measurements: Measurements, earlier: Measurements | None) -> Measurements:
    """Add the earlier times of cases that were not measured now, marked as cached and brought to today's pace.

    Today's pace is the median ratio of the layers of the cases that were measured both times; without any, or where
    the pace has changed much, nothing is added.
    """
    if earlier is None or not measurements.model_digest or earlier.model_digest != measurements.model_digest:
        return measurements
    now, then = _forward_s(measurements), _forward_s(earlier)
    ratios = [now[case] / then[case] for case in now if then.get(case)]
    pace = statistics.median(ratios) if ratios else 0.0
    if abs(pace - 1) > CHANGED:
        return measurements
    done = {*measurements.compute_cases(), *measurements.refused}
    added = [
        replace(time.times(pace), source="cached")
        for time in earlier.compute
        if time.case not in done and time.source != "modelled"
    ]
    if not added:
        return measurements
    cases = {time.case for time in added}
    note = (
        f"compute: times of {len(cases)} more cases are those of the warm-up at {earlier.taken_at}, times {pace:.2f}, "
        f"which is what a case measured both times takes now"
    )
    return replace(
        measurements,
        compute=(*measurements.compute, *added),
        unmeasured=tuple(case for case in measurements.unmeasured if case not in cases),
        notes=(*measurements.notes, note),
    )


def _forward_s(measurements: Measurements) -> dict[ComputeCase, float]:
    """Seconds of a layer's forward in each case that was really measured, the median of its slots."""
    times: dict[ComputeCase, list[float]] = {}
    for time in measurements.compute:
        if time.part in LAYERS and time.source == "measured":
            times.setdefault(time.case, []).append(time.forward.median_s)
    return {case: statistics.median(seconds) for case, seconds in times.items()}
