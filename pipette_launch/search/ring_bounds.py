"""Lower bounds of the seconds of collectives in every placement, from the cost of each link between hosts.

A unit is a block of ranks that lies on one host. A ring is a group that sends in a circle from unit to unit. Every host
holds the same number of units, and each unit belongs to one ring. The functions ignore some of these conditions, so
their results are lower bounds and not optima. A part is one of several disjoint sets of hosts.
"""

# H = places: the hosts, or the devices of a single host. J = rings, S = stages (model chunks).

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipette_launch.cost.communication.collectives import Scale, chunk_share, num_steps, spanning_tree
from pipette_launch.cost.communication.exchanges import group_sizes
from pipette_launch.cost.layers.parameters import experts_lie_in_stages
from pipette_launch.cost.layers.passes import Collective
from pipette_launch.cost.step.predictor import PlacementCost
from pipette_launch.cost.step.work import LayoutWork
from pipette_launch.facts.cluster import Links
from pipette_launch.facts.layout import Floats, Ints

ROUNDING = 1e-12
"""Share by which bounds are lowered to allow for rounding: placements add the same numbers in another order."""


def best_ways(cost_HH: Floats) -> tuple[Floats, Floats]:
    """Return the costs of the best link from each host, and of the best link to each host; rows of `cost_HH` send."""
    cost = _without_own(cost_HH)
    return cost.min(axis=1), cost.min(axis=0)


def through(cost_HH: Floats, *, visits_once: bool) -> Floats:
    """Return, for each host, the least cost of the slowest link of any ring through this host and another host.

    A ring that visits each of three or more hosts once uses links to two different neighbours of each host.
    """
    cost = _without_own(cost_HH)
    out_H, in_H = best_ways(cost_HH)
    best_H: Floats = np.maximum(out_H, in_H)
    if not visits_once or len(cost) < 3:
        return best_H
    second_out_H = np.partition(cost, 1, axis=1)[:, 1]
    second_in_H = np.partition(cost, 1, axis=0)[1]
    apart_H = np.minimum(np.maximum(second_out_H, in_H), np.maximum(out_H, second_in_H))
    return np.where(cost.argmin(axis=1) == cost.argmin(axis=0), apart_H, best_H)


def ring_thresholds(
    cost_HH: Floats, *, units_per_host: int, ring_units: int, fewest: int, through_H: Floats
) -> list[float]:
    """Return the least cost of the slowest link of each ring: J entries, cheapest ring first.

    The links up to a cost join the hosts to parts, and a ring of only these links lies inside one part. If m hosts of a
    part can lie on a ring of these links, the part holds at most floor(m * units_per_host / ring_units) rings. The part
    holds no ring if m is below `fewest`, the smallest number of hosts of a ring. A ring that fits on one host costs 0.
    `through_H` are the least seconds of a ring through each host.
    """
    hosts = len(cost_HH)
    rings = hosts * units_per_host // ring_units
    if fewest < 2 or hosts < 2:
        return [0.0] * rings

    def num_held(hosts: int) -> int:
        return hosts * units_per_host // ring_units if hosts >= fewest else 0

    part_of = list(range(hosts))
    members = [[host] for host in range(hosts)]
    usable = [0] * hosts
    events = [(cost, 1, one, other) for cost, one, other in spanning_tree(cost_HH)]
    events += [(float(cost), 0, host, host) for host, cost in enumerate(through_H)]
    found: list[float] = []
    held = 0
    for cost, is_join, one, other in sorted(events):
        keep, drop = part_of[one], part_of[other]
        if is_join and len(members[keep]) < len(members[drop]):
            keep, drop = drop, keep
        held -= num_held(usable[keep])
        if is_join:
            held -= num_held(usable[drop])
            usable[keep] += usable[drop]
            for host in members[drop]:
                part_of[host] = keep
            members[keep] += members[drop]
        else:
            usable[keep] += 1
        held += num_held(usable[keep])
        found += [cost] * (held - len(found))
    return found[:rings]


