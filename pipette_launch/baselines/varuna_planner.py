"""Varuna's search (Athlur et al., EuroSys 2022): each PP that divides the layers, with the largest micro-batch.

Re-derived from facts pipette.md section 9. No tensor parallelism; full recompute always; consecutive ranks are
consecutive stages, so pipelines are packed into hosts. Two things differ on Megatron: replicas must fill the machines,
so PP divides the GPUs too, and the micro-batch is the largest divisor of a replica's samples that Varuna lets in.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipette_launch.baselines.pick import Pick, Placement, PlannerOptions, Ranking, divisors, ranked, variant
from pipette_launch.baselines.varuna import Priority, VarunaPrices, largest_micro_batch
from pipette_launch.errors import PlanError
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Cell, Layout, Recompute
from pipette_launch.facts.measurements import Measurements

NOTE = "Varuna: pp and the largest micro-batch that its check lets in, with full recompute and without tp."
FULL = Recompute(granularity="full", method="uniform", num_layers=1)


def ranking_by(priority: Priority, *, every_size: bool = False) -> Ranking:
    """Make a ranking by Varuna's simulator.

    Args:
        priority: of passes: Varuna's own order (`varuna`), or Megatron's (`1f1b`), which is what runs in the end.
        every_size: try every micro-batch that fits, which is kinder than its code: the largest one leaves few
            micro-batches where the global batch is small.

    """

    def ranking(job: Job, measurements: Measurements, options: PlannerOptions) -> tuple[Pick, ...]:
        picks = _picks(job, measurements, options, priority, every_size=every_size)
        return ranked("Varuna", picks, nothing="without tp one sample fits on no number of stages")

    return ranking


def packed(layout: Layout) -> Placement:
    """Return the RANK of each slot where slots in a row are the stages of one pipeline."""
    return tuple(
        layout.rank_of(Cell(pp=slot % layout.pp, dp=slot // layout.pp, cp=0, tp=0)) for slot in range(layout.world_size)
    )


def _picks(
    job: Job, measurements: Measurements, options: PlannerOptions, priority: Priority, *, every_size: bool
) -> Iterator[Pick]:
    prices = VarunaPrices(job, measurements)
    for layout in _space(job, measurements, options, every_size=every_size):
        placement = packed(layout)
        seconds = prices.step_time_s(layout, placement, priority=priority)
        yield Pick(layout=layout, placement=placement, claimed_s=seconds, note=NOTE)


def _space(job: Job, measurements: Measurements, options: PlannerOptions, *, every_size: bool) -> Iterator[Layout]:
    layers, batch = job.model.num_layers, job.batch.global_batch_size
    world = measurements.cluster.num_slots
    for pp in divisors(layers):
        dp, rest = divmod(world, pp)
        # As many stages as cut-points are left out in its code too.
        if pp == layers > 1 or rest or batch % dp:
            continue
        one = variant(job, measurements, tp=1, pp=pp, dp=dp, micro_batch_size=1, recompute=FULL)
        if one is None:
            continue
        try:
            largest = largest_micro_batch(job, one, options.capacity_bytes)
        except PlanError:
            continue
        fitting = [size for size in divisors(batch // dp) if size <= largest]
        for size in fitting if every_size else fitting[-1:]:
            layout = variant(job, measurements, tp=1, pp=pp, dp=dp, micro_batch_size=size, recompute=FULL)
            if layout is not None:
                yield layout
