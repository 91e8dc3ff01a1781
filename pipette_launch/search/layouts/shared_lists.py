"""Lists of values that many combinations share: each is built once, and numpy repeats combinations for their values."""

# D = combinations, N = combinations with each value of their list.

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

import numpy as np

from pipette_launch.facts.layout import Ints

K = TypeVar("K", bound=Hashable)

Build = Callable[[K, "Counter[str]"], Iterable[tuple[int, ...]]]
"""SharedLists what follows a key, and counts what is refused."""


class SharedLists(Generic[K]):
    """A list of rows of numbers for each key, with the reasons why others are not in it."""

    def __init__(self, build: Build[K], *, width: int) -> None:
        self._build = build
        self._width = width
        self._places: dict[K, int] = {}
        self._rows: list[list[tuple[int, ...]]] = []
        self._faults: list[Counter[str]] = []

    def place(self, key: K) -> int:
        """Return the place of a key's list, which is built when first asked for."""
        if key not in self._places:
            faults: Counter[str] = Counter()
            rows = list(self._build(key, faults))
            self._places[key] = len(self._rows)
            self._rows.append(rows)
            self._faults.append(faults)
        return self._places[key]

    def places(self, keys: Iterable[K]) -> Ints:
        """Return the places of some keys' lists."""
        return np.array([self.place(key) for key in keys], dtype=np.int64)

    @property
    def lengths(self) -> Ints:
        """Rows of each list."""
        return np.array([len(rows) for rows in self._rows], dtype=np.int64)

    @property
    def heads(self) -> Ints:
        """The first row of each list; zeros for an empty one."""
        return np.array([rows[0] if rows else (0,) * self._width for rows in self._rows], dtype=np.int64)

    def rows(self, place: int) -> list[tuple[int, ...]]:
        """One list."""
        return self._rows[place]

    def dropped(self, place_D: Ints) -> Counter[str]:
        """Count what is refused, as often as its list is used."""
        total: Counter[str] = Counter()
        uses = np.bincount(place_D, minlength=len(self._faults)).tolist()
        for faults, times in zip(self._faults, uses, strict=True):
            if times:
                total.update({reason: count * times for reason, count in faults.items()})
        return total

    def spread(self, place_D: Ints) -> tuple[Ints, Ints]:
        """Repeat each combination for every row of its list: its number (N), and the rows (N x width)."""
        lengths = self.lengths
        starts = np.cumsum(lengths) - lengths
        counts_D = lengths[place_D] if len(place_D) else np.zeros(0, dtype=np.int64)
        firsts_D = np.cumsum(counts_D) - counts_D
        row_N = np.repeat(np.arange(len(place_D)), counts_D)
        at_N = np.arange(len(row_N)) - firsts_D[row_N] + (starts[place_D] if len(place_D) else counts_D)[row_N]
        table = np.array([row for rows in self._rows for row in rows], dtype=np.int64).reshape(-1, self._width)
        return row_N.astype(np.int64), table[at_N]
