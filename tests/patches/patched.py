"""Apply a patch during a block of a test."""

import contextlib
from collections.abc import Iterator

from pipette_patches import registry


def revert(name: str) -> None:
    """Revert a patch if it is applied."""
    if name in registry._applied:
        registry._applied.pop(name).revert()


@contextlib.contextmanager
def use(name: str) -> Iterator[None]:
    """Apply a patch during the block; a patch that was applied before stays applied."""
    before = name in registry.applied()
    registry.apply(name)
    try:
        yield
    finally:
        if not before:
            revert(name)
