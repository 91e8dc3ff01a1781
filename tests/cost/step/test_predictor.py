"""Step times by hand, errors, notes and speed; what must hold everywhere is in test_bound."""

from __future__ import annotations

import random
import time
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from facts_for_tests import (
    changed_job,
    drawn_cluster,
    drawn_fits,
    stage_reading,
    tiny_cluster,
    tiny_job,
    tiny_measurements,
    tiny_model,
)
from graph_spellings import flags_of
from hypothesis import given
from hypothesis import strategies as st
from search.worlds import on_gpus

from pipette_launch.cost.communication.exchanges import Groups
from pipette_launch.cost.pipeline.zero_bubble import named_schedule
from pipette_launch.cost.step.predictor import WHOLE_LAYERS, Predictor, launching_notes
from pipette_launch.errors import PlanError
from pipette_launch.facts import (
    Batch,
    Cluster,
    ComputeCase,
    ComputeTime,
    Job,
    Layout,
    Links,
    Measurements,
    Recompute,
    Samples,
)
from pipette_launch.facts.measurements import CollectiveTime
from pipette_launch.facts.schedule import ExpectedTimes

DENSE = replace(tiny_job(8), batch=Batch(global_batch_size=16))
MOE = changed_job(
    DENSE,
    model=tiny_model(num_experts=4, moe_layer_freq=(0, 1, 0, 1)),
    performance_flags=("--moe-token-dispatcher-type alltoall",),
)
LAYOUTS = (
    (DENSE, Layout(dp=8, use_distributed_optimizer=True)),
    (DENSE, Layout(tp=2, dp=4)),
    (DENSE, Layout(pp=2, dp=4)),
    (DENSE, Layout(tp=2, pp=2, dp=2, sequence_parallel=True)),
    (DENSE, Layout(pp=2, cp=2, dp=2, use_tp_pp_dp_mapping=True)),
    (DENSE, Layout(pp=2, vpp=2, dp=4, overlap_grad_reduce=True, use_distributed_optimizer=True)),
    (
        DENSE,
        Layout(pp=2, vpp=2, dp=4, overlap_grad_reduce=True, use_distributed_optimizer=True, overlap_param_gather=True),
    ),
    (DENSE, Layout(tp=2, pp=4)),
    (MOE, Layout(dp=8, ep=4)),
    (MOE, Layout(tp=2, pp=2, dp=2, ep=2, etp=1, sequence_parallel=True)),
)


def measured(rng: random.Random, *, flat: bool) -> Measurements:
    """Four hosts of two, of unequal links and speeds or all alike, with some groups measured."""
    base = tiny_measurements(tiny_cluster(4, 2) if flat else drawn_cluster(rng, hosts=4, devices=2))
    sample = Samples(values_s=(2e-3,))
    experts = tuple(
        ComputeTime(case=case, part="moe_layer", slot=0, forward=sample, input_grad=sample, weight_grad=sample)
        for case in base.compute_cases()
    )
    fits = () if flat else drawn_fits(rng)
    return replace(base, compute=base.compute + experts, collectives=fits, optimizer_s_per_parameter=1e-9)


@given(case=st.sampled_from(LAYOUTS), seed=st.integers(0, 10**6), flat=st.booleans())
def test_many_placements_at_once_cost_what_each_costs(case: tuple[Job, Layout], seed: int, flat: bool) -> None:
    """The same digits as one by one, and as the step time that is told by its parts."""
    job, layout = case
    rng = random.Random(seed)
    predictor = Predictor(job, measured(rng, flat=flat))
    placements = [rng.sample(range(8), 8) for _ in range(5)]
    placements.append(placements[0])
    cost = predictor.placement_cost(layout)

    costs = cost.costs(np.array(placements)).tolist()

    assert [cost.cost(placement) for placement in placements] == costs
    assert [predictor.step_time(layout, placement).total_s for placement in placements] == costs


