"""Packages of the extra `train`, and optional compiled modules of this installation."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from pipette_launch.errors import PipetteError

MODULES = {"nvidia-ml-py": "pynvml", "psutil": "psutil", "torch": "torch"}
"""Imported module of each package of the extra `train`. megatron-core is not listed, because a source checkout may
replace it."""


def check_installed(*, but: frozenset[str] = frozenset()) -> None:
    """Raise a PipetteError that names the missing packages of `MODULES`, unless all missing packages are in `but`."""
    missing = [package for package, module in MODULES.items() if find_spec(module) is None]
    if set(missing) - but:
        which = " (docs/start.md, Install: choose the build of torch)" if "torch" in missing else ""
        raise PipetteError(
            f"pipette-launch needs packages that are not installed: {', '.join(missing)}; "
            f"pip install {' '.join(missing)}{which}"
        )


def compiled(name: str) -> ModuleType | None:
    """Import a compiled module of `pipette_launch` by name. Return None if the module was not compiled."""
    try:
        return import_module(f"pipette_launch.{name}")
    except ImportError:
        return None
