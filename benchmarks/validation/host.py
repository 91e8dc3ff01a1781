"""Seconds of the host once a step, fitted to step times of Megatron-LM's functional tests of small dense models.

A small model's device waits for its host, so a step takes kernels * launch_s + step_s. Both are fitted by relative
errors over all tests of a GPU type, so no single row decides; tests that are far off count less, as some hold more than
a step (`tunable_overlap`, qk layernorm). `step_s` of `facts.devices` are these figures. Not in it:
`launch_s`, which is 57 us on DGX H100 and 71 us on DGX A100 here, with deterministic kernels and every step logged, and
31 to 36 us in vTrain's times on A100; the 50 us of `facts.devices` lie between.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.validation.golden_jobs import DEVICES, read_layout
from benchmarks.validation.golden_rows import distinct_layouts, read_golden
from benchmarks.validation.latency import Machines, hosts_of, pipette
from benchmarks.validation.options import GOLDEN_ARGS, GOLDEN_ROWS
from benchmarks.validation.tables import number, optional, read_table
from pipette_launch.errors import PipetteError
from pipette_launch.facts import Job
from pipette_launch.facts.devices import DeviceSpec, device_named

LARGEST_HIDDEN = 1024
"""Above, the device has work while its host launches kernels."""
FAR = 0.1
"""A relative error beyond this counts less."""
_ROUNDS = 50
_LAUNCHES_S = (25e-6, 50e-6)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCost:
    """A fit, and how well it explains the tests that it was fitted to."""

    step_s: float
    launch_s: float
    num_tests: int
    median_error: float
    """Relative, of the step times."""


def host_cost(gpu: str) -> HostCost:
    """Fit the host of one GPU type, `A100` or `H100`."""
    device = device_named(DEVICES[gpu])
    cases = list(_cases(gpu, device))
    measured_N = np.array([case[0] for case in cases])
    less_N, more_N = np.array([case[1] for case in cases]).T
    kernels_N = (more_N - less_N) / (_LAUNCHES_S[1] - _LAUNCHES_S[0])
    left_N = measured_N - (less_N - _LAUNCHES_S[0] * kernels_N)
    columns_N2 = np.stack([np.ones_like(kernels_N), kernels_N], axis=1)
    weight_N = 1 / measured_N
    error_N = np.zeros_like(measured_N)
    found_2: NDArray[np.float64] = np.zeros(2)
    for _ in range(_ROUNDS):
        found_2 = np.linalg.lstsq(columns_N2 * weight_N[:, None], left_N * weight_N, rcond=None)[0]
        error_N = np.abs(columns_N2 @ found_2 - left_N) / measured_N
        weight_N = 1 / (measured_N * np.sqrt(np.maximum(1.0, error_N / FAR)))
    step_s, launch_s = found_2.tolist()
    return HostCost(
        step_s=step_s, launch_s=launch_s, num_tests=len(cases), median_error=float(statistics.median(error_N))
    )


def _cases(gpu: str, device: DeviceSpec) -> Iterator[tuple[float, tuple[float, ...]]]:
    """Measured seconds of each layout, and predicted seconds for each of `_LAUNCHES_S`, without the host's constant."""
    table = read_table(GOLDEN_ROWS, {"iter_time_s_median": optional(number)})
    seconds = {row.line: row["iter_time_s_median"] for row in table.rows}
    for layout in distinct_layouts(read_golden(GOLDEN_ROWS, GOLDEN_ARGS).rows):
        times = [seconds[row.line] for row in layout.rows if seconds[row.line]]
        job = read_layout(layout).job if layout.newest.gpu == gpu and times else None
        if job is None or job.model.num_experts or job.model.hybrid or job.own.cp > 1:
            continue
        if job.model.hidden_size > LARGEST_HIDDEN:
            continue
        if "fp8-format" in layout.newest.configuration.args:  # Its casts are kernels that the device model lacks.
            continue
        try:
            yield statistics.median(times), tuple(_priced(job, device, launch_s) for launch_s in _LAUNCHES_S)
        except PipetteError:
            continue


def _priced(job: Job, device: DeviceSpec, launch_s: float) -> float:
    num_hosts, per_host = hosts_of(job.own.world_size, device.devices_per_host)
    this = replace(device, efficiency=replace(device.efficiency, launch_s=launch_s, step_s=0.0))
    return pipette(job, Machines(device=this, num_hosts=num_hosts, devices_per_host=per_host))
