"""Peaks of stages that the warm-up really ran, in the place of predicted ones."""

from __future__ import annotations

from collections.abc import Sequence

from pipette_launch.cost.memory.overhead import overhead_of
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.measurements import Measurements, StageReading, memory_digest


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
        cluster = self._cluster
        device = cluster.hosts[0].devices[0].name
        overhead = overhead_of(self._job, layout, device_kind=cluster.device_kind, device_name=device)
        peaks = list(predicted)
        for rank, reading in known.items():
            if reading.ran_out:
                peaks[rank] = max(peaks[rank], cluster.memory_bytes)
            else:
                # The limit leaves room for workspaces; here they are part of what was read.
                peaks[rank] = max(reading.allocator_peak_bytes - int(overhead.workspace.value), 1)
        return tuple(peaks)

    def notes(self, layout: Layout) -> tuple[str, ...]:
        """Which of a layout's stages were run, one sentence; none where none was."""
        ranks = sorted(self._readings.get(layout, {}))
        if not ranks:
            return ()
        return (f"Peak memory of stage {', '.join(map(str, ranks))} was measured by running it, not predicted.",)
