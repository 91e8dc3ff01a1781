"""Options of torch's CUDA allocator that a job's environment sets."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pipette_launch.errors import MegatronError

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""torch takes the first that is set, even if it is empty; ROCm alone knows the second, and 2.9 and later the third."""
EXPANDABLE = "expandable_segments"
_OUTSIDE_LISTS = re.compile(r",(?![^\[]*\])")


def allocator_config(environment: Mapping[str, str]) -> str:
    """Return the options in effect without white space, which torch skips; empty where none is set.

    Raises:
        MegatronError: torch itself refuses the options when it is imported.

    """
    name = next((variable for variable in VARIABLES if variable in environment), VARIABLES[0])
    config = "".join(environment.get(name, "").split())
    options = allocator_options(config)
    for option in options:
        if "=" in option:
            raise MegatronError(f"{name}={config}: torch refuses {option}; write NAME:VALUE, as {EXPANDABLE}:True")
    value = options.get(EXPANDABLE, "False")
    if value not in {"True", "False"}:
        raise MegatronError(
            f"{name}={config}: torch refuses {EXPANDABLE}:{value}; write {EXPANDABLE}:True or {EXPANDABLE}:False"
        )
    return config


def allocator_options(config: str) -> dict[str, str]:
    """Split `a:1,b:[64:8,>:1]` into names and values; the last of several counts."""
    items = (item.partition(":") for item in _OUTSIDE_LISTS.split(config))
    return {name: value for name, _, value in items if name}
