"""Frozen dataclasses that describe jobs, machines, measurements and plans, and the JSON format of these dataclasses."""

from pipette_launch.facts.cluster import Cluster, Device, Host, Links
from pipette_launch.facts.job import Batch, Job
from pipette_launch.facts.layout import Cell, Layout, Recompute
from pipette_launch.facts.measurements import ComputeCase, ComputeTime, LoadingTime, Measurements, Samples, StageReading
from pipette_launch.facts.model import GatedDelta, HybridLayers, LatentAttention, ModelSpec, SparseAttention
from pipette_launch.facts.plan import Choice, Plan, Provenance, Setting

__all__ = ["Batch", "Cell", "Choice", "Cluster", "ComputeCase", "ComputeTime", "Device", "GatedDelta", "Host"]
__all__ += ["HybridLayers", "Job", "LatentAttention", "Layout", "Links", "LoadingTime", "Measurements", "ModelSpec"]
__all__ += ["Plan", "Provenance", "Recompute", "Samples", "Setting", "SparseAttention"]
__all__ += ["StageReading"]
