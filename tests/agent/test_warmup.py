"""Who is named when a warm-up fails."""

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
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from agent import prober
from facts_for_tests import nodes as nodes_of
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore, TCPStore

from pipette_launch.agent import warmup
from pipette_launch.agent.store import RoundOver, RoundStore
from pipette_launch.agent.warmup import NodeReport, Warmup, WorkerState, judge
from pipette_launch.defaults import START_S, Deadline
from pipette_launch.facts.messages import RunWarmup
from pipette_launch.probe.messages import wait_s
from pipette_launch.probe.progress import Sign, last_error, last_sign

HEALTHY: dict[str, Any] = {"exit_code": None, "status": "sleeping", "error": "", "waits_for": "", "peers": ()}
WAITING = {"waits_for": "all workers to arrive", "peers": ()}
KILLED = {"exit_code": -9, "status": "zombie"}
RAISED = {"exit_code": 1, "error": "warm-up worker 3 failed in phase compute: ValueError: odd"}
STOPPED = {"status": "stopped", "is_overdue": True}
SILENT = {"is_overdue": True}
VICTIMS = [
    "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:39485",
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv",
    "DistBackendError: NCCL error: remote process exited or there was a network error, NCCL version 2.27.5",
    "DistBackendError: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=6, OpType=ALLREDUCE)",
    "waited 60 s in vain for all workers to arrive (missing: node2:1)",
    "DistNetworkError: The client socket has timed out after 60000ms while trying to connect to (10.0.0.1, 29500).",
    "links: no answer from node2:1 in round 3 of 7 between hosts (Application timeout caused pair closure)",
    "lost the store beside node1:0 while waiting for all workers to arrive: failed to recv, got 0 bytes",
]


def state(slot: int, **changes: Any) -> WorkerState:
    """A worker that is well, with changes."""
    plain = {
        "slot": slot,
        "name": f"node{slot // 2 + 1}:{slot % 2}",
        "pid": 100 + slot,
        "where": "links, 3 of 7",
        "advance": 2003,
        "silent_s": 61.0,
        "idle_s": 61.0,
        "is_overdue": False,
    }
    return WorkerState(**{**plain, **HEALTHY, **changes})


def told(*states: WorkerState, absent: tuple[str, ...] = ()) -> str:
    """The sentence, of reports of two workers each."""
    reports = [
        NodeReport(workers=states[first : first + 2], output=f"/tmp/x on node{first // 2 + 1}")
        for first in range(0, len(states), 2)
    ]
    return judge(reports, absent, waited_s=12.34)


@pytest.mark.parametrize("error", VICTIMS)
def test_a_victim_is_told_by_its_words(error: str) -> None:
    """What gloo, NCCL, the store and our own waits say of a peer that is gone is no fault of whoever says it."""
    assert state(0, exit_code=1, error=error).is_victim
    assert not state(0, **RAISED).is_victim


def test_the_sentence() -> None:
    """After how long, who, what happened, where, how many waited, and where to read more."""
    victims = [state(slot, exit_code=1, error=VICTIMS[0]) for slot in (0, 2)]

    assert (
        "the warm-up failed after 12.3 s: node2:1 (pid 103) was killed by signal 9 in phase links, 3 of 7; "
        "3 other workers waited in vain; its output is in /tmp/x on node2"
    ) == told(victims[0], state(1, **WAITING), victims[1], state(3, **KILLED))


@pytest.mark.parametrize(
    ("guilty", "words"),
    [
        (KILLED, "node2:1 (pid 103) was killed by signal 9 in phase links, 3 of 7"),
        (RAISED, f"node2:1 (pid 103) died with exit code 1 in phase links, 3 of 7: {RAISED['error']}"),
        ({"error": "ValueError: odd"}, "node2:1 (pid 103) failed in phase links, 3 of 7: ValueError: odd"),
        (STOPPED, "node2:1 (pid 103) is stopped, as by SIGSTOP or a debugger, in phase links, 3 of 7; no sign of it f"),
        (
            {"status": "disk-sleep", **SILENT},
            "node2:1 (pid 103) hangs in phase links, 3 of 7; no sign of it for 61 s, ",
        ),
        (SILENT, "node2:1 (pid 103) hangs in phase links, 3 of 7; no sign of it for 61 s, its process is in state sl"),
    ],
    ids=["killed", "raised", "raises", "stopped", "stuck", "silent"],
)
def test_a_cause_comes_before_its_consequences(guilty: dict[str, Any], words: str) -> None:
    """Whatever the others say, in whatever order."""
    victims = [state(0, exit_code=1, error=VICTIMS[1]), state(1, **WAITING), state(2, exit_code=-6, error=VICTIMS[3])]

    assert f"the warm-up failed after 12.3 s: {words}" in told(*victims, state(3, **guilty))


def test_of_the_silent_the_one_behind_is_named() -> None:
    """Two that exchange messages are both silent; so is everyone who waits in a collective for one that hangs."""
    ahead = [state(slot, advance=2004, **SILENT) for slot in (0, 1)]
    text = told(*ahead, state(2, advance=2004, peers=(3,), **SILENT), state(3, advance=2003, peers=(2,), **SILENT))

    assert "node2:1 (pid 103) hangs" in text
    assert 1 == text.count("(pid ")


