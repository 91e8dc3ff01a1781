"""Speed of each slot (device): all slots time a layer at once, and slots that differ from their peers repeat the test.

On a CPU a quota, another process or a stop signal takes the core away from a slot. The processor time of a layer does
not show this loss, but its wall time does. Workers that share cores get uneven parts of the cores, so a single time
window proves little. So a slot that differs from its peers repeats the test at two other moments. A few usual slots
work beside this slot, with a core for each slot. Chance does not slow the same slot three times.
"""

# S = slots, host by host, T = turns; nan = not measured.

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipette_launch.facts.measurements import LAYERS
from pipette_launch.probe.health.verdicts import SlowSlot, confirmed_slots
from pipette_launch.probe.lockstep import Lockstep
from pipette_launch.probe.messages import Pace, WarmupOrder, WorkerResult

WINDOW_S = {"cpu": 0.5, "cuda": 0.3}
"""Seconds for which slots repeat a layer. The window covers many time slices of a CPU, each of a few milliseconds."""
RETESTS = 2
SCHEDULE = Path("/proc/thread-self/schedstat")
SAME_SPEED = {"cuda": 1.05, "cpu": 1.3}
"""Slots whose times differ by less than this factor count as equally fast."""
NUM_CONTROLS = 3
"""Number of usual slots of each device type that repeat the test for comparison."""

Floats = NDArray[np.float64]
Paces = Sequence[Sequence[Pace]]  # Times of each slot, turn by turn


@dataclass(frozen=True, kw_only=True, slots=True)
class Speeds:
    """Speeds of all slots, and the slots with a fault."""

    speed_S: tuple[float, ...]
    """Speed of each slot, relative to the median slot, whose predicted times already include `straggle`."""
    straggle: float
    """Time of the slowest slot among the slots that count as equally fast, divided by their median time."""
    slow: tuple[SlowSlot, ...]
    """Slots that compute slower than their peers because of a fault."""
    notes: tuple[str, ...]


def speeds(options: WarmupOrder, paces_S: Paces) -> Speeds:
    """Compare all slots. A slot differs from its peers (slots of the same device type) if it differs in every turn.

    A slot's difference is the median of its differences in all turns.
    """
    pace_TS, names = _by_turn(paces_S), device_names(options)
    first_S, same = pace_TS[0], SAME_SPEED[options.device_kind]
    median_s = _centre(first_S)
    if math.isnan(median_s):
        note = "slot speeds are assumed equal: no slot measured the reference case"
        return Speeds(speed_S=(1.0,) * options.num_slots, straggle=1.0, slow=(), notes=(note,))
    ratio_S, usual_S = _differences(options, pace_TS), _usual(first_S, names)
    straggle = _straggle(options, first_S, ratio_S)
    kind_S = usual_S / median_s
    # Device types with a small difference, or without a measurement, count as equally fast.
    kind_S[~(np.abs(np.log(kind_S)) > math.log(same))] = 1.0
    again_S = np.where(np.isfinite(pace_TS).sum(axis=0) > 1, usual_S * ratio_S, np.nan)
    return Speeds(
        speed_S=tuple((np.where(ratio_S == 1, 1.0, straggle) / (kind_S * ratio_S)).tolist()),
        straggle=straggle,
        slow=confirmed_slots(first_S, again_S, device_kind=options.device_kind, alike_S=names),
        notes=tuple(
            f"slot {options.slot_name(slot)} computes at {1 / ratio:.2f} of its peers' speed"
            for slot, ratio in enumerate(ratio_S)
            if ratio > 1
        ),
    )


