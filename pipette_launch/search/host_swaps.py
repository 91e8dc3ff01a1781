"""A linear model of the step time of one layout: how the step time changes when hosts exchange their ranks.

The model is a block assignment problem, made at one placement, where the cost of the model equals the step time. At
other placements, the model ignores three effects: several links between the same two hosts, links inside hosts, and
different end times of the stages. The model prices a pipeline by a few paths through the schedule. Each path is a lower
bound of the pipeline's time, linear in the durations, and is called a tangent.
"""

# W = ranks, H = hosts, P = pipeline ranks, S = stages (model chunks), D = replicas, G = groups.
# L = directed links between hosts, R = pipelines with different hosts. K = members of a group, or tangents.
# B = 3 * S durations: forwards, backwards, first forwards. J = 2 * S - 1 messages, as in `StageTimes.hops_s`.
# C = tangents to choose from, N = points, I = collectives over one kind of group.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from pipette_launch.cost.communication.collectives import chunk_share, links_together, num_steps, spread_over_hosts
from pipette_launch.cost.layers.loads import Collective, Exchange
from pipette_launch.cost.pipeline.engine import critical_counts
from pipette_launch.cost.step.assemble import StepEnd, gathers_in_forward, pipelines, step_end, totals_s_K
from pipette_launch.cost.step.predictor import PlacementCost
from pipette_launch.cost.step.work import LayoutWork, Prices
from pipette_launch.facts.layout import Floats, Ints
from pipette_launch.search.assignment.descent import Flows, ProblemBuilder

NUDGE = 0.05
"""To find the critical path through a slow stage, the stage is slowed by at least this share of its time."""
CLOSE = 1e-3
"""A tangent (path through the schedule) is left out if it raises the predicted time by less than this share."""
SLOW_PIPELINES = 16
"""Number of slowest pipelines whose critical paths (tangents) the model contains."""
MIXED_PIPELINES = 16
"""Number of imagined pipelines with messages of several pipelines, whose critical paths the model contains too."""
MIXING_STRIDE = 7
MOST_TANGENTS = 8
MOST_FLOWS = 10_000
"""Most flows (linear terms) of the model. If there are many pipelines, the model has fewer tangents."""
_STEP = 1e-3
"""To find how the end of a step depends on the reductions, the reductions are made longer by this share."""


class OnHosts(NamedTuple):
    """Size of the groups of one kind, and their spread over hosts."""

    size: int
    spans: int
    """Largest number of hosts that a group spans."""
    fewest: int = 1
    """Smallest number of members on one host, over groups on several hosts; 1 if no group spans several hosts."""


class LinksBetweenHosts(NamedTuple):
    """Directed links between hosts. A link appears once for each pipeline rank whose groups use the link."""

    spread: OnHosts
    stage_L: Ints
    sender_L: Ints
    receiver_L: Ints


