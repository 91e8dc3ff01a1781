"""Asks SLURM's own command, which knows what a step's variables do not say."""

from __future__ import annotations

import subprocess

LIMIT_S = 5.0
"""Without its configuration, as in a container, scontrol tries again for a minute."""


def scontrol(*words: str) -> str:
    """Return what `scontrol` prints.

    Raises:
        OSError: there is none here.
        subprocess.SubprocessError: it failed, or took too long.

    """
    done = subprocess.run(
        ["scontrol", *words],  # noqa: S607 - SLURM's own, wherever the cluster has put it
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    return done.stdout
