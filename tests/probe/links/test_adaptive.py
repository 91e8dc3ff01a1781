"""Passes of planning and measuring, with a planner of ten lines and links that are known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipette_launch.facts import Links
from pipette_launch.probe.harness import Line
from pipette_launch.probe.links.adaptive import Adapted, Lines, Measure, adapt
from pipette_launch.probe.links.sampling import Pair, Round, blind_rounds

Floats = NDArray[np.float64]


def fabric(hosts: int, seed: int) -> Floats:
    """Bytes/s of links that differ at random."""
    rates_HH = np.random.default_rng(seed).uniform(1e9, 4e9, (hosts, hosts))
    return np.minimum(rates_HH, rates_HH.T)


def meter(rates_HH: Floats, taken: list[Round]) -> Measure:
    """Measures exactly, and keeps what it was asked for."""

    def measure(rounds: Sequence[Round]) -> Lines:
        taken.extend(rounds)
        pairs = [pair for one in rounds for pair in one]
        return {(a, b): Line(0.0, 1 / float(rates_HH[a, b])) for pair in pairs for a, b in (pair, pair[::-1])}

    return measure


def ring(links: Links) -> list[Pair]:
    """A ring through all hosts: always on to the fastest link that is left."""
    order = [0]
    while len(order) < links.size:
        rates_H = links.bandwidth_bytes_per_s[order[-1]].copy()
        rates_H[order] = -1.0
        order.append(int(rates_H.argmax()))
    return list(zip(order, [*order[1:], order[0]], strict=True))


def seconds(rates_HH: Floats, pairs: Sequence[Pair]) -> float:
    """Seconds of a byte around the ring."""
    return sum(1 / float(rates_HH[pair]) for pair in pairs)


def adapted(rates_HH: Floats, taken: list[Round], *, most_rounds: int = 14, seed: int = 0) -> Adapted:
    """Four blind rounds, then passes."""
    measure = meter(rates_HH, taken)
    blind = blind_rounds(len(rates_HH), (), 4, np.random.default_rng(seed))
    return adapt(len(rates_HH), measure(blind), measure=measure, advise=ring, most_rounds=most_rounds)


@settings(max_examples=30)
@given(hosts=st.integers(8, 24), seed=st.integers(0, 99), most_rounds=st.integers(0, 20))
def test_no_pair_is_measured_twice_and_the_rounds_are_kept(hosts: int, seed: int, most_rounds: int) -> None:
    """Passes end by themselves or by the limit, rounds are matchings, and a settled plan rests on measured links."""
    taken: list[Round] = []
    found = adapted(fabric(hosts, seed), taken, most_rounds=most_rounds, seed=seed)

    pairs = [pair for one in taken for pair in one]
    assert len(pairs) == len(set(pairs))
    assert all(len({host for pair in one for host in pair}) == 2 * len(one) for one in taken)
    assert found.rounds <= most_rounds
    assert sorted(pairs) == sorted({(min(pair), max(pair)) for pair in found.lines})
    if found.is_settled:
        assert all(pair in found.lines for pair in ring(found.estimate.links))


def test_passes_are_worth_more_than_as_many_blind_rounds() -> None:
    """On 40 hosts with links that all differ, rings planned after passes beat those after as many blind rounds."""
    excess: list[tuple[float, float]] = []
    for seed in range(6):
        rates_HH = fabric(40, seed)
        taken: list[Round] = []
        found = adapted(rates_HH, taken, seed=seed)
        blind_taken: list[Round] = []
        measure = meter(rates_HH, blind_taken)
        blind = measure(blind_rounds(40, (), len(taken), np.random.default_rng(seed)))
        nothing = adapt(40, blind, measure=measure, advise=ring, most_rounds=0)
        best = seconds(rates_HH, ring(Links(latency_s=np.zeros((40, 40)), bandwidth_bytes_per_s=rates_HH)))
        one, other = (seconds(rates_HH, ring(way.estimate.links)) / best - 1 for way in (found, nothing))
        excess.append((one, other))

    adaptive, blindly = np.mean(excess, axis=0)
    assert adaptive < 0.85 * blindly


def test_cached_links_are_verified_where_plans_use_them() -> None:
    """Of 12 hosts only the ring's 12 links are measured again; one that lost half its rate is told, and avoided."""
    rates_HH = fabric(12, 1)
    taken: list[Round] = []
    everything = meter(rates_HH, [])([tuple((a, b) for a in range(12) for b in range(a + 1, 12))])
    used = ring(Links(latency_s=np.zeros((12, 12)), bandwidth_bytes_per_s=rates_HH))
    one, other = used[3]
    now_HH = rates_HH.copy()
    now_HH[one, other] = now_HH[other, one] = rates_HH[one, other] / 2
    found = adapt(12, everything, measure=meter(now_HH, taken), advise=ring, most_rounds=12, is_cached=True)

    assert ((min(one, other), max(one, other)),) == found.changed
    assert found.is_settled
    assert 12 == found.passes[0].new
    assert len(taken) <= 9
    assert (one, other) not in ring(found.estimate.links)


def test_unchanged_cached_links_take_one_pass() -> None:
    """Where nothing changed, one pass of at most 3 rounds confirms the links in use."""
    rates_HH = fabric(12, 1)
    taken: list[Round] = []
    everything = meter(rates_HH, [])([tuple((a, b) for a in range(12) for b in range(a + 1, 12))])
    found = adapt(12, everything, measure=meter(rates_HH, taken), advise=ring, most_rounds=12, is_cached=True)

    assert found.changed == ()
    assert found.is_settled
    assert len(taken) <= 3
    assert [12, 0] == [one.new for one in found.passes]


def test_a_link_that_cannot_be_measured_is_not_asked_for_again() -> None:
    """A measurement that brings nothing does not keep the passes going."""
    rates_HH = fabric(8, 2)
    blind = meter(rates_HH, [])(blind_rounds(8, (), 2, np.random.default_rng(0)))
    calls: list[Sequence[Round]] = []

    def dead(rounds: Sequence[Round]) -> Lines:
        calls.append(rounds)
        return {}

    found = adapt(8, blind, measure=dead, advise=ring, most_rounds=30)

    assert found.is_settled
    assert len(calls) <= 4
    assert blind == found.lines


def test_a_spent_budget_ends_the_passes() -> None:
    """Nothing is asked or measured once the budget does not allow it."""
    rates_HH = fabric(8, 2)
    known = meter(rates_HH, [])(blind_rounds(8, (), 2, np.random.default_rng(0)))
    taken: list[Round] = []
    found = adapt(8, known, measure=meter(rates_HH, taken), advise=ring, most_rounds=9, allows=lambda: False)

    assert ([], (), False) == (taken, found.passes, found.is_settled)
