"""The rough estimate of which numbers of hosts are worth a search."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from facts_for_tests import drawn_cluster, tiny_cluster, tiny_job, tiny_measurements, tiny_model
from search.worlds import nvlink_racks, planned, splits, still, with_experts

from pipette_launch.cost.compute.carried_over import with_extrapolated_times
from pipette_launch.errors import LayoutError, MegatronError, PipetteError
from pipette_launch.facts import Batch, Job, Layout, Measurements, Plan
from pipette_launch.facts.measurements import without_hosts
from pipette_launch.facts.plan import refit
from pipette_launch.megatron import Continuation
from pipette_launch.search.candidates import SearchInputs
from pipette_launch.search.fallback_plans import (
    CLOSE,
    FallbackNeeds,
    placed_anew,
    rough_step,
    with_cases_of,
    with_fallback_plans,
)
from pipette_launch.search.solve import SolveOptions


def of_hosts(hosts: int, *, least: int = 2) -> float:
    """Hosts of eight devices, 1,024 samples a step, a model of 32 layers."""
    return rough_step(8 * hosts, devices_per_host=8, samples=1024, layers=32, least_devices=least)


def test_short_pipelines_on_fewer_hosts_come_before_deep_ones_on_more() -> None:
    """The order agrees with the step times of whole searches: 0.91, 1.22, 1.31, 1.50, 1.71 and 2.08 s."""
    assert [64, 56, 48, 60, 32, 62] == sorted((32, 48, 56, 60, 62, 64), key=of_hosts)


def test_no_estimate_where_a_pipeline_is_deeper_than_the_model() -> None:
    """63 hosts share eight devices' worth of factors with the batch: stages of eight devices make 63."""
    assert math.inf == of_hosts(63)


def test_a_replica_has_its_least_devices() -> None:
    """More devices for each make fewer replicas."""
    assert of_hosts(64, least=16) > of_hosts(64)


FREE = Continuation()
FIXED = Continuation(
    kept=("tp", "pp", "vpp", "layers_per_chunk"), note="the format fixes tp and pp; --some-flag frees them"
)


def job_of(batch: int, **changes: object) -> Callable[[int], Job]:
    """Reads a job for hosts of two devices."""

    def read(num_hosts: int) -> Job:
        return tiny_job(2 * num_hosts, batch=Batch(global_batch_size=batch), **changes)

    return read


def templated(
    plan: Plan,
    measurements: Measurements,
    *,
    batch: int,
    tolerate: int = 1,
    least: int = 1,
    continuation: Continuation = FREE,
    read: Callable[[int], Job] | None = None,
) -> Plan:
    """The plan with its templates, made with all the time in the world."""
    needs = FallbackNeeds(
        tolerate=tolerate,
        least_hosts=least,
        global_batch_size=batch,
        num_layers=tiny_model().num_layers,
        job_of=read or job_of(batch),
        continuation_of=lambda _layout: continuation,
    )
    return with_fallback_plans(plan, measurements, needs, options=SolveOptions(), clock=still)


def world(hosts: int, batch: int, **changes: object) -> tuple[Plan, Measurements]:
    """A plan for equal hosts of two devices, and their measurements."""
    measurements = tiny_measurements(tiny_cluster(hosts))
    job = tiny_job(2 * hosts, batch=Batch(global_batch_size=batch), **changes)
    return planned(job, measurements), measurements


def test_each_loss_has_its_plan() -> None:
    """For one host less and for two; the first hosts train, and the batch stays."""
    plan, measurements = world(4, 24)
    made = templated(plan, measurements, batch=24, tolerate=2)

    assert [("node0", "node1", "node2"), ("node0", "node1")] == [one.hosts for one in made.templates]
    for one in made.templates:
        assert 0 == 24 % (one.chosen.layout.dp * one.chosen.layout.micro_batch_size)
    assert plan.chosen == made.chosen


@pytest.mark.parametrize(("tolerate", "least", "sizes"), [(0, 1, []), (2, 3, [3]), (3, 4, []), (9, 1, [3, 2, 1])])
def test_min_of_nnodes_bounds_the_plans(tolerate: int, least: int, sizes: list[int]) -> None:
    """No plan is for fewer hosts, and a note explains the effect if more losses should be tolerated."""
    plan, measurements = world(4, 24)
    made = templated(plan, measurements, batch=24, tolerate=tolerate, least=least)

    assert sizes == [len(one.hosts) for one in made.templates]
    assert (len(sizes) < tolerate) == any("waits for other hosts" in note for note in made.advice)


