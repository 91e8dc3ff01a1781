"""Tests of the check of a device order before training, from decisions alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from facts_for_tests import tiny_cluster, tiny_measurements
from launch.worlds import choice, coordinator, options, plan, records
from search.worlds import on_gpus

from pipette_launch.facts import Cluster, Layout, Links, Plan, files
from pipette_launch.facts.cluster import is_in_device_order, shared_order
from pipette_launch.facts.messages import Decision, Failure, NodeRecord, TrialReport
from pipette_launch.facts.plan import refit
from pipette_launch.launch import commands
from pipette_launch.launch.coordinator import Coordinator
from pipette_launch.launch.device_orders import check_words, failed, needs_check
from pipette_launch.launch.trials.watch import TrialWatch
from pipette_launch.probe.messages import WarmupOrder

TP2 = Layout(tp=2, dp=4, etp=2, sequence_parallel=True)
ORDER = (0, 2, 1, 3)
PASSED = TrialReport(step_s=(), failure=None, took_s=9.0)
FAILED = replace(PASSED, failure=Failure(cause="all_gather of 8 MiB returned 16 instead of 0 at element 0 on rank 3"))


def fast_pairs() -> Cluster:
    """Two hosts of four GPUs, links 0-2 and 1-3 a hundred times faster than others."""
    speed_DD = np.full((4, 4), 1e6)
    for one, other in ((0, 2), (1, 3)):
        speed_DD[[one, other], [other, one]] *= 100
    links = Links(latency_s=np.full((4, 4), 1e-5), bandwidth_bytes_per_s=speed_DD)
    return replace(on_gpus(tiny_cluster(2, 4)), within_host=(links, links))


def nodes() -> list[NodeRecord]:
    """Two nodes of four GPUs."""
    return [replace(record, host=host, num_slots=4) for record, host in zip(records(), fast_pairs().hosts, strict=True)]


def one(folder: Path, **changes: object) -> Coordinator:
    """A coordinator whose job uses tensor parallelism on two GPUs."""
    words = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
    fixed = ("tp", "pp", "cp", "vpp", "micro_batch_size", "recompute")
    return coordinator(folder, options(*words, cache=folder / "cache", on_error="fail", fix=fixed, **changes))


def measured(folder: Path, **changes: object) -> tuple[Coordinator, Decision]:
    """Measure the hosts with fast pairs, and plan."""
    decides = one(folder, **changes)
    warmup = decides.decide(nodes(), None)
    orders = files.loads(WarmupOrder, warmup.probe_options, "orders")
    files.write(Path(orders.output), tiny_measurements(fast_pairs(), orders.cases))
    return decides, decides.after_warmup(warmup, "")


def test_an_order_is_checked_on_the_devices_that_will_train(tmp_path: Path) -> None:
    """The check comes before training and gives devices the same ranks; the plan says that it passed, no warning."""
    decides, check = measured(tmp_path)
    training = decides.after_trial(check, PASSED)

    assert ("trial", True, "order-0") == (check.phase, check.checks_order, check.key)
    assert check.ranks_of("token-node1") == training.ranks_of("token-node1")
    assert check.choice is not None
    order = shared_order(check.choice.placement, 4)
    assert order is not None
    assert order != (0, 1, 2, 3)
    assert f"checking NCCL with the device order {','.join(map(str, order))}: " in check_words(check)
    assert ("train", False, 0, 0) == (training.phase, training.checks_order, training.trial, training.iterations)
    assert training.choice is not None
    assert training.choice.is_order_checked
    assert "" == training.reason
    assert training.plan is not None
    assert training.plan.reasons[0].endswith("returned every value in its place.")
    assert any("and this order alone saves" in reason for reason in training.plan.reasons)


def test_a_cached_plan_is_not_checked_again(tmp_path: Path) -> None:
    """The folder of the plan names hosts, devices, versions and NCCL's variables."""
    decides, check = measured(tmp_path)
    training = decides.after_trial(check, PASSED)
    again = one(tmp_path).decide(nodes(), None)

    assert "train" == again.phase
    assert again.choice == training.choice


def test_a_check_that_fails_goes_back_to_device_order(tmp_path: Path) -> None:
    """In this job and in the next; the screen and the plan say why, and the step is predicted anew."""
    decides, check = measured(tmp_path)
    training = decides.after_trial(check, FAILED)
    again = one(tmp_path).decide(nodes(), None)

    assert ("train", "train") == (training.phase, again.phase)
    assert training.plan is not None
    assert again.plan is not None
    assert again.plan.chosen == training.plan.chosen
    assert all(is_in_device_order(way.placement, 4) for way in (training.plan.chosen, *training.plan.alternatives))
    assert check.choice is not None
    assert training.plan.chosen.step_time_s > 1.02 * check.choice.step_time_s
    assert "returned 16 instead of 0 at element 0 on rank 3 (see NVIDIA/nccl#1906)" in training.reason
    assert training.plan.reasons[0].startswith("Devices stay in order inside hosts: with the device order")


