"""Many bounds at once: below the bound of each layout alone, and near it."""

import random
from dataclasses import replace

import numpy as np
import pytest
from facts_for_tests import (
    drawn_cluster,
    drawn_fits,
    stage_reading,
    tiny_cluster,
    tiny_job,
    tiny_measurements,
    tiny_model,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from search.worlds import named, on_gpus

from pipette_launch.cost.step.predictor import Predictor
from pipette_launch.cost.step.step_bounds import BoundColumns, Tables, contents_of
from pipette_launch.errors import LayoutError
from pipette_launch.facts import (
    Batch,
    Cluster,
    ComputeTime,
    HybridLayers,
    Job,
    Layout,
    Measurements,
    Recompute,
    Samples,
)
from pipette_launch.facts.layout import LayoutColumns
from pipette_launch.facts.measurements import LAYERS

RECOMPUTES = (
    Recompute(granularity="none"),
    Recompute(granularity="selective", modules=("mlp", "moe_act")),
    Recompute(granularity="selective"),
    Recompute(granularity="full", method="uniform", num_layers=1),
    Recompute(granularity="full", method="block", num_layers=1),
)
MODELS: tuple[dict[str, object], ...] = (
    {},
    {"gated_linear_unit": True, "num_query_groups": 2, "untie_embeddings_and_output_weights": True},
    {"mtp_num_layers": 1, "normalization": "RMSNorm"},
    {
        "mtp_num_layers": 2,
        "untie_embeddings_and_output_weights": True,
        "num_experts": 4,
        "moe_layer_freq": (0, *(1,) * 7),
    },
    {"num_experts": 4, "moe_layer_freq": (0, 1, 1, 1, 0, 1, 1, 1), "moe_ffn_hidden_size": 128},
    {"num_experts": 4, "moe_layer_freq": (1,) * 8, "moe_shared_expert_intermediate_size": 64},
    {
        "num_experts": 4,
        "moe_layer_freq": (0, 1, 0, 0, 0, 1, 0, 0),
        "mtp_num_layers": 1,
        "hybrid": HybridLayers(
            pattern="ME*-MEMM",
            mtp_pattern="*E",
            mamba_state_dim=128,
            mamba_head_dim=64,
            mamba_num_groups=4,
            mamba_num_heads=32,
        ),
    },
)
FLAGS = (
    (),
    (
        "--fine-grained-activation-offloading",
        "--min-offloaded-tensor-size 1",
        "--offload-modules core_attn qkv_linear mlp_norm expert_fc1 moe_act",
        "--moe-grouped-gemm",
    ),
    ("--moe-token-dispatcher-type alltoall", "--no-async-tensor-model-parallel-allreduce"),
    ("--use-megatron-fsdp", "--data-parallel-sharding-strategy optim_grads_params"),
    ("--use-megatron-fsdp", "--data-parallel-sharding-strategy optim_grads", "--num-distributed-optimizer-instances 2"),
    ("--fp8-format hybrid", "--cuda-graph-impl local", "--cuda-graph-scope full_iteration"),
)
CUTS = {2: (3, 5), 4: (1, 3, 2, 2), 8: (0, 1, 1, 2, 1, 1, 2, 0)}
SHAPES = [(1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (2, 4), (4, 2)]


def job_of(model: dict[str, object], flags: tuple[str, ...] = ()) -> Job:
    """Eight layers and 96 samples; wide enough for several buckets of gradients."""
    wide = {"num_layers": 8, "hidden_size": 1024, "ffn_hidden_size": 4096, "kv_channels": 256, "vocab_size": 50_000}
    return replace(
        tiny_job(model=tiny_model(**(wide | model)), performance_flags=flags), batch=Batch(global_batch_size=96)
    )


def measurements_of(cluster: Cluster, rng: random.Random, *, fits: bool) -> Measurements:
    """Every part at a time of its own, partly idle; expert layers too."""
    base = tiny_measurements(cluster)
    parts = (*LAYERS, "embedding", "head", "prediction")
    samples = {part: Samples(values_s=(rng.uniform(1e-3, 9e-3),)) for part in parts}
    compute = tuple(
        ComputeTime(
            case=case,
            part=part,  # type: ignore[arg-type]
            slot=0,
            forward=sample,
            input_grad=sample,
            weight_grad=sample,
            forward_idle_s=rng.choice((0.0, 5e-4)),
            backward_idle_s=rng.choice((0.0, 2e-2)),
        )
        for case in base.compute_cases()
        for part, sample in samples.items()
    )
    others = {
        "optimizer_s_per_parameter": 1e-9,
        "gradient_s_per_byte": rng.choice((0.0, 1e-10)),
        "step_s": rng.choice((0.0, 3e-2)),
        "host_bytes_per_s": rng.choice((0.0, 1e6, 1e8)),
    }
    return replace(base, compute=compute, collectives=drawn_fits(rng) if fits else (), **others)  # type: ignore[arg-type]


@st.composite
def layouts(draw: st.DrawFn, *, slots: int) -> Layout:
    """Any layout of eight layers on so many slots."""
    degrees = [(pp, vpp, tp, cp) for pp, vpp in SHAPES for tp in (1, 2) for cp in (1, 2) if slots % (pp * tp * cp) == 0]
    pp, vpp, tp, cp = draw(st.sampled_from(degrees))
    dp = slots // (pp * tp * cp)
    return Layout(
        tp=tp,
        pp=pp,
        dp=dp,
        cp=cp,
        ep=draw(st.sampled_from([size for size in (1, 2, 4) if dp % size == 0])),
        etp=draw(st.sampled_from([1, tp])),
        vpp=vpp,
        microbatch_group_size=draw(st.sampled_from([0, pp, pp + 1, 2 * pp])) if vpp > 1 else 0,
        layers_per_chunk=CUTS[pp * vpp] if pp * vpp in CUTS and draw(st.booleans()) else (),
        chunks_after_mtp=draw(st.integers(0, pp - 1)),
        micro_batch_size=draw(st.sampled_from([1, 2, 3])),
        sequence_parallel=tp > 1 and draw(st.booleans()),
        use_distributed_optimizer=draw(st.booleans()),
        overlap_grad_reduce=draw(st.booleans()),
        overlap_param_gather=draw(st.booleans()),
        recompute=draw(st.sampled_from(RECOMPUTES)),
    )


def allowed(hosts: int, devices: int, rng: random.Random) -> list[int]:
    """A placement on GPUs: the ranks of each host differ modulo its slots."""
    rows = [rng.sample([devices * host + slot for host in range(hosts)], hosts) for slot in range(devices)]
    return [rank for held in zip(*rows, strict=True) for rank in rng.sample(held, devices)]


def bound_of(predictor: Predictor, layout: Layout) -> float | None:
    """The bound of one layout; None where its batch or its groups do not divide."""
    try:
        return predictor.bound_s(layout)
    except LayoutError:
        return None


def with_stages(job: Job, measured: Measurements, rows: list[Layout], rng: random.Random) -> Measurements:
    """Return the measurements with a stage of half of the layouts that took 0.5 to 2 times its parts."""
    predictor, stages = Predictor(job, measured), []
    for layout in rows:
        if rng.random() < 0.5 and bound_of(predictor, layout) is not None:
            rank = rng.randrange(layout.pp)
            chunks = predictor.compute.chunk_passes(layout)[rank :: layout.pp]
            reading = stage_reading(
                job,
                layout,
                rank,
                num_microbatches=1,
                schedule_s=rng.uniform(0.5, 2) * sum(one.forward_s + one.backward_s for one in chunks),
                update_s=rng.uniform(0, 0.1),
            )
            stages.append(reading)
    return replace(measured, stages=tuple(stages))


@settings(max_examples=30)
@given(
    st.sampled_from(MODELS),
    st.sampled_from(FLAGS),
    st.lists(layouts(slots=8), min_size=1, max_size=8),
    st.booleans(),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_no_column_is_above_the_bound_of_its_layout(
    model: dict[str, object], flags: tuple[str, ...], rows: list[Layout], fits: bool, gpus: bool, rng: random.Random
) -> None:
    """On drawn slots, with and without measured collectives; and it is a number wherever that is one."""
    needs_engine = "--fine-grained-activation-offloading" in flags or "--fp8-format hybrid" in flags
    this = job_of(model | ({"transformer_impl": "transformer_engine"} if needs_engine else {}), flags)
    cluster = drawn_cluster(rng, hosts=4, devices=2)
    cluster = on_gpus(cluster) if gpus else cluster
    # A device that the model knows, so that the factor of flags that were not timed is applied.
    cluster = named(cluster, "NVIDIA H100 80GB HBM3")
    measured = with_stages(this, measurements_of(cluster, rng, fits=fits), rows, rng)
    predictor = Predictor(this, measured)

    seconds = BoundColumns(this, measured).of_columns(LayoutColumns.of(rows)).tolist()

    for layout, bound_s in zip(rows, seconds, strict=True):
        expected_s = bound_of(predictor, layout)
        assert np.isnan(bound_s) if expected_s is None else 0 < bound_s <= expected_s


@settings(max_examples=30)
@given(
    st.sampled_from(MODELS),
    st.sampled_from(FLAGS[:2]),
    st.lists(layouts(slots=12), min_size=1, max_size=8),
    st.sampled_from([(6, 2), (3, 4)]),
    st.booleans(),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_no_placement_is_below_its_column(
    model: dict[str, object],
    flags: tuple[str, ...],
    rows: list[Layout],
    size: tuple[int, int],
    fits: bool,
    gpus: bool,
    rng: random.Random,
) -> None:
    """Not on hosts of which some have slow links; and a rough bound is not above it."""
    this, (hosts, devices) = job_of(model, flags), size
    cluster = drawn_cluster(rng, hosts=hosts, devices=devices)
    cluster = on_gpus(cluster) if gpus else cluster
    share_H = np.where(np.arange(hosts) < rng.randrange(1, hosts), 0.1, 1.0)
    links = cluster.between_hosts
    slower = np.asarray(links.bandwidth_bytes_per_s) * np.minimum(share_H[:, None], share_H[None, :])
    cluster = replace(cluster, between_hosts=replace(links, bandwidth_bytes_per_s=slower))
    measured = with_stages(this, measurements_of(cluster, rng, fits=fits), rows, rng)
    predictor, bounds = Predictor(this, measured), BoundColumns(this, measured)
    columns = LayoutColumns.of(rows)

    seconds, rough = bounds.of_columns(columns), bounds.rough_of_columns(columns)

    assert (np.isnan(seconds) == np.isnan(rough)).all()
    known = ~np.isnan(seconds)
    assert (rough[known] <= seconds[known]).all()
    for layout, bound_s in zip(rows, seconds.tolist(), strict=True):
        if bound_of(predictor, layout) is not None:
            placements = [allowed(hosts, devices, rng) if gpus else rng.sample(range(12), 12) for _ in range(20)]
            # Groups of consecutive ranks stay inside hosts.
            orders = [list(range(hosts)), *(rng.sample(range(hosts), hosts) for _ in range(20))]
            placements += [[devices * host + slot for host in order for slot in range(devices)] for order in orders]
            costs_s = predictor.placement_cost(layout).costs(np.array(placements))
            assert bound_s <= costs_s.min()


@pytest.mark.parametrize("chunks_after_mtp", [0, 1])
@pytest.mark.parametrize("pp", [1, 2])
def test_the_parts_of_a_chunk_take_its_seconds(pp: int, chunks_after_mtp: int) -> None:
    """The embedding takes its time also where the depths of multi-token prediction share the embedding's parameters."""
    this, layout = job_of(MODELS[2]), Layout(pp=pp, dp=8 // pp, chunks_after_mtp=min(chunks_after_mtp, pp - 1))
    measured = measurements_of(tiny_cluster(4, 2), random.Random(1), fits=False)
    predictor, columns = Predictor(this, measured), LayoutColumns.of([layout])
    tables = Tables(this, measured, predictor.compute, predictor.fabric)
    expected = predictor.compute.chunk_passes(layout)

    content = contents_of(this, columns)
    forward_s, backward_s = tables.unit_times(columns).chunk_times(content.parts_KX, 1.0, 1.0)

    kinds = content.kind_CVP[0].ravel()
    assert [one.forward_s for one in expected] == pytest.approx(forward_s[0][kinds])
    assert [one.backward_s for one in expected] == pytest.approx(backward_s[0][kinds])


@settings(max_examples=30)
@given(
    st.sampled_from(MODELS),
    st.sampled_from(FLAGS[:2]),
    st.lists(layouts(slots=8), min_size=1, max_size=8),
    st.randoms(use_true_random=False),
)
def test_overlapped_reductions_raise_no_bound(
    model: dict[str, object], flags: tuple[str, ...], rows: list[Layout], rng: random.Random
) -> None:
    """So a cut is bounded by its states with them alone, where it has these."""
    measured = measurements_of(drawn_cluster(rng, hosts=4, devices=2), rng, fits=True)
    bounds = BoundColumns(job_of(model, flags), measured)
    bare = [replace(layout, overlap_grad_reduce=False, overlap_param_gather=False) for layout in rows]
    overlapped = [replace(layout, overlap_grad_reduce=True) for layout in bare]

    bare_s, overlapped_s = bounds.of_columns(LayoutColumns.of(bare)), bounds.of_columns(LayoutColumns.of(overlapped))

    known = ~np.isnan(bare_s)
    assert (overlapped_s[known] <= bare_s[known] * (1 + 1e-12)).all()


def test_equal_machines_are_met() -> None:
    """Every plain layout of equal slots and links, to a hundredth; interleaved ones, whose hops hide, too."""
    this = job_of({})
    measured = replace(
        tiny_measurements(tiny_cluster(2, 4, bandwidth_bytes_per_s=1e10)),
        optimizer_s_per_parameter=1e-9,
        gradient_s_per_byte=1e-9,
        step_s=0.05,
    )
    sharded = Layout(dp=2, use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True)
    rows = [
        Layout(tp=2, pp=2, dp=2),
        Layout(tp=2, pp=2, dp=2, vpp=2, use_distributed_optimizer=True),
        replace(sharded, pp=4),
        replace(sharded, tp=2, pp=2, vpp=2),
        Layout(pp=8, recompute=RECOMPUTES[3]),
        Layout(dp=4, tp=2, sequence_parallel=True),
    ]
    predictor = Predictor(this, measured)

    found = BoundColumns(this, measured).of_columns(LayoutColumns.of(rows)).tolist()

    assert found == pytest.approx([predictor.bound_s(layout) for layout in rows], rel=1e-2)


def test_what_cannot_be_priced_is_nan() -> None:
    """Unknown kernels, another number of slots, a batch or layers that do not divide, groups too small."""
    this = job_of({})
    measured = tiny_measurements(tiny_cluster(4, 2))
    bad = [
        Layout(tp=8),
        Layout(dp=4),
        Layout(dp=8, micro_batch_size=5),
        Layout(pp=2, dp=4, layers_per_chunk=(1, 2)),
        Layout(pp=4, dp=2, vpp=2, microbatch_group_size=3),
    ]

    found = BoundColumns(this, measured).of_columns(LayoutColumns.of([Layout(dp=8), *bad])).tolist()

    assert [False, True, True, True, True, True] == np.isnan(found).tolist()


def test_no_layouts() -> None:
    """Nothing in, nothing out."""
    assert BoundColumns(job_of({}), tiny_measurements(tiny_cluster())).of_columns(LayoutColumns.of([])).tolist() == []


def test_one_slot_alone_is_met() -> None:
    """It has no links to anybody: computing and the optimizer are all there is, also with tied embeddings."""
    this, measured = job_of({}), tiny_measurements(tiny_cluster(1, 1))

    (found_s,) = BoundColumns(this, measured).of_columns(LayoutColumns.of([Layout()])).tolist()

    assert found_s == pytest.approx(Predictor(this, measured).bound_s(Layout()))
