"""The commands `pipette-launch` and `pipette`: read the flags, run, and return an exit code."""

from pipette_launch.cli.launcher import main

__all__ = ["main"]
