"""Predicts exactly one configuration: does it fit, and how long is its step."""

from pipette_launch.forecast.machines import TargetMachines, machines_of
from pipette_launch.forecast.prediction import predict, predict_configuration

__all__ = ["TargetMachines", "machines_of", "predict", "predict_configuration"]
