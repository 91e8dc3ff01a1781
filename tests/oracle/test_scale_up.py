"""A few layers and micro-batches tell the bytes of many, to the last one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from facts_for_tests import tiny_job, tiny_model
from oracle.execution import layer_period, smallest

from pipette_launch.facts import Layout, Recompute
from pipette_patches.whole_stage import enough_microbatches

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("scaling_worker.py")
SIZES = ("peak", "first_peak", "allocated_after_step", "weights", "gradients", "optimizer", "parts")


@pytest.fixture(scope="module")
def found() -> dict[str, list[dict[str, Any]]]:
    """Bytes that a separate process counted, for each case scaled up and whole."""
    path = os.pathsep.join(str(ROOT / folder) for folder in (".", "patches", "tests"))
    worker = subprocess.run(
        [sys.executable, str(WORKER)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert 0 == worker.returncode, worker.stderr[-2000:]
    result: dict[str, list[dict[str, Any]]] = json.loads(worker.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize(
    "case",
    [
        "plain",
        "first stage",
        "last stage",
        "interleaved",
        "fp16 selective",
        "uniform",
        "block",
        "uneven",
        "ring",
        "experts",
    ],
)
def test_scaled_is_whole(found: dict[str, list[dict[str, Any]]], case: str) -> None:
    """Every figure and every part of the peak is the same as if all had been run, and fewer passes were."""
    scaled, whole = found[case]

    assert {name: whole[name] for name in SIZES} == {name: scaled[name] for name in SIZES}
    assert whole["operations"] > scaled["operations"]


@pytest.mark.parametrize(
    ("layout", "pp_rank", "given", "enough"),
    [
        (Layout(), 0, 100, 2),
        (Layout(), 0, 1, 1),
        (Layout(pp=8), 0, 100, 9),
        (Layout(pp=8), 7, 100, 2),
        (Layout(pp=4, vpp=2), 3, 64, 12),
        (Layout(pp=4, vpp=2), 0, 8, 8),
        (Layout(pp=4, vpp=2, microbatch_group_size=6), 0, 64, 64),
    ],
)
def test_micro_batches_end_with_the_steady_state(layout: Layout, pp_rank: int, given: int, enough: int) -> None:
    """Warm-up and two more; interleaved by whole groups, and all where the last group is not full."""
    assert enough == enough_microbatches(layout, pp_rank, given)


def test_layers_repeat_by_what_groups_them() -> None:
    """Recompute by threes repeats by threes; a mixture of experts and dense layers does not repeat."""
    uniform = Layout(recompute=Recompute(granularity="full", method="uniform", num_layers=3))
    block = Layout(recompute=Recompute(granularity="full", method="block", num_layers=5))
    mixed = tiny_model(num_experts=2, moe_layer_freq=(0, 1, 1, 1))

    assert [1, 3, 1] == [layer_period(tiny_job(), layout) for layout in (Layout(), uniform, block)]
    assert 0 == layer_period(tiny_job(model=mixed), Layout())
    assert [2, 8, 7] == [smallest(Layout(), 1, 20), smallest(uniform, 3, 20), smallest(block, 1, 20)]
