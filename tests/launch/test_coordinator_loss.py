"""The decision for all nodes after nodes were lost, came back, or stood by as spares."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from facts_for_tests import tiny_cluster, tiny_measurements
from launch.worlds import ARGUMENTS, options, records, standing_by, value

from pipette_launch.facts import Measurements, files
from pipette_launch.facts.health import Verdict
from pipette_launch.facts.messages import Decision, Failure, NodeRecord
from pipette_launch.launch.cache import CLUSTER
from pipette_launch.launch.coordinator import Coordinator
from pipette_launch.probe.messages import WarmupOrder

SLOW = Verdict(kind="slow-device", host="node0", figure="the reference takes 2.1 ms", peers="1.0 ms")


def beginning(folder: Path, *more: str, least_nodes: int = 1, **changes: Any) -> Coordinator:
    """Return a coordinator of a job whose batch suits two and three nodes."""
    asked = options("--global-batch-size", "24", *more, **{"cache": folder / "cache", "tolerate": 1, **changes})
    return Coordinator(asked, lambda: folder / CLUSTER, judge=lambda *_: (), least_nodes=least_nodes)


def trained(one: Coordinator, count: int, *verdicts: Verdict) -> Decision:
    """Return the decision after the warm-up of this number of nodes."""
    warmup = one.decide(records(count), None)
    orders = files.loads(WarmupOrder, warmup.order, "orders")
    cluster = replace(tiny_cluster(len(orders.hosts)), hosts=orders.hosts)
    files.write(one.measured_at(), replace(tiny_measurements(cluster, orders.cases), verdicts=verdicts))
    return one.after_warmup(warmup, "")


def some(*numbers: int, **changes: Any) -> list[NodeRecord]:
    """Return records of these nodes out of four after an iteration; some have a dead worker."""
    return [replace(records(4)[number], attempt=0, **changes) for number in numbers]


def test_too_few_nodes_for_the_first_decision(tmp_path: Path) -> None:
    """The job ends, no matter which node was lost after torch's rendezvous."""
    decision = beginning(tmp_path, least_nodes=3).decide(records(2), None)

    assert ("stop", True) == (decision.phase, decision.failed)
    assert "2 nodes are left, and --nnodes needs 3" == decision.reason


def test_a_lost_node_costs_no_warmup(tmp_path: Path) -> None:
    """The others go on with the fallback plan. When the node returns, the first plan runs again."""
    one = beginning(tmp_path)
    held = trained(one, 3)
    died = Failure(cause="a peer is gone", rank=0, exit_code=1)
    after = one.decide(some(0, 2, verdict="after-first-iteration", failure=died), held, {"node1": "silent for 10 s"})
    back = one.decide(some(0, 1, 2), after)

    assert held.plan is not None
    assert [2] == [len(template.hosts) for template in held.plan.templates]
    assert ("train", ("node0", "node2"), True) == (after.phase, after.hosts, after.is_refitted)
    assert after.reason.startswith("node1 is lost (silent for 10 s); going on with 2 of 3 nodes: ")
    assert after.restarts_left == held.restarts_left == 3
    assert after.choice is not None
    assert 4 == after.choice.layout.world_size
    assert [0, 1, 2, 3] == sorted(after.ranks_of("token-node0") + after.ranks_of("token-node2"))
    assert ("train", 3, held.plan.provenance.key) == (
        back.phase,
        len(back.hosts),
        back.plan and back.plan.provenance.key,
    )
    assert back.reason.startswith("node1 is back; going on with 3 of 3 nodes: ")


def test_a_coordinator_that_measured_nothing_goes_on_too(tmp_path: Path) -> None:
    """The decision has the plan. Other nodes replace the lost ones, and ranks stay where they are."""
    held = trained(beginning(tmp_path, cache=None), 3)
    after = beginning(tmp_path / "other", cache=None).decide(some(1, 2), held)

    assert held.plan is not None
    assert after.plan is not None
    template = held.plan.templates[0]
    assert ("train", template.chosen.placement) == (after.phase, after.plan.chosen.placement)
    assert ("node2", "node1") == after.plan.hosts


