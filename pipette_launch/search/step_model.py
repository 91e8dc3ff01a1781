"""A placement described by hosts: its prices, and the links between hosts that each kind of group uses."""

# W = ranks, H = hosts, P = pipeline ranks, D = replicas, G = groups, K = members of a group, L = links.
# S = stages (model chunks), P = pipeline ranks, D = pipelines, K = cuts, C = cuts to choose from, N = points.
# B = 3 * S durations: forwards, backwards, first forwards. J = 2 * S - 1 hops, as in `StageTimes.hops_s`.
# S = stages (model chunks), P = pipeline ranks, I = collectives over one kind of group, H = hosts, L = links.
# S = stages (model chunks), P = pipeline ranks, H = hosts, L = links, G = groups.
# P = pipeline ranks, R = pipelines that differ in their hosts, K = cuts, H = hosts = seats = places, L = links.
# S = stages (model chunks); B, J as in `subgradients`.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from pipette_launch.cost.communication.collectives import chunk_share, links_together, num_steps, spread_over_hosts
from pipette_launch.cost.layers.block import Collective, Exchange
from pipette_launch.cost.pipeline.engine import critical_counts
from pipette_launch.cost.step.assemble import pipelines, step_end, total_s
from pipette_launch.cost.step.predictor import PlacementCost
from pipette_launch.cost.step.work import LayoutWork, Prices
from pipette_launch.search.assignment.problem import Floats, Flows, Ints, ProblemBuilder


class OnHosts(NamedTuple):
    """Size of the groups of a kind, and how they lie on hosts."""

    size: int
    """Members of a group."""
    spans: int
    """Largest number of hosts of a group."""
    fewest: int = 1
    """Least number of members on a host, among groups on several hosts; 1 if no group is."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LinksBetweenHosts:
    """Directed links between hosts, each once for each pipeline rank whose groups use it."""

    spread: OnHosts
    stage_L: Ints
    sender_L: Ints
    receiver_L: Ints

    def __len__(self) -> int:
        return len(self.stage_L)

    def worst_P(self, seconds_L: Floats, pp: int) -> Floats:
        """The largest of each pipeline rank's links; 0 where it has none."""
        worst = np.zeros(pp)
        np.maximum.at(worst, self.stage_L, seconds_L)
        return worst


@dataclass(frozen=True, kw_only=True, eq=False)
class View:
    """A placement of a layout, host by host."""

    model: PlacementCost
    prices: Prices
    host_W: Ints
    stage_W: Ints
    """Pipeline rank of each rank."""
    slowness_H: Floats
    """Of the slowest slot of each host."""
    latency_s_HH: Floats
    per_byte_s_HH: Floats

    @classmethod
    def of(cls, model: PlacementCost, placement: Ints) -> View:
        """Look at a placement: the RANK of each slot."""
        cluster = model.fabric.cluster
        host_W = np.empty_like(placement)
        host_W[placement] = np.arange(len(placement)) // cluster.devices_per_host
        stage_W = np.empty_like(host_W)
        stage_W[model.groups.grid_PDCT] = np.arange(model.work.layout.pp)[:, None, None, None]
        return cls(
            model=model,
            prices=model.prices(placement.tolist()),
            host_W=host_W,
            stage_W=stage_W,
            slowness_H=model.slowness_W.reshape(-1, cluster.devices_per_host).max(axis=1),
            latency_s_HH=np.asarray(cluster.between_hosts.latency_s),
            per_byte_s_HH=cluster.between_hosts.seconds_per_byte(),
        )

    @property
    def num_hosts(self) -> int:
        """H."""
        return len(self.slowness_H)

    @property
    def gathers_first(self) -> bool:
        """Whether parameters are gathered behind the first forward, rather than after the optimizer."""
        layout = self.model.work.layout
        return layout.use_distributed_optimizer and layout.overlap_param_gather

    @property
    def bare(self) -> Prices:
        """The prices without exchanges between hosts, and without gathers that a forward waits for."""
        nothing = np.zeros_like(self.prices.slowness_PD)
        exchange_s_PD = tuple(
            nothing if self.crosses(item.group) else seconds
            for item, seconds in zip(self.model.work.exchanges, self.prices.exchange_s_PD, strict=True)
        )
        gather_s_S = np.zeros_like(self.prices.gather_s_S) if self.gathers_first else self.prices.gather_s_S
        return replace(self.prices, exchange_s_PD=exchange_s_PD, gather_s_S=gather_s_S)

    def crosses(self, name: str) -> bool:
        """Whether some group of this name lies on several hosts."""
        host_GK = self.host_W[getattr(self.model.groups, name)]
        return bool((host_GK != host_GK[:, :1]).any())

    def inside_s(self, size_bytes: float) -> float:
        """Seconds of a send inside a host."""
        if self.model.fabric.cluster.devices_per_host == 1:
            return 0.0
        return self.model.fabric.seconds("send", (0, 1), size_bytes)

    def seconds_HH(self, kind: Collective, spread: OnHosts, size_bytes: float) -> Floats:
        """Seconds of a collective if a link between two hosts is its slowest (as in `Fabric.seconds_G`): shape (H, H).

        Args:
            kind: of the collective.
            spread: of its group.
            size_bytes: of the message.

        """
        size, spans, fewest = spread
        scale = self.model.fabric.scale(kind, size)
        per_byte = float(scale.bytes_factor[spans]) * size_bytes * chunk_share(kind, size)
        if scale.is_measured:
            per_byte /= float(links_together(kind, np.array(fewest)))
        # In place: on many hosts each copy of the matrix takes longer than the arithmetic.
        seconds: Floats = self.per_byte_s_HH * (num_steps(kind, size) * per_byte)
        seconds += self.latency_s_HH * (num_steps(kind, size) * float(scale.latency_factor[spans]))
        seconds += num_steps(kind, size) * float(scale.extra_latency_s[spans])
        return seconds

    def links(self, kind: Collective, ranks_GK: Ints) -> LinksBetweenHosts:
        """Links between hosts that groups of ranks use."""
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
        stage_L, sender_L = np.divmod(rest_L, self.num_hosts)
        return LinksBetweenHosts(spread=spread, stage_L=stage_L, sender_L=sender_L, receiver_L=receiver_L)


