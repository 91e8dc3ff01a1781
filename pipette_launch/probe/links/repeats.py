"""How often each message is sent: few times over a quiet link, more over a noisy one, within a given time. Pure.

Shaped links and clouds let a burst pass at line speed before they limit the rate (tc's token bucket: 128 kB, say). So
every size begins with untimed messages of several bursts, messages follow each other without a pause, and the slope of
the fit comes from messages that are large against a burst.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from pipette_launch.facts import Samples
from pipette_launch.probe.options import MIN_SIZES, TINY_BYTES

FIRST_BYTES = 64 << 10
"""Larger messages wait until the time of this size is known."""
EXCHANGES, EXCHANGED_BYTES = 8, 1 << 20
"""A GPU's value is the mean of 8 exchanges in a row of a small message, and of fewer if they would exceed 1 MiB."""
LEAD_S = 2e-3
"""Time before each value on a GPU, in which the device is kept busy while the host queues the exchanges."""
GROWTH = 16
"""A size that is more than so many times the largest tried one waits until the time of that one is known."""
TINY_REPEATS = 4
"""A tiny message costs little and scatters most, so it is sent so many times as often."""
WARM_BYTES = 256 << 10
MAX_WARMUPS = 4
MIN_VALUES = 3
MAX_VALUES = 24
TARGET_SPREAD = 0.04
"""Values with a smaller spread suffice: even if three of five are disturbed, they are at most 9 % too slow."""


def ladder(sizes_bytes: Sequence[int]) -> tuple[int, ...]:
    """The sizes to send, ascending: those that are asked for, a tiny one, and a first step where theirs is high."""
    first = (FIRST_BYTES,) if max(sizes_bytes) > FIRST_BYTES else ()
    return tuple(sorted({TINY_BYTES, *first, *sizes_bytes}))


