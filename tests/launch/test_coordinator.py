"""One decision for all nodes, from records alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from facts_for_tests import tiny_cluster, tiny_measurements
from launch.worlds import ARGUMENTS, choice, coordinator, options, plan, records, value
from search.legal import legal_layouts

from pipette_launch import megatron
from pipette_launch.facts import Layout, Measurements, Plan, files
from pipette_launch.facts.messages import Failure, Stop
from pipette_launch.launch import job_plans
from pipette_launch.launch.cache import CLUSTER, PLAN
from pipette_launch.launch.coordinator import Coordinator
from pipette_launch.launch.plan_reports import PAGE, TRACE
from pipette_launch.launch.training import OutcomeTracker
from pipette_launch.megatron import Iteration
from pipette_launch.probe.messages import WarmupOrder

PP = Layout(pp=2, dp=2)


def from_file(folder: Path, made: Plan, *more: str, **changes: Any) -> Coordinator:
    """Return a coordinator of a user who named a plan file."""
    files.write(folder / "mine.json", made)
    return coordinator(folder, options(*more, plan=folder / "mine.json", **changes))


def test_without_a_plan_the_machines_are_measured(tmp_path: Path) -> None:
    """Every node gets the same order, and the script's arguments stay."""
    decision = coordinator(tmp_path, options(budget_s=7.0)).decide(records(), None)
    orders = files.loads(WarmupOrder, decision.order, "orders")

    assert ("warmup", "") == (decision.phase, decision.reason)
    assert (("token-node0", "token-node1"), ("node0", "node1"), 4) == (
        decision.tokens,
        decision.hosts,
        decision.num_ranks,
    )
    assert (7.0, 4, "", "") == (orders.budget_s, orders.job.own.dp, orders.output, orders.progress_dir)
    assert (0, 1) == decision.ranks_of("token-node0")


def test_the_warmup_becomes_a_plan_that_is_kept(tmp_path: Path) -> None:
    """The measurements give a plan under the job's key, and the next job finds it with any order of hosts."""
    first = coordinator(tmp_path, options(cache=tmp_path / "cache"))
    warmup = first.decide(records(), None)
    orders = files.loads(WarmupOrder, warmup.order, "orders")
    files.write(first.measured_at(), tiny_measurements(tiny_cluster(), orders.cases))

    made = first.after_warmup(warmup, "")
    again = coordinator(tmp_path, options(cache=tmp_path / "cache")).decide(records()[::-1], None)

    assert ("train", "train") == (made.phase, again.phase)
    assert made.plan is not None
    assert again.plan is not None
    assert ("measured", "cached") == (made.plan.provenance.source, again.plan.provenance.source)
    of_job = [path for path in (tmp_path / "cache").glob("*/*") if path.is_file()]
    assert {PLAN, CLUSTER, PAGE, TRACE} == {path.name for path in of_job}
    assert files.read(next((tmp_path / "cache" / "clusters").glob("*/*")), Measurements) == first.planner.measurements
    assert ("cpu_backend",) == made.patches
    if made.choice is not None:
        assert made.ranks_of("token-node1") == again.ranks_of("token-node1")


def test_large_files_follow_the_decision(tmp_path: Path) -> None:
    """With the decision only the plan is kept; measurements, report and trace are written later."""
    unwritten: list[Callable[[], None]] = []
    first = Coordinator(options(cache=tmp_path / "cache"), lambda: tmp_path / CLUSTER, later=unwritten.append)
    warmup = first.decide(records(), None)
    orders = files.loads(WarmupOrder, warmup.order, "orders")
    files.write(first.measured_at(), tiny_measurements(tiny_cluster(), orders.cases))

    def names() -> set[str]:
        return {path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()}

    assert "train" == first.after_warmup(warmup, "").phase
    assert {PLAN} == names()
    for write in unwritten:
        write()
    assert {PLAN, CLUSTER, PAGE, TRACE} == names()


