"""Predicts exactly one configuration: does it fit, and how long is its step."""

from pipette_launch.forecast.machines import TargetMachines, machines_of
from pipette_launch.forecast.prediction import FP8_AS_16_BIT, predict, predict_configuration

__all__ = ["FP8_AS_16_BIT", "TargetMachines", "machines_of", "predict", "predict_configuration"]
