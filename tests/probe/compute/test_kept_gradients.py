"""Peaks of whole stages on a GPU where Transformer Engine keeps an empty weight gradient of each shape."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
from gpu_rules.workspaces import CUBLAS_BYTES, MIB, Allocator
from probe.compute.test_whole_stages import FIRST, on_gpu
from probe.workers import OneRankStore, tiny_options

from pipette_launch.facts import ComputeCase
from pipette_launch.probe.compute import whole_stages
from pipette_launch.probe.compute.peak_memory import CudaMeter
from pipette_launch.probe.compute.whole_stages import StageBench
from pipette_launch.probe.harness import Budget, Lockstep
from pipette_patches.whole_stage import StageRun
from pipette_patches.workload import layers

MATRIX = (8192, 28672)
"""Of a layer of 8,192 hidden and 28,672 inner channels: 448 MiB in bf16."""
CASE = ComputeCase(tp=1, cp=1, micro_batch_size=1)
STAGE_BYTES = 1024 * MIB


def stage_bytes(bench: StageBench, allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> int:
    """The peak that a stage of 1 GiB without linears is read to have."""

    def run_stage(*_: object, **__: object) -> StageRun:
        allocator.train(STAGE_BYTES)
        return StageRun(tally_bytes=0, parts={}, notes=())

    monkeypatch.setattr(whole_stages.whole_stage, "run_stage", run_stage)
    lockstep = Lockstep(store=OneRankStore(), rank=0, world_size=1, timeout_s=1.0)
    bench.measure((FIRST,), lockstep, Budget(started_s=0.0, budget_s=60.0, clock=lambda: 0.0))
    return bench.readings[0].allocator_peak_bytes


def bench_after(allocator: Allocator, folder: Path, *, layer_leaves: bool) -> StageBench:
    """A slot whose libraries hold their workspaces, and that has timed a layer in between."""
    allocator.train(MIB)
    meter = CudaMeter("GPU")
    workspace_bytes = meter.workspace_bytes()
    assert CUBLAS_BYTES == workspace_bytes
    if layer_leaves:
        allocator.train(MIB, MATRIX)
    options = on_gpu(tiny_options(folder, hosts=1, devices=1))
    return StageBench(options=options, slot=0, meter=meter, workspace_bytes=workspace_bytes)


def test_a_workload_leaves_no_empty_gradient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The layer's empty gradients go with the layer, so a stage is measured beside cuBLAS' workspace alone."""
    allocator = Allocator(monkeypatch)
    monkeypatch.setattr(layers, "one_rank", lambda _: nullcontext())
    monkeypatch.setattr(layers, "_build", lambda *_: None)
    bench = bench_after(allocator, tmp_path, layer_leaves=False)
    with layers.workload(bench.options.job, CASE, device_kind="cuda"):
        allocator.train(MIB, MATRIX)
        assert CUBLAS_BYTES + 448 * MIB == allocator.memory_allocated()

    assert CUBLAS_BYTES == allocator.memory_allocated()
    assert STAGE_BYTES + CUBLAS_BYTES == stage_bytes(bench, allocator, monkeypatch)
    assert [] == bench.notes


def test_what_earlier_layers_left_does_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where something else keeps 448 MiB, neither peak has them, so the allocator's reserve is not blamed for them."""
    allocator = Allocator(monkeypatch)
    bench = bench_after(allocator, tmp_path, layer_leaves=True)

    assert STAGE_BYTES + CUBLAS_BYTES == stage_bytes(bench, allocator, monkeypatch)
    assert STAGE_BYTES + CUBLAS_BYTES == bench.readings[0].reserved_peak_bytes
    (note,) = bench.notes
    assert "ran beside 448.00 MiB that earlier layers left on slot node0:0; its peak is counted without them" in note