@pytest.mark.parametrize("error", [OSError("disk full"), KeyError("a stage")])
def test_a_report_that_fails_costs_no_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Any error while drawing is logged; the plan is kept and runs."""
    monkeypatch.setattr(job_plans, "page_of", Mock(side_effect=error))
    first = coordinator(tmp_path, options(cache=tmp_path / "cache"))
    warmup = first.decide(records(), None)
    orders = files.loads(WarmupOrder, warmup.order, "orders")
    files.write(first.measured_at(), tiny_measurements(tiny_cluster(), orders.cases))

    made = first.after_warmup(warmup, "")

    assert made.plan is not None
    assert "measured" == made.plan.provenance.source
    assert [PLAN] == [path.name for path in (tmp_path / "cache").glob("*/plan.json")]


def test_a_job_that_only_measures_writes_a_file_and_stops(tmp_path: Path) -> None:
    """Even with a kept plan everything is measured, nothing is planned, and earlier measurements are not used."""
    kept = options(cache=tmp_path / "cache")
    first = coordinator(tmp_path, kept)
    warmup = first.decide(records(), None)
    asked = files.loads(WarmupOrder, warmup.order, "orders")
    files.write(first.measured_at(), tiny_measurements(tiny_cluster(), asked.cases))
    first.after_warmup(warmup, "")
    one = coordinator(tmp_path, replace(kept, probe_to=tmp_path / "mine.json"))

    warmup = one.decide(records(), None)
    orders = files.loads(WarmupOrder, warmup.order, "orders")
    found = tiny_measurements(tiny_cluster(), orders.cases)
    files.write(one.measured_at(), found)
    made = one.after_warmup(warmup, "")

    assert ("", "warmup") == (orders.known, warmup.phase)
    assert ("stop", False, None) == (made.phase, made.failed, made.unrun)
    assert found == files.read(tmp_path / "mine.json", Measurements)


def test_earlier_outcomes_on_such_machines_correct_the_next_plan(tmp_path: Path) -> None:
    """If all steps took 1.5 times the predicted time, later predictions are 1.5 times longer, and a note says so."""
    plans = []
    for margin in (0.02, 0.03):
        one = coordinator(tmp_path, options(cache=tmp_path / "cache", margin=margin))
        warmup = one.decide(records(), None)
        orders = files.loads(WarmupOrder, warmup.order, "orders")
        files.write(one.measured_at(), tiny_measurements(tiny_cluster(), orders.cases))
        plans.append(one.after_warmup(warmup, "").plan)
        legal = legal_layouts(orders.job, world_size=4, devices_per_host=2, device_kind="cpu")
        for layout in legal[:: len(legal) // 32][:32]:
            made = replace(choice(layout), configuration_digest=layout.words(), step_time_s=2.0)
            tracker = OutcomeTracker("k", made)
            for iteration in range(1, 21):
                outcome = tracker.add(Iteration(iteration=iteration, total=20, step_time_s=3.0, loss=None))
            assert outcome is not None
            one.planner.cache.keep_outcome(outcome, orders.hosts[0])

    before, after = plans
    assert before is not None
    assert after is not None
    assert 1.0 == before.chosen.step_correction
    assert not any("earlier outcomes" in note for note in before.notes)
    assert 1.5 == pytest.approx(after.chosen.step_correction, rel=0.05)
    assert 1.5 == pytest.approx(after.chosen.step_time_s / before.chosen.step_time_s, rel=0.05)
    assert any(note.startswith("Step times are multiplied by 1.") for note in after.notes)


@pytest.mark.parametrize(("on_error", "phase"), [("train", "train"), ("fail", "stop")])
def test_a_failed_warmup_is_told_and_does_not_cost_the_job(tmp_path: Path, on_error: Any, phase: str) -> None:
    """The user's own arguments train, or the job stops if the user asked for that."""
    one = coordinator(tmp_path, options(on_error=on_error))

    decision = one.after_warmup(one.decide(records(), None), "the warm-up hangs after 60 s")

    assert (phase, None) == (decision.phase, getattr(decision, "plan", None))
    assert "the warm-up hangs after 60 s" in decision.reason
    assert (on_error == "fail") == (isinstance(decision, Stop) and decision.failed)
    if on_error == "train":
        assert (ARGUMENTS, (2, 3)) == (decision.script_arguments, decision.ranks_of("token-node1"))


