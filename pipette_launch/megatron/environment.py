"""The variables that a layout needs in its workers' environment."""

from __future__ import annotations

import re

from pipette_launch.facts import Layout

NO_CONNECTION_LIMIT = re.compile(r"\b(G?B[123]00|RTX PRO \d+ Blackwell|RTX 50\d0|Thor)\b")
"""Names of GPUs of capability 10 and later, where Megatron no longer asks for a single connection."""


def environment(layout: Layout, *, device_kind: str, device_name: str) -> dict[str, str]:
    """Variables that a worker of this layout must have, beyond those of torchrun.

    Megatron asserts CUDA_DEVICE_MAX_CONNECTIONS=1 for tensor or context parallelism before Blackwell, and on CPU too,
    where the CPU backend shows it a device without a capability of its own.
    """
    if layout.tp == 1 and layout.cp == 1:
        return {}
    if device_kind == "cuda" and NO_CONNECTION_LIMIT.search(device_name):
        return {}
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
