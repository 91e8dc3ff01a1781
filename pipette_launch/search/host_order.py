"""Order of the hosts of a job that cannot be planned, from measured links.

The devices of a host keep successive ranks. Hosts whose ranks exchange data get fast links between them.
"""

# Array axes: H = hosts or seats, W = ranks, E = links between hosts, K = orders. An order `order_H` gives the host of
# each seat; seat q holds the ranks from q * devices on.

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import permutations

import numpy as np

from pipette_launch.facts import Layout, Measurements
from pipette_launch.facts.layout import Floats, Ints
from pipette_launch.facts.measurements import ERROR_OF_MEDIAN
from pipette_launch.search.assignment.descent import Flows, ProblemBuilder, descend
from pipette_launch.search.placement import DESCENT_STEPS, DESCENTS, FEW_HOSTS, NEAR, nearest
from pipette_launch.search.slots import distances_s, tiers_of
from pipette_launch.text import rate_text

REPEATS = 5
"""Number of timed messages behind each measured link."""
ESTIMATED_ERROR = 0.1
"""Standard error of a link that was not measured, as a share of its time."""
MOST_ERROR = 0.25


def order_hosts(measured: Measurements, given_H: Ints, layout: Layout, *, margin: float, seed: int) -> tuple[Ints, str]:
    """Order hosts so that the slowest and the mean link of each ring and pipeline take least time.

    `given_H` are the hosts in torchrun's order. The given order stays unless the gain exceeds the margin even if each
    link of the found order is slower, and each link of the given order faster, by its standard error. `layout` has the
    job's parallel degrees and rank order. Returns the order and the gain in words, empty if the given order stays.
    """
    links, devices = measured.cluster.between_hosts, measured.cluster.devices_per_host
    seconds_HH, error_HH = distances_s(links), _error_HH(measured)
    pairs = [*_exchanges(layout, devices)]
    flows = _flows(pairs, seconds_HH)
    if len(given_H) <= FEW_HOSTS:
        orders_KH = np.array([*permutations(given_H.tolist())], dtype=np.int64)
    else:
        near_HK, rng = nearest(links, NEAR), np.random.default_rng(seed)
        starts = (given_H, tiers_of(links).order_H) * DESCENTS
        found = (
            descend(flows, start_H, near_HK=near_HK, steps=DESCENT_STEPS, rng=rng, is_late=lambda: False)
            for start_H in starts
        )
        best_H = min(found, key=lambda one: one.cost_s).place_Q
        turns = range(len(best_H))
        orders_KH = np.array([np.roll(way_H, turn) for way_H in (best_H, best_H[::-1]) for turn in turns])
    costs_K = flows.costs(orders_KH)
    # RANK 0 stays on its host if an equally fast order allows it.
    equal_KH = orders_KH[costs_K <= costs_K.min() * (1 + 1e-9)]
    order_H = max(equal_KH, key=lambda one_H: (one_H[0] == given_H[0], (one_H == given_H).sum()))
    slow_s = _flows(pairs, seconds_HH * (1 + error_HH)).cost(order_H)
    if slow_s > (1 - margin) * _flows(pairs, seconds_HH * (1 - error_HH)).cost(given_H):
        return given_H, ""

    def rates(one_H: Ints) -> tuple[str, str]:
        sender_E, receiver_E = np.concatenate(pairs, axis=1)
        used_E = links.bandwidth_bytes_per_s[one_H[sender_E], one_H[receiver_E]]
        return rate_text(float(used_E.min())), rate_text(float(used_E.mean()))

    (least, mean), (old_least, old_mean) = rates(order_H), rates(given_H)
    gain = f"links in use have at least {least} instead of {old_least}, and {mean} instead of {old_mean} on average"
    return order_H, gain


def _exchanges(layout: Layout, devices: int) -> Iterator[Ints]:
    """Yield the seats that send (first row) and receive, for each kind of parallelism that crosses hosts."""
    shape = (layout.pp, layout.dp) if not layout.use_tp_pp_dp_mapping else (layout.dp, layout.pp)
    ranks = np.arange(layout.world_size).reshape(*shape, layout.cp, layout.tp)
    pipeline = int(layout.use_tp_pp_dp_mapping)
    for axis in range(4):
        # Experts exchange tokens by an all-to-all among successive data-parallel ranks.
        for step in range(1, max(min(layout.ep, layout.dp), 2) if axis == 1 - pipeline else 2):
            sender, receiver = ranks, np.roll(ranks, -step, axis=axis)
            if axis == pipeline:
                # The last stage of a pipeline sends nothing to the first stage.
                sender, receiver = (np.delete(one, -1, axis=axis) for one in (sender, receiver))
            seats_E2 = np.unique(np.stack([sender.ravel(), receiver.ravel()], axis=1) // devices, axis=0)
            crossing_E2 = seats_E2[seats_E2[:, 0] != seats_E2[:, 1]]
            if len(crossing_E2):
                yield crossing_E2.T


def _flows(pairs: list[Ints], seconds_HH: Floats) -> Flows:
    """Return the problem whose cost is the sum, over kinds of parallelism, of the slowest and the mean link."""
    builder = ProblemBuilder(len(seconds_HH))
    kind = builder.add_type(seconds_HH)
    for sender_E, receiver_E in pairs:
        builder.add_flows(kind, sender_E, receiver_E, 1.0, builder.add_family(np.zeros(len(sender_E))))
        mean = np.repeat(builder.add_family(0.0), len(sender_E))
        builder.add_flows(kind, sender_E, receiver_E, 1 / len(sender_E), mean)
    return builder.flows()


def _error_HH(measured: Measurements) -> Floats:
    """Return the standard error of each link's time, as a share of this time."""
    if measured.survey is None:
        return np.zeros((len(measured.cluster.hosts),) * 2)
    estimated_HH = np.array([[*row] for row in measured.survey.origin_HH]) == "e"
    scatter_HH = measured.survey.spread_HH * ERROR_OF_MEDIAN / math.sqrt(REPEATS)
    error_HH = np.where(estimated_HH, ESTIMATED_ERROR, np.minimum(scatter_HH, MOST_ERROR))
    return np.asarray(np.maximum(error_HH, error_HH.T))