def test_without_a_plan_a_checkpoint_still_gets_its_sizes(tmp_path: Path) -> None:
    """A checkpoint of tp=2 cannot be loaded by the tp=1 of the command line, planned or not."""
    (tmp_path / "ckpt" / "iter_0000010" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "ckpt" / "iter_0000010" / "mp_rank_01").mkdir()
    (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").write_text("10")
    one = coordinator(tmp_path, options("--load", str(tmp_path / "ckpt")))

    decision = one.after_warmup(one.decide(records(), None), "it hangs")

    assert "2" == value(decision, "--tensor-model-parallel-size")
    assert {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} == decision.environment


def test_words_that_are_not_megatrons_stay(tmp_path: Path) -> None:
    """Without a Megatron job: a reason, the user's own arguments, and no patches."""
    decision = coordinator(tmp_path, options(arguments=("--epochs", "3"))).decide(records(), None)

    assert ("train", None, ()) == (decision.phase, decision.script_arguments, decision.patches)
    assert "--num-layers" in decision.reason


def test_an_error_of_our_own_does_not_cost_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message calls it an error of pipette-launch."""

    def break_down(*_: object, **__: object) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(megatron, "read_job", break_down)

    decision = coordinator(tmp_path, options()).decide(records(), None)

    assert "train" == decision.phase
    assert "an error of pipette-launch itself: ZeroDivisionError: oh" in decision.reason


def test_a_signal_is_nobodys_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reaches torch, which ends the workers."""
    one = Coordinator(options(), lambda: tmp_path / CLUSTER, interruption=KeyError)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyError("signal 15")

    monkeypatch.setattr(megatron, "read_job", interrupt)

    with pytest.raises(KeyError):
        one.decide(records(), None)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([{"num_slots": 1}, {}], "different numbers of slots (node0 has 1, node1 has 2)"),
        ([{}, {"script_digest": "e"}], "script and arguments differ between node0 and node1"),
        ([{}, {"versions": {"torch": "2.6.0"}}], "versions differ between node0 and node1"),
        ([{}, {"trouble": "NVML shows no GPU"}], "node1: NVML shows no GPU"),
        ([{"node_rank": 0}, {"node_rank": 0}], "two nodes have the same --node-rank: [0, 0]"),
    ],
)
def test_nodes_that_no_plan_can_use_are_named(tmp_path: Path, changes: list[dict[str, Any]], expected: str) -> None:
    """The job runs as under torchrun, and the reason names the nodes and the problem."""
    nodes = [replace(node, **change) for node, change in zip(records(), changes, strict=True)]

    decision = coordinator(tmp_path, options()).decide(nodes, None)

    assert expected in decision.reason
    assert "train" == decision.phase


def test_another_driver_is_a_note(tmp_path: Path) -> None:
    """An upgrade that rolls through a cluster stops no plan; drivers and lost GPUs are named."""
    old, new = ({"torch": "2.13.0", "driver": version} for version in ("580.1", "590.2"))
    nodes = [replace(node, versions=new if index == 1 else old) for index, node in enumerate(records(4))]
    nodes[2] = replace(nodes[2], notes=("GPU 7 of 8 cannot be used",))

    decision = coordinator(tmp_path, options()).decide(nodes, None)

    assert "warmup" == decision.phase
    assert (
        "the NVIDIA drivers differ (580.1 on 3 nodes, 590.2 on node1); node2: GPU 7 of 8 cannot be used"
        == decision.reason
    )


def test_static_nodes_keep_their_order(tmp_path: Path) -> None:
    """`--node-rank` gives their order, and addresses do not."""
    nodes = [replace(node, node_rank=rank) for node, rank in zip(records(), (1, 0), strict=True)]

    assert ("node1", "node0") == coordinator(tmp_path, options()).decide(nodes, None).hosts


def test_a_plan_from_a_file_is_written_into_the_words(tmp_path: Path) -> None:
    """Sizes, ranks and patches come from the plan. A note says that it was made for another job."""
    decision = from_file(tmp_path, plan(PP)).decide(records(), None)

    assert ("2", "32") == (value(decision, "--pipeline-model-parallel-size"), value(decision, "--global-batch-size"))
    assert (3, 2) == decision.ranks_of("token-node0")
    assert decision.plan is not None
    assert "mine.json was made for another job" in decision.plan.advice[0]


@pytest.mark.parametrize(
    ("made", "changes", "expected"),
    [
        (plan(PP, hosts=("node0", "node7")), {"on_error": "train"}, "the plan is for the hosts node0, node7"),
        (plan(PP), {"fix": ("pp",)}, "the plan has pp=2, and this job pins pp=1"),
    ],
)
def test_a_plan_that_does_not_suit_is_refused(
    tmp_path: Path, made: Plan, changes: dict[str, Any], expected: str
) -> None:
    """The user's own arguments train, and the reason is reported."""
    decision = from_file(tmp_path, made, **changes).decide(records(), None)

    assert expected in decision.reason
    assert (None, ARGUMENTS) == (decision.plan, decision.script_arguments)