def test_one_that_is_only_slow_is_named_by_those_who_waited() -> None:
    """It lives, gives signs, and all others have waited for it in vain."""
    error = VICTIMS[4]
    text = told(
        state(0, exit_code=1, error=error, peers=(3,)),
        state(1, exit_code=1, error=error, peers=(3,)),
        state(2, waits_for="all workers to arrive", peers=(0,)),
        state(3, status="running", silent_s=2.0),
    )

    assert "node2:1 (pid 103) was waited for in vain, in phase links, 3 of 7, in state running; no sign of it f" in text
    assert error in text


def test_workers_that_lost_each_other_are_told_by_the_first_to_fail() -> None:
    """Where none died, hangs or is accused, the one that came least far says what happened."""
    error = "RuntimeError: Gloo connectFullMesh failed with timed out connecting: SO_ERROR: Connection refused"
    text = told(
        state(0, advance=1000, **SILENT | WAITING),
        state(1, exit_code=1, error=VICTIMS[0]),
        state(2, exit_code=1, error=error, advance=1002),
        state(3, advance=1000),
    )

    lost = f"node2:0 (pid 102) lost its peers in phase links, 3 of 7: {error}; 2 other workers waited in vain"
    assert f"the warm-up failed after 12.3 s: {lost}; its output is in /tmp/x on node2" == text


def test_hosts_that_do_not_answer_are_named() -> None:
    """Before what their workers did to others, but not instead of a worker that was killed."""
    victim = state(0, exit_code=1, error=VICTIMS[0])
    gone = "the launcher on node2 does not answer: it or its node is gone"

    assert f"after 12.3 s: {gone}; 1 other worker waited in vain" in told(victim, state(1), absent=("node2",))
    both = told(victim, state(1, **KILLED), absent=("node2",))
    assert f"node1:1 (pid 101) was killed by signal 9 in phase links, 3 of 7; {gone}; 1 other" in both


def test_one_that_is_stopped_for_a_moment_is_not_named() -> None:
    """Again and again is slow, not stopped: whoever caused the alarm is told instead."""
    text = told(state(0, idle_s=1.0, status="stopped"), state(1, **SILENT))

    assert "node1:1 (pid 101) hangs" in text


def test_many_are_counted() -> None:
    """Three are named, with how many more there are."""
    text = told(*(state(slot, **RAISED) for slot in range(6)))

    assert 3 == text.count("(pid ")
    assert "; the same with 3 more workers; its output is in /tmp/x on node1" in text


def test_without_a_fault_the_deadline_is_told() -> None:
    """Those that came least far are described."""
    text = told(state(0, advance=3000), state(1, advance=1000, where="start"))

    assert "the warm-up failed after 12.3 s, its deadline: node1:1 (pid 101) is in phase start, in state sl" in text


@given(
    st.permutations(range(4)),
    st.sampled_from([KILLED, RAISED, STOPPED, SILENT]),
    st.lists(st.sampled_from(["waits", *VICTIMS]), min_size=3, max_size=3),
)
def test_the_order_of_slots_does_not_matter(order: list[int], guilty: dict[str, Any], others: list[str]) -> None:
    """One cause among victims is found wherever it sits, and nobody else is named."""
    cause, *rest = order
    states = {cause: state(cause, **guilty)}
    for slot, how in zip(rest, others, strict=True):
        states[slot] = state(slot, **(WAITING if how == "waits" else {"exit_code": 1, "error": how}))

    text = told(*(states[slot] for slot in range(4)))

    assert f"after 12.3 s: {states[cause].name} (pid " in text
    assert 1 == text.count("(pid ")
    assert "3 other workers waited in vain" in text


pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]
ROOT = Path(__file__).parents[3]
HOSTS = ("node1", "node2")
DECISION = RunWarmup(nodes=nodes_of(*HOSTS, num_slots=2), order="")


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

    def workers_are_gone(self) -> None:
        self.is_over = True


class Node:
    """One agent with two workers."""

    def __init__(self, folder: Path, index: int, store: Any, how: list[str]) -> None:
        self.round_store = RoundStore(store, 2, is_coordinator=index == 0)
        self.host = HOSTS[index]
        self.watcher = Watcher(folder / self.host)
        self.warmup = Warmup(self.watcher, self.round_store, DECISION, self.host)  # type: ignore[arg-type]
        self.warmup.open_logs()
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
        self.is_over = False

    def watch(self) -> None:
        """Look until the phase is over, as the agent's loop does."""
        while not self.is_over:
            time.sleep(0.05)
            self.is_over = self.warmup.look(self.processes, ())


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
    assert made[0].warmup.failure
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

    assert all(node.is_over for node in made)
    assert ["", ""] == [node.warmup.failure for node in made]
    assert [] == left(tmp_path)


