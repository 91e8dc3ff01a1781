"""Nodes that are lost while a job trains, with real processes: the others go on at once, whoever is lost."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from agent.phases.test_standby import await_files, await_store, ends
from agent.test_elastic import free_port, start

pytestmark = [pytest.mark.processes, pytest.mark.timeout(150)]
SCRIPT = (
    "import os, pathlib, sys, time\n"
    "out = pathlib.Path(sys.argv[1])\n"
    "(out / f\"up-{os.environ['NODE']}-of-{os.environ['WORLD_SIZE']}-{time.time()}\").touch()\n"
    "print('iteration 1')\n"
    "while not (out / f\"go-{os.environ['WORLD_SIZE']}\").exists():\n    time.sleep(0.05)\n"
)
"""A worker that trains until the test lets all of a world of its size end."""


def three_nodes(folder: Path, *flags: str) -> dict[str, subprocess.Popen[str]]:
    """Start three agents of one slot each, of which two must train, and wait for that; `a` hosts the rendezvous."""
    port = free_port()
    flags += ("--nnodes=2:3", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}")
    agents = {"a": start(folder, {}, {}, *flags, node="a", script=SCRIPT)}
    await_store(port)
    agents |= {node: start(folder, {}, {}, *flags, node=node, script=SCRIPT) for node in "bc"}
    await_files(folder, "up-?-of-3-*", 3)
    return agents


def first(folder: Path) -> str:
    """The node that decides for all: its agent alone tells of the decision."""
    (path,) = folder.glob("leads-?")
    return path.name[-1]


def power_off(agent: subprocess.Popen[str]) -> None:
    """End an agent and its workers without a word."""
    processes = [psutil.Process(agent.pid), *psutil.Process(agent.pid).children(recursive=True)]
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def finish_on_two(folder: Path, agents: dict[str, subprocess.Popen[str]]) -> tuple[dict[str, int], dict[str, str]]:
    """Let the job end once two nodes train."""
    await_files(folder, "up-?-of-2-*", 2)
    (folder / "go-2").touch()
    return ends(agents)


@pytest.mark.parametrize("lost", ["first", "rendezvous", "other"])
def test_the_others_go_on(tmp_path: Path, lost: str) -> None:
    """Whoever is lost: the node that decides for all, the one that hosts torch's rendezvous, or any other."""
    agents = three_nodes(tmp_path)
    leader = first(tmp_path)
    node = {"first": leader, "rendezvous": "a", "other": next(one for one in "bc" if one != leader)}[lost]
    began_s = time.monotonic()

    power_off(agents[node])
    await_files(tmp_path, "up-?-of-2-*", 2)
    took_s = time.monotonic() - began_s
    codes, texts = finish_on_two(tmp_path, agents)

    assert {one: -9 if one == node else 0 for one in "abc"} == codes, texts
    # Far from gloo's half hour; that nobody waited for a silence is in the words.
    assert took_s < 30, took_s
    assert "is lost (its agent is gone)" in "".join(texts.values()), texts


def test_a_node_that_is_told_to_end_is_not_waited_for(tmp_path: Path) -> None:
    """Its workers may take half a minute to end; the others start again at once, and no restart is spent."""
    agents = three_nodes(tmp_path)

    agents["b"].send_signal(signal.SIGTERM)
    codes, texts = finish_on_two(tmp_path, agents)

    assert {"a": 0, "b": 1, "c": 0} == codes, texts
    assert "is lost (its agent was told to end by SIGTERM)" in "".join(texts.values())


def test_workers_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    """Nobody else would end them, and they hold their devices."""
    agents = three_nodes(tmp_path)
    time.sleep(1.5)
    workers = psutil.Process(agents["b"].pid).children(recursive=True)
    # One worker, and the shell that waits.
    assert 2 == len(workers)

    agents["b"].kill()
    _, alive = psutil.wait_procs(workers, timeout=5)
    codes, texts = finish_on_two(tmp_path, agents)

    assert [] == alive
    assert {"a": 0, "b": -9, "c": 0} == codes, texts


def test_too_few_nodes_end_the_job(tmp_path: Path) -> None:
    """With the reason, and at once."""
    agents = three_nodes(tmp_path)
    for node in "bc":
        power_off(agents[node])
    codes, texts = ends(agents)

    assert 1 == codes["a"]
    assert "--nnodes wants 2" in texts["a"], texts