def partitions(cost_HH: Floats, *, most: int) -> list[tuple[Ints, float]]:
    """Return ways to divide the hosts into parts: part of each host, and cost of the cheapest link between parts.

    In the first way, each host is a part of its own. Every other way joins hosts by all links below a large step in the
    sorted link costs.
    """
    tree = spanning_tree(cost_HH)
    costs = [cost for cost, _, _ in tree]
    steps = sorted(range(1, len(costs)), key=lambda at: costs[at - 1] / costs[at] if costs[at] else 1.0)
    found = []
    for at in [0, *(at for at in steps[: most - 1] if costs[at - 1] < costs[at])] if costs else []:
        part_H = np.arange(len(cost_HH))
        for _, one, other in tree[:at]:
            part_H[part_H == part_H[other]] = part_H[one]
        found.append((np.unique(part_H, return_inverse=True)[1].reshape(-1), costs[at]))
    return found


def cheapest_between(cost_HH: Floats, part_H: Ints) -> float:
    """Return the cost of the cheapest link between two sets of hosts."""
    return float(cost_HH[part_H[:, None] != part_H[None, :]].min())


def pipeline_splits(stages: int, longest: int, *, most: int) -> list[tuple[int, ...]]:
    """Return sets of messages between parts, if a part of the hosts holds at most `longest` consecutive stages.

    Message h leads from stage h to stage h + 1. Every pipeline sends all messages of at least one set between parts. If
    there are more than `most` minimal sets, all sets with a smaller number of messages are returned instead.
    """
    smallest = list(itertools.islice(_minimal_splits(stages, longest), most + 1))
    if len(smallest) <= most:
        return smallest
    needed = -(-stages // longest) - 1
    fewer = max(size for size in range(needed + 1) if math.comb(stages - 1, size) <= most)
    return list(itertools.combinations(range(stages - 1), fewer))


def returning_splits(stages: int, longest: int, *, most: int) -> list[tuple[int, ...]] | None:
    """Return the sets of `pipeline_splits` for pipelines whose first and last stage lie in the same part.

    This part holds at most `longest` stages: some at the beginning and some at the end of the pipeline.

    None = more than `most` sets; an empty list = the first and the last stage cannot lie in one part.
    """
    found = []
    for first, last in itertools.combinations(range(stages - 1), 2):
        if first + stages - last <= longest:
            for inner in _minimal_splits(last - first, longest):
                found.append((first, *(first + 1 + hop for hop in inner), last))
                if len(found) > most:
                    return None
    return found


def _minimal_splits(stages: int, longest: int, done: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Yield minimal sets of messages between parts, such that at most `longest` consecutive stages share a part."""
    first = done[-1] + 1 if done else 0
    if stages - first <= longest:
        bounds = [-1, *done, stages - 1]
        if all(after - before > longest for before, after in zip(bounds, bounds[2:], strict=False)):
            yield done
        return
    before = done[-2] if len(done) > 1 else -1
    for hop in range(first, first + longest):
        if not done or hop - before > longest:
            yield from _minimal_splits(stages, longest, (*done, hop))


def _without_own(cost_HH: Floats) -> Floats:
    cost: Floats = cost_HH.copy()
    np.fill_diagonal(cost, np.inf)
    return cost


@dataclass(frozen=True, kw_only=True, eq=False)
class Places:
    """Places of blocks of ranks, and the links between places. Places are hosts, or the devices of a single host."""

    model: PlacementCost
    links: Links
    devices: int
    names: tuple[str, ...]

    @classmethod
    def of(cls, model: PlacementCost) -> Places:
        """Return the hosts as places, or the devices if there is only one host."""
        cluster = model.fabric.cluster
        if len(cluster.hosts) > 1:
            names = tuple(host.name for host in cluster.hosts)
            return cls(model=model, links=cluster.between_hosts, devices=cluster.devices_per_host, names=names)
        names = tuple(cluster.slot_name(slot) for slot in range(cluster.num_slots))
        return cls(model=model, links=cluster.within_host[0], devices=1, names=names)

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def latencies_s(self) -> tuple[float, float]:
        """Smallest and largest latency of a link."""
        chosen = self.links.latency_s[~np.eye(len(self), dtype=bool)]
        return float(chosen.min()), float(chosen.max())

    def factors(self, kind: Collective, size: int, fewest: int) -> tuple[float, float, float]:
        """Return the least latency factor, extra latency and byte factor of a group on at least `fewest` places."""
        scale: Scale = self.model.fabric.scale(kind, size)
        is_within = len(self.model.fabric.cluster.hosts) == 1
        counts = slice(1, 2) if is_within else slice(max(fewest, 2), max(min(size, len(self)), 2) + 1)
        return (
            float(scale.latency_factor[counts].min()),
            float(scale.extra_latency_s[counts].min()),
            float(scale.least_bytes_factor[counts].min()),
        )

    def link_s_HH(self, kind: Collective, size: int, size_bytes: float, *, fewest: int = 2) -> Floats:
        """Return the least seconds of a collective whose slowest link leads from the row's to the column's place.

        The diagonal is infinite. The group has `size` members on at least `fewest` places.
        """
        latency_factor, extra_s, bytes_factor = self.factors(kind, size, fewest)
        steps = num_steps(kind, size)
        seconds_HH: Floats = (steps * latency_factor) * self.links.latency_s
        seconds_HH += (steps * chunk_share(kind, size) * bytes_factor * size_bytes) * self.links.seconds_per_byte
        seconds_HH += steps * extra_s
        np.fill_diagonal(seconds_HH, np.inf)
        return seconds_HH


@dataclass(frozen=True, kw_only=True, eq=False)
class Tour:
    """Groups of one kind that span several places. Every block of ranks lies on one place and belongs to one group."""

    places: Places
    kind: Collective
    members: int
    size_bytes: float
    """Bytes of the group's largest message. The method `seconds` prices other collectives over the same links."""
    units: int
    """Number of blocks in a group."""
    per_place: int
    most_together: int
    """Largest number of blocks of a group on one place."""

    @classmethod
    def of(cls, places: Places, unit: int, kind: Collective, members: int, stride: int, size_bytes: float) -> Tour:
        """Divide groups, whose members are `stride` ranks apart, into blocks of `unit` ranks.

        If the ranks of a host must differ modulo its slots, members that are equal modulo the slots lie on different
        hosts. `units` is 0 if blocks cross groups.
        """
        each, per_place, cluster = max(1, unit // stride), places.devices // unit, places.model.fabric.cluster
        crosses = unit % stride > 0 and stride % unit > 0
        most_together = per_place
        if cluster.keeps_residues and len(cluster.hosts) > 1:
            remainders = places.devices // math.gcd(stride, places.devices)
            most_together = min(per_place, max(remainders // each, 1))
        return cls(
            places=places,
            kind=kind,
            members=members,
            size_bytes=size_bytes,
            units=0 if crosses else members // each if members % each == 0 else int(members > each),
            per_place=per_place,
            most_together=most_together,
        )

    @property
    def leaves_places(self) -> bool:
        """True if no place can hold a whole group."""
        return self.units > self.most_together

    @property
    def fewest(self) -> int:
        """Smallest number of places that a group spans."""
        return -(-self.units // self.most_together)

    @cached_property
    def cost_s_HH(self) -> Floats:
        """Seconds of the collective if the group's slowest link leads from the row's to the column's place."""
        cost_HH = self.places.link_s_HH(self.kind, self.members, self.size_bytes, fewest=self.fewest)
        # A group of two members on two places uses a link in both directions.
        return np.maximum(cost_HH, cost_HH.T) if self.units == 2 and self.most_together == 1 else cost_HH

    @cached_property
    def through_s_H(self) -> Floats:
        """For each place, the least seconds of the collective of a group that has a block on this place."""
        others = self.fewest - 1
        if self.kind == "all_to_all" and others > 1:
            # Every member sends to and receives from at least `others` other places.
            out_H = np.partition(self.cost_s_HH, others - 1, axis=1)[:, others - 1]
            in_H = np.partition(self.cost_s_HH, others - 1, axis=0)[others - 1]
            return np.asarray(np.maximum(out_H, in_H))
        return through(self.cost_s_HH, visits_once=self.most_together == 1 and self.units > 2)

    @cached_property
    def thresholds_s(self) -> list[float]:
        """Least seconds of the collective for each group, fastest group first."""
        return ring_thresholds(
            self.cost_s_HH,
            units_per_host=self.per_place,
            ring_units=self.units,
            fewest=self.fewest,
            through_H=self.through_s_H,
        )

    def seconds(self, kind: Collective, size_bytes: float, slowest_s: float) -> float:
        """Return the least seconds of a collective over a link on which the largest collective takes `slowest_s`.

        The link's latency is not known, so the bound assumes the largest latency, which leaves the least time per byte.
        A collective that runs around the ring the other way uses other links, so only the best of all links bounds this
        collective.
        """
        fabric = self.places.model.fabric
        if fabric.ring_shift(kind) != fabric.ring_shift(self.kind):
            return fabric.bound_s(kind, self.members, size_bytes)
        least_s, most_s = self.places.latencies_s
        factor, extra_s, bytes_factor = self.places.factors(self.kind, self.members, self.fewest)
        known = num_steps(self.kind, self.members) * self.size_bytes * bytes_factor
        fixed_s = num_steps(self.kind, self.members) * (most_s * factor + extra_s)
        # The difference of two equal times is a rounding error, which a tiny `known` would make a huge time.
        per_byte = max(slowest_s * (1 - ROUNDING) - fixed_s, 0.0) / known if known else 0.0
        factor, extra_s, bytes_factor = self.places.factors(kind, self.members, self.fewest)
        found = num_steps(kind, self.members) * (least_s * factor + extra_s + per_byte * size_bytes * bytes_factor)
        return max(found, slowest_s) if kind == self.kind and size_bytes >= self.size_bytes else found


@dataclass(frozen=True, kw_only=True, eq=False)
class Ring:
    """Data-parallel groups of the dense parameters or of the expert parameters."""

    tour: Tour
    """Groups of the rings; their message has the smallest gradient bytes of any stage."""
    column: int
    """Column of `LayoutWork.gradient_bytes_S2`: 0 = dense parameters, 1 = expert parameters."""

    def more_s_S(self, slowest_s: float) -> tuple[Floats, Floats]:
        """Return the seconds that a slow link adds to the reduction and to the gather of each stage."""
        work = self.tour.places.model.work
        return (
            self._beyond(work.reduce_kind, work.gradient_bytes_S2[:, self.column], slowest_s),
            self._beyond("all_gather", work.parameter_bytes_S2[:, self.column], slowest_s),
        )

    def _beyond(self, kind: Collective, bytes_S: Floats, slowest_s: float) -> Floats:
        tour, fabric = self.tour, self.tour.places.model.fabric
        more = {
            size: max(tour.seconds(kind, size, slowest_s) - fabric.bound_s(kind, tour.members, size), 0.0)
            for size in set(bytes_S.tolist())
            if size
        }
        return np.array([more.get(size, 0.0) for size in bytes_S.tolist()])


def rings_of(places: Places, unit: int) -> list[Ring]:
    """Return the rings that have several blocks of `unit` ranks, if each block lies on one place."""
    work = places.model.work
    layout = work.layout
    found = []
    # Difference between the ranks of neighbouring members, for dense and for expert parameters.
    strides = (layout.tp, layout.ep * layout.etp)
    for column, members in enumerate((layout.dp * layout.cp, work.expert_dp)):
        if column and not experts_lie_in_stages(layout):
            continue
        bytes_S = work.gradient_bytes_S2[:, column]
        if len(places) > 1 and bytes_S.any():
            least_bytes = float(bytes_S[bytes_S > 0].min())
            tour = Tour.of(places, unit, work.reduce_kind, members, strides[column], least_bytes)
            if tour.units > 1:
                found.append(Ring(tour=tour, column=column))
    return found


def group_shapes(work: LayoutWork) -> dict[str, tuple[int, int]]:
    """Return the members of each kind of group inside the layers, and the rank difference of neighbouring members."""
    layout, sizes = work.layout, group_sizes(work.layout, instances=work.shard_copies)
    return {
        "tp": (layout.tp, 1),
        "cp": (layout.cp, layout.tp),
        "ep": (layout.ep, layout.etp),
        "etp": (layout.etp, 1),
        "ep_etp": (layout.ep * layout.etp, 1),
        "shard": (sizes["shard"], layout.tp),
        "expert_shard": (sizes["expert_shard"], layout.ep * layout.etp),
    }


def exchange_tours(places: Places, unit: int) -> dict[str, Tour]:
    """Return the groups inside the layers that are too large for one place, by name, with their largest collective."""
    layout = places.model.work.layout
    shapes = group_shapes(places.model.work)
    found: dict[str, Tour] = {}
    for item in places.model.work.exchanges:
        if item.part == "expert_parallel" and not experts_lie_in_stages(layout):
            continue
        is_larger = item.group not in found or item.size_bytes > found[item.group].size_bytes
        if len(places) > 1 and is_larger:
            tour = Tour.of(places, unit, item.kind, *shapes[item.group], item.size_bytes)
            if tour.leaves_places:
                found[item.group] = tour
    return found
