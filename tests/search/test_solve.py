"""The planner keeps its promises: never worse, it fits, deterministic, anytime, and it says why."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from facts_for_tests import changed_job, tiny_cluster, tiny_job, tiny_measurements, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from search.legal import legal_layouts
from search.toys import Ticks
from search.worlds import (
    ALL_FIELDS,
    PROVENANCE,
    SLOW_BYTES_PER_S,
    nvlink_racks,
    on_gpus,
    pipeline_job,
    planned,
    splits,
    two_racks,
    with_experts,
)

from pipette_launch.cost.step.predictor import Predictor
from pipette_launch.errors import UsageError
from pipette_launch.facts import (
    Batch,
    ComputeCase,
    Layout,
    Links,
    Plan,
    Recompute,
    files,
)
from pipette_launch.facts.co_location import Domains
from pipette_launch.megatron.rules.broken import Rules
from pipette_launch.megatron.rules.degrees import tensor_faults
from pipette_launch.search.frontier import UNPROMISING
from pipette_launch.search.layouts import base_layouts
from pipette_launch.search.solve import Searched, SearchLoop, SolveOptions, solve


def test_it_beats_the_users_own_by_the_margin_or_keeps_it() -> None:
    """Plain data parallelism over slow links loses to a layout that talks less."""
    plan = planned(tiny_job(4))

    assert not plan.keeps_own
    assert plan.own.layout == Layout(dp=4)
    assert plan.own.is_host_order
    assert plan.chosen.step_time_s <= 0.98 * plan.own.step_time_s
    assert plan.chosen.bound_s <= plan.chosen.step_time_s
    assert sum(plan.chosen.breakdown_s.values()) == pytest.approx(plan.chosen.step_time_s)


def test_a_gain_below_the_margin_is_not_taken() -> None:
    """With a margin that nothing reaches, the user's own configuration stays, and the runners-up are still shown."""
    plan = planned(tiny_job(4), margin=0.9)

    assert plan.keeps_own
    assert plan.chosen == plan.own
    assert plan.candidates() == ()
    assert plan.alternatives
    assert "less than the margin of 90.0%" in plan.reasons[0]


def test_everything_pinned_keeps_the_own_layout() -> None:
    """Where only the placement is free, equal links leave nothing to gain."""
    plan = planned(tiny_job(4, pinned=ALL_FIELDS), tiny_measurements(tiny_cluster(4, 1)))

    assert plan.keeps_own
    assert plan.alternatives == ()
    assert "no other layout or placement is predicted to be faster" in plan.reasons[0]


def test_ranks_go_where_the_links_are_fast() -> None:
    """A pinned pipeline keeps its layout and crosses the slow links only once."""
    model = tiny_model(untie_embeddings_and_output_weights=True)
    job, measurements = replace(pipeline_job(), model=model), tiny_measurements(two_racks())
    cost = Predictor(job, measurements).placement_cost(job.own).cost

    plan = planned(job, measurements)

    assert not plan.keeps_own
    assert plan.chosen.layout == job.own
    slot_of = [plan.chosen.placement.index(rank) for rank in range(4)]
    assert sum(slot_of[rank] % 2 != slot_of[rank + 1] % 2 for rank in range(3)) == 1
    assert plan.chosen.step_time_s == pytest.approx(min(cost(placement) for placement in permutations(range(4))))
    assert "placed by the links" in plan.reasons[0]


def test_equal_inputs_give_equal_plans() -> None:
    """Seed and inputs decide, where time does not."""
    job, measurements = tiny_job(8, pinned=("recompute", "vpp")), tiny_measurements(tiny_cluster(4, 2))

    assert planned(job, measurements, seed=3) == planned(job, measurements, seed=3)


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 5), st.integers(1, 100), st.integers(0, 100))
def test_more_budget_never_gives_a_slower_plan(seed: int, short: int, more: int) -> None:
    """The same course, cut short earlier or later."""
    job = tiny_job(4, own=Layout(pp=4), pinned=("micro_batch_size", "recompute"))
    measurements = tiny_measurements(two_racks())

    def within(budget_s: float) -> float:
        options = SolveOptions(budget_s=budget_s, seed=seed)
        plan = solve(job, measurements, options=options, clock=Ticks(), provenance=PROVENANCE)
        return plan.chosen.step_time_s

    assert within(short + more) <= within(short)


