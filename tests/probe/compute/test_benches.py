"""Tests of the compute benches: which slot measures which case, failures, and how times become samples."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from facts_for_tests import changed_job, tiny_job, tiny_model
from gpu_rules.first_call import CompilingDevice, Shape
from gpu_rules.workspaces import CUBLAS_BYTES, MIB, Allocator
from hypothesis import given
from hypothesis import strategies as st
from probe.workers import OneRankStore, tiny_options

from pipette_launch.facts import ComputeCase, ComputeTime, Device, Host, Job, Layout, Samples, StageReading
from pipette_launch.facts.measurements import memory_digest
from pipette_launch.facts.messages import StageCase
from pipette_launch.probe.compute import benches, timing
from pipette_launch.probe.compute.benches import (
    LayerBench,
    StageBench,
    case_rounds,
    mean_time,
    stage_turns,
    weight_bytes,
)
from pipette_launch.probe.compute.own_script import OwnScript
from pipette_launch.probe.compute.slot_speeds import PaceTest
from pipette_launch.probe.instruments import CpuMeter, CudaMeter, Peak
from pipette_launch.probe.lockstep import Budget, Lockstep
from pipette_launch.probe.messages import WarmupOrder
from pipette_launch.probe.progress import Progress
from pipette_patches.run import Program
from pipette_patches.whole_stage import StageRun
from pipette_patches.workload import MOST_VARIANTS, OptimizerStep, Part, Workload, WorkloadError

CASES = tuple(ComputeCase(tp=1, cp=1, micro_batch_size=size) for size in (1, 2, 3, 4))
SCRIPT = OwnScript(program=Program(patches=(), name="s.py", is_module=False, arguments=()), mocks_data=False)


def test_two_slots_share_four_cases_by_hand() -> None:
    """Both slots measure the reference. The others go round in order, and a slot without a case repeats one."""
    assert (CASES[0], CASES[1], CASES[3]) == case_rounds(CASES, 0, 2)
    assert (CASES[0], CASES[2], CASES[1]) == case_rounds(CASES, 1, 2)
    assert (CASES[0],) == case_rounds(CASES[:1], 5, 8)


@given(num_cases=st.integers(1, 20), slots=st.integers(1, 8))
def test_every_case_is_dealt_and_all_slots_stay_busy(num_cases: int, slots: int) -> None:
    """All slots get the reference and the same number of cases; every other case goes to at least one slot."""
    cases = tuple(ComputeCase(tp=1, cp=1, micro_batch_size=size + 1) for size in range(num_cases))
    hands = [case_rounds(cases, slot, slots) for slot in range(slots)]

    assert all(hand[0] == cases[0] for hand in hands)
    assert set(cases[1:]) == {case for hand in hands for case in hand[1:]}
    assert {1 + -(-(num_cases - 1) // slots)} == {len(hand) for hand in hands}


def bench(folder: Path, **changes: object) -> LayerBench:
    """Return the bench of a slot that is alone on its host."""
    options = tiny_options(folder, hosts=1, devices=1, **{"cases": CASES[:2], **changes})
    return LayerBench(options=options, slot=0, meter=CpuMeter(), script=SCRIPT)


def measure(slot: LayerBench, now_s: float = 0.0) -> None:
    """Run the bench, with ten seconds left by default."""
    lockstep = Lockstep(store=OneRankStore(), rank=0, world_size=1, timeout_s=1)
    slot.measure(lockstep, Budget(started_s=0, budget_s=10, clock=lambda: now_s))


def work_of(part: Part) -> Workload:
    """Return a workload with a single part, without a model."""
    return Workload(parts=(part,), notes=(), wrapped=None, optimizer=None)


def failing_workload(error: Exception, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for megatron-core: the first builds fail, and the others have no parts."""
    left = deque([error] * times)

    @contextmanager
    def workload(*_: object, **__: object) -> Iterator[Workload]:
        if left:
            raise left.popleft()
        weight = torch.nn.Parameter(torch.ones(1))
        part = Part(
            name="layer",
            parameters=(weight,),
            source=torch.ones(1, requires_grad=True),
            forward=lambda _: weight * 1.0,
            chains=True,
            accumulating=contextlib.nullcontext,
            recomputed=lambda _: weight * 1.0,
        )
        yield work_of(part)

    monkeypatch.setattr(benches.patches_workload, "load", lambda _: None)
    monkeypatch.setattr(benches.patches_workload, "workload", workload)


