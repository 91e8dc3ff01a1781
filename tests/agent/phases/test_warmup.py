"""A warm-up whose workers are killed, stopped, slowed or raise: who is named, and what is left. Real processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from agent import prober
from torch.distributed import HashStore, TCPStore

from pipette_launch.agent.phases import warmup
from pipette_launch.agent.phases.warmup import Warmup
from pipette_launch.agent.sync.store import RoundOver, RoundStore
from pipette_launch.facts.messages import Decision
from pipette_launch.probe.messages import Sign, last_error, last_sign

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]
ROOT = Path(__file__).parents[3]
HOSTS = ("node1", "node2")
DECISION = Decision(phase="warmup", tokens=HOSTS, hosts=HOSTS, num_slots=(2, 2))


class Watcher:
    """What a node's warm-up asks of its controller."""

    warmup_deadline_s = 60.0

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_over = False

    def warmup_sign(self, local_rank: int) -> tuple[Sign | None, str]:
        return last_sign(self.folder, local_rank), last_error(self.folder, local_rank)

    def warmup_goes_on(self, *, leads: bool) -> None:
        pass

    def warmup_is_over(self) -> None:
        self.is_over = True


class Node:
    """One agent with two workers."""

    def __init__(self, folder: Path, index: int, store: Any, how: list[str]) -> None:
        self.round_store = RoundStore(store, index, 2, is_coordinator=index == 0)
        self.host = HOSTS[index]
        self.watcher = Watcher(folder / self.host)
        self.warmup = Warmup(self.watcher, self.host)  # type: ignore[arg-type]
        self.warmup.begin()
        self.processes: dict[int, subprocess.Popen[bytes]] = {
            local: subprocess.Popen(
                [sys.executable, prober.__file__, str(self.watcher.folder), str(local), one],
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT),
                    "TORCHELASTIC_ERROR_FILE": f"{self.warmup._logs}/error.json",
                },
                start_new_session=True,
            )
            for local, one in enumerate(how)
        }
        self.state = "running"

    def watch(self) -> None:
        """Look until the phase is over, as the agent's loop does."""
        while self.state == "running":
            time.sleep(0.05)
            self.state = self.warmup.look(self.round_store, DECISION, self.host, self.processes)


@contextmanager
def nodes(folder: Path, *how: str) -> Iterator[list[Node]]:
    """Two nodes with two workers each; nothing of them is left in the end."""
    store = HashStore()
    made = [Node(folder, index, store, list(how[2 * index : 2 * index + 2])) for index in range(2)]
    try:
        yield made
    finally:
        for node in made:
            node.warmup._end(node.processes)
            assert all(process.wait() is not None for process in node.processes.values())
            shutil.rmtree(node.warmup._logs)


def watch(made: list[Node], meanwhile: Callable[[], object] = lambda: None) -> None:
    """Let all nodes watch at the same time."""
    threads = [threading.Thread(target=node.watch, daemon=True) for node in made]
    for thread in threads:
        thread.start()
    meanwhile()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)


