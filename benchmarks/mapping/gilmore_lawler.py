"""A lower bound on what any bijection of seats and places costs: sparse Gilmore-Lawler, by a dual in numpy."""

# Q = seats, H = places, F = flows, E = ends of flows (two each), V = views of link matrices (as sender, as receiver),
# K = the most flows of a seat in a view, U = distinct profiles of seats.

from __future__ import annotations

import numpy as np

from pipette_launch.facts.layout import Floats, Ints
from pipette_launch.search.assignment.descent import Flows, views

SOFTENINGS = np.geomspace(0.1, 1e-4, 13)
"""Entropy of the assignment while its prices are sought, in parts of the costs' spread."""
ROUNDS = 12
SWEEPS = 3
SWEPT = 32
"""Most profiles for which prices are also improved one by one."""


def gilmore_bound(flows: Flows) -> float:
    """Seconds that no bijection undercuts.

    At any place h, a seat pairs its flows with distinct links of h, so half of their seconds is at least half
    of the heaviest flow times the shortest link, plus the second of each, and so on: c[q, h]. Every bijection costs
    at least the least assignment of seats to places under c (Gilmore 1962, Lawler 1963), of which any dual value is
    a lower bound. A family of several groups is at least the mean of its groups.

    Raises:
        ValueError: a negative weight or link, for which the pairing is no bound.

    """
    if flows.weight_F.size and (flows.weight_F.min() < 0 or flows.seconds_THH.min() < 0):
        raise ValueError("the Gilmore-Lawler bound needs weights and links of at least 0")
    part_G = 1.0 / np.bincount(flows.family_G)[flows.family_G]
    cost_UH, count_U = _profiles(flows, part_G)
    return float(flows.offset_G @ part_G + assignment_bound(cost_UH, count_U))


def assignment_bound(cost_UH: Floats, count_U: Ints) -> float:
    """Dual value of assigning places to profiles, `count_U[u]` of them to profile u: at most the least total.

    For any prices p the total is at least the sum of count * p plus, over places, the least of cost - p. Prices come
    from Sinkhorn's iteration at falling entropy. Any number of iterations gives a valid bound, as the dual is exact.
    """
    spread = float(np.ptp(cost_UH))
    if len(count_U) == 1 or spread == 0.0:
        return float(cost_UH[0].sum())
    price_U = np.zeros(len(count_U))
    best = -np.inf
    for softening in SOFTENINGS * spread:
        for _ in range(ROUNDS):
            price_U = _sinkhorn(cost_UH, count_U, price_U, softening)
        best = max(best, _dual(cost_UH, count_U, price_U))
    if len(count_U) <= SWEPT:
        for _ in range(SWEEPS):
            price_U = _swept(cost_UH, count_U, price_U)
            best = max(best, _dual(cost_UH, count_U, price_U))
    return best


def _profiles(flows: Flows, part_G: Floats) -> tuple[Floats, Ints]:
    """Least seconds of each distinct seat on each place, and how many seats share the profile."""
    links_MHH, as_sender_T, as_receiver_T = views(flows.seconds_THH)
    seat_E = np.concatenate([flows.sender_F, flows.receiver_F])
    other_E = np.concatenate([flows.receiver_F, flows.sender_F])
    view_E = np.concatenate([as_sender_T[flows.type_F], as_receiver_T[flows.type_F]])
    weight_E = np.tile(0.5 * flows.weight_F * part_G[flows.group_F], 2)
    profile_QVK = _sorted_weights(flows.num_seats, len(links_MHH), (seat_E, other_E, view_E), weight_E)
    rows_UX, count_U = np.unique(profile_QVK.reshape(flows.num_seats, -1), axis=0, return_counts=True)
    deep = min(profile_QVK.shape[2], flows.num_seats - 1)
    cost_UH = np.zeros((len(rows_UX), flows.num_seats))
    for view, links_HH in enumerate(links_MHH):
        apart_HH = np.array(links_HH)
        np.fill_diagonal(apart_HH, np.inf)
        near_HK = np.sort(np.partition(apart_HH, deep - 1, axis=1)[:, :deep], axis=1) if deep else apart_HH[:, :0]
        first = view * profile_QVK.shape[2]
        cost_UH += rows_UX[:, first : first + deep] @ near_HK.T
    return cost_UH, count_U


def _sorted_weights(seats: int, views_: int, ends: tuple[Ints, Ints, Ints], weight_E: Floats) -> Floats:
    """Weights of each seat's flows in each view, heaviest first; those to one seat are one, as they share a link."""
    seat_E, other_E, view_E = ends
    key_E = (seat_E * views_ + view_E) * seats + other_E
    key_X, at_E = np.unique(key_E, return_inverse=True)
    weight_X = np.bincount(at_E, weights=weight_E, minlength=len(key_X))
    row_X = key_X // seats
    order = np.lexsort((-weight_X, row_X))
    starts = np.searchsorted(row_X, np.arange(seats * views_))
    column_X = np.arange(len(key_X)) - starts[row_X[order]]
    weights_RK = np.zeros((seats * views_, int(column_X.max(initial=-1)) + 1))
    weights_RK[row_X[order], column_X] = weight_X[order]
    return weights_RK.reshape(seats, views_, -1)


def _dual(cost_UH: Floats, count_U: Ints, price_U: Floats) -> float:
    return float(count_U @ price_U + (cost_UH - price_U[:, None]).min(axis=0).sum())


def _sinkhorn(cost_UH: Floats, count_U: Ints, price_U: Floats, softening: float) -> Floats:
    """One scaling of the soft assignment: raise the price of a profile that too few places choose."""
    height_UH = (price_U[:, None] - cost_UH) / softening
    height_UH = np.exp(height_UH - height_UH.max(axis=0))
    chosen_U = (height_UH / height_UH.sum(axis=0)).sum(axis=1)
    raised_U: Floats = price_U + softening * np.log(count_U / np.maximum(chosen_U, 1e-12))
    return raised_U


def _swept(cost_UH: Floats, count_U: Ints, price_U: Floats) -> Floats:
    """Set each price in turn where exactly as many places choose the profile as there are seats of it."""
    price_U = price_U.copy()
    for profile, count in enumerate(count_U):
        others_H = np.delete(cost_UH - price_U[:, None], profile, axis=0).min(axis=0)
        enough_H = np.sort(cost_UH[profile] - others_H)
        price_U[profile] = enough_H[count - 1] if count == len(enough_H) else enough_H[count - 1 : count + 1].mean()
    return price_U
