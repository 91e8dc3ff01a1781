"""The controller of a node under the coordinator's decisions, without processes."""

from __future__ import annotations

import tempfile
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from facts_for_tests import memory_need, nodes, tiny_cluster, tiny_job, tiny_measurements
from gpu_rules.nvml import FakeNvml, install
from launch.worlds import options, plan, records

from pipette_launch.agent import job
from pipette_launch.agent.rendezvous import RendezvousSettings
from pipette_launch.facts import Layout, Plan, files
from pipette_launch.facts.messages import Advice, MeasuringQuestion, RunTraining, RunWarmup
from pipette_launch.facts.outcome import LiveJob, Outcome
from pipette_launch.launch import terminal
from pipette_launch.launch.commands import WorkerCommand, links_options
from pipette_launch.launch.hosts import described
from pipette_launch.launch.metrics import MetricsFile
from pipette_launch.launch.node_controller import FileWriter, NodeController, PrivateFolder
from pipette_launch.probe.health import inventory
from pipette_launch.probe.messages import WarmupOrder
from pipette_launch.report.page.page import plan_page

LINE = (
    " [2026-11-21 10:00:00] iteration {:8d}/     100 | consumed samples:            8 | "
    "elapsed time per iteration (ms): {} | lm loss: 5.000000E+00 | loss scale: 1.0 |"
)
SCRIPT = WorkerCommand(entrypoint="python", arguments=("-u", "x"), environment={})
TWO = plan(Layout(pp=2, dp=2), Layout(tp=2, dp=2))
WRITER = FileWriter()


def begun(folder: Path, **changes: Any) -> NodeController:
    """Return the controller of a node."""
    asked = options("--save", str(folder / "ckpt"), device="cpu", cache=folder / "cache", **changes)
    made = NodeController(
        asked,
        PrivateFolder(),
        least_nodes=1,
        node_rank=-1,
        metrics=MetricsFile(asked.metrics_file),
        writer=WRITER,
    )
    made.describe(SCRIPT, num_slots=2, address="127.0.0.1", interruption=KeyError)
    return made


NODES = nodes("node0", "node1", tokens=[record.token for record in records()], num_slots=2)


def decision(made: Plan | None = TWO, **changes: Any) -> RunTraining:
    """Return the decision to train under a plan."""
    return replace(RunTraining(nodes=NODES, plan=made, script_arguments=("--lr", "1")), **changes)


def await_writer() -> None:
    """Wait until the thread that writes files has written all of them."""
    WRITER.finish(within_s=30.0)


def test_a_restart_shows_nothing_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The screen is printed once for each plan, and a fallback is reported once."""
    told = begun(tmp_path)
    texts = []
    for step in (
        decision(),
        decision(),
        decision(attempt=1, reason="rank 0 ended with exit code 1"),
        decision(attempt=1, proven=True),
        decision(attempt=2, reason="rank 1 ended with signal 9"),
        decision(replace(TWO, solve_s=9.0), reason="the hosts changed"),
    ):
        told.show(step, speaks=True)
        texts.append(capsys.readouterr().err)

    assert ["Chosen" in text for text in texts] == [True, False, False, False, False, True]
    assert "" == texts[1] == texts[3]
    assert "rank 0 ended with exit code 1\n" in texts[2]
    assert "that plan cannot start; going on with the next plan, " in texts[2]
    assert "going on with your own configuration" in texts[4]


def test_a_warm_up_of_many_ranks_may_start_late(tmp_path: Path) -> None:
    """Imports (two minutes), budget, and a wait of a minute behind each. All but the budget grow by 256 s."""
    told = begun(tmp_path, budget_s=30.0)
    told.show(RunWarmup(nodes=nodes("node0", "node1", num_slots=2048), order=""), speaks=False)

    assert pytest.approx(120 + 256 + 60 + 256 + 30 + 60 + 256) == told.warmup_deadline_s


def test_only_one_node_speaks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The other nodes count without printing."""
    begun(tmp_path).show(decision(reason="why"), speaks=False)

    assert "" == capsys.readouterr().err


def test_figures_are_kept_where_the_plan_is(tmp_path: Path) -> None:
    """The node of the last rank writes its measurements into the plan's folder, for `pipette watch`."""
    told = begun(tmp_path)
    told.show(decision(), speaks=False)
    assert told.saw_line(LINE.format(7, 500.0))
    told.show(decision(attempt=1), speaks=False)
    told.saw_line(LINE.format(8, 500.0))
    told._metrics.refresh()

    assert 8 == files.read(tmp_path / "cache" / "k" / "live.measured.json", LiveJob).iteration


