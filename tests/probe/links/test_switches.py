"""Who is near to whom, found in links alone, on fabrics that are known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipette_launch.probe.harness import Line
from pipette_launch.probe.links.estimate import tiers_between
from pipette_launch.probe.links.sampling import Pair, Place, blind_rounds
from pipette_launch.probe.links.switches import groupings_of, inferred_places, lowest_level, scouting_round

Floats = NDArray[np.float64]
HOSTS = 128


def racks(rng: np.random.Generator, hosts: int = HOSTS, size: int = 16) -> list[Place]:
    """Hosts of racks, in no order."""
    return [("root", f"rack{at // size}") for at in rng.permutation(hosts).tolist()]


def fabric(places: list[Place], rng: np.random.Generator, *, noise: float = 0.05, slow: int = 0) -> Floats:
    """Seconds of a byte: 10 GB/s in a rack and 7 between them, noise on every link, and some slow hosts."""
    hosts = len(places)
    noise_HH = np.triu(np.abs(rng.normal(0, noise, (hosts, hosts))), 1)
    speed_H = np.ones(hosts)
    speed_H[rng.choice(hosts, slow, replace=False)] = 0.6
    rates_HH = np.where(tiers_between(hosts, places) == 0, 10e9, 7e9) * np.minimum(speed_H[:, None], speed_H)
    seconds_HH: Floats = 1 / (rates_HH * (1 - noise_HH - noise_HH.T))
    return seconds_HH


def measured(seconds_HH: Floats, pairs: list[Pair]) -> dict[Pair, Line]:
    """Both ways of each."""
    return {way: Line(0.0, float(seconds_HH[way])) for pair in pairs for way in (pair, pair[::-1])}


def scouted(seconds_HH: Floats, rng: np.random.Generator, rounds: int) -> tuple[dict[Pair, Line], int]:
    """Four blind rounds, then scouting until nothing is left to find out; and how many rounds that took."""
    hosts = len(seconds_HH)
    blind = [pair for one in blind_rounds(hosts, (), 8, rng) for pair in one]
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
    """Of 128 hosts in 8 racks, nearly all pairs are told right after at most 20 rounds instead of 127."""
    rng = np.random.default_rng(seed)
    places = racks(rng)
    lines, _ = scouted(fabric(places, rng, slow=slow), rng, 16)
    near_HH = tiers_between(HOSTS, inferred_places(HOSTS, lines)) == 0
    truth_HH = tiers_between(HOSTS, places) == 0

    assert (near_HH != truth_HH).mean() <= 0.02


def test_tiers_within_tiers_are_found() -> None:
    """Racks in pods come out as two tiers, the wider one first; the names say so as a scheduler's would."""
    rng = np.random.default_rng(1)
    places: list[Place] = [("root", f"pod{host // 64}", f"rack{host // 8}") for host in range(256)]
    tier_HH = tiers_between(256, places)
    seconds_HH = 1 / np.array([10e9, 7e9, 4e9])[tier_HH]
    lines, _ = scouted(seconds_HH, rng, 30)
    found = inferred_places(256, lines)

    assert [4, 32] == [int(grouping.group_H.max()) + 1 for grouping in groupings_of(256, lines)]
    assert {2} == {len(place) for place in found}
    assert np.array_equal(tier_HH, tiers_between(256, found))


def test_a_disturbed_link_does_not_join_racks() -> None:
    """One link between two racks that seems as fast as those within misplaces a host at most."""
    rng = np.random.default_rng(2)
    places = racks(rng)
    seconds_HH = fabric(places, rng)
    one, other = next(pair for one in blind_rounds(HOSTS, (), 8, np.random.default_rng(2)) for pair in one)
    rng = np.random.default_rng(2)
    seconds_HH[one, other] = seconds_HH[other, one] = 1 / 10e9
    lines, _ = scouted(seconds_HH, rng, 18)
    near_HH = tiers_between(HOSTS, inferred_places(HOSTS, lines)) == 0

    assert places[one] != places[other]
    assert (one, other) in lines
    assert (near_HH != (tiers_between(HOSTS, places) == 0)).mean() <= 0.03


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.08])
def test_a_flat_network_has_no_tiers(noise: float) -> None:
    """Noise alone makes no groups, so that nothing is scouted and all links are estimated alike."""
    rng = np.random.default_rng(3)
    seconds_HH = fabric([()] * HOSTS, rng, noise=noise)
    lines = measured(seconds_HH, [pair for one in blind_rounds(HOSTS, (), 16, rng) for pair in one])

    assert ((),) * HOSTS == inferred_places(HOSTS, lines)
    assert scouting_round(HOSTS, lines, rng) == ()


@given(hosts=st.integers(2, 40), seed=st.integers(0, 99), count=st.integers(1, 8))
def test_scouting_rounds_are_new_matchings(hosts: int, seed: int, count: int) -> None:
    """Whatever is known, no host is in two pairs, and no group is tested twice for nothing."""
    rng = np.random.default_rng(seed)
    seconds_HH = fabric(racks(rng, hosts, 4), rng, noise=0.02)
    lines = measured(seconds_HH, [pair for one in blind_rounds(hosts, (), count, rng) for pair in one])
    pairs = scouting_round(hosts, lines, rng)

    assert len({host for pair in pairs for host in pair}) == 2 * len(pairs)
    assert all(one < other for one, other in pairs)
    assert not any(pair in lines for pair in pairs)


def test_the_lowest_valley_is_where_far_ends() -> None:
    """Three heaps: the slowest is far, the other two are near; few slow links below make no heap of their own."""
    rng = np.random.default_rng(4)
    heaps = [rng.normal(np.log(rate), 0.02, count) for rate, count in ((3e9, 5), (5e9, 300), (7e9, 80), (10e9, 40))]
    level = lowest_level(np.concatenate(heaps))

    assert level is not None
    assert np.log(5.2e9) < level < np.log(6.8e9)
