"""The layouts that are worth a look: what each needs, how fast it could be, and its best placement so far."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, fields

from pipette_launch.cost.corrected import NOTHING_LEARNED, CorrectedPredictor, Corrections
from pipette_launch.cost.memory import peak_memory_bytes
from pipette_launch.cost.overhead import Overhead, num_communicators, overhead_of
from pipette_launch.facts import Cluster, Job, Layout, Measurements
from pipette_launch.search.enumerate import Enumeration
from pipette_launch.search.place import Placed, host_order, meets

OVER_MEMORY = "predicted peak memory is over the limit"
NOT_MEASURED = "no compute time was measured for its tp, cp and micro-batch"
WORTH = 1e-3
"""Placing goes on while it could still save this part of the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A layout that fits and can be priced."""

    layout: Layout
    bound_s: float
    host_order_s: float
    """Step time in torchrun's own order."""
    placed: Placed
    num_searches: int = 0
    """Steps that the search for its placement has gone: starts first, then annealings."""
    is_exhausted: bool = False
    """The search for its placement came to its end."""

    @property
    def promise_s(self) -> float:
        """What a search may hope for: the bound at first, halfway from there to the best placement once it was tried.

        Torchrun's order says little on unequal links: a ring through the slowest one may be the best once it is moved.
        """
        return self.bound_s if self.num_searches < 2 else (self.placed.cost_s + self.bound_s) / 2

    @property
    def meets_bound(self) -> bool:
        """Whether no other placement could save anything worth having."""
        return self.placed.is_optimal or self.placed.cost_s <= self.bound_s * (1 + WORTH)

    @property
    def can_improve(self) -> bool:
        """Whether the search for its placement should go on."""
        return not self.is_exhausted and not self.meets_bound


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """Everything that the search looks at: the job, the machines, and the layouts that fit and can be priced."""

    job: Job
    measurements: Measurements
    predictor: CorrectedPredictor
    memory_margin: float
    """Part of the device's memory that stays free."""
    own_fault: str | None
    """The constraint that the user's own layout breaks."""
    peak_bytes: dict[Layout, tuple[int, ...]]
    """The layouts to price, in the order of `rough_cost`, the user's own first, with each stage's peak."""
    num_layouts: int
    dropped: dict[str, int]

    @property
    def cluster(self) -> Cluster:
        """The allocation."""
        return self.measurements.cluster

    def limit_bytes(self, layout: Layout) -> int:
        """What the model's tensors may need at their peak on a rank of this layout."""
        return memory_limit_bytes(self.job, layout, self.measurements, memory_margin=self.memory_margin)

    def device_peaks(self, layout: Layout) -> tuple[int, ...]:
        """What the driver should show on each pipeline rank, all overhead included and nothing corrected."""
        overhead = measured_overhead(self.job, layout, self.measurements)
        return tuple(overhead.device_peak_bytes(parts.total) for parts in peak_memory_bytes(self.job, layout))

    @property
    def can_price_own(self) -> bool:
        """Whether the user's own configuration has a step time of its own, and not only an estimate."""
        return self.own_fault is None and self.predictor.can_price(self.job.own)

    @classmethod
    def of(
        cls,
        job: Job,
        measurements: Measurements,
        found: Enumeration,
        *,
        memory_margin: float,
        corrections: Corrections = NOTHING_LEARNED,
    ) -> Field:
        """Drop what does not fit or cannot be priced, with a count, and sort the rest by promise."""
        predictor = CorrectedPredictor(job, measurements, corrections)
        dropped = Counter(found.dropped)
        kept: dict[Layout, tuple[int, ...]] = {}
        limits: dict[int, int] = {}
        legal = found.layouts if found.own_fault is None else found.layouts[1:]
        for layout, peak_bytes in zip(legal, predictor.all_peaks(legal), strict=True):
            groups = num_communicators(layout)
            if groups not in limits:
                # Nothing else of a layout moves the limit.
                limits[groups] = memory_limit_bytes(job, layout, measurements, memory_margin=memory_margin)
            if max(peak_bytes) > limits[groups]:
                dropped[OVER_MEMORY] += 1
            elif not predictor.can_price(layout):
                dropped[NOT_MEASURED] += 1
            else:
                kept[layout] = peak_bytes
        devices = measurements.cluster.devices_per_host
        order = sorted(kept, key=lambda layout: (layout != job.own, rough_cost(job, layout, devices_per_host=devices)))
        return cls(
            job=job,
            measurements=measurements,
            predictor=predictor,
            memory_margin=memory_margin,
            own_fault=found.own_fault,
            peak_bytes={layout: kept[layout] for layout in order},
            num_layouts=len(found.layouts),
            dropped=dict(dropped.most_common()),
        )

    def in_host_order(self, layout: Layout, *, bound_s: float) -> Candidate:
        """Price a layout in torchrun's own order."""
        placement = host_order(layout.world_size)
        cost_s = self.predictor.objective(layout)(placement)
        return Candidate(
            layout=layout,
            bound_s=bound_s,
            host_order_s=cost_s,
            placed=Placed(placement=placement, cost_s=cost_s, is_optimal=meets(cost_s, bound_s)),
        )


def memory_limit_bytes(job: Job, layout: Layout, measurements: Measurements, *, memory_margin: float) -> int:
    """What a rank's tensors may need: of what is free on the fullest device, less margin and overhead."""
    overhead = measured_overhead(job, layout, measurements)
    return overhead.limit_bytes(measurements.cluster.memory_bytes, memory_margin=memory_margin)


def measured_overhead(job: Job, layout: Layout, measurements: Measurements) -> Overhead:
    """What a rank holds beside the model, as far as it was measured."""
    cluster = measurements.cluster
    return overhead_of(
        job,
        layout,
        device_kind=cluster.device_kind,
        device_name=cluster.hosts[0].devices[0].name,
        measured_bytes=measurements.overhead_bytes,
    )


def rough_cost(job: Job, layout: Layout, *, devices_per_host: int) -> float:
    """Order layouts before anything is priced; only the order matters, and only where the budget does not last for all.

    Bubble (pp-1)/(m*vpp), a third more compute for full recompute, some loss for each doubling of TP and CP, much once
    TP leaves the host.
    """
    microbatches = layout.num_microbatches(job.batch.global_batch_size)
    bubble = (layout.pp - 1) / (microbatches * layout.vpp)
    recompute = {"none": 1.0, "selective": 1.05, "full": 4 / 3}[layout.recompute.granularity]
    width = 1 + 0.1 * math.log2(layout.tp * layout.cp) + 0.02 * abs(math.log2(layout.micro_batch_size) - 1)
    return (1 + bubble) * recompute * width * (4.0 if layout.tp > devices_per_host else 1.0)


def doublings_apart(one: Layout, other: Layout) -> float:
    """How far two layouts lie from each other: doublings of each degree, and one for each other field that differs."""
    apart = 0.0
    for field in fields(Layout):
        mine, its = getattr(one, field.name), getattr(other, field.name)
        if type(mine) is int and mine and its:
            apart += abs(math.log2(mine) - math.log2(its))
        else:
            apart += mine != its
    return apart