NUDGE = 0.05
"""A stage is made slower by at least this part, to find the critical path through a slow stage."""
CLOSE = 1e-3
"""Cuts that raise the model by less than this part of the pipeline's time are left out."""


SLOW_PIPELINES = 16
MIXED_PIPELINES = 16
MIXING_STRIDE = 7
"""Cuts are made at so many of the slowest pipelines, and at so many whose hops come from different pipelines."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Tangents:
    """Cuts of the makespan: it is at least counts * times for each of them, and equal for the steepest.

    The makespan of a schedule is that of the longest of many paths, and each cut is one of these paths.
    """

    duration_BK: Floats
    """How often each duration lies on the path."""
    hop_JK: Floats
    """How often each hop does."""
    most_B: Floats
    """The largest count of each duration over all paths that were found, kept or not."""

    @property
    def size(self) -> int:
        """K."""
        return int(self.duration_BK.shape[1])


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """How far the times of a pipeline may move with its place."""

    slowness: float
    """Of the slowest host, in parts of the median one."""
    typical_hop_s: float
    slowest_hop_s: float


def tangents_of(
    work: LayoutWork, durations_BD: Floats, hops_JD: Floats, spread: Spread, *, most: int, known: Tangents | None = None
) -> Tangents:
    """Cut the makespan where pipelines are now, and where stages are slower and hops longer than there.

    Args:
        work: the layout's.
        durations_BD: seconds, of every pipeline.
        hops_JD: seconds of every hop, likewise.
        spread: how much slower stages and hops may become.
        most: keep so many cuts at most; the first is always that of the slowest pipeline.
        known: cuts from other placements, to choose from too.

    """
    durations_BN, hops_JN = _points(work, durations_BD, hops_JD, spread)
    duration_BC, hop_JC = critical_counts(work.engine, durations_BN, hops_JN)
    most_B = duration_BC.max(axis=1)
    if known is not None:
        duration_BC, hop_JC = np.hstack([duration_BC, known.duration_BK]), np.hstack([hop_JC, known.hop_JK])
        most_B = np.maximum(most_B, known.most_B)
    # By a dict, as `np.unique` along an axis makes a type with a field for each row, which takes longer than all else.
    first_of: dict[bytes, int] = {}
    for index, cut in enumerate(np.concatenate([duration_BC, hop_JC]).T):
        first_of.setdefault(cut.tobytes(), index)
    first = np.array(list(first_of.values()))
    said_CN = duration_BC[:, first].T @ durations_BN + hop_JC[:, first].T @ hops_JN
    kept = first[_steepest(said_CN, most)]
    return Tangents(duration_BK=duration_BC[:, kept], hop_JK=hop_JC[:, kept], most_B=most_B)


def _points(work: LayoutWork, durations_BD: Floats, hops_JD: Floats, spread: Spread) -> tuple[Floats, Floats]:
    """Slow pipelines as they are and with each other's hops; then the slowest with stages or hops longer than now."""
    stages, pp, replicas = len(work.rank_S), work.layout.pp, durations_BD.shape[1]
    assert len(durations_BD) == 3 * stages
    slowest = np.argsort(-work.engine.drain_s_SR(durations_BD, hops_JD).max(axis=0), kind="stable")
    durations_B, hops_J = durations_BD[:, slowest[0]], hops_JD[:, slowest[0]]
    rank_J = np.concatenate([work.rank_S[:-1], work.rank_S[:-1], [-1]])
    points = [(durations_BD[:, index], hops_JD[:, index]) for index in slowest[:SLOW_PIPELINES]]
    if pp > 1 and replicas > 1:
        # Hop j of the mixed pipeline m comes from pipeline m + j, so that each meets new neighbours.
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


