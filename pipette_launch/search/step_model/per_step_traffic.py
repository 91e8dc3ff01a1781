"""Traffic that a step has once, as flows between hosts: reduce gradients, sum tied embeddings, gather parameters."""

# S = stages (model chunks), P = pipeline ranks, H = hosts, L = links, G = groups.

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from pipette_launch.cost.communication.collectives import Kind
from pipette_launch.cost.step.assemble import pipelines, reduced_s_P
from pipette_launch.search.assignment.problem import Floats, Ints, ProblemBuilder
from pipette_launch.search.step_model.host_view import LinksBetweenHosts, OnHosts, View
from pipette_launch.search.step_model.subgradients import Tangents

MOST_MATRICES = 8
"""So many sizes of message have a matrix of their own on few hosts; others take that of the nearest."""
MANY_HOSTS = 256
_STEP = 1e-3


def add_once_a_step(builder: ProblemBuilder, view: View, cuts: Tangents) -> None:
    """Add a family for the reductions, and others for the gathers."""
    layout = view.model.work.layout
    _add_reductions(builder, view)
    if view.gathers_first and view.model.work.aligns_gathers:
        _add_aligned_gathers(builder, view)
    elif view.gathers_first:
        _add_first_gathers(builder, view, cuts)
    elif layout.use_distributed_optimizer:
        _add_gathers(builder, view)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Rings:
    """The data-parallel rings of one kind of parameters, priced link by link."""

    links: LinksBetweenHosts
    matrices: list[Floats]
    matrix_P: Ints
    share_P: Floats
    """What to multiply the matrix with."""

    def now_L(self) -> Floats:
        """Seconds of a ring whose slowest link each is, where the ranks are now."""
        seconds = np.zeros(len(self.links))
        for index, matrix in enumerate(self.matrices):
            chosen = self.matrix_P[self.links.stage_L] == index
            seconds[chosen] = matrix[self.links.sender_L[chosen], self.links.receiver_L[chosen]]
        return seconds * self.share_P[self.links.stage_L]

    def add(self, builder: ProblemBuilder, group_L: Ints, weight_L: Floats) -> None:
        """Add a flow for each link."""
        links = self.links
        for index, matrix in enumerate(self.matrices):
            chosen = self.matrix_P[links.stage_L] == index
            weight = (weight_L * self.share_P[links.stage_L])[chosen]
            builder.add_flows(
                builder.add_type(matrix), links.sender_L[chosen], links.receiver_L[chosen], weight, group_L[chosen]
            )


def _rings(view: View, *, gathers: bool) -> Iterator[_Rings]:
    """Rings of dense and of expert parameters, where they leave a host."""
    work, groups = view.model.work, view.model.groups
    kind = work.gather_kind if gathers else work.reduce_kind
    sizes_S2 = work.parameter_bytes_S2 if gathers else work.gradient_bytes_S2
    for ranks_GK, column in ((groups.dp_cp, 0), (groups.expert_dp, 1)):
        links = view.links(kind, ranks_GK)
        if not len(links) or not sizes_S2[:, column].any():
            continue
        yield _priced(view, kind, links, sizes_S2[:, column].reshape(-1, work.layout.pp))


def _priced(view: View, kind: Kind, links: LinksBetweenHosts, size_bytes_CP: Floats) -> _Rings:
    """Price the chunks of each pipeline rank together; ranks of other sizes share a matrix where there are too many."""
    total_P = size_bytes_CP.sum(axis=0)
    sizes = np.array(sorted(set(map(tuple, size_bytes_CP.T.tolist())))).T
    most = MOST_MATRICES if view.num_hosts <= MANY_HOSTS else 2
    by_total = sizes[:, np.argsort(sizes.sum(axis=0), kind="stable")]
    kept = by_total[:, np.unique(np.linspace(0, by_total.shape[1] - 1, most).round().astype(int))]
    matrices = [
        sum(
            (view.seconds_HH(kind, links.spread, size) for size in column if size),
            np.zeros((view.num_hosts, view.num_hosts)),
        )
        for column in kept.T
    ]
    apart = np.abs(np.log(np.maximum(total_P, 1.0))[:, None] - np.log(np.maximum(kept.sum(axis=0), 1.0)))
    matrix_P = apart.argmin(axis=1)
    of_matrix_P = kept.sum(axis=0)[matrix_P]
    share_P = np.divide(total_P, of_matrix_P, out=np.zeros_like(total_P), where=of_matrix_P > 0)
    return _Rings(links=links, matrices=matrices, matrix_P=matrix_P, share_P=share_P)