class View:
    """A placement of a layout, described by hosts instead of slots."""

    def __init__(self, model: PlacementCost, placement: Ints) -> None:
        cluster = model.fabric.cluster
        self.model = model
        self.prices = model.prices(placement)
        self.host_W = np.empty_like(placement)
        self.host_W[placement] = np.arange(len(placement)) // cluster.devices_per_host
        # `stage_W` is the pipeline rank of each rank.
        self.stage_W = np.empty_like(placement)
        self.stage_W[model.groups.grid_PDCT] = np.arange(model.work.layout.pp)[:, None, None, None]
        # 1 / speed of the slowest slot of each host.
        self.slowness_H = model.slowness_W.reshape(-1, cluster.devices_per_host).max(axis=1)
        self.latency_s_HH = np.asarray(cluster.between_hosts.latency_s)
        self.per_byte_s_HH = cluster.between_hosts.seconds_per_byte

    @property
    def num_hosts(self) -> int:
        """Number of hosts."""
        return len(self.slowness_H)

    @property
    def gathers_first(self) -> bool:
        """True if the first forwards wait for parameter gathers, instead of the optimizer."""
        return bool(gathers_in_forward(self.model.work.layout))

    @property
    def bare(self) -> Prices:
        """Prices without the exchanges between hosts, and without the parameter gathers that a forward waits for."""
        zero = np.zeros_like(self.prices.slowness_PD)
        exchange_s_PD = tuple(
            zero if self.crosses(item.group) else seconds
            for item, seconds in zip(self.model.work.exchanges, self.prices.exchange_s_PD, strict=True)
        )
        gather_s_SK = np.zeros_like(self.prices.gather_s_SK) if self.gathers_first else self.prices.gather_s_SK
        return replace(self.prices, exchange_s_PD=exchange_s_PD, gather_s_SK=gather_s_SK)

    def crosses(self, name: str) -> bool:
        """Return whether some group of this name spans several hosts."""
        host_GK = self.host_W[getattr(self.model.groups, name)]
        return bool((host_GK != host_GK[:, :1]).any())

    def seconds_HH(self, kind: Collective, spread: OnHosts, size_bytes: float) -> Floats:
        """Return the seconds of a collective whose slowest link is the link from one host to another, for all pairs."""
        size, spans, fewest = spread
        scale = self.model.fabric.scale(kind, size)
        per_byte = float(scale.bytes_factor[spans]) * size_bytes * chunk_share(kind, size)
        per_byte /= float(links_together(kind, np.array(fewest)))
        # Compute in place, because on many hosts each copy of the matrix takes longer than the arithmetic.
        seconds: Floats = self.per_byte_s_HH * (num_steps(kind, size) * per_byte)
        seconds += self.latency_s_HH * (num_steps(kind, size) * float(scale.latency_factor[spans]))
        seconds += num_steps(kind, size) * float(scale.extra_latency_s[spans])
        return seconds

    def links(self, kind: Collective, ranks_GK: Ints) -> LinksBetweenHosts:
        """Return the links between hosts that groups of ranks use."""
        host_GK = self.host_W[ranks_GK]
        size = host_GK.shape[1]
        hosts_G, fewest_G = spread_over_hosts(host_GK)
        across_G = hosts_G > 1
        spread = OnHosts(size, int(hosts_G.max(initial=1)), int(fewest_G[across_G].min()) if across_G.any() else 1)
        stage_G1 = self.stage_W[ranks_GK[:, :1]]
        codes = []
        for shift in range(1, size) if kind == "all_to_all" else (self.model.fabric.ring_shift(kind),):
            receiver_GK = np.roll(host_GK, -shift, axis=1)
            code_GK = (stage_G1 * self.num_hosts + host_GK) * self.num_hosts + receiver_GK
            codes.append(np.unique(code_GK[host_GK != receiver_GK]))
        code_L = np.unique(np.concatenate(codes)) if codes else np.zeros(0, dtype=np.int64)
        rest_L, receiver_L = np.divmod(code_L, self.num_hosts)
        return LinksBetweenHosts(spread, *np.divmod(rest_L, self.num_hosts), receiver_L)


@dataclass(frozen=True, kw_only=True, eq=False)
class Tangents:
    """Paths through a schedule. The time of a pipeline is the longest path, so each path is a lower bound.

    The length of a path is the sum of counts * seconds over passes and messages.
    """

    duration_BK: Floats
    hop_JK: Floats
    most_B: Floats
    """Largest number of times that any path contains each pass, including paths that were left out."""


class Spread(NamedTuple):
    """Range of the times of a pipeline over all hosts that its stages may lie on."""

    slowness: float
    """Slowness of the slowest host relative to the median host."""
    typical_hop_s: float
    slowest_hop_s: float


def tangents_of(work: LayoutWork, durations_BD: Floats, hops_JD: Floats, spread: Spread, *, most: int) -> Tangents:
    """Return critical paths (tangents) of the current pipelines, and of pipelines with slower stages or messages.

    The first of at most `most` tangents belongs to the slowest pipeline.
    """
    durations_BN, hops_JN = _points(work, durations_BD, hops_JD, spread)
    duration_BC, hop_JC = critical_counts(work.engine, durations_BN, hops_JN)
    # Use a dict, because `np.unique` along an axis takes longer than the rest of this function.
    first_of: dict[bytes, int] = {}
    for index, tangent in enumerate(np.concatenate([duration_BC, hop_JC]).T):
        first_of.setdefault(tangent.tobytes(), index)
    first = np.array(list(first_of.values()))
    value_CN = duration_BC[:, first].T @ durations_BN + hop_JC[:, first].T @ hops_JN
    kept = first[_steepest(value_CN, most)]
    return Tangents(duration_BK=duration_BC[:, kept], hop_JK=hop_JC[:, kept], most_B=duration_BC.max(axis=1))


