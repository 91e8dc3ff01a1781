"""Inputs of all rival latency models: the same measured compute times and links as our own.

Each of them takes the time of a layer with its tensor-parallel collectives as one measured number, so these are priced
here once, by our own model of them, on the slots that the placement gives.
"""

# U = units of the model: embedding, every layer, head. W = ranks = slots.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost.communication.collectives import Fabric
from pipette_launch.cost.communication.exchanges import Groups, exchanges
from pipette_launch.cost.compute.stages import ComputeTable
from pipette_launch.cost.layers.loads import Collective
from pipette_launch.errors import PlanError
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import NO_RECOMPUTE, Layout
from pipette_launch.facts.measurements import Measurements

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Units:
    """Seconds of one micro-batch on each unit, tensor-parallel collectives included, nothing run again."""

    forward_s_U: Array
    backward_s_U: Array

    def stages_s(self, layers: Sequence[int]) -> tuple[Array, Array]:
        """Add up forward and backward of stages with these numbers of layers; the ends add embedding and head."""
        starts = np.cumsum([0, *layers[:-1]])
        starts[1:] += 1  # the embedding is in front of the first layer
        return np.add.reduceat(self.forward_s_U, starts), np.add.reduceat(self.backward_s_U, starts)


def slot_of_rank(layout: Layout, measurements: Measurements, placement: Sequence[int] | None) -> NDArray[np.int64]:
    """Return the slot of each RANK; without a placement the slot with the rank's number, as torchrun does.

    Raises:
        PlanError: the layout does not fill the cluster, or the placement does not hold every RANK once.

    """
    size = layout.world_size
    if size != measurements.cluster.num_slots:
        raise PlanError(
            f"a layout of {size} ranks for the {measurements.cluster.num_slots} slots of this cluster; "
            f"change the layout or the cluster"
        )
    ranks = np.arange(size) if placement is None else np.array(placement, dtype=np.int64)
    if sorted(ranks.tolist()) != list(range(size)):
        raise PlanError(f"a placement holds every RANK from 0 to {size - 1} once, got {ranks.tolist()}")
    slots = np.empty(size, dtype=np.int64)
    slots[ranks] = np.arange(size)
    return slots


class UnitPrices:
    """Units of the layouts of one job on one allocation; each tp and micro-batch in torchrun's order is priced once."""

    def __init__(self, job: Job, measurements: Measurements) -> None:
        self._job = job
        self._measurements = measurements
        self._table = ComputeTable(job, measurements)
        self._fabric = Fabric(measurements.cluster, measurements.collectives)
        self._known: dict[tuple[int, int, bool], Units] = {}

    def in_torchrun_order(self, layout: Layout) -> Units:
        """Price the units of a layout; its other degrees make no difference, as TP is the innermost of them.

        Raises:
            PlanError: nothing with this tp was measured.

        """
        key = (layout.tp, layout.micro_batch_size, layout.sequence_parallel)
        if key not in self._known:
            self._known[key] = self.of(layout, slot_of_rank(layout, self._measurements, None))
        return self._known[key]

    def of(self, layout: Layout, slot_W: NDArray[np.int64]) -> Units:
        """Price every unit of the model for one micro-batch on given slots; tensor parallelism at its slowest group.

        What passes behind compute in our own model is no part of a timer's figure either.

        Raises:
            PlanError: nothing with this tp was measured.

        """
        model = self._job.model
        each = replace(
            layout,
            pp=model.num_layers + 2,
            vpp=1,
            layers_per_chunk=(0, *(1,) * model.num_layers, 0),
            recompute=NO_RECOMPUTE,
        )
        passes = self._table.chunk_passes(each)
        compute_2U = np.array([[unit.forward_s for unit in passes], [unit.backward_s for unit in passes]])
        idle_2U = np.array([[unit.forward_idle_s for unit in passes], [unit.backward_idle_s for unit in passes]])
        slots_GK = slot_W[Groups.of(layout).tp]
        exchanged_2U = np.zeros_like(compute_2U)
        priced: dict[tuple[Collective, float], float] = {}
        for item in exchanges(self._job, each, self._table.hiding(each), self._fabric.domain_slots):
            if item.group == "tp":
                key = (item.kind, item.size_bytes)
                if key not in priced:
                    priced[key] = float(self._fabric.seconds_G(item.kind, slots_GK, item.size_bytes).max())
                seconds = priced[key]
                exchanged_2U += np.array([item.forward, item.backward]) * max(seconds - item.hidden_s, 0.0)
        forward, backward = compute_2U + np.maximum(exchanged_2U - idle_2U, 0.0)
        return Units(forward_s_U=forward, backward_s_U=backward)
