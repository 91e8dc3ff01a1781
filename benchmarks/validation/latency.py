"""Step times of jobs on machines of a known type: every latency model behind one signature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.estimators import step_times
from benchmarks.validation.case_factors import CaseFactor, with_factors
from pipette_launch.cost.compute.device_model import imagined
from pipette_launch.cost.step.predictor import Predictor
from pipette_launch.facts import Job
from pipette_launch.facts.accelerators import DeviceSpec, words_of
from pipette_launch.facts.known_devices import devices_like
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


def pipette(job: Job, machines: Machines) -> float:
    """Seconds by the product's own predictor."""
    predictor = Predictor(job, measurements(job, machines))
    return predictor.step_time(job.own, range(job.own.world_size)).total_s


def amp_arm(job: Job, machines: Machines) -> float:
    """Seconds by the AMP of Pipette's code."""
    return step_times.amp_arm_s(job, job.own, measurements(job, machines))


def pipette_paper(job: Job, machines: Machines) -> float:
    """Seconds by the latency model of the Pipette paper."""
    return step_times.pipette_s(job, job.own, measurements(job, machines))


def amp_original(job: Job, machines: Machines) -> float:
    """Seconds by AMP's own cost model."""
    return step_times.amp_s(job, job.own, measurements(job, machines))


def varuna_simulator(job: Job, machines: Machines) -> float:
    """Seconds by Varuna's simulator."""
    return step_times.varuna_s(job, job.own, measurements(job, machines))


OURS: StepTime = pipette
BASELINES: dict[str, StepTime] = {
    "AMP": amp_original,
    "AMP of Pipette's code": amp_arm,
    "Pipette (DATE 2024)": pipette_paper,
    "Varuna": varuna_simulator,
}
"""Latency models of others, on the same imagined measurements as ours."""


def hosts_of(world_size: int, devices_per_host: int) -> tuple[int, int]:
    """Hosts and devices on each, for a job that fills them; a job of less than a host has one small host."""
    if world_size <= devices_per_host:
        return 1, world_size
    return -(-world_size // devices_per_host), devices_per_host


def device_of(hardware: str) -> DeviceSpec | None:
    """Return the device type that a description of hardware names: of several, the one with the most words in it."""
    words = {*words_of(hardware)}

    def fit(device: DeviceSpec) -> tuple[int, int]:
        own = {*words_of(device.name)}
        return len(own & words), -len(own)

    return max(devices_like(hardware), key=fit, default=None)