def _points(work: LayoutWork, durations_BD: Floats, hops_JD: Floats, spread: Spread) -> tuple[Floats, Floats]:
    """Return times of trial pipelines: slow replicas, mixed messages, and a slower stage or message in the slowest."""
    stages, pp, replicas = len(work.rank_S), work.layout.pp, durations_BD.shape[1]
    assert len(durations_BD) == 3 * stages
    slowest = np.argsort(-work.engine.drain_s_SR(durations_BD, hops_JD).max(axis=0), kind="stable")
    durations_B, hops_J = durations_BD[:, slowest[0]], hops_JD[:, slowest[0]]
    rank_J = np.concatenate([work.rank_S[:-1], work.rank_S[:-1], [-1]])
    points = [(durations_BD[:, index], hops_JD[:, index]) for index in slowest[:SLOW_PIPELINES]]
    if pp > 1 and replicas > 1:
        # Message j of mixed pipeline m takes the time of pipeline m + 7 j, to combine times of several pipelines.
        taken_JM = (np.arange(len(rank_J))[:, None] * MIXING_STRIDE + np.arange(MIXED_PIPELINES)) % replicas
        points += [(durations_B, mixed_J) for mixed_J in np.take_along_axis(hops_JD, taken_JM, axis=1).T]
    levels = (spread.typical_hop_s, spread.slowest_hop_s) if pp > 1 else ()
    points += [(durations_B, np.where(rank_J >= 0, level, 0.0)) for level in levels]
    for rank in range(pp):
        slower_B = np.where(np.tile(work.rank_S == rank, 3), max(spread.slowness, 1 + NUDGE), 1.0)
        points.append((durations_B * slower_B, hops_J))
    links = range(pp) if work.layout.vpp > 1 else range(pp - 1)
    points += [(durations_B, np.where(rank_J == link, spread.slowest_hop_s, hops_J)) for link in links]
    return np.stack([point[0] for point in points], axis=1), np.stack([point[1] for point in points], axis=1)


def _steepest(value_CN: Floats, most: int) -> list[int]:
    """Choose the first tangent, then repeatedly the one that most exceeds the chosen tangents in a trial pipeline."""
    chosen = [0]
    model_N = value_CN[0]
    while len(chosen) < most:
        missed_CN = value_CN - model_N
        best, point = np.unravel_index(int(missed_CN.argmax()), missed_CN.shape)
        if missed_CN[best, point] <= CLOSE * value_CN[best, point]:
            break
        chosen.append(int(best))
        model_N = np.maximum(model_N, value_CN[best])
    return chosen


@dataclass(frozen=True, kw_only=True, eq=False)
class Crossing:
    """The collectives of one kind of group, whose groups span several hosts."""

    links: LinksBetweenHosts
    forward_IS: Floats
    """Number of each collective in the forward of each stage."""
    backward_IS: Floats
    exposed_s_IHH: Floats
    """Exposed seconds of one collective, for each link between hosts as the slowest link."""

    def add(self, builder: ProblemBuilder, view: View, tangents: Tangents) -> None:
        """Add one family (a maximum over groups of terms) with a group for each link.

        The slowest stage decides the time of a pipeline, so only the slowest link counts. The weight of a link is the
        number of passes of the stage on the critical path.
        """
        work = view.model.work
        stages, pp = len(work.rank_S), work.layout.pp
        forward_S = tangents.most_B[:stages] + tangents.most_B[2 * stages :]
        weight_IS = forward_S * self.forward_IS + tangents.most_B[stages : 2 * stages] * self.backward_IS
        weight_IP = np.stack([weight_IS[:, rank::pp].sum(axis=1) for rank in range(pp)], axis=1)
        # All ranks share one matrix, because the same exchanges dominate on every rank, only in different numbers.
        most = int(weight_IP.sum(axis=0).argmax())
        typical_I = np.median(self.exposed_s_IHH, axis=(1, 2)) + np.finfo(float).tiny
        share_P = typical_I @ weight_IP / (typical_I @ weight_IP[:, most])
        kind = builder.add_type(np.tensordot(weight_IP[:, most], self.exposed_s_IHH, axes=1))
        group_L = builder.add_family(np.zeros(len(self.links.stage_L)))
        builder.add_flows(kind, self.links.sender_L, self.links.receiver_L, share_P[self.links.stage_L], group_L)