def test_plans_are_tried_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step costs a restart; the last one is the user's own configuration with the variables that it needs."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    one = from_file(tmp_path, plan(Layout(pp=4), Layout(pp=2, tp=2)), "--tensor-model-parallel-size", "2")
    first = one.decide(records(), None)
    # The agent puts the plan's variables into its own environment.
    monkeypatch.setattr(os, "environ", {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    died = [
        replace(node, attempt=0, verdict="before-first-iteration", failure=Failure(cause="it died"))
        for node in records()
    ]

    second = one.decide(died, first)
    third = one.decide([replace(node, attempt=1) for node in died], second)

    assert [(0, 3, False), (1, 3, False), (2, 3, False)] == [
        (step.attempt, step.restarts_left, step.proven) for step in (first, second, third)
    ]
    assert ["4", "2", None] == [value(step, "--pipeline-model-parallel-size") for step in (first, second, third)]
    assert "it died" == third.reason
    assert third.choice is None
    assert {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} == third.environment


def test_a_restart_keeps_everything(tmp_path: Path) -> None:
    """Plan, arguments and variables stay, and another coordinator also knows that the plan has trained."""
    held = from_file(tmp_path, plan(PP)).decide(records(), None)
    died = [replace(node, attempt=0, verdict="after-first-iteration", failure=Failure(cause="x")) for node in records()]

    kept = coordinator(tmp_path, options()).decide(died, held)
    again = coordinator(tmp_path, options()).decide(
        [replace(node, verdict="before-first-iteration") for node in died], kept
    )

    expected = replace(held, reason="x; starting again under the same plan", proven=True, restarts_left=2)
    assert expected == kept
    assert replace(expected, restarts_left=1) == again


def test_words_that_the_user_wrote_are_no_plans_fault(tmp_path: Path) -> None:
    """A flag of the user's that the script does not know is refused under every plan: the job ends, and says why."""
    spare = plan(PP)
    two = replace(spare, alternatives=(spare.chosen,))
    one = from_file(tmp_path, two, "--numlayers", "8")
    refused = Failure(
        cause="the script does not know the flags --numlayers 8", kind="unknown-flags", flags=("--numlayers",)
    )
    died = [replace(node, attempt=0, verdict="before-first-iteration", failure=refused) for node in records()]

    after = one.decide(died, one.decide(records(), None))

    assert ("stop", True) == (after.phase, after.failed)
    assert f"{refused.sentence}; no other plan is tried: the script refuses flags that you wrote" == after.reason


def test_what_became_of_earlier_candidates_is_remembered(tmp_path: Path) -> None:
    """Every node remembers, because another node may be the next coordinator."""
    one = from_file(tmp_path, plan(Layout(pp=4), Layout(pp=2, tp=2)))
    failed = [
        replace(
            node,
            attempt=0,
            verdict="before-first-iteration",
            failure=Failure(cause="KeyError: 'x'", kind="exception", rank=0),
        )
        for node in records()
    ]
    second = one.decide(failed, one.decide(records(), None))

    after = from_file(tmp_path, plan(PP)).decide([replace(node, attempt=1) for node in failed], second)

    assert ("train", "stop") == (second.phase, after.phase)
    assert after.reason.endswith("no other plan is tried: two layouts ended with the same exception")


def test_the_record_beside_the_checkpoints_is_what_runs(tmp_path: Path) -> None:
    """After a fallback the record has the new plan: the job that loads the checkpoint uses it."""
    one = from_file(tmp_path, plan(PP), "--save", str(tmp_path / "ckpt"))
    first = one.decide(records(), None)
    before = files.read(tmp_path / "ckpt" / "pipette-plan.json", Plan)
    died = [replace(node, attempt=0, verdict="before-first-iteration") for node in records()]
    one.decide(died, first)
    after = files.read(tmp_path / "ckpt" / "pipette-plan.json", Plan)

    assert (PP, False) == (before.chosen.layout, before.keeps_own)
    assert (Layout(dp=4), True) == (after.chosen.layout, after.keeps_own)


def test_other_hosts_are_measured_anew(tmp_path: Path) -> None:
    """A plan is for its hosts only, and the message names the changed ones."""
    held = from_file(tmp_path, plan(PP)).decide(records(), None)

    decision = coordinator(tmp_path, options()).decide(records(1), held)

    assert "warmup" == decision.phase
    assert "the hosts changed from node0, node1 to node0" in decision.reason


def test_a_host_lost_in_the_warmup_costs_no_plan(tmp_path: Path) -> None:
    """The user's own layout may be illegal on the remaining hosts, but the job has the batch of all hosts."""
    one = coordinator(tmp_path, options("--global-batch-size", "16"))
    warmup = one.decide(records(4), None)
    rest = records(4)[:3]
    decision = one.decide(rest, warmup, {"node3": "its agent is gone"})
    orders = files.loads(WarmupOrder, decision.order, "orders")

    assert ("warmup", 16) == (decision.phase, orders.job.batch.global_batch_size)
    assert ["node0", "node1", "node2"] == [host.name for host in orders.hosts]


def test_a_dry_run_stops(tmp_path: Path) -> None:
    """It leaves no record, because it writes no checkpoints."""
    one = from_file(tmp_path, plan(PP), "--save", str(tmp_path / "ckpt"), dry_run=True)

    step = one.decide(records(), None)

    assert ("stop", False) == (step.phase, step.failed)
    assert not (tmp_path / "ckpt").exists()
