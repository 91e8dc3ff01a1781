"""What waking costs: a layer that comes after a wait, as in a pipeline, finds the processor's caches cold.

On four hosts of 0.4 cores forward and backward of a layer took 1.2 to 1.7 ms of processor time more after waits of
20 ms each than in a row, whatever the layer's size: 3 to 4 ms of each pass of each chunk.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

from pipette_launch.facts import ComputeCase, Job
from pipette_launch.facts.measurements import LAYERS
from pipette_launch.probe.compute.timing import Stopwatch, run_part
from pipette_patches.workload.layers import Part, workload

WAIT_S = 0.02
"""Others compute meanwhile."""
TOKENS = 32
"""On each rank: what is sought does not grow with them, and would be lost in the scatter of a long layer."""
WARMUPS, VALUES = 1, 7


def wake_s(job: Job, case: ComputeCase, stopwatch: Stopwatch) -> float:
    """Time it on a few tokens of a layer that is cut as in this case; on a CPU.

    No process group may exist in this process.

    Raises:
        WorkloadError: megatron-core refuses the case.

    """
    length = min(job.model.seq_length, TOKENS * case.tp * case.cp)
    short = replace(job, model=replace(job.model, seq_length=length))
    with workload(short, replace(case, micro_batch_size=1), device_kind="cpu") as work:
        return time_wake(next(part for part in work.parts if part.name in LAYERS), stopwatch)


def time_wake(layer: Part, stopwatch: Stopwatch, sleep: Callable[[float], None] = time.sleep) -> float:
    """Return how much longer forward and backward of a layer take together where each comes after a wait.

    Beside what a layer takes behind another; noise does not make it negative.
    """

    def turn() -> float:
        stopwatch.look()
        one, two = (sum(run_part(layer, layer.forward, length, stopwatch)) for length in (1, 2))
        return _after_waits_s(layer, stopwatch, sleep) - (two - one)

    with layer.accumulating():
        found = [turn() for _ in range(WARMUPS + VALUES)]
    return max(statistics.median(found[WARMUPS:]), 0.0)


def _after_waits_s(layer: Part, stopwatch: Stopwatch, sleep: Callable[[float], None]) -> float:
    sleep(WAIT_S)
    begun = stopwatch.mark()
    output = layer.forward(1)
    forward_s = stopwatch.seconds(begun, stopwatch.mark())
    sleep(WAIT_S)
    begun = stopwatch.mark()
    layer.backward(output)
    return forward_s + stopwatch.seconds(begun, stopwatch.mark())
