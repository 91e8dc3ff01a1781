"""The Prometheus file and the document beside it."""

from __future__ import annotations

import itertools
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest
from facts_for_tests import nodes
from launch.worlds import plan, records
from pages import drawn
from prometheus_client.parser import text_string_to_metric_families

from pipette_launch.errors import FileFormatError, UsageError
from pipette_launch.facts import Layout, files
from pipette_launch.facts.messages import RunTraining, RunWarmup
from pipette_launch.facts.outcome import LiveJob
from pipette_launch.facts.plan import Rate
from pipette_launch.launch import metrics as module
from pipette_launch.launch.cache import Cache
from pipette_launch.launch.metrics import (
    ALIVE_S,
    KEPT,
    MetricsFile,
    Watched,
    document_at,
    metrics_text,
    read_job,
)
from pipette_launch.megatron.logs import Iteration
from pipette_launch.probe.progress import PhaseEnd, Sign

TWO = plan(Layout(pp=2, dp=2), Layout(tp=2, dp=2))
RATED = replace(TWO, chosen=replace(TWO.chosen, rate=Rate(tokens_per_s=1000.0, flops_per_s=1e9, mfu=None)), floor_s=0.1)
NODES = nodes("node0", "node1", tokens=[record.token for record in records()], num_slots=2)
TRAINING = RunTraining(nodes=NODES, plan=RATED, script_arguments=("--lr", "1"))
NOWHERE = Cache(None, "")


def printed(iteration: int, step_s: float) -> Iteration:
    """A line of the training."""
    return Iteration(iteration=iteration, total=100, step_time_s=step_s, loss=None)


def parsed(text: str) -> dict[str, float]:
    """Values by name, as Prometheus' own parser reads them; info metrics by name and labels."""
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        assert family.type in {"gauge", "counter"}
        for sample in family.samples:
            name = sample.name + "".join(f" {key}={value}" for key, value in sorted(sample.labels.items()))
            assert name not in found
            found[name] = sample.value
    return found


def test_the_deciding_node_tells_all(tmp_path: Path) -> None:
    """It has phase, plan, predictions, measurements, restarts, lost nodes, and the duration of the start."""
    path = tmp_path / "pipette.prom"
    metrics = MetricsFile(path, script="pretrain_gpt.py", now=itertools.count(1000.0).__next__)
    metrics.note(warmup_s=20.0, search_s=2.5)
    metrics.decided(TRAINING, NOWHERE, decides=True)
    metrics.lost(["node7", "node8"])
    metrics.lost(["node7"])
    metrics.decided(TRAINING, NOWHERE, decides=True)
    metrics.iterated(printed(30, 2 * RATED.chosen.step_time_s))
    metrics.note(measured_memory_bytes=100)
    metrics.refresh()
    found = parsed(path.read_text())
    chosen = RATED.chosen

    assert 1 == found["pipette_phase_info phase=training"]
    assert 1 == found["pipette_job_info host=node0 script=pretrain_gpt.py"]
    times = [found[f"pipette_{name}_timestamp_seconds"] for name in ("started", "phase_started", "iteration")]
    assert 1000 == times[0] < times[1] < times[2]
    assert 1 == found[next(name for name in found if name.startswith("pipette_plan_info "))]
    for name, value in {
        "nodes": 2,
        "restarts_total": 1,
        "lost_nodes_total": 2,
        "warmup_seconds": 20.0,
        "search_seconds": 2.5,
        "predicted_step_seconds": chosen.step_time_s,
        "own_predicted_step_seconds": RATED.own.step_time_s,
        "measured_step_seconds": 2 * chosen.step_time_s,
        "predicted_tokens_per_second": 1000.0,
        "measured_tokens_per_second": 500.0,
        "memory_need_bytes": max(chosen.memory.need_bytes),
        "memory_limit_bytes": chosen.memory.limit_bytes,
        "measured_memory_bytes": 100,
        "gap_ratio": RATED.gap,
        "iteration": 30,
        "iterations": 100,
    }.items():
        assert value == pytest.approx(found[f"pipette_{name}"]), name
    assert 0o044 == path.stat().st_mode & 0o044
    assert {path, path.with_suffix(".json")} == {*tmp_path.iterdir()}


