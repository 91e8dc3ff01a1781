"""How fast each slot computes beside the others, which are slow, and which have to be measured again. Pure."""

# S = slots, host by host; nan = not measured.

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipette_launch.facts import ComputeTime
from pipette_launch.facts.measurements import LAYERS
from pipette_launch.probe.health.suspects import SlowSlot, confirmed_slots
from pipette_launch.probe.options import Pace, ProbeOptions, WorkerResult

SAME_SPEED = {"cuda": 1.05, "cpu": 1.3}
"""Slots whose times differ by less count as equally fast: workers that share cores do not share them evenly."""
NUM_CONTROLS = 3
"""So many slots that do not differ are measured beside those that do, of each kind of device."""

Paces = Sequence[Sequence[Pace]]
"""The times of each slot, turn by turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Speeds:
    """The speeds of all slots."""

    speed_S: tuple[float, ...]
    """Relative to the median slot with its `straggle`."""
    straggle: float
    """The time of the slowest of the slots that count as equal, over their usual time: steps wait for it."""
    slow: tuple[SlowSlot, ...]
    """Slots that have a fault."""
    notes: tuple[str, ...]


def speeds(options: ProbeOptions, paces_S: Paces) -> Speeds:
    """Compare all slots; one differs from its peers (the slots of equal devices) if it does in every turn.

    The median of its turns is its difference.
    """
    first_S = _of_turn(paces_S, 0)
    names = device_names(options)
    same = SAME_SPEED[options.device_kind]
    median_s = _centre(first_S)
    if math.isnan(median_s):
        note = "slot speeds are assumed equal: no slot measured the reference case"
        return Speeds(speed_S=(1.0,) * options.num_slots, straggle=1.0, slow=(), notes=(note,))
    ratio_S = [_difference(ratios) for ratios in _ratios(options, paces_S)]
    usual_S = _usual_of_each(first_S, names)
    straggle = _straggle(options, first_S, ratio_S)
    speed_S, again_S = [], []
    for usual_s, ratio, paces in zip(usual_S, ratio_S, paces_S, strict=True):
        # A kind of device without any measurement counts as usual.
        kind = usual_s / median_s if abs(math.log(usual_s / median_s)) > math.log(same) else 1.0
        speed_S.append((1.0 if ratio == 1 else straggle) / (kind * ratio))
        again_S.append(usual_s * ratio if len(paces) > 1 else math.nan)
    return Speeds(
        speed_S=tuple(speed_S),
        straggle=straggle,
        slow=confirmed_slots(np.array(first_S), np.array(again_S), device_kind=options.device_kind, alike_S=names),
        notes=tuple(
            f"slot {options.slot_name(slot)} computes at {1 / ratio:.2f} of its peers' speed"
            for slot, ratio in enumerate(ratio_S)
            if ratio > 1
        ),
    )


def to_measure(options: ProbeOptions, paces_S: Paces) -> tuple[int, ...]:
    """Name the slots that have to work again: those that have differed so far, and some that have not.

    On each host only as many slots work as have a core each: then healthy slots are equally fast.
    """
    odd = [slot for slot, ratios in enumerate(_ratios(options, paces_S)) if _difference(ratios) != 1]
    names, first_S = device_names(options), _of_turn(paces_S, 0)
    usual_S = _usual_of_each(first_S, names)
    busy = Counter(slot // options.devices_per_host for slot in odd)

    def preference(slot: int) -> tuple[int, float]:
        # On hosts where few slots work so far, and with times as usual as possible.
        return busy[slot // options.devices_per_host], abs(math.log(first_S[slot] / usual_S[slot]))

    chosen = set(odd)
    for name in dict.fromkeys(names[slot] for slot in odd):
        for _ in range(NUM_CONTROLS):
            left = [
                slot
                for slot, seconds in enumerate(first_S)
                if names[slot] == name
                and slot not in chosen
                and not math.isnan(seconds)
                and busy[slot // options.devices_per_host] < _room(options, slot)
            ]
            if left:
                best = min(left, key=preference)
                busy[best // options.devices_per_host] += 1
                chosen.add(best)
    return tuple(sorted(chosen))


def factors(options: ProbeOptions, results: Sequence[WorkerResult], found: Speeds) -> tuple[float, ...]:
    """Return each slot's factor: its times, multiplied by that and by its speed, are those that steps wait for.

    How unevenly slots share cores is chance, and must not make the case that one slot measured slower than that of
    another: the time that other processes took is the same for all. Where a slot does differ, its reference case says
    how much of the difference its times contain.
    """
    wall = on_the_wall(results, found)
    layer_s_S = [_reference_s(options, result.compute) for result in results]
    usual_s = _centre(layer_s_S)
    return tuple(
        wall if speed == 1 or not seconds > 0 else wall * usual_s / seconds / speed
        for seconds, speed in zip(layer_s_S, found.speed_S, strict=True)
    )


def on_the_wall(results: Sequence[WorkerResult], found: Speeds) -> float:
    """Return wall time over computing time of a slot with the usual share of cores, stragglers included."""
    return statistics.median(result.stretch for result in results) * found.straggle


def device_names(options: ProbeOptions) -> tuple[str, ...]:
    """The device type of each slot: only slots of one type are peers."""
    return tuple(device.name for host in options.hosts for device in host.devices)


def _ratios(options: ProbeOptions, paces_S: Paces) -> list[list[float]]:
    """For each slot, turn by turn, its seconds over its peers'; 1 where they are the same but for noise.

    Peers are all slots of the same device at first, then those of them that were usual at first, if any is there.
    """
    names = device_names(options)
    same = SAME_SPEED[options.device_kind]
    usual_TS: list[list[float]] = []

    def ratios(slot: int) -> list[float]:
        found = [pace.seconds / usual_TS[pace.turn][slot] for pace in paces_S[slot] if pace.turn < len(usual_TS)]
        return [ratio if ratio > same or ratio < 1 / same else 1.0 for ratio in found]

    usual_TS.append(_usual_of_each(_of_turn(paces_S, 0), names))
    usual = {slot for slot, paces in enumerate(paces_S) if paces and ratios(slot)[0] == 1}
    for turn in range(1, max((pace.turn + 1 for paces in paces_S for pace in paces), default=0)):
        seconds_S = _of_turn(paces_S, turn)
        of_usual = [seconds if slot in usual else math.nan for slot, seconds in enumerate(seconds_S)]
        pairs = zip(_usual_of_each(of_usual, names), _usual_of_each(seconds_S, names), strict=True)
        usual_TS.append([of_all if math.isnan(of_them) else of_them for of_them, of_all in pairs])
    return [ratios(slot) for slot in range(len(paces_S))]


def _difference(ratios: Sequence[float]) -> float:
    """The median ratio, and 1 if they lie on both sides of it or there are none."""
    if not ratios or min(ratios) <= 1 <= max(ratios):
        return 1.0
    return _centre(ratios)


def _straggle(options: ProbeOptions, first_S: Sequence[float], ratio_S: Sequence[float]) -> float:
    """The slowest equal slot's seconds over its peers' usual ones, while all worked."""
    seconds_S = _of_hosts(options, first_S)
    usual_S = _usual_of_each(seconds_S, device_names(options))
    same = SAME_SPEED[options.device_kind]
    # A slot that was slow at first and like the others later does not count among those that are always equal.
    equal = (
        seconds / usual_s
        for seconds, ratio, usual_s in zip(seconds_S, ratio_S, usual_S, strict=True)
        if ratio == 1 and 0 < seconds <= same * usual_s
    )
    return max([1.0, *equal])


def _of_hosts(options: ProbeOptions, seconds_S: Sequence[float]) -> list[float]:
    """The same, but with the harmonic mean of slots that share their host's cores: each of them is slow by chance."""
    found = list(seconds_S)
    size = options.devices_per_host
    for first in range(0, options.num_slots, size):
        known = [seconds for seconds in seconds_S[first : first + size] if seconds > 0]
        if known and _room(options, first) < size:
            found[first : first + size] = [statistics.harmonic_mean(known)] * size
    return found


