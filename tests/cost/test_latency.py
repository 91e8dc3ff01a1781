"""Step times by hand, and what must hold on every cluster and placement."""

import itertools
import random
import time
from dataclasses import replace

import numpy as np
import pytest
from facts_for_tests import tiny_cluster, tiny_job, tiny_measurements, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from pipette_launch.cost import NOT_MODELLED, Predictor
from pipette_launch.errors import PlanError
from pipette_launch.facts import (
    Batch,
    Cluster,
    CollectiveTime,
    ComputeCase,
    ComputeTime,
    Job,
    Layout,
    Links,
    Measurements,
    Recompute,
    Samples,
)

FULL = Recompute(granularity="full", method="uniform", num_layers=1)
ALLTOALL = ("--moe-token-dispatcher-type alltoall",)
FOUR = (
    Layout(dp=4),
    Layout(tp=2, dp=2),
    Layout(tp=2, pp=2),
    Layout(pp=2, dp=2),
    Layout(pp=2, dp=2, use_tp_pp_dp_mapping=True, micro_batch_size=2),
    Layout(pp=4),
    Layout(pp=2, vpp=2, dp=2, overlap_grad_reduce=True, use_distributed_optimizer=True),
    Layout(pp=2, dp=2, overlap_grad_reduce=True, use_distributed_optimizer=True, overlap_param_gather=True),
    Layout(tp=2, pp=2, sequence_parallel=True, recompute=FULL),
    Layout(cp=2, dp=2),
    Layout(cp=2, pp=2, use_distributed_optimizer=True),
)
EXPERTS = (
    Layout(dp=4, ep=4),
    Layout(dp=4, ep=2, use_distributed_optimizer=True),
    Layout(tp=2, dp=2, ep=2, etp=1, sequence_parallel=True),
    Layout(pp=2, dp=2, ep=2),
    Layout(tp=2, dp=2, ep=2, etp=2, sequence_parallel=True),
)


def job(world_size: int = 4, **changes: object) -> Job:
    """Sixteen samples a step."""
    return replace(tiny_job(world_size), batch=Batch(global_batch_size=16), **changes)  # type: ignore[arg-type]


def expert_job() -> Job:
    """Layers 1 and 3 have four experts."""
    return job(model=tiny_model(num_experts=4, moe_layer_freq=(0, 1, 0, 1)), performance_flags=ALLTOALL)


def measurements(cluster: Cluster, **changes: object) -> Measurements:
    """All compute cases, expert layers too, and an optimizer that costs something."""
    base = tiny_measurements(cluster)
    sample = Samples(values_s=(2e-3,))
    experts = tuple(
        ComputeTime(case=case, part="moe_layer", slot=0, forward=sample, input_grad=sample, weight_grad=sample)
        for case in base.compute_cases()
    )
    return replace(base, compute=base.compute + experts, optimizer_s_per_parameter=1e-9, **changes)  # type: ignore[arg-type]


def drawn_cluster(rng: random.Random, *, hosts: int = 2, devices: int = 2) -> Cluster:
    """Every link and every slot its own speed."""

    def links(size: int, scale: float) -> Links:
        def matrix(low: float, high: float) -> tuple[tuple[float, ...], ...]:
            return tuple(tuple(0.0 if i == j else rng.uniform(low, high) for j in range(size)) for i in range(size))

        return Links(
            latency_s=matrix(1e-5 / scale, 1e-3 / scale), bandwidth_bytes_per_s=matrix(1e7 * scale, 1e9 * scale)
        )

    return replace(
        tiny_cluster(hosts, devices),
        between_hosts=links(hosts, 1),
        within_host=tuple(links(devices, 3) for _ in range(hosts)),
        slot_speed=tuple(rng.choice((1.0, 1.0, 0.8, 1.25)) for _ in range(hosts * devices)),
    )


def drawn_fits(rng: random.Random) -> tuple[CollectiveTime, ...]:
    """Some groups measured, at times that their links do not explain."""
    kinds = ("all_reduce", "all_gather", "all_to_all", "send")
    return tuple(
        CollectiveTime(
            kind=rng.choice(kinds),  # type: ignore[arg-type]
            slots=slots,
            latency_s=rng.uniform(0, 2e-3),
            seconds_per_byte=rng.uniform(0, 2e-8),
            spread=0.0,
            sizes_bytes=(1,),
        )
        for slots in ((0, 1), (0, 2), (0, 1, 2, 3))
        if rng.random() < 0.5
    )


def test_data_parallel_by_hand() -> None:
    """Two samples each of (4 layers + embedding + head) at 13.8 ms, then an all-reduce of 218,496 fp32 gradients."""
    cluster = tiny_cluster(2, 1)
    predictor = Predictor(tiny_job(2), tiny_measurements(cluster))
    gradient_bytes = 4 * 218496
    reduce_s = 2 * (1e-4 + gradient_bytes / 2 / 1e8)

    step = predictor.step_time(Layout(dp=2), (0, 1))

    assert step.total_s == pytest.approx(2 * 13.8e-3 + reduce_s)
    assert step.breakdown_s["compute"] == pytest.approx(2 * 13.8e-3)
    assert step.breakdown_s["data_parallel"] == pytest.approx(reduce_s)
    assert step.breakdown_s["bubble"] == pytest.approx(0.0, abs=1e-12)