def test_no_node_writes_before_the_first_decision(tmp_path: Path) -> None:
    """No node knows yet whether it decides, and on a common file system all nodes would write the same file."""
    metrics = MetricsFile(tmp_path / "pipette.prom")
    metrics.refresh()
    metrics.ended(failed=True)

    assert [] == [*tmp_path.iterdir()]


def test_two_threads_lose_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """An iteration that one thread notes does not undo the phase that another thread notes meanwhile."""
    metrics, began, ended = MetricsFile(None), Event(), Event()

    def slow(known: LiveJob, **changes: object) -> LiveJob:
        if "iteration" in changes:
            began.set()
            ended.wait(0.3)
        return replace(known, **changes)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "replace", slow)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: metrics.note(iteration=7))
        assert began.wait(10.0)
        metrics.note(phase="training")
        ended.set()

    assert (7, "training") == (metrics.known.iteration, metrics.known.phase)


def test_a_note_does_not_wait_for_a_file_system_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that drains the workers' pipes notes each iteration."""
    metrics, began, goes_on = MetricsFile(tmp_path / "p.prom"), Event(), Event()
    metrics.decided(TRAINING, NOWHERE, decides=True)
    metrics.iterated(printed(7, 0.5))
    monkeypatch.setattr(files, "write_text", lambda *_, **__: began.set() or goes_on.wait(10.0))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(metrics.refresh)
        assert began.wait(10.0)
        began_s = time.monotonic()
        metrics.iterated(printed(8, 0.5))
        took_s = time.monotonic() - began_s
        goes_on.set()

    assert (8, True) == (metrics.known.iteration, took_s < 5)


def test_the_end_stays_in_the_file(tmp_path: Path) -> None:
    """An alert can distinguish a failed job from a finished one."""
    for failed in (False, True):
        metrics = MetricsFile(tmp_path / "p.prom")
        metrics.decided(TRAINING, NOWHERE, decides=True)
        metrics.ended(failed=failed)

        assert f'phase="{"failed" if failed else "succeeded"}"' in (tmp_path / "p.prom").read_text()


def test_a_node_that_hears_and_does_not_decide_has_its_own_file(tmp_path: Path) -> None:
    """No metric is in both files, because one exporter may read both on a shared file system."""
    names = []
    for decides in (True, False):
        metrics = MetricsFile(tmp_path / "p.prom")
        metrics.decided(TRAINING, NOWHERE, decides=decides)
        if not decides:
            metrics.iterated(printed(7, 0.5))
            metrics.ended(failed=False)
        names.append(set(parsed((tmp_path / ("p.prom" if decides else "p.measured.prom")).read_text())))

    assert set() == names[0] & names[1]
    assert "pipette_measured_step_seconds" in names[1]


def test_what_has_not_changed_is_written_again_now_and_then(tmp_path: Path) -> None:
    """Changes are written at the next refresh. An unchanged file is written again later, as a sign of life."""
    path, seconds = tmp_path / "p.prom", 1000.0
    metrics = MetricsFile(path, now=lambda: seconds)
    metrics.decided(TRAINING, NOWHERE, decides=True)
    metrics.iterated(printed(1, 0.5))
    metrics.refresh()
    assert 1 == parsed(path.read_text())["pipette_iteration"]
    path.unlink()
    seconds += ALIVE_S - 1
    metrics.refresh()
    assert not path.exists()
    seconds += 1
    metrics.refresh()
    assert 1 == parsed(path.read_text())["pipette_iteration"]


