"""The decision for all nodes if a node is sick."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from facts_for_tests import tiny_cluster, tiny_measurements
from launch.worlds import options, plan, records, standing_by

from pipette_launch.facts import Layout, files
from pipette_launch.facts.health import DeviceCondition, Verdict
from pipette_launch.facts.messages import Decision, Failure
from pipette_launch.launch.cache import CLUSTER
from pipette_launch.launch.coordinator import Coordinator
from pipette_launch.probe.messages import WarmupOrder

SICK = Verdict(kind="busy", host="node2", figure="61 GB of 80 GB are held")
SLOW = Verdict(kind="slow-device", host="node1", figure="the reference takes 2.1 ms", peers="1.0 ms")


def judging(folder: Path, *verdicts: Verdict, least_nodes: int = 2, **changes: Any) -> Coordinator:
    """Return a coordinator that gets these verdicts from the drivers."""
    # A batch for two nodes and for three.
    asked = options("--global-batch-size", "24", **{"cache": folder / "cache", "on_sick": "exclude", **changes})
    return Coordinator(asked, lambda: folder / CLUSTER, judge=lambda *_: verdicts, least_nodes=least_nodes)


def measured(one: Coordinator, warmup: Decision, *verdicts: Verdict) -> Decision:
    """Return the decision after a warm-up with these verdicts."""
    orders = files.loads(WarmupOrder, warmup.order, "orders")
    cluster = replace(tiny_cluster(len(orders.hosts)), hosts=orders.hosts)
    files.write(one.measured_at(), replace(tiny_measurements(cluster, orders.cases), verdicts=verdicts))
    return one.after_warmup(warmup, "")


@pytest.mark.parametrize(("on_sick", "on_standby"), [("exclude", ("node1",)), ("warn", ())])
def test_what_the_drivers_told_goes_on_file(tmp_path: Path, on_sick: str, on_standby: tuple[str, ...]) -> None:
    """Conditions are in slot order without hosts on standby, and their faults are verdicts of the measurements."""
    told = [
        replace(
            record,
            conditions=tuple(
                DeviceCondition(uuid=f"{record.token}-{slot}", rows_failed=(node, slot) == (1, 1)) for slot in range(2)
            ),
        )
        for node, record in enumerate(records(3))
    ]
    one = Coordinator(options("--global-batch-size", "24", on_sick=on_sick), lambda: tmp_path / CLUSTER, least_nodes=2)
    decision = one.decide(told, None)
    measured(one, decision)
    found = one.planner.measurements

    assert on_standby == standing_by(decision)
    assert "a faulty row of its memory could not be replaced" in decision.reason
    assert found is not None
    hosts = [host for host in ("node0", "node1", "node2") if host not in on_standby]
    assert [f"token-{host}-{slot}" for host in hosts for slot in range(2)] == [one.uuid for one in found.conditions]
    assert [host for host in hosts if host == "node1"] == [verdict.host for verdict in found.verdicts]


def test_a_sick_node_takes_no_part_and_its_job_is_found_again(tmp_path: Path) -> None:
    """Order, ranks, plan and key are the same as in a job of the two other nodes."""
    one = judging(tmp_path, SICK)
    warmup = one.decide(records(3), None)
    made = measured(one, warmup)
    again = judging(tmp_path, SICK).decide(records(3), None)
    plain = judging(tmp_path).decide(records(2), None)

    assert ("warmup", ("node0", "node1"), ("node2",)) == (
        warmup.phase,
        warmup.hosts,
        standing_by(warmup),
    )
    assert "node2: 61 GB of 80 GB are held; node2 runs no workers and waits on standby" in warmup.reason
    assert [(0, 1), (2, 3), ()] == [warmup.ranks_of(f"token-node{host}") for host in range(3)]
    assert "train" == made.phase == again.phase == plain.phase
    assert made.plan is not None
    assert {"node0", "node1"} == {*made.plan.hosts}
    for later in (again, plain):
        assert later.plan is not None
        assert ("cached", made.plan.provenance.key) == (later.plan.provenance.source, later.plan.provenance.key)
    assert (("node2",), ()) == (standing_by(again), standing_by(plain))


def test_a_node_that_was_measured_to_be_slow_is_planned_without(tmp_path: Path) -> None:
    """The plan is for the other nodes. The next start finds it, and says how to measure again."""
    one = judging(tmp_path)
    warmup = one.decide(records(3), None)
    made = measured(one, warmup, SLOW)
    again = judging(tmp_path).decide(records(3), None)
    warned = judging(tmp_path, on_sick="warn").decide(records(3), None)

    assert () == warmup.standby
    assert (("node0", "node2"), ("node1",)) == (made.hosts, standing_by(made))
    assert "node1: the reference takes 2.1 ms, its peers 1.0 ms; node1 runs no workers" in made.reason
    assert made.plan is not None
    assert (4, {"node0", "node2"}) == (made.plan.chosen.layout.world_size, {*made.plan.hosts})
    assert ("train", made.plan.hosts, ("node1",)) == (
        again.phase,
        again.plan and again.plan.hosts,
        standing_by(again),
    )
    assert "to measure all nodes again, delete" in again.reason
    # Whoever does not mind has no plan of all three yet.
    assert ("warmup", ()) == (warned.phase, warned.standby)


def test_the_drivers_are_asked_anew(tmp_path: Path) -> None:
    """A start remembers only verdicts that a warm-up alone can give."""
    one = judging(tmp_path)
    made = measured(one, one.decide(records(3), None), SICK)
    again = judging(tmp_path).decide(records(3), None)

    assert ("train", ("node2",)) == (made.phase, standing_by(made))
    assert ("warmup", ()) == (again.phase, again.standby)


def test_sick_nodes_end_the_job_if_they_are_to(tmp_path: Path) -> None:
    """Both before and after the warm-up, with any value of --pipette-on-error."""
    before = judging(tmp_path, SICK, on_sick="fail").decide(records(3), None)
    one = judging(tmp_path, on_sick="fail")
    after = measured(one, one.decide(records(3), None), SLOW)

    for step, sentence in ((before, SICK.words()), (after, SLOW.words())):
        assert ("stop", True) == (step.phase, step.failed)
        assert sentence in step.reason


def test_by_default_a_sick_node_is_told_once(tmp_path: Path) -> None:
    """The warm-up finds the same problem again, and the job goes on with all nodes."""
    little = replace(SICK, figure="1 GB of 80 GB are held", is_sick=False)
    one = judging(tmp_path, SICK, little, replace(little, kind="pcie"), on_sick="warn")
    warmup = one.decide(records(3), None)
    made = measured(one, warmup, SICK, SLOW)

    # A search that takes long, as on a busy machine, is shared, and says so behind the verdicts.
    said = made.reason.partition("; the search was shared by ")[0]
    assert (f"{little.words()}; {SICK.words()}", SLOW.words()) == (warmup.reason, said)
    assert (3, 3) == (len(warmup.hosts), len(made.hosts))


@pytest.mark.parametrize(
    ("batch", "least", "why"),
    [
        ("24", 3, "2 of 3 nodes would be left, and --nnodes needs at least 3; start with --nnodes 2:3"),
        ("6", 2, "global_batch_size=6; on 4 data-parallel ranks it must be a multiple of 4"),
    ],
)
def test_a_node_that_the_job_needs_stays(tmp_path: Path, batch: str, least: int, why: str) -> None:
    """MIN of --nnodes and the job's own configuration say how small it may become."""
    asked = options("--global-batch-size", batch, on_sick="exclude")
    one = Coordinator(asked, lambda: tmp_path / CLUSTER, judge=lambda *_: (SICK,), least_nodes=least)

    decision = one.decide(records(3), None)

    assert "node2 cannot be excluded: " in decision.reason
    assert why in decision.reason
    assert "the job goes on with it" in decision.reason
    assert ("warmup", 3, ()) == (decision.phase, len(decision.hosts), decision.standby)


