"""Layers go where they make the slowest stage quickest."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from facts_for_tests import drawn_cluster, tiny_job, tiny_measurements, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from search import naive
from search.legal import cuts, variants

from pipette_launch.cost.memory.peak import MemoryColumns, peak_memory_bytes, peak_memory_columns
from pipette_launch.cost.step.predictor import Predictor
from pipette_launch.facts import Batch, GatedDelta, HybridLayers, Job, Layout
from pipette_launch.facts.co_location import Domains
from pipette_launch.facts.model import LatentAttention
from pipette_launch.search import layouts as enumeration
from pipette_launch.search.layout_axes import (
    LayerSeconds,
    balanced_chunks,
    by_flops,
    by_parts,
    group_sizes,
    module_sets,
    stage_seconds,
    virtual_stages,
)
from pipette_launch.search.layouts import BaseLayouts, base_layouts


def live(cut: tuple[int, ...]) -> int:
    """Layers times micro-batches at once, on the stage where that is most: the first holds one for each stage."""
    return max((len(cut) - stage) * layers for stage, layers in enumerate(cut))


TIMES = st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0, 3.7])


def splits(layers: int, chunks: int) -> Iterator[tuple[int, ...]]:
    """Every way to cut layers into chunks, empty ones included."""
    if chunks == 1:
        yield (layers,)
        return
    for size in range(layers + 1):
        yield from ((size, *rest) for rest in splits(layers - size, chunks - 1))


@st.composite
def parts(draw: st.DrawFn, *, equal: bool) -> LayerSeconds:
    """A small model whose ends may cost more than its layers."""
    size = draw(st.integers(1, 9))
    kinds = draw(st.lists(st.sampled_from([1.0, 1.0, 2.5]), min_size=size, max_size=size))
    return LayerSeconds(layers_s=(1.3,) * size if equal else tuple(kinds), first_s=draw(TIMES), last_s=draw(TIMES))


@settings(max_examples=60, deadline=None)
@given(parts(equal=False), st.integers(1, 4))
def test_plain_stages_are_as_quick_as_trying_everything(seconds: LayerSeconds, pp: int) -> None:
    """No other cut has a quicker slowest stage, and none as quick holds fewer live layers."""
    found = balanced_chunks(seconds, pp=pp, vpp=1)
    slowest_s = max(stage_seconds(seconds, found, pp))
    every = {cut: max(stage_seconds(seconds, cut, pp)) for cut in splits(len(seconds.layers_s), pp)}

    assert sum(found) == len(seconds.layers_s)
    assert min(every.values()) == pytest.approx(slowest_s)
    assert min(live(cut) for cut in every if every[cut] <= slowest_s * (1 + 1e-9)) == live(found)


@settings(max_examples=40, deadline=None)
@given(parts(equal=True), st.integers(2, 3))
def test_interleaved_stages_of_equal_layers_are_too(seconds: LayerSeconds, pp: int) -> None:
    """Interleaved, with layers of one kind, the slowest rank is as quick as any cut makes it."""
    found = balanced_chunks(seconds, pp=pp, vpp=2)
    best_s = min(max(stage_seconds(seconds, cut, pp)) for cut in splits(len(seconds.layers_s), 2 * pp))

    assert (2 * pp, len(seconds.layers_s)) == (len(found), sum(found))
    assert max(stage_seconds(seconds, found, pp)) == pytest.approx(best_s)


@settings(max_examples=40, deadline=None)
@given(parts(equal=False), st.integers(2, 3))
def test_interleaved_mixed_layers_come_within_one_layer(seconds: LayerSeconds, pp: int) -> None:
    """With mixed layers the slowest rank is at most one layer above the best of all cuts."""
    found = balanced_chunks(seconds, pp=pp, vpp=2)
    best_s = min(max(stage_seconds(seconds, cut, pp)) for cut in splits(len(seconds.layers_s), 2 * pp))

    assert (2 * pp, len(seconds.layers_s)) == (len(found), sum(found))
    assert max(stage_seconds(seconds, found, pp)) <= best_s + max(seconds.layers_s) + 1e-9


@pytest.mark.parametrize(
    ("first_s", "last_s", "pp", "vpp", "expected"),
    [
        (0.0, 0.0, 4, 1, (2, 2, 2, 2)),
        (0.0, 1.0, 4, 1, (1, 2, 3, 2)),
        (0.0, 2.0, 2, 1, (5, 3)),
        (1.0, 2.0, 3, 1, (2, 4, 2)),
        (0.0, 5.0, 4, 1, (2, 2, 4, 0)),
        (0.0, 0.0, 3, 1, (2, 3, 3)),
        (0.0, 2.0, 2, 2, (2, 2, 3, 1)),
    ],
)
def test_ends_that_cost_take_layers_away(
    first_s: float, last_s: float, pp: int, vpp: int, expected: tuple[int, ...]
) -> None:
    """Eight layers of one second each, worked by hand."""
    seconds = LayerSeconds(layers_s=(1.0,) * 8, first_s=first_s, last_s=last_s)

    assert expected == balanced_chunks(seconds, pp=pp, vpp=vpp)


def test_unmeasured_parts_are_weighed_by_flops() -> None:
    """The head counts by its width, an embedding for nothing, and each depth of prediction as a layer and a head."""
    plain, deeper = by_flops(tiny_model()), by_flops(tiny_model(mtp_num_layers=2))

    assert (tiny_model().kind_flops_per_token("layer"),) * 4 == plain.layers_s
    assert (0.0, 2.0 * 64 * 256) == (plain.first_s, plain.last_s)
    assert deeper.last_s == 3 * plain.last_s + 2 * plain.layers_s[0]


def test_a_depth_of_prediction_weighs_what_it_was_timed_to() -> None:
    """The last stage has the head and two of them."""
    parts = {"layer": 1.0, "embedding": 0.1, "head": 0.5, "prediction": 1.7}

    assert pytest.approx(0.5 + 2 * 1.7) == by_parts(tiny_model(mtp_num_layers=2), parts).last_s


def test_stages_of_hybrid_models_are_cut_by_time() -> None:
    """Seven quick layers balance one slow one."""
    seconds = {"mamba_layer": 1.0, "attention_layer": 7.0, "embedding": 0.0, "head": 0.0}
    model = tiny_model(
        hybrid=HybridLayers(
            pattern="MMMMMMM*", mamba_state_dim=16, mamba_head_dim=8, mamba_num_groups=2, mamba_num_heads=16
        ),
        num_layers=8,
    )

    assert (7, 1) == balanced_chunks(by_parts(model, seconds), pp=2, vpp=1)
    assert by_flops(model).layers_s[0] != by_flops(model).layers_s[-1]


LATENT = LatentAttention(q_lora_rank=None, kv_lora_rank=8, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=8)
EXPERTS = {"num_experts": 4, "moe_layer_freq": (1, 1, 1, 1), "add_bias_linear": False}


def found_in(job: Job, world_size: int) -> BaseLayouts:
    """The cuts of a job on GPUs, two in each host."""
    return base_layouts(job, world_size=world_size, domains=Domains(devices_per_host=2), device_kind="cuda")


@settings(max_examples=12, deadline=None)
@given(
    st.integers(0, 1000).map(random.Random), st.sampled_from([(2, 2, 2, 1), (1, 4, 2, 1), (1, 2, 4, 1), (2, 2, 2, 2)])
)
def test_either_rank_order_reaches_every_price(rng: random.Random, sizes: tuple[int, int, int, int]) -> None:
    """A placement of the one order has a twin in the other, cell for cell, that costs the same."""
    tp, pp, dp, ep = sizes
    model = tiny_model(**EXPERTS) if ep > 1 else tiny_model()
    # With pipeline stages Megatron wants as many replicas of experts as of the rest in the swapped order.
    swapped = Layout(tp=tp, pp=pp, dp=dp, ep=ep, etp=tp // ep, sequence_parallel=ep > 1, use_tp_pp_dp_mapping=True)
    default = replace(swapped, use_tp_pp_dp_mapping=False)
    measurements = tiny_measurements(drawn_cluster(rng, hosts=4))
    experts = tuple(replace(time, part="moe_layer") for time in measurements.compute if time.part == "layer")
    measurements = replace(measurements, compute=(*measurements.compute, *experts))
    predictor = Predictor(tiny_job(8, model=model), measurements)
    placement = rng.sample(range(8), 8)
    twin = [default.rank_of(swapped.cell_of(rank)) for rank in placement]

    assert predictor.placement_cost(swapped).cost(placement) == pytest.approx(
        predictor.placement_cost(default).cost(twin), rel=1e-12
    )


@settings(max_examples=20, deadline=None)
@given(naive.cases(), st.data())
def test_too_many_cuts_are_thinned_out_and_counted(case: naive.Case, data: st.DataObject) -> None:
    """Layouts that were set aside are counted, and the others are unchanged."""
    job, world_size, kind = case
    whole = base_layouts(job, world_size=world_size, domains=Domains(devices_per_host=1), device_kind=kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(enumeration, "MOST", data.draw(st.integers(0, 20)))
        some = base_layouts(job, world_size=world_size, domains=Domains(devices_per_host=1), device_kind=kind)
    aside = sum(count for reason, count in some.dropped.items() if reason.startswith("set aside"))

    assert set(cuts(some)) <= set(cuts(whole))
    assert len(whole) - len(some) <= aside
    assert aside > 0 or len(whole) == len(some)


@settings(max_examples=15, deadline=None)
@given(naive.cases())
def test_the_leanest_saver_needs_the_least_memory(case: naive.Case) -> None:
    """By the memory model itself, up to the recompute of a whole chunk at once, which a short one may stand better."""
    job, world_size, kind = case
    found = base_layouts(job, world_size=world_size, domains=Domains(devices_per_host=2), device_kind=kind)
    leanest = found.tables.leanest(found.columns)
    for row in range(0, len(leanest), 5):
        lean = leanest.layout(row)
        needs = [peak(job, layout) for layout in variants(found, row)]

        assert lean in variants(found, row)
        assert peak(job, lean) <= 1.1 * min(needs)


@settings(max_examples=40, deadline=None)
@given(naive.cases())
def test_no_variant_needs_less_than_the_leanest_state_without_activations(case: naive.Case) -> None:
    """The search drops whole cuts by this, before it lists their variants."""
    job, world_size, kind = case
    found = base_layouts(job, world_size=world_size, domains=Domains(devices_per_host=2), device_kind=kind)
    cut_M, every = found.variants(np.arange(len(found.columns)))
    least_N = np.full(len(found.columns), np.iinfo(np.int64).max)
    np.minimum.at(least_N, cut_M, fullest_N(peak_memory_columns(job, every)))
    empty = peak_memory_columns(job, found.tables.leanest(found.columns).without_recompute())
    empty = replace(empty, parts_S=replace(empty.parts_S, activations=np.zeros_like(empty.parts_S.activations)))

    assert (fullest_N(empty) <= least_N).all()


def fullest_N(columns: MemoryColumns) -> NDArray[np.int64]:
    """Bytes on the stage of each layout that needs most."""
    return np.maximum.reduceat(columns.parts_S.total, columns.starts_N)


def peak(job: Job, layout: Layout) -> int:
    """Bytes on the stage that needs most."""
    return max(parts.total for parts in peak_memory_bytes(job, layout))


def test_stages_need_not_divide_the_layers() -> None:
    """Five layers go over two, three and four stages too, and no cut is refused for that."""
    found = found_in(tiny_job(12, model=tiny_model(num_layers=5), batch=Batch(global_batch_size=12)), 12)

    assert {1, 2, 3, 4} == set(found.columns.pp.tolist())
    assert not any("does not divide num_layers" in reason for reason in found.dropped)


@pytest.mark.parametrize(
    ("pp", "vpp", "many", "expected"),
    [(2, 1, 8, (0,)), (2, 2, 8, (0, 4)), (4, 2, 4, (0, 8)), (4, 2, 10, (5, 8)), (4, 2, 3, (0, 8))],
)
def test_groups_of_micro_batches(pp: int, vpp: int, many: int, expected: tuple[int, ...]) -> None:
    """Megatron's default where it is legal, else the next that is, and twice the default, which may not be."""
    assert expected == group_sizes(tiny_job(4), pp, vpp, many)


