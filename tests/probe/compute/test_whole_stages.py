"""Whole stages, dealt out and judged; the stages themselves are made up here (tests/patches/test_whole_stage.py)."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from facts_for_tests import tiny_job, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from probe.workers import OneRankStore, tiny_options

from pipette_launch.cost.layers.parameters import stage_parameters
from pipette_launch.facts import Device, Host, Layout, StageReading
from pipette_launch.facts.measurements import memory_digest
from pipette_launch.facts.messages import StageCase
from pipette_launch.probe.compute import whole_stages
from pipette_launch.probe.compute.bench import state_bytes
from pipette_launch.probe.compute.peak_memory import Peak
from pipette_launch.probe.compute.whole_stages import StageBench, cases_of
from pipette_launch.probe.harness import Budget, Lockstep
from pipette_launch.probe.options import ProbeOptions
from pipette_patches.whole_stage import StageRun
from pipette_patches.workload.layers import WorkloadError

GIB = 1 << 30
FIRST, SECOND = (StageCase(layout=Layout(pp=2), pp_rank=rank) for rank in range(2))


@given(num_cases=st.integers(0, 30), num_slots=st.integers(1, 9))
def test_every_case_is_dealt_once_and_the_best_come_first(num_cases: int, num_slots: int) -> None:
    """In each turn all slots make a call, and what is measured in a turn is more promising than what follows."""
    cases = [StageCase(layout=Layout(dp=number + 1), pp_rank=0) for number in range(num_cases)]
    hands = [cases_of(cases, slot, num_slots) for slot in range(num_slots)]
    turns = list(zip(*hands, strict=True))

    assert cases == [case for turn in turns for case in turn if case is not None]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=2, tp=2),
        Layout(dp=4, use_distributed_optimizer=True),
        Layout(pp=4, layers_per_chunk=(1, 1, 2, 4)),
        Layout(tp=2, ep=2, dp=2),
    ],
)
@pytest.mark.parametrize("experts", [{}, {"num_experts": 4, "moe_layer_freq": (1,) * 8}])
def test_the_least_that_a_stage_holds_is_never_too_much(layout: Layout, experts: dict[str, object]) -> None:
    """It is below the true count of states, and no norm or bias more than a fifth below."""
    model = tiny_model(num_layers=8, params_dtype="bf16", untie_embeddings_and_output_weights=True, **experts)
    job = tiny_job(layout.world_size, model=model, own=layout)
    shards = layout.dp if layout.use_distributed_optimizer else 1
    for pp_rank, parameters in enumerate(stage_parameters(model, layout)):
        true = parameters.count * (2 + 4 + 12 / shards)

        assert 0.8 * true < state_bytes(job, layout, pp_rank) <= true


class Meter:
    """A device whose allocator kept 5 bytes of workspaces, holds 100 more at the peak, of 128 reserved."""

    def peak(self, work: Callable[[], None]) -> Peak:
        """Do the work."""
        work()
        return Peak(100, 500, idle_bytes=5, reserved_bytes=128)

    def overhead_bytes(self) -> int:
        """Context."""
        return GIB

    def workspace_bytes(self) -> int:
        """Workspaces."""
        return 5


def on_gpu(options: ProbeOptions, free_bytes: int = 8 * GIB) -> ProbeOptions:
    """The same on hosts of GPUs."""
    device = Device(kind="cuda", uuid="GPU", name="H100", memory_total_bytes=80 * GIB, memory_free_bytes=free_bytes)
    hosts = (Host(name="node0", address="10.0.0.1", cores=1, devices=(device,)),)
    return replace(options, hosts=hosts)


def found(
    options: ProbeOptions, *cases: StageCase, clock: Callable[[], float] = lambda: 0.0
) -> tuple[list[StageReading], list[str]]:
    """What a slot alone finds."""
    bench = StageBench(options=options, slot=0, meter=Meter(), workspace_bytes=5)
    lockstep = Lockstep(store=OneRankStore(), rank=0, world_size=1, timeout_s=1.0)
    bench.measure(cases, lockstep, Budget(started_s=0.0, budget_s=60.0, clock=clock))
    return bench.readings, bench.notes


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Layout, int]]:
    """The stages that were run, each of which holds 77 bytes of tensors."""
    done: list[tuple[Layout, int]] = []

    def run_stage(job: object, layout: Layout, pp_rank: int, *, device_kind: str) -> StageRun:
        done.append((layout, pp_rank))
        return StageRun(tally_bytes=77, parts={}, notes=())

    monkeypatch.setattr(whole_stages.whole_stage, "run_stage", run_stage)
    return done


def test_a_gpu_reads_allocator_and_driver(tmp_path: Path, ran: list[tuple[Layout, int]]) -> None:
    """Workspaces that were there before belong to the peak: a training has them too."""
    readings, notes = found(on_gpu(tiny_options(tmp_path, hosts=1, devices=1)), SECOND)

    assert [(Layout(pp=2), 1)] == ran
    assert [] == notes
    assert [
        StageReading(
            job_digest=memory_digest(tiny_job(1)),
            layout=Layout(pp=2),
            pp_rank=1,
            slot=0,
            allocator_peak_bytes=105,
            reserved_peak_bytes=128,
            device_peak_bytes=500,
        )
    ] == readings


def test_a_cpu_counts_tensors(tmp_path: Path, ran: list[tuple[Layout, int]]) -> None:
    """The tensors' own bytes stand for the allocator's, the resident set for the device's."""
    ((reading,), _) = found(tiny_options(tmp_path, hosts=1, devices=1), FIRST)

    assert (77, 500) == (reading.allocator_peak_bytes, reading.device_peak_bytes)


