"""Under which conditions the figures came about."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

import pipette_launch
from benchmarks.telling import processor

ROOT = Path(pipette_launch.__file__).parent.parent


def conditions(date: str | None) -> dict[str, str]:
    """Date, commit, versions and machine; a date that is given makes a report reproducible to the letter."""
    return {
        "date": date or datetime.now(tz=timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "versions": (
            f"pipette-launch {pipette_launch.__version__}, Python {platform.python_version()}, numpy {np.__version__}"
        ),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {processor()}",
    }


def _commit() -> str:
    try:
        head = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"],  # noqa: S607
            check=True,
            capture_output=True,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip()
