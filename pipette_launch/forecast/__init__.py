"""Foretell exactly one configuration: does it fit, and how long is its step."""

from pipette_launch.forecast.api import predict
from pipette_launch.forecast.machines import Machines, machines_of
from pipette_launch.forecast.story import FP8_AS_16_BIT, foretell, megatron_version_of

__all__ = ["FP8_AS_16_BIT", "Machines", "foretell", "machines_of", "megatron_version_of", "predict"]
