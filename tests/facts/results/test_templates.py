"""Plans for other numbers of hosts, fitted to the hosts that are there."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launch.worlds import plan

from pipette_launch.errors import FactError
from pipette_launch.facts import Layout, Plan, files
from pipette_launch.facts.results.templates import by_size, from_candidate, in_order_of, refit

NAMES = "abcdefg"


def planned(hosts: str, *, spares: str = "", templates: tuple[int, ...] = ()) -> Plan:
    """A plan of two devices a host, with templates for so many hosts."""
    made = plan(Layout(dp=2 * len(hosts)), hosts=tuple(hosts))
    smaller = [plan(Layout(pp=2, dp=size), hosts=tuple(hosts)[:size]) for size in templates]
    whole = replace(made, templates=by_size(smaller), other_hosts=tuple(spares))
    return files.loads(Plan, files.dumps(whole), "plan")


@st.composite
def situations(draw: st.DrawFn) -> tuple[Plan, list[str]]:
    """A plan with templates and spares, and hosts in any order, all of which it knows."""
    count = draw(st.integers(2, 5))
    spares = NAMES[count : count + draw(st.integers(0, 2))]
    sizes = draw(st.sets(st.integers(1, count - 1)))
    there = draw(st.permutations(NAMES[:count] + spares))
    made = planned(NAMES[:count], spares=spares, templates=tuple(sizes))
    return made, [*there][: draw(st.integers(0, len(there)))]


@given(situations())
def test_the_largest_plan_that_fits_is_fitted(situation: tuple[Plan, list[str]]) -> None:
    """Each place has one host that is there, those that a plan names keep theirs, and every host stays known."""
    made, there = situation
    sizes = [len(one.hosts) for one in (made, *made.templates)]
    fitted = refit(made, there)

    if fitted is None:
        assert len(there) < min(sizes)
        return
    taken = next(one for one in (made, *made.templates) if len(one.hosts) == len(fitted.hosts))
    assert max(size for size in sizes if size <= len(there)) == len(fitted.hosts)
    assert len(set(fitted.hosts)) == len(fitted.hosts)
    assert set(fitted.hosts) <= set(there)
    assert all(new == old for new, old in zip(fitted.hosts, taken.hosts, strict=True) if old in there)
    assert taken.chosen == fitted.chosen
    assert sorted(sizes) == sorted(len(one.hosts) for one in (fitted, *fitted.templates))
    assert set(made.known_hosts) == set(fitted.known_hosts)


def test_the_quickest_plan_that_fits_is_fitted() -> None:
    """A plan for fewer hosts is taken where its step is shorter."""
    made = planned("abcde", templates=(4, 3))
    four, three = made.templates
    quick = replace(three, chosen=replace(three.chosen, step_time_s=four.chosen.step_time_s / 2))
    fitted = refit(replace(made, templates=(four, quick)), [*"abcd"])

    assert fitted is not None
    assert ("a", "b", "c") == fitted.hosts
    assert ("d", "e") == fitted.other_hosts


@given(situations())
def test_all_hosts_bring_the_first_plan_back(situation: tuple[Plan, list[str]]) -> None:
    """Whatever was lost in between; and fitting twice changes nothing."""
    made, there = situation
    fitted = refit(made, there)
    if fitted is None:
        return
    back = refit(fitted, made.known_hosts)

    assert fitted == refit(fitted, there)
    assert back is not None
    assert (len(made.hosts), made.chosen, {*made.known_hosts}) == (len(back.hosts), back.chosen, {*back.known_hosts})
    assert [len(one.hosts) for one in made.templates] == [len(one.hosts) for one in back.templates]


def test_an_unknown_host_is_not_fitted() -> None:
    """Nothing was measured of it."""
    assert refit(planned("abc", templates=(2,)), ["a", "b", "x"]) is None


def test_who_trained_before_comes_before_a_spare() -> None:
    """A spare may stand by because it is sick."""
    made = planned("abcd", spares="s", templates=(2,))
    fitted = refit(made, ["s", "d", "a"])

    assert fitted is not None
    assert ("a", "d") == fitted.hosts


def test_candidates_that_could_not_start_are_left_out() -> None:
    """What ran is the first of the plan; past the last candidate that is the user's own configuration."""
    made = plan(Layout(pp=4), Layout(tp=2, dp=2), Layout(tp=4), Layout(pp=2, dp=2))
    made = replace(made, num_in_line=2)
    words = [[one.layout.words() for one in from_candidate(made, attempt).candidates()] for attempt in range(4)]

    whole = ["tp1 pp4 dp1 mbs1", "tp2 pp1 dp2 mbs1", "tp4 pp1 dp1 mbs1"]
    assert [whole, whole[1:], whole[2:], []] == words
    assert (True, made.own) == (from_candidate(made, 3).keeps_own, from_candidate(made, 3).chosen)


def test_hosts_take_their_ranks_along() -> None:
    """A plan that lists its hosts otherwise gives each the ranks that it had."""
    made = planned("abc")
    turned = in_order_of(made, ["c", "a", "b"])

    for host in "abc":
        before, after = made.hosts.index(host), turned.hosts.index(host)
        assert made.chosen.placement[2 * before : 2 * before + 2] == turned.chosen.placement[2 * after : 2 * after + 2]
    assert made.own == turned.own


@pytest.mark.parametrize("sizes", [(3,), (2, 2)])
def test_there_is_one_plan_for_each_number_of_hosts(sizes: tuple[int, ...]) -> None:
    """Else it would be open which of them is taken."""
    with pytest.raises(FactError, match="different numbers of hosts"):
        planned("abc", templates=sizes)
