"""Figures that many layouts share, worked out once and kept while they are few enough."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")

_MOST = 1 << 15


class Memo(Generic[T]):
    """Values by key; all are forgotten once there are too many, which no search is expected to reach."""

    def __init__(self, most: int = _MOST) -> None:
        self._values: dict[Hashable, T] = {}
        self._most = most

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the value of a key; `make` gives it where it is not known, from nothing that the key does not tell."""
        if key not in self._values:
            if len(self._values) >= self._most:
                self._values.clear()
            self._values[key] = make()
        return self._values[key]