def _add_reductions(builder: ProblemBuilder, view: View) -> None:
    """Add one family, in seconds after the last pass: a group for each link of a ring, and for the tied embedding.

    A rank ends when its gradients are reduced. How its end follows the seconds of the reduction is linear here: slope 1
    without overlap, less where a backward hides the reduction.
    """
    work, prices = view.model.work, view.prices
    durations_BD, hops_JD = pipelines(work, prices)
    drain_S = work.engine.drain_s_SR(durations_BD, hops_JD).max(axis=1)
    backward_S = durations_BD[len(drain_S) : 2 * len(drain_S)].min(axis=1)

    def finish_P(reduce_s_S: Floats) -> Floats:
        return reduced_s_P(work, replace(prices, reduce_s_S=reduce_s_S), drain_S, backward_S)

    step_s = _STEP * float(prices.reduce_s_S.max()) or 1e-6
    end_P = finish_P(prices.reduce_s_S)
    slope_P = (finish_P(prices.reduce_s_S + step_s) - end_P) / (step_s * work.layout.vpp)
    late_P = end_P - drain_S.max()
    late_P[[0, -1]] += prices.embedding_s
    _add_rings(builder, list(_rings(view, gathers=False)), late_P, slope_P)
    if work.traffic.embedding_bytes:
        _add_embedding(builder, view)


def _add_embedding(builder: ProblemBuilder, view: View) -> None:
    """Add one family: by how much summing the tied embedding takes longer than now; the reductions contain its time."""
    pairs = view.links("send", view.model.groups.embedding)
    if not len(pairs):
        return
    kind = builder.add_type(view.seconds_HH("all_reduce", OnHosts(2, 2), view.model.work.traffic.embedding_bytes))
    group = builder.add_family(np.full(2 * len(pairs), -view.prices.embedding_s))
    sender, receiver = (
        np.concatenate([pairs.sender_L, pairs.receiver_L]),
        np.concatenate([pairs.receiver_L, pairs.sender_L]),
    )
    builder.add_flows(kind, sender, receiver, 1.0, group)


def _add_gathers(builder: ProblemBuilder, view: View) -> None:
    """Add one family: a group for the optimizer step and the gathers of each pipeline rank."""
    work, prices = view.model.work, view.prices
    step_P = work.optimizer_s_P * prices.slowness_PD.max(axis=1)
    gather_P = prices.gather_s_S.reshape(-1, work.layout.pp).sum(axis=0)
    _add_rings(builder, list(_rings(view, gathers=True)), step_P + gather_P, np.ones(work.layout.pp))


def _add_aligned_gathers(builder: ProblemBuilder, view: View) -> None:
    """Add one family: the gather of each rank's first chunk, less the time until its first activation arrives.

    The forwards of the chunk before hide the gathers of later chunks, or nearly so.
    """
    work = view.model.work
    pp = work.layout.pp
    durations_BD, hops_JD = pipelines(work, view.bare)
    on_way_PD = (durations_BD[: pp - 1] + hops_JD[: pp - 1]).cumsum(axis=0)
    ahead_P = np.concatenate([[0.0], on_way_PD.min(axis=1)])
    bytes_VP = work.parameter_bytes_S2.sum(axis=1).reshape(-1, pp)
    share_P = bytes_VP[0] / bytes_VP.sum(axis=0)
    _add_rings(builder, list(_rings(view, gathers=True)), view.prices.gather_s_S[:pp] - ahead_P, share_P)


def _add_rings(builder: ProblemBuilder, rings: list[_Rings], end_P: Floats, slope_P: Floats) -> None:
    """Add one family: when each pipeline rank ends, as a function of the place of each of its links.

    Args:
        builder: of the problem.
        rings: whose links count.
        end_P: seconds at which each pipeline rank ends now.
        slope_P: seconds by which its end moves for each second of its slowest link.

    """
    offsets = []
    is_still_P = np.ones(len(end_P), dtype=bool)
    for one in rings:
        worst_P = one.links.worst_P(one.now_L(), len(end_P))
        offsets.append((end_P - slope_P * worst_P)[one.links.stage_L])
        is_still_P[one.links.stage_L] = False
    group_G = builder.add_family(np.concatenate([*offsets, end_P[is_still_P]]))
    first = 0
    for one in rings:
        one.add(builder, group_G[first : first + len(one.links)], slope_P[one.links.stage_L])
        first += len(one.links)


def _add_first_gathers(builder: ProblemBuilder, view: View, cuts: Tangents) -> None:
    """Add a family for each pipeline rank: its first forward waits for its gather, as often as on the first cut."""
    work = view.model.work
    pp = work.layout.pp
    first_S = cuts.duration_BK[2 * len(work.rank_S) :, 0]
    weight_P = np.bincount(work.rank_S, weights=first_S, minlength=pp) / work.layout.vpp
    for one in _rings(view, gathers=True):
        for rank in np.flatnonzero(weight_P):
            chosen = np.flatnonzero(one.links.stage_L == rank)
            group = builder.add_family(np.zeros(len(chosen)))
            kind = builder.add_type(one.matrices[one.matrix_P[rank]])
            weight = float(weight_P[rank] * one.share_P[rank])
            builder.add_flows(kind, one.links.sender_L[chosen], one.links.receiver_L[chosen], weight, group)
