"""Compute cases on a device that imports and compiles in first calls: which of them a warm-up of 60 s comes to."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from facts_for_tests import tiny_job
from gpu_rules.first_call import CompilingDevice, Shape
from probe.workers import OneRankStore, tiny_options

from pipette_launch.facts import ComputeCase, Device, Host, Job
from pipette_launch.probe.compute import layers
from pipette_launch.probe.compute.layers import LayerBench
from pipette_launch.probe.compute.peak_memory import Peak
from pipette_launch.probe.compute.slot_speeds import PaceTest
from pipette_launch.probe.harness import Budget, Lockstep
from pipette_patches.workload.layers import MOST_VARIANTS, Part, Workload
from pipette_patches.workload.optimizer import OptimizerStep

CASES = tuple(ComputeCase(tp=tp, cp=1, micro_batch_size=size) for tp in (1, 2, 4, 8) for size in (1, 2, 4))
LAYER_S = 5e-3


@dataclass(frozen=True)
class Stopwatch:
    """Reads the device's clock."""

    device: CompilingDevice

    def mark(self) -> float:
        """Read it."""
        return self.device.clock()

    def seconds(self, before: float, after: float) -> float:
        """Compare two readings."""
        return after - before

    def check_speed(self) -> None:
        """Change no clock."""

    settle = keep_share = check_speed

    def stretch(self) -> float:
        """Measure wall time."""
        return 1.0


@dataclass
class Meter:
    """Counts a byte for the weight of each case that is not gone."""

    weights: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    before_each_case: list[int] = field(default_factory=list)

    def peak(self, work: object) -> Peak:
        """Report an empty device."""
        return Peak(0, 0)

    def workspace_bytes(self) -> int:
        """Count after a garbage collection, as on a GPU."""
        gc.collect()
        return sum(weight() is not None for weight in self.weights)

    def overhead_bytes(self) -> int:
        """Report none."""
        return 0

    def add(self, weight: torch.Tensor) -> None:
        """Count one more weight."""
        # Not through a garbage collection: a case is built without one.
        self.before_each_case.append(sum(one() is not None for one in self.weights))
        self.weights.append(weakref.ref(weight))


