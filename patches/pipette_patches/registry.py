"""Find a patch by name, apply it once, take it back, carry it into spawned processes; refuse unknown megatron-core."""

import contextlib
import functools
import importlib
import multiprocessing.spawn
from collections.abc import Iterator
from typing import Any, Protocol

from packaging.specifiers import SpecifierSet

from pipette_launch.text import did_you_mean
from pipette_patches.replacements import PatchError, megatron_core_version


class Patch(Protocol):
    """A reversible change to megatron-core, which wraps named functions and nothing else."""

    name: str
    supports: SpecifierSet
    """The megatron-core versions that the patch was written for."""

    def apply(self) -> None:
        """Put the change in force; it is not in force yet."""

    def revert(self) -> None:
        """Put every original object back; the change is in force."""


# A name's module holds the patch as PATCH; it is imported when asked for, since it may import torch.
_MODULES = {
    "cpu_backend": "pipette_patches.cpu_backend",
    "schedules": "pipette_patches.schedules.patch",
}
_applied: dict[str, Patch] = {}


def names() -> tuple[str, ...]:
    """Every patch there is."""
    return tuple(sorted(_MODULES))


def applied() -> tuple[str, ...]:
    """The patches now in force, first applied first."""
    return tuple(_applied)


def find(name: str) -> Patch:
    """Find a patch by its name."""
    if name not in _MODULES:
        hint = did_you_mean(name, _MODULES, otherwise=f"there are {', '.join(names())}")
        raise PatchError(f"unknown patch {name!r}; {hint}")
    patch: Patch = importlib.import_module(_MODULES[name]).PATCH
    return patch


def apply(name: str) -> None:
    """Put a patch in force; do nothing if it is already.

    Safe before megatron-core is imported: the patch acts on each module when that is imported.
    """
    patch = find(name)
    if name in _applied:
        return
    version = megatron_core_version()
    if not patch.supports.contains(version, prereleases=True):
        raise PatchError(
            f"patch {patch.name!r} supports megatron-core {patch.supports}, but version {version} would be imported; "
            f"install a supported version, or leave the patch out"
        )
    patch.apply()
    _applied[name] = patch


def revert(name: str) -> None:
    """Take a patch back; do nothing if it is not in force."""
    find(name)
    if name in _applied:
        _applied.pop(name).revert()


@contextlib.contextmanager
def use(name: str) -> Iterator[None]:
    """Keep a patch in force for the length of a `with` block; one that was in force before stays so."""
    before = name in applied()
    apply(name)
    try:
        yield
    finally:
        if not before:
            revert(name)


class _Patches:
    """Applies patches in the process that unpickles it, which a spawned process does before anything else."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def __reduce__(self) -> tuple[Any, ...]:
        return _enter, (self.names,)


def _enter(names: tuple[str, ...]) -> None:
    """Apply patches in a spawned process, and let the processes that it spawns have them too."""
    for name in names:
        apply(name)
    patch_children()


def patch_children() -> None:
    """From now on, spawned processes start with the patches then in force here."""
    original = multiprocessing.spawn.get_preparation_data
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def with_patches(name: str) -> dict[str, Any]:
        # A spawned process unpickles this data first, and ignores keys that it does not know.
        return {**original(name), "pipette_patches": _Patches(applied())}

    multiprocessing.spawn.get_preparation_data = with_patches
