"""The layouts that a search has priced, and what all layouts are judged by: job, machines, predictor, memory."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost.learned import NOTHING_LEARNED, CorrectedPredictor, Corrections
from pipette_launch.cost.memory.overhead import measured_overhead, num_communicators, num_group_kinds
from pipette_launch.cost.memory.peak import peak_memory_bytes
from pipette_launch.facts import Cluster, Job, Layout, Measurements, files
from pipette_launch.facts.co_location import Domains, RankBlock, blocks_of
from pipette_launch.facts.layout import LayoutColumns, codes_of
from pipette_launch.facts.measurements import MemoryNeed
from pipette_launch.megatron.performance import performance_options
from pipette_launch.search.placement import ROUNDS, begin, exchange_devices, improve, settled
from pipette_launch.search.slots import IsLate, Placed, Placement, PlacementProblem, host_order

OVER_MEMORY = "predicted peak memory is over the limit"
NOT_MEASURED = "no compute time was measured for its tp, cp and micro-batch"
MANY_SLOTS = 128
"""On more, a round of improving a placement takes long."""
WORTH = 1e-3
"""A placement is improved while that could still save this part of the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A layout that fits and was priced."""

    layout: Layout
    peak_bytes: tuple[int, ...]
    """Of each pipeline rank."""
    bound_s: float
    host_order_s: float
    """Step time in torchrun's own order."""
    placed: Placed
    bound_reason: str = ""
    """Why no placement beats the bound; empty where the bound only takes the best link everywhere."""
    rounds: int = 0
    """How often its placement was improved."""
    is_stalled: bool = False
    """The last round, not the first, found nothing better."""

    @property
    def promise_s(self) -> float:
        """An estimate of the step time after more search: halfway from the best placement so far to the bound.

        The bound alone is too low for layouts that need links which only some hosts have.
        """
        return (self.placed.cost_s + self.floor_s) / 2

    @property
    def meets_bound(self) -> bool:
        """Whether no other placement could save a noticeable part of the step."""
        return self.placed.is_optimal or self.placed.cost_s <= self.bound_s * (1 + WORTH)

    @property
    def can_improve(self) -> bool:
        """Whether its placement should be improved further: not once a round has found nothing better."""
        return self.rounds < ROUNDS and not self.is_stalled and not self.meets_bound

    @property
    def floor_s(self) -> float:
        """No placement of this layout is faster."""
        return self.placed.cost_s if self.placed.is_optimal else self.bound_s


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchInputs:
    """What every layout is judged by: the job, the machines, the predictor and the memory that must stay free."""

    job: Job
    measurements: Measurements
    predictor: CorrectedPredictor
    memory_margin: float
    """Part of the device's memory that stays free."""
    own_fault: str | None
    """The constraint that the user's own layout breaks."""

    @classmethod
    def of(
        cls,
        job: Job,
        measurements: Measurements,
        *,
        memory_margin: float,
        corrections: Corrections = NOTHING_LEARNED,
    ) -> SearchInputs:
        """Take a job and what was measured; the user's own layout is assumed to be legal.

        Args:
            job: what is trained.
            measurements: the machines.
            memory_margin: part of the device's memory that stays free.
            corrections: learned from earlier outcomes.

        """
        return cls(
            job=job,
            measurements=measurements,
            predictor=CorrectedPredictor(job, measurements, corrections),
            memory_margin=memory_margin,
            own_fault=None,
        )

    @property
    def cluster(self) -> Cluster:
        """The allocation."""
        return self.measurements.cluster

    @property
    def rooms(self) -> Domains:
        """Its hosts and their NVLink domains."""
        return Domains.of(self.cluster)

    def blocks(self, layout: Layout) -> tuple[RankBlock, ...]:
        """Which ranks the job's flags demand together; raises LayoutError where the hosts cannot hold them so."""
        if self.cluster.device_kind != "cuda":
            return ()
        return blocks_of(self.job.model, performance_options(self.job), layout, self.rooms)

    def limit_bytes(self, layout: Layout) -> int:
        """Bytes that the model's tensors may need at their peak on a rank of this layout."""
        return memory_limit_bytes(self.job, layout, self.measurements, memory_margin=self.memory_margin)

    def memory_need(self, layout: Layout, peaks_bytes: tuple[int, ...]) -> MemoryNeed:
        """Bytes that devices hold in all when the model's tensors are at these peaks, and bytes that they may hold."""
        overhead = measured_overhead(self.job, layout, self.measurements)
        return overhead.need(peaks_bytes, self.cluster.memory_bytes, memory_margin=self.memory_margin)

    def device_peaks(self, layout: Layout) -> tuple[int, ...]:
        """Bytes that the driver should show in use on each pipeline rank: with all overhead, without corrections."""
        overhead = measured_overhead(self.job, layout, self.measurements)
        return tuple(overhead.device_peak_bytes(parts.total) for parts in peak_memory_bytes(self.job, layout))

    @property
    def own_split(self) -> str | None:
        """What the user's own layout, though legal, does not keep together in torchrun's order."""
        if self.own_fault is not None or self.job.own_refusal:
            return None
        split = self.rooms.split(self.blocks(self.job.own), host_order(self.cluster.num_slots))
        if split is None:
            return None
        return f"in torchrun's order it splits {split.words}, and {split.asked_by} needs each inside {split.inside}"

    @property
    def own_cannot_run(self) -> str:
        """Reason for which the user's own configuration cannot run here; empty if it can."""
        return self.job.own_refusal or self.own_fault or self.own_split or ""

    @property
    def can_price_own(self) -> bool:
        """Whether the user's own configuration has a step time of its own, and not only an estimate."""
        return self.own_fault is None and self.predictor.can_price(self.job.own)

    @property
    def own_dropped(self) -> str | None:
        """Why the user's own layout, though legal, is not among those to choose from."""
        if not self.predictor.can_price(self.job.own):
            return NOT_MEASURED
        return None if max(self.predictor.peaks(self.job.own)) <= self.limit_bytes(self.job.own) else OVER_MEMORY


