"""Agents find each other in a store by counters, and lines name the nodes that are missing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore

from pipette_launch.agent import first_meeting
from pipette_launch.agent.first_meeting import MeetingPlace
from pipette_launch.agent.rendezvous import RendezvousSettings
from pipette_launch.agent.store import StoreGone
from pipette_launch.errors import ClusterError
from pipette_launch.facts.messages import Invitation, Member

ALIKE = "each launcher needs the same --rdzv-endpoint and --rdzv-id"
MANY = "n0, n1, n10, n11, n12, n13, n14, n15"
pytestmark = pytest.mark.timeout(60)


def settings(**more: Any) -> RendezvousSettings:
    """Two nodes that meet at n0."""
    facts = {"endpoint": "n0:29500", "node_rank": -1, "may_host_store": True, "least_nodes": 2, "most_nodes": 2}
    return RendezvousSettings(**{**facts, "last_call_s": 0.3, **more})


@pytest.fixture
def agent() -> Iterator[Callable[..., Member]]:
    """Makes agents whose stores answer."""
    stores = []

    def made(name: str, *, node_rank: int = -1, runs: bool = True) -> Member:
        stores.append(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        port = stores[-1].port if runs else 1
        return Member(token=name, address="127.0.0.1", port=port, node_rank=node_rank, name=name)

    yield made
    stores.clear()


@contextmanager
def arrived(store: HashStore, *members: Member, **more: Any) -> Iterator[list[MeetingPlace]]:
    """Let the agents arrive, of which the first one holds the store."""
    places = [MeetingPlace(store, settings(**more), holds_store=number == 0) for number in range(len(members))]
    assert [place.arrive(member) for place, member in zip(places, members, strict=True)] == [
        number == 0 for number in range(len(members))
    ]
    yield places


def test_the_leader_invites_all_that_came(agent: Any) -> None:
    """It finds itself first, then the others in the order of their arrival."""
    members = [agent(name) for name in ("n0", "n2", "n1")]
    with arrived(HashStore(), *members, least_nodes=3, most_nodes=3) as places:
        there = places[0].gather(members[0])
        invitation = Invitation(leader=members[0], is_signed=True)
        places[0].invite([number for number in there if number > 1], invitation)

        assert {1: members[0], 2: members[1], 3: members[2]} == there
        assert [invitation] * 2 == [place.await_invitation() for place in places[1:]]


def test_after_the_least_number_of_nodes_a_last_call_lets_more_nodes_in(agent: Any) -> None:
    """As torch's c10d does it; a launcher that comes still later waits for the next meeting."""
    members = [agent(f"n{number}") for number in range(4)]
    store = HashStore()
    with arrived(store, *members[:2], least_nodes=2, most_nodes=4) as places, ThreadPoolExecutor(1) as pool:
        gathering = pool.submit(places[0].gather, members[0])
        time.sleep(0.1)
        third = MeetingPlace(store, settings(least_nodes=2, most_nodes=4), holds_store=False)
        assert not third.arrive(members[2])
        assert [1, 2, 3] == list(gathering.result(10))

        fourth = MeetingPlace(store, settings(least_nodes=2, most_nodes=4), holds_store=False)
        fourth.arrive(members[3])
        assert ({4: members[3]}, 4) == places[0].newcomers(3)


def test_a_launcher_that_was_killed_and_started_again_takes_one_place(agent: Any) -> None:
    """A node that can no longer be reached does not count, at the first meeting and later."""
    members = [agent("n0"), agent("n1", runs=False), agent("n1")]
    with arrived(HashStore(), *members, least_nodes=2, most_nodes=2) as places:
        assert [1, 3] == list(places[0].gather(members[0]))
        assert ({3: members[2]}, 3) == places[0].newcomers(1)


def test_without_a_host_of_the_store_the_first_agent_leads(monkeypatch: pytest.MonkeyPatch, agent: Any) -> None:
    """The store may belong to another program."""
    monkeypatch.setattr(first_meeting, "NO_LEADER_S", 0.2)
    store, members = HashStore(), [agent("n0"), agent("n1")]
    places = [MeetingPlace(store, settings(), holds_store=False) for _ in members]
    with ThreadPoolExecutor(2) as pool:
        leads = list(pool.map(MeetingPlace.arrive, places, members))

    assert [False, True] == sorted(leads)


@pytest.mark.parametrize(
    ("facts", "names", "expected"),
    [
        ({}, ("n0",), f"1 of 2 nodes have come to n0:29500 in 15 s (n0); {ALIKE} (none); waiting up to 600 s"),
        (
            {"node_rank": 0, "most_nodes": 3, "least_nodes": 3, "join_s": 900, "flag": "--master-addr"},
            ("n0",),
            "1 of 3 nodes have come to n0:29500 in 15 s (n0); missing: --node-rank 1, 2; waiting up to 900 s",
        ),
        (
            {"least_nodes": 3, "most_nodes": 4, "run_id": "7", "advice": "; SLURM"},
            ("n1", "n0"),
            f"2 of 3 to 4 nodes have come to n0:29500 in 15 s (n0, n1); {ALIKE} (7); waiting up to 600 s; SLURM",
        ),
        (
            {"least_nodes": 64, "most_nodes": 64},
            tuple(f"n{number}" for number in range(20)),
            f"20 of 64 nodes have come to n0:29500 in 15 s ({MANY} and 12 more); {ALIKE} (none); waiting up to 600 s",
        ),
    ],
    ids=["c10d", "static", "elastic", "many"],
)
def test_missing_nodes_are_named(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    facts: dict[str, Any],
    names: tuple[str, ...],
    expected: str,
) -> None:
    """By rank where ranks are given, else by number, with what all must have alike; ever more rarely."""
    place = MeetingPlace(HashStore(), settings(**facts), holds_store=True)
    rank = facts.get("node_rank", -1)
    there = {
        number: Member(token=name, address="a", port=1, node_rank=rank, name=name)
        for number, name in enumerate(names, start=1)
    }
    for waited_s in (1.0, 15.0, 16.0, 59.0):
        monkeypatch.setattr(place, "_waited_s", lambda waited_s=waited_s: waited_s)
        place._speak(there)

    assert f"pipette-launch: {expected}\n" == capsys.readouterr().err


