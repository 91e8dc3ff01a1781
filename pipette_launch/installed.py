"""The packages that pipette-launch asks for, and what is said where some of them are not installed."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from pipette_launch.errors import PipetteError

MODULES = {
    "numpy": "numpy",
    "psutil": "psutil",
    "nvidia-ml-py": "pynvml",
    "packaging": "packaging",
    "jinja2": "jinja2",
    "rich": "rich",
    "torch": "torch",
}
"""Each package by its name in an index, and the module that is imported of it; megatron-core may be a checkout."""


def check_installed(*, but: frozenset[str] = frozenset()) -> None:
    """Raise PipetteError that names every missing package and the command for it; those of `but` alone are no error."""
    missing = _missing()
    if set(missing) - but:
        raise _not_installed(missing)


def told(error: ModuleNotFoundError) -> Exception:
    """Return what to raise for a module that is missing; one of no missing package stays as it is.

    Torch is named only where it is the one that was asked for, as most commands of `pipette` do without.
    """
    asked = (error.name or "").partition(".")[0]
    missing = [package for package in _missing() if package != "torch" or asked == "torch"]
    return _not_installed(missing) if asked in [MODULES[package] for package in missing] else error


def _missing() -> list[str]:
    return [package for package, module in MODULES.items() if find_spec(module) is None]


def _not_installed(missing: list[str]) -> PipetteError:
    which = " (which torch: docs/start.md, Install)" if "torch" in missing else ""
    names = " ".join(missing)
    return PipetteError(
        f"not installed, and pipette-launch needs them: {', '.join(missing)}; pip install {names}{which}"
    )


def compiled(name: str) -> ModuleType | None:
    """Return a compiled module of this package, or None where there is none, so that numpy does its work.

    Args:
        name: below the package, such as `cost.pipeline._longest_path`.

    """
    try:
        return import_module(f"pipette_launch.{name}")
    except ImportError:
        return None