def test_no_placements_cost_nothing() -> None:
    """An empty batch has no costs."""
    cost = Predictor(DENSE, measured(random.Random(0), flat=True)).placement_cost(Layout(dp=8))

    assert [] == cost.costs(np.zeros((0, 8), dtype=np.int64)).tolist()


def test_a_factor_multiplies_every_cost() -> None:
    """What was learned of a layout is on each placement's cost, alone or among others."""
    cost = Predictor(DENSE, measured(random.Random(0), flat=False)).placement_cost(Layout(pp=2, dp=4))
    dearer = cost.times(1.5)
    placement = np.arange(8)

    assert cost.cost(placement) * 1.5 == dearer.cost(placement) == dearer.costs(placement[None])[0]


@pytest.mark.parametrize(
    "layout", [Layout(tp=2, cp=2, pp=2, dp=2), Layout(dp=8, ep=4), Layout(tp=2, dp=4, ep=4, etp=1)]
)
def test_the_groups_that_meet_in_a_cell(layout: Layout) -> None:
    """Each cell is priced by all groups that its ranks are in, and by no other."""
    groups = Groups.of(layout)

    for ranks_GK in (groups.tp, groups.cp, groups.ep, groups.etp, groups.ep_etp):
        met = groups.met_PDL(ranks_GK)
        for pp, dp in np.ndindex(layout.pp, layout.dp):
            inside = {g for g, ranks in enumerate(ranks_GK) if set(ranks) & set(groups.grid_PDCT[pp, dp].ravel())}
            assert inside == set(met[pp, dp].tolist())


def test_ten_thousand_slots_are_priced_without_a_matrix_of_all_pairs() -> None:
    """1,280 hosts of eight: some tens of MB where a matrix of all slots would take 800 MB, and below half a second."""
    cluster = tiny_cluster(2, 8)
    rng = np.random.default_rng(0)
    rates = rng.uniform(1e9, 2e9, (1280, 1280))
    cluster = replace(
        cluster,
        hosts=tuple(replace(cluster.hosts[0], name=f"node{index}") for index in range(1280)),
        between_hosts=Links(latency_s=np.full((1280, 1280), 1e-5), bandwidth_bytes_per_s=rates),
        within_host=cluster.within_host[:1] * 1280,
        slot_speed=(1.0,) * 10240,
    )
    job = replace(DENSE, model=tiny_model(num_layers=16), batch=Batch(global_batch_size=1280))
    predictor = Predictor(job, tiny_measurements(cluster))
    layout = Layout(tp=4, pp=8, dp=320, sequence_parallel=True, use_distributed_optimizer=True)
    placement = np.arange(1280 * 8).reshape(1280, 8)[rng.permutation(1280)].ravel()

    tracemalloc.start()
    started_s = time.process_time()
    cost_s = predictor.placement_cost(layout).cost(placement)
    took_s = time.process_time() - started_s
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert cost_s > predictor.bound_s(layout)
    assert took_s < 0.5
    assert peak_bytes < 100e6


def job(world_size: int = 4, **changes: object) -> Job:
    """Sixteen samples a step."""
    return tiny_job(world_size, **({"batch": Batch(global_batch_size=16)} | changes))


def measurements(cluster: Cluster, **changes: object) -> Measurements:
    """All compute cases, and an optimizer that costs something."""
    return replace(tiny_measurements(cluster), optimizer_s_per_parameter=1e-9, **changes)  # type: ignore[arg-type]


def test_data_parallel_by_hand() -> None:
    """Two samples each of (4 layers + embedding + head) at 13.8 ms, and all-reduces of 218,496 gradients."""
    cluster = tiny_cluster(2, 1)
    predictor = Predictor(tiny_job(2), tiny_measurements(cluster))
    gradient_bytes = 4 * 218496
    reduce_s = 2 * (1e-4 + gradient_bytes / 2 / 1e8)

    step = predictor.step_time(Layout(dp=2), (0, 1))

    assert step.total_s == pytest.approx(2 * 13.8e-3 + reduce_s)
    assert step.breakdown_s["compute"] == pytest.approx(2 * 13.8e-3)
    assert step.breakdown_s["data_parallel"] == pytest.approx(reduce_s)
    assert step.breakdown_s["bubble"] == pytest.approx(0.0, abs=1e-12)


