"""Trials with real agents and processes: who loses and why, what is decided for all nodes, and what is left."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from agent.test_elastic import WARMUP, finish, free_port, start
from facts_for_tests import nodes, tiny_cluster
from screens import choice, plan
from torch.distributed import HashStore

from pipette_launch.agent import trial
from pipette_launch.agent.store import RoundOver, RoundStore
from pipette_launch.agent.trial import TrialRun
from pipette_launch.errors import ClusterError
from pipette_launch.facts import Layout
from pipette_launch.facts.co_location import DeviceBinding
from pipette_launch.facts.messages import Decision, RunTrial, TrialReport

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]
HOSTS = ("node1", "node2")
CHOICES = [choice(layout, 0.001) for layout in (Layout(pp=2), Layout(dp=2), Layout(tp=2))]
PLAN = replace(plan(tiny_cluster(2, 1), *CHOICES), hosts=HOSTS)
DECISION = RunTrial(nodes=nodes(*HOSTS), plan=PLAN, trial=2, iterations=3)
SCRIPT = """
import os, subprocess, sys, tempfile, time, pathlib
if os.environ["PHASE"] != "train":
    tempfile.mkdtemp(prefix="left_in_a_hurry_")
phase, rank = os.environ["PHASE"], os.environ["RANK"]
(pathlib.Path(sys.argv[1]) / f"ran-{phase}-{rank}").touch()
if phase == "trial-1":
    print("words of a loser")
    sys.exit("REFUSED: no such layout") if rank == "1" else time.sleep(600)
if phase == "trial-2":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", sys.argv[1]], start_new_session=True)
    time.sleep(600)
for iteration in range(3 if phase == "train" else 1000):
    if rank == "1":
        print("iteration", iteration, "of", phase, flush=True)
    time.sleep(0.05)
"""


def test_trials_end_on_all_nodes_and_the_training_follows(tmp_path: Path) -> None:
    """One is ended after enough iterations, one dies, one hangs: no restart is spent, and nothing of them is left.

    A third node stands by, and may be the one that decides.
    """
    table = {"standby": ["c"], "warmup": WARMUP, "placements": [[1, 0], [1, 0]], "trials": 2, "patience_s": [6.0, 3.0]}
    flags = ["--nnodes=3", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", "--max-restarts=0"]
    agents = [start(tmp_path, table, {}, *flags, node=node, script=SCRIPT) for node in "abc"]

    codes, text = finish(*agents)

    assert [0, 0, 0] == codes, text
    phases = ("trial-0", "trial-1", "trial-2", "train")
    assert {f"ran-{phase}-{rank}" for phase in phases for rank in "01"} == {p.name for p in tmp_path.glob("ran-*")}
    assert (
        "trial 0: 3 steps, well; "
        "trial 1: 0 steps, rank 1 ended with exit code 1: REFUSED: no such layout; "
        "trial 2: 0 steps, it hung: no iteration within 6 s after 0; "
    ) in text
    # Of what trials print, nothing reaches the user.
    assert ["iteration 0 of train", "iteration 1 of train", "iteration 2 of train"] == [
        line for line in text.splitlines() if line.startswith(("iteration", "words"))
    ]
    assert [] == [path.name for path in (*tmp_path.glob("pipette*"), *tmp_path.rglob("left_in_a_hurry*"))]
    # torch's own log folder has one attempt on each node, the training.
    assert 2 == len(list(tmp_path.glob("torchelastic_*/*/attempt_*")))
    assert [] == [one.pid for one in psutil.process_iter(["cmdline"]) if str(tmp_path) in (one.info["cmdline"] or [])]


class Judge:
    """What a trial asks of its controller."""

    def __init__(self) -> None:
        self.reports: list[TrialReport] = []

    def saw_line(self, line: str) -> float | None:
        return 0.1 if line.startswith("iteration") else None

    def workers_are_gone(self) -> None:
        pass

    def after_trial(self, decision: Decision, report: TrialReport) -> Decision:
        self.reports.append(report)
        return decision


class Node:
    """An agent with one worker, which ends as it is told or lives for long."""

    def __init__(self, index: int, store: Any, code: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
        # A trial sets it for its workers.
        monkeypatch.setenv("TMPDIR", tempfile.gettempdir())
        self.round_store = RoundStore(store, 2, is_coordinator=index == 0)
        self.token, self.bindings, self.judge = HOSTS[index], (DeviceBinding(rank=index, device=0),), Judge()
        self.trial = TrialRun(self.judge, self.round_store, DECISION, self.token)  # type: ignore[arg-type]
        self.trial.open_logs()[0].start()
        self.trial._step_s = [0.1, 0.2]
        ends = f"sys.exit({code})" if code is not None else "time.sleep(600)"
        self.process = subprocess.Popen([sys.executable, "-c", f"import sys, time; {ends}"], start_new_session=True)

    def look(self) -> bool:
        return self.trial.look({0: self.process}, self.bindings)

    def await_end(self) -> None:
        while not self.look():
            time.sleep(0.02)


def test_a_script_that_ends_by_itself_ends_the_trial_when_all_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no failure of its own; whether it printed enough is the coordinator's to judge."""
    store = HashStore()
    first, second = Node(0, store, 0, monkeypatch), Node(1, store, 0, monkeypatch)
    first.process.wait()
    assert not first.look()
    second.process.wait()
    # The second node's last word needs the coordinator's answer.
    store.set("pipette/round/trial-2/next", "")
    store.set("pipette/round/trial-2/absent", "nobody")
    second.await_end()
    first.await_end()

    assert [(None, (0.1, 0.2))] == [(one.failure, one.step_s) for one in first.judge.reports]


class CountedStore(HashStore):
    """A store that counts the requests for each key."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: Counter[str] = Counter()

    def check(self, keys: list[str]) -> bool:
        self.requests.update(keys)
        return super().check(keys)

    def add(self, key: str, amount: int) -> int:
        self.requests[key] += 1
        return super().add(key, amount)


@pytest.mark.parametrize("code", [None, 0])
def test_many_nodes_ask_the_first_store_rarely(code: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 50,000 nodes looks ten times a second, and asks for one key at most every ten seconds."""
    store = CountedStore()
    node = Node(1, store, code, monkeypatch)
    node.round_store.group_size = 50_000
    if code is not None:
        node.process.wait()
    assert not any(node.look() for _ in range(10))
    node.process.kill()
    node.process.wait()

    assert {1} == set(store.requests.values()), store.requests


def test_a_node_that_is_gone_ends_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """No agent answers there: nobody waits for it in training."""
    monkeypatch.setattr(trial, "TRIAL_REPORT_S", 0.5)
    node = Node(0, HashStore(), 7, monkeypatch)
    node.process.wait()

    node.await_end()

    assert (("node2",), []) == (node.trial.absent, node.judge.reports)
    with pytest.raises(ClusterError, match="a trial ended without a decision"):
        node.trial.following()


def test_a_store_that_is_gone_ends_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agents meet again at the next one's store, and leave no worker behind."""

    class GoneStore(HashStore):
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("failed to recv, got 0 bytes")

    node = Node(1, GoneStore(), None, monkeypatch)

    with pytest.raises(RoundOver):
        node.look()
    assert -9 == node.process.wait()


def test_a_call_to_a_meeting_ends_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some agent is lost: no trial goes on without it, and no worker is left."""
    node = Node(1, HashStore(), None, monkeypatch)
    node.round_store.put("alarm", "node1 is silent")

    with pytest.raises(RoundOver):
        node.look()
    assert -9 == node.process.wait()