def test_no_budget_still_gives_a_plan() -> None:
    """Without any time the user's own configuration is priced and kept, and the plan says what happened."""
    options = SolveOptions(budget_s=0.0)
    plan = solve(tiny_job(4), tiny_measurements(tiny_cluster()), options=options, clock=Ticks(), provenance=PROVENANCE)

    assert plan.keeps_own
    assert "stopped at its budget of 0 us, after 1 layout" in plan.reasons[0]


def test_a_plan_fits_in_memory() -> None:
    """The fastest layout is not taken where it needs more than the machine has."""
    job = tiny_job(4)
    free = planned(job)
    need = max(free.chosen.memory.model_bytes)
    cluster = tiny_cluster(memory_bytes=need - 1, bandwidth_bytes_per_s=SLOW_BYTES_PER_S)
    tight = planned(job, tiny_measurements(cluster), memory_margin=0.0)

    assert all(choice.fits for choice in (tight.chosen, *tight.alternatives))
    assert max(tight.chosen.memory.model_bytes) < need
    assert tight.dropped["predicted peak memory is over the limit"] > 0


def test_an_own_layout_that_does_not_fit_is_marked_and_left() -> None:
    """Any plan that fits is better than one that is predicted to run out of memory."""
    job = tiny_job(4)
    leanest = min(max(choice.memory.model_bytes) for choice in planned(job, num_alternatives=99).alternatives)
    plan = planned(job, tiny_measurements(tiny_cluster(memory_bytes=leanest)), memory_margin=0.0)

    assert not plan.own.fits
    assert plan.chosen.fits
    assert not plan.keeps_own
    assert "The user's own layout tp1 pp1 dp4 mbs1 is predicted to need" in plan.reasons[0]


def test_an_unmeasured_own_layout_takes_its_neighbours_time() -> None:
    """Its step time is finite, the plan says whose it is, and the file can be written and read."""
    cases = tuple(ComputeCase(tp=2, cp=1, micro_batch_size=size) for size in (1, 2))
    plan = planned(tiny_job(4), tiny_measurements(tiny_cluster(), cases))

    assert math.isfinite(plan.own.step_time_s)
    assert any("nearest priced layout, tp2 pp1 dp2 mbs1" in note for note in plan.advice)
    assert plan == files.loads(Plan, files.dumps(plan), "test")


def test_an_own_layout_that_megatron_refuses_is_told_and_left() -> None:
    """The job would not have started under torchrun; it starts with the plan."""
    job = tiny_job(4, own=Layout(pp=4), model=tiny_model(num_layers=2))
    plan = planned(job)

    assert not plan.keeps_own
    assert plan.own.layout == job.own
    assert any("The user's own layout tp1 pp4" in note for note in plan.advice)


def test_alternatives_are_other_plans_and_no_slower_than_the_own() -> None:
    """What is tried next differs from what failed, and is worth trying before the user's own configuration."""
    plan = planned(tiny_job(4), tiny_measurements(tiny_cluster()), margin=0.0)
    ways = [(choice.layout, choice.placement) for choice in (plan.chosen, *plan.alternatives)]
    times = [choice.step_time_s for choice in (plan.chosen, *plan.alternatives, plan.own)]

    assert len(plan.alternatives) == 3
    assert len(set(ways)) == 4
    assert sorted(times) == times
    assert min(max(choice.memory.model_bytes) for choice in plan.alternatives) < 0.8 * max(
        plan.chosen.memory.model_bytes
    )


def test_the_dropped_are_counted() -> None:
    """Looked at, dropped and why: all of it is in the plan."""
    plan = planned(tiny_job(4), tiny_measurements(tiny_cluster(), (ComputeCase(tp=1, cp=1, micro_batch_size=1),)))

    assert plan.num_layouts > 50
    assert plan.dropped["no compute time was measured for its tp, cp and micro-batch"] > 0
    assert plan.dropped["context parallelism does not run on CPU"] > 0


def test_one_process_gets_a_plan() -> None:
    """A world of one has a layout, a placement and a bound."""
    plan = planned(tiny_job(1), tiny_measurements(tiny_cluster(1, 1)))

    assert plan.chosen.placement == (0,)


