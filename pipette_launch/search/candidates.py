"""The layouts that a search has priced, and what all layouts are judged by: job, machines, predictor, memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost.learned.corrected import NOTHING_LEARNED, CorrectedPredictor, Corrections
from pipette_launch.cost.memory.overhead import measured_overhead, num_communicators, num_group_kinds
from pipette_launch.cost.memory.peak import peak_memory_bytes
from pipette_launch.facts import Cluster, Job, Layout, Measurements
from pipette_launch.facts.co_location import RankBlock, Rooms, blocks_of
from pipette_launch.facts.layout import LayoutColumns, codes_of
from pipette_launch.facts.measurements import MemoryNeed
from pipette_launch.megatron.performance import performance_options
from pipette_launch.search.placement.search import ROUNDS
from pipette_launch.search.placement.slots import Placed, host_order

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
    def rooms(self) -> Rooms:
        """Its hosts and their NVLink domains."""
        return Rooms.of(self.cluster)

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