def test_the_files_are_refreshed_until_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread refreshes the files, and stops at the end."""
    monkeypatch.setattr(module, "REFRESH_S", 0.01)
    path = tmp_path / "p.prom"
    metrics = MetricsFile(path)
    metrics.begin()
    metrics.decided(TRAINING, NOWHERE, decides=True)
    metrics.iterated(printed(7, 0.5))
    deadline = time.monotonic() + 10
    while "pipette_iteration " not in path.read_text():
        assert time.monotonic() < deadline
    metrics.ended(failed=False)
    time.sleep(0.05)
    assert 'phase="succeeded"' in path.read_text()


def test_the_folder_of_the_plan_has_the_figures_too(tmp_path: Path) -> None:
    """The document is readable for its owner only. It moves to the folder of another plan."""
    named, root = tmp_path / "p.prom", tmp_path / "cache"
    metrics = MetricsFile(named)
    metrics.decided(TRAINING, Cache(root, "a"), decides=True)
    kept = root / "a" / KEPT
    assert "training" == files.read(kept, LiveJob).phase
    assert kept.read_text() == named.with_suffix(".json").read_text()
    assert 0 == kept.stat().st_mode & 0o077
    metrics.decided(TRAINING, Cache(root, "b"), decides=True)
    metrics.ended(failed=False)
    assert [root / "b" / KEPT] == [*root.rglob("*.json")]


def test_a_job_that_trains_nothing_leaves_the_figures_of_one_that_did(tmp_path: Path) -> None:
    """The user's file is written, and the document in the job's folder stays."""
    kept = tmp_path / "a" / KEPT
    kept.parent.mkdir()
    kept.write_text("of a training")
    metrics = MetricsFile(tmp_path / "p.prom", keeps=False)
    metrics.decided(TRAINING, Cache(tmp_path, "a"), decides=True)
    metrics.ended(failed=False)
    assert "of a training" == kept.read_text()
    assert "pipette_nodes" in (tmp_path / "p.prom").read_text()


def test_a_warm_up_tells_how_far_it_is(tmp_path: Path) -> None:
    """It has the steps of the present part and the durations of ended parts, until there is a plan."""
    path = tmp_path / "p.prom"
    metrics = MetricsFile(path)
    metrics.decided(RunWarmup(nodes=NODES, order="{}"), NOWHERE, decides=True)
    ended = (PhaseEnd(phase="start", seconds=3.5, words=""), PhaseEnd(phase="layers", seconds=5.0, words="x"))
    metrics.warming_up(Sign(phase="links", at_s=1.0, limit_s=9.0, done=3, total=7, ended=ended))
    metrics.refresh()
    found = parsed(path.read_text())
    assert (3, 7) == (found["pipette_warmup_steps_done phase=links"], found["pipette_warmup_steps phase=links"])
    assert 3.5 == found["pipette_warmup_phase_seconds phase=start"]
    metrics.decided(TRAINING, NOWHERE, decides=True)
    assert "warmup_steps" not in path.read_text()


def test_names_of_others_do_not_break_the_format() -> None:
    """Quotes, backslashes and line ends are escaped."""
    job = LiveJob(read_s=0.0, written_s=0.0, layout="tp1", schedule='a"b\\c\nd')
    text = metrics_text(job, decides=True)

    assert any('a"b\\c\nd' in name for name in parsed(text))


def test_a_file_that_cannot_be_written_costs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log has one line about it."""
    (tmp_path / "taken").write_text("no folder")
    metrics = MetricsFile(tmp_path / "taken" / "p.prom")
    metrics.decided(TRAINING, NOWHERE, decides=True)
    metrics.ended(failed=False)

    assert 1 == sum("no metrics are written" in record.message for record in caplog.records)


def test_without_the_flag_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is read or written."""
    monkeypatch.chdir(tmp_path)
    metrics = MetricsFile(None)
    metrics.decided(TRAINING, NOWHERE, decides=True)
    metrics.ended(failed=False)

    assert [] == list(tmp_path.iterdir())


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
    assert max(RATED.chosen.memory.need_bytes) == job.memory_need_bytes
    assert (1000.0, 1000.0, 1000.0) == (job.began_s, job.phase_began_s, job.printed_s)
    assert 10.0 == job.age_s


def test_a_warm_up_comes_back(tmp_path: Path) -> None:
    """Its part, its progress and its ended parts come back."""
    metrics = kept(tmp_path)
    warmup = RunWarmup(nodes=NODES, order="{}")
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


def test_after_a_restart_another_node_measures(tmp_path: Path) -> None:
    """The deciding node ran the last rank before the restart. Its memory peak then no longer counts."""
    decides = kept(tmp_path)
    decides.note(measured_memory_bytes=100)
    decides.decided(TRAINING, Cache(tmp_path, "k"), decides=True)
    assert read_job(tmp_path / "k" / KEPT, 1.0).measured_memory_bytes is None
    other = kept(tmp_path, decides=False)
    other.note(measured_memory_bytes=70)
    other.refresh()

    assert 70 == read_job(tmp_path / "k" / KEPT, 1.0).measured_memory_bytes


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
