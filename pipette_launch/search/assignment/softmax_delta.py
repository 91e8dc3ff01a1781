"""The soft maximum of groups: what a swap would change in it, also where the largest group does not feel the swap."""

# R = copies, G = groups of one copy, N = families of one copy, P = swaps, S = terms of a swap.

from __future__ import annotations

import numpy as np

from pipette_launch.search.assignment.problem import Floats, Ints

STEEPEST = 80.0
"""Largest exponent: far from overflow, and from any chance of being accepted."""
LEAST = 1e-12
"""Smallest part of a family's sum of exponentials that may be left: below it float64 has no digits."""


def soft_rises(
    family_G: Ints, group_seconds_RG: Floats, groups_PS: Ints, terms_PS: Floats, softness_R: Floats
) -> Floats:
    """By how much the sum over families of s * log(sum over groups of exp(seconds / s)) would rise with each swap.

    Args:
        family_G: family of each group of a copy.
        group_seconds_RG: seconds of the groups now.
        groups_PS: group (copy * G + group) of each term of a swap; a swap stays in one copy.
        terms_PS: seconds that each term adds to its group.
        softness_R: s of each copy, in seconds; a family of one group is its own maximum whatever s.

    Returns:
        Seconds for each swap; a family's rise is cut at 80 s and its fall at 27 s, which decide any swap.

    """
    copies, groups = group_seconds_RG.shape
    families = int(family_G.max()) + 1
    family_X = (np.arange(copies)[:, None] * families + family_G).ravel()
    alone_X = np.tile(np.bincount(family_G)[family_G] == 1, copies)
    largest_Y = np.full(copies * families, -np.inf)
    np.maximum.at(largest_Y, family_X, group_seconds_RG.ravel())
    height_X = np.exp((group_seconds_RG.ravel() - largest_Y[family_X]) / np.repeat(softness_R, groups))
    share_X = height_X / np.bincount(family_X, weights=height_X)[family_X]
    softness_P1 = softness_R[groups_PS[:, :1] // groups]
    # A swap may meet a group several times: sum its terms, and let each of them stand for its part of the group.
    same_PSS = groups_PS[:, :, None] == groups_PS[:, None, :]
    group_rise_PS = np.einsum("pij,pj->pi", same_PSS, terms_PS)
    log_share_X = np.log(np.maximum(share_X, 1e-300))
    steps_PS = np.minimum(group_rise_PS / softness_P1 + log_share_X[groups_PS], STEEPEST)
    change_PS = (np.exp(steps_PS) - share_X[groups_PS]) / same_PSS.sum(axis=2)
    change_PS[alone_X[groups_PS]] = 0.0
    at_PS = np.arange(len(groups_PS))[:, None] * families + family_G[groups_PS % groups]
    change_PN = np.bincount(at_PS.ravel(), weights=change_PS.ravel(), minlength=len(groups_PS) * families)
    soft_PN = np.log1p(np.maximum(change_PN, LEAST - 1.0)).reshape(-1, families)
    alone_P: Floats = np.where(alone_X[groups_PS], terms_PS, 0.0).sum(axis=1)
    rise_P: Floats = alone_P + softness_P1[:, 0] * soft_PN.sum(axis=1)
    return rise_P
