"""Predict: how long a step takes and how much memory it holds, for a layout on given slots."""

from pipette_launch.cost.latency import NOT_MODELLED, Predictor, StepTime
from pipette_launch.cost.memory import MemoryParts, peak_memory_bytes

__all__ = ["NOT_MODELLED", "MemoryParts", "Predictor", "StepTime", "peak_memory_bytes"]
