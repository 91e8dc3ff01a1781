"""Tests of the choice of links: rounds of disjoint pairs, groups of near hosts, estimates, and scouting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipette_launch.probe.links.selection import (
    SCOUTED_ROUNDS,
    Line,
    Lines,
    Pair,
    Place,
    Round,
    all_pairs,
    blind_rounds,
    changed_links,
    estimate,
    groupings_of,
    lowest_level,
    rounds_of,
    scout,
    scouting_round,
    switch_groups,
    tiers_between,
)

PAIRS = st.lists(st.tuples(st.integers(0, 13), st.integers(0, 13)), max_size=90)


def are_matchings(rounds: Sequence[Round]) -> bool:
    """Return whether no host is in two pairs of a round."""
    return all(max(Counter(host for pair in one for host in pair).values(), default=0) <= 1 for one in rounds)


def degree(pairs: Sequence[Pair]) -> int:
    """Return the number of pairs of the busiest host."""
    return max(Counter(host for pair in pairs for host in pair).values(), default=0)


@given(pairs=PAIRS)
def test_every_pair_is_in_one_round(pairs: list[Pair]) -> None:
    """Rounds are matchings, and fewer than twice the number of pairs of the busiest host."""
    rounds = rounds_of(pairs)

    wanted = sorted({(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]})
    assert wanted == sorted(pair for one in rounds for pair in one)
    assert are_matchings(rounds)
    assert len(rounds) <= max(2 * degree(wanted) - 1, 0)


def test_a_plan_of_many_hosts_takes_few_rounds() -> None:
    """Rings along rows and paths along columns of 1,280 hosts, 4 links a host: 5 rounds or fewer."""
    seat_PR = np.arange(1280).reshape(16, 80)
    rings = zip(seat_PR.ravel().tolist(), np.roll(seat_PR, 1, axis=1).ravel().tolist(), strict=True)
    paths = zip(seat_PR[1:].ravel().tolist(), seat_PR[:-1].ravel().tolist(), strict=True)

    assert len(rounds_of([*rings, *paths])) <= 5


@pytest.mark.parametrize(("hosts", "rounds"), [(0, 0), (1, 0), (2, 1), (3, 3), (4, 3), (5, 5), (8, 7), (9, 9)])
def test_all_pairs_take_the_fewest_rounds(hosts: int, rounds: int) -> None:
    """N hosts need N - 1 rounds, or N if N is odd, and meet every pair once."""
    found = all_pairs(range(hosts))

    assert rounds == len(found)
    assert are_matchings(found)
    assert sorted(pair for one in found for pair in one) == [(a, b) for a in range(hosts) for b in range(a + 1, hosts)]


@given(hosts=st.integers(2, 40), count=st.integers(1, 12), seed=st.integers(0, 99), tier=st.sampled_from([0, 1, 2]))
def test_blind_rounds_are_new_matchings(hosts: int, count: int, seed: int, tier: int) -> None:
    """With or without switches: matchings, no pair twice, no empty round, at most `count` rounds."""
    places = [("root", f"pod{host // 16}", f"leaf{host // 4}")[: tier + 1] for host in range(hosts)] if tier else []
    rounds = blind_rounds(hosts, switch_groups(hosts, places), count, np.random.default_rng(seed))

    pairs = [pair for one in rounds for pair in one]
    assert 1 <= len(rounds) <= count
    assert are_matchings(rounds)
    assert all(rounds)
    assert len(pairs) == len(set(pairs))


def test_every_tier_of_switches_gets_its_rounds() -> None:
    """Four of eight rounds stay below the leaves, two use each higher tier, and nearly all hosts are busy."""
    places = [("root", f"pod{host // 64}", f"leaf{host // 8}") for host in range(256)]
    rounds = blind_rounds(256, switch_groups(256, places), 8, np.random.default_rng(1))

    shared = [Counter(sum(a == b for a, b in zip(places[i], places[j], strict=True)) for i, j in one) for one in rounds]
    assert [3, 2, 3, 1, 3, 2, 3, 1] == [max(one) for one in shared]
    assert all(len(one) == 1 for one in shared)
    assert min(len(one) for one in rounds) >= 110


def test_switches_that_tell_nothing_are_no_tier() -> None:
    """Left out: a switch over all hosts, one above each host alone, and a tier equal to the one above."""
    places = [("root", f"leaf{host // 2}", f"leaf{host // 2}", f"port{host}") for host in range(4)]

    assert [[0, 0, 1, 1]] == [group_H.tolist() for group_H in switch_groups(4, places)]
    assert () == switch_groups(4, [])
    assert () == switch_groups(4, [*places[:3], ()])


Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
HOSTS = 128


def tiers_of(places: list[Place]) -> Ints:
    """Return the tier of each pair of hosts with these switches."""
    return tiers_between(len(places), switch_groups(len(places), places))


def inferred_tiers(hosts: int, lines: Lines) -> Ints:
    """Return the tier of each pair of hosts, as inferred from measured links."""
    return tiers_between(hosts, [one.group_H for one in groupings_of(hosts, lines)])


def racks(rng: np.random.Generator, hosts: int = HOSTS, size: int = 16) -> list[Place]:
    """Return hosts of racks, in random order."""
    return [("root", f"rack{at // size}") for at in rng.permutation(hosts).tolist()]


def fabric(places: list[Place], rng: np.random.Generator, *, noise: float = 0.05, slow: int = 0) -> Floats:
    """Return seconds per byte: 10 GB/s in a rack, 7 between racks, with noise and some slow hosts."""
    hosts = len(places)
    noise_HH = np.triu(np.abs(rng.normal(0, noise, (hosts, hosts))), 1)
    speed_H = np.ones(hosts)
    speed_H[rng.choice(hosts, slow, replace=False)] = 0.6
    rates_HH = np.where(tiers_of(places) == 0, 10e9, 7e9) * np.minimum(speed_H[:, None], speed_H)
    seconds_HH: Floats = 1 / (rates_HH * (1 - noise_HH - noise_HH.T))
    return seconds_HH


def measured(seconds_HH: Floats, pairs: list[Pair]) -> dict[Pair, Line]:
    """Return the lines of both directions of each pair."""
    return {way: Line(0.0, float(seconds_HH[way])) for pair in pairs for way in (pair, pair[::-1])}


def scouted(seconds_HH: Floats, rng: np.random.Generator, rounds: int) -> tuple[dict[Pair, Line], int]:
    """Measure four blind rounds, and scout until nothing is open; returns lines and number of scouting rounds."""
    hosts = len(seconds_HH)
    blind = [pair for one in blind_rounds(hosts, (), 4, rng) for pair in one]
    lines = measured(seconds_HH, blind)
    for done in range(rounds):
        pairs = scouting_round(hosts, lines, rng)
        if not pairs:
            return lines, done
        lines.update(measured(seconds_HH, list(pairs)))
    return lines, rounds


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 999), slow=st.integers(0, 3))
def test_racks_are_found_in_few_rounds(seed: int, slow: int) -> None:
    """128 hosts in 8 racks: 98 % of the pairs are right after at most 20 instead of 127 rounds."""
    rng = np.random.default_rng(seed)
    places = racks(rng)
    lines, _ = scouted(fabric(places, rng, slow=slow), rng, 16)
    near_HH = inferred_tiers(HOSTS, lines) == 0
    truth_HH = tiers_of(places) == 0

    assert (near_HH != truth_HH).mean() <= 0.02


def test_racks_are_found_above_64_hosts() -> None:
    """100 hosts in 10 racks: the blind sample misplaces 5 % of the pairs of hosts, and scouting at most 1 %."""
    rng = np.random.default_rng(0)
    places = racks(rng, 100, 10)
    seconds_HH, blind = fabric(places, rng), blind_rounds(100, (), 4, rng)

    def measure(rounds: Sequence[Round]) -> Lines:
        return measured(seconds_HH, [pair for one in rounds for pair in one])

    def wrong(lines: Lines) -> float:
        return float(((inferred_tiers(100, lines) == 0) != (tiers_of(places) == 0)).mean())

    found = scout(100, measure(blind), measure=measure)

    assert wrong(measure(blind)) > 0.05
    assert wrong(found.lines) <= 0.01
    assert found.scouting <= 20
    assert SCOUTED_ROUNDS == 4 + found.scouting + found.random
    assert f"links: {found.scouting} more rounds to find hosts near each other, and {found.random} of" in found.words()


@pytest.mark.parametrize(("hosts", "slow", "rounds"), [(128, 6, 14), (256, 10, 26)])
def test_slow_hosts_are_found_in_their_racks(hosts: int, slow: int, rounds: int) -> None:
    """Near links of a slow host are slower than far links of other hosts, but scouting finds the host's rack."""
    rng = np.random.default_rng(0)
    places = racks(rng, hosts)
    lines, taken = scouted(fabric(places, rng, slow=slow), rng, 40)

    assert taken <= rounds
    assert np.array_equal(tiers_of(places), inferred_tiers(hosts, lines))