def test_gpus_keep_residues() -> None:
    """On CUDA every host's ranks differ modulo its devices."""
    plan = planned(tiny_job(4, own=Layout(pp=4)), tiny_measurements(on_gpus(tiny_cluster(2, 2))))

    for choice in (plan.chosen, *plan.alternatives):
        assert [{rank % 2 for rank in choice.placement[host : host + 2]} for host in (0, 2)] == [{0, 1}, {0, 1}]


@pytest.mark.parametrize("values", [{"margin": 1.0}, {"memory_margin": -0.1}, {"budget_s": -1.0}])
def test_options_check_themselves(values: dict[str, float]) -> None:
    """A margin of 100 % or a negative budget is a mistake, and named."""
    with pytest.raises(UsageError, match=next(iter(values))):
        SolveOptions(**values)  # type: ignore[arg-type]


@settings(max_examples=10, deadline=None)
@given(st.permutations(range(4)))
def test_renaming_equal_slots_changes_nothing(names: list[int]) -> None:
    """Where all links and slots are equal, the real objective does not care who sits where."""
    job = tiny_job(4, own=Layout(pp=2, dp=2), batch=Batch(global_batch_size=8))
    cost = Predictor(job, tiny_measurements(tiny_cluster(4, 1))).placement_cost(job.own).cost

    assert cost(tuple(names)) == pytest.approx(cost((0, 1, 2, 3)), rel=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_no_layout_in_any_placement_is_faster_than_the_floor(seed: int) -> None:
    """All layouts that fit, in all placements of four unequal slots, take at least as long as the plan says."""
    rng = np.random.default_rng(seed)
    speeds = tuple(tuple(row) for row in rng.uniform(1e7, 1e9, (4, 4)).tolist())
    links = Links(latency_s=((1e-4,) * 4,) * 4, bandwidth_bytes_per_s=speeds)
    cluster = replace(tiny_cluster(4, 1), between_hosts=links)
    job, measurements = tiny_job(4, pinned=("recompute", "micro_batch_size")), tiny_measurements(cluster)
    plan = planned(job, measurements, margin=0.0)
    predictor = Predictor(job, measurements)
    found = legal_layouts(job, world_size=4, devices_per_host=1, device_kind="cpu")
    fastest_s = min(
        predictor.placement_cost(layout).cost(order) for layout in found for order in permutations(range(4))
    )

    assert 0 < plan.floor_s <= fastest_s * (1 + 1e-12)
    assert fastest_s == pytest.approx(plan.chosen.step_time_s)
    assert plan.gap == plan.chosen.step_time_s / plan.floor_s - 1


def test_what_is_set_aside_is_counted_and_no_faster_than_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once one layout promises too little the others of its degrees get no price, and the floor holds for them too.

    Eight slots count as many here.
    """
    monkeypatch.setattr("pipette_launch.search.solve.MANY_SLOTS", 1)
    rng = np.random.default_rng(2)
    speeds = tuple(tuple(row) for row in (10 ** rng.uniform(7, 9.5, (8, 8))).tolist())
    links = Links(latency_s=((1e-5,) * 8,) * 8, bandwidth_bytes_per_s=speeds)
    job = tiny_job(8, batch=Batch(global_batch_size=64))
    measurements = tiny_measurements(replace(tiny_cluster(8, 1), between_hosts=links))
    plans = []
    for most_excess in (math.inf, 1e-9):
        monkeypatch.setattr("pipette_launch.search.solve.MOST_EXCESS", most_excess)
        plans.append(planned(job, measurements, margin=0.0))
    whole, plan = plans

    assert UNPROMISING not in whole.dropped
    assert plan.dropped[UNPROMISING] > 0
    assert plan.floor_s <= whole.chosen.step_time_s


HYBRID = ("--moe-flex-dispatcher-backend hybridep", "--moe-token-dispatcher-type flex")
DEEP = ("--moe-enable-deepep", "--moe-token-dispatcher-type flex")


@pytest.mark.parametrize(
    ("flags", "own", "hosts", "devices", "note"),
    [
        (HYBRID, Layout(dp=16, ep=8), 8, 2, "blocks of 8 expert-parallel ranks lies inside an NVLink domain"),
        (DEEP, Layout(dp=16, ep=2), 8, 2, "blocks of 2 expert-parallel ranks lies inside a host, as DeepEP"),
        (DEEP, Layout(pp=2, dp=8, ep=4), 4, 4, "blocks of 4 expert-parallel ranks lies inside a host, as DeepEP"),
    ],
)
@pytest.mark.parametrize("seed", range(2))
def test_experts_stay_together(
    flags: tuple[str, ...], own: Layout, hosts: int, devices: int, note: str, seed: int
) -> None:
    """Whatever else may change, no candidate splits a block, and the plan says what it keeps to."""
    cluster = nvlink_racks(hosts, hosts // 2, devices, seed=seed)
    model = tiny_model(num_experts=16, moe_layer_freq=(1,) * 4)
    pinned = tuple(name for name in ALL_FIELDS if name not in ("micro_batch_size", "overlap_grad_reduce"))
    job = tiny_job(16, own=own, model=model, performance_flags=flags, pinned=pinned)
    free = replace(job, pinned=())
    measurements = with_experts(tiny_measurements(cluster))
    plans = {job: planned(job, measurements, margin=0.0), free: planned(free, measurements)}

    assert any(note in one for one in plans[job].notes)
    for which, plan in plans.items():
        assert {None} == {splits(which, cluster, one) for one in (plan.chosen, *plan.alternatives)}


def test_an_order_that_splits_experts_is_no_configuration_to_keep() -> None:
    """Domains come and go in torchrun's order, so the user's own layout gets other places, and the plan says why."""
    cluster = nvlink_racks(4, 2, 2, seed=5)
    job = tiny_job(
        8,
        own=Layout(dp=8, ep=4),
        model=tiny_model(num_experts=4, moe_layer_freq=(1,) * 4),
        performance_flags=HYBRID,
        pinned=ALL_FIELDS,
    )
    plan = planned(job, with_experts(tiny_measurements(cluster)))

    assert splits(job, cluster, plan.own)
    assert splits(job, cluster, plan.chosen) is None
    assert job.own == plan.chosen.layout
    assert not plan.keeps_own
    assert "in torchrun's order it splits blocks of 4 expert-parallel ranks, and HybridEP needs" in plan.own_fault
    assert any("is not kept: in torchrun's order it splits" in note for note in plan.advice)


def test_userbuffers_keep_tensor_parallelism_inside_hosts() -> None:
    """Layouts whose groups fill no host are left out with the reason; on CPU nothing of this holds."""
    own = Layout(tp=2, etp=2, dp=4, sequence_parallel=True)
    job = tiny_job(8, model=tiny_model(transformer_impl="transformer_engine"), own=own)
    job = changed_job(job, performance_flags=("--tp-comm-overlap",))
    measurements = tiny_measurements(on_gpus(tiny_cluster(4, 2)))
    rooms = Domains.of(measurements.cluster)
    plan = planned(job, measurements)
    why = "--tp-comm-overlap needs tp groups that fill hosts of 2"

    assert plan.dropped[why] > 0
    assert {2} == {one.layout.tp for one in (plan.chosen, *plan.alternatives)}
    assert {None} == {splits(job, measurements.cluster, one) for one in (plan.chosen, *plan.alternatives)}
    assert [[why], []] == [
        [broken.reason for broken in tensor_faults(Rules.of(job, device_kind=kind, rooms=rooms), 4)]
        for kind in ("cuda", "cpu")
    ]


OWN_BLOCK = Layout(dp=4, recompute=Recompute(granularity="full", method="block", num_layers=2))


@pytest.mark.parametrize(("own", "memory_bytes"), [(OWN_BLOCK, 2_617_059), (OWN_BLOCK, 8 << 30)])
def test_every_legal_layout_is_priced_or_dropped_once(
    monkeypatch: pytest.MonkeyPatch, own: Layout, memory_bytes: int
) -> None:
    """The user's own layout too, whether or not it fits."""
    job = tiny_job(4, own=own, pinned=("tp", "cp", "dp", "recompute", "vpp"))
    refused = base_layouts(job, world_size=4, domains=Domains(devices_per_host=2), device_kind="cpu").dropped
    found: list[Searched] = []
    run = SearchLoop.run
    monkeypatch.setattr(SearchLoop, "run", lambda loop: found.append(run(loop)) or found[0])
    plan = planned(job, tiny_measurements(tiny_cluster(memory_bytes=memory_bytes)), memory_margin=0.0)

    assert plan.num_layouts == len(found[0].candidates) + sum(plan.dropped.values()) - sum(refused.values())