def crossings_of(view: View) -> list[Crossing]:
    """Return the exchanges between hosts, by kind of group and by direction of the rings."""
    work, fabric = view.model.work, view.model.fabric
    alike: dict[tuple[str, int], list[Exchange]] = {}
    for item in sorted(work.exchanges, key=lambda item: item.group):
        if view.crosses(item.group):
            alike.setdefault((item.group, fabric.ring_shift(item.kind)), []).append(item)
    found = []
    for (name, _), items in alike.items():
        kinds = [item.kind for item in items]
        widest = "all_to_all" if "all_to_all" in kinds else kinds[0]
        links = view.links(widest, getattr(view.model.groups, name))
        exposed = [view.seconds_HH(item.kind, links.spread, item.size_bytes) - item.hidden_s for item in items]
        exposed_s_IHH = np.maximum(np.stack(exposed), 0.0)
        exposed_s_IHH[:, np.arange(view.num_hosts), np.arange(view.num_hosts)] = 0.0
        found.append(
            Crossing(
                links=links,
                forward_IS=np.array([item.forward for item in items], dtype=np.float64),
                backward_IS=np.array([item.backward for item in items], dtype=np.float64),
                exposed_s_IHH=exposed_s_IHH,
            )
        )
    return found


def _add_step_end(builder: ProblemBuilder, view: View, tangents: Tangents) -> None:
    """Add families for gradient reduction and parameter gathers."""
    work, prices = view.model.work, view.prices
    durations_BD, hops_JD = pipelines(work, prices)
    drain_S1 = work.engine.drain_s_SR(durations_BD, hops_JD).max(axis=1, keepdims=True)
    end = step_end(work, prices, drain_S1, durations_BD)
    _add_reductions(builder, view, end)
    if view.gathers_first:
        _add_first_gathers(builder, view, tangents)
    elif work.layout.use_distributed_optimizer:
        # Add one family (a maximum) with a group for each pipeline rank: optimizer step and gathers.
        _add_rings(builder, list(_rings(view, gathers=True)), end.update_s_PN[:, 0], np.ones(work.layout.pp))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Rings:
    """Data-parallel rings of dense or of expert parameters, priced for each link."""

    links: LinksBetweenHosts
    matrix_HH: Floats
    """Seconds of the longest ring by the two hosts of its slowest link."""
    share_P: Floats
    """Seconds of the ring of each pipeline rank, as a share of the longest ring."""

    def now_L(self) -> Floats:
        """Return the seconds of a ring at the current placement, as if each link were the slowest."""
        links = self.links
        return np.asarray(self.matrix_HH[links.sender_L, links.receiver_L] * self.share_P[links.stage_L])

    def add(self, builder: ProblemBuilder, group_L: Ints, weight_L: Floats) -> None:
        """Add a flow (a linear term) for each link."""
        links = self.links
        kind = builder.add_type(self.matrix_HH)
        builder.add_flows(kind, links.sender_L, links.receiver_L, weight_L * self.share_P[links.stage_L], group_L)


def _rings(view: View, *, gathers: bool) -> Iterator[_Rings]:
    """Yield the rings of dense parameters and of expert parameters that span several hosts.

    The chunks of each pipeline rank are priced together.
    """
    work, groups = view.model.work, view.model.groups
    kind = "all_gather" if gathers else work.reduce_kind
    sizes_S2 = work.parameter_bytes_S2 if gathers else work.gradient_bytes_S2
    for ranks_GK, column in ((groups.dp_cp, 0), (groups.expert_dp, 1)):
        links = view.links(kind, ranks_GK)
        if not len(links.stage_L) or not sizes_S2[:, column].any():
            continue
        size_bytes_CP = sizes_S2[:, column].reshape(-1, work.layout.pp)
        total_P = size_bytes_CP.sum(axis=0)
        largest_C = size_bytes_CP[:, total_P.argmax()]
        matrix_HH = np.sum([view.seconds_HH(kind, links.spread, size) for size in largest_C[largest_C > 0]], axis=0)
        yield _Rings(links=links, matrix_HH=matrix_HH, share_P=total_P / total_P.max())


