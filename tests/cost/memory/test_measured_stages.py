"""A stage that was really run takes the place of its prediction, everywhere a layout's memory is looked at."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from facts_for_tests import tiny_cluster, tiny_job, tiny_measurements

from pipette_launch.cost.learned.corrected import CorrectedPredictor
from pipette_launch.cost.memory.overhead import overhead_of
from pipette_launch.cost.memory.peak import peak_memory_bytes
from pipette_launch.facts import Batch, Cluster, Job, Layout, Measurements, StageReading
from pipette_launch.facts.layout import LayoutColumns
from pipette_launch.facts.measurements import memory_digest

JOB = tiny_job(4, batch=Batch(global_batch_size=32))
PIPELINE, PLAIN = Layout(pp=2, dp=2), Layout(dp=4)
LAYOUTS = [PLAIN, PIPELINE, replace(PIPELINE, micro_batch_size=2), replace(PIPELINE, layers_per_chunk=(1, 3))]
GIB = 1 << 30


def on_gpus(cluster: Cluster) -> Cluster:
    """The same machines with GPUs."""
    hosts = tuple(
        replace(host, devices=tuple(replace(device, kind="cuda", name="NVIDIA H100") for device in host.devices))
        for host in cluster.hosts
    )
    return replace(cluster, hosts=hosts)


def reading(layout: Layout, pp_rank: int, peak: int, *, job: Job = JOB, ran_out: bool = False) -> StageReading:
    """A stage that held so much."""
    return StageReading(
        job_digest=memory_digest(job),
        layout=layout,
        pp_rank=pp_rank,
        slot=0,
        allocator_peak_bytes=peak,
        reserved_peak_bytes=0,
        device_peak_bytes=0,
        ran_out=ran_out,
    )


def measured(*readings: StageReading, cluster: Cluster | None = None) -> Measurements:
    """A warm-up that ran these."""
    return replace(tiny_measurements(cluster or tiny_cluster()), stages=readings)


def closed(layout: Layout) -> tuple[int, ...]:
    """The closed form."""
    return tuple(parts.total for parts in peak_memory_bytes(JOB, layout))


def test_only_the_stage_that_was_run_changes() -> None:
    """The other stage of the same layout, and every other layout, stay predictions; all ways to ask agree."""
    predictor = CorrectedPredictor(JOB, measured(reading(PIPELINE, 1, 12345678)))
    expected = [(closed(one)[0], 12345678) if one == PIPELINE else closed(one) for one in LAYOUTS]

    assert expected == [predictor.peaks(one) for one in LAYOUTS]
    assert tuple(expected) == predictor.all_peaks(LAYOUTS)
    assert [max(peaks) for peaks in expected] == list(predictor.fullest_N(LayoutColumns.of(LAYOUTS)))
    assert "Peak memory of stage 1 was measured by running it, not predicted." in predictor.notes(PIPELINE)
    assert not any("was measured by running" in note for note in predictor.notes(PLAIN))


def test_workspaces_are_not_counted_twice() -> None:
    """On a GPU they are inside what was read, and the limit leaves room for them already."""
    cluster = on_gpus(tiny_cluster())
    workspace = overhead_of(JOB, PLAIN, device_kind="cuda", device_name="NVIDIA H100").workspace.value
    predictor = CorrectedPredictor(JOB, measured(reading(PLAIN, 0, GIB), cluster=cluster))

    assert workspace > 0
    assert (GIB - workspace,) == predictor.peaks(PLAIN)


def test_a_stage_that_ran_out_of_memory_does_not_fit() -> None:
    """It needs at least all that the device has, whatever was reached before it failed."""
    cluster = tiny_cluster(memory_bytes=GIB)
    predictor = CorrectedPredictor(JOB, measured(reading(PLAIN, 0, 5, ran_out=True), cluster=cluster))

    assert (GIB,) == predictor.peaks(PLAIN)


def test_another_jobs_stages_tell_nothing() -> None:
    """Measurements outlive a job: those of another batch size, or of another number of slots, are passed over."""
    other = replace(JOB, batch=Batch(global_batch_size=64))
    larger = Layout(dp=8)
    found = measured(reading(PLAIN, 0, 5, job=other), reading(larger, 0, 5))

    assert closed(PLAIN) == CorrectedPredictor(JOB, found).peaks(PLAIN)
    assert closed(larger) == CorrectedPredictor(JOB, found).peaks(larger)


def test_what_measuring_showed_is_no_error_of_the_closed_form() -> None:
    """The correction leads back to the closed form of the fullest stage, from which outcomes learn."""
    predictor = CorrectedPredictor(JOB, measured(reading(PIPELINE, 1, 2 * max(closed(PIPELINE)))))
    peaks = predictor.peaks(PIPELINE)

    assert closed(PIPELINE)[1] == round(max(peaks) / predictor.memory_correction(PIPELINE))
    assert 1.0 == predictor.memory_correction(PLAIN)


def test_a_layouts_rows_are_found() -> None:
    """Every row of a layout and no other, also where it stands twice."""
    columns = LayoutColumns.of([*LAYOUTS, PIPELINE])

    assert [1, 4] == columns.rows_of(PIPELINE).tolist()
    assert [3] == columns.rows_of(LAYOUTS[3]).tolist()
    assert 0 == len(columns.rows_of(Layout(tp=4)))
    assert np.int64 == columns.rows_of(PIPELINE).dtype
