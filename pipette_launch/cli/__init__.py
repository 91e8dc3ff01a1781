"""Both commands, `pipette-launch` and `pipette`: flags in, exit code out."""

from pipette_launch.cli.launcher import main

__all__ = ["main"]
