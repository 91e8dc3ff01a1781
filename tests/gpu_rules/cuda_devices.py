"""A stand-in for `torch.cuda` that counts the devices of a host as CUDA does.

Rules are those of the CUDA C++ Programming Guide, CUDA Environment Variables.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pytest


def enumerated(uuids: Sequence[str], speeds: Sequence[float], environ: Mapping[str, str]) -> list[str]:
    """Return the UUIDs in CUDA's order, given in PCI bus order.

    CUDA_DEVICE_ORDER is FASTEST_FIRST by default. Equally fast devices keep their order.
    """
    order = list(range(len(uuids)))
    if environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        order.sort(key=lambda index: -speeds[index])
    return [uuids[index] for index in order]


def install(monkeypatch: pytest.MonkeyPatch, uuids: Sequence[str]) -> list[int]:
    """Let `torch.cuda` report devices with these UUIDs, as NVML writes them; returns the ordinals that are set."""
    taken: list[int] = []
    # torch writes a UUID without NVML's prefix (torch/csrc/cuda/Module.cpp, uuid_to_string).
    known = [SimpleNamespace(uuid=uuid.removeprefix("GPU-")) for uuid in uuids]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(known))
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: taken[-1])
    monkeypatch.setattr(torch.cuda, "get_device_properties", known.__getitem__)
    return taken
