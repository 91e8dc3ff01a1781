"""Step times of jobs on machines of a known type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.validation.case_factors import CaseFactor, with_factors
from pipette_launch.cost.compute.device_model import imagined
from pipette_launch.cost.step.predictor import Predictor
from pipette_launch.facts import Job
from pipette_launch.facts.devices import BY_KEY, DeviceSpec, key_of
from pipette_launch.facts.measurements import Measurements


@dataclass(frozen=True, kw_only=True, slots=True)
class Machines:
    """Equal hosts of one device type."""

    device: DeviceSpec
    num_hosts: int
    devices_per_host: int
    factors: tuple[CaseFactor, ...] = ()
    """Factors from measured steps, one for each shape of computation."""


StepTime = Callable[[Job, Machines], float]
"""Seconds of one step of the job's own layout, ranks in torchrun's order; raises PipetteError where it cannot tell."""


def measurements(job: Job, machines: Machines) -> Measurements:
    """Layer times that a warm-up of the job's own layout would measure, by the device model."""
    modelled = imagined(
        job,
        machines.device,
        num_hosts=machines.num_hosts,
        devices_per_host=machines.devices_per_host,
        layouts=[job.own],
    )
    return with_factors(modelled, job.model, machines.factors)


METHOD = "pipette"
"""Name of our predictor in lines of the table."""


def pipette(job: Job, machines: Machines) -> float:
    """Seconds by the product's own predictor."""
    predictor = Predictor(job, measurements(job, machines))
    return predictor.step_time(job.own, range(job.own.world_size)).total_s


def hosts_of(world_size: int, devices_per_host: int) -> tuple[int, int]:
    """Hosts and devices on each, for a job that fills them; a job of less than a host has one small host."""
    if world_size <= devices_per_host:
        return 1, world_size
    return -(-world_size // devices_per_host), devices_per_host


def device_of(hardware: str) -> DeviceSpec | None:
    """Return the known device whose name or alias is in a description of hardware; the longest name counts."""
    text = key_of(hardware)
    return BY_KEY.get(max((key for key in BY_KEY if key in text), key=len, default=""))
