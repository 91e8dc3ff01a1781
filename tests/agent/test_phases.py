"""A plan that has trained is told from one that cannot start, on every node alike."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from agent.test_elastic import ALONE, WARMUP, await_end, finish, free_port, seen, start
from torch.distributed import HashStore

from pipette_launch.agent.phases import FirstIteration
from pipette_launch.agent.store import RoundStore


def witnesses(count: int, *, proven: bool = False) -> list[FirstIteration]:
    """One for each node of a round."""
    store = HashStore()
    return [FirstIteration(RoundStore(store, count, is_coordinator=rank == 0), proven=proven) for rank in range(count)]


def test_an_iteration_is_known_everywhere() -> None:
    """The node that saw it tells the others."""
    first, second = witnesses(2)
    first.see()

    before = second.has_trained()
    first.share()
    first.share()

    assert (False, True, True) == (before, first.has_trained(), second.has_trained())


def test_waits_a_moment_for_the_news() -> None:
    """A worker may die between the first iteration and the moment at which the last rank's agent tells of it."""
    first, second = witnesses(2)
    first.see()
    timer = threading.Timer(0.2, first.share)
    timer.start()

    assert second.has_trained(wait_s=5)
    timer.join()


def test_one_node_has_nobody_to_wait_for() -> None:
    """What it has not seen has not happened."""
    (only,) = witnesses(1)
    began_s = time.monotonic()

    assert not only.has_trained(wait_s=5)
    assert time.monotonic() - began_s < 1


def test_a_restart_is_proven() -> None:
    """What trained before the restart is no plan that cannot start."""
    (only,) = witnesses(1, proven=True)

    assert only.has_trained()


@pytest.mark.parametrize("trained", [True, False])
def test_the_first_word_counts(trained: bool) -> None:
    """All nodes hold the verdict of the one that spoke first."""
    first, second = witnesses(2)

    verdicts = [first.settle(trained=trained), second.settle(trained=not trained)]

    assert ["after-first-iteration" if trained else "before-first-iteration"] * 2 == verdicts


def test_a_lost_store_leaves_what_was_seen_here() -> None:
    """When the store went with its host the node judges alone, and the job ends as under torchrun."""

    class Gone(HashStore):
        def _raise(self, *_: object) -> None:
            raise RuntimeError("connection reset")

        check = add = set = compare_set = _raise  # type: ignore[assignment]

    alone = FirstIteration(RoundStore(Gone(), 2, is_coordinator=False), proven=False)
    silent = alone.has_trained(wait_s=1)
    alone.see()

    assert (False, True) == (silent, alone.has_trained())
    assert "after-first-iteration" == alone.settle(trained=True)


pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


def nodes(
    folder: Path,
    names: str,
    table: dict[str, Any],
    orders: dict[str, Any],
    *flags: str,
    script: str = "",
    is_warm: bool = False,
) -> dict[str, subprocess.Popen[str]]:
    """Start agents of one slot each, of which all but one must train; the first hosts the store."""
    port = free_port()
    flags += (f"--nnodes={len(names) - 1}:{len(names)}", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}")

    def begun(node: str) -> subprocess.Popen[str]:
        return start(folder, table, orders, *flags, node=node, script=script, is_warm=is_warm)

    agents = {names[0]: begun(names[0])}
    await_store(port)
    return agents | {node: begun(node) for node in names[1:]}


def await_store(port: int) -> None:
    """Wait until an agent hosts the store there."""
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        with contextlib.suppress(OSError), socket.create_connection(("localhost", port)):
            return
        time.sleep(0.05)
    raise AssertionError("nobody hosts the store")


def ends(agents: dict[str, subprocess.Popen[str]]) -> tuple[dict[str, int], dict[str, str]]:
    """Wait for the agents; returns exit codes and what was written, by node."""
    ended = {node: finish(agent) for node, agent in agents.items()}
    return {node: codes[0] for node, (codes, _) in ended.items()}, {node: text for node, (_, text) in ended.items()}


def nodes_of(folder: Path) -> set[str]:
    """On which nodes a rank has trained."""
    return {entry["node"] for entry in seen(folder).values()}