def test_tiers_within_tiers_are_found() -> None:
    """Racks in pods are found as two tiers, the wider one first."""
    rng = np.random.default_rng(1)
    places: list[Place] = [("root", f"pod{host // 64}", f"rack{host // 8}") for host in range(256)]
    tier_HH = tiers_of(places)
    seconds_HH = 1 / np.array([10e9, 7e9, 4e9])[tier_HH]
    lines, _ = scouted(seconds_HH, rng, 30)

    assert [4, 32] == [int(grouping.group_H.max()) + 1 for grouping in groupings_of(256, lines)]
    assert np.array_equal(tier_HH, inferred_tiers(256, lines))


def test_a_disturbed_link_does_not_join_racks() -> None:
    """One link between racks that looks fast misplaces at most one host."""
    rng = np.random.default_rng(2)
    places = racks(rng)
    seconds_HH = fabric(places, rng)
    one, other = next(pair for one in blind_rounds(HOSTS, (), 4, np.random.default_rng(2)) for pair in one)
    rng = np.random.default_rng(2)
    seconds_HH[one, other] = seconds_HH[other, one] = 1 / 10e9
    lines, _ = scouted(seconds_HH, rng, 18)
    near_HH = inferred_tiers(HOSTS, lines) == 0

    assert places[one] != places[other]
    assert (one, other) in lines
    assert (near_HH != (tiers_of(places) == 0)).mean() <= 0.03


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.08])
def test_a_flat_network_has_no_tiers(noise: float) -> None:
    """Noise alone makes no groups, so there is nothing to scout."""
    rng = np.random.default_rng(3)
    seconds_HH = fabric([()] * HOSTS, rng, noise=noise)
    lines = measured(seconds_HH, [pair for one in blind_rounds(HOSTS, (), 8, rng) for pair in one])

    assert () == groupings_of(HOSTS, lines)
    assert scouting_round(HOSTS, lines, rng) == ()


