"""Tests of the budget, the fit of a line, and how workers keep in step."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from probe.workers import OneRankStore

from pipette_launch.errors import ProbeError
from pipette_launch.probe.links.fits import fit_line
from pipette_launch.probe.links.selection import Line
from pipette_launch.probe.lockstep import Budget, Lockstep, WorkerPlace, worker_place
from pipette_launch.probe.progress import Progress, last_sign

SIZES = (8, 65536, 1 << 20)


def lockstep(store: OneRankStore, rank: int, world_size: int = 2) -> Lockstep:
    """Return one rank with the fake store."""
    return Lockstep(store=store, rank=rank, world_size=world_size, timeout_s=7)


@given(latency_s=st.floats(1e-6, 1e-2), bandwidth=st.floats(1e6, 1e11))
def test_the_fit_recovers_a_planted_line(latency_s: float, bandwidth: float) -> None:
    """Exact times give the latency and bandwidth from which they were made."""
    line = fit_line(SIZES, [latency_s + size / bandwidth for size in SIZES])

    assert line.latency_s + SIZES[-1] * line.seconds_per_byte == pytest.approx(
        latency_s + SIZES[-1] / bandwidth, rel=1e-6
    )
    assert line.latency_s == pytest.approx(latency_s, rel=1e-3, abs=1e-9)
    assert line.seconds_per_byte == pytest.approx(1 / bandwidth, rel=1e-3, abs=1e-15)


def test_a_disturbed_small_message_is_no_latency() -> None:
    """A small message slower than a large one does not make the link infinitely fast."""
    line = fit_line((8, 64 << 10, 1 << 20), (2.0e-3, 0.2e-3, 2.0e-3))

    assert line.latency_s <= 0.2e-3
    assert 1.8e-3 / (1 << 20) == pytest.approx(line.seconds_per_byte, rel=0.01)


@pytest.mark.parametrize("disturbed", range(4))
def test_one_disturbed_size_does_not_bend_the_line(disturbed: int) -> None:
    """A size at five times its time keeps the latency (unless smallest) and the slope (unless largest)."""
    sizes = (8, 65536, 1 << 19, 1 << 21)
    times = [1e-3 + size / 1e8 for size in sizes]
    times[disturbed] *= 5
    line = fit_line(sizes, times)

    assert line.latency_s == pytest.approx(1e-3, rel=0.05) or disturbed == 0
    assert line.seconds_per_byte == pytest.approx(1e-8, rel=0.25 if disturbed < 3 else 5)


@given(seconds=st.lists(st.floats(0, 10), min_size=3, max_size=3))
def test_the_fit_is_never_negative(seconds: list[float]) -> None:
    """With any noise, latency is at least 0 and a byte takes some time."""
    line = fit_line(SIZES, seconds)

    assert line.latency_s >= 0
    assert line.seconds_per_byte > 0


def test_a_flat_line_is_taken_pessimistically() -> None:
    """If large messages look faster, the largest one's whole time counts as transfer."""
    assert Line(1.0, 0.5 / 100) == fit_line((1, 10, 100), (3.0, 2.0, 0.5))._replace(latency_s=1.0)


def test_the_budget_counts_shares_from_the_start() -> None:
    """A budget of 60 s that began at 100: the 40 % share ends at 124."""
    budget = Budget(started_s=100, budget_s=60, clock=lambda: 120)

    assert 4 == budget.left_s(0.4)
    assert budget.allows(0.4)
    assert not budget.allows(0.4, needs_s=4)
    assert budget.allows(1.0, needs_s=39)
    assert 4 == budget.with_room(0.4, least=0.05).left_s(0.4)
    assert pytest.approx(15) == budget.with_room(0.4, least=0.25).left_s(0.4)


def test_everyone_follows_rank_0() -> None:
    """Rank 1 gets rank 0's answers in order, not its own."""
    store = OneRankStore()
    answers = [lockstep(store, 0).agree(lambda: True)]
    first = lockstep(store, 0)
    assert [first.agree(lambda: True), first.agree(lambda: False)] == [True, False]

    second = lockstep(store, 1)

    assert [*answers, False] == [second.agree(lambda: False), second.agree(lambda: True)]


def test_rank_0_tells_all() -> None:
    """Every rank gets rank 0's text, also empty and long ones."""
    store = OneRankStore()
    first, second = lockstep(store, 0), lockstep(store, 1)
    texts = ["", "plan", "x" * 100_000]

    assert texts == [first.broadcast(text) for text in texts]
    assert texts == [second.broadcast("mine") for _ in texts]


def test_a_missing_decision_has_a_deadline() -> None:
    """Without rank 0, the others report the awaited text and the time."""
    with pytest.raises(ProbeError, match="waited 7 s in vain for rank 0's decision"):
        lockstep(OneRankStore(), 1).agree(lambda: True)


