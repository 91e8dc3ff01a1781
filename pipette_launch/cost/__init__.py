"""Prediction of the seconds of one training step and the bytes on each device, for a layout on given slots."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")

_MOST = 1 << 15


class Memo(Generic[T]):
    """Cache of values that many layouts share. A full cache drops all its values."""

    def __init__(self, most: int = _MOST) -> None:
        self._values: dict[Hashable, T] = {}
        self._most = most

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the cached value of a key. `make` computes a missing value, which must depend only on the key."""
        if key not in self._values:
            if len(self._values) >= self._most:
                self._values.clear()
            self._values[key] = make()
        return self._values[key]
