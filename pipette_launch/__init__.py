"""Measure the machines of a Megatron-LM job, choose its parallel configuration, and launch it."""

from __future__ import annotations

import typing

if typing.TYPE_CHECKING:
    from pipette_launch.api import *

__version__ = "0.3.0"

__all__ = ["__version__", "load_measurements", "load_plan", "measure", "plan", "predict"]
__all__ += ["Measurements", "Plan", "Prediction"]
__all__ += ["ClusterError", "FactError", "FileFormatError", "MegatronError", "PipetteError", "PlanError"]
__all__ += ["ProbeError", "UsageError"]


def __getattr__(name: str) -> typing.Any:
    """Import the Python API on first use, so that the commands start without importing the API."""
    if name in __all__:
        from pipette_launch import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the names of the API before the API is imported, and hide all other names of this module."""
    return sorted({name for name in globals() if name.startswith("__")} | {*__all__})
