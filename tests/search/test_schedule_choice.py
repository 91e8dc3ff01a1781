"""Schedules that Megatron lacks are chosen where they save enough and fit, and only where they are asked for."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from facts_for_tests import changed_job, tiny_measurements, tiny_model, with_free_bytes
from gpu_rules.nccl import Pipeline, seconds_of
from hypothesis import given, settings
from hypothesis import strategies as st
from search.worlds import ALL_FIELDS, on_gpus, pipeline_job, planned, two_racks

from pipette_launch.cost.pipeline.engine import simulate
from pipette_launch.cost.step.predictor import Predictor
from pipette_launch.facts import Batch, Job, Layout, Measurements, Plan, Samples, files
from pipette_launch.facts.layout import NO_RECOMPUTE
from pipette_launch.facts.programs import programs
from pipette_launch.facts.schedule import EXECUTABLE, schedule_of
from pipette_launch.search.schedule_choice import GAIN


def pinned_job(**changes: object) -> Job:
    """A pipeline of four ranks that nothing may change."""
    model = tiny_model(**{"untie_embeddings_and_output_weights": True, **changes})
    return replace(pipeline_job(), model=model, pinned=ALL_FIELDS)


def with_schedules(job: Job, *names: str) -> Plan:
    """The plan on two racks."""
    return planned(job, tiny_measurements(two_racks()), schedules=names)


def test_a_shorter_bubble_wins_and_the_plan_says_by_how_much() -> None:
    """The order goes with the plan through its file; the best under Megatron's own schedules is tried next."""
    plan = with_schedules(pinned_job(), *EXECUTABLE)
    stock = with_schedules(pinned_job())

    assert plan.chosen.order is not None
    assert plan.chosen.schedule == plan.chosen.order.name in EXECUTABLE
    assert plan.chosen.step_time_s <= (1 - GAIN) * stock.chosen.step_time_s
    assert sum(plan.chosen.breakdown_s.values()) == pytest.approx(plan.chosen.step_time_s)
    assert plan.alternatives[0] == stock.chosen
    assert plan.chosen.schedule in plan.reasons[0]
    assert plan == files.loads(Plan, files.dumps(plan), "here")


def test_without_being_asked_megatrons_own_stays() -> None:
    """`stock` is the default."""
    plan = with_schedules(pinned_job())

    assert (plan.chosen.schedule, plan.chosen.order) == ("1f1b", None)


def test_layers_of_transformer_engine_are_not_split() -> None:
    """They compute W with I, and the plan names the flag."""
    plan = with_schedules(pinned_job(transformer_impl="transformer_engine"), *EXECUTABLE)

    assert plan.chosen.schedule == "1f1b"
    reason = "they do not run with --transformer-impl transformer_engine"
    assert f"Schedules beside Megatron's own are left out: {reason}." in plan.advice


def folded_job(**changes: object) -> Job:
    """A pipeline of four ranks with two chunks each."""
    return replace(pinned_job(num_layers=8, **changes), own=Layout(pp=4, vpp=2))


def test_a_folded_pipeline_has_both_ends_on_one_rank() -> None:
    """V-ZB is chosen where nothing else is allowed, and its first rank needs the most memory."""
    plan = with_schedules(folded_job(), "v-zb")

    assert plan.chosen.order is not None
    assert (plan.chosen.schedule, plan.chosen.order.placement) == ("v-zb", "v")
    assert plan.chosen.memory.model_bytes[0] == max(plan.chosen.memory.model_bytes)


def test_layers_that_are_placed_by_hand_are_not_folded() -> None:
    """They are placed for Megatron's own chunks."""
    job = folded_job()
    job = replace(job, own=replace(job.own, layers_per_chunk=(1,) * 8))

    assert with_schedules(job, "v-zb").chosen.schedule == "interleaved-1f1b"


def test_a_folded_model_may_tie_its_embeddings() -> None:
    """Both ends are on one rank, which adds up their gradients."""
    plan = with_schedules(folded_job(untie_embeddings_and_output_weights=False), "v-zb")

    assert plan.chosen.schedule == "v-zb"


def test_ranks_are_placed_for_the_schedule() -> None:
    """The ends of a folded pipeline may be far apart, those of a loop may not."""
    job = folded_job()
    machines = tiny_measurements(two_racks(slow_bytes_per_s=1e6))
    plan = planned(job, machines, schedules=("v-zb",))
    assert plan.chosen.order is not None
    schedule, predictor = plan.chosen.order.schedule(), Predictor(job, machines)

    least_s = min(
        predictor.step_time(plan.chosen.layout, order, schedule).total_s for order in itertools.permutations(range(4))
    )
    assert plan.chosen.step_time_s == pytest.approx(least_s)


def test_a_layout_that_fits_only_under_a_lean_schedule_is_found() -> None:
    """Where stock has to recompute, V-Min keeps few enough activations without."""
    job = folded_job()
    job = replace(job, pinned=tuple(name for name in ALL_FIELDS if name not in ("recompute", "vpp")))
    machines = tiny_measurements(two_racks())
    roomy = planned(job, machines, memory_margin=0).chosen
    over_bytes = roomy.memory.limit_bytes - int(0.8 * max(roomy.memory.model_bytes))
    cluster = machines.cluster
    short = replace(machines, cluster=with_free_bytes(cluster, cluster.memory_bytes - over_bytes))

    stock = planned(job, short, memory_margin=0).chosen
    plan = planned(job, short, memory_margin=0, schedules=("v-min",))

    assert stock.layout.recompute.granularity == "full"
    assert plan.chosen.schedule == "v-min"
    assert plan.chosen.layout.recompute == NO_RECOMPUTE
    assert max(plan.chosen.memory.model_bytes) <= plan.chosen.memory.limit_bytes
    assert plan.chosen.step_time_s <= 0.9 * stock.step_time_s
    assert plan.alternatives[0] == stock