def _steepest(said_CN: Floats, most: int) -> list[int]:
    """Choose the first cut, then again and again the one that exceeds the chosen ones most at some point."""
    chosen = [0]
    model_N = said_CN[0]
    while len(chosen) < most:
        missed_CN = said_CN - model_N
        cut, point = np.unravel_index(int(missed_CN.argmax()), missed_CN.shape)
        if missed_CN[cut, point] <= CLOSE * said_CN[cut, point]:
            break
        chosen.append(int(cut))
        model_N = np.maximum(model_N, said_CN[cut])
    return chosen


@dataclass(frozen=True, kw_only=True, eq=False)
class Crossing:
    """The exchanges of one kind of group that lies on several hosts."""

    links: LinksBetweenHosts
    forward_IS: Floats
    """How many of each collective the forward of each stage runs."""
    backward_IS: Floats
    exposed_s_IHH: Floats
    """Seconds of one of them that nothing hides, if a link between two hosts is its slowest."""

    @property
    def longer_s(self) -> float:
        """By how much the passes of a stage could be longer over the slowest link than over a typical one."""
        spread_I = self.exposed_s_IHH.max(axis=(1, 2)) - np.median(self.exposed_s_IHH, axis=(1, 2))
        return float((spread_I @ (self.forward_IS + self.backward_IS)).max())

    def add(self, builder: ProblemBuilder, view: View, cuts: Tangents) -> None:
        """Add one family: a group for each link, as if it were the slowest and its pipeline rank the slowest stage.

        The slowest stage decides the time of a pipeline, so one of these links counts: as often as the passes of its
        stage lie on the critical path then.
        """
        work = view.model.work
        stages, pp = len(work.rank_S), work.layout.pp
        forward_S = cuts.most_B[:stages] + cuts.most_B[2 * stages :]
        weight_IS = forward_S * self.forward_IS + cuts.most_B[stages : 2 * stages] * self.backward_IS
        weight_IP = np.stack([weight_IS[:, rank::pp].sum(axis=1) for rank in range(pp)], axis=1)
        # Pipeline ranks differ in how much they exchange, hardly in what: one matrix serves all.
        most = int(weight_IP.sum(axis=0).argmax())
        typical_I = np.median(self.exposed_s_IHH, axis=(1, 2)) + np.finfo(float).tiny
        share_P = typical_I @ weight_IP / (typical_I @ weight_IP[:, most])
        kind = builder.add_type(np.tensordot(weight_IP[:, most], self.exposed_s_IHH, axes=1))
        group_L = builder.add_family(np.zeros(len(self.links)))
        builder.add_flows(kind, self.links.sender_L, self.links.receiver_L, share_P[self.links.stage_L], group_L)


def crossings_of(view: View) -> list[Crossing]:
    """The exchanges that leave a host, by kind of group and by the way that its rings go."""
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


def _priced(view: View, kind: Collective, links: LinksBetweenHosts, size_bytes_CP: Floats) -> _Rings:
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
    drain_S1 = work.engine.drain_s_SR(durations_BD, hops_JD).max(axis=1, keepdims=True)
    end = step_end(work, prices, drain_S1, durations_BD)
    step_s = _STEP * float(prices.reduce_s_S.max()) or 1e-6
    end_P = end.reduced_s_PN[:, 0]
    later = replace(end, reduce_s_VPN=end.reduce_s_VPN + step_s)
    slope_P = (later.reduced_s_PN[:, 0] - end_P) / (step_s * work.layout.vpp)
    late_P = end_P - drain_S1.max()
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
