"""The packages that pipette-launch asks for, and what is said where some of them are not installed."""

from __future__ import annotations

from importlib.util import find_spec

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
    missing = [package for package, module in MODULES.items() if find_spec(module) is None]
    if set(missing) - but:
        which = " (which torch: docs/start.md, Install)" if "torch" in missing else ""
        names = " ".join(missing)
        raise PipetteError(
            f"not installed, and pipette-launch needs them: {', '.join(missing)}; pip install {names}{which}"
        )
