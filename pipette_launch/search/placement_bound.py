"""A lower bound of the step time of one layout over all its placements, from the measured links and slots.

The bound is a proof by cases. A trial is an imagined step whose prices are lower bounds. An argument is a set of
trials: every placement is at least as slow as the fastest trial of the set. All trials of a layout are priced together.
A place is a host, or a device if there is only one host.
"""

# H = places (hosts, or the devices of a single host), K = trials, P = pipeline ranks, S = stages (model chunks).

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pipette_launch.cost.step.assemble import totals_s_K
from pipette_launch.cost.step.predictor import PlacementCost, best_prices
from pipette_launch.cost.step.work import LayoutWork, Prices
from pipette_launch.facts.layout import Floats, Ints, Layout
from pipette_launch.search import ring_bounds
from pipette_launch.text import rate_text

_ACTIONS_AT_ONCE = 1 << 22
"""One call simulates trials with at most this number of passes, which need some tens of MB of memory."""


def copies(trial: Prices, count: int) -> Prices:
    """Copy the prices of one trial `count` times, into arrays with one column for each copy."""
    return _each_array(lambda *arrays: np.repeat(arrays[0], count, axis=-1), trial)


def side_by_side(trials: Sequence[Prices]) -> Prices:
    """Join the prices of several trials in arrays with one column for each trial."""
    return _each_array(lambda *arrays: np.concatenate(arrays, axis=-1), *trials)


