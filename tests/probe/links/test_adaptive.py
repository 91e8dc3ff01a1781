"""Passes of planning and measuring, with a planner of ten lines and links that are known."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.distributed import HashStore

from pipette_launch.facts import Links, Samples
from pipette_launch.probe.harness import Conductor, Line
from pipette_launch.probe.links.adaptive import Adapted, Lines, Measure, adapt, in_step
from pipette_launch.probe.links.sampling import Pair, Round, blind_rounds
from pipette_launch.probe.options import LinkSamples

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


def sent(rank: int, rounds: Sequence[Round]) -> list[LinkSamples]:
    """What a rank sends in these rounds, with times that name it."""
    peers = [other for one in rounds for pair in one for other in pair if rank in pair and other != rank]
    samples = Samples(values_s=(1.0 + rank,))
    return [LinkSamples(source=rank, target=peer, sizes_bytes=(8,), samples=(samples,)) for peer in peers]


def merged(links: Sequence[LinkSamples]) -> Lines:
    """One device on each host: slots are hosts."""
    return {(link.source, link.target): Line(0.0, link.samples[0].median_s) for link in links}


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_all_ranks_measure_what_rank_0_chooses(turns: int) -> None:
    """Every rank goes through the same rounds, rank 0 gets everybody's links, and all of them come back at its end."""
    store = HashStore()
    rounds: tuple[Round, ...] = (((0, 1), (2, 3)), ((0, 2),))
    heard: dict[int, list[Sequence[Round]]] = {rank: [] for rank in range(4)}
    ends: dict[int, object] = {}

    def course(measure: Measure) -> list[Lines]:
        return [measure(rounds) for _ in range(turns)]

    def work(rank: int) -> None:
        def take(some: Sequence[Round]) -> list[LinkSamples]:
            heard[rank].append(tuple(some))
            return sent(rank, some)

        conductor = Conductor(store=store, rank=rank, world_size=4, timeout_s=10)
        ends[rank] = in_step(conductor, take, merged, course, patience_s=1.0)

    run_all([lambda rank=rank: work(rank) for rank in range(4)])  # type: ignore[misc]

    expected = {(0, 1): 1.0, (1, 0): 2.0, (2, 3): 3.0, (3, 2): 4.0, (0, 2): 1.0, (2, 0): 3.0}
    assert [[rounds] * turns] * 4 == list(heard.values())
    assert [{pair: Line(0.0, value) for pair, value in expected.items()}] * turns == ends[0].found  # type: ignore[attr-defined]
    assert [2 * turns, turns, 2 * turns, turns] == [len(ends[rank].links) for rank in range(4)]  # type: ignore[attr-defined]
    assert all(ends[rank].found is None for rank in (1, 2, 3))  # type: ignore[attr-defined]


def run_all(works: Sequence[Callable[[], None]]) -> None:
    """Run everything at the same time, and to its end."""
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive()
