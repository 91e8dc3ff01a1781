"""What waking costs: a layer that comes after a wait, as in a pipeline, finds the processor's caches cold.

On four hosts of 0.4 cores forward and backward of a layer took 1.2 to 1.7 ms of processor time more after waits of
20 ms each than in a row, whatever the layer's size: 3 to 4 ms of each pass of each chunk.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from pipette_launch.probe.timing import Habits, Stopwatch, num_values, run_part
from pipette_patches.workload import Part

WAIT_S = 0.02
"""Others compute meanwhile."""


def time_wake(
    layer: Part, *, stopwatch: Stopwatch, habits: Habits, sleep: Callable[[float], None] = time.sleep
) -> float:
    """Return how much longer forward and backward of a layer take together where each comes after a wait.

    Beside what a layer takes behind another; noise does not make it negative.
    """

    def turn() -> float:
        one, two = (sum(run_part(layer, layer.forward, length, stopwatch)) for length in (1, 2))
        return _after_waits_s(layer, stopwatch, sleep) - (two - one)

    with layer.accumulating():
        before = stopwatch.mark()
        turn()
        taken_s = stopwatch.seconds(before, stopwatch.mark())
        return max(statistics.median(turn() for _ in range(num_values(taken_s, habits))), 0.0)


def _after_waits_s(layer: Part, stopwatch: Stopwatch, sleep: Callable[[float], None]) -> float:
    sleep(WAIT_S)
    begun = stopwatch.mark()
    output = layer.forward(1)
    forward_s = stopwatch.seconds(begun, stopwatch.mark())
    sleep(WAIT_S)
    begun = stopwatch.mark()
    layer.backward(output)
    return forward_s + stopwatch.seconds(begun, stopwatch.mark())