@pytest.mark.parametrize("steps", [0, 2])
def test_those_who_are_missing_are_named_to_all(steps: int, tmp_path: Path) -> None:
    """Rank 0 waits for the allowed time and names missing slots; the others read it from rank 0."""
    store = OneRankStore()
    progress = Progress(folder=tmp_path, local_rank=1)
    ranks_of_job = [
        Lockstep(
            store=store,
            rank=rank,
            world_size=6,
            timeout_s=7,
            name_of="node{}:0".format,
            progress=progress if rank == 1 else Progress(),
        )
        for rank in range(6)
    ]
    for one in ranks_of_job[:0:-1] * steps:
        one._step += 1
        store.set(f"at/{one.rank}", str(one._step))
    ranks_of_job[0]._step = steps

    with pytest.raises(ProbeError, match=r"waited 10 s in vain for all workers to arrive \(missing: node1:0, ") as told:
        ranks_of_job[0].barrier(left_s=3)
    with pytest.raises(ProbeError, match=r"node4:0 and 1 more\)") as heard:
        ranks_of_job[1].barrier()

    assert str(told.value) == str(heard.value)
    sign = last_sign(tmp_path, 1)
    assert sign is not None
    assert ("all workers to arrive", (1, 2, 3, 4)) == (sign.waits_for, sign.peers)


def test_whoever_comes_in_the_last_moment_is_not_missed() -> None:
    """The last rank may come between the deadline and the check."""

    class LateStore(OneRankStore):
        def wait(self, keys: list[str], timeout: timedelta) -> None:
            self.values.update({"at/1": "1", **dict.fromkeys(keys, "")})
            raise RuntimeError(f"wait timeout after {timeout}")

    lockstep(LateStore(), 0).barrier()


def test_a_lost_store_is_no_deadline() -> None:
    """A lost store is reported, and missing ranks are not searched."""

    class LostStore(OneRankStore):
        def wait(self, keys: list[str], timeout: timedelta) -> None:
            raise RuntimeError("failed to recv, got 0 bytes\nConnection was likely closed.")

    with pytest.raises(ProbeError, match=r"lost the store beside rank 0 while waiting for .*: failed to recv, got"):
        lockstep(LostStore(), 0).barrier()


class CountingStore(OneRankStore):
    """Never waits, and counts operations and bytes."""

    operations = 0
    bytes = 0

    def count(self, *texts: str | bytes) -> None:
        """Count one operation with these texts."""
        self.operations += 1
        self.bytes += sum(map(len, texts))

    def set(self, key: str, value: str) -> None:
        """Keep a value."""
        self.count(key, value)
        super().set(key, value)

    def get(self, key: str) -> bytes:
        """Give it back, or nothing."""
        value = self.values.get(key, "").encode()
        self.count(key, value)
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Give several back."""
        values = [self.values[key].encode() for key in keys]
        self.count(*keys, *values)
        return values

    def add(self, key: str, amount: int) -> int:
        """Count."""
        self.count(key, b"12345678")
        return super().add(key, amount)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Return at once: every awaited rank will come."""
        self.count(*keys)


def test_store_traffic_is_linear_in_ranks() -> None:
    """A rank needs 4 operations for a barrier, 2 for a decision or a text, 1 for a result."""
    counts: dict[int, dict[str, tuple[float, float]]] = {}
    for ranks in (2, 4, 8, 32, 128, 512):
        found = counts[ranks] = {}
        for what, act in (
            ("barrier", lambda one: one.barrier()),
            ("agree", lambda one: one.agree(lambda: True)),
            ("broadcast", lambda one: one.broadcast("x" * 100)),
            ("gather", lambda one: one.gather("x" * 100, left_s=0)),
        ):
            store = CountingStore()
            first, *others = (lockstep(store, rank, ranks) for rank in range(ranks))
            for one in (first, *others) if what in ("agree", "broadcast") else (*others, first):
                act(one)
            found[what] = store.operations / ranks, store.bytes / ranks

    for found in counts.values():
        assert 5 >= found["barrier"][0]
        assert 2 >= max(found["agree"][0], found["broadcast"][0], found["gather"][0])
        # Keys get longer with the digits of a rank, and rank 0 sees each key of a gathering three times.
        assert 90 >= found["barrier"][1]
        assert 300 >= max(found["broadcast"][1], found["gather"][1])


def test_results_come_home_in_rank_order() -> None:
    """Rank 0 gets everyone's text, the others None."""
    store = OneRankStore()

    assert lockstep(store, 1).gather("b", left_s=0) is None
    assert ["a", "b"] == lockstep(store, 0).gather("a", left_s=0)


ENVIRON = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_the_place_is_read_from_torchruns_environment() -> None:
    """The values follow torchrun's contract."""
    assert WorkerPlace(3, 4, "10.0.0.1", 29500, agent_hosts_store=True) == worker_place(ENVIRON)


@pytest.mark.parametrize(("name", "value"), [("RANK", None), ("WORLD_SIZE", "four"), ("MASTER_PORT", "")])
def test_a_bad_environment_is_named(name: str, value: str | None) -> None:
    """The error has the variable and its value."""
    environ = {key: text for key, text in {**ENVIRON, name: value}.items() if text is not None}

    with pytest.raises(ProbeError, match=f"{name}={value!r}"):
        worker_place(environ)


WORKER = (
    "import time; from pipette_launch.probe.lockstep import end_with_parent; "
    "end_with_parent(); print('up', flush=True); time.sleep(600)"
)
PARENT = (
    f"import subprocess, sys; worker = subprocess.Popen([sys.executable, '-c', {WORKER!r}], start_new_session=True); "
    "print(worker.pid, flush=True); worker.wait()"
)


def test_a_worker_ends_with_a_parent_that_is_killed() -> None:
    """After SIGKILL of the parent, the kernel ends the worker."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        assert "up\n" == parent.stdout.readline()

        parent.kill()
        ends_s = time.monotonic() + 20
        while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE and time.monotonic() < ends_s:
            time.sleep(0.02)

        assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
