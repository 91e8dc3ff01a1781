"""Counts the iterations of a training run and sets its measured step time beside the predicted one."""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import TYPE_CHECKING

from pipette_launch import megatron
from pipette_launch.facts.measurements import Samples
from pipette_launch.facts.outcome import Outcome, PeakReading
from pipette_launch.text import plural, seconds_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipette_launch.facts import Choice
    from pipette_launch.megatron import Iteration, MemoryLine

ITERATIONS = 20
"""An outcome rests on at least so many iterations; one logged line may stand for several."""
STEADY_S = 10.0
"""Steady iterations of an outcome take at least so long: machines change their pace from one second to the next."""
COMPLETE = 2
"""In its second iteration a rank holds activations beside optimizer states, which the first one makes at its end."""
WARM_UPS = 5
"""The first ones, which carry compilation, lazy communicators and cold caches."""


class OutcomeTracker:
    """Collects the iteration lines of one attempt."""

    def __init__(self, key: str, choice: Choice) -> None:
        self._key = key
        self._choice = choice
        self._lines: list[Iteration] = []
        self._steady: list[Iteration] = []
        self._steady_s = 0.0
        self._memory: list[MemoryLine] = []
        self._is_done = False

    def add_memory(self, line: MemoryLine) -> None:
        """Take one memory line; the last of each rank counts, if its peak has seen a whole steady iteration."""
        self._memory.append(line)

    def add(self, line: Iteration) -> Outcome | None:
        """Take one logged line; returns the outcome with the line that completes it, and never again.

        A line that takes no time, or is no further than the one before it, is not counted.
        """
        is_further = not self._lines or line.iteration > self._lines[-1].iteration
        if self._is_done or not is_further or line.step_time_s <= 0:
            return None
        self._lines.append(line)
        if len(self._lines) == 1:
            return None
        before = self._lines[-2].iteration
        if before - self._before_first() >= WARM_UPS:
            self._steady.append(line)
            self._steady_s += line.step_time_s * (line.iteration - before)
        num_iterations = line.iteration - self._before_first()
        is_long = self._steady_s >= STEADY_S or line.iteration >= line.total
        if not self._steady or num_iterations < ITERATIONS or not is_long:
            return None
        self._is_done = True
        return self._outcome()

    def _before_first(self) -> int:
        """Return the last iteration before those that were logged.

        The first line stands for as many iterations as later ones where Megatron logs every so many iterations, and for
        one where a trainer logs its first iteration by itself.
        """
        first, second = self._lines[0].iteration, self._lines[1].iteration
        return first - (second - first if first % (second - first) == 0 else 1)

    def _outcome(self) -> Outcome:
        warm_ups = self._lines[: len(self._lines) - len(self._steady)]
        measured = Samples(
            values_s=tuple(line.step_time_s for line in self._steady),
            warmup_s=tuple(line.step_time_s for line in warm_ups),
        )
        predicted = self._choice.rate
        return Outcome(
            key=self._key,
            layout=self._choice.layout,
            placement=self._choice.placement,
            predicted_step_s=self._choice.step_time_s,
            measured_step=measured,
            first_iteration=self._lines[0].iteration,
            last_iteration=self._lines[-1].iteration,
            losses=tuple(line.loss or "" for line in self._lines),
            step_correction=self._choice.step_correction,
            features=self._choice.features,
            peaks=self._allocator_peaks(),
            rate=predicted.times(self._choice.step_time_s / measured.median_s) if predicted else None,
        )

    def _allocator_peaks(self) -> tuple[PeakReading, ...]:
        """What Megatron printed, of ranks whose peak has seen a whole steady iteration."""
        choice = self._choice
        before = self._before_first()
        last = {line.rank: line for line in self._memory if line.iteration - before >= COMPLETE}
        readings = []
        for rank, line in sorted(last.items()):
            if line.max_allocated_bytes == 0 or rank >= choice.layout.world_size:
                # The CPU backend's stand-in for the allocator holds nothing.
                continue
            stage = choice.layout.cell_of(rank).pp
            readings.append(
                PeakReading(
                    rank=rank,
                    pp_rank=stage,
                    predicted_bytes=round(choice.peak_memory_bytes[stage] / choice.memory_correction),
                    measured_bytes=line.max_allocated_bytes,
                    source="allocator",
                )
            )
        return tuple(readings)


