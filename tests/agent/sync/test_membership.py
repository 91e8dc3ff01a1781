"""The agents of a job meet in each other's stores, and go on without those that are lost or out of reach."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from launch.worlds import records
from torch.distributed import HashStore

from pipette_launch.agent.sync import gathering, membership
from pipette_launch.agent.sync.membership import Membership
from pipette_launch.agent.sync.peer_watch import SILENT, why_unreachable
from pipette_launch.agent.sync.store import RoundStore
from pipette_launch.facts.messages.membership import Member
from pipette_launch.facts.messages.round import Decision, NodeRecord

pytestmark = [pytest.mark.processes, pytest.mark.timeout(60)]


class Agents:
    """Some agents of one process, each with its own store."""

    def __init__(self, count: int) -> None:
        store = HashStore()
        self.records = records(count)
        self.all = [Membership(record.token, "127.0.0.1", -1) for record in self.records]
        self.held: list[Decision | None] = [None] * count
        self.lost: Mapping[str, str] = {}
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(lambda number: self.all[number].join(store, number, count), range(count)))

    def meet(self, *numbers: int) -> list[tuple[Decision, RoundStore]]:
        """Let these agents meet; returns what each goes by afterwards."""

        def come(number: int) -> tuple[Decision, RoundStore]:
            found = self.all[number].meet(
                self.records[number], self.held[number], decide=self.decide, is_awaited=lambda: False
            )
            self.held[number] = found[0]
            return found

        with ThreadPoolExecutor(len(numbers)) as pool:
            return list(pool.map(come, numbers))

    def decide(self, some: Sequence[NodeRecord], _held: Decision | None, lost: Mapping[str, str]) -> Decision:
        """Let all that came train, and remember who is lost."""
        self.lost = lost
        return Decision(
            phase="train",
            tokens=tuple(record.token for record in some),
            hosts=tuple(record.token.removeprefix("token-") for record in some),
            num_slots=tuple(record.num_slots for record in some),
        )


@pytest.fixture
def cut_wires(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes ports unreachable, for all agents of this process."""

    def cut(*ports: int) -> None:
        def why(peer: Member, *, timeout_s: float) -> str:
            return SILENT if peer.port in ports else why_unreachable(peer, timeout_s=timeout_s)

        for room in (gathering, membership):
            monkeypatch.setattr(room, "why_unreachable", why)

    return cut


def test_all_go_by_the_decision_of_the_first() -> None:
    """Each of them knows it, and nobody is lost."""
    agents = Agents(3)
    decisions = [decision for decision, _ in agents.meet(0, 1, 2)]

    assert [decisions[0]] * 3 == decisions
    assert 3 == len(decisions[0].tokens)


def test_when_the_first_is_gone_the_next_one_decides() -> None:
    """The others still know what they went by."""
    agents = Agents(3)
    agents.meet(0, 1, 2)
    agents.all[1].leave_behind(["token-node0"], SILENT)
    agents.all[2].leave_behind(["token-node0"], SILENT)
    after = agents.meet(1, 2)

    assert ("token-node1", "token-node2") == after[0][0].tokens == after[1][0].tokens
    assert {"node0": SILENT} == agents.lost


def test_of_two_that_do_not_reach_each_other_one_is_left_out(cut_wires: Any) -> None:
    """Both reach the first, to which one says so; when the wire is mended nobody is."""
    agents = Agents(3)
    agents.meet(0, 1, 2)
    peer = agents.all[2]._own
    cut_wires(peer.port)
    agents.all[1]._say_lost(peer, SILENT)
    agents.meet(0, 1, 2)
    told = agents.lost
    cut_wires()
    agents.meet(0, 1, 2)

    assert {"node2": "out of reach from 127.0.0.1"} == told
    assert {} == agents.lost