def test_what_the_patch_cannot_execute_is_said() -> None:
    """The plan names the flag, and keeps to Megatron's own."""
    plan = with_schedules(changed_job(pinned_job(), performance_flags=("--rampup-batch-size 2 2 100",)), *EXECUTABLE)

    assert plan.chosen.schedule == "1f1b"
    assert "Schedules beside Megatron's own are left out: they do not run with --rampup-batch-size." in plan.advice


@pytest.mark.parametrize("version", ["0.15.3", "0.21.0"])
def test_a_release_that_the_patch_refuses_gets_no_such_plan(version: str) -> None:
    """The plan names the release, and keeps to Megatron's own."""
    plan = with_schedules(changed_job(pinned_job(), megatron_version=version), *EXECUTABLE)

    assert plan.chosen.schedule == "1f1b"
    reason = f"they run with megatron-core from 0.16 on and before 0.21, and the job has {version}"
    assert f"Schedules beside Megatron's own are left out: {reason}." in plan.advice


@pytest.mark.parametrize("version", ["0.16.0", "0.20.0"])
def test_the_newest_and_the_oldest_release_get_such_plans(version: str) -> None:
    """Nothing is left out."""
    plan = with_schedules(changed_job(pinned_job(), megatron_version=version), *EXECUTABLE)

    assert plan.chosen.order is not None


def drawn_gpus(rng: random.Random) -> Measurements:
    """Four GPUs of drawn links and speeds, on which layer, embedding and head take drawn times."""
    cluster = on_gpus(two_racks(slow_bytes_per_s=10 ** rng.uniform(6, 9)))
    cluster = replace(cluster, slot_speed=tuple(rng.choice((1.0, 1.0, 0.7)) for _ in range(4)))
    measured = tiny_measurements(cluster)

    def seconds(part: str) -> dict[str, Samples]:
        most_s = {"layer": 2e-3, "embedding": 5e-4, "head": 5e-3}[part]
        passes = ("forward", "input_grad", "weight_grad")
        return {each: Samples(values_s=(rng.uniform(0.1, 1) * most_s,)) for each in passes}

    return replace(measured, compute=tuple(replace(one, **seconds(one.part)) for one in measured.compute))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 30), vpp=st.sampled_from((1, 2)), groups=st.integers(1, 4))
def test_what_is_chosen_is_never_slower_than_stock_under_the_rules_of_nccl(seed: int, vpp: int, groups: int) -> None:
    """However many work queues a device has, and though stock is taken to exchange its messages for nothing."""
    machines = drawn_gpus(random.Random(seed))
    job = replace(pinned_job(num_layers=8), own=Layout(pp=4, vpp=vpp), batch=Batch(global_batch_size=4 * groups))
    plan = planned(job, machines, schedules=EXECUTABLE)
    order = plan.chosen.order
    if order is None:
        return
    schedule, stock, predictor = order.schedule(), plan.alternatives[0], Predictor(job, machines)
    times = predictor.stage_times(plan.chosen.layout, plan.chosen.placement, schedule)
    stock_s = simulate(
        schedule_of(stock.layout, schedule.num_microbatches), predictor.stage_times(stock.layout, stock.placement)
    ).makespan_s
    found = programs(schedule.ranks, schedule.rank_S, schedule.times)

    for one_queue in (True, False):
        assert Pipeline(found, schedule.rank_S, *seconds_of(times), one_queue=one_queue).run() <= stock_s


def test_messages_are_ordered_by_the_times_of_the_stages_where_they_lie() -> None:
    """On GPUs the plan holds them, for the slots that its ranks have in the end; over gloo messages need no order."""
    job, cluster = folded_job(), two_racks()
    machines = tiny_measurements(on_gpus(cluster))

    gpus, cpus = (planned(job, tiny_measurements(each), schedules=("v-zb",)) for each in (on_gpus(cluster), cluster))

    assert gpus.chosen.order is not None
    assert cpus.chosen.order is not None
    times = Predictor(job, machines).stage_times(
        gpus.chosen.layout, gpus.chosen.placement, gpus.chosen.order.schedule()
    )
    assert gpus.chosen.order.times == times.expected
    assert cpus.chosen.order.times is None


def test_memory_for_the_communicators_of_neighbours_stays_free() -> None:
    """A schedule that fits only without them is not taken: three more than are counted anyway, a sixth of a GB each."""
    job, machines = pinned_job(), tiny_measurements(on_gpus(two_racks()))
    roomy = planned(job, machines, memory_margin=0, schedules=("zb-1p",)).chosen
    spare_bytes = int((roomy.memory.limit_bytes - max(roomy.memory.need_bytes)) / 1.03)

    def chosen(least_bytes: int) -> str:
        free_bytes = machines.cluster.memory_bytes - int(1.03 * (spare_bytes - least_bytes))
        short = replace(machines, cluster=with_free_bytes(machines.cluster, free_bytes))
        return planned(job, short, memory_margin=0, schedules=("zb-1p",)).chosen.schedule

    assert roomy.schedule == "zb-1p"
    assert chosen(490_000_000) == "zb-1p"
    assert chosen(480_000_000) == "1f1b"