def test_a_batch_that_does_not_divide_leaves_a_host_idle() -> None:
    """Two of three hosts train, with the reason in a note; no plan is made twice."""
    plan, measurements = world(4, 8, pinned=("tp", "pp", "cp"))
    made = templated(plan, measurements, batch=8, tolerate=2, read=job_of(8, pinned=("tp", "pp", "cp")))
    notes = [note for note in made.advice if note.startswith("There is no plan for 3 hosts")]

    assert [2] == [len(one.hosts) for one in made.templates]
    assert 1 == len(notes)
    assert "global_batch_size=8" in notes[0]
    assert notes[0].endswith("when 1 of 4 hosts is lost, 2 train and 1 stands by.")
    fitted = refit(made, ["node1", "node2", "node3"])
    assert fitted is not None
    assert 2 == len(fitted.hosts)


def test_fewer_hosts_train_where_that_is_quicker() -> None:
    """Each loss has the quickest of the plans for the hosts that are left and for fewer, as brute force finds it."""
    plan, measurements = world(8, 64)
    made = templated(plan, measurements, batch=64, tolerate=4)
    steps_s = {}
    for size in range(1, 8):
        try:
            job = job_of(64)(size)
            known = with_cases_of(job, without_hosts(measurements, plan.hosts[size:]))
            found = planned(job, with_extrapolated_times(job, known))
        except PipetteError:
            continue
        steps_s[size] = found.chosen.step_time_s

    assert 7 not in steps_s
    for left in (7, 6, 5, 4):
        fitted = refit(made, plan.hosts[:left])
        assert fitted is not None
        quickest_s = min(step_s for size, step_s in steps_s.items() if size <= left)
        # Two layouts that differ in the distributed optimizer alone take as long here, but for the last digit.
        assert quickest_s == pytest.approx(fitted.chosen.step_time_s, rel=1e-12)


def test_templates_keep_what_the_checkpoint_keeps() -> None:
    """Even if another layout would be faster; a note names the flag that allows it."""
    plan, measurements = world(4, 24, own=Layout(tp=2, dp=4), pinned=("tp", "pp"))
    made = templated(plan, measurements, batch=24, tolerate=3, continuation=FIXED)

    assert [3, 2, 1] == [len(one.hosts) for one in made.templates]
    assert {(2, 1)} == {(one.chosen.layout.tp, one.chosen.layout.pp) for one in made.templates}
    assert "The format fixes tp and pp; --some-flag frees them." in made.advice


def two_candidates(second_s: float) -> tuple[Plan, Measurements]:
    """A pipeline over all four hosts, which no three can run, and plain replicas of some step time."""
    measurements = tiny_measurements(tiny_cluster(4))
    first = planned(
        tiny_job(8, own=Layout(pp=4, dp=2), batch=Batch(global_batch_size=24), pinned=("pp",)), measurements
    )
    second = planned(tiny_job(8, batch=Batch(global_batch_size=24), pinned=("pp", "tp")), measurements)
    other = replace(second.chosen, step_time_s=first.chosen.step_time_s * second_s)
    slow = replace(second.chosen, step_time_s=2 * first.chosen.step_time_s)
    return replace(first, alternatives=(other,), keeps_own=False, own=slow), measurements


@pytest.mark.parametrize(("second_s", "is_second"), [(1.04, True), (1.06, False)])
def test_a_plan_that_can_lose_a_host_is_chosen_if_it_is_nearly_as_fast(second_s: float, is_second: bool) -> None:
    """Plan and fallback plans are chosen together, as checkpoints tie them; else notes explain the effect of a loss."""
    plan, measurements = two_candidates(second_s)
    made = templated(plan, measurements, batch=24, least=3, continuation=FIXED)

    assert (1 if is_second else 4) == made.chosen.layout.pp
    assert is_second == bool(made.templates)
    if is_second:
        assert plan.chosen in made.alternatives
        assert "its checkpoints can be loaded on fewer hosts" in made.reasons[0]
    else:
        assert any("There is no plan for 3 hosts" in note and "waits for other" in note for note in made.advice)


def test_tp_and_pp_stay_if_that_is_nearly_as_fast() -> None:
    """Checkpoints of the same sizes load faster, so a plan within 5 % that keeps them is chosen."""
    plan, measurements = world(4, 24, own=Layout(pp=2, dp=4), pinned=("tp", "pp"))
    free = templated(plan, measurements, batch=24)
    job = replace(job_of(24)(3), own=Layout(pp=2, dp=3), pinned=("pp", "tp"))
    left = without_hosts(measurements, ["node3"])
    best, same = planned(job_of(24)(3), left), planned(job, left)

    is_close = same.chosen.step_time_s <= (1 + CLOSE) * best.chosen.step_time_s
    expected = same if is_close else best
    assert expected.chosen.layout.pp == free.templates[0].chosen.layout.pp