def test_a_kind_with_two_windows_has_its_mean_time() -> None:
    """Three layers of 2 s and one of 6 s take 3 s in the mean; without recompute of one there is none of the kind."""
    case = CASES[0]

    def of(seconds: float, recompute: Samples | None) -> ComputeTime:
        passes = dict.fromkeys(("forward", "input_grad", "weight_grad"), Samples(values_s=(seconds,)))
        return ComputeTime(case=case, part="layer", slot=0, recompute=recompute, **passes)

    narrow, wide = (of(seconds, Samples(values_s=(seconds, 0.1))) for seconds in (2.0, 6.0))

    assert of(3.0, Samples(values_s=(3.0, 0.1))) == mean_time([narrow.times(0.75), wide.times(0.25)])
    assert mean_time([narrow, of(6.0, None)]).recompute is None


@pytest.mark.parametrize(
    ("error", "note"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "compute: tp1 cp1 mbs1 ran out of memory on slot node0:0"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "compute: tp1 cp1 mbs1 ran out of memory"),
        (WorkloadError("megatron-core refuses it"), "compute: megatron-core refuses it"),
    ],
)
def test_a_case_that_cannot_be_had_is_noted_and_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, note: str
) -> None:
    """The bench measures the next case after a failure."""
    failing_workload(error, 1, monkeypatch)
    slot = bench(tmp_path)
    measure(slot)

    assert [CASES[1]] == [timed.case for timed in slot.found.compute]
    assert [CASES[1]] == [reading.case for reading in slot.found.memory]
    assert [True] == [line.startswith(note) for line in slot.found.notes]


def test_a_script_that_fails_with_its_graphs_runs_without_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without graphs the flags of graphs do not count as timed, so the device model adds their effect."""
    failing_workload(WorkloadError("no graph"), 1, monkeypatch)
    monkeypatch.setattr(benches, "optimizer_step", lambda _: SimpleNamespace(run=int))
    slot = bench(tmp_path)
    slot.script = replace(SCRIPT, captures=True)
    job = changed_job(slot.options.job, performance_flags=("--cuda-graph-impl local", "--fp8-format hybrid"))
    before = slot.script.timed_flags(job)

    slot.first_lap()

    assert ["compute: layers were timed without CUDA graphs, because no graph"] == list(slot.found.notes)
    assert ("--cuda-graph-impl local", "--fp8-format hybrid") == before
    assert ("--fp8-format hybrid",) == slot.script.timed_flags(job)


@pytest.mark.parametrize("error", [WorkloadError("it fails"), MemoryError()])
def test_a_first_lap_that_fails_leaves_the_reason_to_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A script without graphs is built once, and a lack of memory takes no graphs away."""
    failing_workload(error, 1, monkeypatch)
    slot = bench(tmp_path)
    slot.script = replace(SCRIPT, captures=isinstance(error, MemoryError))

    slot.first_lap()

    assert () == slot.found.notes
    assert isinstance(error, MemoryError) == slot.script.captures


def test_a_spent_budget_leaves_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two cases does not begin."""
    failing_workload(RuntimeError(), 0, monkeypatch)
    monkeypatch.setattr(benches, "optimizer_step", lambda *_: compute_nothing())
    slot = bench(tmp_path)
    measure(slot, now_s=99.0)

    assert [CASES[0]] == [timed.case for timed in slot.found.compute]


def test_cases_are_gone_through_again_while_time_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of all sweeps are joined, memory is read once, and a slot keeps to its budget."""
    failing_workload(RuntimeError(), 0, monkeypatch)
    monkeypatch.setattr(benches, "optimizer_step", lambda *_: compute_nothing())
    # Else a machine that is busy for a moment takes fewer.
    monkeypatch.setattr(timing, "num_values", lambda *_: 20)
    counts = {}
    for sweeps in (1, 3):
        monkeypatch.setattr(benches, "SWEEPS", {"cpu": sweeps})
        slot = bench(tmp_path)
        measure(slot)
        assert (
            list(CASES[:2])
            == [timed.case for timed in slot.found.compute]
            == [reading.case for reading in slot.found.memory]
        )
        counts[sweeps] = [len(timed.forward.values_s) for timed in slot.found.compute]

    (reference, once), (again, thrice) = counts[1], counts[3]
    assert (reference, 3 * once) == (again, thrice)


