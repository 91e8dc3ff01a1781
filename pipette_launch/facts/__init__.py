"""Frozen dataclasses that describe jobs, machines, measurements and plans, and the JSON format of these dataclasses."""

from pipette_launch.facts.cluster import Cluster, Device, Host, Links
from pipette_launch.facts.job import Batch, Job
from pipette_launch.facts.layout import Cell, Layout, Recompute
from pipette_launch.facts.measurements import (
    CollectiveTime,
    ComputeCase,
    ComputeTime,
    DeviceOverhead,
    LoadingTime,
    Measurements,
    MemoryReading,
    Samples,
    StageReading,
)
from pipette_launch.facts.model import GatedDelta, HybridLayers, LatentAttention, ModelSpec
from pipette_launch.facts.plan import Choice, Plan, Provenance, Setting

__all__ = ["Batch", "Cell", "Choice", "Cluster", "CollectiveTime", "ComputeCase", "ComputeTime", "Device"]
__all__ += ["DeviceOverhead", "GatedDelta", "Host", "HybridLayers", "Job", "LatentAttention", "Layout", "Links"]
__all__ += ["LoadingTime", "Measurements", "MemoryReading", "ModelSpec", "Plan", "Provenance", "Recompute", "Samples"]
__all__ += ["Setting", "StageReading"]
