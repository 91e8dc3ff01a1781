"""`python -m pipette_launch` is `pipette-launch`."""

from pipette_launch.cli import main

main()