def test_those_who_are_done_hear_of_a_failure(tmp_path: Path) -> None:
    """A node whose workers have ended well still answers an alarm, and learns what became of the others."""
    with nodes(tmp_path, "well", "well", "slow", "slow killed") as made:
        watch(made)

    assert all(node.warmup.failure for node in made)
    assert "node2:1 (pid " in made[0].warmup.failure


def test_a_node_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No agent there answers: the others do not wait for it in training."""
    monkeypatch.setattr(warmup, "ALARM_REPORT_S", Deadline(1.0, "", ""))
    with nodes(tmp_path, "closed alone", "waits", "well", "well") as made:
        watch(made[:1])

    here = made[0].warmup
    assert ("node2",) == here.absent
    assert "the launcher on node2 does not answer: it or its node is gone" in here.failure


def test_a_first_node_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others expect its verdict for a while, and then judge for themselves."""
    monkeypatch.setattr(warmup, "VERDICT_S", Deadline(1.0, "", ""))
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
        assert not made[1].warmup.look(made[1].processes, ())
        host.kill()
        host.communicate()
        with pytest.raises(RoundOver):
            made[1].watch()
        assert all(process.wait() is not None for process in made[1].processes.values())


class World:
    """A clock, and what the one worker last said."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, process: subprocess.Popen[bytes]) -> None:
        self.now_s = 0.0
        self.sign: Sign | None = Sign(phase="links", at_s=0.0, limit_s=60.0)
        self.processes = {0: process}
        monkeypatch.setattr(warmup, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        controller: Any = SimpleNamespace(warmup_sign=lambda _: (self.sign, ""))
        self.warmup = Warmup(controller, RoundStore(HashStore(), 1, is_coordinator=True), DECISION, "node1")
        self.warmup._sampled_s = 0.0

    def hung_after(self, *, until_s: float, step_s: float = 1.0) -> float | None:
        """When it was found, looking so often."""
        while self.now_s < until_s:
            self.now_s += step_s
            self.warmup._sample(self.processes)
            if self.warmup._is_hung:
                return self.now_s
        return None


@pytest.fixture
def asleep() -> Iterator[subprocess.Popen[bytes]]:
    """A process that computes nothing."""
    with subprocess.Popen(["/bin/sleep", "600"]) as process:
        yield process
        process.kill()


def test_one_that_neither_speaks_nor_computes_is_hung(
    asleep: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the next sign is overdue, and no second before."""
    assert 60 < (World(monkeypatch, asleep).hung_after(until_s=100) or 0) <= 62


def test_one_that_says_that_it_waits_is_not(asleep: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one that has not said anything yet, nor one that has ended."""
    for sign in (Sign(phase="links", at_s=0.0, limit_s=60.0, waits_for="the others"), None):
        world = World(monkeypatch, asleep)
        world.sign = sign
        assert world.hung_after(until_s=200) is None
    asleep.kill()
    asleep.wait()
    assert World(monkeypatch, asleep).hung_after(until_s=200) is None


def test_an_agent_that_was_away_accuses_nobody_of_that(
    asleep: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that was suspended for an hour comes back, and its workers get their time anew."""
    world = World(monkeypatch, asleep)
    world.hung_after(until_s=50)
    world.now_s += 3600
    world.warmup._sample(world.processes)

    assert not world.warmup._is_hung
    assert 3650 < (world.hung_after(until_s=3700) or 0) <= 3662


def test_one_that_computes_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it says nothing."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        world = World(monkeypatch, process)
        of_process = psutil.Process(process.pid)
        while of_process.cpu_times().user < 0.5:
            time.sleep(0.01)
        world.now_s += 4.0
        world.warmup._sample(world.processes)
        assert 0.0 == world.warmup._state(0, process, "a", 0).idle_s
        process.kill()


@pytest.mark.parametrize(("apart_s", "is_late"), [(300.0, False), (1200.0, True)])
def test_launchers_of_4096_ranks_wait_for_late_imports(
    monkeypatch: pytest.MonkeyPatch, apart_s: float, is_late: bool
) -> None:
    """The imports of 512 nodes end within five minutes of each other, then the warm-up measures for a minute."""
    num_nodes, first_s, now_s = 512, 60.0, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    many = RunWarmup(nodes=nodes_of(*(f"node{index}" for index in range(num_nodes)), num_slots=8), order="")
    store, ends_s = HashStore(), first_s + apart_s + 60.0
    worker = SimpleNamespace(poll=lambda: 0 if now_s >= ends_s else None)
    deadline_s = wait_s(4096, START_S.of(4096)) + wait_s(4096, 60.0)
    found: list[str] = []
    monkeypatch.setattr(Warmup, "_find_out", lambda self, *_: found.append(self._token))
    launchers = [
        Warmup(
            SimpleNamespace(warmup_deadline_s=deadline_s),  # type: ignore[arg-type]
            RoundStore(store, num_nodes, is_coordinator=True),
            many,
            token,
        )
        for index, token in enumerate(many.tokens)
    ]
    over: set[str] = set()
    while len(over) < num_nodes:
        over |= {one._token for one in launchers if one._is_over({0: worker})}  # type: ignore[dict-item]
        now_s += 5.0

    assert is_late == bool(found)
    assert is_late == (now_s < ends_s)
