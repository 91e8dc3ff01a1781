"""What is left of a job's throughput while hosts are lost: shares of the batch, depths, and a day of losses."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lost_nodes.day import DAY_S, SAVE_S, Loss, checkpoint_interval_s, kept
from benchmarks.lost_nodes.shares import Pipelines, depths, shared_step_s

pipelines = st.builds(
    Pipelines, count=st.integers(1, 2), fixed_s=st.integers(0, 9).map(float), each_s=st.integers(1, 9).map(float)
)


@given(st.lists(pipelines, min_size=1, max_size=2), st.integers(1, 7))
def test_shares_are_those_that_brute_force_finds(kinds: list[Pipelines], microbatches: int) -> None:
    """Every split with at least one micro-batch for each pipeline is tried."""
    each = [one for one in kinds for _ in range(one.count)]
    splits = itertools.product(range(1, microbatches + 1), repeat=len(each))
    steps_s = [
        max(one.fixed_s + one.each_s * count for one, count in zip(each, split, strict=True))
        for split in splits
        if sum(split) == microbatches
    ]

    assert pytest.approx(min(steps_s)) == shared_step_s(kinds, microbatches) if steps_s else True
    if not steps_s:
        assert shared_step_s(kinds, microbatches) is None


@given(st.integers(1, 200), st.integers(1, 200))
def test_depths_use_every_stage(stages: int, count: int) -> None:
    """Depths differ by one at most; fewer stages than pipelines make fewer pipelines of one."""
    found = depths(stages, count)

    assert stages == sum(size * number for size, number in found)
    assert max(size for size, _ in found) - min(size for size, _ in found) <= 1
    assert min(count, stages) == sum(number for _, number in found)


def test_a_day_without_losses_costs_its_checkpoints() -> None:
    """The first loss comes after the day."""
    part, hours = kept(
        lambda _lost: 1.0,
        Loss(stands_still_s=60.0, loads_checkpoint=True),
        between_s=2 * DAY_S,
        most_lost=3,
        step_s=1.0,
    )

    assert 24 == hours
    assert pytest.approx(1 - SAVE_S / (checkpoint_interval_s(2 * DAY_S) + SAVE_S)) == part


def test_losses_take_their_time() -> None:
    """Of three phases of an hour each later one loses a tenth to the loss and a tenth of the hosts."""
    part, hours = kept(
        lambda lost: 1.0 - 0.1 * lost,
        Loss(stands_still_s=360.0, loads_checkpoint=False),
        between_s=3600.0,
        most_lost=2,
        step_s=0.0,
    )
    saves = 1 - SAVE_S / (checkpoint_interval_s(3600.0) + SAVE_S)

    assert 3 == hours
    assert pytest.approx(saves * (1 + 0.9 * 0.9 + 0.9 * 0.8) / 3) == part