def memory_limit_bytes(job: Job, layout: Layout, measurements: Measurements, *, memory_margin: float) -> int:
    """Bytes that a rank's tensors may need: what is free on the fullest device, less margin and overhead.

    Args:
        job: what is trained.
        layout: its degrees decide how many communicators a rank holds.
        measurements: free memory, and overhead where it was measured.
        memory_margin: part of the device's memory that stays free.

    """
    overhead = measured_overhead(job, layout, measurements)
    return overhead.limit_bytes(measurements.cluster.memory_bytes, memory_margin=memory_margin)


def limits_N(job: Job, columns: LayoutColumns, limit: Callable[[Layout], int]) -> NDArray[np.int64]:
    """Return the memory limit of each of many layouts; it depends on their communicators only."""
    if len(columns) == 1:
        return np.array([limit(columns.layout(0))])
    codes = codes_of([num_communicators(job, columns), num_group_kinds(columns)])
    _, first_U, group_N = np.unique(codes, return_index=True, return_inverse=True)
    limits = [limit(columns.layout(row)) for row in first_U.tolist()]
    return np.array(limits, dtype=np.int64)[group_N]


def doublings_apart(one: Layout, other: Layout) -> float:
    """The distance of two layouts: the doublings between their degrees, plus one for each other field that differs."""
    apart = 0.0
    for field in fields(Layout):
        mine, its = getattr(one, field.name), getattr(other, field.name)
        if type(mine) is int and mine and its:
            apart += abs(math.log2(mine) - math.log2(its))
        else:
            apart += mine != its
    return apart


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Promising:
    """A layout that fits, with what it needs and how fast it could be at best."""

    least_s: float
    """No placement is faster, by the bounds of columns; infinite where these were not asked."""
    number: int
    """The order in which layouts were met: it settles ties."""
    layout: Layout
    peak_bytes: tuple[int, ...]


GAIN = 1e-4
"""A round that saves less than this part of the step counts as one without gain."""


def price(
    inputs: SearchInputs,
    one: Promising,
    *,
    is_late: IsLate,
    beat_s: float = float("inf"),
    carried: Placement | None = None,
) -> Candidate | Promising:
    """Bound a layout, and price it in torchrun's order and in the best start; one that cannot win gets only its bound.

    Args:
        inputs: what layouts are judged by.
        one: the layout.
        is_late: whether to try no more starts.
        beat_s: seconds; a layout that takes as long is not priced.
        carried: the placement of another layout, priced instead of the starts.

    """
    layout = one.layout
    bound_s = inputs.predictor.bound_s(layout)
    if math.isfinite(one.least_s):
        bound_s = max(bound_s, one.least_s)
    beaten = replace(one, least_s=bound_s)
    if bound_s >= beat_s:
        return beaten
    problem = placement_problem(inputs, layout, bound_s)
    if carried:
        best = settled(problem, carried)
        if best.cost_s >= beat_s:
            return beaten
        host_order_s = problem.best_of([host_order(layout.world_size)]).cost_s
    else:
        best, host_order_s = begin(problem, is_late=is_late)
    return Candidate(layout=layout, peak_bytes=one.peak_bytes, bound_s=bound_s, host_order_s=host_order_s, placed=best)


def with_better_placement(inputs: SearchInputs, one: Candidate, *, seed: int, is_late: IsLate) -> Candidate:
    """Search one round for a better placement; what is found depends on the candidate and the seed alone.

    Args:
        inputs: what layouts are judged by.
        one: a layout and its best placement so far.
        seed: of all chance.
        is_late: whether to end the round early.

    """
    problem, rng = placement_problem(inputs, one.layout, one.bound_s), _chance(one, seed)
    placed = improve(problem, one.placed, turn=one.rounds, rng=rng, is_late=is_late)
    # The first round goes on from the best start, which may be a minimum; up to 64 hosts the next begins elsewhere.
    is_stalled = one.rounds > 0 and placed.cost_s >= one.placed.cost_s * (1 - GAIN)
    return replace(one, placed=placed, rounds=one.rounds + 1, is_stalled=is_stalled)


def with_devices_exchanged(inputs: SearchInputs, one: Candidate, *, seed: int, is_late: IsLate) -> Candidate:
    """Let single ranks change hosts from the best placement on; arguments as in `with_better_placement`."""
    problem, rng = placement_problem(inputs, one.layout, one.bound_s), _chance(one, seed)
    return replace(one, placed=exchange_devices(problem, one.placed, rng=rng, is_late=is_late))


def placement_problem(inputs: SearchInputs, layout: Layout, bound_s: float) -> PlacementProblem:
    """A layout to be placed on the slots of the allocation, by its step time."""
    objective = inputs.predictor.placement_cost(layout)
    return PlacementProblem(
        layout=layout, cluster=inputs.cluster, objective=objective, bound_s=bound_s, blocks=inputs.blocks(layout)
    )


def _chance(one: Candidate, seed: int) -> random.Random:
    return random.Random(files.digest(seed, one.layout, one.rounds))
