"""The lines that a training prints, field for field as Megatron-LM prints them, so that its readers read these too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """Figures of one line, about the iterations since the line before."""

    iteration: int
    train_iters: int
    consumed_samples: int
    step_time_s: float
    tflops_per_device: float | None
    """None leaves the field out."""
    learning_rate: float
    global_batch_size: int
    loss: float
    """The mean over the iterations that were not skipped."""
    loss_scale: float
    grad_norm: float | None
    num_skipped: int
    num_nan: int

    def line(self, now: datetime) -> str:
        """Write the line. A loss that is NaN or not above zero is left out, as Megatron does."""
        fields = [
            f" [{now:%Y-%m-%d %H:%M:%S.%f}] iteration {self.iteration:8d}/{self.train_iters:8d}",
            f"consumed samples: {self.consumed_samples:12d}",
            f"elapsed time per iteration (ms): {self.step_time_s * 1000:.1f}",
        ]
        if self.tflops_per_device is not None:
            fields.append(f"throughput per GPU (TFLOP/s/GPU): {self.tflops_per_device:.1f}")
        fields += [f"learning rate: {self.learning_rate:.6E}", f"global batch size: {self.global_batch_size:5d}"]
        if self.loss > 0:
            fields.append(f"lm loss: {self.loss:.6E}")
        fields.append(f"loss scale: {self.loss_scale:.1f}")
        if self.grad_norm is not None:
            fields.append(f"grad norm: {self.grad_norm:.3f}")
        fields.append(f"number of skipped iterations: {self.num_skipped:3d}")
        fields.append(f"number of nan iterations: {self.num_nan:3d}")
        return " | ".join(fields) + " |"


def validation(prefix: str, loss: float) -> str:
    """Write the line of an evaluation between its two rules."""
    perplexity = math.exp(min(20.0, loss))
    text = f" validation loss at {prefix} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity:.6E} | "
    rule = "-" * (len(text) + 1)
    return f"{rule}\n{text}\n{rule}"


def memory(rank: int, iteration: int, stats: Mapping[str, int]) -> str:
    """Write the memory line of a rank from the statistics of torch's CUDA allocator."""
    fields = {
        "allocated": "allocated_bytes.all.current",
        "max allocated": "allocated_bytes.all.peak",
        "reserved": "reserved_bytes.all.current",
        "max reserved": "reserved_bytes.all.peak",
    }
    parts = [f"{name}: {stats[key] / 2**20:.2f}" for name, key in fields.items()]
    return f"[Rank {rank}] (after {iteration} iterations) memory (MB) | {' | '.join(parts)}"


class Tally:
    """Sums since the last line."""

    def __init__(self, now_s: float) -> None:
        self._started_s = now_s
        self._paused_s = 0.0
        self._losses: list[float] = []
        self.num_skipped = 0
        self.num_nan = 0

    def add(self, loss: float, *, skipped: bool) -> None:
        """Count one iteration; the loss of a skipped one counts only where it is not finite."""
        if skipped:
            self.num_skipped += 1
            self.num_nan += not math.isfinite(loss)
        else:
            self._losses.append(loss)

    def pause(self, seconds: float) -> None:
        """Take evaluation and checkpoints out of the step time."""
        self._paused_s += seconds

    @property
    def loss(self) -> float:
        """The mean loss; 0 when all iterations were skipped."""
        return sum(self._losses) / max(1, len(self._losses))

    def step_time_s(self, now_s: float) -> float:
        """Seconds of one iteration."""
        return (now_s - self._started_s - self._paused_s) / (len(self._losses) + self.num_skipped)
