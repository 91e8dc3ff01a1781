"""One decision for all nodes, from records alone."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from facts_for_tests import tiny_cluster, tiny_measurements
from launch.worlds import ARGUMENTS, chief, choice, nobody, options, plan, records, value

from pipette_launch import megatron
from pipette_launch.cost.residual import features_of
from pipette_launch.facts import Layout, Measurements, Plan, files
from pipette_launch.facts.condition import DeviceCondition
from pipette_launch.facts.round import Decision
from pipette_launch.facts.verdict import Verdict
from pipette_launch.launch.cache import CLUSTER, PLAN
from pipette_launch.launch.chief import Chief
from pipette_launch.launch.outcome import OutcomeTracker
from pipette_launch.megatron import Iteration
from pipette_launch.probe.options import ProbeOptions
from pipette_launch.search.enumerate import layouts

PP = Layout(pp=2, dp=2)


def from_file(folder: Path, made: Plan, *more: str, **changes: Any) -> Chief:
    """A chief whose user named a plan."""
    files.write(folder / "mine.json", made)
    return chief(folder, options(*more, plan=folder / "mine.json", **changes))


def test_without_a_plan_the_machines_are_measured(tmp_path: Path) -> None:
    """Every node gets the same orders; the script's words are not touched yet."""
    decision = chief(tmp_path, options(budget_s=7.0)).decide(records(), None)
    orders = files.loads(ProbeOptions, decision.probe_options, "orders")

    assert ("warmup", None, "") == (decision.phase, decision.plan, decision.reason)
    assert (("token-node0", "token-node1"), ("node0", "node1"), (2, 2)) == (
        decision.tokens,
        decision.hosts,
        decision.num_slots,
    )
    assert (7.0, 4, str(tmp_path / CLUSTER)) == (orders.budget_s, orders.job.own.dp, orders.output)
    assert (0, 1) == decision.ranks_of("token-node0")


def test_what_the_drivers_told_goes_with_the_orders(tmp_path: Path) -> None:
    """Conditions lie in slot order, those of a host that stands by are left out, and peers are compared in earnest."""
    told = [
        replace(
            record,
            conditions=tuple(
                DeviceCondition(uuid=f"{record.token}-{slot}", rows_failed=(node, slot) == (1, 1)) for slot in range(2)
            ),
        )
        for node, record in enumerate(records(3))
    ]
    asked = options("--global-batch-size", "24", on_sick="exclude")
    decision = Chief(asked, tmp_path, least_nodes=2).decide(told, None)
    orders = files.loads(ProbeOptions, decision.probe_options, "orders")

    assert ("node1",) == decision.standby_hosts
    assert "a faulty row of its memory could not be replaced" in decision.reason
    assert ["token-node0-0", "token-node0-1", "token-node2-0", "token-node2-1"] == [
        condition.uuid for condition in orders.conditions
    ]


def test_the_warmup_becomes_a_plan_that_is_kept(tmp_path: Path) -> None:
    """What was measured is solved, saved under the job's key, and found by the next job whatever its hosts' order."""
    first = chief(tmp_path, options(cache=tmp_path / "cache"))
    warmup = first.decide(records(), None)
    orders = files.loads(ProbeOptions, warmup.probe_options, "orders")
    files.write(Path(orders.output), tiny_measurements(tiny_cluster(), orders.cases))

    made = first.after_warmup(warmup, "", nobody)
    again = chief(tmp_path, options(cache=tmp_path / "cache")).decide(records()[::-1], None)

    assert ("train", "train") == (made.phase, again.phase)
    assert made.plan is not None
    assert again.plan is not None
    assert ("measured", "cached") == (made.plan.provenance.source, again.plan.provenance.source)
    of_job = [path for path in (tmp_path / "cache").glob("*/*") if path.is_file()]
    assert [PLAN, CLUSTER] == sorted((path.name for path in of_job), reverse=True)
    assert files.read(next((tmp_path / "cache" / "clusters").glob("*/*")), Measurements) == first.measurements
    assert ("cpu_backend",) == made.patches
    if made.choice is not None:
        assert made.ranks_of("token-node1") == again.ranks_of("token-node1")


