"""Inner loops in C, where the installation could compile them."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


def compiled(name: str) -> ModuleType | None:
    """Return a compiled module of this package, or None where there is none, so that numpy does its work.

    Args:
        name: below the package, such as `cost.pipeline._longest_path`.

    """
    try:
        return import_module(f"pipette_launch.{name}")
    except ImportError:
        return None