def test_a_screen_that_fails_does_not_cost_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a signal passes through."""
    told = begun(tmp_path)
    errors: list[Exception] = [ValueError("no such terminal"), KeyError("signal 15")]

    def fail(*_: object, **__: object) -> str:
        raise errors.pop(0)

    monkeypatch.setattr(terminal, "plan_screen", fail)
    told.show(decision(), speaks=True)

    with pytest.raises(KeyError):
        told.show(decision(replace(TWO, solve_s=9.0)), speaks=True)


def test_an_outcome_never_mixes_two_attempts(tmp_path: Path) -> None:
    """Ten iterations of one plan and ten of the next do not make an outcome of twenty."""
    told = begun(tmp_path)
    told.show(decision(), speaks=False)
    assert all(told.saw_line(LINE.format(iteration, 1000.0)) for iteration in range(1, 11))
    told.show(decision(attempt=2), speaks=False)
    for iteration in range(11, 21):
        told.saw_line(LINE.format(iteration, 1000.0))
    assert [] == list(tmp_path.glob("cache/*/outcome.json"))

    for iteration in range(21, 31):
        told.saw_line(LINE.format(iteration, 1000.0))
    await_writer()

    outcome = files.read(tmp_path / "cache" / "k" / "outcome.json", Outcome)
    assert (Layout(dp=4), 11) == (outcome.layout, outcome.first_iteration)


def test_files_are_written_after_the_decision_and_a_crash_of_a_write_is_no_harm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log reports the crash, and the next files are still written."""
    made = begun(tmp_path)
    written: list[str] = []
    made._coordinator.planner.later(lambda: written.append(str(1 // 0)))
    made._coordinator.planner.later(lambda: written.append("next"))
    assert [] == written

    made.show(decision(), speaks=True)
    await_writer()

    assert ["next"] == written
    assert "a file beside the plan is missing" in caplog.text


def test_an_outcome_lies_beside_the_plan_in_force(tmp_path: Path) -> None:
    """A node that did not decide follows the key of the decision, also when it changes."""
    told = begun(tmp_path)
    for key in ("k", "other"):
        told.show(decision(plan(Layout(pp=4), key=key)), speaks=False)
        for iteration in range(1, 21):
            told.saw_line(LINE.format(iteration, 1000.0))
    await_writer()

    assert {"k", "other"} == {path.parent.name for path in tmp_path.glob("cache/*/outcome.json")}


def test_an_outcome_is_written_into_the_report(tmp_path: Path) -> None:
    """The report in the cache changes, and the plan file of the user does not."""
    told, made = begun(tmp_path), plan(Layout(pp=4))
    folder = tmp_path / "cache" / "k"
    files.write(folder / "plan.json", made)
    (folder / "report.html").write_text(plan_page(made))
    told.show(decision(made), speaks=False)
    for iteration in range(1, 21):
        told.saw_line(LINE.format(iteration, 1000.0))
    await_writer()

    assert "step, up to iteration 20" in (folder / "report.html").read_text()
    assert made == files.read(folder / "plan.json", Plan)


def test_an_outcome_is_read_while_the_file_system_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The thread that drains the workers' pipes prints the outcome, and another thread writes the files."""
    goes_on, write = Event(), files.write
    monkeypatch.setattr(files, "write", lambda *words, **more: goes_on.wait(10.0) and write(*words, **more))
    told = begun(tmp_path)
    told.show(decision(), speaks=False)
    began_s = time.monotonic()
    for iteration in range(1, 21):
        told.saw_line(LINE.format(iteration, 1000.0))
    took_s, printed = time.monotonic() - began_s, capsys.readouterr().err
    goes_on.set()
    await_writer()

    assert took_s < 5
    assert "step 1.00 s, predicted 1.00 s" in printed
    assert 20 == files.read(tmp_path / "cache" / "k" / "outcome.json", Outcome).last_iteration


def test_a_file_system_that_hangs_does_not_keep_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job has ended, and its launcher ends too, with a line about the files."""
    goes_on = Event()

    def run(_args: Namespace, make: Any, **_: object) -> None:
        controller = make(RendezvousSettings(endpoint="localhost:0", node_rank=-1, may_host_store=True))
        controller._writer.submit(goes_on.wait)

    monkeypatch.setattr(job, "run", run)
    monkeypatch.setattr(FileWriter.finish, "__kwdefaults__", {"within_s": 0.2})
    job.launch(Namespace(), options(device="cpu", cache=tmp_path / "cache"))
    goes_on.set()

    words = "pipette-launch: the file system did not answer within 0.2 s, so files of this job are missing\n"
    assert words == capsys.readouterr().err


def test_an_outcome_that_cannot_be_kept_has_no_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The outcome is printed, and then the reason for the missing file."""
    (tmp_path / "cache").write_text("no folder")
    told = begun(tmp_path)
    told.show(decision(), speaks=False)
    for iteration in range(1, 21):
        told.saw_line(LINE.format(iteration, 1000.0))
    await_writer()
    outcome, trouble = capsys.readouterr().err.splitlines()[-2:]

    assert "step 1.00 s, predicted 1.00 s" in outcome
    assert "outcome.json" not in outcome
    assert "outcome.json cannot be written (Not a directory)" in trouble


def test_without_a_plan_iterations_count_all_the_same(tmp_path: Path) -> None:
    """There is no prediction to compare with, but the job has trained."""
    told = begun(tmp_path)
    told.show(decision(None), speaks=False)

    assert told.saw_line(LINE.format(1, 100.0))
    assert not told.saw_line("training ...")


def test_a_checkpoint_is_a_sign_of_training(tmp_path: Path) -> None:
    """A checkpoint from before the start does not count."""
    told = begun(tmp_path)
    tracker = tmp_path / "ckpt" / "latest_checkpointed_iteration.txt"
    tracker.parent.mkdir()
    tracker.write_text("10")
    told.show(decision(), speaks=False)

    before = told.trained(lived_s=1.0, exit_codes={1})
    tracker.write_text("20")

    assert (False, True) == (before, told.trained(lived_s=1.0, exit_codes={1}))


def test_a_driver_in_disorder_is_told_to_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After any error of NVML the job trains as under torchrun."""

    def fail(**_: object) -> None:
        raise OSError("driver/library version mismatch")

    monkeypatch.setattr(inventory, "host", fail)

    record = begun(tmp_path).record(attempt=-1, verdict="none", failure="")

    assert record.host is None
    assert "OSError: driver/library version mismatch" in record.trouble


def test_lost_gpus_are_told_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node is described by the GPUs that are left, and a note names those that are not."""
    install(monkeypatch, FakeNvml(3)).lost = {0}

    machine = described(records()[0], "127.0.0.1", "cuda")

    assert machine.host is not None
    assert ["GPU-bbbb-1", "GPU-aaaa-2"] == [device.uuid for device in machine.host.devices]
    assert ("GPU 0 of 3 cannot be used (NVML: GPU is lost); reset it or reboot the node",) == machine.notes


def test_its_folder_is_made_when_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that waits for other nodes has no folder yet."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    told = begun(tmp_path)
    told.show(decision(None, reason="x"), speaks=False)

    assert "python" == told.command(decision(None, script_arguments=None)).entrypoint
    assert [] == [*tmp_path.glob("pipette_*")]


def test_a_warm_up_names_a_folder_that_nobody_could_foresee(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decision, which others can read, names no path. Each node makes a private folder, and names it to workers."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    told = begun(tmp_path)
    assert told._host is not None
    hosts = (told._host, replace(told._host, name="other"))
    order = files.dumps(links_options(hosts, options=told._options))
    assert str(tmp_path) not in order
    measures = RunWarmup(nodes=NODES, order=order, only_links=True)

    path = Path(told.command(measures).arguments[3])
    again = Path(told.command(measures).arguments[3])

    (made,) = tmp_path.glob("pipette_*")
    named = files.read(path, WarmupOrder)
    assert 0o700 == made.stat().st_mode & 0o777
    assert (path, made, str(made / "progress")) == (again, path.parent, named.progress_dir)
    assert told.measured_path == Path(named.output) == made / "cluster.json"
    told._folder.remove()
    assert not made.exists()


def test_a_question_of_the_warm_up_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher of RANK 0 finds the question in the folder of progress messages, and answers it once."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    told = begun(tmp_path)
    question = MeasuringQuestion(job=tiny_job(4), measurements=tiny_measurements(tiny_cluster(2, 2)), budget_s=0.5)
    files.write(told.progress_folder / "question-7-1.json", question)

    told.warmup_goes_on(leads=True)
    assert told._answering is not None
    told._answering.join(60)
    told.warmup_goes_on(leads=True)

    assert files.read(told.progress_folder / "advice-7-1.json", Advice).dimensions
    assert not told._answering.is_alive()
    told._folder.remove()


def test_memory_lines_go_into_the_outcome(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They do not count as iterations; the outcome compares them with the prediction."""
    told = begun(tmp_path)
    told.show(decision(), speaks=False)
    sizes = "allocated: 1.0 | max allocated: 4.0 | reserved: 4.0 | max reserved: 4.0"
    assert not told.saw_line(f"[Rank 2] (after 2 iterations) memory (MB) | {sizes}")
    for iteration in range(1, 21):
        told.saw_line(LINE.format(iteration, 1000.0))
    await_writer()

    outcome = files.read(tmp_path / "cache" / "k" / "outcome.json", Outcome)
    assert [(2, 1, 1 << 20, 4 << 20)] == [
        (peak.rank, peak.pp_rank, peak.predicted_bytes, peak.measured_bytes) for peak in outcome.peaks
    ]
    assert "memory 4.00 MiB, predicted 1.00 MiB" in capsys.readouterr().err


def test_the_driver_tells_what_devices_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs each local device is read, minus the memory held before. A driver error stops nothing."""
    told = begun(tmp_path)
    assert told._host is not None
    device = replace(told._host.devices[0], kind="cuda", uuid="GPU", memory_total_bytes=1000, memory_free_bytes=900)
    told._host = replace(told._host, devices=(device, device))
    made = replace(TWO, chosen=replace(TWO.chosen, memory=memory_need((300, 400), 500)))
    told.show(
        decision(
            replace(made, keeps_own=False),
            nodes=nodes("node0", "node1", tokens=(told._token, "other"), num_slots=2),
        ),
        speaks=False,
    )

    monkeypatch.setattr(inventory, "device_used_bytes", lambda uuid: 450)
    assert [(2, 400, 350), (3, 400, 350)] == [
        (peak.rank, peak.predicted_bytes, peak.measured_bytes) for peak in told._device_peaks()
    ]

    def fail(uuid: str) -> int:
        raise OSError("driver/library version mismatch")

    monkeypatch.setattr(inventory, "device_used_bytes", fail)
    assert () == told._device_peaks()


def test_training_waits_for_the_memory_of_the_warmup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Memory that stays full is reported, and a driver error does not stop the job. A signal passes through."""
    told = begun(tmp_path)
    troubles: list[Exception] = [OSError("driver/library version mismatch"), KeyError("signal 15")]

    monkeypatch.setattr(inventory, "await_memory", lambda host: (f"{host.name}: GPU 0 still holds 1 GiB",))
    told.workers_are_gone()
    assert "GPU 0 still holds 1 GiB\n" in capsys.readouterr().err

    def fail(host: object) -> None:
        raise troubles.pop(0)

    monkeypatch.setattr(inventory, "await_memory", fail)
    told.workers_are_gone()
    with pytest.raises(KeyError):
        told.workers_are_gone()


def test_a_plan_that_was_made_before_has_no_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line has the lost host and the next plan. Every record has the number of restarts."""
    told = begun(tmp_path, max_restarts=2)
    told.show(decision(), speaks=True)
    capsys.readouterr()
    told.show(decision(plan(Layout(pp=4)), is_refitted=True, reason="node2 is lost; going on"), speaks=True)

    assert "pipette-launch: node2 is lost; going on\n" == capsys.readouterr().err
    assert 2 == told.record(attempt=-1, verdict="none", failure=None).max_restarts


def test_why_a_node_is_lost_reaches_the_reason(tmp_path: Path) -> None:
    """The agents know the reason, and the coordinator writes the sentence."""
    told = begun(tmp_path)
    held = decision(replace(TWO, templates=(plan(Layout(pp=2), hosts=("node0",)),)))
    after = told.decide(records()[:1], held, {"node1": "its agent is gone"})

    assert after.reason.startswith("node1 is lost (its agent is gone); going on with 1 of 2 nodes: tp1 pp2 dp1 mbs1, ")
