"""By how much the difference of two predicted steps may be chance: compute times rest on few looks. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pipette_launch.cost.compute import ComputeTable, case_of
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.measurements import ComputeCase, ComputeTime, Measurements

ERRORS_APART = 2.0
"""What lies so many standard errors of its difference apart counts as different."""
MODELLED_ERROR = 0.1
"""Of a layer's time that was carried over from another case: on fenced CPU cores layers of equal tp were off by -24 to
+14 %, 12 % in the root of the mean square, over half to eight times the tokens."""
COMPUTED = ("compute", "recompute", "bubble")
"""Parts of a step that grow with the compute times."""


def chance_s(
    table: ComputeTable,
    measurements: Measurements,
    one: tuple[Layout, Mapping[str, float]],
    other: tuple[Layout, Mapping[str, float]],
) -> float:
    """Return the seconds by which two steps may differ by chance; 0 where both rest on the same compute times.

    Where both were carried over by the device model, as for a data sheet, its error is common to them.

    Args:
        table: of these measurements.
        measurements: with the modelled times that fill them.
        one: a layout and the parts of its step (`StepTime.breakdown_s`).
        other: the other.

    """
    cases = [case_of(layout) for layout, _ in (one, other)]
    sources = [table.source(case) for case in cases]
    if sources[0] == sources[1]:
        return 0.0
    layers = [_layers(measurements, source) for source in sources]
    carried = [
        source != case or any(time.source == "modelled" for time in times)
        for case, source, times in zip(cases, sources, layers, strict=True)
    ]
    errors_s = [
        math.hypot(_looks_error(times), MODELLED_ERROR if is_carried and not all(carried) else 0.0)
        * sum(parts_s.get(name, 0.0) for name in COMPUTED)
        for times, is_carried, (_, parts_s) in zip(layers, carried, (one, other), strict=True)
    ]
    return ERRORS_APART * math.hypot(*errors_s)


def _layers(measurements: Measurements, case: ComputeCase | None) -> list[ComputeTime]:
    """What each slot has of a case's layers."""
    return [time for time in measurements.compute if time.case == case and time.part in ("layer", "moe_layer")]


def _looks_error(times: Sequence[ComputeTime]) -> float:
    """Standard error of the mean of several slots' layers, as part of it."""
    return math.hypot(*map(_scatter, times)) / len(times) if times else 0.0


def _scatter(time: ComputeTime) -> float:
    """Standard error of all passes of a layer on one slot, as part of them."""
    passes = (time.forward, time.input_grad, time.weight_grad)
    whole_s = sum(one.median_s for one in passes)
    return math.hypot(*(one.median_error_s for one in passes)) / whole_s if whole_s else 0.0