def left(folder: Path) -> list[int]:
    """Processes that name the folder."""
    everyone = [(process.pid, process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    return [pid for pid, words in everyone if pid != os.getpid() and any(str(folder) in word for word in words)]


@pytest.mark.parametrize(
    ("how", "guilty", "told"),
    [
        # The victims are on the first node and are the first to speak.
        (["closed", "closed", "closed", "killed"], 3, "was killed by signal 9 in phase links, 3 of 7; "),
        (["closed", "waits", "raises", "closed"], 2, "died with exit code 1 in phase links, 3 of 7: warm-up worker 0 "),
        (
            ["timed-out", "waits", "waits", "stopped child"],
            3,
            "is stopped, as by SIGSTOP or a debugger, in phase links, 3 o",
        ),
        (["waits", "hangs", "waits", "waits child"], 1, "hangs in phase links, 3 of 7; no sign of it for "),
    ],
    ids=["killed", "raises", "stopped", "hangs"],
)
def test_the_culprit_is_named_and_no_victim(tmp_path: Path, how: list[str], guilty: int, told: str) -> None:
    """Slot, pid, what happened, phase and position are told to every node alike, and nothing is left running."""
    with nodes(tmp_path, *how) as made:
        began_s = time.monotonic()
        watch(made)
        took_s = time.monotonic() - began_s

    host, local = divmod(guilty, 2)
    name = f"{HOSTS[host]}:{local} (pid {made[host].processes[local].pid})"
    assert ["failed", "failed"] == [node.state for node in made]
    assert made[0].warmup.failure == made[1].warmup.failure
    assert f" s: {name} {told}" in made[0].warmup.failure
    assert 1 == made[0].warmup.failure.count("(pid ")
    assert () == made[0].warmup.absent
    assert [] == left(tmp_path)
    assert all(node.watcher.is_over for node in made)
    # Much less than the deadline of the whole: the limit of a sign, and what it takes to ask.
    assert took_s < 30


def test_a_slow_worker_is_waited_for(tmp_path: Path) -> None:
    """One that computes without a sign, and one that is stopped for a while again and again, are not accused."""

    def harass(victim: psutil.Process) -> None:
        # Of each second it runs a fifth.
        with suppress(psutil.NoSuchProcess):  # It has come to its end meanwhile.
            for _ in range(6):
                if victim.status() == psutil.STATUS_ZOMBIE:
                    return
                victim.send_signal(signal.SIGSTOP)
                time.sleep(0.8)
                victim.send_signal(signal.SIGCONT)
                time.sleep(0.2)

    with nodes(tmp_path, "well", "slow", "well child", "well") as made:
        watch(made, lambda: harass(psutil.Process(made[1].processes[1].pid)))

    assert ["done", "done"] == [node.state for node in made]
    assert ["", ""] == [node.warmup.failure for node in made]
    assert [] == left(tmp_path)


def test_those_who_are_done_hear_of_a_failure(tmp_path: Path) -> None:
    """A node whose workers have ended well still answers an alarm, and learns what became of the others."""
    with nodes(tmp_path, "well", "well", "slow", "slow killed") as made:
        watch(made)

    assert ["failed", "failed"] == [node.state for node in made]
    assert "node2:1 (pid " in made[0].warmup.failure


def test_a_node_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No agent there answers: the others do not wait for it in training."""
    monkeypatch.setattr(warmup, "REPORT_S", 1.0)
    with nodes(tmp_path, "closed alone", "waits", "well", "well") as made:
        watch(made[:1])

    here = made[0].warmup
    assert ("node2",) == here.absent
    assert "the launcher on node2 does not answer: it or its node is gone" in here.failure


def test_a_first_node_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others expect its verdict for a while, and then judge for themselves."""
    monkeypatch.setattr(warmup, "VERDICT_S", 1.0)
    with nodes(tmp_path, "well", "well", "waits", "closed alone") as made:
        watch(made[1:])

    assert ("node1",) == made[1].warmup.absent


def test_a_store_that_is_gone_ends_the_round(tmp_path: Path) -> None:
    """The agents meet again at the next one's store, and leave no worker behind."""
    program = (
        "from torch.distributed import TCPStore\n"
        "store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
        "print(store.port, flush=True)\n"
        "input()\n"
    )
    host = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    port = int(host.stdout.readline())
    with nodes(tmp_path, "waits", "waits", "well", "well") as made:
        made[1].round_store._store = TCPStore("127.0.0.1", port, wait_for_workers=False)
        assert "running" == made[1].warmup.look(made[1].round_store, DECISION, HOSTS[1], made[1].processes)
        host.kill()
        host.communicate()
        with pytest.raises(RoundOver):
            made[1].watch()
        assert all(process.wait() is not None for process in made[1].processes.values())
