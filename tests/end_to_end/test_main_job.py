"""The main job with the example trainer: measure, plan, re-spawn, train, set beside plain torchrun."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from end_to_end import jobs
from end_to_end.jobs import (
    MODEL,
    TRAINER,
    Done,
    finish,
    pipette,
    plan,
    plan_file,
    start_warm,
    torchrun,
    warm_pipette,
)

from pipette_launch import megatron
from pipette_launch.facts import Layout, Plan, files
from pipette_launch.facts.outcome import Outcome

pytestmark = [pytest.mark.timeout(420), pytest.mark.processes]
STEPS = ["--train-iters", "4"]


def made_plan(folder: Path) -> Plan:
    """The plan that a job left in its cache."""
    (path,) = (folder / "cache").glob("pipette-launch/*/plan.json")
    return files.read(path, Plan)


def planned_arguments(made: Plan, arguments: list[str], world_size: int) -> list[str]:
    """The script's arguments with a plan's layout put in, as a user would write them by hand."""
    job = megatron.read_job(arguments, world_size=world_size, megatron_version="0.16.1", device_kind="cpu")
    return list(megatron.write_arguments(arguments, job=job, layout=made.chosen.layout))


def from_nothing(folder: Path, nproc: int, run: Callable[..., Done] = pipette) -> Done:
    """A job that measures, plans and trains."""
    return run(folder, f"--nproc-per-node={nproc}", "--pipette-budget=10", TRAINER, *MODEL, *STEPS)


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """Such a job on two slots, and the folder that holds its cache."""
    folder = tmp_path_factory.mktemp("on_two")
    return folder, from_nothing(folder, 2)


# One process: tests/end_to_end/test_gpu_check.py.
@pytest.mark.parametrize("nproc", [2, 4])
def test_measures_plans_and_trains_as_torchrun_would(
    tmp_path: Path, nproc: int, request: pytest.FixtureRequest
) -> None:
    """From nothing to a trained model, with the losses of torchrun's run of the same layout to the printed digit."""
    # Two processes start as users' do. Four are forked, as their imports alone take half a minute of two cores.
    folder, done = (
        request.getfixturevalue("on_two") if nproc == 2 else (tmp_path, from_nothing(tmp_path, nproc, warm_pipette))
    )

    assert 0 == done.code, done.err
    made = made_plan(folder)
    by_hand = torchrun(
        tmp_path, f"--nproc-per-node={nproc}", TRAINER, *planned_arguments(made, [*MODEL, *STEPS], nproc)
    )
    assert 4 == len(done.losses)
    assert by_hand.losses == done.losses
    assert made.chosen.layout.words() in done.err


def test_the_second_start_skips_the_warmup(on_two: tuple[Path, Done]) -> None:
    """A cached plan is used as it is, and a run of more than twenty iterations leaves an outcome."""
    folder, first = on_two
    second = warm_pipette(folder, "--nproc-per-node=2", TRAINER, *MODEL, "--train-iters", "21")

    assert (0, 0) == (first.code, second.code), first.err + second.err
    assert "measuring" in first.err
    assert "measuring" not in second.err
    (path,) = (folder / "cache").glob("pipette-launch/*/outcome.json")
    outcome = files.read(path, Outcome)
    assert made_plan(folder).provenance.key == outcome.key
    assert [loss for _, loss in second.losses] == list(outcome.losses)


def test_two_agents_with_a_permuted_placement(tmp_path: Path) -> None:
    """Two agents over c10d run a pipeline that is placed backwards, with the losses of the plain one."""
    layout = Layout(pp=2, dp=1, micro_batch_size=2)
    hosts = ("here@127.0.0.1#1", "here@127.0.0.1#2")
    path = plan_file(tmp_path, plan(layout, [1, 0], hosts=hosts))
    flags = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{jobs.free_port()}"]
    agents = [start_warm(tmp_path, [*flags, f"--pipette-plan={path}", TRAINER, *MODEL, *STEPS]) for _ in range(2)]

    placed = [finish(agent) for agent in agents]
    plain = torchrun(
        tmp_path,
        "--nproc-per-node=2",
        TRAINER,
        *planned_arguments(plan(layout, [1, 0]), [*MODEL, *STEPS], 2),
    )

    assert [0, 0] == [one.code for one in placed], placed[0].err + placed[1].err
    assert 4 == len(plain.losses)
    assert plain.losses == placed[0].losses + placed[1].losses


def test_a_killed_worker_costs_a_restart_and_nothing_else(tmp_path: Path) -> None:
    """After a SIGKILL in the middle of training the job goes on under the same plan and ends well."""
    path = plan_file(tmp_path, plan(Layout(pp=2, dp=1, micro_batch_size=1), [1, 0]))
    words = ["--nproc-per-node=2", "--max-restarts=2", f"--pipette-plan={path}", TRAINER, *MODEL, "--train-iters", "60"]
    agent = start_warm(tmp_path, words)
    assert agent.stdout is not None
    out = ""
    while "iteration        3/" not in out:
        line = agent.stdout.readline()
        assert line, "the job ended before its third iteration"
        out += line

    os.kill(jobs.ranks(tmp_path)[0], signal.SIGKILL)
    done = finish(agent)

    assert 0 == done.code, done.err
    # Training began anew, and both starts ran under the one plan there is.
    assert {1: 1, 60: 1} == {iteration: [seen for seen, _ in done.losses].count(iteration) for iteration in (1, 60)}
    assert "that plan cannot start" not in done.err


def test_a_refused_layout_ends_in_the_users_own_configuration(tmp_path: Path) -> None:
    """A plan that the script cannot start gives way, with the reason, and the job trains all the same."""
    odd = [*MODEL, "--num-attention-heads", "1", "--kv-channels", "32"]
    path = plan_file(tmp_path, plan(Layout(tp=2, dp=1), [0, 1]))

    done = warm_pipette(tmp_path, "--nproc-per-node=2", f"--pipette-plan={path}", TRAINER, *odd, *STEPS)

    assert 0 == done.code, done.err
    assert 4 == len(done.losses)
    assert "that plan cannot start; going on with your own configuration" in done.err
