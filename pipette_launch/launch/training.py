"""Reads from a training's output the outcome, the cost of a restart, a slowdown, and whether the job trained."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

from pipette_launch import megatron
from pipette_launch.defaults import FIRST_ITERATION_S
from pipette_launch.facts import Choice
from pipette_launch.facts.measurements import Samples
from pipette_launch.facts.messages import Decision
from pipette_launch.facts.outcome import Outcome, PeakReading
from pipette_launch.megatron import Iteration, MemoryLine
from pipette_launch.text import plural, seconds_text

ITERATIONS = 20
"""Least number of iterations that an outcome covers. One line of the output may cover several iterations."""
STEADY_S = 10.0
"""Least duration (s) of an outcome's steady iterations, because the speed of machines varies from second to second."""
COMPLETE = 2
"""First iteration with activations and optimizer states, which iteration 1 creates at its end."""
WARM_UPS = 5
"""Number of first iterations that an outcome skips, because they include compilation and the start of communicators."""
IGNORED_STEPS = 10
"""Number of first step times of an attempt that the check for a slowdown skips."""
WINDOW = 30
"""Number of step times in a median. A median ignores evaluations and checkpoints, because these are rare."""
SETTLED_STEPS = 20
"""Number of steps within which a plan that cannot start fails if steps are long."""


class OutcomeTracker:
    """Collects the iteration lines of one attempt, and compares the measured step with the predicted one."""

    def __init__(self, key: str, choice: Choice) -> None:
        self._key = key
        self._choice = choice
        self._lines: list[Iteration] = []
        self._steady: list[Iteration] = []
        self._steady_s = 0.0
        self._memory: list[MemoryLine] = []
        self._is_done = False

    def add_memory(self, line: MemoryLine) -> None:
        """Add a memory line; the outcome uses each rank's last line whose peak covers a whole steady iteration."""
        self._memory.append(line)

    def add(self, line: Iteration) -> Outcome | None:
        """Add an iteration line of the output. Return the outcome once, at the line that completes the outcome.

        Lines without a step time, and lines that do not advance the iteration, are ignored.
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
        self._is_done = bool(self._steady) and num_iterations >= ITERATIONS and is_long
        return self._outcome() if self._is_done else None

    def _before_first(self) -> int:
        """Return the iteration before the first iteration that the first logged line covers.

        If Megatron logs every N iterations, the first line covers N iterations, as later lines do. Some trainers log
        their first iteration alone, and then the first line covers 1 iteration.
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
            configuration_digest=self._choice.configuration_digest,
            peaks=self._allocator_peaks(),
            rate=predicted.times(self._choice.step_time_s / measured.median_s) if predicted else None,
        )

    def _allocator_peaks(self) -> tuple[PeakReading, ...]:
        choice, before = self._choice, self._before_first()
        # The memory line has 0 if the CPU patch replaces torch's CUDA allocator.
        peaks = {
            line.rank: line.max_allocated_bytes
            for line in self._memory
            if line.iteration - before >= COMPLETE and line.rank < choice.layout.world_size
        }
        memory = choice.memory
        predicted = [round(peak / memory.correction) for peak in memory.model_bytes]
        return _readings(choice, peaks, predicted, "allocator")


def device_peaks(choice: Choice, used_bytes: Mapping[int, int]) -> tuple[PeakReading, ...]:
    """Compare the memory (bytes) that each RANK's device holds for this job with the prediction.

    The memory in use equals the peak, because torch's allocator does not return reserved memory.
    """
    return _readings(choice, used_bytes, choice.memory.need_bytes, "device")


def _readings(
    choice: Choice, used_bytes: Mapping[int, int], predicted_bytes: Sequence[int], source: str
) -> tuple[PeakReading, ...]:
    """Return a memory reading of each RANK that used memory; `predicted_bytes` has a number for each pipeline stage.

    The memory of a substitute choice belongs to another layout, so there is no reading if the stages differ.
    """
    if len(predicted_bytes) != choice.layout.pp:
        return ()
    stages = {rank: choice.layout.cell_of(rank).pp for rank, used in sorted(used_bytes.items()) if used > 0}
    return tuple(
        PeakReading(
            rank=rank,
            pp_rank=stage,
            predicted_bytes=predicted_bytes[stage],
            measured_bytes=used_bytes[rank],
            source=source,
        )
        for rank, stage in stages.items()
    )


class Recovery:
    """Measures the cost of a restart on one node, from the end of the workers to the next iteration in their output."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.iteration = 0
        """Last iteration that this node read in the output of this attempt."""
        self._reached = 0
        self._ended_s = self._decided_s = 0.0

    def ended(self) -> None:
        """Note the time at which this node's workers have ended and the agents meet."""
        self._ended_s = self._clock()

    def decided(self, decision: Decision) -> None:
        """Note the time at which the agents have agreed on a decision."""
        if decision.phase == "train":
            self._reached, self.iteration = decision.iteration, 0
        self._decided_s = self._clock()

    def sees(self, iteration: int) -> str:
        """Note an iteration; return a sentence for the user at the first iteration after a restart, else ""."""
        reached, self._reached, self.iteration = self._reached, 0, iteration
        if not reached:
            return ""
        lost = max(reached - iteration + 1, 0)
        since = "the first step; no checkpoint was loaded" if iteration == 1 else f"iteration {iteration}"
        agreed, first = self._decided_s - self._ended_s, self._clock() - self._decided_s
        return (
            f"training goes on with {since}: {lost} {plural('step', lost)} of {reached} lost; {seconds_text(agreed)} "
            f"until the nodes agreed, then {seconds_text(first)} until the first step was done"
        )


class Slowdown:
    """Compares the last step times of an attempt with its first step times."""

    def __init__(self, limit: float, *, restarts: bool) -> None:
        """Begin; `limit` is the fraction by which steps may become longer."""
        self._limit = limit
        self._restarts = restarts
        self.wants_restart = ""
        """Sentence for the user if the slowdown requests a new measurement of the machines; else empty."""
        self._num_seen = 0
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=WINDOW)
        self._is_told = False

    def add(self, step_time_s: float, iteration: int) -> str:
        """Add a step time; return a sentence once, when the median step exceeds the limit, else an empty text."""
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
        return f"{words}; with --pipette-watch restart all machines would be measured again, to find the slow one"


def has_trained(
    *, lived_s: float, runs: Choice | None, exit_codes: Collection[int], saved_before: str, saved_now: str
) -> bool:
    """Return whether a job that died without printing an iteration counts as trained, so that its plan is kept.

    `lived_s` is the time from start to first death; `saved_before` and `saved_now` name the newest checkpoint at both.
    `runs` is the configuration of a plan; None without a plan.
    """
    # Imports, data, a checkpoint and the first step take as long as in a trial.
    starts_s = FIRST_ITERATION_S.of(runs.layout.world_size if runs else 0)
    steps_s = SETTLED_STEPS * runs.step_time_s if runs else 0.0
    return (
        saved_now != saved_before
        or bool(set(exit_codes) & set(megatron.RERUN_EXIT_CODES))
        or lived_s >= max(starts_s, steps_s)
    )