def test_a_pipeline_by_hand() -> None:
    """Two stages, two micro-batches: F 2.1 and 2.5 ms, B 4.2 and 5 ms, hops of 8,192 bytes over 100 MB/s.

    The last stage is critical: 0F0, hop, 1F0 1B0 1F1 1B1, hop, 0B1; then the embedding's gradient, 65,536 bytes.
    """
    cluster = tiny_cluster(2, 1)
    this = replace(tiny_job(2), batch=Batch(global_batch_size=2))
    hop_s = 1e-4 + 8192 / 1e8
    embedding_s = 2 * (1e-4 + 65536 / 2 / 1e8)
    pipeline_s = 2.1e-3 + hop_s + 2 * 7.5e-3 + hop_s + 4.2e-3

    step = Predictor(this, tiny_measurements(cluster)).step_time(Layout(pp=2), (0, 1))

    assert step.total_s == pytest.approx(pipeline_s + embedding_s)
    assert step.breakdown_s["pipeline_transfer"] == pytest.approx(2 * hop_s)
    assert step.breakdown_s["embedding_gradients"] == pytest.approx(embedding_s)
    assert step.breakdown_s["compute"] == pytest.approx(2 * 6.3e-3)


def test_tensor_parallel_by_hand() -> None:
    """Nine all-reduces of 8,192 bytes a pass, three of 128 for the loss, two micro-batches."""
    cluster = tiny_cluster(1, 2)
    this = replace(tiny_job(2), batch=Batch(global_batch_size=2))
    expected = 2 * (18 * 2 * (1e-5 + 8192 / 2 / 1e9) + 3 * 2 * (1e-5 + 128 / 2 / 1e9))

    step = Predictor(this, tiny_measurements(cluster)).step_time(Layout(tp=2), (0, 1))

    assert step.breakdown_s["tensor_parallel"] == pytest.approx(expected)
    assert step.total_s == pytest.approx(2 * 6.9e-3 + expected)


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


@pytest.mark.parametrize(
    ("this", "layout"),
    [(job(), layout) for layout in FOUR] + [(expert_job(), layout) for layout in EXPERTS],
    ids=lambda value: value.words() if isinstance(value, Layout) else "",
)
def test_no_placement_beats_the_bound(this: Job, layout: Layout) -> None:
    """All 24 placements of four slots on drawn clusters, with and without measured collectives."""
    rng = random.Random(layout.words())
    for fits in (False, True):
        cluster = drawn_cluster(rng)
        predictor = Predictor(this, measurements(cluster, collectives=drawn_fits(rng) if fits else ()))
        cost = predictor.objective(layout)

        best_s = min(cost(placement) for placement in itertools.permutations(range(4)))

        assert 0 < predictor.bound_s(layout) <= best_s * (1 + 1e-12)


@pytest.mark.parametrize("layout", [Layout(pp=3, dp=2), Layout(tp=2, pp=3), Layout(tp=3, pp=2)], ids=Layout.words)
def test_no_placement_of_six_slots_beats_the_bound(layout: Layout) -> None:
    """All 720 placements of three hosts with two slots each."""
    rng = random.Random(6)
    this = replace(job(6), model=tiny_model(num_layers=6, num_attention_heads=6, num_query_groups=6))
    cluster = drawn_cluster(rng, hosts=3)
    cases = tuple(ComputeCase(tp=tp, cp=1, micro_batch_size=1) for tp in (1, 2, 3))
    predictor = Predictor(replace(this, batch=Batch(global_batch_size=6)), tiny_measurements(cluster, cases))
    cost = predictor.objective(layout)

    best_s = min(cost(placement) for placement in itertools.permutations(range(6)))

    assert predictor.bound_s(layout) <= best_s * (1 + 1e-12)


def test_the_bound_is_met_where_all_links_are_equal() -> None:
    """One host, equal slots: every placement is the best."""
    predictor = Predictor(job(), measurements(tiny_cluster(1, 4)))

    for layout in FOUR:
        assert predictor.bound_s(layout) == pytest.approx(predictor.step_time(layout, range(4)).total_s)


@given(st.sampled_from(FOUR + EXPERTS), st.permutations(range(4)), st.randoms())
def test_the_objective_is_the_step_time(layout: Layout, placement: list[int], rng: random.Random) -> None:
    """To the last digit; and the parts sum to it."""
    predictor = Predictor(expert_job(), measurements(drawn_cluster(rng), collectives=drawn_fits(rng)))
    step = predictor.step_time(layout, placement)

    assert step.total_s == predictor.objective(layout)(placement)
    assert sum(step.breakdown_s.values()) == pytest.approx(step.total_s, rel=1e-12)
    assert min(step.breakdown_s.values()) >= -1e-12


