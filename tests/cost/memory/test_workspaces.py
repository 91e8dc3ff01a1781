"""Workspaces of matrix libraries have the sizes of their sources, whatever the device and the environment."""

from __future__ import annotations

import pytest
from facts_for_tests import tiny_job, tiny_model

from pipette_launch.cost.memory.workspaces import cublas_workspace_bytes, workspace_bytes
from pipette_launch.text import MIB

A100, H100, B200 = 8, 9, 10
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


@pytest.mark.parametrize(
    ("capability", "environment", "expected"),
    [
        (A100, {}, 2 * 4 * MIB + 128 * 1024),
        (A100, DETERMINISTIC, 32 * MIB),
        (A100, {"CUBLAS_WORKSPACE_CONFIG": ":4096:2:16:8"}, 8 * MIB + 128 * 1024),
        (A100, {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, 128 * 1024),
        (H100, {"CUBLAS_WORKSPACE_CONFIG": "lots"}, 32 * MIB),
        (H100, {}, 32 * MIB),
        (B200, {}, 32 * MIB),
        (H100, DETERMINISTIC, 32 * MIB),
    ],
)
def test_one_cublas_workspace(capability: int, environment: dict[str, str], expected: int) -> None:
    """The environment counts before the device."""
    assert cublas_workspace_bytes(capability, environment) == expected


@pytest.mark.parametrize(
    ("impl", "capability", "expected"),
    [
        ("local", A100, 64 * MIB),
        ("local", H100, 64 * MIB),
        ("transformer_engine", A100, 68 * MIB),
        ("transformer_engine", H100, 96 * MIB),
    ],
)
def test_two_threads_and_transformer_engine(impl: str, capability: int, expected: int) -> None:
    """Forward and backward threads, and one workspace of TransformerEngine's own."""
    job = tiny_job(model=tiny_model(transformer_impl=impl))

    assert workspace_bytes(job, compute_capability=capability, environment=DETERMINISTIC) == expected


def test_grouped_gemms_have_four_more() -> None:
    """One for each of TransformerEngine's streams, and only where experts use them."""
    model = tiny_model(
        transformer_impl="transformer_engine", num_experts=4, moe_layer_freq=(1,) * 4, moe_ffn_hidden_size=128
    )
    plain = tiny_job(model=model)
    grouped = tiny_job(model=model, performance_flags=("--moe-grouped-gemm",))

    sizes = [workspace_bytes(job, compute_capability=A100, environment=DETERMINISTIC) for job in (plain, grouped)]

    assert sizes == [68 * MIB, 84 * MIB]


def test_overlapped_tensor_parallelism_has_three() -> None:
    """TransformerEngine's own workspace is three times as large; Megatron's own layers have none."""
    sizes = [
        workspace_bytes(
            tiny_job(model=tiny_model(transformer_impl=impl), performance_flags=("--tp-comm-overlap",)),
            compute_capability=H100,
            environment={},
        )
        for impl in ("transformer_engine", "local")
    ]

    assert sizes == [(64 + 96) * MIB, 64 * MIB]
