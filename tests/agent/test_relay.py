"""What an agent on standby hears of what others have measured."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed import HashStore

from pipette_launch.agent.phases import standby
from pipette_launch.agent.sync.store import RoundOver, RoundStore
from pipette_launch.facts.messages import Decision

DECISION = Decision(phase="warmup", tokens=("t1", "t2"), hosts=("b", "c"), num_slots=(1, 1))
WITHOUT_FIRST = Decision(
    phase="warmup",
    tokens=("t1", "t2"),
    hosts=("b", "c"),
    num_slots=(1, 1),
    standby=("t0",),
    standby_hosts=("a",),
)


class Controller:
    """One who measured something, or who is told what others measured."""

    def __init__(self, text: str = "") -> None:
        self.text = text
        self.failure = "?"

    def measured(self) -> str:
        return self.text

    def receive(self, text: str) -> None:
        self.text = text

    def after_warmup(self, decision: Decision, failure: str) -> Decision:
        self.failure = failure
        return decision


def relays(measured: str, decision: Decision = WITHOUT_FIRST) -> tuple[list[Any], list[Controller]]:
    """Three agents, of which the first decides and the second runs RANK 0."""
    store = HashStore()
    controllers = [Controller(), Controller(measured), Controller("nobody asks")]
    return [
        standby.Relay(
            RoundStore(store, rank, 3, is_coordinator=rank == 0),
            decision,
            f"t{rank}",
            policy=controller,  # type: ignore[arg-type]
            view=controller,  # type: ignore[arg-type]
        )
        for rank, controller in enumerate(controllers)
    ], controllers


@pytest.mark.parametrize("piece_bytes", [1 << 22, 7])
def test_whoever_decides_learns_what_was_measured(monkeypatch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    """In pieces that the store takes."""
    monkeypatch.setattr(standby, "MOST_BYTES", piece_bytes)
    agents, controllers = relays("gigabytes a second: äöü" * 50)

    for agent in agents:
        agent.hand_over()
    agents[0].plan("")

    assert ("gigabytes a second: äöü" * 50, "") == (controllers[0].text, controllers[0].failure)


def test_a_failed_warmup_is_known_on_standby() -> None:
    """From the store, for this node watched no workers; nothing is waited for then."""
    agents, controllers = relays("half of it")
    agents[1]._round_store.put("warmup-failed", "rank 1 hangs")

    agents[0].plan("")

    assert ("rank 1 hangs", "") == (controllers[0].failure, controllers[0].text)


def test_what_never_comes_is_no_plan() -> None:
    """Nothing was measured: that is the reason, and the job trains without a plan."""
    agents, controllers = relays("")
    agents[1].hand_over()
    agents[0].plan("")

    assert "left no measurements" in controllers[0].failure


def test_a_lost_node_ends_the_wait() -> None:
    """Whoever waits for measurements that will never come goes to the meeting instead."""
    agents, _ = relays("x")
    agents[1]._round_store.call_all("a node is lost")

    with pytest.raises(RoundOver):
        agents[0].plan("")


def test_a_node_that_measured_keeps_what_it_has() -> None:
    """Where the one who decides took part itself, nothing goes through the store."""
    agents, controllers = relays("x", DECISION.leaving_out(["c"]))
    coordinator = standby.Relay(
        agents[0]._round_store, DECISION.leaving_out(["c"]), "t1", policy=controllers[0], view=controllers[0]
    )

    coordinator.hand_over()
    coordinator.plan("it hangs")

    assert ("", "it hangs") == (controllers[0].text, controllers[0].failure)
    assert not agents[0]._round_store.has("measured")
