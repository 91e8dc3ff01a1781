"""Who waits for other nodes in torch's rendezvous reads which are missing; one too many reads so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)

from pipette_launch.agent.sync import rendezvous_handler, waiting
from pipette_launch.agent.sync.rendezvous import RendezvousSettings
from pipette_launch.agent.sync.rendezvous_handler import AgentStoreHandler
from pipette_launch.agent.sync.waiting import Waiting
from pipette_launch.errors import ClusterError

ALIKE = "each needs the same --rdzv-endpoint and --rdzv-id"


class Participant(NamedTuple):
    """As torch names a node."""

    addr: str


class Meeting:
    """Stands for torch's dynamic rendezvous: its state, and how its call ends."""

    def __init__(self, *names: str, is_full: bool = False, end: Exception | None = None) -> None:
        nodes = [Participant(name) for name in names]
        self._this_node = "spare" if is_full else nodes[0]
        self._store = HashStore()
        state = SimpleNamespace(participants=nodes, redundancy_list={"spare"} if is_full else set())
        self._state_holder = SimpleNamespace(state=state)
        self._end = end
        self.is_closed_by_us = False

    def get_backend(self) -> str:
        """Name torch's own."""
        return "c10d"

    def get_run_id(self) -> str:
        """Name the job."""
        return "7"

    def next_rendezvous(self) -> str:
        """End as told."""
        if self._end:
            raise self._end
        return "places"

    def shutdown(self) -> bool:
        """Take note."""
        self.is_closed_by_us = True
        return True


def settings(**more: Any) -> RendezvousSettings:
    """Two nodes that meet at n0."""
    facts = {"endpoint": "n0:29500", "node_rank": -1, "may_host_store": True, "least_nodes": 2, "most_nodes": 2}
    return RendezvousSettings(**{**facts, **more})