def device_peaks(choice: Choice, used_bytes: Mapping[int, int]) -> tuple[PeakReading, ...]:
    """Set what devices hold beside what they should; the allocator keeps what it had reserved, so that is the peak.

    Args:
        choice: what runs.
        used_bytes: bytes that each RANK's device holds for this job.

    """
    if not choice.device_peak_bytes:
        return ()
    stages = {rank: choice.layout.cell_of(rank).pp for rank in sorted(used_bytes)}
    return tuple(
        PeakReading(
            rank=rank,
            pp_rank=stage,
            predicted_bytes=choice.device_peak_bytes[stage],
            measured_bytes=used_bytes[rank],
            source="device",
        )
        for rank, stage in stages.items()
        if used_bytes[rank] > 0
    )


if TYPE_CHECKING:
    from collections.abc import Callable

    from pipette_launch.facts.messages import Decision


class Recovery:
    """Follows one node from the end of its workers to the first iteration that it sees afterwards."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.iteration = 0
        """The last iteration that this node has seen in this attempt at training."""
        self._reached = 0
        self._ended_s = self._decided_s = 0.0

    def ended(self) -> None:
        """Take note that the workers have ended and the agents meet."""
        self._ended_s = self._clock()

    def decided(self, decision: Decision) -> None:
        """Take note of what the agents have agreed on."""
        if decision.phase == "train":
            self._reached, self.iteration = decision.iteration, 0
        self._decided_s = self._clock()

    def sees(self, iteration: int) -> str:
        """Take note of an iteration; returns what the user reads at the first one after a restart, else nothing."""
        reached, self._reached, self.iteration = self._reached, 0, iteration
        if not reached:
            return ""
        lost = max(reached - iteration + 1, 0)
        since = "the first step; no checkpoint was loaded" if iteration == 1 else f"iteration {iteration}"
        steps = f"{lost} {plural('step', lost)} of {reached} lost"
        met = seconds_text(self._decided_s - self._ended_s)
        return (
            f"training goes on with {since}: {steps}; {met} until the nodes had agreed, "
            f"{seconds_text(self._clock() - self._decided_s)} more until the first step was done"
        )


IGNORED_STEPS = 10
"""The first step times of an attempt, which count for nothing."""
WINDOW = 30
"""So many step times make the pace at the start, and so many the pace now: evaluations and checkpoints are fewer."""


class Slowdown:
    """Compares the pace of an attempt's last steps with that of its first."""

    def __init__(self, limit: float, *, restarts: bool) -> None:
        """Begin.

        Args:
            limit: by which fraction the steps may become longer.
            restarts: whether the machines are to be measured again when they do.

        """
        self._limit = limit
        self._restarts = restarts
        self.wants_restart = ""
        """Why the machines are to be measured again; empty while they are not."""
        self._num_seen = 0
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=WINDOW)
        self._is_told = False

    def add(self, step_time_s: float, iteration: int) -> str:
        """Add a step time; returns what the user reads when the limit is passed, once in an attempt, else nothing."""
        self._num_seen += 1
        if self._num_seen <= IGNORED_STEPS:
            return ""
        if len(self._first) < WINDOW:
            self._first.append(step_time_s)
            return ""
        self._last.append(step_time_s)
        if self._is_told or len(self._last) < WINDOW:
            return ""
        before_s, now_s = statistics.median(self._first), statistics.median(self._last)
        if now_s <= (1 + self._limit) * before_s:
            return ""
        self._is_told = True
        words = (
            f"steps take {now_s / before_s:.2f} times as long as at the start of this attempt: "
            f"{seconds_text(now_s)} (median of the last {WINDOW}, up to iteration {iteration}) instead of "
            f"{seconds_text(before_s)}"
        )
        if self._restarts:
            self.wants_restart = words
            return f"{words}; all machines are measured again"
        return f"{words}; --pipette-watch restart would measure all machines again and name the slow one"


if TYPE_CHECKING:
    from collections.abc import Collection

SETTLED_S = 600.0
"""A plan that cannot start mostly shows it within this time: imports, data, a checkpoint, the first step."""
SETTLED_STEPS = 20
"""And within this many steps, where steps are long."""


def has_trained(
    *, lived_s: float, step_time_s: float, exit_codes: Collection[int], saved_before: str, saved_now: str
) -> bool:
    """Whether a job that died without showing an iteration is taken to have trained, so that its plan is kept.

    Args:
        lived_s: from the workers' start to the first death.
        step_time_s: as predicted for the plan.
        exit_codes: of the workers that died.
        saved_before: the newest checkpoint when the workers started.
        saved_now: the newest checkpoint after their death.

    """
    return (
        saved_now != saved_before
        or bool(set(exit_codes) & set(megatron.RERUN_EXIT_CODES))
        or lived_s >= max(SETTLED_S, SETTLED_STEPS * step_time_s)
    )
