"""`pipette_launch.predict`: a forecast for Python, whose errors name arguments where a command's name flags."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from pipette_launch.errors import PipetteError
from pipette_launch.forecast.story import foretell

ARGUMENTS = {
    "--cluster": "cluster",
    "--device": "device_kind",
    "--fabric": "fabric",
    "--gpu": "gpu",
    "--megatron-version": "megatron_version",
    "--memory-margin": "memory_margin",
    "--method": "method",
    "--nnodes": "num_hosts",
    "--nodes": "num_hosts",
    "--nproc-per-node": "devices_per_host",
    "--rank": "rank",
    "--stage": "stage",
    "--world-size": "world_size",
}
"""What the flags of `pipette predict` and of torchrun are called in Python; all others are Megatron's own."""

P = ParamSpec("P")
T = TypeVar("T")


def _for_python(function: Callable[P, T]) -> Callable[P, T]:
    @functools.wraps(function)
    def predict(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except PipetteError as error:
            error.args = (re.sub(r"--[\w-]+", lambda flag: ARGUMENTS.get(flag[0], flag[0]), str(error)),)
            raise

    # What help() shows.
    predict.__name__ = predict.__qualname__ = "predict"
    return predict


predict = _for_python(foretell)
