"""Frozen facts, and the one file format."""

from pipette_launch.facts.job import Batch, Job
from pipette_launch.facts.layout import Cell, Layout, Recompute
from pipette_launch.facts.machines.cluster import Cluster, Device, Host, Links
from pipette_launch.facts.machines.device_memory import DeviceOverhead, StageReading
from pipette_launch.facts.measurements import (
    CollectiveTime,
    ComputeCase,
    ComputeTime,
    LoadingTime,
    Measurements,
    MemoryReading,
    Samples,
)
from pipette_launch.facts.model import HybridLayers, LatentAttention, ModelSpec
from pipette_launch.facts.results.plan import Choice, Plan, Provenance, Setting

__all__ = [
    "Batch",
    "Cell",
    "Choice",
    "Cluster",
    "CollectiveTime",
    "ComputeCase",
    "ComputeTime",
    "Device",
    "DeviceOverhead",
    "Host",
    "HybridLayers",
    "Job",
    "LatentAttention",
    "Layout",
    "Links",
    "LoadingTime",
    "Measurements",
    "MemoryReading",
    "ModelSpec",
    "Plan",
    "Provenance",
    "Recompute",
    "Samples",
    "Setting",
    "StageReading",
]