def num_exchanges(size_bytes: int) -> int:
    """Return the number of exchanges of a message that a GPU times as one value; both ends know it by the size."""
    return max(1, min(EXCHANGES, EXCHANGED_BYTES // size_bytes))


def in_passes(counts: Sequence[int]) -> Iterator[int]:
    """The order of so many messages of each size: passes over all sizes, the largest first.

    With passes a disturbance of a second affects a value or two of every size, and not all values of one.
    """
    regular = counts[1:] if any(counts[1:]) else counts
    passes = max(regular, default=0)
    for turn in range(passes):
        for index in reversed(range(len(counts))):
            for _ in range(counts[index] * (turn + 1) // passes - counts[index] * turn // passes):
                yield index


def in_step(counts: Sequence[int]) -> list[tuple[int, int]]:
    """The same order as (size, count), for rails that begin every message together; only tiny ones have counts."""
    found: list[tuple[int, int]] = []
    for index, run in groupby(in_passes(counts)):
        count = len(list(run))
        found += [(index, count)] if index == 0 else [(index, 1)] * count
    return found


def quartile_spread(values: Sequence[float]) -> float:
    """Half the distance between the quartiles over the median; of at least two values.

    Stricter than the median absolute deviation, which calls (1, 1, 1, 2, 2) steady.
    """
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / (2 * middle) if middle else 0.0


def undisturbed(values: Sequence[float]) -> list[float]:
    """The fastest quarter of the times of a tiny message.

    Where processes wait for a processor, the median contains that wait. A large message does not wait as long, as its
    bytes travel meanwhile; so subtracting the median from its time made links look up to a fifth too fast.
    """
    return sorted(values)[: max(1, len(values) // 4)]


def condensed(samples: Samples) -> Samples:
    """Three values around the lower quartile, with the spread of all values, and the last warm-up.

    The lower quartile counts, because a disturbance only slows a message down: medians of the same messages were up to
    a half further off the rates set on a laboratory's links, and the fastest value is too fast where a queue was empty.
    Rank 0 gets three values only: with 64 hosts of 8 devices all values of all links would be 50 MB of text.
    """
    values = samples.values_s
    quartile = statistics.quantiles(values, n=4, method="inclusive")[0] if len(values) > 1 else values[0]
    away = quartile * samples.spread
    return Samples(
        values_s=tuple(map(_rounded, (max(quartile - away, 0.0), quartile, quartile + away))),
        warmup_s=tuple(map(_rounded, samples.warmup_s[-1:])),
    )


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.6g}")


@dataclass(kw_only=True)
class Tally:
    """The times that the sender of one direction has measured, and the messages that it still wants to send."""

    sizes: tuple[int, ...]
    """From `ladder`."""
    repeats: int
    """Number of values of each size before their spread is computed."""
    warmups: int
    bound_s: float
    """Seconds that this direction may take; the least number of messages is sent in any case."""
    is_queued: bool = False
    """Each value is a mean of `num_exchanges`, as on GPUs."""
    warm_s: list[list[float]] = field(init=False)
    values_s: list[list[float]] = field(init=False)
    own_s: list[list[float]] = field(init=False)
    """The times of this rail alone, of the same messages as `values_s`."""

    def __post_init__(self) -> None:
        self.warm_s = [[] for _ in self.sizes]
        self.values_s = [[] for _ in self.sizes]
        self.own_s = [[] for _ in self.sizes]

    def add(self, index: int, own_s: float, all_s: float | None = None) -> None:
        """Record one message of size `index`: first its warm-ups, then its values.

        `own_s` is the time of this rail, `all_s` that until all rails had finished; None = there is one rail.
        """
        seconds = own_s if all_s is None else all_s
        if len(self.warm_s[index]) < self._num_warmups(index):
            self.warm_s[index].append(seconds)
        else:
            self.values_s[index].append(seconds)
            self.own_s[index].append(own_s)

    def wish(self) -> tuple[int, ...]:
        """How many messages of each size should follow; none when enough is known.

        Warm-ups come first, from small to large, and end below the first size that the time does not allow. Then as
        many values as it allows, up to `repeats`; then twice as many where they still scatter, and so on.
        """
        return self._next_warmups() or self._next_values() or (0,) * len(self.sizes)

    def samples(self, *, own: bool = False) -> tuple[tuple[int, ...], tuple[Samples, ...]]:
        """The sizes that have values, and the values: until all rails had finished, or only this one."""
        values_s = self.own_s if own else self.values_s
        kept = [index for index, values in enumerate(values_s) if values]
        counted = (undisturbed(values_s[i]) if self.sizes[i] == TINY_BYTES else values_s[i] for i in kept)
        samples = tuple(
            Samples(values_s=tuple(values), warmup_s=tuple(self.warm_s[i]))
            for i, values in zip(kept, counted, strict=True)
        )
        return tuple(self.sizes[index] for index in kept), samples

    def _num_warmups(self, index: int) -> int:
        return max(1, self.warmups, min(MAX_WARMUPS, WARM_BYTES // self.sizes[index]))

    def _next_warmups(self) -> tuple[int, ...] | None:
        tried = sum(map(bool, self.warm_s))
        reach = max(FIRST_BYTES, GROWTH * self.sizes[tried - 1] if tried else 0)
        counts = [0] * len(self.sizes)
        for index in range(tried, len(self.sizes)):
            known = self.sizes[index] <= reach or index == tried
            if not known or (tried and index >= MIN_SIZES and not self._affords(index, tried - 1)):
                break
            counts[index] = self._num_warmups(index)
        return tuple(counts) if any(counts) else None

    def _affords(self, index: int, tried: int) -> bool:
        """Whether the least number of messages of a size fits into the time, by the largest size that was tried."""
        seconds = self.warm_s[tried][-1] * self.sizes[index] / self.sizes[tried]
        return self._took_s(index, seconds) * (self._num_warmups(index) + MIN_VALUES) <= self.bound_s

    def _next_values(self) -> tuple[int, ...] | None:
        kept = [index for index, warm in enumerate(self.warm_s) if warm]
        lacking = [index for index in kept if len(self.values_s[index]) < MIN_VALUES]
        if lacking:
            return self._more(lacking, max(MIN_VALUES, self._affordable(lacking, self.repeats)))
        unsure = [index for index in kept if quartile_spread(self.values_s[index]) > TARGET_SPREAD]
        if any(self.sizes[index] != TINY_BYTES for index in unsure):
            # The same disturbance may have affected all values of another size, which then show no scatter.
            unsure = kept
        had = max((len(self.values_s[index]) // self._factor(index) for index in unsure), default=MAX_VALUES)
        count = self._affordable(unsure, min(had, MAX_VALUES - had))
        return self._more(unsure, count) if count > 0 else None

    def _factor(self, index: int) -> int:
        return TINY_REPEATS if self.sizes[index] == TINY_BYTES else 1

    def _took_s(self, index: int, value_s: float) -> float:
        """Return the time that measuring a value takes."""
        return LEAD_S + num_exchanges(self.sizes[index]) * value_s if self.is_queued else value_s

    def _affordable(self, indices: Sequence[int], wanted: int) -> int:
        """How many passes over these sizes the time still allows, at most `wanted`."""
        latest = [
            self._took_s(index, (self.values_s[index] or self.warm_s[index])[-1]) * self._factor(index)
            for index in indices
        ]
        left_s = self.bound_s - sum(
            self._took_s(index, value)
            for one_s in (self.warm_s, self.values_s)
            for index, values in enumerate(one_s)
            for value in values
        )
        return min(wanted, int(left_s / max(sum(latest), 1e-9)))

    def _more(self, indices: Sequence[int], count: int) -> tuple[int, ...]:
        return tuple(count * self._factor(index) if index in indices else 0 for index in range(len(self.sizes)))
