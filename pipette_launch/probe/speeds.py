"""How fast each slot computes relative to the others, and who is slow. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pipette_launch.facts import ComputeTime
from pipette_launch.probe.options import ProbeOptions

SAME_SPEED = {"cuda": 0.05, "cpu": 0.2}
"""Slots this close to the median count as equally fast: workers that share cores do not share them evenly."""


def slot_speeds(options: ProbeOptions, compute: Sequence[ComputeTime]) -> tuple[tuple[float, ...], tuple[str, ...]]:
    """Speed of each slot on the reference case's layers relative to the median slot, and notes on the slow ones.

    A difference below 5 % (20 % on CPU), or below three times the spread of the slot or of the median slot, counts as
    none: it is noise.
    """
    seconds: dict[int, float] = {}
    spreads: dict[int, float] = {}
    for time in compute:
        if time.case == options.cases[0] and time.part in ("layer", "moe_layer"):
            parts = (time.forward, time.input_grad, time.weight_grad)
            seconds[time.slot] = seconds.get(time.slot, 0.0) + sum(part.median_s for part in parts)
            spreads[time.slot] = max(spreads.get(time.slot, 0.0), time.forward.spread, time.input_grad.spread)
    if not seconds or min(seconds.values()) <= 0:
        return (1.0,) * options.num_slots, ("slot speeds are assumed equal: no slot measured the reference case",)
    median_s = statistics.median(seconds.values())
    usual_spread = statistics.median(spreads.values())
    speeds, notes = [], []
    for slot in range(options.num_slots):
        speed = median_s / seconds.get(slot, median_s)
        if abs(speed - 1) < max(SAME_SPEED[options.device_kind], 3 * max(spreads.get(slot, 0.0), usual_spread)):
            speed = 1.0
        elif speed < 1:
            notes.append(f"slot {options.slot_name(slot)} computes at {speed:.2f} of the median slot's speed")
        speeds.append(speed)
    return tuple(speeds), tuple(notes)