def _of_turn(paces_S: Paces, turn: int) -> list[float]:
    return [next((pace.seconds for pace in paces if pace.turn == turn), math.nan) for paces in paces_S]


def _usual_of_each(seconds_S: Sequence[float], names: Sequence[str]) -> list[float]:
    """For each slot the median time of the slots of the same device."""
    usual = {
        name: _centre([seconds for seconds, other in zip(seconds_S, names, strict=True) if other == name])
        for name in dict.fromkeys(names)
    }
    return [usual[name] for name in names]


def _room(options: ProbeOptions, slot: int) -> int:
    """How many slots of a host can compute at the same time."""
    host = options.hosts[slot // options.devices_per_host]
    return len(host.devices) if options.device_kind == "cuda" else max(host.cores, 1)


def _reference_s(options: ProbeOptions, compute: Sequence[ComputeTime]) -> float:
    """Seconds of the reference case's layers, forward and backward; nan where they were not measured."""
    passes = [
        samples.median_s
        for time in compute
        if time.case == options.cases[0] and time.part in LAYERS
        for samples in (time.forward, time.input_grad, time.weight_grad)
    ]
    return sum(passes) if passes else math.nan


def _centre(values: Sequence[float]) -> float:
    """The median of the known values, of an even number the geometric mean of the middle two; nan without any."""
    known = [math.log(value) for value in values if value > 0]
    return math.exp(statistics.median(known)) if known else math.nan
