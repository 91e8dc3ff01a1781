"""Tests of how cases are dealt out, what happens to those that fail, and how times become samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from facts_for_tests import tiny_job, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from probe.workers import OneRankStore, tiny_options

from pipette_launch.facts import ComputeCase, Layout
from pipette_launch.probe.compute import layers, timing
from pipette_launch.probe.compute.bench import weight_bytes
from pipette_launch.probe.compute.layers import LayerBench, cases_of
from pipette_launch.probe.compute.peak_memory import CpuMeter
from pipette_launch.probe.harness import Budget, Lockstep
from pipette_patches.workload.layers import Part, Workload, WorkloadError
from pipette_patches.workload.optimizer import OptimizerStep

CASES = tuple(ComputeCase(tp=1, cp=1, micro_batch_size=size) for size in (1, 2, 3, 4))


def test_two_slots_share_four_cases_by_hand() -> None:
    """Both measure the reference; the others are dealt out in order, and who has none left repeats one."""
    assert (CASES[0], CASES[1], CASES[3]) == cases_of(CASES, 0, 2)
    assert (CASES[0], CASES[2], CASES[1]) == cases_of(CASES, 1, 2)
    assert (CASES[0],) == cases_of(CASES[:1], 5, 8)


@given(num_cases=st.integers(1, 20), slots=st.integers(1, 8))
def test_every_case_is_dealt_and_all_slots_stay_busy(num_cases: int, slots: int) -> None:
    """The reference goes to all slots, every other case to at least one, and all have equally many."""
    cases = tuple(ComputeCase(tp=1, cp=1, micro_batch_size=size + 1) for size in range(num_cases))
    hands = [cases_of(cases, slot, slots) for slot in range(slots)]

    assert all(hand[0] == cases[0] for hand in hands)
    assert set(cases[1:]) == {case for hand in hands for case in hand[1:]}
    assert {1 + -(-(num_cases - 1) // slots)} == {len(hand) for hand in hands}


def bench(folder: Path, **changes: object) -> LayerBench:
    """A slot that is alone on its host."""
    options = tiny_options(folder, hosts=1, devices=1, **{"cases": CASES[:2], **changes})
    return LayerBench(options=options, slot=0, meter=CpuMeter())


def measure(slot: LayerBench, now_s: float = 0.0) -> None:
    """Run it, with ten seconds to spare unless told otherwise."""
    lockstep = Lockstep(store=OneRankStore(), rank=0, world_size=1, timeout_s=1)
    slot.measure(lockstep, Budget(started_s=0, budget_s=10, clock=lambda: now_s))


def failing_workload(error: Exception, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for megatron-core: the first builds fail, the others have no parts."""
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
            main_grad_dtype=torch.float32,
            recomputed=lambda _: weight * 1.0,
        )
        yield Workload(parts=(part,), model=None, token_ids=weight, notes=())

    monkeypatch.setattr(layers.patches_workload, "load", lambda _: None)
    monkeypatch.setattr(layers.patches_workload, "workload", workload)


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
    """The next case is measured all the same."""
    failing_workload(error, 1, monkeypatch)
    slot = bench(tmp_path)
    measure(slot)

    assert [CASES[1]] == [timed.case for timed in slot.times]
    assert [CASES[1]] == [reading.case for reading in slot.memory]
    assert [True] == [line.startswith(note) for line in slot.notes]


def test_a_spent_budget_leaves_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two cases is not begun."""
    failing_workload(RuntimeError(), 0, monkeypatch)
    monkeypatch.setattr(layers, "optimizer_step", lambda *_: compute_nothing())
    slot = bench(tmp_path)
    measure(slot, now_s=99.0)

    assert [CASES[0]] == [timed.case for timed in slot.times]


def test_cases_are_gone_through_again_while_time_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of all sweeps stand together, the memory is read once, and a slot keeps to its budget."""
    failing_workload(RuntimeError(), 0, monkeypatch)
    monkeypatch.setattr(layers, "optimizer_step", lambda *_: compute_nothing())
    # Else a machine that is busy for a moment takes fewer.
    monkeypatch.setattr(timing, "num_values", lambda *_: 20)
    counts = {}
    for sweeps in (1, 3):
        monkeypatch.setattr(layers, "SWEEPS", {"cpu": sweeps})
        slot = bench(tmp_path)
        measure(slot)
        assert list(CASES[:2]) == [timed.case for timed in slot.times] == [reading.case for reading in slot.memory]
        counts[sweeps] = [len(timed.forward.values_s) for timed in slot.times]

    (reference, once), (again, thrice) = counts[1], counts[3]
    assert (reference, 3 * once) == (again, thrice)


