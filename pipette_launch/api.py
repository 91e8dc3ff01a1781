"""What `import pipette_launch` offers: the commands of `pipette` as functions, and files of ours as facts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipette_launch.errors import UsageError
from pipette_launch.facts import Measurements, Plan, files
from pipette_launch.facts.results.comparison import Comparison
from pipette_launch.forecast import predict
from pipette_launch.tools.compare import of_files

__all__ = ["compare", "load_measurements", "load_plan", "predict"]


def load_plan(path: str | Path) -> Plan:
    """Read a plan file, as `pipette plan --out` and a job write it; times in seconds, sizes in bytes.

    `chosen.placement` has one entry for each rank: the slot it sits on, which is host * devices_per_host + device.

    >>> import pipette_launch
    >>> pipette_launch.load_plan("missing.plan.json")
    Traceback (most recent call last):
    pipette_launch.errors.FileFormatError: missing.plan.json: cannot be read (No such file or directory)

    Raises:
        FileFormatError: the file is damaged, no plan, or not there.

    """
    return files.read(Path(path), Plan)


def load_measurements(path: str | Path) -> Measurements:
    """Read a cluster.json, as `pipette probe` and a warm-up write it; times in seconds, sizes in bytes.

    Raises:
        FileFormatError: the file is damaged, holds no measurements, or is not there.

    """
    return files.read(Path(path), Measurements)


def compare(paths: Sequence[str | Path]) -> Comparison:
    """Set plan files side by side, as `pipette compare` does.

    Args:
        paths: two plan files or more; ranks that moved are counted against the first.

    Returns:
        One entry for each file, in their order; `notes` says which plans are for another job or other machines.

    Raises:
        UsageError: fewer than two files.
        FileFormatError: a file is damaged, no plan, or not there.

    """
    if isinstance(paths, str | Path) or len(paths) < 2:
        raise UsageError(f"paths must be two plan files or more, got {paths!r}")
    return of_files([Path(path) for path in paths])
