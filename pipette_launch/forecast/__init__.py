"""Foretell exactly one configuration: does it fit, and how long is its step."""

from pipette_launch.forecast.machines import Machines, machines_of
from pipette_launch.forecast.story import predict

__all__ = ["Machines", "machines_of", "predict"]
