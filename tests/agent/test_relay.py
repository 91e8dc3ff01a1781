"""What an agent on standby hears: that a phase is over, why a job failed, and what others have measured."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed import HashStore

from pipette_launch.agent.phases import standby
from pipette_launch.agent.sync.store import RoundStore
from pipette_launch.errors import ClusterError
from pipette_launch.facts.messages.round import Decision

DECISION = Decision(phase="warmup", tokens=("t1", "t2"), hosts=("b", "c"), num_slots=(1, 1))
WITHOUT_FIRST = Decision(
    phase="warmup",
    tokens=("t1", "t2"),
    hosts=("b", "c"),
    num_slots=(1, 1),
    standby=("t0",),
    standby_hosts=("a",),
)


class Handler:
    """A rendezvous that is closed, open, or out of reach."""

    def __init__(self, state: bool | Exception) -> None:
        self.state = state

    def is_closed(self) -> bool:
        if isinstance(self.state, Exception):
            raise self.state
        return self.state


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


def is_over(state: bool | Exception, **said: str) -> bool:
    """Look at a store in which this was said."""
    round_store = RoundStore(HashStore(), 0, 2, is_coordinator=False)
    for key, text in said.items():
        round_store.put(key.replace("_", "/"), text)
    handler: Any = Handler(state)
    return standby.is_over(round_store, handler, "train")


def test_it_waits_until_the_others_are_done() -> None:
    """Whoever ends a phase closes the rendezvous afterwards, so the end counts; one of another phase does not."""
    assert not is_over(False)
    assert not is_over(False, over_warmup="yes")
    assert is_over(False, over_train="yes")
    assert is_over(True, over_train="yes")


@pytest.mark.parametrize(
    ("state", "said", "expected"),
    [
        (False, {"failed": "rank 3 ended with signal 9"}, "the job failed elsewhere: rank 3 ended with signal 9"),
        (True, {}, "the job failed elsewhere: a node gave it up"),
        (RuntimeError("reset"), {}, "the host of the rendezvous store is gone: reset"),
    ],
)
def test_it_fails_with_the_job(state: bool | Exception, said: dict[str, str], expected: str) -> None:
    """At once, with what is known of the reason."""
    with pytest.raises(ClusterError, match=expected):
        is_over(state, **said)


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
    agents[0].plan("", is_gone=lambda: False)

    assert ("gigabytes a second: äöü" * 50, "") == (controllers[0].text, controllers[0].failure)


def test_a_failed_warmup_is_known_on_standby() -> None:
    """From the store, for this node watched no workers; nothing is waited for then."""
    agents, controllers = relays("half of it")
    agents[1]._round_store.put("warmup-failed", "rank 1 hangs")

    agents[0].plan("", is_gone=lambda: False)

    assert ("rank 1 hangs", "") == (controllers[0].failure, controllers[0].text)


def test_what_never_comes_is_no_plan() -> None:
    """Nothing measured, or everybody gone: that is the reason, and the job trains without a plan."""
    for measured, gone, expected in (("", False, "left no measurements"), ("x", True, "the nodes of the job changed")):
        agents, controllers = relays(measured)
        if not gone:
            agents[1].hand_over()
        agents[0].plan("", is_gone=lambda gone=gone: gone)

        assert expected in controllers[0].failure


def test_a_node_that_measured_keeps_what_it_has() -> None:
    """Where the one who decides took part itself, nothing goes through the store."""
    agents, controllers = relays("x", DECISION.leaving_out(["c"]))
    coordinator = standby.Relay(
        agents[0]._round_store, DECISION.leaving_out(["c"]), "t1", policy=controllers[0], view=controllers[0]
    )

    coordinator.hand_over()
    coordinator.plan("it hangs", is_gone=lambda: False)

    assert ("", "it hangs") == (controllers[0].text, controllers[0].failure)
    assert not agents[0]._round_store.has("measured")