def slots_to_repeat(options: WarmupOrder, paces_S: Paces) -> tuple[int, ...]:
    """Return the slots that repeat the test: slots that have differed from their peers so far, and some usual slots.

    Usual slots are added only on hosts with a free core, because healthy slots with a core each are equally fast.
    """
    pace_TS, names = _by_turn(paces_S), device_names(options)
    odd = np.flatnonzero(_differences(options, pace_TS) != 1).tolist()
    # Distance of each slot's time from the usual time; nan if the slot measured nothing.
    distance_S = np.abs(np.log(pace_TS[0] / _usual(pace_TS[0], names)))
    busy = Counter(slot // options.devices_per_host for slot in odd)
    chosen = set(odd)
    for name in dict.fromkeys(names[slot] for slot in odd):
        for _ in range(NUM_CONTROLS):
            # Prefer hosts on which few slots work again, and slots with times close to the usual time.
            left = [
                (busy[slot // options.devices_per_host], distance_S[slot], slot)
                for slot in np.flatnonzero(np.isfinite(distance_S)).tolist()
                if names[slot] == name
                and slot not in chosen
                and busy[slot // options.devices_per_host] < _num_cores(options, slot)
            ]
            if left:
                _, _, best = min(left)
                busy[best // options.devices_per_host] += 1
                chosen.add(best)
    return tuple(sorted(chosen))


def factors(options: WarmupOrder, results: Sequence[WorkerResult], found: Speeds) -> tuple[float, ...]:
    """Return one factor for each slot: a training step waits for measured time * factor * speed of the slot.

    Slots share cores unevenly by chance, which must not make one case look slower than another. So the time that other
    processes took is one common factor for all slots. If a slot differs from its peers, the reference case shows which
    part of the difference the slot's measured times already contain.
    """
    wall = on_the_wall(results, found)
    # Seconds of the layers of the reference case, forward and backward; 0 = not measured.
    layer_s_S = [
        sum(
            samples.median_s
            for part in result.compute
            if part.case == options.cases[0] and part.part in LAYERS
            for samples in (part.forward, part.input_grad, part.weight_grad)
        )
        for result in results
    ]
    usual_s = _centre(np.array(layer_s_S))
    return tuple(
        wall if speed == 1 or not seconds > 0 else wall * usual_s / seconds / speed
        for seconds, speed in zip(layer_s_S, found.speed_S, strict=True)
    )


def on_the_wall(results: Sequence[WorkerResult], found: Speeds) -> float:
    """Return wall time divided by processor time for a usual slot, including waits for stragglers."""
    return statistics.median(result.stretch for result in results) * found.straggle


def device_names(options: WarmupOrder) -> tuple[str, ...]:
    """Return the device type of each slot. Slots of one type are peers."""
    return tuple(device.name for host in options.hosts for device in host.devices)


def _by_turn(paces_S: Paces) -> Floats:
    """Return the seconds of each turn (row) and slot (column); nan = the slot did not work in this turn."""
    pace_TS = np.full((max((pace.turn + 1 for paces in paces_S for pace in paces), default=1), len(paces_S)), np.nan)
    for slot, paces in enumerate(paces_S):
        for pace in paces:
            pace_TS[pace.turn, slot] = pace.seconds
    return pace_TS


def _differences(options: WarmupOrder, pace_TS: Floats) -> Floats:
    """Return each slot's time divided by its peers' time, median over turns; 1 if turns disagree or are missing.

    In the first turn, peers are all slots of the device type. In later turns, peers are the slots that were usual in
    the first turn, if any. Ratios that noise explains count as 1.
    """
    names, same = device_names(options), SAME_SPEED[options.device_kind]
    ratio_TS = np.empty_like(pace_TS)
    for turn, seconds_S in enumerate(pace_TS):
        peers_S = _usual(seconds_S, names)
        if turn:
            of_usual_S = _usual(np.where(ratio_TS[0] == 1, seconds_S, np.nan), names)
            peers_S = np.where(np.isnan(of_usual_S), peers_S, of_usual_S)
        ratio_S = seconds_S / peers_S
        ratio_TS[turn] = np.where((ratio_S <= same) & (ratio_S >= 1 / same), 1.0, ratio_S)
    known_S = [ratio_T[~np.isnan(ratio_T)] for ratio_T in ratio_TS.T]
    return np.array([1.0 if not known.size or known.min() <= 1 <= known.max() else _centre(known) for known in known_S])


def _straggle(options: WarmupOrder, first_S: Floats, ratio_S: Floats) -> float:
    seconds_S = first_S.copy()
    for slots in np.arange(options.num_slots).reshape(-1, options.devices_per_host):
        known = first_S[slots][first_S[slots] > 0]
        # Slots that share a host's cores are slow by chance, so the harmonic mean of their times counts.
        if known.size and _num_cores(options, int(slots[0])) < len(slots):
            seconds_S[slots] = statistics.harmonic_mean(known.tolist())
    late_S = seconds_S / _usual(seconds_S, device_names(options))
    # A slot that was slow in the first turn only does not count as equally fast.
    equal = (ratio_S == 1) & (late_S <= SAME_SPEED[options.device_kind])
    return float(max(1.0, late_S[equal].max(initial=1.0)))


def _usual(seconds_S: Floats, names: Sequence[str]) -> Floats:
    """Return for each slot the median time of the slots of its device type."""
    usual_S, name_S = np.empty_like(seconds_S), np.array(names)
    for name in set(names):
        usual_S[name_S == name] = _centre(seconds_S[name_S == name])
    return usual_S


def _num_cores(options: WarmupOrder, slot: int) -> int:
    """Return how many slots of this slot's host can compute at the same time."""
    host = options.hosts[slot // options.devices_per_host]
    return len(host.devices) if options.device_kind == "cuda" else max(host.cores, 1)


def _centre(values: Floats) -> float:
    """Return the median of the positive values (geometric mean of the middle two); nan if no value is positive."""
    known = values[values > 0]
    return float(np.exp(np.median(np.log(known)))) if known.size else math.nan


@dataclass(kw_only=True)
class PaceTest:
    """Tests the speed of one slot: times a layer in one time window of each turn."""

    options: WarmupOrder
    slot: int
    clock: Callable[[], float] = time.perf_counter
    paces: list[Pace] = field(default_factory=list)

    def first(self, work: Callable[[], None] | None, lockstep: Lockstep, left_s: float) -> None:
        """Run `work` for one time window while all other slots work too; None = this slot stays idle.

        The wait for other ranks allows them `left_s` more seconds to end their phase.
        """
        late_s = self._meet(lockstep, left_s)
        if work is not None:
            self._work(work, late_s, turn=0)

    def again(self, work: Callable[[], None] | None, lockstep: Lockstep, left_s: float) -> None:
        """Repeat the speed test at most RETESTS times, for slots that differ from their peers and a few usual slots."""
        everyone: list[tuple[Pace, ...]] = [()] * self.options.num_slots
        for turn in range(1, RETESTS + 1):
            last = next((repr(pace.seconds) for pace in self.paces if pace.turn == turn - 1), "")
            texts = lockstep.gather(last, left_s)
            if texts is not None:
                everyone = [
                    (*before, Pace(turn=turn - 1, seconds=float(text))) if text else before
                    for before, text in zip(everyone, texts, strict=True)
                ]
            chosen = lockstep.broadcast(" ".join(map(str, slots_to_repeat(self.options, everyone))), left_s)
            if not chosen:
                return
            late_s = self._meet(lockstep, left_s)
            if work is not None and str(self.slot) in chosen.split():
                self._work(work, late_s, turn=turn)
        # Wait for all slots, because a slot that continued now would disturb slots that still work.
        lockstep.barrier(left_s)

    def _meet(self, lockstep: Lockstep, left_s: float) -> float:
        """Wait for all ranks; returns the seconds that this thread then lost, because it was ready but had no core."""
        before_s = queued_s()
        lockstep.barrier(left_s)
        return queued_s() - before_s

    def _work(self, work: Callable[[], None], late_s: float, *, turn: int) -> None:
        window_s = WINDOW_S[self.options.device_kind]
        began_s = self.clock() - late_s
        count, taken_s = 0, 0.0
        while not count or taken_s < window_s:
            work()
            count += 1
            taken_s = self.clock() - began_s
        self.paces.append(Pace(turn=turn, seconds=taken_s / count))


def queued_s() -> float:
    """Return the seconds that this thread has waited for a core since its start; 0 if the kernel keeps no count."""
    try:
        return int(SCHEDULE.read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
