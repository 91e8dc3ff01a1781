"""Runs whole pipeline stages of the layouts that may win, one rank on each device, and measures their peak memory.

Every slot runs other stages at the same time, under a fake process group, after the communicators were closed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipette_launch.facts import StageReading
from pipette_launch.facts.measurements import memory_digest
from pipette_launch.facts.messages import StageCase
from pipette_launch.probe.compute.bench import Bench, state_bytes
from pipette_launch.probe.harness import Budget, Lockstep
from pipette_launch.text import MIB, bytes_text
from pipette_patches import whole_stage
from pipette_patches.whole_stage import StageRun, stage_words
from pipette_patches.workload.layers import is_out_of_memory

STAGES_SHARE = 1.0
LEFT_BYTES = 64 * MIB
"""Memory beside workspaces, before a stage runs, from which on a note reports it."""
HEAP_FACTOR = 1.6
"""On CPU the resident set grows by 1.12 to 1.61 times what the tensors hold (benchmarks/results/memory_cpu_*.md)."""


def cases_of(cases: Sequence[StageCase], slot: int, num_slots: int) -> tuple[StageCase | None, ...]:
    """One case or none of this slot for each turn; the most promising cases are measured first."""
    turns = -(-len(cases) // num_slots)
    return (*cases, *[None] * (turns * num_slots - len(cases)))[slot::num_slots]


@dataclass(kw_only=True)
class StageBench(Bench):
    """One slot, and what it has measured so far."""

    PHASE = "stages"

    workspace_bytes: int
    """Bytes of libraries' workspaces in the allocator after the first lap, which a training has too."""
    readings: list[StageReading] = field(default_factory=list)

    def measure(self, cases: Sequence[StageCase], lockstep: Lockstep, budget: Budget) -> None:
        """Go through this slot's cases until rank 0 finds the budget spent; every rank makes this call.

        No process group may be open. All slots end a turn together, so that rank 0 knows how long the slowest takes.
        """
        if not cases:
            return
        longest_s = 0.0

        def goes_on() -> bool:
            return budget.allows(STAGES_SHARE, needs_s=longest_s)

        for turn, case in enumerate(cases_of(cases, self.slot, self.options.num_slots)):
            if not lockstep.agree(goes_on):
                left = len(cases) - turn * self.options.num_slots
                if self.slot == 0:
                    self.notes.append(f"stages: {left} of {len(cases)} were not measured for want of time")
                return
            before_s = budget.clock()
            lockstep.progress.step(turn, -(-len(cases) // self.options.num_slots))
            if case is not None:
                self._measure(case)
            lockstep.barrier(budget.left_s())
            longest_s = max(longest_s, budget.clock() - before_s)

    def _measure(self, case: StageCase) -> None:
        words = stage_words(case.layout, case.pp_rank)
        least_bytes = state_bytes(self.options.job, case.layout, case.pp_rank)
        on_cpu = self.options.device_kind == "cpu"
        # On a GPU running out of memory is a result; only a stage that cannot begin is left out.
        needed_bytes = (
            int(HEAP_FACTOR * max(least_bytes, case.predicted_bytes))
            if on_cpu
            else least_bytes + self.meter.overhead_bytes()
        )
        with self.noting(words):
            self.check_room(words, needed_bytes)
            runs: list[StageRun] = []
            failures: list[BaseException] = []
            peak = self.meter.peak(lambda: self._run(case, runs, failures))
            kept_bytes = min(peak.idle_bytes, self.workspace_bytes)
            left_bytes = peak.idle_bytes - kept_bytes
            if left_bytes > LEFT_BYTES:
                self.notes.append(
                    f"stages: {words} ran beside {bytes_text(left_bytes)} that earlier layers left on slot "
                    f"{self.options.slot_name(self.slot)}; its peak is counted without them"
                )
            if runs:
                self.notes += runs[0].notes
            elif on_cpu:
                raise failures[0]
            else:
                self.note_out_of_memory(words)
            self.readings.append(
                StageReading(
                    job_digest=memory_digest(self.options.job),
                    layout=case.layout,
                    pp_rank=case.pp_rank,
                    slot=self.slot,
                    allocator_peak_bytes=runs[0].tally_bytes if on_cpu else peak.allocator_bytes + kept_bytes,
                    reserved_peak_bytes=max(peak.reserved_bytes - left_bytes, 0),
                    device_peak_bytes=peak.device_bytes,
                    ran_out=not runs,
                    allocator_config=self.options.job.allocator_config,
                )
            )

    def _run(self, case: StageCase, runs: list[StageRun], failures: list[BaseException]) -> None:
        """Run a stage; running out of memory is a result too, and the meter still reads the peak."""
        job, kind = self.options.job, self.options.device_kind
        try:
            runs.append(whole_stage.run_stage(job, case.layout, case.pp_rank, device_kind=kind))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            # The frames of the error would keep the tensors.
            failures.append(error.with_traceback(None))