def test_without_a_template_a_plan_is_made_from_what_is_known(tmp_path: Path) -> None:
    """The user asked for no fallback plans, but all remaining nodes were measured."""
    one = beginning(tmp_path, tolerate=0)
    held = trained(one, 3)
    after = one.decide(some(0, 2), held)

    assert held.plan is not None
    assert () == held.plan.templates
    assert ("train", ("node0", "node2"), False) == (after.phase, after.hosts, after.is_refitted)
    assert "nothing is measured again" in after.reason


def test_a_node_that_others_do_not_reach_stands_by(tmp_path: Path) -> None:
    """Its agent runs, but its workers cannot reach the others. It trains again after the loss of another node."""
    one = beginning(tmp_path)
    held = trained(one, 3)
    after = one.decide(some(0, 1, 2, verdict="after-first-iteration"), held, {"node2": "out of reach from node1"})
    later = one.decide(some(0, 2, verdict="after-first-iteration"), after, {"node1": "its agent is gone"})

    assert ("train", ("node0", "node1"), ("node2",)) == (
        after.phase,
        after.hosts,
        standing_by(after),
    )
    assert after.reason.startswith("node2 is lost (out of reach from node1); going on with 2 of 3 nodes: ")
    assert ("train", {"node0", "node2"}) == (later.phase, set(later.hosts))


def test_a_warmup_starts_again_without_a_node_that_others_do_not_reach(tmp_path: Path) -> None:
    """There are no measurements yet, and the node is not measured."""
    one = beginning(tmp_path)
    held = one.decide(records(3), None)
    after = one.decide(records(3), held, {"node2": "out of reach from node1"})

    assert ("warmup", ("node0", "node1"), ("node2",)) == (
        after.phase,
        after.hosts,
        standing_by(after),
    )
    orders = files.loads(WarmupOrder, after.order, "orders")
    assert ["node0", "node1"] == [host.name for host in orders.hosts]


def test_a_batch_that_nobody_named_stays(tmp_path: Path) -> None:
    """It was one micro-batch on each replica; the training goes on with the same number of samples."""
    at = ARGUMENTS.index("--global-batch-size")
    unnamed = (*ARGUMENTS[:at], *ARGUMENTS[at + 2 :])
    asked = options(arguments=unnamed, cache=tmp_path / "cache", tolerate=1)
    one = Coordinator(asked, lambda: tmp_path / CLUSTER, judge=lambda *_: ())
    held = trained(one, 3)
    after = one.decide(some(0, 2), held)

    assert ("train", True) == (after.phase, after.is_refitted)
    assert value(held, "--global-batch-size") == value(after, "--global-batch-size")
    assert value(after, "--global-batch-size") is not None


def test_an_unknown_node_is_measured(tmp_path: Path) -> None:
    """Its links were never measured."""
    one = beginning(tmp_path)
    held = trained(one, 3)

    assert "warmup" == one.decide(some(0, 1, 3), held).phase


def test_a_checkpoint_that_a_template_cannot_load_outweighs_it(tmp_path: Path) -> None:
    """The newest checkpoint counts: a new plan is made that can load it."""
    folder = tmp_path / "ckpt"
    one = beginning(tmp_path, "--load", str(folder))
    held = trained(one, 3)
    for stage in range(2):
        (folder / "iter_0000010" / f"mp_rank_00_00{stage}").mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("10")
    after = one.decide(some(0, 2), held, {"node1": "its agent is gone"})

    assert held.plan is not None
    assert 1 == held.plan.templates[0].chosen.layout.pp
    assert "2" == value(after, "--pipeline-model-parallel-size")
    assert "node1 is lost (its agent is gone); the fallback plan cannot be used" in after.reason


def test_after_a_slowdown_everything_is_measured_again(tmp_path: Path) -> None:
    """The cached plan and earlier measurements are not used, and a slow node is left out."""
    one = beginning(tmp_path, on_sick="exclude", watch="restart")
    held = trained(one, 3)
    again = one.decide(some(0, 1, 2, verdict="after-first-iteration", slowed="steps take 2 times as long"), held)
    orders = files.loads(WarmupOrder, again.order, "orders")
    cluster = replace(tiny_cluster(3), hosts=orders.hosts)
    files.write(one.measured_at(), replace(tiny_measurements(cluster, orders.cases), verdicts=(SLOW,)))
    after = one.after_warmup(again, "")

    assert ("warmup", 3, "") == (again.phase, len(again.hosts), orders.known)
    assert again.reason.startswith("steps take 2 times as long")
    assert ("train", ("node1", "node2"), ("node0",)) == (
        after.phase,
        after.hosts,
        standing_by(after),
    )


