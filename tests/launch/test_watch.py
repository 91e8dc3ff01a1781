"""The documents that a launcher writes, read by a watcher."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from launch.test_metrics import RATED, TRAINING, printed
from pages import drawn

from pipette_launch.errors import FileFormatError, UsageError
from pipette_launch.facts import files
from pipette_launch.launch.cache import Cache
from pipette_launch.launch.metrics import KEPT, MetricsFile
from pipette_launch.launch.watch import Watched, document_at, read_job
from pipette_launch.probe.messages import PhaseEnd, Sign


def kept(root: Path, *, decides: bool = True, now_s: float = 1000.0) -> MetricsFile:
    """Return the metrics of a launcher that trains and writes into the folder `k`."""
    metrics = MetricsFile(None, script='pre"train\\.py', now=lambda: now_s)
    metrics.decided(TRAINING, Cache(root, "k"), decides=decides)
    return metrics


def test_all_figures_come_back(tmp_path: Path) -> None:
    """Names may have quotes and backslashes."""
    metrics = kept(tmp_path)
    metrics.lost(["node7"])
    metrics.iterated(printed(30, 2 * RATED.chosen.step_time_s))
    metrics.refresh()
    os.utime(tmp_path / "k" / KEPT, (1090, 1090))
    job = read_job(tmp_path / "k" / KEPT, 1100.0)

    assert ('pre"train\\.py', "node0", "training", 2, 1) == (job.script, job.host, job.phase, job.nodes, job.lost_nodes)
    assert (RATED.chosen.layout.words(), "1f1b", "k") == (job.layout, job.schedule, job.key)
    assert (30, 100, 2.0, 1.0) == (job.iteration, job.iterations, job.step_s, job.predicted_step_s)
    assert (500.0, 1000.0) == (job.tokens_per_s, job.predicted_tokens_per_s)
    assert max(RATED.chosen.memory_shown.need_bytes) == job.memory_need_bytes
    assert (1000.0, 1000.0, 1000.0) == (job.began_s, job.phase_began_s, job.printed_s)
    assert 10.0 == job.age_s


def test_a_warm_up_comes_back(tmp_path: Path) -> None:
    """Its part, its progress and its ended parts come back."""
    metrics = kept(tmp_path)
    warmup = replace(TRAINING, phase="warmup", plan=None, probe_options="{}")
    metrics.decided(warmup, Cache(tmp_path, "k"), decides=True)
    ended = (PhaseEnd(phase="start", seconds=3.5, words=""),)
    metrics.warming_up(Sign(phase="links", at_s=1.0, limit_s=9.0, done=3, total=7, ended=ended))
    metrics.refresh()
    job = read_job(tmp_path / "k" / KEPT, 1100.0)

    assert ("links", 3, 7, {"start": 3.5}) == (
        job.warmup_phase,
        job.warmup_done,
        job.warmup_total,
        job.warmup_phase_s,
    )


def test_what_another_node_measured_is_added(tmp_path: Path) -> None:
    """Unless its file is of an earlier attempt."""
    kept(tmp_path)
    other = kept(tmp_path, decides=False)
    other.iterated(printed(7, 0.5))
    other.refresh()
    path = tmp_path / "k" / KEPT
    beside = tmp_path / "k" / "live.measured.json"

    assert (7, 0.5, "training") == (read_job(path, 1.0).iteration, read_job(path, 1.0).step_s, "training")
    os.utime(beside, (999, 999))
    assert read_job(path, 1.0).iteration is None


def test_a_job_is_found_by_all_its_names(tmp_path: Path) -> None:
    """A cache means its newest job. A folder, its plan.json and its document mean the job of the folder."""
    for age, key in enumerate(("new", "old")):
        metrics = kept(tmp_path)
        metrics.decided(TRAINING, Cache(tmp_path, key), decides=True)
        os.utime(tmp_path / key / KEPT, (1000 - age, 1000 - age))
    found, old = tmp_path / "new" / KEPT, tmp_path / "old" / KEPT

    assert found == document_at(tmp_path)
    assert {old} == {document_at(old), document_at(old.parent), document_at(old.with_name("plan.json"))}


def test_where_there_is_no_job_a_sentence_says_so(tmp_path: Path) -> None:
    """A folder without figures, a file that is not there, and a cache that everybody may write."""
    for where in (tmp_path, tmp_path / "x.prom"):
        with pytest.raises(UsageError, match="no running job has left its state there"):
            document_at(where)
    kept(tmp_path)
    (tmp_path / "k").chmod(0o777)
    with pytest.raises(UsageError, match="may be written by everybody"):
        document_at(tmp_path)


def test_each_step_counts_once(tmp_path: Path) -> None:
    """However often it is looked at; the end leaves them, another attempt begins anew."""
    metrics = kept(tmp_path)
    watched = Watched(tmp_path)
    assert () == (watched.look(1.0), watched.steps_s)[1]
    metrics.iterated(printed(1, 0.5))
    metrics.refresh()
    watched.look(1.0)
    watched.look(2.0)
    assert (0.5,) == watched.steps_s
    metrics.ended(failed=True)
    watched.look(3.0)
    assert (0.5,) == watched.steps_s
    metrics.known = replace(metrics.known, phase="training", phase_began_s=5000.0, step_s=None, printed_s=None)
    metrics.refresh()
    watched.look(4.0)
    assert () == watched.steps_s


def test_it_goes_with_the_job_to_another_plan(tmp_path: Path) -> None:
    """While nothing can be read the last state is shown. A document that could never be read is an error."""
    metrics = kept(tmp_path)
    watched = Watched(tmp_path / "k")
    watched.look(1.0)
    metrics.decided(TRAINING, Cache(tmp_path, "other"), decides=True)
    assert "training" == watched.look(2.0).phase
    watched.look(3.0)
    (tmp_path / "other" / KEPT).write_text("broken")
    assert 4.0 == watched.look(4.0).read_s
    with pytest.raises(FileFormatError):
        Watched(tmp_path / "other").look(1.0)


def test_verdicts_are_those_of_the_measurements_beside(tmp_path: Path) -> None:
    """The job is in a cache."""
    kept(tmp_path)
    files.write(tmp_path / "k" / "cluster.json", drawn().measurements)

    assert drawn().measurements.verdicts == Watched(tmp_path).look(1.0).verdicts