@given(hosts=st.integers(2, 40), seed=st.integers(0, 99), count=st.integers(1, 8))
def test_scouting_rounds_are_new_matchings(hosts: int, seed: int, count: int) -> None:
    """No host is in two pairs, and no known pair is measured again."""
    rng = np.random.default_rng(seed)
    seconds_HH = fabric(racks(rng, hosts, 4), rng, noise=0.02)
    lines = measured(seconds_HH, [pair for one in blind_rounds(hosts, (), count, rng) for pair in one])
    pairs = scouting_round(hosts, lines, rng)

    assert len({host for pair in pairs for host in pair}) == 2 * len(pairs)
    assert all(one < other for one, other in pairs)
    assert not any(pair in lines for pair in pairs)


def test_the_lowest_valley_is_where_far_ends() -> None:
    """Three peaks: the slowest is far, the other two are near; a few slow links below are no peak."""
    rng = np.random.default_rng(4)
    heaps = [rng.normal(np.log(rate), 0.02, count) for rate, count in ((3e9, 5), (5e9, 300), (7e9, 80), (10e9, 40))]
    level = lowest_level(np.concatenate(heaps))

    assert level is not None
    assert np.log(5.2e9) < level < np.log(6.8e9)


NUM_HOSTS = 48
PLACES: list[Place] = [("root", f"pod{host // 24}", f"leaf{host // 8}") for host in range(NUM_HOSTS)]
TIER_HH = tiers_of(PLACES)


def in_tiers(ends_HH: Floats) -> Floats:
    """Return bytes/s: each tier of switches is slower than the one below, times the factors of the ends."""
    return np.array([40e9, 25e9, 10e9])[TIER_HH] * ends_HH


def seen(rates_HH: Floats, count: int, places: list[Place], seed: int = 0) -> dict[tuple[int, int], Line]:
    """Return the lines of `count` blind rounds: latency of 1 us for each tier, both directions."""
    groups = switch_groups(NUM_HOSTS, places)
    pairs = [pair for one in blind_rounds(NUM_HOSTS, groups, count, np.random.default_rng(seed)) for pair in one]
    return {
        (a, b): Line(1e-6 * (1 + int(TIER_HH[a, b])), 1 / float(rates_HH[a, b]))
        for one, other in pairs
        for a, b in ((one, other), (other, one))
    }


def errors(lines: Lines, rates_HH: Floats) -> Floats:
    """Return the relative errors of the links estimated from these lines."""
    return np.abs(estimate(NUM_HOSTS, lines, PLACES).bandwidth_bytes_per_s / rates_HH - 1)[estimated_HH(lines)]


def estimated_HH(lines: Lines) -> NDArray[np.bool_]:
    """Return whether each link has no line."""
    found_HH = ~np.eye(NUM_HOSTS, dtype=bool)
    found_HH[tuple(zip(*lines, strict=True))] = False
    return found_HH