class SlowSlot:
    """A lockstep of rank 0 with a slot that prepares each case for 1 s and times it for 4 s; `now_s` is the clock."""

    progress = Progress()

    def __init__(self) -> None:
        self.now_s = self.peer_s = 0.0

    def agree(self, decide: Callable[[], bool]) -> bool:
        """Return rank 0's decision."""
        return decide()

    def barrier(self, _: float) -> None:
        """Wait for the slow slot."""
        self.now_s = self.peer_s = max(self.now_s, self.peer_s)

    def work(self, own_s: float, peer_s: float) -> None:
        """Let both slots work from the last barrier on."""
        self.now_s += own_s
        self.peer_s += peer_s


def test_the_slowest_slot_decides_whether_there_is_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 needs 0.2 s for a case and another slot 5 s, so no case begins that would end after 18 of 40 s."""
    others = tuple(ComputeCase(tp=1, cp=1, micro_batch_size=2 + size) for size in range(8))
    slots = SlowSlot()
    slot = bench(tmp_path, cases=(CASES[0], *others))
    monkeypatch.setattr(LayerBench, "_ready", lambda *_: slots.work(0.1, 1.0) or SimpleNamespace())
    monkeypatch.setattr(LayerBench, "_reference", lambda *_: slots.work(0.1, 4.0))
    monkeypatch.setattr(LayerBench, "_run", lambda *_, **__: slots.work(0.1, 4.0))
    monkeypatch.setattr(LayerBench, "_loading", lambda *_: None)
    slot.measure(slots, Budget(started_s=0, budget_s=40, clock=lambda: slots.now_s))  # type: ignore[arg-type]

    assert 15.0 == max(slots.now_s, slots.peer_s)


def test_a_case_that_was_refused_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each failure is noted once, although the slot goes through its cases three times."""
    failing_workload(WorkloadError("megatron-core refuses it"), 2, monkeypatch)
    slot = bench(tmp_path)
    measure(slot)

    assert CASES[:2] == slot.found.refused
    assert ((), 2) == (slot.found.compute, len(slot.found.notes))


def test_an_optimizer_that_is_not_known_refuses_no_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The case itself is measured; a note names the optimizer."""
    failing_workload(RuntimeError(), 0, monkeypatch)

    def refuse(*_: object) -> OptimizerStep:
        raise WorkloadError("the step of 'muon' is not measured")

    monkeypatch.setattr(benches, "optimizer_step", refuse)
    slot = bench(tmp_path)
    measure(slot)

    assert () == slot.found.refused
    assert ("compute: the step of 'muon' is not measured",) == slot.found.notes
    assert list(CASES[:2]) == [timed.case for timed in slot.found.compute]


@pytest.mark.parametrize(("now_s", "expected"), [(0.0, [True, True]), (4.0, [True, False])])
def test_recompute_is_timed_while_there_is_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now_s: float, expected: list[bool]
) -> None:
    """The reference always times recompute; other cases do so until a quarter of the budget is spent."""
    failing_workload(RuntimeError(), 0, monkeypatch)
    monkeypatch.setattr(benches, "optimizer_step", lambda *_: compute_nothing())
    slot = bench(tmp_path)
    measure(slot, now_s=now_s)

    assert expected == [timed.recompute is not None for timed in slot.found.compute]


def test_the_pace_of_the_reference_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot without slow peers has one pace; a reference that cannot run has no pace."""
    failing_workload(torch.OutOfMemoryError("CUDA out of memory"), 1, monkeypatch)
    refused, usual = bench(tmp_path), bench(tmp_path)
    monkeypatch.setattr(benches, "optimizer_step", lambda *_: compute_nothing())
    measure(refused)
    measure(usual)

    assert [[], [0]] == [[pace.turn for pace in slot.found.paces] for slot in (refused, usual)]