def test_a_job_that_cannot_be_read_for_fewer_hosts_has_no_plan_for_them() -> None:
    """The reason is the reader's."""

    def read(num_hosts: int) -> Job:
        raise MegatronError(f"--nnodes {num_hosts}: oh. And more")

    plan, measurements = world(3, 24)
    made = templated(plan, measurements, batch=24, tolerate=1, least=2, read=read)

    assert () == made.templates
    assert any("There is no plan for 2 hosts (--nnodes 2: oh): when 1 of 3 hosts is lost" in one for one in made.advice)


def test_gradient_buckets_of_another_size_are_no_template() -> None:
    """The checkpoint could not be loaded."""
    plan, measurements = world(4, 24, pinned=("pp", "tp"))
    buckets = Continuation(kept=("tp", "pp"), bucket_dp=6)
    made = templated(replace(plan, alternatives=()), measurements, batch=24, least=3, continuation=buckets)

    assert (8, ()) == (made.chosen.layout.dp, made.templates)
    assert any("gradient buckets" in note for note in made.advice)


def test_ranks_are_placed_anew_for_the_hosts_that_are_left() -> None:
    """Never for a longer step, and always with the prediction for these hosts."""
    measurements = tiny_measurements(drawn_cluster(random.Random(3), hosts=4))
    job = tiny_job(8, own=Layout(pp=4, dp=2), batch=Batch(global_batch_size=24), pinned=("pp", "tp", "cp"))
    inputs = SearchInputs.of(job, measurements, memory_margin=0.0)
    chosen = planned(job, tiny_measurements(tiny_cluster(4))).chosen
    where_it_was = inputs.predictor.step_time(chosen.layout, chosen.placement).total_s
    placed = placed_anew(inputs, chosen, seed=0, is_late=lambda: False)
    late = placed_anew(inputs, chosen, seed=0, is_late=lambda: True)

    assert chosen.layout == placed.layout
    assert placed.step_time_s <= late.step_time_s <= where_it_was * (1 + 1e-9)
    assert placed.step_time_s == pytest.approx(inputs.predictor.step_time(placed.layout, placed.placement).total_s)


def expert_job(num_hosts: int) -> Job:
    """Experts that HybridEP exchanges, on hosts of two devices."""
    return tiny_job(
        2 * num_hosts,
        own=Layout(dp=2 * num_hosts, ep=2),
        model=tiny_model(num_experts=8, moe_layer_freq=(1,) * 4),
        batch=Batch(global_batch_size=48),
        performance_flags=("--moe-flex-dispatcher-backend hybridep", "--moe-token-dispatcher-type flex"),
    )


def test_templates_keep_ranks_together() -> None:
    """After the loss of one or two hosts, too, no expert group leaves its NVLink domain."""
    measurements = with_experts(tiny_measurements(nvlink_racks(8, 4, 2, seed=5)))
    made = templated(planned(expert_job(8), measurements), measurements, batch=48, tolerate=2, read=expert_job)

    assert made.templates
    for one in made.templates:
        cluster = without_hosts(measurements, set(made.hosts) - set(one.hosts)).cluster
        assert splits(expert_job(len(one.hosts)), cluster, one.chosen) is None


def test_a_host_of_another_domain_changes_the_places() -> None:
    """If the remaining hosts cannot keep blocks together, ranks are placed again or there is no plan."""
    job = replace(expert_job(4), own=Layout(dp=8, ep=4))
    before, after = (with_experts(tiny_measurements(nvlink_racks(4, 2, 2, seed=seed))) for seed in (0, 1))
    chosen = planned(replace(job, pinned=("ep", "pp", "tp", "cp")), before).chosen
    inputs = SearchInputs.of(job, after, memory_margin=0.0)
    placed = placed_anew(inputs, chosen, seed=0, is_late=lambda: True)
    uneven = SearchInputs.of(job, with_experts(tiny_measurements(nvlink_racks(4, 3, 2))), memory_margin=0.0)

    assert splits(job, after.cluster, chosen)
    assert splits(job, after.cluster, placed) is None
    with pytest.raises(LayoutError, match="HybridEP needs groups"):
        placed_anew(uneven, chosen, seed=0, is_late=lambda: True)
