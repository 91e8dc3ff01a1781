"""Megatron-FSDP under pipette-launch: measured, planned, and trained on what the user's own command trains on."""

from __future__ import annotations

from pathlib import Path

import pytest
from end_to_end.jobs import MODEL, TRAINER, torchrun, warm_pipette

from pipette_launch.facts import Measurements, Plan, files

pytest.importorskip("einops", reason="Megatron-FSDP makes its meshes with einops")
pytestmark = [pytest.mark.timeout(300), pytest.mark.processes]
REPLICATED = (TRAINER, *MODEL, *"--train-iters 3 --use-distributed-optimizer".split())
SHARDED = (
    *REPLICATED,
    *(
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --ckpt-format fsdp_dtensor "
        "--overlap-grad-reduce --overlap-param-gather"
    ).split(),
)


def test_a_sharded_job_learns_what_it_learns_under_torchrun(tmp_path: Path) -> None:
    """Under the user's own layout losses are the same to the last digit, and those of a job that shards no weights."""
    whole = torchrun(tmp_path, "--standalone", "--nproc-per-node=2", *REPLICATED)
    stock = torchrun(tmp_path, "--standalone", "--nproc-per-node=2", *SHARDED)
    ours = warm_pipette(tmp_path, "--nproc-per-node=2", "--pipette-budget=10", "--pipette-fix=all", *SHARDED)

    assert (0, 0, 0) == (whole.code, stock.code, ours.code), ours.err
    assert 3 == len(stock.losses)
    assert whole.losses == stock.losses == ours.losses


def test_a_sharded_job_is_measured_and_planned(tmp_path: Path) -> None:
    """Layers are timed whole, stages are run with their shards, and the plan that is found trains."""
    done = warm_pipette(tmp_path, "--nproc-per-node=2", "--pipette-budget=20", *SHARDED)

    assert 0 == done.code, done.err
    assert 3 == len({loss for _, loss in done.losses})
    measured = files.read(next(tmp_path.glob("cache/pipette-launch/*/cluster.json")), Measurements)
    assert {"layer", "embedding", "head"} <= {time.part for time in measured.compute if time.source == "measured"}
    assert measured.stages
    plan = files.read(next(tmp_path.glob("cache/pipette-launch/*/plan.json")), Plan)
    assert plan.chosen.layout.dp == 2
    assert "was measured by running it" in " ".join(plan.advice)
