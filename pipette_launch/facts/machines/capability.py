"""CUDA's compute capability of a GPU, told by its name."""

from __future__ import annotations

CAPABILITIES = {
    10: ("B100", "B200", "B300"),
    9: ("H100", "H200", "H800", "H20", "GH200"),
    8: ("A100", "A800", "A30", "A10", "A40", "A6000", "L4", "L40", "RTX 30", "RTX-30", "RTX 40", "RTX-40", "4090"),
    7: ("V100", "T4", "TITAN RTX"),
}
"""Major numbers, by what names contain; the first that fits counts."""


def compute_capability(device_name: str) -> int | None:
    """Return the major number of a GPU's capability, by its name; None for an unknown one."""
    for capability, names in CAPABILITIES.items():
        if any(name in device_name.upper() for name in names):
            return capability
    return None