def lines(inner: Any, place: RendezvousSettings, seconds: tuple[float, ...], capsys: pytest.CaptureFixture[str]) -> str:
    """What is printed by looks after so many seconds."""
    looks = Waiting(inner, place)
    looks.announce()
    for waited_s in seconds:
        looks.look(waited_s)
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("place", "names", "expected"),
    [
        (
            settings(),
            ("n0",),
            f"1 of 2 nodes have come to n0:29500 in 15 s (n0); {ALIKE} (none); waiting up to 600 s",
        ),
        (
            settings(node_rank=0, most_nodes=3, least_nodes=3, join_s=900, flag="--master-addr"),
            ("n0",),
            "1 of 3 nodes have come to n0:29500 in 15 s (n0); missing: --node-rank 1, 2; waiting up to 900 s",
        ),
        (
            settings(least_nodes=3, most_nodes=4, run_id="7", advice="; SLURM"),
            ("n1", "n0"),
            f"2 of 3 to 4 nodes have come to n0:29500 in 15 s (n0, n1); {ALIKE} (7); waiting up to 600 s; SLURM",
        ),
    ],
    ids=["c10d", "static", "elastic"],
)
def test_missing_nodes_are_named(
    place: RendezvousSettings, names: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By rank where ranks are given, else by number, with what all must have alike."""
    assert f"pipette-launch: {expected}\n" == lines(Meeting(*names), place, (1.0, 15.0, 16.0), capsys)


@pytest.mark.parametrize(
    ("place", "names", "seconds", "num_lines"),
    [
        (settings(), ("n0",), (1.0, 14.0), 0),
        (settings(), ("n0", "n1"), (15.0,), 0),
        (settings(), ("n0",), (15.0, 59.0, 60.0, 239.0, 240.0), 3),
        (settings(may_host_store=False), ("n1",), (15.0,), 1),
        (settings(may_host_store=False, least_nodes=100, most_nodes=100), ("n1",), (15.0, 60.0), 0),
        (settings(least_nodes=100, most_nodes=100), ("n0",), (15.0,), 1),
    ],
    ids=["early", "all there", "rarer and rarer", "few nodes", "many nodes", "host of many"],
)
def test_when_a_line_is_printed(
    place: RendezvousSettings,
    names: tuple[str, ...],
    seconds: tuple[float, ...],
    num_lines: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Not while nodes may just be starting, ever more rarely, and in a large job on the first node alone."""
    assert num_lines == lines(Meeting(*names), place, seconds, capsys).count("\n")


def test_names_of_many_nodes_are_cut(capsys: pytest.CaptureFixture[str]) -> None:
    """Eight, and how many more."""
    said = lines(Meeting(*[f"n{i}" for i in range(20)]), settings(least_nodes=64, most_nodes=64), (15.0,), capsys)

    assert "20 of 64 nodes have come to n0:29500 in 15 s (n0, n1, n10, n11, n12, n13, n14, n15 and 12 more)" in said


def test_nodes_that_come_during_a_look_disturb_nothing() -> None:
    """Torch's thread adds them to the same dictionary."""

    class Coming:
        @property
        def addr(self) -> str:
            participants[Participant(f"n{len(participants)}")] = 0
            return "n0"

    participants: dict[Any, int] = {Coming(): 0, Coming(): 1}
    meeting = Meeting("n0")
    meeting._state_holder.state.participants = participants

    Waiting(meeting, settings()).look(1.0)  # type: ignore[arg-type]

    assert 4 == len(participants)


def test_a_launcher_too_many_waits_for_a_lost_node_aloud(capsys: pytest.CaptureFixture[str]) -> None:
    """Once: it may be meant as a replacement."""
    said = lines(Meeting("n1", "n0", is_full=True), settings(advice="; SLURM"), (1.0, 2.0, 100.0), capsys)

    assert (
        "pipette-launch: the job at n0:29500 with --rdzv-id none already has all its 2 nodes (n0, n1), so this "
        "launcher is one too many; raise --nnodes if it belongs to that job, or give another --rdzv-endpoint "
        "if it is another job; waiting to take the place of a lost one; SLURM\n"
    ) == said


def test_a_second_launcher_of_one_node_ends_at_once() -> None:
    """A job of one node replaces nobody, so it would wait in vain."""
    looks = Waiting(Meeting("n0", is_full=True), settings(least_nodes=1, most_nodes=1, advice="; SLURM"))  # type: ignore[arg-type]

    with pytest.raises(
        ClusterError, match=r"already has its one node \(n0\), so this launcher is one too many.*; SLURM$"
    ):
        looks.look(0.1)


def test_a_rendezvous_of_another_kind_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """The handler of etcd has no such state."""
    assert "" == lines(SimpleNamespace(), settings(), (15.0,), capsys)
    assert "0 of 2 nodes have come" in Waiting(SimpleNamespace(), settings()).missing(1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("end", "is_full", "expected"),
    [
        (RendezvousTimeoutError(), False, "the nodes cannot meet: 1 of 2 nodes have come to n0:29500 in 0 s"),
        (RendezvousGracefulExitError(), True, "the job has ended with its own nodes, and this launcher took no part"),
        (RendezvousConnectionError(), True, "the job has ended with its own nodes, and this launcher took no part"),
        (
            RendezvousGracefulExitError(),
            False,
            "the job with --rdzv-id 7 has ended before this launcher joined it",
        ),
        (
            RendezvousClosedError(),
            False,
            "the job with --rdzv-id 7 has ended before this launcher joined it",
        ),
    ],
)
def test_an_end_without_a_round_is_a_sentence(end: Exception, is_full: bool, expected: str) -> None:
    """Where stock torchrun ends with a traceback of its own code (pytorch issue 133380)."""
    handler = AgentStoreHandler(Meeting("n0", end=end), settings(), is_round_over=bool)  # type: ignore[arg-type]
    handler._waiting.look(0.0)
    handler._waiting.is_spare = is_full

    with pytest.raises(ClusterError, match=expected):
        handler.next_rendezvous()


@pytest.mark.parametrize("is_spare", [False, True])
def test_a_launcher_too_many_closes_nobodys_job(is_spare: bool) -> None:
    """Torch closes the rendezvous for all when an agent ends."""
    meeting = Meeting("n0")
    handler = AgentStoreHandler(meeting, settings(), is_round_over=bool)  # type: ignore[arg-type]
    handler._waiting.is_spare = is_spare

    assert (not is_spare, not is_spare) == (handler.shutdown(), meeting.is_closed_by_us)


def test_a_spare_that_is_taken_in_is_one_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """It belongs to the job from then on."""
    monkeypatch.setattr(rendezvous_handler, "GLANCE_S", 0.01)
    handler = AgentStoreHandler(Meeting("n0"), settings(), is_round_over=bool)  # type: ignore[arg-type]
    handler._waiting.is_spare = True

    assert "places" == handler.next_rendezvous()
    assert not handler._waiting.is_spare


def test_the_first_line_leaves_time_to_start() -> None:
    """Torch's imports alone take seconds."""
    assert 15.0 == waiting.FIRST_LINE_S
