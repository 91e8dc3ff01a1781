"""The printed lines are Megatron's to the character, and the launcher's own reader understands them."""

import dataclasses
from datetime import datetime, timezone

import log_lines

from pipette_launch import megatron

NOW = datetime(2026, 11, 21, 9, 31, 35, 841571, tzinfo=timezone.utc)
LINE = log_lines.Iteration(
    iteration=7,
    train_iters=300,
    consumed_samples=112,
    step_time_s=0.0951,
    tflops_per_device=None,
    learning_rate=3e-3,
    global_batch_size=16,
    loss=2.5,
    loss_scale=1.0,
    grad_norm=0.4731,
    num_skipped=0,
    num_nan=0,
)


def test_iteration_line() -> None:
    """Field for field as Megatron-LM 0.16 prints it."""
    assert (
        " [2026-11-21 09:31:35.841571] iteration        7/     300 | consumed samples:          112 | "
        "elapsed time per iteration (ms): 95.1 | learning rate: 3.000000E-03 | global batch size:    16 | "
        "lm loss: 2.500000E+00 | loss scale: 1.0 | grad norm: 0.473 | number of skipped iterations:   0 | "
        "number of nan iterations:   0 |"
    ) == LINE.line(NOW)


def test_the_launcher_reads_it() -> None:
    """The reader that predicted steps are compared with finds iteration, time and loss."""
    read = megatron.parse_iteration(LINE.line(NOW))

    assert read is not None
    assert (7, 300, 0.0951, "2.500000E+00") == (read.iteration, read.total, round(read.step_time_s, 6), read.loss)


def test_fields_that_come_and_go() -> None:
    """Throughput is printed when asked for; a loss that is not above zero and a missing norm are not."""
    line = dataclasses.replace(LINE, tflops_per_device=1.25, loss=float("nan"), grad_norm=None).line(NOW)

    assert " | throughput per GPU (TFLOP/s/GPU): 1.2 | " in line
    assert ["lm loss" in line, "grad norm" in line] == [False, False]


def test_validation_lines() -> None:
    """Megatron's evaluation stands between rules one longer than its text."""
    rule, text, again = log_lines.validation("iteration 100", 2.0).splitlines()

    assert " validation loss at iteration 100 | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 | " == text
    assert rule == again == "-" * (len(text) + 1)


def test_a_tally_means_over_what_counted() -> None:
    """Skipped iterations take time but give no loss; pauses take no time."""
    tally = log_lines.Tally(10.0)
    tally.add(3.0, skipped=False)
    tally.add(float("inf"), skipped=True)
    tally.add(5.0, skipped=False)
    tally.pause(4.0)

    assert (4.0, 1, 1, 2.0) == (tally.loss, tally.num_skipped, tally.num_nan, tally.step_time_s(20.0))


def test_memory_line() -> None:
    """Megabytes are 2^20 bytes, as Megatron counts them."""
    names = ("allocated_bytes.all.current", "allocated_bytes.all.peak", "reserved_bytes.all.current")
    stats = dict.fromkeys((*names, "reserved_bytes.all.peak"), 3 << 20)

    assert (
        "[Rank 2] (after 1 iterations) memory (MB) | allocated: 3.00 | max allocated: 3.00 | reserved: 3.00 | "
        "max reserved: 3.00"
    ) == log_lines.memory(2, 1, stats)
