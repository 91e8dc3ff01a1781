"""Tests of whole warm-ups: real workers over gloo, as the agent starts them."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest
from facts_for_tests import tiny_job, tiny_model
from probe.workers import LATE_S, REFERENCE, TINY_FLAGS, answer_next, run_workers, tiny_options

from pipette_launch.facts import ComputeCase, Layout, Measurements, files
from pipette_launch.facts.messages import Advice, Dimension, MeasuringQuestion, StageCase
from pipette_launch.probe.progress import last_sign
from pipette_launch.probe.run import main

# Eight seconds on two idle cores, most of it imports; more than ten times that on a busy machine.
pytestmark = pytest.mark.processes
TP2 = ComputeCase(tp=2, cp=1, micro_batch_size=1)
CP2 = ComputeCase(tp=1, cp=2, micro_batch_size=1)
PARTS = {"layer", "moe_layer", "embedding", "head", "core_attention"}
MIXED_MODEL = tiny_model(
    num_experts=4,
    moe_layer_freq=(0, 1, 0, 1),
    params_dtype="bf16",
    gated_linear_unit=True,
    normalization="RMSNorm",
    add_bias_linear=False,
    num_query_groups=2,
    position_embedding_type="rope",
    untie_embeddings_and_output_weights=True,
)
MIXED_FLAGS = (
    *TINY_FLAGS,
    *"--num-experts 4 --moe-layer-freq [0,1,0,1] --bf16 --swiglu --normalization RMSNorm --disable-bias-linear".split(),
    *"--ffn-hidden-size 256 --group-query-attention --num-query-groups 2 --position-embedding-type rope".split(),
    *("--untie-embeddings-and-output-weights", "--global-batch-size", "8"),
)


def test_two_hosts_of_two_are_measured(tmp_path: Path) -> None:
    """Four workers measure every link, collective and case of a model with dense and MoE layers."""
    job = replace(tiny_job(4), model=MIXED_MODEL)
    options = tiny_options(
        tmp_path, hosts=2, devices=2, job=job, cases=(REFERENCE, TP2, CP2), script_arguments=MIXED_FLAGS
    )
    outcome = run_workers(options, tmp_path)
    assert [0, 0, 0, 0] == outcome.codes, outcome.errors

    found = files.read(Path(options.output), Measurements)
    kinds = {(entry.kind, len(entry.slots)) for entry in found.collectives}
    wanted = {(kind, size) for kind in ("all_reduce", "all_gather", "all_to_all") for size in (2, 4)}
    assert options.hosts == found.cluster.hosts
    assert {("send", 2)} | wanted <= kinds
    assert found.survey
    assert 1 == found.survey.rounds
    # On a busy machine one direction may look slow, and is measured again.
    assert found.survey.rounds_again <= 1
    assert all(rate > 0 for entry in found.survey.rails for rate in entry.bytes_per_s)
    assert [(0, 1), (1, 0)] == [(entry.source, entry.target) for entry in found.survey.rails]
    assert all(rate > 0 for links in found.cluster.within_host for rate in links.bandwidth_bytes_per_s[0][1:])
    assert {(slot, REFERENCE) for slot in range(4)} <= {(time.slot, time.case) for time in found.compute}
    assert {(part, case) for part in PARTS for case in (REFERENCE, TP2)} == {
        (time.part, time.case) for time in found.compute
    }
    assert all(time.forward.median_s > 0 for time in found.compute)
    assert {REFERENCE, TP2} == {reading.case for reading in found.memory}
    assert 0 == found.overhead_bytes
    assert found.optimizer_s_per_parameter
    assert ["start", "compute", "memory", "links", "search", "collectives", "stages"] == list(found.phase_s)
    assert all(found.phase_s[phase] > 0 for phase in ("start", "compute", "memory", "links", "collectives"))
    # Megatron's local layers know no context parallelism: said, not hidden.
    assert any(note.startswith("compute: the script refuses tp1 cp2 mbs1") for note in found.notes)
    signs = [last_sign(tmp_path / "progress", local_rank) for local_rank in range(2)]
    assert ["done", "done"] == [sign.phase for sign in signs if sign]


def advice(question: MeasuringQuestion) -> Advice:
    """Return three groups and two stages, and other groups once the first ones are known."""
    pairs = [("dp", (0, 2)), ("tp", (0, 1)), ("cp", (0, 2)), ("ep", (0, 2))]
    if any(one.kind != "send" for one in question.measurements.collectives):
        pairs = [("dp", (0, 1, 2)), ("tp", (1, 2))]
    return Advice(
        dimensions=tuple(Dimension(name=name, kinds=("all_reduce",), groups=(pair,)) for name, pair in pairs),
        stages=(StageCase(layout=Layout(dp=3), pp_rank=0), StageCase(layout=Layout(pp=2, dp=3), pp_rank=1)),
        words="one plan was looked at",
    )


def test_what_is_advised_is_measured(tmp_path: Path) -> None:
    """Three workers: a pair among them is a group, and the third keeps step; two run a stage, one of six ranks.

    The same pair is a group of several dimensions, between which its members were in different numbers of groups.
    Once these are known the adviser asks for more: that is measured, too, as far as it is new.
    """
    options = tiny_options(tmp_path, hosts=3, devices=1, has_adviser=True)
    launcher = Thread(target=lambda: [answer_next(tmp_path / "progress", advice) for _ in range(2)])
    launcher.start()
    outcome = run_workers(options, tmp_path)
    assert [0, 0, 0] == outcome.codes, outcome.errors

    found = files.read(Path(options.output), Measurements)
    assert {("all_reduce", (0, 2)), ("all_reduce", (0, 1)), ("all_reduce", (0, 1, 2))} == {
        (entry.kind, entry.slots) for entry in found.collectives if entry.kind != "send"
    }
    assert "search: one plan was looked at" in found.notes
    assert [(0, Layout(dp=3), 0), (1, Layout(pp=2, dp=3), 1)] == [
        (reading.slot, reading.layout, reading.pp_rank) for reading in found.stages
    ]
    # All four layers and the optimizer of all, and a bit more than half of it.
    whole, half = (reading.allocator_peak_bytes for reading in found.stages)
    assert 16 * 200_000 < whole < 2 * half < 2 * whole
    assert found.phase_s["stages"] > 0


def test_many_hosts_measure_a_sample_and_check_it_the_next_time(tmp_path: Path) -> None:
    """One blind round of two pairs, then scouting; the next warm-up measures two rounds to check the known links."""
    options = tiny_options(tmp_path, hosts=4, devices=1, full_hosts=3, blind_rounds=1)
    outcome = run_workers(options, tmp_path)
    assert [0] * 4 == outcome.codes, outcome.errors
    first = files.read(Path(options.output), Measurements)
    (tmp_path / "known.json").write_bytes(Path(options.output).read_bytes())

    outcome = run_workers(replace(options, known=str(tmp_path / "known.json")), tmp_path)
    assert [0] * 4 == outcome.codes, outcome.errors
    second = files.read(Path(options.output), Measurements)

    assert first.survey
    assert second.survey
    assert 1 < first.survey.rounds <= 3
    # On shared cores loopback may have changed so much that all is measured anew.
    assert second.survey.rounds >= 2
    (checked,) = (note for note in second.notes if "checked links changed since the last warm-up" in note)
    assert checked.endswith("; all are measured again") or "c" in "".join(second.survey.origin_HH)


def test_a_slot_alone_with_no_time_measures_the_least(tmp_path: Path) -> None:
    """One worker without links and groups measures the reference case with a spent budget."""
    options = tiny_options(tmp_path, hosts=1, devices=1, cases=(REFERENCE, TP2), budget_s=0.001)
    outcome = run_workers(options, tmp_path)
    assert [0] == outcome.codes, outcome.errors

    found = files.read(Path(options.output), Measurements)
    assert {REFERENCE} == set(found.compute_cases())
    assert PARTS - {"moe_layer"} == {time.part for time in found.compute}
    assert () == found.collectives
    assert "compute: not measured: 1 of 2 cases, such as tp2 cp1 mbs1" in found.notes


def test_a_missing_worker_ends_the_others_in_time(tmp_path: Path) -> None:
    """If rank 1 never comes, rank 0 reports it within its deadline, on stderr and in its progress file."""
    options = tiny_options(tmp_path, hosts=1, devices=2, timeout_s=2.0, start_s=0.0)
    outcome = run_workers(options, tmp_path, missing=(1,))

    reason = (tmp_path / "progress" / "0.error").read_text()
    assert [1] == outcome.codes
    assert "failed in phase start: waited 2 s in vain for all workers to arrive" in reason
    # torch's store adds lines of its own.
    assert outcome.errors[0].endswith(f"pipette: {reason}")
    assert not Path(options.output).exists()


def test_a_worker_that_imports_for_long_is_waited_for(tmp_path: Path) -> None:
    """Rank 1 is 8 s late; a phase would wait 6 s, but imports have a minute more."""
    options = tiny_options(tmp_path, hosts=1, devices=2, timeout_s=6.0, start_s=60.0)
    outcome = run_workers(options, tmp_path, late=(1,))

    assert [0, 0] == outcome.codes, outcome.errors
    assert files.read(Path(options.output), Measurements).phase_s["start"] > LATE_S


def test_an_order_for_another_job_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An environment that does not fit the order is an error before torch is imported."""
    order = tmp_path / "options.json"
    files.write(order, tiny_options(tmp_path, hosts=2, devices=2))
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)

    assert 1 == main([str(order)])
    assert "RANK=1 WORLD_SIZE=2 do not fit 2 hosts of 2 devices" in capsys.readouterr().err


def test_a_damaged_order_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line on stderr has the file and its fault."""
    order = tmp_path / "options.json"
    order.write_text("{")
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)

    assert 1 == main([str(order)])
    line = capsys.readouterr().err
    assert f"{order}: not JSON" in line
    assert 1 == len(line.splitlines())


ENDS = """
import io, sys
from pipette_launch.probe.run import run_as_worker
def program(_):
    sys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding="utf-8")
    print("words of the script")
    {last}
    return 3
run_as_worker(program)
"""


@pytest.mark.parametrize("last", ["pass", "sys.stdout.detach()"])
def test_a_worker_that_ends_at_once_writes_out_its_output(last: str) -> None:
    """Workers run with `-u`, but the user's script may wrap the stream again, or take the stream apart."""
    command = [sys.executable, "-u", "-c", ENDS.format(last=last)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert (3, "words of the script\n", "") == (done.returncode, done.stdout, done.stderr)
