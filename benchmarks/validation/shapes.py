"""Jobs of data sets that give shapes and degrees, not command lines: read through the product's own front door."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from benchmarks.validation.golden_jobs import command_line
from pipette_launch.facts import Job
from pipette_launch.megatron import read_job
from pipette_launch.megatron.flags import flag_table

VERSION = "0.16.1"
"""The release by whose flags and defaults these jobs are read."""


def job_of(
    args: Mapping[str, Any],
    *,
    world_size: int,
    device_name: str = "",
    version: str = VERSION,
    environment: Mapping[str, str] | None = None,
) -> Job:
    """Read a job from Megatron's flags by name, `true` for a bare one; raises PipetteError for an impossible one."""
    words = tuple(command_line({"train-iters": 1, **args}, flag_table(version)))
    return _job(words, world_size, device_name, version, tuple(sorted((environment or {}).items())))


@lru_cache(maxsize=4096)
def _job(
    words: tuple[str, ...], world_size: int, device_name: str, version: str, environment: tuple[tuple[str, str], ...]
) -> Job:
    return read_job(
        words,
        world_size=world_size,
        megatron_version=version,
        device_kind="cuda",
        without_probes=True,
        device_name=device_name,
        environment=dict(environment),
    )
