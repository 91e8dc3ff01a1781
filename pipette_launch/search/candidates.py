"""The layouts that a search prices, and the data that all prices need: job, machines, predictor and memory limit."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost.learned import NOTHING_LEARNED, CorrectedPredictor, Corrections
from pipette_launch.cost.memory.overhead import measured_overhead, num_communicators, num_group_kinds
from pipette_launch.facts import Cluster, Job, Layout, Measurements, files
from pipette_launch.facts.co_location import Domains, RankBlock, blocks_of
from pipette_launch.facts.layout import LayoutColumns, grouped
from pipette_launch.facts.measurements import MemoryNeed
from pipette_launch.search.placement import ROUNDS, begin, improve
from pipette_launch.search.slots import IsLate, Placed, PlacementProblem, host_order
from pipette_launch.search.worst_hosts import worst_hosts_bound_s

OVER_MEMORY = "predicted peak memory is over the limit"
NOT_MEASURED = "no compute time was measured for its tp, cp and micro-batch"
MANY_SLOTS = 128
"""Above this number of slots, a round that improves one placement takes long."""
WORTH = 1e-3
"""A placement is improved only while the lower bound of its layout allows to save this share of the step."""
GAIN = 1e-4
"""A round that saves less than this share of the step counts as a round without gain."""


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Promising:
    """A layout that fits in memory and was not priced yet."""

    least_s: float
    """Lower bound of the step over all placements; infinite if not computed."""
    number: int
    """Position in the order in which layouts were found. At equal bounds, the earlier layout is priced first."""
    layout: Layout
    peak_bytes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A layout that fits in memory and was priced."""

    layout: Layout
    peak_bytes: tuple[int, ...]
    bound_s: float
    host_order_s: float
    """Step time in seconds, with the ranks in torchrun's order."""
    placed: Placed
    rounds: int = 0
    """Number of rounds that tried to improve the placement."""
    is_stalled: bool = False
    """True if the last round found no better placement. Stays false after the first round (`with_better_placement`)."""

    @property
    def promise_s(self) -> float:
        """Expected step time after more search: halfway between the best placement so far and the bound.

        The bound alone is far too low for a layout that needs more fast links than the hosts have.
        """
        return (self.placed.cost_s + self.bound_s) / 2

    @property
    def meets_bound(self) -> bool:
        """True if no other placement can save a noticeable share of the step."""
        return self.placed.cost_s <= self.bound_s * (1 + WORTH)

    @property
    def can_improve(self) -> bool:
        """True if another round may find a better placement."""
        return self.rounds < ROUNDS and not self.is_stalled and not self.meets_bound


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchInputs:
    """Inputs of the search that are the same for every layout."""

    job: Job
    measurements: Measurements
    predictor: CorrectedPredictor
    memory_margin: float
    """Share of device memory that every layout must leave free."""
    own_fault: str | None

    @classmethod
    def of(
        cls, job: Job, measurements: Measurements, *, memory_margin: float, corrections: Corrections = NOTHING_LEARNED
    ) -> SearchInputs:
        """Take a job, measurements and learned corrections, and assume that the user's own layout is legal."""
        return cls(
            job=job,
            measurements=measurements,
            predictor=CorrectedPredictor(job, measurements, corrections),
            memory_margin=memory_margin,
            own_fault=None,
        )

    @property
    def cluster(self) -> Cluster:
        """Hosts, slots and links of the allocation."""
        return self.measurements.cluster

    @property
    def domains(self) -> Domains:
        """Hosts and NVLink domains of the allocation."""
        return Domains.of(self.cluster)

    def blocks(self, layout: Layout) -> tuple[RankBlock, ...]:
        """Return blocks of ranks that must share a host or an NVLink domain; LayoutError if a block is too large."""
        if self.cluster.device_kind != "cuda":
            return ()
        return blocks_of(self.job.model, self.job.options, layout, self.domains)

    def limit_bytes(self, layout: Layout) -> int:
        """Return the bytes that a rank's tensors may need: free memory, less margin and overhead."""
        overhead = measured_overhead(self.job, layout, self.measurements)
        return overhead.limit_bytes(self.cluster.memory_bytes, memory_margin=self.memory_margin)

    def memory_need(self, layout: Layout, peaks_bytes: tuple[int, ...]) -> MemoryNeed:
        """Return the total bytes that devices need at these tensor peaks, and the bytes that devices offer."""
        overhead = measured_overhead(self.job, layout, self.measurements)
        return overhead.need(peaks_bytes, self.cluster.memory_bytes, memory_margin=self.memory_margin)

    @property
    def own_split(self) -> str | None:
        """Reason that the user's own layout cannot run in torchrun's rank order, which splits a block; else None."""
        if self.own_fault is not None or self.job.own_refusal:
            return None
        split = self.domains.split(self.blocks(self.job.own), host_order(self.cluster.num_slots))
        if split is None:
            return None
        return f"in torchrun's order it splits {split.words}, and {split.asked_by} needs each inside {split.inside}"

    @property
    def own_cannot_run(self) -> str:
        """Reason that the user's own configuration cannot run here; empty if it can run."""
        return self.job.own_refusal or self.own_fault or self.own_split or ""

    @property
    def own_dropped(self) -> str | None:
        """Reason that the user's own legal layout cannot be chosen; None if it can be chosen."""
        if not self.predictor.can_price(self.job.own):
            return NOT_MEASURED
        return None if max(self.predictor.peaks(self.job.own)) <= self.limit_bytes(self.job.own) else OVER_MEMORY

    def bound_s(self, layout: Layout) -> float:
        """Return a lower bound of the step time of a layout over all placements."""
        return max(self.predictor.bound_s(layout), worst_hosts_bound_s(self.predictor.placement_cost(layout)))

    def price(self, one: Promising, *, beat_s: float = float("inf")) -> Candidate | None:
        """Price a layout in torchrun's order and at its best start placement.

        Returns None if the bound of the layout's step is not below the step time `beat_s`.
        """
        layout = one.layout
        bound_s = max(self.bound_s(layout), one.least_s if math.isfinite(one.least_s) else 0.0)
        if bound_s >= beat_s:
            return None
        best, host_order_s = begin(self.placement_problem(layout, bound_s))
        return Candidate(
            layout=layout, peak_bytes=one.peak_bytes, bound_s=bound_s, host_order_s=host_order_s, placed=best
        )

    def with_better_placement(self, one: Candidate, *, seed: int, is_late: IsLate) -> Candidate:
        """Search one round for a better placement; the result depends on the candidate and the seed alone."""
        problem, rng = self.placement_problem(one.layout, one.bound_s), _chance(one, seed)
        placed = improve(problem, one.placed, turn=one.rounds, rng=rng, is_late=is_late)
        # Round 0 begins at the best start, perhaps a local minimum. On few hosts, later rounds begin elsewhere.
        is_stalled = one.rounds > 0 and placed.cost_s >= one.placed.cost_s * (1 - GAIN)
        return replace(one, placed=placed, rounds=one.rounds + 1, is_stalled=is_stalled)

    def placement_problem(self, layout: Layout, bound_s: float) -> PlacementProblem:
        """Return the problem of finding a layout's placement with the least step time."""
        objective = self.predictor.placement_cost(layout)
        return PlacementProblem(
            layout=layout, cluster=self.cluster, objective=objective, bound_s=bound_s, blocks=self.blocks(layout)
        )


def limits_N(job: Job, columns: LayoutColumns, limit: Callable[[Layout], int]) -> NDArray[np.int64]:
    """Return the memory limit of each layout, which depends only on the numbers of communicators and of group kinds."""
    if len(columns) == 1:
        return np.array([limit(columns.layout(0))])
    first_U, group_N = grouped(num_communicators(job, columns), num_group_kinds(columns))
    limits = [limit(columns.layout(row)) for row in first_U.tolist()]
    return np.array(limits, dtype=np.int64)[group_N]


def doublings_apart(one: Layout, other: Layout) -> float:
    """Return the distance of two layouts: doublings between degrees, plus 1 for each other field that differs."""
    apart = 0.0
    for field in fields(Layout):
        mine, its = getattr(one, field.name), getattr(other, field.name)
        if type(mine) is int and mine and its:
            apart += abs(math.log2(mine) - math.log2(its))
        else:
            apart += mine != its
    return apart


def _chance(one: Candidate, seed: int) -> random.Random:
    return random.Random(files.digest(seed, one.layout, one.rounds))