def _add_reductions(builder: ProblemBuilder, view: View, end: StepEnd) -> None:
    """Add one family (a maximum) of the seconds after the last pass: each link of a ring, and the tied embedding.

    The end of a rank is linear in the seconds of its gradient reduction. The slope is 1 without overlap, and smaller if
    a backward hides part of the reduction.
    """
    work, prices = view.model.work, view.prices
    step_s = _STEP * float(prices.reduce_s_SK.max()) or 1e-6
    end_P = end.reduced_s_PN[:, 0]
    later = replace(end, reduce_s_VPN=end.reduce_s_VPN + step_s)
    slope_P = (later.reduced_s_PN[:, 0] - end_P) / (step_s * work.layout.vpp)
    late_P = end_P - end.drain_s_VPN.max()
    late_P[[0, -1]] += prices.embedding_s_K
    _add_rings(builder, list(_rings(view, gathers=False)), late_P, slope_P)
    pairs = view.links("send", view.model.groups.embedding)
    if work.traffic.embedding_bytes and len(pairs.stage_L):
        # Add one family for the change of the tied embedding's seconds, because `late_P` contains the current seconds.
        kind = builder.add_type(view.seconds_HH("all_reduce", OnHosts(2, 2), work.traffic.embedding_bytes))
        group = builder.add_family(np.full(2 * len(pairs.stage_L), -prices.embedding_s_K[0]))
        ends_2L = pairs.sender_L, pairs.receiver_L
        builder.add_flows(kind, np.concatenate(ends_2L), np.concatenate(ends_2L[::-1]), 1.0, group)


def _add_rings(builder: ProblemBuilder, rings: list[_Rings], end_P: Floats, slope_P: Floats) -> None:
    """Add one family (a maximum): the end of each pipeline rank, which depends on the hosts that its links join.

    `end_P` is the current end of each rank. A rank's end moves by `slope_P` for each second of the rank's slowest link.
    """
    offsets = []
    is_still_P = np.ones(len(end_P), dtype=bool)
    for one in rings:
        worst_P = np.zeros(len(end_P))
        np.maximum.at(worst_P, one.links.stage_L, one.now_L())
        offsets.append((end_P - slope_P * worst_P)[one.links.stage_L])
        is_still_P[one.links.stage_L] = False
    group_G = builder.add_family(np.concatenate([*offsets, end_P[is_still_P]]))
    first = 0
    for one in rings:
        num_links = len(one.links.stage_L)
        one.add(builder, group_G[first : first + num_links], slope_P[one.links.stage_L])
        first += num_links


def _add_first_gathers(builder: ProblemBuilder, view: View, tangents: Tangents) -> None:
    """Add a family for each pipeline rank: its first gather, weighted by the first forwards on the critical path."""
    work = view.model.work
    pp = work.layout.pp
    first_S = tangents.duration_BK[2 * len(work.rank_S) :, 0].copy()
    if work.layout.vpp > 1:
        first_S[1:] = 0.0  # Only the first stage waits (`pipelines`).
    weight_P = np.bincount(work.rank_S, weights=first_S, minlength=pp) / work.layout.vpp
    for one in _rings(view, gathers=True):
        for rank in np.flatnonzero(weight_P):
            chosen = np.flatnonzero(one.links.stage_L == rank)
            group = builder.add_family(np.zeros(len(chosen)))
            kind = builder.add_type(one.matrix_HH)
            weight = float(weight_P[rank] * one.share_P[rank])
            builder.add_flows(kind, one.links.sender_L[chosen], one.links.receiver_L[chosen], weight, group)


def linearise(model: PlacementCost, placement: Sequence[int] | Ints) -> Flows:
    """Make the linear model of a layout's step time at a placement (RANK of each slot).

    Seat q of the problem is the set of ranks that host q holds now. If no seat moves, the cost is the step time.
    """
    view = View(model, np.asarray(placement, dtype=np.int64))
    builder = ProblemBuilder(view.num_hosts)
    crossings = crossings_of(view)
    tangents = _add_pipelines(builder, view, crossings)
    for one in crossings:
        one.add(builder, view, tangents)
    _add_step_end(builder, view, tangents)
    builder.add_family(0.0)
    flows = builder.flows()
    # The last family has one group: the difference between step time and model at this placement.
    offset_G = flows.offset_G.copy()
    offset_G[-1] = totals_s_K(model.work, view.prices)[0] - flows.cost(np.arange(view.num_hosts))
    return replace(flows, offset_G=offset_G)