@given(st.sampled_from(FOUR), st.permutations(range(4)), st.randoms())
def test_a_step_takes_at_least_its_busiest_stage(layout: Layout, placement: list[int], rng: random.Random) -> None:
    """No rank's compute is lost: every stage's passes on the fastest slot fit into the step."""
    cluster = drawn_cluster(rng)
    this = job()
    step_s = Predictor(this, measurements(cluster)).step_time(layout, placement).total_s
    layers = max(layout.stage_layers(4))
    # The case is measured on slot 0: at speed 1 a layer takes 3 ms times that slot's speed, tokens over tp and cp.
    layer_s = 3e-3 * layout.micro_batch_size / (layout.tp * layout.cp) * cluster.slot_speed[0]
    fastest_s = layers * layer_s / max(cluster.slot_speed)

    assert step_s >= layout.num_microbatches(16) * fastest_s


@given(st.sampled_from(FOUR + EXPERTS), st.permutations(range(4)), st.randoms())
def test_renaming_equal_hosts_changes_nothing(layout: Layout, placement: list[int], rng: random.Random) -> None:
    """Two hosts that are alike may swap their places in the plan."""
    within = drawn_cluster(rng).within_host[0]
    cluster = replace(tiny_cluster(2, 2), within_host=(within, within))
    predictor = Predictor(expert_job(), measurements(cluster))

    assert predictor.objective(layout)(placement) == predictor.objective(layout)([*placement[2:], *placement[:2]])


@given(st.sampled_from(FOUR + EXPERTS), st.permutations(range(4)), st.floats(1.0, 10.0), st.booleans(), st.randoms())
def test_a_slower_link_never_makes_a_step_faster(
    layout: Layout, placement: list[int], factor: float, is_latency: bool, rng: random.Random
) -> None:
    """Whichever link, by latency or by bandwidth."""
    cluster = drawn_cluster(rng)
    links = cluster.between_hosts
    latency, bandwidth = np.array(links.latency_s), np.array(links.bandwidth_bytes_per_s)
    if is_latency:
        latency[0, 1] *= factor
    else:
        bandwidth[0, 1] /= factor
    slower = Links(
        latency_s=tuple(map(tuple, latency.tolist())), bandwidth_bytes_per_s=tuple(map(tuple, bandwidth.tolist()))
    )
    before, after = (
        Predictor(expert_job(), measurements(each)).objective(layout)(placement)
        for each in (cluster, replace(cluster, between_hosts=slower))
    )

    assert before <= after * (1 + 1e-12)


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
        "No collective was measured; they are priced as rings over the measured links.",
    ]
    assert predictor.notes(Layout(dp=4))[0] == "The optimizer step was not measured and counts as 0 s."


def test_what_was_measured_needs_no_note() -> None:
    """With optimizer, collectives and the case itself there is nothing to say."""
    fit = CollectiveTime(
        kind="all_reduce", slots=(0, 1), latency_s=0.0, seconds_per_byte=1e-9, spread=0.0, sizes_bytes=(1,)
    )

    assert Predictor(job(), measurements(tiny_cluster(), collectives=(fit,))).notes(Layout(dp=4)) == ()


@pytest.mark.parametrize("placement", [(0, 1, 2), (0, 1, 2, 2), (0, 1, 2, 4)])
def test_a_placement_holds_every_rank_once(placement: tuple[int, ...]) -> None:
    """Anything else is refused by name."""
    with pytest.raises(PlanError, match="every RANK from 0 to 3 once"):
        Predictor(job(), measurements(tiny_cluster())).step_time(Layout(dp=4), placement)


def test_a_layout_of_another_world_is_refused() -> None:
    """Every way in names both sizes."""
    predictor = Predictor(job(), measurements(tiny_cluster()))
    for ask in (predictor.bound_s, predictor.objective, lambda layout: predictor.step_time(layout, (0, 1))):
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
    first = predictor.objective(layouts[0])(range(4))
    for layout in layouts:
        predictor.objective(layout)

    assert len(layouts) > 64
    assert first == predictor.objective(layouts[0])(range(4))


def test_a_placement_of_64_ranks_is_priced_in_milliseconds() -> None:
    """The search asks thousands of times."""
    predictor = Predictor(replace(job(64), batch=Batch(global_batch_size=128)), measurements(tiny_cluster(8, 8)))
    cost = predictor.objective(Layout(tp=2, pp=4, dp=8))
    placement = list(range(64))
    random.Random(0).shuffle(placement)
    cost(placement)
    start = time.process_time()
    for _ in range(20):
        cost(placement)

    assert (time.process_time() - start) / 20 < 10e-3


def test_what_is_left_out_is_said() -> None:
    """The plan's notes take these sentences as they are."""
    assert all(sentence.endswith(".") for sentence in NOT_MODELLED)
    assert any("shared cores" in sentence for sentence in NOT_MODELLED)
