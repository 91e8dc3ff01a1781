"""Find a patch by name, apply it once, and apply it in spawned processes."""

import functools
import importlib
import multiprocessing.spawn
from typing import Any

from pipette_launch.text import did_you_mean
from pipette_patches.replacements import Patch, PatchError, Replacements, megatron_core_version

# Module of each patch, which defines PATCH. A module is imported at first use, because it may import torch.
_MODULES = {"cpu_backend": "pipette_patches.cpu_backend", "schedules": "pipette_patches.schedules.patch"}
_applied: dict[str, Replacements] = {}


def applied() -> tuple[str, ...]:
    """Return the names of the applied patches in the order in which they were applied."""
    return tuple(_applied)


def find(name: str) -> Patch:
    """Return the patch with this name. Raise PatchError for an unknown name."""
    if name not in _MODULES:
        hint = did_you_mean(name, _MODULES, otherwise=f"there are {', '.join(sorted(_MODULES))}")
        raise PatchError(f"unknown patch {name!r}; {hint}")
    patch: Patch = importlib.import_module(_MODULES[name]).PATCH
    return patch


def apply(name: str) -> None:
    """Apply a patch, unless the patch is applied already.

    megatron-core need not be imported yet, because the patch changes each module right after the module's import.
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
    replacements = Replacements([each for each in patch.replacements() if each.fits(version)])
    replacements.apply()
    _applied[name] = replacements


class _Patches:
    """Names of patches; unpickling an object of this class applies the patches."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def __reduce__(self) -> tuple[Any, ...]:
        return _apply_here_and_in_children, (self.names,)


def _apply_here_and_in_children(names: tuple[str, ...]) -> None:
    for name in names:
        apply(name)
    patch_children()


def patch_children() -> None:
    """Let every process that is spawned from now on start with the patches applied in this process at that time."""
    original = multiprocessing.spawn.get_preparation_data
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def with_patches(name: str) -> dict[str, Any]:
        # A spawned process unpickles its preparation data first, and ignores unknown keys of this dict.
        return {**original(name), "pipette_patches": _Patches(applied())}

    multiprocessing.spawn.get_preparation_data = with_patches
