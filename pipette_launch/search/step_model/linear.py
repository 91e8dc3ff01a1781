"""The step time of a layout as a block problem: how it changes when hosts exchange the ranks that they hold.

The problem is a model of the step time. Its cost equals the step time at the placement that it was made from. At other
placements it neglects which of several lanes between two hosts is the slowest, links inside hosts, and that the ends of
the stages shift against each other when their passes change. It prices a pipeline by a few paths through the schedule,
each of which is a lower bound (a cut) of the pipeline's time.
"""

# P = pipeline ranks, R = pipelines that differ in their hosts, K = cuts, H = hosts = seats = places, L = links.
# S = stages (model chunks); B, J as in `subgradients`.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipette_launch.cost.step.assemble import pipelines, total_s
from pipette_launch.cost.step.placed import PlacementCost
from pipette_launch.search.assignment.problem import Floats, Flows, Ints, ProblemBuilder
from pipette_launch.search.step_model.host_view import OnHosts, View
from pipette_launch.search.step_model.per_pass_traffic import Crossing, crossings_of
from pipette_launch.search.step_model.per_step_traffic import add_once_a_step
from pipette_launch.search.step_model.subgradients import Spread, Tangents, tangents_of

MOST_CUTS = 8
MOST_FLOWS = 10_000
"""Of all pipelines and cuts together: fewer cuts are made where there are many pipelines."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LinearModel:
    """A block problem of the step time, and the cuts of the pipelines that it is made of."""

    flows: Flows
    cuts: Tangents


def linearise(model: PlacementCost, placement: Sequence[int] | Ints, *, known: Tangents | None = None) -> LinearModel:
    """Make a block problem of a placement: seat q is what host q holds now, and the identity costs the step time.

    Args:
        model: the layout's step time as a function of the placement.
        placement: RANK of each slot.
        known: cuts that were made at other placements; each makes the model better far from this one.

    Returns:
        Slots and places both in the order of hosts.

    """
    view = View.of(model, np.asarray(placement, dtype=np.int64))
    builder = ProblemBuilder(view.num_hosts)
    crossings = crossings_of(view)
    cuts = _add_pipelines(builder, view, crossings, known)
    for one in crossings:
        one.add(builder, view, cuts)
    add_once_a_step(builder, view, cuts)
    builder.add_family(0.0)
    flows = builder.flows()
    # The last family, of one group, adds what the model leaves out at this placement.
    offset_G = flows.offset_G.copy()
    offset_G[-1] = total_s(model.work, view.prices) - flows.cost(np.arange(view.num_hosts))
    return LinearModel(flows=replace(flows, offset_G=offset_G), cuts=cuts)


def _add_pipelines(
    builder: ProblemBuilder, view: View, crossings: Sequence[Crossing], known: Tangents | None
) -> Tangents:
    """Add one family: a group for each cut of each pipeline that differs from the others in its hosts."""
    work, grid_PDCT = view.model.work, view.model.groups.grid_PDCT
    path_PR = np.unique(view.host_W[grid_PDCT].reshape(len(grid_PDCT), -1), axis=1)
    next_PR = np.roll(path_PR, -1, axis=0)
    hop_HH = view.seconds_HH("send", OnHosts(2, 1), work.hop_bytes)
    durations_BD, hops_JD = pipelines(work, view.bare)
    worst = int(work.engine.drain_s_SR(durations_BD, hops_JD).max(axis=0).argmax())
    most = int(np.clip(MOST_FLOWS // (3 * path_PR.size), 1, MOST_CUTS))
    spread = _spread(view, hop_HH, durations_BD[:, worst], crossings)
    cuts = tangents_of(work, durations_BD, hops_JD, spread, most=most, known=known)
    # Compute goes with the slowness of its host, the rest of a pass stays as it is.
    compute_B = np.concatenate([work.forward_s_S, work.backward_s_S + work.recompute_s_S, work.forward_s_S])
    slowness_S = view.prices.slowness_PD[work.rank_S, worst]
    fixed_K = (durations_BD[:, worst] - compute_B * np.tile(slowness_S, 3)) @ cuts.duration_BK
    compute_PK = _by_rank(view, compute_B[:, None] * cuts.duration_BK)
    forward_PK, backward_PK = _hops(view, cuts)
    stays_PR = (path_PR == next_PR).astype(np.float64)
    offset_KR = fixed_K[:, None] + view.inside_s(work.hop_bytes) * ((forward_PK + backward_PK).T @ stays_PR)
    differ = view.num_hosts > 1 and bool((view.slowness_H != view.slowness_H[0]).any())
    if not differ:
        offset_KR += compute_PK.sum(axis=0)[:, None] * view.slowness_H[0]
    group_KR = builder.add_family(offset_KR.ravel()).reshape(offset_KR.shape)
    hop = builder.add_type(hop_HH)
    _add_along(builder, hop, (path_PR, next_PR), forward_PK, group_KR)
    _add_along(builder, hop, (next_PR, path_PR), backward_PK, group_KR)
    if differ:
        # Compute seconds of a host are a flow to any other seat, priced by the sender alone.
        own = builder.add_type(np.repeat(view.slowness_H[:, None], view.num_hosts, axis=1))
        _add_along(builder, own, (path_PR, (path_PR + 1) % view.num_hosts), compute_PK, group_KR)
    return cuts


def _add_along(
    builder: ProblemBuilder, kind: int, ends_PR: tuple[Ints, Ints], weight_PK: Floats, group_KR: Ints
) -> None:
    """Add a flow for each pipeline rank of each pipeline and cut."""
    shape = (weight_PK.shape[1], *ends_PR[0].shape)
    sender, receiver = (np.broadcast_to(end, shape).ravel() for end in ends_PR)
    weight = np.broadcast_to(weight_PK.T[:, :, None], shape).ravel()
    builder.add_flows(kind, sender, receiver, weight, np.broadcast_to(group_KR[:, None, :], shape).ravel())


def _spread(view: View, hop_HH: Floats, durations_B: Floats, crossings: Sequence[Crossing]) -> Spread:
    between = hop_HH[~np.eye(view.num_hosts, dtype=bool)] if view.num_hosts > 1 else np.zeros(1)
    stages = len(view.model.work.rank_S)
    shortest_s = float((durations_B[:stages] + durations_B[stages : 2 * stages]).min())
    slowness = float(view.slowness_H.max() / np.median(view.slowness_H))
    longer_s = sum(one.longer_s for one in crossings)
    return Spread(
        slowness=slowness + (longer_s / shortest_s if shortest_s else 0.0),
        typical_hop_s=float(np.median(between)),
        slowest_hop_s=float(between.max()),
    )


def _by_rank(view: View, values_BK: Floats) -> Floats:
    """Sum over the durations of each pipeline rank: shape (P, K)."""
    work = view.model.work
    sums = np.zeros((work.layout.pp, values_BK.shape[1]))
    np.add.at(sums, np.tile(work.rank_S, 3), values_BK)
    return sums


def _hops(view: View, cuts: Tangents) -> tuple[Floats, Floats]:
    """How often each cut takes the hop from each pipeline rank to the next (last to first), and the one back."""
    work = view.model.work
    count = len(work.rank_S) - 1
    found = []
    for way_KJ in (cuts.hop_JK[:count], cuts.hop_JK[count : 2 * count]):
        sums = np.zeros((work.layout.pp, cuts.size))
        np.add.at(sums, work.rank_S[:-1], way_KJ)
        found.append(sums)
    return found[0], found[1]
