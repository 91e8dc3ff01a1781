"""A plan's schedule reaches the workers of every node, and one that cannot run gives way to Megatron's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from end_to_end import jobs
from end_to_end.jobs import MODEL, TRAINER, finish, plan, plan_file, start_warm, torchrun, warm_pipette

from pipette_launch.cost.pipeline.zero_bubble import named_schedule
from pipette_launch.facts import Layout, Plan
from pipette_launch.facts.schedule import ScheduleFile

pytestmark = [pytest.mark.timeout(300), pytest.mark.processes]
STEPS = ["--train-iters", "4", "--eval-interval", "2", "--eval-iters", "1"]
PIPELINE = Layout(pp=2, dp=1, micro_batch_size=1)


def with_order(microbatches: int, hosts: tuple[str, ...] = (jobs.HOST,)) -> Plan:
    """A plan for ZB-1P of a number of micro-batches; behind it the same pipeline under Megatron's own schedule."""
    made = plan(PIPELINE, [0, 1], hosts=hosts)
    order = ScheduleFile.of(named_schedule("zb-1p", pp=2, num_microbatches=microbatches), checks_first_step=True)
    return replace(
        made, chosen=replace(made.chosen, schedule="zb-1p", order=order), alternatives=(made.chosen,), keeps_own=False
    )


@pytest.fixture(scope="module")
def stock_losses(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str]]:
    """Of the same pipeline under torchrun and Megatron's own schedule."""
    words = ["--nproc-per-node=2", TRAINER, *MODEL, *STEPS, "--pipeline-model-parallel-size", "2"]
    done = torchrun(tmp_path_factory.mktemp("stock"), *words)

    assert (0, 4) == (done.code, len(done.losses)), done.err
    return done.losses


def test_two_nodes_train_under_a_plans_schedule(tmp_path: Path, stock_losses: list[tuple[int, str]]) -> None:
    """Both get the order, the first step is checked, and the losses are stock's to the printed digit."""
    path = plan_file(tmp_path, with_order(8, hosts=("here@127.0.0.1#1", "here@127.0.0.1#2")))
    flags = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{jobs.free_port()}"]
    agents = [start_warm(tmp_path, [*flags, f"--pipette-plan={path}", TRAINER, *MODEL, *STEPS]) for _ in range(2)]

    done = [finish(agent) for agent in agents]

    assert [0, 0] == [one.code for one in done], done[0].err + done[1].err
    assert "zb-1p" in done[0].err + done[1].err
    assert stock_losses == done[0].losses + done[1].losses
    assert "has the losses and gradients of Megatron's own schedule" in done[0].err + done[1].err


def test_a_schedule_for_other_steps_gives_way_to_megatrons_own(
    tmp_path: Path, stock_losses: list[tuple[int, str]]
) -> None:
    """The order is for 4 micro-batches and a step has 8: the patch says so, and the next candidate trains."""
    path = plan_file(tmp_path, with_order(4))

    done = warm_pipette(tmp_path, "--nproc-per-node=2", f"--pipette-plan={path}", TRAINER, *MODEL, *STEPS)

    assert 0 == done.code, done.err
    assert "is for 4 micro-batches a step; this one has 8" in done.err
    assert stock_losses == done.losses
