"""Links that nobody measured, on fabrics that are known."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipette_launch.probe.harness import Line
from pipette_launch.probe.links.estimate import Estimate, estimate, tiers_between
from pipette_launch.probe.links.sampling import Place, blind_rounds

Floats = NDArray[np.float64]
HOSTS = 48
PLACES: list[Place] = [("root", f"pod{host // 24}", f"leaf{host // 8}") for host in range(HOSTS)]
TIER_HH = tiers_between(HOSTS, PLACES)


def in_tiers(ends_HH: Floats) -> Floats:
    """Bytes/s: each tier of switches is slower than the one below it, and ends have their say."""
    return np.array([40e9, 25e9, 10e9])[TIER_HH] * ends_HH


def seen(rates_HH: Floats, count: int, places: list[Place], seed: int = 0) -> dict[tuple[int, int], Line]:
    """What so many blind rounds measure: latency 1 us for each tier, both ways."""
    pairs = [pair for one in blind_rounds(HOSTS, places, count, np.random.default_rng(seed)) for pair in one]
    return {
        (a, b): Line(1e-6 * (1 + int(TIER_HH[a, b])), 1 / float(rates_HH[a, b]))
        for one, other in pairs
        for a, b in ((one, other), (other, one))
    }


def errors(found: Estimate, rates_HH: Floats) -> Floats:
    """By what part the estimates are off, of the links that were not measured."""
    estimated_HH = ~found.measured_HH & ~np.eye(HOSTS, dtype=bool)
    return np.abs(found.links.bandwidth_bytes_per_s / rates_HH - 1)[estimated_HH]


@settings(max_examples=20)
@given(count=st.integers(6, 20), seed=st.integers(0, 50), bad=st.sets(st.integers(0, HOSTS - 1), max_size=2))
def test_a_fabric_of_tiers_and_slow_hosts_is_recovered(count: int, seed: int, bad: set[int]) -> None:
    """Where every link is its tier's, and that of its slower end, few rounds tell nearly all links to 15 %."""
    speed_H = np.array([0.5 if host in bad else 1.0 for host in range(HOSTS)])
    rates_HH = in_tiers(np.minimum(speed_H[:, None], speed_H))
    off = errors(estimate(HOSTS, seen(rates_HH, count, PLACES, seed), PLACES), rates_HH)

    assert np.quantile(off, 0.9) <= 0.01
    # With a few links of a slow host measured, it is not quite believed to be as slow as it seems.
    assert off.max() <= 0.6


def of_slower_end(speed_H: Floats) -> Floats:
    """A link is as fast as its slower end."""
    return np.minimum(speed_H[:, None], speed_H)


def of_both_ends(speed_H: Floats) -> Floats:
    """Each end has its share in a link, and sends better than it receives."""
    return speed_H[:, None] * speed_H**0.5


@pytest.mark.parametrize("ends", [of_slower_end, of_both_ends])
def test_ends_are_told_either_way(ends: Callable[[Floats], Floats]) -> None:
    """Two kinds of hosts, and all kinds of hosts: half of the unmeasured links are estimated to 3 %."""
    rng = np.random.default_rng(3)
    speed_H = rng.choice([0.5, 1.0], HOSTS) if ends is of_slower_end else rng.uniform(0.5, 1.0, HOSTS)
    rates_HH = in_tiers(ends(speed_H))
    off = errors(estimate(HOSTS, seen(rates_HH, 16, PLACES), PLACES), rates_HH)

    assert np.median(off) <= 0.03


def test_what_was_measured_stays_as_it_is() -> None:
    """Measured links are taken over, each way for itself, and only they are marked as measured."""
    lines = {(0, 1): Line(1e-6, 1e-9), (1, 0): Line(2e-6, 2e-9), (2, 3): Line(1e-6, 1e-9)}
    found = estimate(4, lines)

    assert found.links.bandwidth_bytes_per_s[0, 1] == pytest.approx(1e9)
    assert found.links.bandwidth_bytes_per_s[1, 0] == pytest.approx(5e8)
    assert 2e-6 == found.links.latency_s[1, 0]
    assert sorted(lines) == [(int(i), int(j)) for i, j in np.argwhere(found.measured_HH)]


def test_latencies_are_those_of_the_tier() -> None:
    """A link that was not measured has the latency that is usual between such switches."""
    found = estimate(HOSTS, seen(in_tiers(np.ones((HOSTS, HOSTS))), 6, PLACES), PLACES)

    off_HH = found.links.latency_s - 1e-6 * (1 + TIER_HH)
    np.fill_diagonal(off_HH, 0.0)
    assert np.abs(off_HH).max() < 1e-12


def test_hope_is_above_what_is_likely_and_only_for_what_was_not_measured() -> None:
    """Among noisy links an unmeasured one may be as good as the good ones, a measured one is what it is."""
    rng = np.random.default_rng(5)
    rates_HH = in_tiers(1 - np.minimum(np.abs(rng.normal(0, 0.08, (HOSTS, HOSTS))), 0.5))
    found = estimate(HOSTS, seen(rates_HH, 12, PLACES), PLACES)

    above_HH = found.hopeful.bandwidth_bytes_per_s / (found.links.bandwidth_bytes_per_s + np.eye(HOSTS))
    assert above_HH[found.measured_HH] == pytest.approx(1.0)
    estimated_HH = ~found.measured_HH & ~np.eye(HOSTS, dtype=bool)
    assert 1.02 < above_HH[estimated_HH].min()
    assert above_HH[estimated_HH].max() < 1.3


def test_a_tier_without_a_measurement_is_like_its_neighbour() -> None:
    """Only links under leaves were measured: the others are taken to be no worse, for want of anything better."""
    lines = {
        pair: line for pair, line in seen(in_tiers(np.ones((HOSTS, HOSTS))), 8, PLACES).items() if not TIER_HH[pair]
    }
    found = estimate(HOSTS, lines, PLACES)

    assert found.links.bandwidth_bytes_per_s[0, HOSTS - 1] == pytest.approx(40e9)
