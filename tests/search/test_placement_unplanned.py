"""The order of the hosts of a job that cannot be planned."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from facts_for_tests import tiny_cluster, tiny_measurements

from pipette_launch.facts import Layout, Links, Measurements
from pipette_launch.facts.layout import Floats, Ints
from pipette_launch.facts.measurements import LinkSurvey
from pipette_launch.search.placement import order_hosts

UNEVEN = ((0, 1, 4, 4), (1, 0, 4, 4), (4, 4, 0, 1), (4, 4, 1, 0))
"""Bandwidth between four hosts: the order of their numbers uses both slow links."""


def measured(rate_HH: Floats, *, devices: int = 2, spread: float = 0.0) -> Measurements:
    """Return measurements of hosts with these bandwidths (GB/s), and this spread of each link."""
    hosts = len(rate_HH)
    between = Links(latency_s=np.zeros((hosts, hosts)), bandwidth_bytes_per_s=rate_HH * 1e9)
    origin = tuple("m" * host + "-" + "m" * (hosts - host - 1) for host in range(hosts))
    survey = LinkSurvey(spread_HH=np.full((hosts, hosts), spread), origin_HH=origin)
    cluster = replace(tiny_cluster(hosts, devices), between_hosts=between)
    return replace(tiny_measurements(cluster), survey=survey)


def found(machines: Measurements, layout: Layout, given: Ints | None = None) -> tuple[tuple[int, ...], str]:
    """Return the order and its gain in words, at the default margin."""
    hosts = np.arange(len(machines.cluster.hosts)) if given is None else given
    order_H, gain = order_hosts(machines, hosts, layout, margin=0.02, seed=0)
    return tuple(order_H.tolist()), gain


def test_a_ring_avoids_slow_links() -> None:
    """The ring uses only fast links, the first host stays first, and the words have the rates."""
    order, gain = found(measured(2 * np.array(UNEVEN, dtype=float)), Layout(dp=8))

    assert (0, 2, 1, 3) == order
    slowest = (
        "the slowest link in use has 8 GB/s instead of 2 GB/s, so exchanges between hosts are up to 4.0 times faster"
    )
    assert f"{slowest}; the mean link has 8 GB/s instead of 5 GB/s" == gain


def test_a_pipeline_has_no_link_from_its_last_stage_to_its_first() -> None:
    """A line of three fast links is best for four stages, although both ends have a slow link to each other."""
    rates = np.array(((0, 1, 1, 4), (1, 0, 4, 4), (1, 4, 0, 1), (4, 4, 1, 0)), dtype=float)

    order, _ = found(measured(rates), Layout(tp=2, pp=4))

    assert {order, order[::-1]} == {(0, 3, 1, 2), (2, 1, 3, 0)}


@pytest.mark.parametrize(("ratio", "spread"), [(1.01, 0.0), (1.3, 0.3)])
def test_a_gain_below_doubt_changes_nothing(ratio: float, spread: float) -> None:
    """The given order stays if links differ by less than the margin, or by less than their scatter."""
    rates = np.where(np.array(UNEVEN) == 1, 1.0, ratio)

    assert ((0, 1, 2, 3), "") == found(measured(rates, spread=spread), Layout(dp=8))


def test_the_given_order_may_differ_from_the_order_of_the_measurements() -> None:
    """Measured hosts are named by index, and a good given order stays."""
    assert ((2, 0, 3, 1), "") == found(measured(np.array(UNEVEN, dtype=float)), Layout(dp=8), np.array((2, 0, 3, 1)))


@pytest.mark.parametrize("seed", range(3))
def test_sixteen_nodes_sorted_as_strings_get_their_time_back(seed: int) -> None:
    """Strings cost 8.8 % of a step by two ring links on one uplink (pytorch#191190), and our order costs none.

    Four switches have four hosts each, and measured links scatter by 3 %. The fullest uplink sets the ring's time.
    """
    hosts = np.arange(16)
    switch = hosts // 4
    noise_HH = np.random.default_rng(seed).normal(1, 0.03, (16, 16)).clip(0.9, 1.1)
    rate_HH = np.where(switch[:, None] == switch, 10.0, 2.5) * noise_HH
    as_strings = np.array(sorted(hosts, key=lambda host: f"node-{host + 1}"))

    def step_s(order: Ints) -> float:
        leaves = switch[order][switch[order] != switch[np.roll(order, -1)]]
        uplink_s = 0.088
        return 1 - uplink_s + uplink_s * np.bincount(leaves).max()

    order, gain = found(measured(rate_HH, spread=0.01), Layout(dp=32), as_strings)

    assert 1.088 == pytest.approx(step_s(as_strings))
    assert 1.0 == pytest.approx(step_s(hosts))
    assert 1.0 == pytest.approx(step_s(np.array(order)))
    assert gain
