"""Predicts exactly one configuration: does it fit, and how long is its step."""

from pipette_launch.forecast.machines import TargetMachines, machines_of
from pipette_launch.forecast.prediction import checked_words, for_python, predict, predict_configuration

__all__ = ["TargetMachines", "checked_words", "for_python", "machines_of", "predict", "predict_configuration"]
