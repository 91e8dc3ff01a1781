"""What a launcher writes is what a watcher reads."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from launch.display.test_metrics import RATED, TRAINING, printed

from pipette_launch.errors import FileFormatError
from pipette_launch.launch.cache.plans import Cache
from pipette_launch.launch.display.metrics import KEPT, MetricsFile
from pipette_launch.launch.live.figures import read_job, samples_of
from pipette_launch.probe.messages import PhaseEnd, Sign


def kept(root: Path, *, decides: bool = True, now_s: float = 1000.0) -> MetricsFile:
    """A launcher that trains and keeps figures in the folder `k`."""
    metrics = MetricsFile(None, script='pre"train\\.py', now=lambda: now_s)
    metrics.decided(TRAINING, Cache(root, "k"), decides=decides)
    return metrics


def test_all_figures_come_back(tmp_path: Path) -> None:
    """Names with quotes and backslashes too."""
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
    """Its phase, how far it is, and what has ended."""
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
    beside = tmp_path / "k" / "metrics.measured.prom"

    assert (7, 0.5, "training") == (read_job(path, 1.0).iteration, read_job(path, 1.0).step_s, "training")
    os.utime(beside, (999, 999))
    assert read_job(path, 1.0).iteration is None


@pytest.mark.parametrize(
    "text", ["pipette_nodes nan\n", "pipette_nodes 1e400\n", "pipette_nodes 1-2\n", "\x1b[2J\n", "other 1\n"]
)
def test_what_is_none_of_ours_is_named(text: str) -> None:
    """By file and line, and without a traceback."""
    with pytest.raises(FileFormatError, match=r"x\.prom: line 2 is no metric"):
        samples_of(f"# HELP\n{text}", "x.prom")


def test_a_metric_of_another_version_is_no_error() -> None:
    """It is not shown."""
    assert [({}, 1.0)] == samples_of("pipette_new_figure 1\n", "x.prom")["new_figure"]
