"""How far predicted steps may be off: few samples were taken, and what was not measured was carried over."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost.communication.exchanges import collective_dimensions
from pipette_launch.cost.compute.device_model import case_of
from pipette_launch.cost.compute.stages import ComputeTable
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.measurements import LAYERS, ComputeCase, ComputeTime, Measurements

ERRORS_APART = 2.0
"""Two steps count as different if they differ by at least so many standard errors of their difference."""
MODELLED_ERROR = 0.1
"""Of a layer's time that was carried over from another case: on fenced CPU cores layers of equal tp were off by -24 to
+14 %, 12 % in the root of the mean square, over half to eight times the tokens."""
CARRIED_ERROR = 0.2
"""Of a collective's time that was carried over from another kind or number of members: in 18 warm-ups on four hosts
over gloo each group was left out and predicted from those of other shapes. That was off, in the root of the mean
square, by 14 % from 1 MB on, and by 23 % with messages of 100 KB among them."""
SHAPE_ERROR = 0.06
"""Of a step, by which the predictions of layouts of other degrees may be off against each other: on four CPU hosts over
gloo, six networks and three models, the ratio of such a step to that of the user's own was predicted 5 % wrong in the
median of 36, 10 % in the root of the mean square, and 6 % too small in the mean."""
COMPUTED = ("compute", "recompute", "bubble")
"""Parts of a step that grow with the compute times."""


class Uncertainty:
    """How far the compute times of a table may be trusted.

    Args:
        job: what is trained.
        table: of these measurements.
        measurements: with the modelled times that fill them.

    """

    def __init__(self, job: Job, table: ComputeTable, measurements: Measurements) -> None:
        self._job = job
        self._table = table
        self._devices = measurements.cluster.devices_per_host
        self._collectives = {
            (one.kind, len(one.slots), self._lies_across(np.array([one.slots])))
            for one in measurements.collectives
            if one.kind != "send"
        }
        layers: dict[ComputeCase, list[ComputeTime]] = {}
        for time in measurements.compute:
            if time.part in LAYERS:
                layers.setdefault(time.case, []).append(time)
        # Of each case the standard error of the mean of several slots' layers, because few samples were taken, as part
        # of it; and whether a model of the device made it.
        self._errors = {
            case: (math.hypot(*map(_scatter, times)) / len(times), any(time.source == "modelled" for time in times))
            for case, times in layers.items()
        }
        self._has_measured = not all(is_modelled for _, is_modelled in self._errors.values())

    @property
    def differs(self) -> bool:
        """Whether some steps may rest on more that was measured than others."""
        return self._has_measured or bool(self._collectives)

    def carried_s(self, layout: Layout, placement: Sequence[int], parts_s: Mapping[str, float]) -> float:
        """Return by how many seconds a step may be off because times of other shapes stand for some of its own.

        That is one standard error; 0 where all was measured, and where nothing of the kind was: then no step rests on
        more than another.

        Args:
            layout: the layout.
            placement: the rank of each slot.
            parts_s: the parts of its step (`StepTime.breakdown_s`).

        """
        _, is_modelled = self._errors.get(case_of(layout), (0.0, True))
        computed_s = sum(parts_s.get(name, 0.0) for name in COMPUTED) if self._has_measured and is_modelled else 0.0
        parts = self._carried_parts(layout, placement) if self._collectives else set()
        return math.hypot(MODELLED_ERROR * computed_s, CARRIED_ERROR * sum(parts_s.get(name, 0.0) for name in parts))

    def _carried_parts(self, layout: Layout, placement: Sequence[int]) -> set[str]:
        """Parts of a step with a collective that was measured with no group of its shape."""
        slot_W = np.argsort(np.array(placement, dtype=np.int64))
        return {
            part
            for one in collective_dimensions(self._job, layout)
            for kind in one.kinds
            if (kind, one.ranks_GK.shape[1], self._lies_across(slot_W[one.ranks_GK])) not in self._collectives
            for part in one.parts
        }

    def _lies_across(self, slots_GK: NDArray[np.int64]) -> bool:
        """Whether a group lies on several hosts."""
        hosts_GK = slots_GK // self._devices
        return bool((hosts_GK != hosts_GK[:, :1]).any())

    def shape_error(self, one: Layout, other: Layout) -> float:
        """Return by which part of a step two predictions may be off against each other because their degrees differ.

        That is 0 where nothing was measured: a data sheet knows no other step better.
        """
        degrees = {(layout.tp, layout.pp, layout.cp, layout.ep, layout.vpp) for layout in (one, other)}
        return SHAPE_ERROR if self._has_measured and len(degrees) > 1 else 0.0

    def have_same_source(self, one: Layout, other: Layout) -> bool:
        """Whether the same compute times stand for both, so that their errors are the same."""
        return self._table.source(case_of(one)) == self._table.source(case_of(other))

    def chance_s(self, one: tuple[Layout, Mapping[str, float]], other: tuple[Layout, Mapping[str, float]]) -> float:
        """Return the seconds by which two steps may differ by chance; 0 where both rest on the same compute times.

        Where both were carried over by the device model, as for a data sheet, its error is common to them.

        Args:
            one: a layout and the parts of its step (`StepTime.breakdown_s`).
            other: the other.

        """
        if self.have_same_source(one[0], other[0]):
            return 0.0
        errors, are_modelled = [], []
        for layout, _ in (one, other):
            case = case_of(layout)
            source = self._table.source(case)
            error, is_modelled = self._errors.get(source, (0.0, False)) if source else (0.0, False)
            errors.append(error)
            # A case that takes its time from another is carried over, too.
            are_modelled.append(is_modelled or source != case)
        own_error = MODELLED_ERROR if not all(are_modelled) else 0.0
        errors_s = [
            math.hypot(error, own_error * is_modelled) * sum(parts_s.get(name, 0.0) for name in COMPUTED)
            for error, is_modelled, (_, parts_s) in zip(errors, are_modelled, (one, other), strict=True)
        ]
        return ERRORS_APART * math.hypot(*errors_s)


def _scatter(time: ComputeTime) -> float:
    """Standard error of all passes of a layer on one slot, as part of them."""
    passes = (time.forward, time.input_grad, time.weight_grad)
    whole_s = sum(one.median_s for one in passes)
    return math.hypot(*(one.median_error_s for one in passes)) / whole_s if whole_s else 0.0