def compute_nothing() -> OptimizerStep:
    """Return an optimizer step without work."""
    return OptimizerStep(run=lambda: None, run_on_single_elements=lambda: None, num_parameters=1, gradient_bytes=4)


def test_what_the_optimizer_does_for_each_tensor_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """3 s for 10 parameters of 40 bytes; 1 s of it also for the same number of one-element tensors."""
    failing_workload(RuntimeError(), 0, monkeypatch)
    step = OptimizerStep(run=nothing, run_on_single_elements=nothing, num_parameters=10, gradient_bytes=40)
    monkeypatch.setattr(benches, "optimizer_step", lambda *_: step)
    seconds = iter((3.0, 1.0))
    monkeypatch.setattr(benches, "time_calls", lambda *_, **__: SimpleNamespace(median_s=next(seconds)))
    slot = bench(tmp_path)
    measure(slot)

    assert (0.2, 0.025) == (slot.found.optimizer_s_per_parameter, slot.found.gradient_s_per_byte)


def nothing() -> None:
    """Take no time."""


def test_any_other_error_is_not_swallowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the machine is not treated as a lack of memory."""
    failing_workload(RuntimeError("illegal instruction"), 1, monkeypatch)

    with pytest.raises(RuntimeError, match="illegal instruction"):
        measure(bench(tmp_path))


def test_a_layer_larger_than_the_memory_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel would kill the worker, so the bench compares needed and free bytes first."""
    failing_workload(RuntimeError("must not be built"), 1, monkeypatch)
    huge = replace(tiny_job(1), model=tiny_model(hidden_size=1 << 17, ffn_hidden_size=1 << 19))
    slot = bench(tmp_path, job=huge, cases=CASES[:1])
    measure(slot)

    assert ["compute: tp1 cp1 mbs1 needs"] == [note[:27] for note in slot.found.notes]
    assert slot.found.notes[0].endswith("for one layer's weights and gradients, but slot node0:0 has 8.00 GiB")


def test_weight_bytes_by_hand() -> None:
    """Hidden 64, FFN 256, vocabulary 256, tied, fp32: 66112 parameters at 4 + 4 + 4 bytes, halved by tp 2."""
    parameters = (64 * 192 + 192 + 64 * 64 + 64) + (2 * 64 * 256 + 256 + 64) + 256 * 64
    case = ComputeCase(tp=2, cp=1, micro_batch_size=1)

    assert parameters // 2 * 12 == weight_bytes(tiny_job(1), case)


def test_weight_bytes_of_one_ranks_share_of_the_experts() -> None:
    """Half of four experts with 2 * 64 * 32 + 96 parameters, also with multi-token prediction; tp splits none."""
    experts = {"num_experts": 4, "moe_layer_freq": (1,) * 4, "moe_ffn_hidden_size": 32}
    job = replace(tiny_job(1), model=tiny_model(mtp_num_layers=1, **experts), own=Layout(dp=2, ep=2))

    parameters = 2 * 2 * (2 * 64 * 32 + 32 + 64) + 256 * 64 // 2
    assert parameters * 12 == weight_bytes(job, ComputeCase(tp=2, cp=1, micro_batch_size=1))


CASES_IN_TURN = tuple(ComputeCase(tp=tp, cp=1, micro_batch_size=size) for tp in (1, 2, 4, 8) for size in (1, 2, 4))
LAYER_S = 5e-3


@dataclass(frozen=True)
class Stopwatch:
    """Reads the simulated device's clock."""

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
    """Counts one byte for each living weight."""

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
    """Return a layer with two fused functions; its code depends on gradient mode and on frozen weights."""
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
        accumulating=contextlib.nullcontext,
        recomputed=partial(forward, mode="no grad"),
    )


