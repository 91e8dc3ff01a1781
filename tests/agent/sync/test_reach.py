"""Agents that do not reach each other are found, and as few as will do are left out."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipette_launch.agent.sync import reach
from pipette_launch.agent.sync.peer_watch import GONE, SILENT
from pipette_launch.agent.sync.reach import ReachSweep, best_left_out, out_of_reach
from pipette_launch.facts.messages import Member


def member(name: str) -> Member:
    """An agent that nobody has started."""
    return Member(token=name, address=name, port=1, node_rank=-1)


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([], {}),
        ([("b", "d")], {"d": "b"}),
        ([("d", "b"), ("b", "d")], {"d": "b"}),
        ([("b", "c"), ("b", "d")], {"b": "c"}),
        ([("b", "c"), ("a", "d")], {"d": "a", "c": "b"}),
        ([("b", "x"), ("b", "b")], {}),
    ],
    ids=["none", "later", "both say so", "most", "two wires", "absent"],
)
def test_whoever_misses_most_others_is_left_out(pairs: list[tuple[str, str]], expected: dict[str, str]) -> None:
    """Of two ends of one wire the later one; an agent that did not come counts for nothing."""
    assert expected == best_left_out(pairs, "abcd")


@given(st.sets(st.tuples(st.sampled_from("abcdef"), st.sampled_from("abcdef"))))
def test_those_that_stay_all_reach_each_other(pairs: set[tuple[str, str]]) -> None:
    """Whatever wires are cut, no pair of those that stay is among them."""
    left_out = best_left_out(pairs, "abcdef")

    stay = set("abcdef") - set(left_out)
    assert not {pair for pair in itertools.permutations(stay, 2) if pair in pairs}


@pytest.mark.parametrize("why", [GONE, SILENT])
def test_a_sweep_stops_at_the_first_that_is_lost(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """An agent whose process has ended, too: where a wire is cut the neighbour watches another."""
    answers = {"a": "", "b": why, "c": SILENT}
    monkeypatch.setattr(reach, "LONGEST_PAUSE_S", 0.01)
    monkeypatch.setattr(reach, "why_unreachable", lambda peer, timeout_s: answers[peer.token])
    sweep = ReachSweep([member(name) for name in "abc"])

    ends_s = time.monotonic() + 10.0
    while not sweep.lost and time.monotonic() < ends_s:
        time.sleep(0.01)

    assert (member("b"), why) == (sweep.peer, sweep.lost)


def test_a_sweep_that_is_stopped_hears_the_attempt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that fail at once end a round before any silence has lasted long enough."""

    def silent_for_a_while(_peer: Member, timeout_s: float) -> str:
        time.sleep(0.5)
        return SILENT

    monkeypatch.setattr(reach, "LONGEST_PAUSE_S", 0.01)
    monkeypatch.setattr(reach, "why_unreachable", silent_for_a_while)
    sweep = ReachSweep([member("a"), member("b")])
    time.sleep(0.2)
    assert not sweep.lost

    sweep.stop()

    assert (member("a"), SILENT) == (sweep.peer, sweep.lost)


def test_a_sweep_between_two_attempts_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for what was not asked."""
    monkeypatch.setattr(reach, "why_unreachable", lambda _peer, timeout_s: SILENT)
    sweep = ReachSweep([member("a")])
    began_s = time.monotonic()

    sweep.stop()

    assert time.monotonic() - began_s < 0.5
    assert not sweep.lost


def test_who_stands_by_is_left_out_first() -> None:
    """It costs the training nothing; else it is the later one."""
    agents = [member(name) for name in "abc"]

    assert {"b": "out of reach from c"} == out_of_reach(agents, [("b", "c")], standby=["b"])
    assert {"c": "out of reach from b"} == out_of_reach(agents, [("b", "c")], standby=[])
