"""Division of a step's micro-batches among pipelines of unequal speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipelines:
    """Equal pipelines: a step with m micro-batches takes `fixed_s + m * each_s`."""

    count: int
    fixed_s: float
    each_s: float

    def fit(self, step_s: float) -> int:
        """Number of micro-batches that each pipeline runs in the given seconds."""
        return int((step_s - self.fixed_s) / self.each_s * (1 + 1e-12)) if step_s > self.fixed_s else 0


def shared_step_s(pipelines: Sequence[Pipelines], microbatches: int) -> float | None:
    """Seconds of the step where each pipeline takes as many micro-batches as makes the slowest one as quick as can be.

    Each takes at least one; None where there are fewer micro-batches than pipelines.
    """
    if microbatches < sum(one.count for one in pipelines):
        return None
    low_s = max(one.fixed_s + one.each_s for one in pipelines)

    def suffices(step_s: float) -> bool:
        return sum(one.count * one.fit(step_s) for one in pipelines) >= microbatches

    if suffices(low_s):
        return low_s
    high_s = max(one.fixed_s + one.each_s * microbatches for one in pipelines)
    # The answer is the end of some pipeline's last micro-batch: only those ends are tried once they are few.
    for _ in range(60):
        middle_s = (low_s + high_s) / 2
        low_s, high_s = (low_s, middle_s) if suffices(middle_s) else (middle_s, high_s)
    return max(one.fixed_s + one.each_s * one.fit(high_s) for one in pipelines)


def depths(stages: int, pipelines: int) -> tuple[tuple[int, int], ...]:
    """Depth and count of pipelines that together have the given number of stages and differ by one stage at most."""
    depth, deeper = divmod(stages, pipelines)
    return tuple((size, count) for size, count in ((depth, pipelines - deeper), (depth + 1, deeper)) if count and size)