def measured(
    device: CompilingDevice,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    cases: tuple[ComputeCase, ...] = CASES_IN_TURN,
    meter: Meter | None = None,
) -> LayerBench:
    """Return the bench of a single slot after its first lap and 60 s of measuring."""
    meter = meter or Meter()

    @contextmanager
    def workload(_: Job, case: ComputeCase, *, device_kind: str, **_program: object) -> Iterator[Workload]:
        layer = layer_on(device, case)
        meter.add(layer.parameters[0])
        yield work_of(layer)

    def nothing() -> None:
        pass

    def optimizer_step(work: Workload) -> OptimizerStep:
        # Megatron's hooks of a parameter lead back to it (distributed_data_parallel.py, _make_backward_post_hook).
        weight: Any = work.parts[0].parameters[0]
        weight.wrapped = [weight]
        return OptimizerStep(run=nothing, run_on_single_elements=nothing, num_parameters=1, gradient_bytes=4)

    monkeypatch.setattr(benches.patches_workload, "workload", workload)
    monkeypatch.setattr(benches, "optimizer_step", optimizer_step)
    monkeypatch.setattr(benches, "stopwatch_for", lambda _: Stopwatch(device))
    monkeypatch.setattr(benches, "time_calls", lambda *_, **__: SimpleNamespace(median_s=0.0))
    monkeypatch.setattr(benches, "PaceTest", partial(PaceTest, clock=device.clock))
    gpu = Device(kind="cuda", uuid="GPU", name="H100", memory_total_bytes=1 << 36, memory_free_bytes=1 << 36)
    hosts = (Host(name="node0", address="10.0.0.1", cores=1, devices=(gpu,)),)
    options = replace(tiny_options(folder, hosts=1, devices=1, job=tiny_job(1), cases=cases), hosts=hosts)
    bench = LayerBench(options=options, slot=0, meter=meter, script=SCRIPT)
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
    """The budget begins after imports and the first lap, and only other cases predict the next one."""
    device = CompilingDevice(import_s=import_s, compile_s=compile_s, limit=MOST_VARIANTS)
    bench = measured(device, tmp_path, monkeypatch)

    assert expected <= len({time.case for time in bench.found.compute})
    assert all(sum(time.forward.values_s) < 1.0 for time in bench.found.compute)


def test_a_case_that_compiles_is_no_forecast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second micro-batch compiles for 15 of 27 s; then sizes are dynamic, and the other five are timed."""
    device = CompilingDevice(import_s=15.0, compile_s=2.5, limit=MOST_VARIANTS)
    sizes = tuple(ComputeCase(tp=1, cp=1, micro_batch_size=1 << power) for power in range(7))
    bench = measured(device, tmp_path, monkeypatch, sizes)

    assert set(sizes) == {time.case for time in bench.found.compute}


def test_no_case_runs_uncompiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve shapes need more than torch's 8 codes of a function, and fewer than the warm-up allows."""
    tight = CompilingDevice(import_s=0.0, compile_s=0.0)
    measured(tight, tmp_path, monkeypatch)
    wide = CompilingDevice(import_s=0.0, compile_s=0.0, limit=MOST_VARIANTS)
    measured(wide, tmp_path, monkeypatch)

    assert tight.uncompiled > 0
    assert 0 == wide.uncompiled


def test_boost_clocks_are_over_before_the_first_timing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs work for four seconds first, so two seconds of an 8 % faster clock are in no value."""
    device = CompilingDevice(import_s=0.0, compile_s=0.0, limit=MOST_VARIANTS, boost_s=2.0, boost=0.92)
    bench = measured(device, tmp_path, monkeypatch)

    assert pytest.approx(2 * LAYER_S) == min(min(time.forward.values_s) for time in bench.found.compute)
    assert bench.found.compute[0].case == CASES_IN_TURN[0]


def test_the_layers_of_a_case_end_before_the_next_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first lap leaves no layer that would count as a workspace, and no two cases exist at the same time."""
    device, meter = CompilingDevice(import_s=0.0, compile_s=0.0, limit=MOST_VARIANTS), Meter()
    measured(device, tmp_path, monkeypatch, meter=meter)

    assert [0] * (1 + len(CASES_IN_TURN)) == meter.before_each_case
    assert 0 == meter.workspace_bytes()