def test_shards_by_hand() -> None:
    """Layers of 199,936 bytes take longer to gather than the forward of 1 ms, or half the backward, hides.

    Nothing hides the first gather, and the reductions of the first layer and of the embedding; the ends are gathered
    once a step.
    """
    flags = ("--use-megatron-fsdp", "--data-parallel-sharding-strategy optim_grads_params")
    predictor = Predictor(changed_job(tiny_job(2), performance_flags=flags), tiny_measurements(tiny_cluster(2, 1)))
    layer_s, embedding_s, ends_s = (1e-4 + size / 2 / 1e8 for size in (199_936, 73_728, 73_728 + 512))
    exposed_s = 2 * layer_s + embedding_s + 10 * (layer_s - 1e-3)

    step = predictor.step_time(Layout(dp=2, use_distributed_optimizer=True), (0, 1))

    assert step.total_s == pytest.approx(2 * 13.8e-3 + 2 * exposed_s + ends_s)
    assert step.breakdown_s["data_parallel"] == pytest.approx(2 * exposed_s)
    assert step.breakdown_s["parameter_gather"] == pytest.approx(ends_s)
    assert sum(step.breakdown_s.values()) == pytest.approx(step.total_s)
    assert any(note.startswith("FSDP is in the predicted step time") for note in predictor.notes(Layout(dp=2)))


def test_a_pipeline_by_hand() -> None:
    """Two stages, two micro-batches: F 2.1 and 2.5 ms, B 4.2 and 5 ms, hops of 8,192 bytes over 100 MB/s.

    The last stage is critical: 0F0, hop, 1F0 1B0, hop, 1F1 1B1, hop, 0B1, as gloo lets no message travel before it is
    asked for; then the embedding's gradient, 65,536 bytes.
    """
    cluster = tiny_cluster(2, 1)
    this = replace(tiny_job(2), batch=Batch(global_batch_size=2))
    hop_s = 1e-4 + 8192 / 1e8
    embedding_s = 2 * (1e-4 + 65536 / 2 / 1e8)
    pipeline_s = 2.1e-3 + hop_s + 7.5e-3 + hop_s + 7.5e-3 + hop_s + 4.2e-3

    step = Predictor(this, tiny_measurements(cluster)).step_time(Layout(pp=2), (0, 1))

    assert step.total_s == pytest.approx(pipeline_s + embedding_s)
    assert step.breakdown_s["pipeline_transfer"] == pytest.approx(3 * hop_s)
    assert step.breakdown_s["embedding_gradients"] == pytest.approx(embedding_s)
    assert step.breakdown_s["compute"] == pytest.approx(2 * 6.3e-3)


def test_tensor_parallel_by_hand() -> None:
    """Nine all-reduces of 8,192 bytes forward (backward they are hidden), three of 128 for the loss."""
    cluster = tiny_cluster(1, 2)
    this = replace(tiny_job(2), batch=Batch(global_batch_size=2))
    expected = 2 * (9 * 2 * (1e-5 + 8192 / 2 / 1e9) + 3 * 2 * (1e-5 + 128 / 2 / 1e9))

    step = Predictor(this, tiny_measurements(cluster)).step_time(Layout(tp=2), (0, 1))

    assert step.breakdown_s["tensor_parallel"] == pytest.approx(expected)
    assert step.total_s == pytest.approx(2 * 6.9e-3 + expected)


