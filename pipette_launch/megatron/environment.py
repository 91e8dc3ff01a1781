"""The variables that a layout needs in its workers' environment."""

from __future__ import annotations

from pipette_launch.facts import Layout
from pipette_launch.facts.accelerators import compute_capability

_BLACKWELL = 10
"""From this capability on, Megatron no longer asks for a single connection."""


def environment(layout: Layout, *, device_kind: str, device_name: str) -> dict[str, str]:
    """Variables that a worker of this layout must have, beyond those of torchrun.

    Megatron asserts CUDA_DEVICE_MAX_CONNECTIONS=1 for tensor or context parallelism before Blackwell, and on CPU too,
    where the CPU backend shows it a device without a capability of its own.
    """
    if layout.tp == 1 and layout.cp == 1:
        return {}
    if device_kind == "cuda" and (compute_capability(device_name) or 0) >= _BLACKWELL:
        return {}
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
