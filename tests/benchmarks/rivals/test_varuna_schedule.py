"""Varuna's lists as words, its simulator by hand, and bounds that hold for every pipeline."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.rivals.varuna_schedule import PipelineTimes, makespan_s, task_lists
from pipette_launch.errors import FactError


def words(stages: int, microbatches: int) -> list[str]:
    """Every stage's list in a line."""
    return [" ".join(f"{kind}{number}" for kind, number in tasks) for tasks in task_lists(stages, microbatches)]


def times(stages: int, hop_s: float = 0.0) -> PipelineTimes:
    """Forwards of 1, backwards of 2."""
    return PipelineTimes(forward_s=(1.0,) * stages, backward_s=(2.0,) * stages, hop_s=(hop_s,) * (stages - 1))


def test_lists_by_hand() -> None:
    """Three stages, four micro-batches: the last alternates, the others recompute once a gradient is on its way."""
    expected = [
        "F0 F1 F2 F3 R0 B0 R1 B1 R2 B2 R3 B3",
        "F0 F1 F2 R0 B0 R1 B1 R2 B2 F3 R3 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]

    assert expected == words(3, 4)


def test_two_stages_by_hand() -> None:
    """1 + 2*(1 + 2) on the last, the first then runs 1 + 2 once more: its gradient came at 7."""
    assert 10.0 == makespan_s(times(2), 2)


def test_a_forward_is_pulled_ahead_of_a_recompute_that_waits() -> None:
    """A slow last stage: the first does not wait for gradient 0 before its remaining forwards."""
    slow_end = PipelineTimes(forward_s=(1.0, 1.0, 1.0), backward_s=(2.0, 2.0, 20.0), hop_s=(0.0, 0.0))

    # 1 + 1 + 4 * 21 until the last gradient, then a recompute and a backward on each of the other two.
    assert 2 + 4 * 21 + 3 + 3 == makespan_s(slow_end, 4)


def test_one_stage_recomputes_nothing() -> None:
    """Three micro-batches of 1 + 2."""
    assert 9.0 == makespan_s(times(1), 3)


def test_sends_queue_behind_four() -> None:
    """Ten sends of 100 leave four at a time, so the last arrives after three of them; four leave at once."""
    one_by_one = PipelineTimes(forward_s=(1.0, 1.0), backward_s=(1.0, 1.0), hop_s=(100.0,))

    assert makespan_s(one_by_one, 10) > 1 + 2 * 100 + 100 + 1 + 1 + 100 + 1 + 1
    assert makespan_s(one_by_one, 4) < 1 + 100 + 8 + 100 + 8


@given(st.integers(1, 6), st.integers(1, 12), st.floats(0, 1))
def test_no_pipeline_beats_its_busiest_stage_or_its_longest_way(stages: int, microbatches: int, hop_s: float) -> None:
    """At least all passes of one stage, at least one micro-batch there and back; it always ends."""
    seconds = makespan_s(times(stages, hop_s), microbatches)
    busiest = microbatches * (3 if stages == 1 else 4)
    way = 3 * stages + (stages - 1) * (1 + 2 * hop_s)

    assert seconds >= busiest - 1e-9
    assert seconds >= way - 1e-9


@given(st.integers(1, 8), st.integers(1, 16))
def test_each_stage_runs_everything_once(stages: int, microbatches: int) -> None:
    """Forward and backward of each micro-batch, and a recompute just before the backward but on the last stage."""
    for stage, tasks in enumerate(task_lists(stages, microbatches)):
        kinds = "FB" if stage == stages - 1 else "FRB"
        assert {(kind, number) for kind in kinds for number in range(microbatches)} == set(tasks)
        assert len(tasks) == len(kinds) * microbatches
        for before, task in itertools.pairwise(tasks):
            assert task[0] != "B" or before == ("F" if stage == stages - 1 else "R", task[1])


def test_times_that_do_not_fit_together_are_refused() -> None:
    """Two stages need two backwards and a hop."""
    with pytest.raises(FactError, match="2 stages need as many backwards and 1 hops"):
        PipelineTimes(forward_s=(1.0, 1.0), backward_s=(1.0,), hop_s=(0.0,))
    with pytest.raises(FactError, match="needs stages and micro-batches, got 2 and 0"):
        task_lists(2, 0)