def test_collectives_pass_while_the_device_is_idle() -> None:
    """With an idle tenth of a millisecond in each pass of a layer, all-reduces of 14 us leave nothing to wait for."""
    this = replace(tiny_job(2), batch=Batch(global_batch_size=2))
    busy = tiny_measurements(tiny_cluster(1, 2))
    idle = replace(
        busy,
        compute=tuple(replace(time, forward_idle_s=1e-4, backward_idle_s=1e-4) for time in busy.compute),
    )
    before, after = (Predictor(this, found).step_time(Layout(tp=2), (0, 1)) for found in (busy, idle))

    assert after.breakdown_s["tensor_parallel"] == 0
    assert after.total_s == pytest.approx(before.total_s - before.breakdown_s["tensor_parallel"])


FULL = Recompute(granularity="full", method="uniform", num_layers=1)


@pytest.mark.parametrize(("recompute", "again"), [(Layout().recompute, 0), (FULL, 1)])
def test_waits_for_launches_are_a_part_of_the_step(recompute: Recompute, again: int) -> None:
    """With idle 100 us in each forward and 200 us in each backward of a layer, four layers of four passes wait."""
    busy = tiny_measurements(tiny_cluster())
    layers = [replace(time, forward_idle_s=1e-4, backward_idle_s=2e-4) for time in busy.compute if time.part == "layer"]
    idle = replace(busy, compute=(*layers, *(time for time in busy.compute if time.part != "layer")))
    layout = Layout(dp=2, pp=2, recompute=recompute)
    before, after = (Predictor(tiny_job(), found).step_time(layout, range(4)).breakdown_s for found in (busy, idle))
    waits_s = layout.num_microbatches(8) * 2 * (3e-4 + again * 1e-4)

    assert before["launching_kernels"] == 0
    assert waits_s == pytest.approx(after["launching_kernels"])
    assert before["compute"] + before["recompute"] == pytest.approx(after["compute"] + after["recompute"] + waits_s)
    assert layout.num_microbatches(8) * 2 * again * 1e-4 == pytest.approx(before["recompute"] - after["recompute"])


@pytest.mark.parametrize(
    ("has_experts", "words", "expected"),
    [
        (True, "--cuda-graph-impl local", True),
        (True, "--cuda-graph-impl transformer_engine", True),
        (True, "--cuda-graph-impl transformer_engine --cuda-graph-modules attn", False),
        (True, "--cuda-graph-impl local --moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity", False),
        (True, "--cuda-graph-impl full_iteration", False),
        (True, "", False),
        (False, "--cuda-graph-impl local", False),
    ],
)
def test_graphs_of_whole_layers_with_experts_have_a_note(has_experts: bool, words: str, expected: bool) -> None:
    """Megatron cannot capture experts whose number of tokens changes, so the note names the other parts."""
    model = tiny_model(**(EXPERTS if has_experts else {}))
    this = tiny_job(model=model, performance_flags=flags_of(words), megatron_version="0.20.0")

    notes = Predictor(this, tiny_measurements(tiny_cluster())).notes(Layout(dp=4))

    assert expected == (WHOLE_LAYERS in notes)


GRAPHS, MICRO_BATCH = "CUDA graphs (--cuda-graph-impl)", "a larger --micro-batch-size"
PARTS_OF_LAYERS = "--cuda-graph-impl transformer_engine --cuda-graph-modules"
EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_layer_freq": (1,) * 4, "moe_ffn_hidden_size": 128}