def await_files(folder: Path, pattern: str, count: int) -> None:
    """Wait until workers have left so many files."""
    end_s = time.monotonic() + 120
    while len(list(folder.glob(pattern))) < count:
        assert time.monotonic() < end_s, f"{count} {pattern} did not come"
        time.sleep(0.05)


def test_trains_on_two_of_three_nodes(tmp_path: Path) -> None:
    """The third runs no worker, whoever it is, also after a worker was killed and all have met again; it ends well."""
    table = {"warmup": WARMUP, "placements": [[1, 0]], "standby": ["a"]}
    agents = nodes(tmp_path, "abc", table, {"die_once": 0, "iterations": 5}, "--max-restarts=1", is_warm=True)

    codes, texts = ends(agents)

    assert {"a": 0, "b": 0, "c": 0} == codes, texts
    assert ["warmup-0", "warmup-1"] == sorted(path.name for path in tmp_path.glob("warmup-*"))
    got = seen(tmp_path)
    assert {"0-0", "0-1", "1-0", "1-1"} == set(got)
    assert {("2", "2", 1)} == {(one["WORLD_SIZE"], one["GROUP_WORLD_SIZE"], one["sum"]) for one in got.values()}
    assert {"0", "1"} == {one["GROUP_RANK"] for one in got.values()}
    assert {"b", "c"} == nodes_of(tmp_path)
    # Whoever decides knows what was measured, also where it took no part in it.
    (coordinator,) = [node for node, text in texts.items() if "SHOW" in text]
    # torch numbers nodes of one address by their process ids.
    reasons = ("measured by b", "measured by c") if coordinator == "a" else ("",)
    assert any(f"SHOW train attempt=0 reason={reason}\n" in texts[coordinator] for reason in reasons)
    assert [] == [path.name for path in tmp_path.glob("pipette*")]


def test_a_signal_ends_an_agent_on_standby_at_once(tmp_path: Path) -> None:
    """It was measured and trains no more; the other trains on, and does not wait for it at its end."""
    script = (
        "import os, pathlib, sys, time\n"
        "out = pathlib.Path(sys.argv[1])\n"
        "(out / ('up-' + os.environ['RANK'] + '-of-' + os.environ['WORLD_SIZE'])).touch()\n"
        "while not (out / 'go').exists():\n    time.sleep(0.05)\n"
    )
    table = {"warmup": WARMUP, "placements": [[0]], "standby_later": ["b"]}
    agents = nodes(tmp_path, "ab", table, {}, script=script)
    await_files(tmp_path, "up-0-of-1", 1)

    agents["b"].terminate()
    sent_s = time.monotonic()
    await_end(agents["b"], most_s=60)
    took_s = time.monotonic() - sent_s
    others = agents["a"].poll()
    (tmp_path / "go").touch()
    codes, texts = ends(agents)

    assert ["warmup-0", "warmup-1"] == sorted(path.name for path in tmp_path.glob("warmup-*"))
    assert None is others
    assert {"a": 0, "b": 1} == codes, texts
    assert "got signal: 15" in texts["b"]
    assert took_s < 15


def test_a_lost_signal_ends_an_agent_on_standby(tmp_path: Path) -> None:
    """Python drops the exception of a signal that comes while an object is deleted; the agent ends all the same."""
    script = "import pathlib, sys, time\nwhile not (pathlib.Path(sys.argv[1]) / 'go').exists():\n    time.sleep(0.05)\n"
    table = {"placements": [[0]], "standby": ["b"], "loses_signal": ["b"]}

    agents = nodes(tmp_path, "ab", table, {}, script=script)
    await_end(agents["b"], most_s=60)
    (tmp_path / "go").touch()
    codes, texts = ends(agents)

    assert {"a": 0, "b": 1} == codes, texts
    assert "Exception ignored in" in texts["b"]
    assert "got signal: 15" in texts["b"]


def test_a_failed_job_fails_on_standby_too(tmp_path: Path) -> None:
    """With the reason of the node on which it failed."""
    table = {"placements": [[0]], "standby": ["a"]}

    codes, texts = ends(nodes(tmp_path, "ab", table, {"die_once": 0, "iterations": 5, **ALONE}, is_warm=True))

    assert {"a": 1, "b": 1} == codes, texts
    assert "rank 0 ended with signal 9" in texts["a"]