def steps_s_K(work: LayoutWork, trials: Prices) -> Floats:
    """Simulate the trials, and return the step time (s) of each trial."""
    at_once = max(1, _ACTIONS_AT_ONCE // (2 * len(work.rank_S) * work.num_microbatches))
    blocks = [slice(first, first + at_once) for first in range(0, len(trials.embedding_s_K), at_once)]
    parts = [_each_array(lambda *arrays, block=block: arrays[0][..., block], trials) for block in blocks]
    return np.concatenate([totals_s_K(work, part) for part in parts])


def _each_array(change: Callable[..., Floats], *trials: Prices) -> Prices:
    """Apply a function to each array of prices (the same array of all trials), and return prices."""
    names = [name for name in Prices.__dataclass_fields__ if name != "exchange_s_PD"]
    exchanges = zip(*(one.exchange_s_PD for one in trials), strict=True)
    arrays = {name: change(*(getattr(one, name) for one in trials)) for name in names}
    return Prices(exchange_s_PD=tuple(change(*each) for each in exchanges), **arrays)


_WORST = 2
"""For each kind of exchange, the bound tries the places with the slowest links, at most this number of places."""
_PARTITIONS = 4
_SPLITS = 40

BEST_LINKS = "the bound takes the best link everywhere"
GROUP_NAMES = {
    "tp": "tensor-parallel",
    "cp": "context-parallel",
    "ep": "expert-parallel",
    "etp": "expert-tensor-parallel",
    "ep_etp": "expert-parallel",
    "shard": "sharding",
    "expert_shard": "expert-sharding",
}


class BoundArgument(NamedTuple):
    """Proof that every step is at least as long as the shortest of some trial steps."""

    words: str
    trials: Prices


@dataclass(frozen=True, kw_only=True, eq=False)
class BoundArguments:
    """Arguments for placements that put each aligned block of `unit` ranks of one stage on one host (place)."""

    places: ring_bounds.Places
    best: Prices
    unit: int

    def all(self) -> Iterator[BoundArgument]:
        """Yield the arguments. Easy arguments come first, because the plan names the first of equal bounds."""
        yield BoundArgument(BEST_LINKS, self.best)
        if len(self.places) > 1:
            yield from self._of_places()
            yield from self._of_groups()
            yield from self._of_parts()
            yield from self._of_pipelines()
        slowness_W = self._model.slowness_W
        slot = int(slowness_W.argmax())
        if slowness_W[slot] > slowness_W.min():
            # Some stage must use the slowest slot, because every slot has a rank.
            trials = copies(self._one, self._pp)
            _at_own_rank(trials.slowness_PD, float(slowness_W[slot]))
            name = self._model.fabric.cluster.slot_name(slot)
            words = f"some stage has {name}, whose speed is {1 / float(slowness_W[slot]):.2f} of the median's"
            yield BoundArgument(words, trials)

    def crossing(self, names: tuple[str, ...]) -> BoundArgument:
        """Return the argument for placements in which a group with one of these names spans several places."""
        found = []
        used = [name for name in names if any(item.group == name for item in self._model.work.exchanges)]
        shapes = ring_bounds.group_shapes(self._model.work)
        for name in used:
            trials = copies(self._one, self._pp)
            for index, item in enumerate(self._model.work.exchanges):
                if item.group == name:
                    link_s = float(self.places.link_s_HH(item.kind, shapes[name][0], item.size_bytes).min())
                    _at_own_rank(trials.exchange_s_PD[index], link_s)
            found.append(trials)
        kinds = " or ".join(dict.fromkeys(GROUP_NAMES[name] for name in used or names))
        # A group without exchanges takes no time, wherever its ranks lie.
        trials = side_by_side(found) if found else self._one
        return BoundArgument(f"the bound holds even if some {kinds} group spans several hosts", trials)

    @property
    def _model(self) -> PlacementCost:
        return self.places.model

    @property
    def _per_place(self) -> int:
        return self.places.devices // self.unit

    @property
    def _pp(self) -> int:
        return self._model.work.layout.pp

    @cached_property
    def _all_rings(self) -> list[ring_bounds.Ring]:
        return ring_bounds.rings_of(self.places, self.unit)

    @cached_property
    def _rings(self) -> list[ring_bounds.Ring]:
        return [ring for ring in self._all_rings if ring.tour.leaves_places]

    @cached_property
    def _tours(self) -> dict[str, ring_bounds.Tour]:
        return ring_bounds.exchange_tours(self.places, self.unit)

    @cached_property
    def _hops(self) -> tuple[Floats, Floats, Floats]:
        """Seconds of a message between each two places, and of the fastest message from and to each place."""
        send_s_HH = self.places.link_s_HH("send", 2, self._model.work.hop_bytes)
        return (send_s_HH, *ring_bounds.best_ways(send_s_HH))

    @property
    def _all_hops_cross(self) -> bool:
        return self._per_place == 1 and self._pp > 1 and len(self.places) > 1

    @cached_property
    def _one(self) -> Prices:
        """Trial in which each exchange takes as long as in the fastest group of its kind."""
        trial = copies(self.best, 1)
        if self._all_hops_cross:
            _raise(trial, hops=range(self._pp), seconds=float(self._hops[0].min()))
        for name, tour in self._tours.items():
            self._exchange(trial, name, tour, tour.thresholds_s[0], own_rank=False)
        for ring in self._rings:
            reduce_S, gather_S = ring.more_s_S(ring.tour.thresholds_s[0])
            trial.reduce_s_SK[:] += reduce_S[:, None]
            trial.gather_s_SK[:] += gather_S[:, None]
        return trial

    @cached_property
    def _mean(self) -> Prices:
        """Trial in which each message between stages takes the mean seconds of all replicas.

        The step time is convex in these seconds, so the slowest replica is at least as slow as this trial. If a place
        holds one block, replicas send this message from different places, at best from the places with the best links.
        """
        trial = copies(self._one, 1)
        if self._all_hops_cross:
            each = len(self.places) // self._pp
            _, out_H, in_H = self._hops
            means = [float(np.sort(way_H)[:each].mean()) for way_H in (out_H, in_H)]
            _raise(trial, hops=range(self._pp), seconds=max(means))
        if self._is_tied:
            # Each place of the first or last stage reduces the embedding with another place, at best by its best link.
            best_H = np.sort(self._ties_s_HH.min(axis=1))
            trial.embedding_s_K[:] = np.maximum(trial.embedding_s_K, best_H[2 * len(self.places) // self._pp - 1])
        return trial

    @cached_property
    def _ties_s_HH(self) -> Floats:
        """Seconds to reduce the gradients of the tied embedding between each two places."""
        pair_HH = self.places.link_s_HH("all_reduce", 2, self._model.work.traffic.embedding_bytes)
        return np.asarray(np.maximum(pair_HH, pair_HH.T))

    @property
    def _is_tied(self) -> bool:
        """True if places of the first stage reduce the tied embedding with other places, which hold the last stage."""
        return self._all_hops_cross and self._model.work.traffic.embedding_bytes > 0

    def _of_places(self) -> Iterator[BoundArgument]:
        """Yield arguments: some stage lies on a place with slow links, which its groups or messages must use."""
        worth = [("gradient ring", ring.tour.through_s_H, ring.tour.cost_s_HH) for ring in self._rings]
        worth += [
            (f"{GROUP_NAMES[name]} group", tour.through_s_H, tour.cost_s_HH) for name, tour in self._tours.items()
        ]
        if self._all_hops_cross:
            send_s_HH, out_H, in_H = self._hops
            worth.append(("pipeline", np.maximum(out_H, in_H), send_s_HH))
        done: set[int] = set()
        for name, seconds_H, cost_s_HH in worth:
            for place in np.argsort(-seconds_H, kind="stable")[:_WORST].tolist():
                if place not in done and seconds_H[place] > cost_s_HH.min():
                    done.add(place)
                    rates = self.places.links.bandwidth_bytes_per_s
                    best = min(float(np.delete(way, place).max()) for way in (rates[place], rates[:, place]))
                    own = f"{self.places.names[place]}, whose best is {rate_text(best)}"
                    words = f"some {name} must use a link of {own}"
                    yield BoundArgument(words, self._with_place(place))

    def _with_place(self, place: int) -> Prices:
        """Return one trial step for each stage: in trial k, ranks of stage k lie on the place."""
        pp, devices = self._pp, self.places.devices
        trials = copies(self._one, pp)
        _at_own_rank(trials.slowness_PD, float(self._model.slowness_W[place * devices : (place + 1) * devices].max()))
        for ring in self._rings:
            self._add_ring(trials, ring, float(ring.tour.through_s_H[place]), has_best=True)
        for name, tour in self._tours.items():
            self._exchange(trials, name, tour, float(tour.through_s_H[place]), own_rank=True)
        if self._is_tied:
            for stage in (0, pp - 1):
                trials.embedding_s_K[stage] = max(trials.embedding_s_K[stage], self._ties_s_HH[place].min())
        if self._all_hops_cross:
            out_s, in_s = (float(way_H[place]) for way_H in self._hops[1:])
            for stage in range(pp):
                for hop, forward_s, backward_s in ((stage, out_s, in_s), ((stage - 1) % pp, in_s, out_s)):
                    trials.forward_hop_s_PD[hop, stage] = max(trials.forward_hop_s_PD[hop, stage], forward_s)
                    trials.backward_hop_s_PD[hop, stage] = max(trials.backward_hop_s_PD[hop, stage], backward_s)
        return trials

    def _of_groups(self) -> Iterator[BoundArgument]:
        """Yield arguments: some stage has the slowest data-parallel ring, or the slowest group of another kind."""
        for ring in self._rings:
            last_s = ring.tour.thresholds_s[-1]
            trials = copies(self._mean, self._pp)
            self._add_ring(trials, ring, last_s, has_best=True)
            link = self._link_words(ring.tour.cost_s_HH, last_s)
            yield BoundArgument(f"some gradient ring needs a link no better than {link}", trials)
        for name, tour in self._tours.items():
            last_s = tour.thresholds_s[-1]
            trials = copies(self._one, self._pp)
            self._exchange(trials, name, tour, last_s, own_rank=True)
            link = self._link_words(tour.cost_s_HH, last_s)
            words = f"some {GROUP_NAMES[name]} group needs a link no better than {link}"
            yield BoundArgument(words, trials)

    def _of_parts(self) -> Iterator[BoundArgument]:
        """Yield arguments: a ring or pipeline must cross between two sets of places with fast links only inside."""
        layout = self._model.work.layout
        if layout.pp == 1 or self.unit % layout.tp:
            return
        dense = next((ring for ring in self._all_rings if ring.column == 0), None)
        if dense is None and layout.dp * layout.cp * layout.tp > self.unit:
            return
        units = dense.tour.units if dense else 1
        cost_s_HH = dense.tour.cost_s_HH if dense else self._hops[0]
        for part_H, cross_s in ring_bounds.partitions(cost_s_HH, most=_PARTITIONS):
            fits = np.bincount(part_H) * self._per_place // units
            longest = int(fits.max())
            trials = []
            if dense:
                trials.append(copies(self._mean, self._pp))
                self._add_ring(trials[0], dense, cross_s, has_best=dense.tour.leaves_places)
            if longest and fits.sum() >= self._pp:
                trials += self._with_parts(part_H, longest)
            crossing = "rings or pipelines" if dense else "pipelines"
            words = f"{crossing} cross between parts of the cluster, where no link is better than "
            words += self._link_words(cost_s_HH, cross_s)
            yield BoundArgument(words, side_by_side(trials))

    def _with_parts(self, part_H: Ints, longest: int) -> Iterator[Prices]:
        """Yield trials in which all pipelines cross to another set of places (`part_H`) after the same stages.

        In some trials, the tied embedding is reduced between two sets. In the other trials, the first and the last
        stage lie in one set. A set holds at most `longest` consecutive stages of each pipeline.
        """
        hop_s = ring_bounds.cheapest_between(self._hops[0], part_H)
        back = ring_bounds.returning_splits(self._pp, longest, most=_SPLITS)
        trials = self._with_hops(self._mean, ring_bounds.pipeline_splits(self._pp, longest, most=_SPLITS), hop_s)
        if self._model.work.traffic.embedding_bytes and back is not None:
            between_s = ring_bounds.cheapest_between(self._ties_s_HH, part_H)
            trials.embedding_s_K[:] = np.maximum(trials.embedding_s_K, between_s)
            if back:
                yield self._with_hops(self._mean, back, hop_s)
        yield trials

    def _of_pipelines(self) -> Iterator[BoundArgument]:
        """Yield arguments: pipelines that are too long for one place must use links between places."""
        if self._all_hops_cross:
            yield BoundArgument(
                "the messages of a pipeline use different links, and not all these links are the best", self._mean
            )
        if 1 < self._per_place < self._pp:
            hop_s = float(self._hops[0].min())
            splits = ring_bounds.pipeline_splits(self._pp, self._per_place, most=_SPLITS)
            trials = self._with_hops(self._one, splits, hop_s)
            yield BoundArgument(f"pipelines of {self._pp} stages leave their hosts", trials)

    def _add_ring(self, trials: Prices, ring: ring_bounds.Ring, slowest_s: float, *, has_best: bool) -> None:
        """In trial k, raise the price of the rings of pipeline rank k to the price of a slow link, `slowest_s`.

        `has_best` is true if the trials already contain the price of the ring on its best link.
        """
        more = ring.more_s_S(slowest_s)
        done = ring.more_s_S(ring.tour.thresholds_s[0]) if has_best else tuple(np.zeros_like(each) for each in more)
        stages = np.arange(len(more[0]))
        for target_SK, more_S, done_S in zip((trials.reduce_s_SK, trials.gather_s_SK), more, done, strict=True):
            target_SK[stages, stages % self._pp] += np.maximum(more_S - done_S, 0.0)

    def _exchange(self, trials: Prices, name: str, tour: ring_bounds.Tour, slowest_s: float, *, own_rank: bool) -> None:
        """Raise prices of the groups `name` to those of a slow link, on which the largest collective takes `slowest_s`.

        With `own_rank`, trial k changes only the groups of pipeline rank k; otherwise every trial changes all groups.
        """
        for index, item in enumerate(self._model.work.exchanges):
            if item.group == name:
                seconds = tour.seconds(item.kind, item.size_bytes, slowest_s)
                target_PK = trials.exchange_s_PD[index]
                if own_rank:
                    _at_own_rank(target_PK, seconds)
                else:
                    np.maximum(target_PK, seconds, out=target_PK)

    def _with_hops(self, trial: Prices, hops: Sequence[tuple[int, ...]], seconds: float) -> Prices:
        """Return one trial for each set of messages between stages: in the trial, these take at least `seconds`."""
        trials = [copies(trial, 1) for _ in hops]
        for one, chosen in zip(trials, hops, strict=True):
            _raise(one, hops=chosen, seconds=seconds)
        return side_by_side(trials)

    def _link_words(self, cost_HH: Floats, seconds: float) -> str:
        sender, receiver = divmod(int(np.abs(cost_HH - seconds).argmin()), len(self.places))
        rate = float(self.places.links.bandwidth_bytes_per_s[sender, receiver])
        return f"{self.places.names[sender]} to {self.places.names[receiver]}, {rate_text(rate)}"


def _at_own_rank(target_PK: Floats, seconds: float) -> None:
    """In trial k (column k of the array), raise the price of pipeline rank k to at least `seconds`."""
    diagonal = np.einsum("kk->k", target_PK)
    np.maximum(diagonal, seconds, out=diagonal)


def _raise(trials: Prices, *, hops: range | tuple[int, ...], seconds: float) -> None:
    for hop in hops:
        for target_PK in (trials.forward_hop_s_PD, trials.backward_hop_s_PD):
            np.maximum(target_PK[hop], seconds, out=target_PK[hop])


_EQUAL = 1e-9


def placement_bound_s(model: PlacementCost) -> tuple[float, str]:
    """Return a lower bound of a layout's step over all placements, and its reason as a sentence without a full stop."""
    # The first trial has the best link and the fastest slot everywhere. Each argument raises some prices of this trial.
    slowness_P1 = np.full((model.work.layout.pp, 1), model.slowness_W.min())
    best, places = best_prices(model.work, model.fabric, slowness_P1), ring_bounds.Places.of(model)
    best = replace(best, backward_hop_s_PD=best.backward_hop_s_PD.copy())
    cases: list[list[BoundArgument]] = []
    for block in blocks(model.work.layout, places.devices):
        arguments = BoundArguments(places=places, best=best, unit=block.unit)
        cases.append(list(arguments.all()))
        if len(places) > 1:
            cases[-1] += [arguments.crossing(names) for names in block.breaks]
    every = [argument for case in cases for argument in case]
    seconds_K = steps_s_K(model.work, side_by_side([argument.trials for argument in every]))
    firsts = np.cumsum([0, *(len(argument.trials.embedding_s_K) for argument in every[:-1])])
    least = iter(np.minimum.reduceat(seconds_K, firsts).tolist())
    found = []
    for case in cases:
        bounds = [(next(least), argument.words) for argument in case]
        most_s = max(seconds for seconds, _ in bounds)
        # The plan's reason for the bound is the first argument that gives the largest bound.
        found.append((most_s, next(words for seconds, words in bounds if seconds >= most_s * (1 - _EQUAL))))
    least_s, words = min(found, key=lambda pair: pair[0])
    return least_s * (1 - ring_bounds.ROUNDING) * model.factor, words


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCase:
    """A case of the proof: each block of `unit` ranks lies on one place, and some larger groups do not."""

    unit: int
    breaks: tuple[tuple[str, ...], ...]
    """Condition: for each of these sets of group kinds, some group of a kind in the set spans several places."""


def blocks(layout: Layout, devices: int) -> list[BlockCase]:
    """Return cases of the proof, which together cover every placement on places of `devices` devices.

    The first case has single ranks as blocks. The next cases have whole tensor-parallel groups, context-parallel groups
    and expert groups as blocks, as long as whole groups can fill a place. In a case with `breaks`, some group of the
    next kind spans several places.
    """
    kinds: list[tuple[int, tuple[str, ...]]] = []
    cell = layout.tp * layout.cp
    if layout.tp > 1:
        kinds.append((layout.tp, ("tp",)))
    if layout.cp > 1:
        kinds.append((cell, ("cp",)))
    experts, shared = layout.ep * layout.etp, ("ep", "etp", "ep_etp")
    nested = not layout.use_tp_pp_dp_mapping and (experts % cell == 0 or cell % experts == 0)
    if experts > 1 and nested and layout.ep > 1:
        kinds.append((max(experts, cell), shared))
    found = []
    unit = 1
    for size, names in kinds:
        # The ranks that share experts consist of whole groups of the other kinds. If one of these groups spans several
        # places, the ranks that share experts span several places too.
        breaks = (names, shared) if names != shared and kinds[-1][1] == shared and experts % size == 0 else (names,)
        found.append(BlockCase(unit=unit, breaks=breaks))
        if devices % math.lcm(unit, size):
            return found
        unit = math.lcm(unit, size)
    return [*found, BlockCase(unit=unit, breaks=())]
