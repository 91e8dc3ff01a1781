"""Required Python packages and optional compiled modules of this installation."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from pipette_launch.errors import PipetteError

MODULES = {"nvidia-ml-py": "pynvml"} | {
    name: name for name in ("numpy", "psutil", "packaging", "jinja2", "rich", "torch")
}
"""Imported module of each required package. megatron-core is not listed, because a source checkout may replace it."""


def check_installed(*, but: frozenset[str] = frozenset()) -> None:
    """Raise a PipetteError that names the missing packages, unless all missing packages are in `but`."""
    missing = _missing()
    if set(missing) - but:
        raise _not_installed(missing)


def explained_import_error(error: ModuleNotFoundError) -> Exception:
    """Return a PipetteError that names the missing packages, or the given error if no required package is missing.

    Torch is named only if the import of torch failed, because most `pipette` commands work without torch.
    """
    asked = (error.name or "").partition(".")[0]
    missing = [package for package in _missing() if package != "torch" or asked == "torch"]
    return _not_installed(missing) if asked in [MODULES[package] for package in missing] else error


def _missing() -> list[str]:
    return [package for package, module in MODULES.items() if find_spec(module) is None]


def _not_installed(missing: list[str]) -> PipetteError:
    which = " (docs/start.md, Install: choose the build of torch)" if "torch" in missing else ""
    advice = f"pip install {' '.join(missing)}{which}"
    return PipetteError(f"pipette-launch needs packages that are not installed: {', '.join(missing)}; {advice}")


def compiled(name: str) -> ModuleType | None:
    """Import a compiled module of `pipette_launch` by name. Return None if the module was not compiled."""
    try:
        return import_module(f"pipette_launch.{name}")
    except ImportError:
        return None
