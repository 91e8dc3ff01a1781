"""Predict: how long a step takes and how much memory it holds, for a layout on given slots."""

from pipette_launch.cost.memory.peak import MemoryParts, peak_memory_bytes
from pipette_launch.cost.step.predictor import NOT_MODELLED, Predictor, StepTime

__all__ = ["NOT_MODELLED", "MemoryParts", "Predictor", "StepTime", "peak_memory_bytes"]
