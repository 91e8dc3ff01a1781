"""Peaks of stages that the warm-up really ran, in the place of predicted ones."""

from __future__ import annotations

from collections.abc import Sequence

from pipette_launch.cost.memory.overhead import overhead_of
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.machines.device_memory import StageReading, memory_digest
from pipette_launch.facts.measurements import Measurements


class MeasuredStages:
    """What was read of a job's stages; nothing where another job was measured, or an earlier release did it.

    On CPU the tensors that were counted stand for the peak, as in every prediction: the resident set holds the
    interpreter and the heap's gaps too, of which no prediction knows.
    """

    def __init__(self, job: Job, measurements: Measurements) -> None:
        digest = memory_digest(job) if measurements.stages else ""
        self._job, self._cluster = job, measurements.cluster
        self._readings: dict[Layout, dict[int, StageReading]] = {}
        for reading in measurements.stages:
            if reading.job_digest == digest and reading.layout.world_size == self._cluster.num_slots:
                self._readings.setdefault(reading.layout, {})[reading.pp_rank] = reading

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Of which at least one stage was run."""
        return tuple(self._readings)

    def peaks(self, layout: Layout, predicted: Sequence[int]) -> tuple[int, ...]:
        """Peak bytes of the model's tensors on each pipeline rank: as measured where it was, else as predicted.

        A stage that ran out of memory holds at least what the device has.
        """
        known = self._readings.get(layout)
        if not known:
            return tuple(predicted)
        workspace = self._workspace_bytes(layout)
        return tuple(
            self._peak(known[rank], peak, workspace) if rank in known else peak for rank, peak in enumerate(predicted)
        )

    def notes(self, layout: Layout) -> tuple[str, ...]:
        """Which of a layout's stages were run, one sentence; none where none was."""
        ranks = sorted(self._readings.get(layout, {}))
        if not ranks:
            return ()
        return (f"Peak memory of stage {', '.join(map(str, ranks))} was measured by running it, not predicted.",)

    def _peak(self, reading: StageReading, predicted: int, workspace: int) -> int:
        if reading.ran_out:
            return max(predicted, self._cluster.memory_bytes)
        # The limit leaves room for workspaces; here they are part of what was read.
        return max(reading.allocator_peak_bytes - workspace, 1)

    def _workspace_bytes(self, layout: Layout) -> int:
        overhead = overhead_of(
            self._job,
            layout,
            device_kind=self._cluster.device_kind,
            device_name=self._cluster.hosts[0].devices[0].name,
        )
        return int(overhead.workspace.value)