def _add_pipelines(builder: ProblemBuilder, view: View, crossings: Sequence[Crossing]) -> Tangents:
    """Add one family (a maximum) with a group for each tangent of each pipeline, counting identical pipelines once."""
    work, grid_PDCT = view.model.work, view.model.groups.grid_PDCT
    path_PR = np.unique(view.host_W[grid_PDCT].reshape(len(grid_PDCT), -1), axis=1)
    next_PR = np.roll(path_PR, -1, axis=0)
    hop_HH = view.seconds_HH("send", OnHosts(2, 1), work.hop_bytes)
    durations_BD, hops_JD = pipelines(work, view.bare)
    worst = int(work.engine.drain_s_SR(durations_BD, hops_JD).max(axis=0).argmax())
    most = int(np.clip(MOST_FLOWS // (3 * path_PR.size), 1, MOST_TANGENTS))
    spread = _spread(view, hop_HH, durations_BD[:, worst], crossings)
    tangents = tangents_of(work, durations_BD, hops_JD, spread, most=most)
    # Compute time grows with the slowness of the host; the rest of a pass is constant.
    compute_B = np.concatenate([work.forward_s_S, work.backward_s_S + work.recompute_s_S, work.forward_s_S])
    slowness_S = view.prices.slowness_PD[work.rank_S, worst]
    fixed_K = (durations_BD[:, worst] - compute_B * np.tile(slowness_S, 3)) @ tangents.duration_BK
    pp, num_hops, fabric = work.layout.pp, len(work.rank_S) - 1, view.model.fabric
    compute_PK = _by_rank(pp, np.tile(work.rank_S, 3), compute_B[:, None] * tangents.duration_BK)
    # Number of messages on each path from each pipeline rank to the next rank (cyclic), and back.
    forward_PK = _by_rank(pp, work.rank_S[:-1], tangents.hop_JK[:num_hops])
    backward_PK = _by_rank(pp, work.rank_S[:-1], tangents.hop_JK[num_hops : 2 * num_hops])
    stays_PR = (path_PR == next_PR).astype(np.float64)
    inside_s = fabric.seconds("send", (0, 1), work.hop_bytes) if fabric.cluster.devices_per_host > 1 else 0.0
    offset_KR = fixed_K[:, None] + inside_s * ((forward_PK + backward_PK).T @ stays_PR)
    differ = view.num_hosts > 1 and bool((view.slowness_H != view.slowness_H[0]).any())
    if not differ:
        offset_KR += compute_PK.sum(axis=0)[:, None] * view.slowness_H[0]
    group_KR = builder.add_family(offset_KR.ravel()).reshape(offset_KR.shape)
    hop = builder.add_type(hop_HH)
    _add_along(builder, hop, (path_PR, next_PR), forward_PK, group_KR)
    _add_along(builder, hop, (next_PR, path_PR), backward_PK, group_KR)
    if differ:
        # Compute seconds are modelled as a flow to any other seat, whose price depends on the sending host only.
        own = builder.add_type(np.repeat(view.slowness_H[:, None], view.num_hosts, axis=1))
        _add_along(builder, own, (path_PR, (path_PR + 1) % view.num_hosts), compute_PK, group_KR)
    return tangents


def _add_along(
    builder: ProblemBuilder, kind: int, ends_PR: tuple[Ints, Ints], weight_PK: Floats, group_KR: Ints
) -> None:
    """Add a flow (a linear term) for each pipeline rank of each pipeline and tangent."""
    shape = (weight_PK.shape[1], *ends_PR[0].shape)
    sender, receiver = (np.broadcast_to(end, shape).ravel() for end in ends_PR)
    weight = np.broadcast_to(weight_PK.T[:, :, None], shape).ravel()
    builder.add_flows(kind, sender, receiver, weight, np.broadcast_to(group_KR[:, None, :], shape).ravel())


def _spread(view: View, hop_HH: Floats, durations_B: Floats, crossings: Sequence[Crossing]) -> Spread:
    between = hop_HH[~np.eye(view.num_hosts, dtype=bool)] if view.num_hosts > 1 else np.zeros(1)
    stages = len(view.model.work.rank_S)
    shortest_s = float((durations_B[:stages] + durations_B[stages : 2 * stages]).min())
    slowness = float(view.slowness_H.max() / np.median(view.slowness_H))
    # Seconds that the passes of a stage take longer over the slowest link than over the median link.
    longer_s = 0.0
    for one in crossings:
        range_I = one.exposed_s_IHH.max(axis=(1, 2)) - np.median(one.exposed_s_IHH, axis=(1, 2))
        longer_s += float((range_I @ (one.forward_IS + one.backward_IS)).max())
    slowness += longer_s / shortest_s if shortest_s else 0.0
    return Spread(slowness, typical_hop_s=float(np.median(between)), slowest_hop_s=float(between.max()))


def _by_rank(pp: int, rank_X: Ints, values_XK: Floats) -> Floats:
    """For each pipeline rank, return the sum of the rows of `values_XK` that belong to the rank."""
    sums_PK = np.zeros((pp, values_XK.shape[1]))
    np.add.at(sums_PK, rank_X, values_XK)
    return sums_PK