def test_a_job_that_only_measures_writes_a_file_and_stops(tmp_path: Path) -> None:
    """Whatever plan is kept: everything is measured, nothing is planned, and nothing is believed of earlier times."""
    kept = options(cache=tmp_path / "cache")
    first = chief(tmp_path, kept)
    warmup = first.decide(records(), None)
    asked = files.loads(ProbeOptions, warmup.probe_options, "orders")
    files.write(Path(asked.output), tiny_measurements(tiny_cluster(), asked.cases))
    first.after_warmup(warmup, "", nobody)
    one = chief(tmp_path, replace(kept, probe_to=tmp_path / "mine.json"))

    warmup = one.decide(records(), None)
    orders = files.loads(ProbeOptions, warmup.probe_options, "orders")
    found = tiny_measurements(tiny_cluster(), orders.cases)
    files.write(Path(orders.output), found)
    made = one.after_warmup(warmup, "", nobody)

    assert ("", "warmup") == (orders.known, warmup.phase)
    assert ("stop", False, None) == (made.phase, made.failed, made.plan)
    assert found == files.read(tmp_path / "mine.json", Measurements)


def test_earlier_outcomes_on_such_machines_correct_the_next_plan(tmp_path: Path) -> None:
    """Steps that always took half as long again as predicted are predicted so, and the plan says it."""
    plans = []
    for margin in (0.02, 0.03):
        one = chief(tmp_path, options(cache=tmp_path / "cache", margin=margin))
        warmup = one.decide(records(), None)
        orders = files.loads(ProbeOptions, warmup.probe_options, "orders")
        files.write(Path(orders.output), tiny_measurements(tiny_cluster(), orders.cases))
        plans.append(one.after_warmup(warmup, "", nobody).plan)
        legal = layouts(orders.job, world_size=4, devices_per_host=2, device_kind="cpu").layouts
        for layout in legal[:: len(legal) // 32][:32]:
            made = replace(
                choice(layout), features=features_of(orders.job, layout, devices_per_host=2), step_time_s=2.0
            )
            tracker = OutcomeTracker("k", made)
            for iteration in range(1, 21):
                outcome = tracker.add(Iteration(iteration=iteration, total=20, step_time_s=3.0, loss=None))
            assert outcome is not None
            one.cache.keep_outcome(outcome, orders.hosts[0])

    before, after = plans
    assert before is not None
    assert after is not None
    assert 1.0 == before.chosen.step_correction
    assert not any("earlier outcomes" in note for note in before.notes)
    assert 1.5 == pytest.approx(after.chosen.step_correction, rel=0.05)
    assert 1.5 == pytest.approx(after.chosen.step_time_s / before.chosen.step_time_s, rel=0.05)
    assert any(note.startswith("Step times are corrected by 3") for note in after.notes)


@pytest.mark.parametrize(("on_error", "phase"), [("train", "train"), ("fail", "stop")])
def test_a_failed_warmup_is_told_and_does_not_cost_the_job(tmp_path: Path, on_error: Any, phase: str) -> None:
    """The user's own words train, or nothing does if the user wants that."""
    one = chief(tmp_path, options(on_error=on_error))

    decision = one.after_warmup(one.decide(records(), None), "the warm-up hangs after 60 s", nobody)

    assert (phase, None) == (decision.phase, decision.plan)
    assert "the warm-up hangs after 60 s" in decision.reason
    assert (on_error == "fail") == decision.failed
    if on_error == "train":
        assert (ARGUMENTS, (2, 3)) == (decision.script_arguments, decision.ranks_of("token-node1"))


def test_without_a_plan_a_checkpoint_still_gets_its_sizes(tmp_path: Path) -> None:
    """A checkpoint of tp=2 cannot be loaded by the tp=1 of the command line, planned or not."""
    (tmp_path / "ckpt" / "iter_0000010" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "ckpt" / "iter_0000010" / "mp_rank_01").mkdir()
    (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").write_text("10")
    one = chief(tmp_path, options("--load", str(tmp_path / "ckpt")))

    decision = one.after_warmup(one.decide(records(), None), "it hangs", nobody)

    assert "2" == value(decision, "--tensor-model-parallel-size")
    assert {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} == decision.environment


def test_words_that_are_not_megatrons_stay(tmp_path: Path) -> None:
    """There is no job to plan for: reason, own words, no patches."""
    decision = chief(tmp_path, options(arguments=("--epochs", "3"))).decide(records(), None)

    assert ("train", None, ()) == (decision.phase, decision.script_arguments, decision.patches)
    assert "--num-layers" in decision.reason


def test_an_error_of_our_own_does_not_cost_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said to be ours."""

    def break_down(*_: object, **__: object) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(megatron, "read_job", break_down)

    decision = chief(tmp_path, options()).decide(records(), None)

    assert "train" == decision.phase
    assert "an error of pipette-launch itself: ZeroDivisionError: oh" in decision.reason


def test_a_signal_is_nobodys_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reaches torch, which ends the workers."""
    one = chief(tmp_path, options())
    one.interruption = KeyError

    def interrupt(*_: object, **__: object) -> None:
        raise KeyError("signal 15")

    monkeypatch.setattr(megatron, "read_job", interrupt)

    with pytest.raises(KeyError):
        one.decide(records(), None)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([{"num_slots": 1}, {}], "unequal numbers of slots (node0 has 1, node1 has 2)"),
        ([{}, {"script_digest": "e"}], "script and arguments differ between node0 and node1"),
        ([{}, {"versions": {"torch": "2.6.0"}}], "versions differ between node0 and node1"),
        ([{}, {"trouble": "NVML shows no GPU"}], "node1: NVML shows no GPU"),
        ([{"node_rank": 0}, {"node_rank": 0}], "two nodes have the same --node-rank: [0, 0]"),
    ],
)
def test_nodes_that_no_plan_can_use_are_named(tmp_path: Path, changes: list[dict[str, Any]], expected: str) -> None:
    """The job runs as under torchrun, and the reason says which nodes and what."""
    nodes = [replace(node, **change) for node, change in zip(records(), changes, strict=True)]

    decision = chief(tmp_path, options()).decide(nodes, None)

    assert expected in decision.reason
    assert "train" == decision.phase