def test_virtual_stages() -> None:
    """Divisors of a stage's layers, and powers of two."""
    job = tiny_job(4, model=tiny_model(num_layers=12))

    assert [(1,), (1, 2, 3, 4, 6), (1, 2)] == [virtual_stages(job, pp) for pp in (1, 2, 5)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [("core_attn",)]),
        ({"transformer_impl": "transformer_engine", "attention_backend": "flash"}, []),
        (
            {"transformer_impl": "transformer_engine", "attention_backend": "flash", "add_bias_linear": False},
            [("mlp",)],
        ),
        (
            EXPERTS | {"transformer_impl": "transformer_engine", "moe_shared_expert_intermediate_size": 32},
            [
                ("layernorm",),
                ("layernorm", "moe_act"),
                ("layernorm", "moe_act", "shared_experts"),
                ("layernorm", "moe"),
            ],
        ),
        (
            EXPERTS | {"moe_layer_freq": (0, 1, 1, 1)},
            [("core_attn",), ("core_attn", "mlp"), ("core_attn", "mlp", "moe")],
        ),
        (
            {"transformer_impl": "transformer_engine", "latent_attention": LATENT, "add_bias_linear": False},
            [("layernorm",), ("layernorm", "mla_up_proj"), ("layernorm", "mla_up_proj", "mlp")],
        ),
    ],
)
def test_modules_grow_from_cheap_to_dear(changes: dict[str, object], expected: list[tuple[str, ...]]) -> None:
    """Only modules that exist, free something and can be priced; no `mlp` with biases, on which Megatron hangs."""
    job = tiny_job(4, model=tiny_model(**changes), performance_flags=("--moe-grouped-gemm",))

    assert expected == [recompute.modules for recompute in module_sets(job)]


@pytest.mark.parametrize(("version", "is_cheap"), [("0.18.0", False), ("0.19.0", True)])
def test_the_norm_of_gated_delta_networks_is_cheap(version: str, is_cheap: bool) -> None:
    """The norm and its gate have no matrix, and 0.19 is the first release that runs them again."""
    net = GatedDelta(**dict.fromkeys(GatedDelta.__slots__, 8))
    fields = {"linear_attention": net, "linear_layers": (1, 1, 1, 0), "transformer_impl": "transformer_engine"}
    job = tiny_job(4, model=tiny_model(**fields), megatron_version=version)

    assert [("gdn_norm_out",)] * is_cheap == [recompute.modules for recompute in module_sets(job)]