@pytest.mark.parametrize(("report", "is_permuted"), [(PASSED, True), (FAILED, False)])
def test_trials_come_after_the_check(tmp_path: Path, report: TrialReport, is_permuted: bool) -> None:
    """They run the order that will train, so no step is measured in an order that is given up again."""
    decides, check = measured(tmp_path, trials=1, trial_iters=3)
    first = decides.after_trial(check, report)
    ran = replace(PASSED, step_s=(1.0,) * first.iterations)
    second = decides.after_trial(first, ran)
    training = decides.after_trial(second, replace(ran, step_s=(0.5,) * first.iterations))

    assert [True, False, False, False] == [one.checks_order for one in (check, first, second, training)]
    assert ["trial", "trial", "trial", "train"] == [one.phase for one in (check, first, second, training)]
    assert second.choice is not None
    assert is_permuted != is_in_device_order(second.choice.placement, 4)
    assert training.ranks_of("token-node1") == second.ranks_of("token-node1")


def gpu_plan(placement: tuple[int, ...], **changes: object) -> Plan:
    """A plan for two hosts of four GPUs."""
    chosen = choice(TP2, placement)
    return replace(plan(TP2), device_kind="cuda", chosen=chosen, **changes)  # type: ignore[arg-type]


def training_of(made: Plan) -> Decision:
    """The training of a plan."""
    return Decision(phase="train", tokens=("a", "b"), hosts=made.hosts, num_slots=(4, 4), plan=made)


@pytest.mark.parametrize(
    ("placement", "kind", "is_needed"),
    [
        pytest.param((0, 2, 1, 3, 4, 6, 5, 7), "cuda", True, id="another order"),
        pytest.param((0, 1, 2, 3, 5, 4, 6, 7), "cuda", True, id="two orders, from a file of the user's"),
        pytest.param((4, 5, 6, 7, 0, 1, 2, 3), "cuda", False, id="hosts exchanged"),
        pytest.param((0, 2, 1, 3, 4, 6, 5, 7), "cpu", False, id="gloo"),
    ],
)
def test_what_is_checked(placement: tuple[int, ...], kind: str, is_needed: bool) -> None:
    """Only orders of GPUs inside hosts."""
    made = replace(gpu_plan(placement), device_kind=kind)

    assert is_needed == needs_check(training_of(made))


def test_other_hosts_are_checked_again() -> None:
    """A plan that is fitted to another host forgets what was checked."""
    made = gpu_plan((0, 2, 1, 3, 4, 6, 5, 7), other_hosts=("node2",))
    made = replace(made, chosen=replace(made.chosen, is_order_checked=True))
    assert made.known_hosts == ("node0", "node1", "node2")
    same, other = refit(made, ("node0", "node1")), refit(made, ("node0", "node2"))

    assert same is not None
    assert other is not None
    assert (True, False) == (same.chosen.is_order_checked, other.chosen.is_order_checked)


def test_templates_go_back_too() -> None:
    """They would run on these GPUs after a loss."""
    half = Layout(tp=2, dp=2, etp=2, sequence_parallel=True)
    template = replace(plan(half, hosts=("node0",)), device_kind="cuda", chosen=choice(half, (0, 2, 1, 3)))
    made = gpu_plan((0, 2, 1, 3, 4, 6, 5, 7), templates=(template,))
    back, _ = failed(training_of(made), FAILED.failure or Failure(cause=""))

    assert (0, 1, 2, 3) == back.templates[0].chosen.placement


def test_a_check_waits_as_long_as_a_start_and_runs_no_script() -> None:
    """Its workers know the ranks of their host; thousands of ranks import from cold storage for longer."""
    check = replace(training_of(gpu_plan((0, 2, 1, 3, 4, 6, 5, 7))), phase="trial", checks_order=True, trial=1)
    watch = TrialWatch()
    watch.begin(check)

    assert (180.4, 0.0) == watch.patience_s
    watch.begin(replace(check, num_slots=(2048, 2048)))
    assert (384.8, 0.0) == watch.patience_s
    assert ("-m", "pipette_launch.probe.order_check", "cuda", "2", "4", "6", "5", "7") == commands.order_check(
        "cuda", 2, (4, 6, 5, 7)
    ).arguments[1:]