def test_restarts_run_out(tmp_path: Path) -> None:
    """Each failure of a job that has trained uses one; then the job ends with the sentence of the failure."""
    one = beginning(tmp_path)
    step = trained(one, 2)
    died = Failure(cause="it died")
    for left in (2, 1, 0):
        step = one.decide(some(0, 1, verdict="after-first-iteration", failure=died), step)
        assert ("train", left) == (step.phase, step.restarts_left)
    step = one.decide(some(0, 1, verdict="after-first-iteration", failure=died), step)

    assert ("stop", True, "it died; --max-restarts is used up") == (step.phase, step.failed, step.reason)


def test_workers_that_ended_well_end_the_job(tmp_path: Path) -> None:
    """Nothing failed, so there is no message."""
    one = beginning(tmp_path)
    step = one.decide(some(0, 1, verdict="done"), trained(one, 2))

    assert ("stop", False, "") == (step.phase, step.failed, step.reason)


def test_a_spare_is_measured_and_waits(tmp_path: Path) -> None:
    """It replaces a lost node under the same plan. The next start finds plan and spare without a warm-up."""
    one = beginning(tmp_path, spares=1)
    held = trained(one, 3)
    after = one.decide(some(0, 2), held)
    again = beginning(tmp_path, spares=1).decide(records(3), None)

    assert (("node0", "node1"), ("node2",)) == (held.hosts, standing_by(held))
    assert "node2 stands by as a spare, because of --pipette-spares" in held.reason
    assert held.plan is not None
    assert ("node2",) == held.plan.other_hosts
    assert one.planner.cache.path("x") is not None
    assert ("train", {"node0", "node2"}) == (after.phase, {*after.hosts})
    assert after.reason.startswith("node1 is lost, node2 takes its place; going on with 2 of 3 nodes: ")
    assert after.plan is not None
    assert held.plan.chosen.layout == after.plan.chosen.layout
    assert ("train", ("node2",)) == (again.phase, standing_by(again))
    assert again.plan is not None
    assert ("cached", ("node2",)) == (again.plan.provenance.source, again.plan.other_hosts)


def test_a_sick_node_is_the_first_to_stand_by(tmp_path: Path) -> None:
    """Without a sick node the last one would be the spare."""
    held = trained(beginning(tmp_path, spares=1), 3, SLOW)

    assert (("node1", "node2"), ("node0",)) == (held.hosts, standing_by(held))


@pytest.mark.parametrize(
    ("spares", "least", "standby", "told"),
    [
        (2, 2, ("node2",), "--pipette-spares 2: --nnodes needs 2 of 3 nodes, so the job has 1 spare"),
        (1, 3, (), "--pipette-spares 1: --nnodes needs 3 of 3 nodes, so the job has 0 spares"),
    ],
)
def test_min_of_nnodes_bounds_the_spares(
    tmp_path: Path, spares: int, least: int, standby: tuple[str, ...], told: str
) -> None:
    """The job keeps MIN nodes, and reports fewer spares than the user asked for."""
    held = trained(beginning(tmp_path, spares=spares, least_nodes=least), 3)

    assert standby == standing_by(held)
    assert told in held.reason


def test_spares_may_be_what_the_job_cannot_use(tmp_path: Path) -> None:
    """A batch of 16 suits two nodes and not three: the third is measured, and stands by."""
    one = beginning(tmp_path, "--global-batch-size", "16", spares=1)
    held = trained(one, 3)

    assert ("train", ("node2",)) == (held.phase, standing_by(held))
    assert held.plan is not None
    assert files.read(next((tmp_path / "cache" / "clusters").glob("*/*")), Measurements).cluster.num_slots == 6
