"""Variables follow the layout."""

from __future__ import annotations

import pytest

from pipette_launch.facts import Layout
from pipette_launch.megatron import environment


@pytest.mark.parametrize(
    ("layout", "kind", "name", "expected"),
    [
        (Layout(tp=2, etp=2), "cuda", "NVIDIA H200", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        (Layout(cp=2), "cuda", "NVIDIA A100-SXM4-80GB", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        (Layout(tp=2, etp=2), "cpu", "Some CPU", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        (Layout(tp=2, etp=2), "cuda", "NVIDIA B200", {}),
        (Layout(tp=2, etp=2), "cuda", "NVIDIA GB300", {}),
        (Layout(tp=2, etp=2), "cuda", "NVIDIA GeForce RTX 5090", {}),
        (Layout(tp=2, etp=2), "cuda", "RTX-PRO-6000-Server", {}),
        (Layout(tp=2, etp=2), "cuda", "NVIDIA RTX 6000 Ada Generation", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        (Layout(pp=2, dp=4), "cuda", "NVIDIA H200", {}),
    ],
)
def test_connections_follow_the_layout(layout: Layout, kind: str, name: str, expected: dict[str, str]) -> None:
    """One connection for tensor or context parallelism before Blackwell, none asked for otherwise."""
    assert expected == environment(layout, device_kind=kind, device_name=name)