@pytest.mark.usefixtures("ran")
def test_running_out_of_memory_is_a_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a stage that does not fit is known not to; the next one is measured all the same."""

    def run_stage(job: object, layout: Layout, pp_rank: int, *, device_kind: str) -> StageRun:
        if pp_rank == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return StageRun(tally_bytes=0, parts={}, notes=())

    monkeypatch.setattr(whole_stages.whole_stage, "run_stage", run_stage)
    readings, notes = found(on_gpu(tiny_options(tmp_path, hosts=1, devices=1)), FIRST, SECOND)

    assert [(0, True), (1, False)] == [(reading.pp_rank, reading.ran_out) for reading in readings]
    assert ["stages: stage 0 of tp1 pp2 dp1 mbs1 ran out of memory on slot node0:0"] == notes


@pytest.mark.usefixtures("ran")
def test_a_stage_that_megatron_refuses_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its words reach the user, and there is no reading."""

    def refuse(*_args: object, **_kwargs: object) -> StageRun:
        raise WorkloadError("megatron-core refuses it")

    monkeypatch.setattr(whole_stages.whole_stage, "run_stage", refuse)

    assert ([], ["stages: megatron-core refuses it"]) == found(tiny_options(tmp_path, hosts=1, devices=1), FIRST)


def test_what_cannot_fit_is_not_begun(tmp_path: Path, ran: list[tuple[Layout, int]]) -> None:
    """On CPU by the prediction, for the kernel kills without a word; on a GPU by the states alone."""
    options = tiny_options(tmp_path, hosts=1, devices=1)
    large = replace(FIRST, predicted_bytes=7 * GIB)
    readings, notes = found(options, large)

    assert [] == readings == ran
    assert ["stages: stage 0 of tp1 pp2 dp1 mbs1 needs 11.20 GiB, slot node0:0 has 8.00 GiB"] == notes
    assert 1 == len(found(on_gpu(options), large)[0])
    assert ["stages: stage 0 of tp1 pp2 dp1 mbs1 needs 1.00 GiB, slot node0:0 has 1.00 GiB"] == found(
        on_gpu(options, free_bytes=GIB), large
    )[1]


def test_the_budget_ends_it(tmp_path: Path, ran: list[tuple[Layout, int]]) -> None:
    """A turn took 40 s of 60: a second one would not end in time, and that is said."""
    options = tiny_options(tmp_path, hosts=1, devices=1)
    readings, notes = found(options, FIRST, SECOND, clock=lambda: 40.0 * len(ran))

    assert 1 == len(readings)
    assert ["stages: 1 of 2 were not measured for want of time"] == notes


def test_no_stages_cost_nothing(tmp_path: Path) -> None:
    """Without advice there is nothing to load and nobody to meet."""
    assert ([], []) == found(tiny_options(tmp_path, hosts=1, devices=1))
