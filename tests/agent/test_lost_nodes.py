"""Nodes that are lost while a job trains, with real processes: the others go on at once, whoever is lost."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from agent.test_elastic import ALONE, finish, free_port, start, two_nodes
from agent.test_phases import await_files, await_store, ends
from facts_for_tests import nodes
from torch.distributed import HashStore

from pipette_launch.agent import store as agent_store
from pipette_launch.agent.elastic import PipetteAgent
from pipette_launch.agent.membership import LeftOut
from pipette_launch.agent.phases import Attempt
from pipette_launch.agent.store import RoundOver, RoundStore
from pipette_launch.agent.warmup import Warmup
from pipette_launch.facts.messages import Decision, RunTraining, RunWarmup

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
    assert "--nnodes needs 2" in texts["a"], texts


def test_an_agent_that_was_left_out_brings_nothing_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should it decide for all, an old decision would take the place of theirs, and an old failure cost a restart."""
    old = RunTraining(nodes=nodes("a"), plan=None)
    failed = Attempt(index=0, ended="before-first-iteration")
    brought: list[tuple[Decision | None, Attempt]] = []

    def meet() -> Any:
        brought.append((agent._decision, agent._attempt))
        if len(brought) == 1:
            raise LeftOut
        return old, None

    agent = PipetteAgent.__new__(PipetteAgent)
    agent.__dict__.update(
        _decision=old,
        _attempt=failed,
        _membership=SimpleNamespace(has_joined=False, join=lambda _place: None),
        _place=None,
        _meet=meet,
    )
    monkeypatch.setattr(PipetteAgent, "record_duration", lambda *_: contextlib.nullcontext())
    agent._next_round()

    assert [(old, failed), (None, Attempt())] == brought


pytestmark_of_test_vanished = [pytest.mark.processes, pytest.mark.timeout(200)]
WARMUP = (
    "import os, time\n"
    "from pipette_launch.probe.lockstep import end_with_parent\n"
    "end_with_parent()\n"
    "open(f\"{os.environ['OUT']}/up-{os.environ['RANK']}-{os.getpid()}\", 'w').close()\n"
    "while not os.path.exists(os.environ['OUT'] + '/go'):\n"
    "    time.sleep(0.05)\n"
    "raise SystemExit(1)\n"
)


def workers(folder: Path) -> dict[int, int]:
    """Pids of warm-up workers by RANK, once all four are up."""
    ends_s = time.monotonic() + 100
    while time.monotonic() < ends_s:
        found = [path.name.split("-")[1:] for path in folder.glob("up-*")]
        if len(found) == 4:
            return {int(rank): int(pid) for rank, pid in found}
        time.sleep(0.05)
    raise AssertionError("the warm-up did not begin")


def store_host(port: int) -> int:
    """The process that hosts the rendezvous store."""
    (pid,) = {
        one.pid for one in psutil.net_connections() if one.status == psutil.CONN_LISTEN and one.laddr.port == port
    }
    assert pid is not None
    return pid


def test_an_agent_that_vanishes_is_named(tmp_path: Path) -> None:
    """A worker fails, and the other agent is stopped: the job ends where both are needed, and nobody waits for it."""
    port = free_port()
    table = {"warmup": WARMUP, "placements": [[3, 2, 1, 0]], "deadline_s": 150.0}
    agents = [start(tmp_path, table, ALONE, *two_nodes(port), node=node) for node in "ab"]
    pids = workers(tmp_path)
    host = store_host(port)
    gone, left = sorted(agents, key=lambda agent: agent.pid == host)

    gone.send_signal(signal.SIGSTOP)
    (tmp_path / "go").touch()
    codes, text = finish(left)
    gone.kill()
    finish(gone)

    assert [1] == codes, text
    # On a busy machine its neighbour finds its silence first.
    why = r"is lost \((its agent does not answer|silent for 6 s)\)"
    assert re.search(rf"{why}.*--nnodes needs 2|reaches 1 of 2 nodes that may still run", text), text
    ends_s = time.monotonic() + 10
    while any(map(psutil.pid_exists, pids.values())) and time.monotonic() < ends_s:
        time.sleep(0.05)
    assert [] == [pid for pid in pids.values() if psutil.pid_exists(pid)]


