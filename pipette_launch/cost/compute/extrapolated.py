"""Compute times that the warm-up had no time for: what was measured, carried over to other shapes by the device model.

The model (`imagined_device`) is only used for the ratio between two shapes of computation on one device; what a shape
takes comes from the nearest one that was measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from pipette_launch.cost.compute.imagined_device import modelled_compute
from pipette_launch.cost.compute.timed import as_timed, layout_of
from pipette_launch.facts.accelerators import DeviceSpec, Efficiency, Link
from pipette_launch.facts.cluster import Device
from pipette_launch.facts.job import Job
from pipette_launch.facts.known_devices import device_of_driver, devices_like
from pipette_launch.facts.measurements import LAYERS, ComputeCase, ComputeTime, Measurements, Samples

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