def test_a_plan_that_names_the_sick_node_keeps_it(tmp_path: Path) -> None:
    """The user's plan file decides. A plan file for the other nodes leaves it out."""
    for hosts, standby in ((("node0", "node1", "node2"), ()), (("node0", "node1"), ("node2",))):
        made = plan(Layout(dp=2 * len(hosts)), hosts=hosts)
        files.write(tmp_path / "mine.json", made)

        decision = judging(tmp_path, SICK, plan=tmp_path / "mine.json", cache=None).decide(records(3), None)

        assert ("train", standby) == (decision.phase, standing_by(decision))
        assert decision.plan is not None, decision.reason
        assert ("the plan is for the hosts node0, node1, node2" in decision.reason) == (not standby)


def test_a_restart_knows_who_stood_by(tmp_path: Path) -> None:
    """The same nodes train. If planning fails, nodes on standby do not join."""
    one = judging(tmp_path, SICK)
    warmup = one.decide(records(3), None)
    failed = one.after_warmup(warmup, "it hangs")
    held = measured(one, one.decide(records(3), None))
    died = [
        replace(node, attempt=0, verdict="before-first-iteration", failure=Failure(cause="it died"))
        for node in records(3)
    ]
    kept = one.decide([replace(node, verdict="none") for node in died], held)
    after = one.decide(died, held)
    alone = one.decide([replace(node, verdict="none") for node in died[:2]], held)

    assert held.plan is not None
    assert "it hangs; training with your own configuration" in failed.reason
    for step in (failed, held, kept, after):
        assert (("node0", "node1"), ("node2",)) == (step.hosts, standing_by(step))
        assert "train" == step.phase
    assert (("node0", "node1"), (), held.plan) == (alone.hosts, standing_by(alone), alone.plan)


def test_a_lost_node_brings_the_sick_one_back(tmp_path: Path) -> None:
    """The job needs two nodes, so it trains with the sick one."""
    one = judging(tmp_path, SICK)
    held = measured(one, one.decide(records(3), None))

    decision = one.decide([records(3)[0], records(3)[2]], held)

    assert ("warmup", ("node0", "node2"), ()) == (decision.phase, decision.hosts, decision.standby)
    assert "node2 cannot be excluded: 1 of 2 nodes would be left, and --nnodes needs at least 2" in decision.reason
