"""The nodes that wait for the first one's plan help it to make one, and the plan is the one that it makes alone."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from end_to_end import jobs
from end_to_end.jobs import ECHO, MODEL, Done, finish, start

from pipette_launch import megatron
from pipette_launch.facts import Measurements, Plan, files
from pipette_launch.launch.search_pool.workers import processes_of
from pipette_launch.search.solve import SolveOptions, solve

pytestmark = pytest.mark.processes
SLOTS = 2
WORDS = [*MODEL, "--train-iters", "1"]


def two_nodes(folder: Path, *, second: dict[str, str], **env: str) -> list[Done]:
    """A job that only plans, on two nodes of two slots whose warm-up takes no time."""
    flags = ["--nnodes=2", f"--nproc-per-node={SLOTS}", "--rdzv-backend=c10d", "--pipette-dry-run"]
    flags += [f"--rdzv-endpoint=localhost:{jobs.free_port()}", "--pipette-budget=200"]
    env |= {"PYTHONPATH": jobs.WITHOUT_WARMUP, "HELPERS": str(2 * processes_of(SLOTS) - 1)}
    agents = [start(folder, [*flags, ECHO, *WORDS], **env, **more) for more in ({}, second)]
    return [finish(agent) for agent in agents]


def plan_alone(folder: Path) -> tuple[Plan, Plan]:
    """The plan that the job left, and the one that a single process makes of the same measurements."""
    (made,) = (folder / "cache").glob("pipette-launch/*/plan.json")
    together = files.read(made, Plan)
    measured = files.read(made.with_name("cluster.json"), Measurements)
    job = megatron.read_job(WORDS, world_size=2 * SLOTS, megatron_version="0.16.1", device_kind="cpu")
    alone = solve(
        job,
        measured,
        options=SolveOptions(budget_s=200.0),
        clock=time.monotonic,
        provenance=together.provenance,
    )
    # What the launcher adds to a plan of `solve` is not the search's.
    return replace(together, solve_s=0.0), replace(alone, solve_s=0.0, setting=together.setting)


def test_two_nodes_share_a_search(tmp_path: Path) -> None:
    """All processes that there is room for take part, and nothing of the plan depends on it."""
    done = two_nodes(tmp_path, second={})

    assert [0, 0] == [one.code for one in done], done[0].err + done[1].err
    assert [{}, {}] == [one.workers for one in done]
    each = processes_of(SLOTS)
    (words,) = [line for one in done for line in one.err.splitlines() if "shared" in line]
    assert f"the search was shared by {2 * each} processes: {each} on this node, {each} on node 1" in words
    together, alone = plan_alone(tmp_path)
    assert alone == together
    assert [] == jobs.left_behind("pipette_launch.launch.search_pool.worker")
    assert [] == list(tmp_path.glob("pipette*"))


def test_a_node_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    """Its share is done by the first node, which says so; the plan is the same."""
    done = two_nodes(tmp_path, second={"HANGS": "yes"}, GRACE_S="1")

    assert [0, 0] == [one.code for one in done], done[0].err + done[1].err
    text = done[0].err + done[1].err
    if "node 1 no longer helps" not in text:
        # The second agent was the first in torchrun's order, and its own processes hang.
        assert "this node no longer helps with the search: it did not answer in time" in text
    together, alone = plan_alone(tmp_path)
    assert alone == together
    assert [] == jobs.left_behind("pipette_launch.launch.search_pool.worker")