@pytest.mark.parametrize(
    ("changes", "words", "samples", "cures"),
    [
        ({}, "", 8, [GRAPHS, MICRO_BATCH]),
        ({}, "", 4, [GRAPHS]),
        ({}, "--cuda-graph-impl local", 8, [MICRO_BATCH]),
        ({}, f"{PARTS_OF_LAYERS} attn", 8, ["CUDA graphs of more parts of a layer", MICRO_BATCH]),
        (EXPERTS, "", 8, [GRAPHS, MICRO_BATCH, "grouped products of experts (--moe-grouped-gemm)"]),
        (EXPERTS, "--moe-grouped-gemm", 8, [GRAPHS, MICRO_BATCH]),
        (EXPERTS, f"--moe-grouped-gemm {PARTS_OF_LAYERS} attn moe_router moe_preprocess", 8, [MICRO_BATCH]),
        ({}, "--cuda-graph-impl full_iteration", 4, []),
    ],
)
def test_a_long_wait_for_launches_names_its_cures(
    changes: dict[str, Any], words: str, samples: int, cures: list[str]
) -> None:
    """A note names each flag that would shorten the wait, from a tenth of the step on."""
    flags = flags_of(words)
    this = tiny_job(model=tiny_model(**changes), performance_flags=flags, megatron_version="0.20.0")
    this = replace(this, batch=Batch(global_batch_size=samples))
    long, short = (launching_notes(this, Layout(dp=4), {"launching_kernels": wait_s}, 2.0) for wait_s in (0.5, 0.19))
    (note,) = long

    assert () == short
    assert note.startswith("For 500 ms of the step (25%), devices wait for hosts to launch kernels.")
    assert (f" Cures: {', '.join(cures)}." if cures else "") == note.partition("kernels.")[2]


def test_the_distributed_optimizer_divides_the_step_and_gathers() -> None:
    """Half of the parameters are stepped on each rank; the parameters are gathered as the gradients were scattered."""
    cluster = tiny_cluster(2, 1)
    predictor = Predictor(tiny_job(2), replace(tiny_measurements(cluster), optimizer_s_per_parameter=1e-8))
    half_s = 1e-4 + 4 * 218496 / 2 / 1e8
    plain = predictor.step_time(Layout(dp=2), (0, 1)).breakdown_s
    sharded = predictor.step_time(Layout(dp=2, use_distributed_optimizer=True), (0, 1)).breakdown_s

    assert plain["optimizer"] == pytest.approx(218496e-8)
    assert sharded["optimizer"] == pytest.approx(218496e-8 / 2)
    assert (plain["parameter_gather"], sharded["parameter_gather"]) == (0.0, pytest.approx(half_s))
    assert sharded["data_parallel"] == pytest.approx(half_s)


def test_a_measured_stage_adds_the_host_work_of_a_step() -> None:
    """The stage ran on a slot of speed 0.5, so 40 ms are 20 ms at speed 1; the measured optimizer explains half."""
    this, layout = tiny_job(2), Layout(dp=2)
    cluster = replace(tiny_cluster(2, 1), slot_speed=(0.5, 1.0))
    reading = stage_reading(this, layout, num_microbatches=1, schedule_s=0.1, update_s=0.04)
    plain = replace(tiny_measurements(cluster), optimizer_s_per_parameter=0.01 / 218496)
    timed = replace(plain, stages=(reading,))
    optimizer_s = [Predictor(this, one).step_time(layout, (0, 1)).breakdown_s["optimizer"] for one in (plain, timed)]

    # The step waits for the slot of speed 0.5.
    assert optimizer_s == pytest.approx([0.02, 0.04])


def test_a_slow_slot_slows_its_own_stage() -> None:
    """Under data parallelism everyone waits for it; where it holds half a pipeline, the head's stage is worse."""
    cluster = replace(tiny_cluster(2, 1), slot_speed=(0.5, 1.0))
    predictor = Predictor(job(2), tiny_measurements(cluster))

    # Measured on slot 0, which is the slow one: at speed 1 everything takes half as long.
    assert predictor.step_time(Layout(dp=2), (0, 1)).breakdown_s["compute"] == pytest.approx(8 * 13.8e-3)
    assert predictor.step_time(Layout(pp=2), (0, 1)).total_s < predictor.step_time(Layout(pp=2), (1, 0)).total_s


def test_a_good_placement_keeps_the_pipeline_off_the_slow_links() -> None:
    """Tensor parallelism inside the hosts costs less than across them."""
    predictor = Predictor(job(), tiny_measurements(tiny_cluster(2, 2)))
    layout = Layout(tp=2, dp=2)

    assert predictor.step_time(layout, (0, 1, 2, 3)).total_s < predictor.step_time(layout, (0, 2, 1, 3)).total_s