MATRIX = (8192, 28672)
"""Weight gradient of a layer with 8,192 hidden and 28,672 inner channels: 448 MiB in bf16."""
CASE = ComputeCase(tp=1, cp=1, micro_batch_size=1)
STAGE_BYTES = 1024 * MIB


def stage_bytes(bench: StageBench, allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the measured peak of a stage of 1 GiB without linear layers."""

    def run_stage(*_: object, **__: object) -> StageRun:
        allocator.train(STAGE_BYTES)
        return StageRun(tally_bytes=0, parts={})

    monkeypatch.setattr(benches.whole_stage, "run_stage", run_stage)
    lockstep = Lockstep(store=OneRankStore(), rank=0, world_size=1, timeout_s=1.0)
    bench.measure((FIRST,), lockstep, Budget(started_s=0.0, budget_s=60.0, clock=lambda: 0.0))
    return bench.found.stages[0].allocator_peak_bytes


def bench_after(allocator: Allocator, folder: Path, *, layer_leaves: bool) -> StageBench:
    """Return the bench of a slot with library workspaces, after it has timed a layer."""
    allocator.train(MIB)
    meter = CudaMeter("GPU")
    workspace_bytes = meter.workspace_bytes()
    assert CUBLAS_BYTES == workspace_bytes
    if layer_leaves:
        allocator.train(MIB, MATRIX)
    options = on_gpu(tiny_options(folder, hosts=1, devices=1))
    return StageBench(options=options, slot=0, meter=meter, script=SCRIPT, workspace_bytes=workspace_bytes)


def test_what_earlier_layers_left_does_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Memory of 448 MiB kept by earlier layers is in neither peak of the stage."""
    allocator = Allocator(monkeypatch)
    bench = bench_after(allocator, tmp_path, layer_leaves=True)

    assert STAGE_BYTES + CUBLAS_BYTES == stage_bytes(bench, allocator, monkeypatch)
    assert STAGE_BYTES + CUBLAS_BYTES == bench.found.stages[0].reserved_peak_bytes
    (note,) = bench.found.notes
    assert "ran beside 448.00 MiB that earlier layers left on slot node0:0; its peak does not include them" in note


GIB = 1 << 30
TIMES: dict[str, Any] = {"num_microbatches": 3, "schedule_s": 0.3, "update_s": 0.02}
FIRST, SECOND = (StageCase(layout=Layout(pp=2), pp_rank=rank) for rank in range(2))


@given(num_cases=st.integers(0, 30), num_slots=st.integers(1, 9))
def test_every_case_is_dealt_once_and_the_best_come_first(num_cases: int, num_slots: int) -> None:
    """All slots take part in each turn, and earlier turns have more promising cases."""
    cases = [StageCase(layout=Layout(dp=number + 1), pp_rank=0) for number in range(num_cases)]
    hands = [stage_turns(cases, slot, num_slots) for slot in range(num_slots)]
    turns = list(zip(*hands, strict=True))

    assert cases == [case for turn in turns for case in turn if case is not None]


class StageMeter:
    """A device with 5 bytes of workspaces and a peak of 100 more, of 128 reserved."""

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


def on_gpu(options: WarmupOrder, free_bytes: int = 8 * GIB) -> WarmupOrder:
    """Return the same order for hosts with GPUs."""
    device = Device(kind="cuda", uuid="GPU", name="H100", memory_total_bytes=80 * GIB, memory_free_bytes=free_bytes)
    hosts = (Host(name="node0", address="10.0.0.1", cores=1, devices=(device,)),)
    return replace(options, hosts=hosts)


def found(
    options: WarmupOrder, *cases: StageCase, clock: Callable[[], float] = lambda: 0.0
) -> tuple[list[StageReading], list[str]]:
    """Return the readings and notes of a single slot."""
    bench = StageBench(options=options, slot=0, meter=StageMeter(), script=SCRIPT, workspace_bytes=5)
    lockstep = Lockstep(store=OneRankStore(), rank=0, world_size=1, timeout_s=1.0)
    bench.measure(cases, lockstep, Budget(started_s=0.0, budget_s=60.0, clock=clock))
    return list(bench.found.stages), list(bench.found.notes)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Layout, int]]:
    """Return the stages that were run, each with 77 bytes of tensors."""
    done: list[tuple[Layout, int]] = []

    def run_stage(job: object, layout: Layout, pp_rank: int, **_: object) -> StageRun:
        done.append((layout, pp_rank))
        return StageRun(tally_bytes=77, parts={}, times=TIMES)

    monkeypatch.setattr(benches.whole_stage, "run_stage", run_stage)
    return done