def test_static_nodes_keep_their_order(tmp_path: Path) -> None:
    """`--node-rank` orders them, not their addresses."""
    nodes = [replace(node, node_rank=rank) for node, rank in zip(records(), (1, 0), strict=True)]

    assert ("node1", "node0") == chief(tmp_path, options()).decide(nodes, None).hosts


def test_a_plan_from_a_file_is_written_into_the_words(tmp_path: Path) -> None:
    """Sizes, ranks and patches are the plan's; that it is another job's is said."""
    decision = from_file(tmp_path, plan(PP)).decide(records(), None)

    assert ("2", "32") == (value(decision, "--pipeline-model-parallel-size"), value(decision, "--global-batch-size"))
    assert (3, 2) == decision.ranks_of("token-node0")
    assert decision.plan is not None
    assert "mine.json was made for another job" in decision.plan.notes[0]


@pytest.mark.parametrize(
    ("made", "changes", "expected"),
    [
        (plan(PP, hosts=("node0", "node7")), {}, "the plan is for the hosts node0, node7"),
        (plan(PP), {"fix": ("pp",)}, "the plan has pp=2, and this job pins pp=1"),
    ],
)
def test_a_plan_that_does_not_suit_is_refused(
    tmp_path: Path, made: Plan, changes: dict[str, Any], expected: str
) -> None:
    """The user's own words train, with the reason."""
    decision = from_file(tmp_path, made, **changes).decide(records(), None)

    assert expected in decision.reason
    assert (None, ARGUMENTS) == (decision.plan, decision.script_arguments)


