"""Tests of which links, hosts and slots are suspected, on networks whose truth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from pipette_launch.probe.suspects import (
    confirmed_hosts,
    confirmed_links,
    confirmed_slots,
    suspect_links,
    suspect_slots,
)

RATE = 10e9


def flat(num_hosts: int) -> NDArray[np.float64]:
    """Every link alike."""
    return np.full((num_hosts, num_hosts), RATE)


def test_one_slow_direction_is_suspected() -> None:
    """Of four equal hosts' twelve links only the throttled direction is measured again, and confirmed."""
    rates = flat(4)
    rates[1, 2] *= 0.5
    again = np.full((4, 4), np.nan)
    again[1, 2] = RATE / 2

    assert ((1, 2),) == suspect_links(rates)
    (link,) = confirmed_links(rates, again)
    assert (1, 2, RATE / 2) == (link.source, link.target, pytest.approx(link.bytes_per_s))
    assert RATE == pytest.approx(link.peers_bytes_per_s)


def test_a_second_measurement_clears() -> None:
    """What was slow once and is well the second time is no verdict."""
    rates = flat(4)
    rates[1, 2] *= 0.5
    again = np.full((4, 4), np.nan)
    again[1, 2] = RATE

    assert () == confirmed_links(rates, again)


def test_a_slow_host_is_one_finding_each_way() -> None:
    """All links of host 2 at half the rate accuse the host, not the links."""
    rates = flat(5)
    rates[2], rates[:, 2] = RATE / 2, RATE / 2
    again = np.full((5, 5), np.nan)
    for pair in suspect_links(rates):
        again[pair] = RATE / 2

    assert {2} == {host for host in range(5) if all(host in pair for pair in suspect_links(rates))}
    assert [(2, "sends"), (2, "receives")] == [(slow.host, slow.direction) for slow in confirmed_hosts(rates, again)]
    assert () == confirmed_links(rates, again)


def test_a_slow_slot_is_found_among_its_own_kind() -> None:
    """Another type of device is slower by nature; one of the same type is not."""
    seconds = np.array([1.0, 1.0, 1.3, 1.0, 2.0, 2.0])
    names = ["new"] * 4 + ["old"] * 2
    again = np.array([math.nan, math.nan, 1.3, math.nan, math.nan, math.nan])

    assert (2,) == suspect_slots(seconds, alike_S=names)
    (slow,) = confirmed_slots(seconds, again, alike_S=names)
    assert (2, pytest.approx(1.3), 1.0) == (slow.slot, slow.seconds, slow.peers_seconds)