def test_a_case_that_was_refused_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is noted once, though the slot goes through its cases three times and a third build would work."""
    failing_workload(WorkloadError("megatron-core refuses it"), 2, monkeypatch)
    slot = bench(tmp_path)
    measure(slot)

    assert list(CASES[:2]) == slot.refused
    assert ([], 2) == (slot.times, len(slot.notes))


def test_an_optimizer_that_is_not_known_refuses_no_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The case itself was measured; that its optimizer was not is a note."""
    failing_workload(RuntimeError(), 0, monkeypatch)

    def refuse(*_: object) -> OptimizerStep:
        raise WorkloadError("the step of 'muon' is not measured")

    monkeypatch.setattr(layers, "optimizer_step", refuse)
    slot = bench(tmp_path)
    measure(slot)

    assert [] == slot.refused
    assert ["compute: the step of 'muon' is not measured"] == slot.notes
    assert list(CASES[:2]) == [timed.case for timed in slot.times]


@pytest.mark.parametrize(("now_s", "expected"), [(0.0, [True, True]), (4.0, [True, False])])
def test_recompute_is_timed_while_there_is_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now_s: float, expected: list[bool]
) -> None:
    """In the reference case always, in the others until a quarter of the budget is spent."""
    failing_workload(RuntimeError(), 0, monkeypatch)
    monkeypatch.setattr(layers, "optimizer_step", lambda *_: compute_nothing())
    slot = bench(tmp_path)
    measure(slot, now_s=now_s)

    assert expected == [timed.recompute is not None for timed in slot.times]


def test_the_pace_of_the_reference_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once where the slot differs from nobody; a reference that cannot run has none."""
    failing_workload(torch.OutOfMemoryError("CUDA out of memory"), 1, monkeypatch)
    refused, usual = bench(tmp_path), bench(tmp_path)
    monkeypatch.setattr(layers, "optimizer_step", lambda *_: compute_nothing())
    measure(refused)
    measure(usual)

    assert [[], [0]] == [[pace.turn for pace in slot.paces] for slot in (refused, usual)]


def compute_nothing() -> OptimizerStep:
    """A step of no work."""
    return OptimizerStep(run=lambda: None, run_on_single_elements=lambda: None, num_parameters=1, gradient_bytes=4)


def test_what_the_optimizer_does_for_each_tensor_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes 3 s for 10 parameters of 40 bytes, and 1 s of that for as many tensors of one element each."""
    failing_workload(RuntimeError(), 0, monkeypatch)
    step = OptimizerStep(run=nothing, run_on_single_elements=nothing, num_parameters=10, gradient_bytes=40)
    monkeypatch.setattr(layers, "optimizer_step", lambda *_: step)
    seconds = iter((3.0, 1.0))
    monkeypatch.setattr(layers, "time_calls", lambda *_, **__: SimpleNamespace(median_s=next(seconds)))
    slot = bench(tmp_path)
    measure(slot)

    assert (0.2, 0.025) == (slot.optimizer_s_per_parameter, slot.gradient_s_per_byte)


def nothing() -> None:
    """Take no time."""


def test_any_other_error_is_not_swallowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the machine must not pass for a lack of memory."""
    failing_workload(RuntimeError("illegal instruction"), 1, monkeypatch)

    with pytest.raises(RuntimeError, match="illegal instruction"):
        measure(bench(tmp_path))


def test_a_layer_larger_than_the_memory_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel would kill a worker without a word; so the needed and the free bytes are compared first."""
    failing_workload(RuntimeError("must not be built"), 1, monkeypatch)
    huge = replace(tiny_job(1), model=tiny_model(hidden_size=1 << 17, ffn_hidden_size=1 << 19))
    slot = bench(tmp_path, job=huge, cases=CASES[:1])
    measure(slot)

    assert ["compute: tp1 cp1 mbs1 needs"] == [note[:27] for note in slot.notes]
    assert slot.notes[0].endswith("for one layer's weights and gradients, slot node0:0 has 8.00 GiB")


def test_weight_bytes_by_hand() -> None:
    """Hidden 64, FFN 256, vocabulary 256, tied, fp32: 66112 parameters at 4 + 4 + 4 bytes, halved by tp 2."""
    parameters = (64 * 192 + 192 + 64 * 64 + 64) + (2 * 64 * 256 + 256 + 64) + 256 * 64
    case = ComputeCase(tp=2, cp=1, micro_batch_size=1)

    assert parameters // 2 * 12 == weight_bytes(tiny_job(1), case)


def test_weight_bytes_of_one_ranks_share_of_the_experts() -> None:
    """Half of four experts of 2 * 64 * 32 + 96 parameters, also in a depth of prediction; tp cuts none."""
    experts = {"num_experts": 4, "moe_layer_freq": (1,) * 4, "moe_ffn_hidden_size": 32}
    job = replace(tiny_job(1), model=tiny_model(mtp_num_layers=1, **experts), own=Layout(dp=2, ep=2))

    parameters = 2 * 2 * (2 * 64 * 32 + 32 + 64) + 256 * 64 // 2
    assert parameters * 12 == weight_bytes(job, ComputeCase(tp=2, cp=1, micro_batch_size=1))