def test_a_gpu_reads_allocator_and_driver(tmp_path: Path, ran: list[tuple[Layout, int]]) -> None:
    """Workspaces from before count in the peak, because a training has them too."""
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
            **TIMES,
        )
    ] == readings


def test_a_cpu_counts_tensors(tmp_path: Path, ran: list[tuple[Layout, int]]) -> None:
    """On a CPU the tensors' bytes replace the allocator's, and the resident set replaces the device's."""
    ((reading,), _) = found(tiny_options(tmp_path, hosts=1, devices=1), FIRST)

    assert (77, 500) == (reading.allocator_peak_bytes, reading.device_peak_bytes)


@pytest.mark.usefixtures("ran")
def test_running_out_of_memory_is_a_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a stage that runs out of memory is a result, and the next stage is measured."""

    def run_stage(job: object, layout: Layout, pp_rank: int, **_: object) -> StageRun:
        if pp_rank == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return StageRun(tally_bytes=0, parts={})

    monkeypatch.setattr(benches.whole_stage, "run_stage", run_stage)
    readings, notes = found(on_gpu(tiny_options(tmp_path, hosts=1, devices=1)), FIRST, SECOND)

    assert [(0, True), (1, False)] == [(reading.pp_rank, reading.ran_out) for reading in readings]
    assert ["stages: stage 0 of tp1 pp2 dp1 mbs1 ran out of memory on slot node0:0"] == notes


@pytest.mark.usefixtures("ran")
def test_a_stage_that_megatron_refuses_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The note has Megatron's message, and there is no reading."""

    def refuse(*_args: object, **_kwargs: object) -> StageRun:
        raise WorkloadError("megatron-core refuses it")

    monkeypatch.setattr(benches.whole_stage, "run_stage", refuse)

    assert ([], ["stages: megatron-core refuses it"]) == found(tiny_options(tmp_path, hosts=1, devices=1), FIRST)


def test_what_cannot_fit_is_not_begun(tmp_path: Path, ran: list[tuple[Layout, int]]) -> None:
    """A CPU compares the prediction with the free memory, a GPU only the states."""
    options = tiny_options(tmp_path, hosts=1, devices=1)
    large = replace(FIRST, predicted_bytes=7 * GIB, state_bytes=GIB // 2)
    readings, notes = found(options, large)

    assert [] == readings == ran
    assert ["stages: stage 0 of tp1 pp2 dp1 mbs1 needs 11.20 GiB, but slot node0:0 has 8.00 GiB"] == notes
    assert 1 == len(found(on_gpu(options), large)[0])
    assert ["stages: stage 0 of tp1 pp2 dp1 mbs1 needs 1.50 GiB, but slot node0:0 has 1.00 GiB"] == found(
        on_gpu(options, free_bytes=GIB), large
    )[1]


def test_the_budget_ends_it(tmp_path: Path, ran: list[tuple[Layout, int]]) -> None:
    """A turn took 40 of 60 s, so a second one does not begin, and a note reports that."""
    options = tiny_options(tmp_path, hosts=1, devices=1)
    readings, notes = found(options, FIRST, SECOND, clock=lambda: 40.0 * len(ran))

    assert 1 == len(readings)
    assert ["stages: 1 of 2 were not measured, because the budget was spent"] == notes


def test_no_stages_cost_nothing(tmp_path: Path) -> None:
    """Without advice nothing is loaded, and ranks do not meet."""
    assert ([], []) == found(tiny_options(tmp_path, hosts=1, devices=1))
