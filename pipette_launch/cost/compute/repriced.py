"""Measured times of layers, multiplied by the device model's ratio for flags that the timed layers did not have.

seconds = measured seconds * model(with all flags) / model(as timed), for each pass of each part in each case. Both
prices of the model are for the same layer, shape and device, so most of its errors cancel. The factor holds what
`device_time` and `device_work` price: FP8 or FP4 with casts, CUDA graphs of parts or of the whole iteration, and
attention windows in the mean of all layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from pipette_launch.cost.compute.extrapolated import GENERIC, spec_of, times_ratio
from pipette_launch.cost.compute.imagined_device import modelled_compute
from pipette_launch.cost.compute.timed import as_timed, layout_of
from pipette_launch.errors import FactError
from pipette_launch.facts.accelerators import DeviceSpec
from pipette_launch.facts.job import Job
from pipette_launch.facts.measurements import LAYERS, ComputeCase, ComputeTime, Measurements
from pipette_launch.megatron.performance import performance_options

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
