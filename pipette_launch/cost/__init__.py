"""Predict: how long a step takes and how much memory it holds, for a layout on given slots."""

from pipette_launch.cost.memory.parts import MemoryParts
from pipette_launch.cost.memory.peak import peak_memory_bytes
from pipette_launch.cost.step.predictor import NOT_MODELLED, Predictor, StepTime

__all__ = ["NOT_MODELLED", "MemoryParts", "Predictor", "StepTime", "peak_memory_bytes"]