def test_too_few_nodes_end_all_waits(agent: Any) -> None:
    """Each launcher gets the names of the nodes that came."""
    members = [agent("n0"), agent("n1")]
    with (
        arrived(HashStore(), *members, least_nodes=3, most_nodes=3, join_s=0.5) as places,
        ThreadPoolExecutor(1) as pool,
    ):
        waiting = pool.submit(places[1].await_invitation)
        with pytest.raises(ClusterError, match=r"^the nodes cannot meet: 2 of 3 nodes have come .* \(n0, n1\)"):
            places[0].gather(members[0])
        with pytest.raises(ClusterError, match=r"^the nodes cannot meet: 2 of 3 nodes have come .* \(n0, n1\)"):
            waiting.result(10)


@pytest.mark.parametrize(
    ("facts", "names", "expected"),
    [
        (
            {"least_nodes": 1, "most_nodes": 1},
            ("n0",),
            r"already has its one node \(n0\), so this launcher is one too many.*; SLURM$",
        ),
        ({}, ("n0", "n1"), r"already has all its 2 nodes \(n0, n1\), so this launcher is one too many.*; SLURM$"),
    ],
)
def test_a_launcher_too_many_ends_at_once(agent: Any, facts: Any, names: Any, expected: str) -> None:
    """The loss of a node ends a job of a fixed number of nodes, so the launcher would wait in vain."""
    members = [agent("n0"), agent("n1")]
    with arrived(HashStore(), *members, advice="; SLURM", **facts) as places:
        places[0].start(names)
        with pytest.raises(ClusterError, match=expected):
            places[1].await_invitation()


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("n0", "n1"), "waiting to take the place of a lost node; SLURM\n"),
        (("n0",), "has started without this launcher, on n0; waiting up to 600 s until its nodes meet again after a"),
    ],
)
def test_a_late_launcher_of_an_elastic_job_prints_once_that_it_waits(
    agent: Any, capsys: pytest.CaptureFixture[str], names: tuple[str, ...], expected: str
) -> None:
    """And takes part when a leader invites it."""
    members = [agent("n0"), agent("n2")]
    invitation = Invitation(leader=members[0], is_signed=True)
    with (
        arrived(HashStore(), *members, least_nodes=1, advice="; SLURM") as places,
        ThreadPoolExecutor(1) as pool,
    ):
        places[0].start(names)
        waiting: Future[Invitation] = pool.submit(places[1].await_invitation)
        time.sleep(2.5)
        places[0].invite([2], invitation)

        assert invitation == waiting.result(10)
    said = capsys.readouterr().err
    assert expected in said
    assert 1 == said.count("pipette-launch: ")


def test_a_late_launcher_gives_up_after_the_users_time(agent: Any) -> None:
    """--rdzv-conf join_timeout limits its wait, as under torchrun."""
    members = [agent("n0"), agent("n1")]
    with arrived(HashStore(), *members, least_nodes=1, join_s=0.5) as places:
        places[0].start(["n0"])
        with pytest.raises(ClusterError, match=r"the job went on without this launcher for . s, as long as"):
            places[1].await_invitation()


@pytest.mark.parametrize("is_late", [False, True])
def test_the_end_of_the_job_ends_the_wait(agent: Any, is_late: bool) -> None:
    """Where stock torchrun ends with a traceback of its own code (pytorch issue 133380)."""
    members = [agent("n0"), agent("n1")]
    with arrived(HashStore(), *members, least_nodes=1, run_id="7") as places:
        places[1]._is_late = is_late
        places[0].end()
        words = "the job has ended with its own nodes" if is_late else "the job with --rdzv-id 7 has ended before this"
        with pytest.raises(ClusterError, match=words):
            places[1].await_invitation()
        with pytest.raises(ClusterError, match="the job with --rdzv-id 7 has ended before this launcher joined it"):
            places[1].arrive(members[1])


@pytest.mark.parametrize("is_late", [False, True])
def test_a_store_that_is_gone_ends_the_wait(agent: Any, monkeypatch: pytest.MonkeyPatch, is_late: bool) -> None:
    """At once, although torch's own call would wait for ever on a connection whose wire was cut."""
    members = [agent("n0"), agent("n1")]
    with arrived(HashStore(), *members, least_nodes=1) as places:
        places[1]._is_late = is_late

        def gone() -> None:
            raise StoreGone("silent for 15 s")

        monkeypatch.setattr(places[1], "_invitation", gone)
        words = "the job has ended with its own nodes" if is_late else "the store at n0:29500 was there, and is gone"
        with pytest.raises(ClusterError, match=words):
            places[1].await_invitation()
        assert ({}, 7) == MeetingPlace(Gone(), settings(), holds_store=False).newcomers(7)  # type: ignore[arg-type]


class Gone:
    """A store whose process has ended."""

    def add(self, *_: object) -> int:
        """Fail as torch does."""
        raise RuntimeError("Broken pipe")
