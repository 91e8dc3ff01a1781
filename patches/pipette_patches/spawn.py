"""Carry the patches in force into the processes that multiprocessing spawns."""

import functools
import multiprocessing.spawn
from typing import Any

from pipette_patches import registry


class _Patches:
    """Applies patches where it is unpickled: first thing in a spawned process."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def __reduce__(self) -> tuple[Any, ...]:
        return enter, (self.names,)


def enter(names: tuple[str, ...]) -> None:
    """Apply patches in a spawned process, and see to those that it spawns."""
    for name in names:
        registry.apply(name)
    patch_children()


def patch_children() -> None:
    """From now on, spawned processes start with the patches then in force here."""
    original = multiprocessing.spawn.get_preparation_data
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def with_patches(name: str) -> dict[str, Any]:
        # The data is the first thing that a spawned process unpickles; keys it does not know, it ignores.
        return {**original(name), "pipette_patches": _Patches(registry.applied())}

    multiprocessing.spawn.get_preparation_data = with_patches