@settings(max_examples=20)
@given(
    count=st.integers(6, 20),
    seed=st.integers(0, 50),
    bad=st.sets(st.integers(0, NUM_HOSTS - 1), max_size=2),
)
def test_a_fabric_of_tiers_and_slow_hosts_is_recovered(count: int, seed: int, bad: set[int]) -> None:
    """If tier and slower end decide, few rounds estimate 90 % of the links to 1 %."""
    speed_H = np.array([0.5 if host in bad else 1.0 for host in range(NUM_HOSTS)])
    rates_HH = in_tiers(np.minimum(speed_H[:, None], speed_H))
    off = errors(seen(rates_HH, count, PLACES, seed), rates_HH)

    assert np.quantile(off, 0.9) <= 0.01
    # With a few links of a slow host measured, it is not quite believed to be as slow as it seems.
    assert off.max() <= 0.6


def test_hosts_of_many_speeds_are_told_apart() -> None:
    """If half of the hosts are slow, half of the unmeasured links are estimated to 3 %."""
    speed_H = np.random.default_rng(3).choice([0.5, 1.0], NUM_HOSTS)
    rates_HH = in_tiers(np.minimum(speed_H[:, None], speed_H))

    assert np.median(errors(seen(rates_HH, 16, PLACES), rates_HH)) <= 0.03


def test_what_was_measured_stays_as_it_is() -> None:
    """Measured links are kept for each direction."""
    lines = {(0, 1): Line(1e-6, 1e-9), (1, 0): Line(2e-6, 2e-9), (2, 3): Line(1e-6, 1e-9)}
    found = estimate(4, lines)

    assert found.bandwidth_bytes_per_s[0, 1] == pytest.approx(1e9)
    assert found.bandwidth_bytes_per_s[1, 0] == pytest.approx(5e8)
    assert 2e-6 == found.latency_s[1, 0]


def test_latencies_are_those_of_the_tier() -> None:
    """An estimated link has the median latency of its tier."""
    found = estimate(
        NUM_HOSTS,
        seen(in_tiers(np.ones((NUM_HOSTS, NUM_HOSTS))), 6, PLACES),
        PLACES,
    )

    off_HH = found.latency_s - 1e-6 * (1 + TIER_HH)
    np.fill_diagonal(off_HH, 0.0)
    assert np.abs(off_HH).max() < 1e-12


def test_a_tier_without_a_measurement_is_like_its_neighbour() -> None:
    """If only links below leaves were measured, the others get the same rate."""
    lines = {
        pair: line
        for pair, line in seen(in_tiers(np.ones((NUM_HOSTS, NUM_HOSTS))), 8, PLACES).items()
        if not TIER_HH[pair]
    }
    found = estimate(NUM_HOSTS, lines, PLACES)

    assert found.bandwidth_bytes_per_s[0, NUM_HOSTS - 1] == pytest.approx(40e9)


@settings(max_examples=30, deadline=None)
@given(hosts=st.integers(8, 24), seed=st.integers(0, 99), time=st.integers(0, 40))
def test_no_pair_is_measured_twice_and_the_rounds_are_kept(hosts: int, seed: int, time: int) -> None:
    """Rounds are matchings, within the limit and the time."""
    rng = np.random.default_rng(seed)
    seconds_HH = fabric(racks(rng, hosts, 4), rng)
    blind = blind_rounds(hosts, (), 4, rng)
    taken, left = list(blind), iter(range(time))

    def measure(rounds: Sequence[Round]) -> Lines:
        taken.extend(rounds)
        return measured(seconds_HH, [pair for one in rounds for pair in one])

    known = measured(seconds_HH, [pair for one in blind for pair in one])
    found = scout(hosts, known, measure=measure, allows=lambda: next(left, None) is not None, seed=seed)

    pairs = [pair for one in taken for pair in one]
    assert are_matchings(taken)
    assert sorted(pairs) == sorted({(min(pair), max(pair)) for pair in found.lines})
    assert len(pairs) == len(set(pairs))
    assert len(taken) - len(blind) == found.scouting + found.random <= min(time, SCOUTED_ROUNDS - len(blind))


def test_a_link_counts_as_changed_beyond_ten_percent() -> None:
    """Only links that both warm-ups measured are compared."""
    known = {(0, 1): Line(0.0, 1.0), (1, 0): Line(0.0, 1.0), (0, 2): Line(0.0, 1.0)}

    assert ((0, 1),) == changed_links(known, {(0, 1): Line(0.0, 1.2), (1, 0): Line(0.0, 1.05), (2, 3): Line(0.0, 9.0)})
