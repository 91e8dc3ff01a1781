"""Tests of decisions and of measuring advice."""

from __future__ import annotations

import itertools

import pytest
from facts_for_tests import nodes, tiny_job
from hypothesis import given
from hypothesis import strategies as st

from pipette_launch.errors import FactError
from pipette_launch.facts import files
from pipette_launch.facts.messages import (
    Advice,
    Decision,
    Dimension,
    RunTraining,
    StageCase,
    Stop,
    best_left_out,
    read_decision,
)

WHOLE = Decision(nodes=nodes("a", "b", "c", tokens=("t0", "t1", "t2"), num_slots=2))


def test_an_agent_on_standby_has_no_ranks() -> None:
    """The other agents have all ranks without a gap, and come before it."""
    less = WHOLE.leaving_out(["b"])

    assert (("t0", "t2"), ("a", "c"), 4) == (less.tokens, less.hosts, less.num_ranks)
    assert nodes("b", tokens=("t1",), num_slots=2) == less.standby
    assert [(0, 1), (), (2, 3)] == [less.ranks_of(token) for token in WHOLE.tokens]
    assert [0, 2, 1] == [less.place_of(token) for token in WHOLE.tokens]
    assert WHOLE == WHOLE.leaving_out([])
    assert ["t1", "t0"] == [node.token for node in less.leaving_out(["a"]).standby]
    for decision in (RunTraining.of(less, plan=None, attempt=1), Stop.of(less, failed=True)):
        assert decision == read_decision(files.dumps(decision), "itself")


def test_nobody_stands_by_and_works() -> None:
    """An agent that runs workers and is on standby is an error."""
    with pytest.raises(FactError, match="named twice"):
        Decision(nodes=nodes("a"), standby=nodes("a"))


def test_advice_survives_its_file() -> None:
    """The workers read the same advice that was written."""
    advice = Advice(
        dimensions=(Dimension(name="dp", kinds=("all_reduce",), groups=((0, 2), (1, 3))),),
        stages=(StageCase(layout=tiny_job(4).own, pp_rank=0),),
        words="two plans",
    )

    assert advice == files.loads(Advice, files.dumps(advice), "advice")


@pytest.mark.parametrize("groups", [((0,),), ((0, 1), (1, 2)), ((1, 0),)])
def test_bad_groups_are_refused(groups: tuple[tuple[int, ...], ...]) -> None:
    """Groups of one slot, slots in two groups, and descending slots are errors."""
    with pytest.raises(FactError, match="dp: "):
        Dimension(name="dp", kinds=("all_reduce",), groups=groups)


def test_a_stage_must_be_one_of_the_layout() -> None:
    """The message names the rank and the number of stages."""
    with pytest.raises(FactError, match="pp_rank=9 is not one of"):
        StageCase(layout=tiny_job(4).own, pp_rank=9)


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