def test_overlap_hides_gradients_and_buckets_hide_parameters() -> None:
    """A model of several buckets: overlapped it is faster, and never by more than what could pass behind."""
    model = tiny_model(hidden_size=2048, ffn_hidden_size=8192, kv_channels=512)
    predictor = Predictor(job(model=model), measurements(tiny_cluster(4, 1, bandwidth_bytes_per_s=1e11)))
    plain = Layout(dp=4, use_distributed_optimizer=True)
    reduced = replace(plain, overlap_grad_reduce=True)
    gathered = replace(reduced, overlap_param_gather=True)

    steps = [predictor.step_time(layout, range(4)) for layout in (plain, reduced, gathered)]

    assert steps[0].total_s > steps[1].total_s > steps[2].total_s
    assert steps[1].breakdown_s["data_parallel"] >= steps[0].breakdown_s["data_parallel"] / 6
    assert steps[2].breakdown_s["parameter_gather"] >= steps[0].breakdown_s["parameter_gather"] / 6


def test_can_price_says_what_was_measured() -> None:
    """Another micro-batch is scaled, with a note; another tp is not."""
    cluster = tiny_cluster(2, 2)
    cases = (ComputeCase(tp=1, cp=1, micro_batch_size=1),)
    predictor = Predictor(job(), tiny_measurements(cluster, cases))

    assert predictor.can_price(Layout(dp=4, micro_batch_size=2))
    assert not predictor.can_price(Layout(tp=2, dp=2))
    assert [note.split(" was not measured")[0] for note in predictor.notes(Layout(dp=4, micro_batch_size=2))] == [
        "Compute time of tp=1 cp=1 micro-batch 2",
        "The optimizer step",
        "No collective was measured; collectives are priced as rings over single links.",
    ]
    assert predictor.notes(Layout(dp=4))[0] == "The optimizer step was not measured and counts as 0 s."


def test_timed_links_are_no_collectives() -> None:
    """A warm-up that timed messages between two slots alone measured no collective."""
    message = CollectiveTime(
        kind="send", slots=(0, 1), latency_s=0.0, seconds_per_byte=1e-9, spread=0.0, sizes_bytes=(1,)
    )
    predictor = Predictor(job(), measurements(tiny_cluster(), collectives=(message,)))

    assert predictor.notes(Layout(dp=4)) == (
        "No collective was measured; collectives are priced as rings over single links.",
    )


def test_what_was_measured_needs_no_note() -> None:
    """With optimizer, collectives and the case itself there is nothing to say."""
    fit = CollectiveTime(
        kind="all_reduce", slots=(0, 1), latency_s=0.0, seconds_per_byte=1e-9, spread=0.0, sizes_bytes=(1,)
    )

    assert Predictor(job(), measurements(tiny_cluster(), collectives=(fit,))).notes(Layout(dp=4)) == ()


@pytest.mark.parametrize(
    ("ep", "flags", "expected"),
    [
        (2, (), True),
        (1, (), False),
        (2, ("--moe-router-force-load-balancing",), False),
        (2, ("--moe-expert-capacity-factor 1.0", "--moe-pad-expert-input-to-capacity"), False),
    ],
)
def test_balanced_routing_is_said_where_it_is_assumed(ep: int, flags: tuple[str, ...], expected: bool) -> None:
    """A router's own choices make ranks of experts wait for each other; forced balance and full capacity do not."""
    model = tiny_model(num_experts=4, moe_layer_freq=(1,) * 4)
    predictor = Predictor(job(model=model, performance_flags=flags), tiny_measurements(tiny_cluster()))

    assert expected == any("6 to 25 % longer" in note for note in predictor.notes(Layout(dp=4, ep=ep)))


