"""Which agent runs which ranks under a decision."""

from __future__ import annotations

import pytest

from pipette_launch.errors import FactError
from pipette_launch.facts import files
from pipette_launch.facts.messages.round import Decision

WHOLE = Decision(phase="warmup", tokens=("t0", "t1", "t2"), hosts=("a", "b", "c"), num_slots=(2, 2, 2))


def test_an_agent_on_standby_has_no_ranks() -> None:
    """The others have all of them, without a gap, and stand before it."""
    less = WHOLE.leaving_out(["b"])

    assert (("t0", "t2"), ("a", "c"), (2, 2)) == (less.tokens, less.hosts, less.num_slots)
    assert (("t1",), ("b",)) == (less.standby, less.standby_hosts)
    assert [(0, 1), (), (2, 3)] == [less.ranks_of(token) for token in WHOLE.tokens]
    assert [0, 2, 1] == [less.place_of(token) for token in WHOLE.tokens]
    assert WHOLE == WHOLE.leaving_out([])
    assert ("t1", "t0") == less.leaving_out(["a"]).standby
    assert less == files.loads(Decision, files.dumps(less), "itself")


def test_nobody_stands_by_and_works() -> None:
    """A decision that says so is none."""
    with pytest.raises(FactError, match="on standby"):
        Decision(phase="train", tokens=("t0",), hosts=("a",), num_slots=(1,), standby=("t0",), standby_hosts=("a",))