def test_plans_are_tried_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step is free; the last one is the user's own configuration with the variables that it needs."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    one = from_file(tmp_path, plan(Layout(pp=4), Layout(pp=2, tp=2)), "--tensor-model-parallel-size", "2")
    first = one.decide(records(), None)
    # The agent puts the plan's variables into its own environment.
    monkeypatch.setattr(os, "environ", {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    died = [replace(node, attempt=0, verdict="before-first-iteration", failure="it died") for node in records()]

    second = one.decide(died, first)
    third = one.decide([replace(node, attempt=1) for node in died], second)

    assert [(0, False, False), (1, True, False), (2, True, False)] == [
        (step.attempt, step.free, step.proven) for step in (first, second, third)
    ]
    assert ["4", "2", None] == [value(step, "--pipeline-model-parallel-size") for step in (first, second, third)]
    assert "it died" == third.reason
    assert third.choice is None
    assert {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} == third.environment


def test_a_restart_keeps_everything(tmp_path: Path) -> None:
    """Plan, words and variables stay; that it has trained is remembered, also when the chief is another."""
    held = from_file(tmp_path, plan(PP)).decide(records(), None)
    died = [replace(node, attempt=0, verdict="after-first-iteration", failure="x", has_plan=True) for node in records()]

    kept = chief(tmp_path, options()).decide(died, held)
    again = chief(tmp_path, options()).decide([replace(node, verdict="before-first-iteration") for node in died], kept)

    assert replace(held, reason="x; starting again under the same plan", proven=True) == kept == again


def test_words_that_the_user_wrote_are_no_plans_fault(tmp_path: Path) -> None:
    """A flag of the user's that the script does not know is refused under every plan: none of them is tried."""
    spare = plan(PP)
    two = replace(spare, alternatives=(spare.chosen,))
    held = from_file(tmp_path, two, "--numlayers", "8").decide(records(), None)
    refused = "rank 0 ended with exit code 2: the script does not know the flags --numlayers 8"
    died = [replace(node, attempt=0, verdict="before-first-iteration", failure=refused) for node in records()]

    after = from_file(tmp_path, two, "--numlayers", "8").decide(died, held)

    assert (2, None, refused) == (after.attempt, after.choice, after.reason)


def test_the_record_beside_the_checkpoints_is_what_runs(tmp_path: Path) -> None:
    """After a fallback it says so: the job that loads the checkpoint believes it."""
    one = from_file(tmp_path, plan(PP), "--save", str(tmp_path / "ckpt"))
    first = one.decide(records(), None)
    before = files.read(tmp_path / "ckpt" / "pipette-plan.json", Plan)
    died = [replace(node, attempt=0, verdict="before-first-iteration") for node in records()]
    one.decide(died, first)
    after = files.read(tmp_path / "ckpt" / "pipette-plan.json", Plan)

    assert (PP, False) == (before.chosen.layout, before.keeps_own)
    assert (Layout(dp=4), True) == (after.chosen.layout, after.keeps_own)


def test_other_hosts_are_measured_anew(tmp_path: Path) -> None:
    """A plan is for its hosts; the user hears which changed."""
    held = from_file(tmp_path, plan(PP)).decide(records(), None)

    decision = chief(tmp_path, options()).decide(records(1), held)

    assert "warmup" == decision.phase
    assert "the hosts changed from node0, node1 to node0" in decision.reason


def test_a_dry_run_stops(tmp_path: Path) -> None:
    """It leaves no record beside checkpoints that will not be written."""
    one = from_file(tmp_path, plan(PP), "--save", str(tmp_path / "ckpt"), dry_run=True)

    step = one.decide(records(), None)

    assert ("stop", False) == (step.phase, step.failed)
    assert not (tmp_path / "ckpt").exists()


SICK = Verdict(kind="busy", host="node2", figure="61 GB of 80 GB are held")
SLOW = Verdict(kind="slow-device", host="node1", figure="the reference takes 2.1 ms", peers="1.0 ms")


def judging(folder: Path, *verdicts: Verdict, least_nodes: int = 2, **changes: Any) -> Chief:
    """A chief who is told these verdicts by the drivers."""
    # A batch for two nodes and for three.
    asked = options("--global-batch-size", "24", **{"cache": folder / "cache", "on_sick": "exclude", **changes})
    return Chief(asked, folder, judge=lambda *_: verdicts, least_nodes=least_nodes)


def measured(one: Chief, warmup: Decision, *verdicts: Verdict) -> Decision:
    """What follows a warm-up that found this."""
    orders = files.loads(ProbeOptions, warmup.probe_options, "orders")
    cluster = replace(tiny_cluster(len(orders.hosts)), hosts=orders.hosts)
    files.write(Path(orders.output), replace(tiny_measurements(cluster, orders.cases), verdicts=verdicts))
    return one.after_warmup(warmup, "", nobody)


def test_a_sick_node_takes_no_part_and_its_job_is_found_again(tmp_path: Path) -> None:
    """Orders, ranks, plan and key are those of a job of the two others."""
    one = judging(tmp_path, SICK)
    warmup = one.decide(records(3), None)
    made = measured(one, warmup)
    again = judging(tmp_path, SICK).decide(records(3), None)
    plain = judging(tmp_path).decide(records(2), None)

    assert ("warmup", ("node0", "node1"), ("node2",)) == (warmup.phase, warmup.hosts, warmup.standby_hosts)
    assert "node2: 61 GB of 80 GB are held; node2 runs no workers and waits on standby" in warmup.reason
    assert [(0, 1), (2, 3), ()] == [warmup.ranks_of(f"token-node{host}") for host in range(3)]
    assert "train" == made.phase == again.phase == plain.phase
    assert made.plan is not None
    assert {"node0", "node1"} == {*made.plan.hosts}
    for later in (again, plain):
        assert later.plan is not None
        assert ("cached", made.plan.provenance.key) == (later.plan.provenance.source, later.plan.provenance.key)
    assert (("token-node2",), ()) == (again.standby, plain.standby)


def test_a_node_that_was_measured_to_be_slow_is_planned_without(tmp_path: Path) -> None:
    """The plan is for the others; the next start knows it, and says how to measure anew."""
    one = judging(tmp_path)
    warmup = one.decide(records(3), None)
    made = measured(one, warmup, SLOW)
    again = judging(tmp_path).decide(records(3), None)
    warned = judging(tmp_path, on_sick="warn").decide(records(3), None)

    assert () == warmup.standby
    assert (("node0", "node2"), ("node1",)) == (made.hosts, made.standby_hosts)
    assert "node1: the reference takes 2.1 ms, its peers 1.0 ms; node1 runs no workers" in made.reason
    assert made.plan is not None
    assert (4, {"node0", "node2"}) == (made.plan.chosen.layout.world_size, {*made.plan.hosts})
    assert ("train", made.plan.hosts, ("node1",)) == (again.phase, again.plan and again.plan.hosts, again.standby_hosts)
    assert "to measure all nodes again, delete" in again.reason
    # Whoever does not mind has no plan of all three yet.
    assert ("warmup", ()) == (warned.phase, warned.standby)


def test_sick_nodes_end_the_job_if_they_are_to(tmp_path: Path) -> None:
    """Before the warm-up and after it, whatever --pipette-on-error says."""
    before = judging(tmp_path, SICK, on_sick="fail").decide(records(3), None)
    one = judging(tmp_path, on_sick="fail")
    after = measured(one, one.decide(records(3), None), SLOW)

    for step, sentence in ((before, SICK.words()), (after, SLOW.words())):
        assert ("stop", True) == (step.phase, step.failed)
        assert sentence in step.reason


def test_by_default_a_sick_node_is_told_once(tmp_path: Path) -> None:
    """The warm-up knows again what its drivers said before; the job goes on with all nodes."""
    little = replace(SICK, figure="1 GB of 80 GB are held", is_sick=False)
    one = judging(tmp_path, SICK, little, replace(little, kind="nic"), on_sick="warn")
    warmup = one.decide(records(3), None)
    made = measured(one, warmup, SICK, SLOW)

    # A search that takes long, as on a busy machine, is shared, and says so behind the verdicts.
    said = made.reason.partition("; the search was shared by ")[0]
    assert (f"{little.words()}; {SICK.words()}", SLOW.words()) == (warmup.reason, said)
    assert (3, 3) == (len(warmup.hosts), len(made.hosts))


@pytest.mark.parametrize(
    ("batch", "least", "why"),
    [
        ("24", 3, "2 of 3 nodes would be left, and --nnodes wants at least 3; start with --nnodes 2:3"),
        ("6", 2, "global batch size 6 is not divisible by micro_batch_size*dp = 1*4"),
    ],
)
def test_a_node_that_the_job_needs_stays(tmp_path: Path, batch: str, least: int, why: str) -> None:
    """MIN of --nnodes and the job's own configuration say how small it may become."""
    asked = options("--global-batch-size", batch, on_sick="exclude")
    one = Chief(asked, tmp_path, judge=lambda *_: (SICK,), least_nodes=least)

    decision = one.decide(records(3), None)

    assert "node2 cannot be excluded: " in decision.reason
    assert why in decision.reason
    assert "the job goes on with it" in decision.reason
    assert ("warmup", 3, ()) == (decision.phase, len(decision.hosts), decision.standby)


def test_a_plan_that_names_the_sick_node_keeps_it(tmp_path: Path) -> None:
    """The user's plan counts; one for the others does without it."""
    for hosts, standby in ((("node0", "node1", "node2"), ()), (("node0", "node1"), ("node2",))):
        made = plan(Layout(dp=2 * len(hosts)), hosts=hosts)
        files.write(tmp_path / "mine.json", made)

        decision = judging(tmp_path, SICK, plan=tmp_path / "mine.json", cache=None).decide(records(3), None)

        assert ("train", standby) == (decision.phase, decision.standby_hosts)
        assert decision.plan is not None, decision.reason
        assert ("the plan is for the hosts node0, node1, node2" in decision.reason) == (not standby)


def test_a_restart_knows_who_stood_by(tmp_path: Path) -> None:
    """The same nodes train; when planning fails the others do not suddenly take part."""
    one = judging(tmp_path, SICK)
    warmup = one.decide(records(3), None)
    failed = one.after_warmup(warmup, "it hangs", nobody)
    held = measured(one, one.decide(records(3), None))
    died = [replace(node, attempt=0, verdict="before-first-iteration", failure="it died") for node in records(3)]
    kept = one.decide([replace(node, verdict="none") for node in died], held)
    after = one.decide(died, held)
    alone = one.decide([replace(node, verdict="none") for node in died[:2]], held)

    assert held.plan is not None
    assert "it hangs; training with your own configuration" in failed.reason
    for step in (failed, held, kept, after):
        assert (("node0", "node1"), ("node2",)) == (step.hosts, step.standby_hosts)
        assert "train" == step.phase
    assert (("node0", "node1"), (), held.plan) == (alone.hosts, alone.standby_hosts, alone.plan)


def test_a_lost_node_brings_the_sick_one_back(tmp_path: Path) -> None:
    """Two are the least: rather with it than not at all."""
    one = judging(tmp_path, SICK)
    held = measured(one, one.decide(records(3), None))

    decision = one.decide([records(3)[0], records(3)[2]], held)

    assert ("warmup", ("node0", "node2"), ()) == (decision.phase, decision.hosts, decision.standby)
    assert "node2 cannot be excluded: 1 of 2 nodes would be left, and --nnodes wants at least 2" in decision.reason
