"""The metrics file is what Prometheus reads, and says what the node knows."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from launch.worlds import plan, records
from prometheus_client.parser import text_string_to_metric_families

from pipette_launch.facts import Layout, Samples
from pipette_launch.facts.messages.round import Decision
from pipette_launch.facts.results.outcome import Outcome, PeakReading
from pipette_launch.facts.results.rate import Rate
from pipette_launch.launch.display.metrics import JobMetrics, MetricsFile, metrics_text

TWO = plan(Layout(pp=2, dp=2), Layout(tp=2, dp=2))
RATED = replace(TWO, chosen=replace(TWO.chosen, rate=Rate(tokens_per_s=1000.0, flops_per_s=1e9, mfu=None)), floor_s=0.1)
TRAINING = Decision(
    phase="train",
    tokens=tuple(node.token for node in records()),
    hosts=("node0", "node1"),
    num_slots=(2, 2),
    plan=RATED,
    script_arguments=("--lr", "1"),
)


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
    """Phase, plan, what was predicted and measured, restarts, lost nodes, and what the start took."""
    path = tmp_path / "pipette.prom"
    metrics = MetricsFile(path)
    metrics.planned(warmup_s=20.0, search_s=2.5)
    metrics.decided(TRAINING, decides=True)
    metrics.lost(["node7", "node8"])
    metrics.lost(["node7"])
    metrics.decided(TRAINING, decides=True)
    metrics.iterated(30, 2 * RATED.chosen.step_time_s)
    metrics.measured(
        Outcome(
            key="k",
            layout=RATED.chosen.layout,
            placement=RATED.chosen.placement,
            predicted_step_s=1.0,
            measured_step=Samples(values_s=(1.0,)),
            first_iteration=1,
            last_iteration=20,
            losses=(),
            peaks=(PeakReading(rank=0, pp_rank=0, predicted_bytes=90, measured_bytes=100, source="allocator"),),
        )
    )
    found = parsed(path.read_text())
    chosen = RATED.chosen

    assert 1 == found["pipette_phase_info phase=training"]
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
        "memory_need_bytes": max(chosen.memory_shown.need_bytes),
        "memory_limit_bytes": chosen.memory_shown.limit_bytes,
        "measured_memory_bytes": 100,
        "gap_ratio": RATED.gap,
        "iteration": 30,
    }.items():
        assert value == pytest.approx(found[f"pipette_{name}"]), name
    assert 0o044 == path.stat().st_mode & 0o044
    assert [path] == list(tmp_path.iterdir())


def test_the_end_stays_in_the_file(tmp_path: Path) -> None:
    """So that an alert can tell a job that failed from one that is over."""
    for failed in (False, True):
        metrics = MetricsFile(tmp_path / "p.prom")
        metrics.decided(TRAINING, decides=True)
        metrics.ended(failed=failed)

        assert f'phase="{"failed" if failed else "succeeded"}"' in (tmp_path / "p.prom").read_text()


def test_a_node_that_hears_and_does_not_decide_has_its_own_file(tmp_path: Path) -> None:
    """No metric stands in both files, for on a shared file system one exporter reads both."""
    names = []
    for decides in (True, False):
        metrics = MetricsFile(tmp_path / "p.prom")
        metrics.decided(TRAINING, decides=decides)
        if not decides:
            metrics.iterated(7, 0.5)
            metrics.ended(failed=False)
        names.append(set(parsed((tmp_path / ("p.prom" if decides else "p.measured.prom")).read_text())))

    assert set() == names[0] & names[1]
    assert "pipette_measured_step_seconds" in names[1]


def test_steps_are_written_now_and_then(tmp_path: Path) -> None:
    """Not at every iteration of a job whose steps take milliseconds."""
    path = tmp_path / "p.prom"
    metrics = MetricsFile(path, clock=itertools.count(0, 4).__next__)
    metrics.decided(TRAINING, decides=True)
    written = []
    for iteration in range(1, 9):
        metrics.iterated(iteration, 0.5)
        written.append(parsed(path.read_text()).get("pipette_iteration"))

    assert len({*written}) < 5
    assert written[-1] is not None


def test_names_of_others_do_not_break_the_format() -> None:
    """Quotes, backslashes and line ends are escaped."""
    odd = replace(RATED.chosen, schedule='a"b\\c\nd')
    text = metrics_text(JobMetrics(phase="training", plan=RATED, choice=odd), decides=True)

    assert any('a"b\\c\nd' in name for name in parsed(text))


def test_a_file_that_cannot_be_written_costs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One line in the log says so, once."""
    (tmp_path / "taken").write_text("no folder")
    metrics = MetricsFile(tmp_path / "taken" / "p.prom")
    metrics.decided(TRAINING, decides=True)
    metrics.ended(failed=False)

    assert 1 == sum("no metrics are written" in record.message for record in caplog.records)


def test_without_the_flag_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor looked at."""
    monkeypatch.chdir(tmp_path)
    metrics = MetricsFile(None)
    metrics.decided(TRAINING, decides=True)
    metrics.ended(failed=False)

    assert [] == list(tmp_path.iterdir())