def layer_on(device: CompilingDevice, case: ComputeCase) -> Part:
    """A layer with two fused functions; its code differs by gradient mode and by frozen weights."""
    weight = torch.nn.Parameter(torch.ones(1))
    source = torch.ones(1, requires_grad=True)
    shape: Shape = (128 // case.tp, case.micro_batch_size)

    def forward(times: int, *, mode: str = "") -> torch.Tensor:
        for _ in range(times):
            for function in ("bias_dropout_add", "bias_swiglu"):
                device.run(function, shape, mode or f"grad, frozen: {not weight.requires_grad}", LAYER_S)
        return source * weight

    return Part(
        name="layer",
        parameters=(weight,),
        source=source,
        forward=forward,
        chains=True,
        main_grad_dtype=torch.float32,
        recomputed=partial(forward, mode="no grad"),
    )


def measured(
    device: CompilingDevice,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    cases: tuple[ComputeCase, ...] = CASES,
    meter: Meter | None = None,
) -> LayerBench:
    """A slot that is alone, after its first lap and all that 60 s allow."""
    meter = meter or Meter()

    @contextmanager
    def workload(_: Job, case: ComputeCase, *, device_kind: str) -> Iterator[Workload]:
        layer = layer_on(device, case)
        meter.add(layer.parameters[0])
        yield Workload(parts=(layer,), model=None, token_ids=torch.ones(1), notes=())

    def nothing() -> None:
        pass

    def optimizer_step(work: Workload, _: Job) -> OptimizerStep:
        # Megatron's hooks of a parameter lead back to it (distributed_data_parallel.py, _make_backward_post_hook).
        weight: Any = work.parts[0].parameters[0]
        weight.wrapped = [weight]
        return OptimizerStep(run=nothing, run_on_single_elements=nothing, num_parameters=1, gradient_bytes=4)

    monkeypatch.setattr(layers.patches_workload, "workload", workload)
    monkeypatch.setattr(layers, "optimizer_step", optimizer_step)
    monkeypatch.setattr(layers, "stopwatch_for", lambda _: Stopwatch(device))
    monkeypatch.setattr(layers, "time_calls", lambda *_, **__: SimpleNamespace(median_s=0.0))
    monkeypatch.setattr(layers, "PaceTest", partial(PaceTest, clock=device.clock))
    gpu = Device(kind="cuda", uuid="GPU", name="H100", memory_total_bytes=1 << 36, memory_free_bytes=1 << 36)
    hosts = (Host(name="node0", address="10.0.0.1", cores=1, devices=(gpu,)),)
    options = replace(tiny_options(folder, hosts=1, devices=1, job=tiny_job(1), cases=cases), hosts=hosts)
    bench = LayerBench(options=options, slot=0, meter=meter)
    workspace_bytes = bench.first_lap()
    assert 0 == workspace_bytes
    began_s = device.clock()
    lockstep = Lockstep(store=OneRankStore(), rank=0, world_size=1, timeout_s=1)
    bench.measure(lockstep, Budget(started_s=began_s, budget_s=60.0, clock=device.clock))
    return bench


@pytest.mark.parametrize(
    ("import_s", "compile_s", "expected"),
    [(15.0, 0.0, 12), (15.0, 0.5, 12), (60.0, 0.7, 6)],
)
def test_a_slow_first_call_leaves_time_for_half_of_the_cases(
    import_s: float, compile_s: float, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget of 60 s begins behind imports and the first lap, and only other cases forecast the next one."""
    device = CompilingDevice(import_s=import_s, compile_s=compile_s, limit=MOST_VARIANTS)
    bench = measured(device, tmp_path, monkeypatch)

    assert expected <= len({time.case for time in bench.times})
    assert all(sum(time.forward.values_s) < 1.0 for time in bench.times)


def test_a_case_that_compiles_is_no_forecast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second micro-batch compiles for 15 s of the 27 s; then sizes are dynamic, and the other five are timed."""
    device = CompilingDevice(import_s=15.0, compile_s=2.5, limit=MOST_VARIANTS)
    sizes = tuple(ComputeCase(tp=1, cp=1, micro_batch_size=1 << power) for power in range(7))
    bench = measured(device, tmp_path, monkeypatch, sizes)

    assert set(sizes) == {time.case for time in bench.times}


def test_no_case_runs_uncompiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve shapes need more than torch's 8 codes of a function, and fewer than the warm-up allows."""
    tight = CompilingDevice(import_s=0.0, compile_s=0.0)
    measured(tight, tmp_path, monkeypatch)
    wide = CompilingDevice(import_s=0.0, compile_s=0.0, limit=MOST_VARIANTS)
    measured(wide, tmp_path, monkeypatch)

    assert tight.uncompiled > 0
    assert 0 == wide.uncompiled


def test_boost_clocks_are_over_before_the_first_timing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seconds at a clock that is 8 % faster are in no timed value: GPUs work for four seconds before the first."""
    device = CompilingDevice(import_s=0.0, compile_s=0.0, limit=MOST_VARIANTS, boost_s=2.0, boost=0.92)
    bench = measured(device, tmp_path, monkeypatch)

    assert pytest.approx(2 * LAYER_S) == min(min(time.forward.values_s) for time in bench.times)
    assert bench.times[0].case == CASES[0]


def test_the_layers_of_a_case_end_before_the_next_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first lap leaves no layer that would count as a workspace, and no case is built beside another one."""
    device, meter = CompilingDevice(import_s=0.0, compile_s=0.0, limit=MOST_VARIANTS), Meter()
    measured(device, tmp_path, monkeypatch, meter=meter)

    assert [0] * (1 + len(CASES)) == meter.before_each_case
    assert 0 == meter.workspace_bytes()