@pytest.mark.parametrize(
    "flag",
    [
        "--optimizer-cpu-offload",
        "--num-distributed-optimizer-instances 2",
    ],
)
def test_a_flag_that_is_not_priced_is_named(flag: str) -> None:
    """What changes the real step and not the predicted one has a note; a value that changes nothing has none."""
    measured = replace(measurements(tiny_cluster()), versions={"torch": "2.13.0"})
    notes, without = (
        Predictor(job(performance_flags=flags), measured).notes(Layout(dp=4))
        for flags in (
            (flag,),
            (
                "--cuda-graph-impl none",
                "--moe-token-dispatcher-type alltoall",
                "--num-distributed-optimizer-instances 1",
            ),
        )
    )

    more = [note for note in notes if note not in without and not note.startswith("Layers were timed")]
    assert [flag] == [note.partition(" is ")[0] for note in more]
    assert not any("predicted step time" in note for note in without)


@pytest.mark.parametrize("placement", [(0, 1, 2), (0, 1, 2, 2), (0, 1, 2, 4)])
def test_a_placement_holds_every_rank_once(placement: tuple[int, ...]) -> None:
    """Anything else is refused by name."""
    with pytest.raises(PlanError, match="every RANK from 0 to 3 once"):
        Predictor(job(), measurements(tiny_cluster())).step_time(Layout(dp=4), placement)


def test_a_layout_of_another_world_is_refused() -> None:
    """Every way in names both sizes."""
    predictor = Predictor(job(), measurements(tiny_cluster()))
    for ask in (predictor.bound_s, predictor.placement_cost, lambda layout: predictor.step_time(layout, (0, 1))):
        with pytest.raises(PlanError, match="2 ranks for the 4 slots"):
            ask(Layout(dp=2))


def test_more_layouts_than_are_kept_are_still_priced() -> None:
    """The oldest is worked out anew, to the same digit."""
    this = replace(job(), batch=Batch(global_batch_size=4 * 840))
    predictor = Predictor(this, measurements(tiny_cluster()))
    sizes = [size for size in range(1, 841) if 840 % size == 0]
    layouts = [
        Layout(dp=4, micro_batch_size=size, use_distributed_optimizer=sharded, overlap_grad_reduce=overlap)
        for size in sizes
        for sharded in (False, True)
        for overlap in (False, True)
    ]
    first = predictor.placement_cost(layouts[0]).cost(range(4))
    for layout in layouts:
        predictor.placement_cost(layout)

    assert len(layouts) > 64
    assert first == predictor.placement_cost(layouts[0]).cost(range(4))


def test_a_placement_of_64_ranks_is_priced_in_milliseconds() -> None:
    """The search asks thousands of times."""
    predictor = Predictor(replace(job(64), batch=Batch(global_batch_size=128)), measurements(tiny_cluster(8, 8)))
    cost = predictor.placement_cost(Layout(tp=2, pp=4, dp=8)).cost
    placement = list(range(64))
    random.Random(0).shuffle(placement)
    cost(placement)
    start = time.process_time()
    for _ in range(20):
        cost(placement)

    assert (time.process_time() - start) / 20 < 10e-3


def test_on_gpus_a_schedule_is_priced_by_the_order_of_its_messages() -> None:
    """A pass that was expected to take a hundred times as long leaves receives behind passes; gloo does not mind."""
    layout = Layout(pp=4, micro_batch_size=1)
    planned = job(4, own=layout)
    times = ExpectedTimes.equal(4)
    wrong = replace(times, forward=(1, 100, 1, 100), input=(100, 1, 100, 1))
    schedule = named_schedule("zb-1p", pp=4, num_microbatches=16)
    step_s: dict[str, list[float]] = {}
    for kind, cluster in (("cpu", tiny_cluster(4, 1)), ("cuda", on_gpus(tiny_cluster(4, 1)))):
        predictor = Predictor(planned, measurements(cluster))
        for each in (times, wrong):
            step = predictor.step_time(layout, range(4), replace(schedule, times=each))
            step_s.setdefault(kind, []).append(step.total_s)

    assert step_s["cpu"][0] == step_s["cpu"][1] <= step_s["cuda"][0]
    assert 1.01 * step_s["cuda"][0] < step_s["cuda"][1]
