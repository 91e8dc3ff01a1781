"""Compute times of an earlier warm-up of the same machines and the same model, for cases that were not measured now."""

from __future__ import annotations

import statistics
from dataclasses import replace

from pipette_launch.facts.measurements import LAYERS, ComputeCase, Measurements

CHANGED = 0.25
"""If a case that was measured both times changed by more than this part, no earlier time is used."""


def with_cached_times(measurements: Measurements, earlier: Measurements | None) -> Measurements:
    """Add the earlier times of cases that were not measured now, marked as cached and brought to today's pace.

    Today's pace is the median ratio of the layers of the cases that were measured both times; without any, or where
    the pace has changed much, nothing is added.
    """
    if earlier is None or not measurements.model_digest or earlier.model_digest != measurements.model_digest:
        return measurements
    now, then = _forward_s(measurements), _forward_s(earlier)
    ratios = [now[case] / then[case] for case in now if then.get(case)]
    pace = statistics.median(ratios) if ratios else 0.0
    if abs(pace - 1) > CHANGED:
        return measurements
    done = {*measurements.compute_cases(), *measurements.refused}
    added = [
        replace(time.times(pace), source="cached")
        for time in earlier.compute
        if time.case not in done and time.source != "modelled"
    ]
    if not added:
        return measurements
    cases = {time.case for time in added}
    note = (
        f"compute: times of {len(cases)} more cases are those of the warm-up at {earlier.taken_at}, times {pace:.2f}, "
        f"which is what a case measured both times takes now"
    )
    return replace(
        measurements,
        compute=(*measurements.compute, *added),
        unmeasured=tuple(case for case in measurements.unmeasured if case not in cases),
        notes=(*measurements.notes, note),
    )


def _forward_s(measurements: Measurements) -> dict[ComputeCase, float]:
    """Seconds of a layer's forward in each case that was really measured, the median of its slots."""
    times: dict[ComputeCase, list[float]] = {}
    for time in measurements.compute:
        if time.part in LAYERS and time.source == "measured":
            times.setdefault(time.case, []).append(time.forward.median_s)
    return {case: statistics.median(seconds) for case, seconds in times.items()}
