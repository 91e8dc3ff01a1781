"""Which job is meant, and what is remembered of it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from launch.display.test_metrics import TRAINING, printed
from launch.live.test_figures import kept
from pages import drawn

from pipette_launch.errors import FileFormatError, UsageError
from pipette_launch.facts import files
from pipette_launch.launch.cache.plans import Cache
from pipette_launch.launch.display.metrics import KEPT
from pipette_launch.launch.live.watched import Watched, figures_at


def test_a_job_is_found_by_all_its_names(tmp_path: Path) -> None:
    """A cache means the newest job in it; a folder, its plan.json and its metrics file mean that one."""
    for age, key in enumerate(("new", "old")):
        metrics = kept(tmp_path)
        metrics.decided(TRAINING, Cache(tmp_path, key), decides=True)
        os.utime(tmp_path / key / KEPT, (1000 - age, 1000 - age))
    found, old = tmp_path / "new" / KEPT, tmp_path / "old" / KEPT

    assert found == figures_at(tmp_path)
    assert {old} == {figures_at(old), figures_at(old.parent), figures_at(old.with_name("plan.json"))}


def test_where_there_is_no_job_a_sentence_says_so(tmp_path: Path) -> None:
    """A folder without figures, a file that is not there, and a cache that everybody may write."""
    for where in (tmp_path, tmp_path / "x.prom"):
        with pytest.raises(UsageError, match="no job has written figures there"):
            figures_at(where)
    kept(tmp_path)
    (tmp_path / "k").chmod(0o777)
    with pytest.raises(UsageError, match="may be written by everybody"):
        figures_at(tmp_path)


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
    metrics.known = replace(metrics.known, phase="training", phase_began_s=5000.0, iteration=None)
    metrics.refresh()
    watched.look(4.0)
    assert () == watched.steps_s


def test_it_goes_with_the_job_to_another_plan(tmp_path: Path) -> None:
    """And shows the last figures while nothing can be read; what never could be read is an error."""
    metrics = kept(tmp_path)
    watched = Watched(tmp_path / "k")
    watched.look(1.0)
    metrics.decided(TRAINING, Cache(tmp_path, "other"), decides=True)
    assert "training" == watched.look(2.0).phase
    watched.look(3.0)
    assert tmp_path / "other" / "report.html" == watched.page
    (tmp_path / "other" / KEPT).write_text("broken")
    assert 4.0 == watched.look(4.0).read_s
    with pytest.raises(FileFormatError):
        Watched(tmp_path / "other").look(1.0)


def test_verdicts_are_those_of_the_measurements_beside(tmp_path: Path) -> None:
    """Of a job in a cache."""
    kept(tmp_path)
    files.write(tmp_path / "k" / "cluster.json", drawn().measurements)

    assert drawn().measurements.verdicts == Watched(tmp_path).look(1.0).verdicts
