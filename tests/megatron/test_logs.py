"""Iteration and memory lines of every release are read."""

from __future__ import annotations

import pytest

from pipette_launch.megatron import Iteration, MemoryLine, parse_iteration, parse_memory

LINE_0_14 = (
    " [2025-07-01 12:00:00] iteration        3/      10 | consumed samples:           96 | elapsed time per iteration "
    "(ms): 1234.5 | learning rate: 1.500000E-04 | global batch size:    32 | lm loss: 1.062345E+01 | loss scale: 1.0 | "
    "grad norm: 2.345 | number of skipped iterations:   0 | number of nan iterations:   0 |"
)
LINE_0_16 = (
    " [2026-01-05 12:00:00.123456] iteration      100/  500000 | consumed samples:       102400 | elapsed time per "
    "iteration (ms): 250.0 | throughput per GPU (TFLOP/s/GPU): 410.2 | energy per GPU (J/iter/GPU): 120.1 | power per "
    "GPU (W/GPU): 480.2 | learning rate: 3.000000E-04 | global batch size:  1024 | lm loss: 2.500000E+00 | load "
    "balancing loss: 1.0E+00 | loss scale: 1.0 | grad norm: 0.5 | number of skipped iterations:   0 | number of nan "
    "iterations:   0 |"
)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (LINE_0_14, Iteration(iteration=3, total=10, step_time_s=1.2345, loss="1.062345E+01")),
        (LINE_0_16, Iteration(iteration=100, total=500000, step_time_s=0.25, loss="2.500000E+00")),
        ("[default7]:" + LINE_0_16, Iteration(iteration=100, total=500000, step_time_s=0.25, loss="2.500000E+00")),
        (
            LINE_0_14.replace(" lm loss: 1.062345E+01 |", ""),
            Iteration(iteration=3, total=10, step_time_s=1.2345, loss=None),
        ),
        (LINE_0_14.replace("1.062345E+01", "INF"), Iteration(iteration=3, total=10, step_time_s=1.2345, loss="INF")),
        (" validation loss at iteration 10 | lm loss value: 1.0E+00 | lm loss PPL: 2.7E+00 |", None),
        ("", None),
    ],
)
def test_iteration_lines(line: str, expected: Iteration | None) -> None:
    """Each field is found wherever it stands; a NaN loss is a missing field; other lines are none."""
    assert expected == parse_iteration(line)


@pytest.mark.parametrize(
    "sizes",
    [
        "allocated: 1024.5 | max allocated: 2048.0 | reserved: 2100.0 | max reserved: 3000.0",
        "allocated: 1024.50 | max allocated: 2048.00 | reserved: 2100.00 | max reserved: 3000.00 | total device memory",
    ],
    ids=["0.14", "0.16"],
)
def test_memory_lines(sizes: str) -> None:
    """Megatron's MB are 2^20 bytes; fields behind the last are not needed."""
    mib = 1 << 20
    expected = MemoryLine(
        rank=6,
        iteration=2,
        allocated_bytes=1024 * mib + mib // 2,
        max_allocated_bytes=2048 * mib,
        reserved_bytes=2100 * mib,
        max_reserved_bytes=3000 * mib,
    )

    assert expected == parse_memory(f"[default6]:[Rank 6] (after 2 iterations) memory (MB) | {sizes}")


@pytest.mark.parametrize("line", ["", LINE_0_14, "[Rank 0] (before save_checkpoint for iteration 5) memory (MB) |"])
def test_other_lines_tell_no_memory(line: str) -> None:
    """Only what a training step left at its peak counts."""
    assert parse_memory(line) is None