DECISION = RunWarmup(nodes=nodes("b", "c", tokens=("t1", "t2")), order="")
WITHOUT_FIRST = replace(DECISION, standby=nodes("a", tokens=("t0",)))


ONE = RunWarmup.of(DECISION.leaving_out(["c"]), order="")


class FakeController:
    """The controller of a node that has measurements, or receives those of another node."""

    def __init__(self, path: Path, text: str = "") -> None:
        self.measured_path, self.warmup_deadline_s = path, 10.0
        path.write_text(text)
        self.failure = "?"

    @property
    def text(self) -> str:
        return self.measured_path.read_text()

    def after_warmup(self, decision: Decision, failure: str) -> Decision:
        self.failure = failure
        return decision


def relays(folder: Path, measured: str, decision: RunWarmup = WITHOUT_FIRST) -> tuple[list[Any], list[FakeController]]:
    """Three agents: the first one decides, the second one runs RANK 0."""
    store = HashStore()
    texts = ("", measured, "nobody asks")
    controllers = [FakeController(folder / str(rank), text) for rank, text in enumerate(texts)]
    return [
        Warmup(
            controller,  # type: ignore[arg-type]
            RoundStore(store, 3, is_coordinator=rank == 0),
            decision,
            f"t{rank}",
        )
        for rank, controller in enumerate(controllers)
    ], controllers


def deliver(agents: list[Any]) -> None:
    """Let all agents take the next decision at the same time."""
    with ThreadPoolExecutor(len(agents)) as pool:
        assert 1 == len({repr(decision) for decision in pool.map(Warmup.following, agents)})


@pytest.mark.parametrize("piece_bytes", [1 << 22, 7])
def test_whoever_decides_learns_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    """In pieces that the store takes."""
    monkeypatch.setattr(agent_store, "MOST_BYTES", piece_bytes)
    monkeypatch.setattr(agent_store, "LONG_BYTES", 0)
    agents, controllers = relays(tmp_path, "gigabytes a second: äöü" * 50)

    deliver(agents)

    assert ("gigabytes a second: äöü" * 50, "") == (controllers[0].text, controllers[0].failure)


def test_a_deciding_node_behind_the_node_of_rank_0_learns_what_was_measured(tmp_path: Path) -> None:
    """The node with the store of the rendezvous decides, although another node comes first in torchrun's order."""
    second = RunWarmup(nodes=nodes("b", "c", tokens=("t1", "t0")), order="")
    agents, controllers = relays(tmp_path, "gigabytes a second", second)

    deliver(agents[:2])

    assert ("gigabytes a second", "") == (controllers[0].text, controllers[0].failure)


def test_a_failed_warmup_is_known_on_standby(tmp_path: Path) -> None:
    """From the store, for this node watched no workers; nothing is waited for then."""
    agents, controllers = relays(tmp_path, "half of it")
    agents[1]._round_store.put("warmup-failed", "rank 1 hangs")

    agents[0].following()

    assert ("rank 1 hangs", "") == (controllers[0].failure, controllers[0].text)


def test_what_never_comes_is_no_plan(tmp_path: Path) -> None:
    """Nothing was measured: that is the reason, and the job trains without a plan."""
    agents, controllers = relays(tmp_path, "")
    deliver(agents)

    assert "left no measurements" in controllers[0].failure


def test_a_lost_node_ends_the_wait(tmp_path: Path) -> None:
    """Whoever waits for measurements that will never come goes to the meeting instead."""
    agents, _ = relays(tmp_path, "x")
    agents[1]._round_store.put("alarm", "a node is lost")

    with pytest.raises(RoundOver):
        agents[0].following()


def test_a_node_that_measured_keeps_what_it_has(tmp_path: Path) -> None:
    """Where the one who decides took part itself, nothing goes through the store."""
    agents, controllers = relays(tmp_path, "x", ONE)
    coordinator = Warmup(controllers[0], agents[0]._round_store, ONE, "t1")  # type: ignore[arg-type]

    coordinator.failure = "it hangs"
    coordinator.following()

    assert ("", "it hangs") == (controllers[0].text, controllers[0].failure)
    assert not agents[0]._round_store.has("measured")
