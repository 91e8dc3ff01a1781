"""Who sends how much how often, by hand: s 32, b 1, h 64 in fp32, so one activation is 8,192 bytes."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from facts_for_tests import changed_job, expert_groups, groups_of, tiny_job, tiny_model

from pipette_launch.cost.communication import exchanges as exchanges_module
from pipette_launch.cost.communication.exchanges import (
    Groups,
    Ranks,
    Waits,
    group_sizes,
    num_buckets,
    step_traffic,
)
from pipette_launch.cost.layers.block import residual_bytes
from pipette_launch.cost.layers.loads import Behind, Exchange, Hiding, OfLayer
from pipette_launch.cost.layers.mlp import IN_DOMAIN_SHARE, OVERLAP_COSTS
from pipette_launch.cost.layers.parameters import chunk_parameters
from pipette_launch.facts import Job, Layout, Recompute
from pipette_launch.facts.model import LatentAttention

LAYOUTS = [
    Layout(tp=2, pp=2, dp=4, cp=2),
    Layout(tp=2, pp=3, dp=2, cp=2, use_tp_pp_dp_mapping=True),
    Layout(tp=2, pp=2, dp=4, ep=4, etp=1),
    Layout(tp=2, pp=2, dp=4, ep=2, etp=2, cp=2),
    Layout(pp=2, dp=4, ep=4, use_tp_pp_dp_mapping=True),
]


def as_sets(groups: Ranks) -> set[tuple[int, ...]]:
    """Groups as a set of tuples."""
    return {tuple(row) for row in groups.tolist()}


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.words)
def test_groups_are_those_of_the_layout(layout: Layout) -> None:
    """Same members in the same order as `groups_of`."""
    groups = Groups.of(layout)

    assert set(groups_of(layout, "tp")) == as_sets(groups.tp)
    assert set(groups_of(layout, "cp")) == as_sets(groups.cp)
    assert set(groups_of(layout, "dp_cp")) == as_sets(groups.dp_cp)
    assert set(expert_groups(layout)) == as_sets(groups.ep)


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.words)
def test_members_are_sorted_by_rank(layout: Layout) -> None:
    """As torch sorts the ranks of every group, rings run upwards."""
    groups = Groups.of(layout)

    for name in ("tp", "cp", "ep", "etp", "ep_etp", "dp_cp", "expert_dp", "embedding"):
        rows = getattr(groups, name)
        assert np.array_equal(np.sort(rows, axis=1), rows), name


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.words)
def test_expert_groups_cover_every_rank_once(layout: Layout) -> None:
    """Experts have a grid of their own over the same ranks."""
    groups = Groups.of(layout)

    for name in ("ep", "etp", "ep_etp", "expert_dp"):
        assert sorted(getattr(groups, name).ravel().tolist()) == list(range(layout.world_size)), name


def test_expert_data_parallel_groups_by_hand() -> None:
    """With tp 2, dp 4, ep 2, etp 2: each expert slice lies on two ranks, four apart."""
    groups = Groups.of(Layout(tp=2, dp=4, ep=2, etp=2))

    assert groups.expert_dp.tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert groups.ep.tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups.etp.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_rows_are_ordered_by_pipeline_rank() -> None:
    """Sizes that differ from stage to stage are laid along the rows."""
    layout = Layout(tp=2, pp=2, dp=2)
    groups = Groups.of(layout)

    assert [[layout.cell_of(rank).pp for rank in row] for row in groups.dp_cp.tolist()] == [[0, 0]] * 2 + [[1, 1]] * 2
    assert groups.forward_hop.tolist() == [[0, 4], [1, 5], [2, 6], [3, 7], [4, 0], [5, 1], [6, 2], [7, 3]]
    assert groups.embedding.tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_copies_of_shards_are_consecutive_members() -> None:
    """Two copies over eight replicas, and over the four of the experts."""
    layout = Layout(tp=2, dp=4, cp=2, ep=2, etp=2)
    groups = Groups.of(layout, instances=2)

    assert groups.shard.tolist() == [row for whole in groups.dp_cp.tolist() for row in (whole[:4], whole[4:])]
    assert group_sizes(layout, instances=2)["expert_shard"] == 2
    assert groups.expert_shard.shape == (8, 2)
    assert as_sets(Groups.of(layout).shard) == as_sets(Groups.of(layout).dp_cp)


FULL = Recompute(granularity="full", method="block", num_layers=1)
Row = tuple[str, str, float, tuple[float, ...], tuple[float, ...]]


def exchanges(job: Job, layout: Layout, hiding: Hiding, domain: int = 1) -> tuple[Exchange, ...]:
    """The exchanges on hosts of one device each, without NVLink between them, unless `domain` has more slots."""
    return exchanges_module.exchanges(job, layout, hiding, domain)


def rows(job: Job, layout: Layout) -> list[Row]:
    """The exchanges as plain tuples: kind, group, bytes, forward, backward."""

    def row(item: Exchange) -> Row:
        return item.kind, item.group, item.size_bytes, item.forward, item.backward

    return [row(item) for item in exchanges(job, layout, Hiding(core_attention_s=1e-3))]


def moe_job(**changes: object) -> Job:
    """Layers 0 and 2 dense, 1 and 3 with four experts, top 2."""
    flags = changes.pop("performance_flags", ())
    return tiny_job(
        model=tiny_model(num_experts=4, moe_layer_freq=(0, 1, 0, 1), **changes),
        performance_flags=flags,
    )


def test_without_degrees_nothing_is_sent() -> None:
    """Data and pipeline parallelism have no collective inside a pass."""
    assert rows(tiny_job(), Layout(pp=2, dp=2)) == []


def test_tensor_parallel_all_reduces() -> None:
    """Two a layer and pass; one more for the embedding forward and the head backward; three of s*b*4 for the loss."""
    expected = [
        ("all_reduce", "tp", 8192, (5.0, 4.0), (0.0, 0.0)),
        ("all_reduce", "tp", 8192, (0.0, 0.0), (4.0, 5.0)),
        ("all_reduce", "tp", 128, (0.0, 3.0), (0.0, 0.0)),
    ]

    assert expected == rows(tiny_job(), Layout(tp=2, pp=2))


def test_full_recompute_repeats_the_forward_ones() -> None:
    """One layer of each chunk runs again."""
    assert rows(tiny_job(), Layout(tp=2, pp=2, recompute=FULL))[0] == (
        "all_reduce",
        "tp",
        8192,
        (5.0, 4.0),
        (2.0, 2.0),
    )


def test_sequence_parallelism_gathers_and_scatters() -> None:
    """Two of each a layer and pass, and two more gathers in the backward for the weight gradients."""
    layout = Layout(tp=2, pp=2, sequence_parallel=True)
    expected = [
        ("reduce_scatter", "tp", 8192, (1.0, 0.0), (0.0, 0.0)),
        ("all_gather", "tp", 8192, (4.0, 5.0), (5.0, 4.0)),
        ("reduce_scatter", "tp", 8192, (4.0, 4.0), (0.0, 0.0)),
        ("all_gather", "tp", 8192, (0.0, 0.0), (4.0, 5.0)),
        ("reduce_scatter", "tp", 8192, (0.0, 0.0), (4.0, 5.0)),
        ("all_reduce", "tp", 128, (0.0, 3.0), (0.0, 0.0)),
    ]

    assert expected == rows(tiny_job(model=tiny_model(position_embedding_type="rope")), layout)


def test_learned_positions_are_added_before_the_sequence_is_split() -> None:
    """The embedding with learned positions sums whole tensors, and each rank cuts out its own tokens."""
    layout = Layout(tp=2, pp=2, sequence_parallel=True)

    assert rows(tiny_job(), layout)[0] == ("all_reduce", "tp", 8192, (1.0, 0.0), (0.0, 0.0))


def test_latent_attention_gathers_latents() -> None:
    """Up-projections gather 48 and 32 channels of latents; 8 rotary channels of the key are gathered too."""
    latent = LatentAttention(q_lora_rank=48, kv_lora_rank=32, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=12)
    model = tiny_model(latent_attention=latent, transformer_impl="transformer_engine", num_layers=1)
    gathers = [
        row for row in rows(tiny_job(model=model), Layout(tp=2, sequence_parallel=True)) if row[0] == "all_gather"
    ]

    # The hidden state has 64 channels: the MLP's matrix and the head gather it.
    assert gathers == [
        ("all_gather", "tp", 8192, (2.0,), (3.0,)),
        ("all_gather", "tp", 8192, (0.0,), (2.0,)),
        ("all_gather", "tp", 8192 * 48 / 64, (1.0,), (0.0,)),
        ("all_gather", "tp", 8192 * 48 / 64, (0.0,), (1.0,)),
        ("all_gather", "tp", 8192 * 32 / 64, (1.0,), (0.0,)),
        ("all_gather", "tp", 8192 * 32 / 64, (0.0,), (1.0,)),
        ("all_gather", "tp", 8192 * 8 / 64, (1.0,), (0.0,)),
    ]


@pytest.mark.parametrize(("module", "layers_again"), [("mlp", 4.0), ("core_attn", 0.0)])
def test_recompute_of_a_block_repeats_its_exchanges(module: str, layers_again: float) -> None:
    """One all-reduce of each MLP runs again; the attention core exchanges nothing over tp."""
    recompute = Recompute(granularity="selective", modules=(module,))

    assert rows(tiny_job(), Layout(tp=2, recompute=recompute))[0] == ("all_reduce", "tp", 8192, (9.0,), (layers_again,))


def test_two_optimizers_gather_all_parameters_twice() -> None:
    """Without overlap, the optimizer of the experts and the other optimizer each gather the parameters of both."""
    job = moe_job()
    overlapped = Layout(dp=2, ep=2, use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True)
    plain = replace(overlapped, overlap_param_gather=False)
    once, twice = (step_traffic(job, layout).parameter_bytes for layout in (overlapped, plain))

    assert twice == tuple((2 * dense, 2 * expert) for dense, expert in once)


@pytest.mark.parametrize(
    ("sequence_parallel", "flags", "expected"),
    [
        (True, (), [0.0, 0.0, 0.0, 2e-3, 3e-3, 0.0]),
        (False, (), [0.0, 3e-3, 0.0]),
        (False, ("--no-async-tensor-model-parallel-allreduce",), [0.0, 0.0, 0.0]),
    ],
)
def test_gradients_pass_behind_gradients(
    sequence_parallel: bool, flags: tuple[str, ...], expected: list[float]
) -> None:
    """Inputs are gathered again behind the input gradient; sums pass behind the weight gradient, unless told not to."""
    hiding = Hiding(input_grad_s=2e-3, weight_grad_s=3e-3)
    layout = Layout(tp=2, sequence_parallel=sequence_parallel)

    assert [item.hidden_s for item in exchanges(tiny_job(performance_flags=flags), layout, hiding)] == expected


def test_context_parallel_rings() -> None:
    """Keys and values of the whole sequence, once forward and twice backward a layer, half of the attention ahead."""
    (item,) = exchanges(tiny_job(), Layout(cp=2), Hiding(core_attention_s=1e-3))

    assert (item.kind, item.group, item.size_bytes) == ("all_gather", "cp", 2 * 8192)
    assert (item.forward, item.backward, item.hidden_s) == ((4.0,), (8.0,), 5e-4)


def test_grouped_queries_send_fewer_keys() -> None:
    """One group of four heads: a quarter of the bytes."""
    job = tiny_job(model=tiny_model(num_query_groups=1))

    assert rows(job, Layout(cp=2))[0][2] == 2 * 8192 / 4


def test_all_to_all_dispatcher() -> None:
    """Two copies of each token there and back in each pass, of two expert layers."""
    job = moe_job(performance_flags=("--moe-token-dispatcher-type alltoall",))

    assert rows(job, Layout(dp=2, ep=2)) == [("all_to_all", "ep", 2 * 8192, (4.0,), (4.0,))]


@pytest.mark.parametrize(
    ("flag", "wide", "narrow"),
    [
        ("--moe-dispatch-fwd-dtype mxfp8", ((2.0,), (6.0,)), ((2.0,), (2.0,))),
        ("--moe-combine-bwd-dtype mxfp8", ((4.0,), (6.0,)), ((0.0,), (2.0,))),
    ],
)
def test_tokens_in_mxfp8_are_half_as_large(flag: str, wide: object, narrow: object) -> None:
    """Full recompute dispatches again; a token has 33 bytes for 32 elements instead of 64."""
    again = Recompute(granularity="full", method="uniform", num_layers=1)
    flags = ("--moe-token-dispatcher-type flex", "--moe-flex-dispatcher-backend ncclep", flag)
    job = changed_job(moe_job(), performance_flags=flags, megatron_version="0.20.0")
    plain, small = rows(job, Layout(dp=2, ep=2, recompute=again))

    assert (plain[3:], small[3:]) == (wide, narrow)
    assert small[2] == plain[2] * 33 / 64


@pytest.mark.parametrize(
    ("domain", "copies"),
    [(4, 4 * (1 - 0.75**2) / IN_DOMAIN_SHARE), (2, 2 * (1 - 0.5**2)), (1, 4 * (1 - 0.75**2))],
    ids=["one domain", "two domains", "no fast links"],
)
def test_flex_sends_one_copy_to_a_rank_or_domain(domain: int, copies: float) -> None:
    """A token with two experts goes to 1.75 of four ranks in the mean, and to 1.5 of two domains."""
    job = moe_job(performance_flags=("--moe-token-dispatcher-type flex",))
    (item,) = exchanges(job, Layout(dp=4, ep=4), Hiding(), domain)

    assert item.size_bytes == pytest.approx(8192 * copies)


def test_overlapped_experts_pass_behind_another_micro_batch() -> None:
    """But for the part of the device that their kernels take from it."""
    flags = ("--moe-token-dispatcher-type alltoall", "--overlap-moe-expert-parallel-comm")
    shown, hidden = exchanges(moe_job(performance_flags=flags), Layout(dp=2, ep=2), Hiding(other_layer_s=4e-3))

    assert (0.0, 4e-3) == (shown.hidden_s, hidden.hidden_s)
    assert (OVERLAP_COSTS * 2 * 8192, 2 * 8192) == (shown.size_bytes, shown.size_bytes + hidden.size_bytes)


def test_userbuffers_hide_all_chunks_but_one() -> None:
    """Only the layers' gathers and scatters of the forward are hidden; embedding's and head's are not."""
    layout = Layout(tp=2, pp=2, sequence_parallel=True)
    job = tiny_job(performance_flags=("--tp-comm-overlap",))
    found = exchanges(job, layout, Hiding(forward_s=1e-3))

    def total(of: Callable[[Exchange], float], items: Sequence[Exchange]) -> dict[str, float]:
        return {kind: sum(of(item) for item in items if item.kind == kind) for kind in ("all_gather", "reduce_scatter")}

    def forward_bytes(item: Exchange) -> float:
        return item.size_bytes * sum(item.forward)

    plain = exchanges(tiny_job(), layout, Hiding())
    assert total(forward_bytes, plain) == total(forward_bytes, found)
    hidden = [item for item in found if item.hidden_s]
    assert {"all_gather": 4096 * 8, "reduce_scatter": 4096 * 8} == total(forward_bytes, hidden)


def test_expert_slices_gather_what_was_dispatched() -> None:
    """With etp 2: the dispatched tokens of both ranks, once each way."""
    job = moe_job(performance_flags=("--moe-token-dispatcher-type flex",))

    assert [row for row in rows(job, Layout(tp=2, sequence_parallel=True, etp=2)) if row[1] == "etp"] == [
        ("all_gather", "etp", 2 * 8192, (2.0,), (2.0,)),
        ("reduce_scatter", "etp", 2 * 8192, (2.0,), (2.0,)),
    ]


def test_all_gather_dispatcher() -> None:
    """Megatron's default: every token of the group, gathered and scattered once a pass."""
    assert rows(moe_job(), Layout(dp=4, ep=4)) == [
        ("all_gather", "ep_etp", 4 * 8192, (2.0,), (2.0,)),
        ("reduce_scatter", "ep_etp", 4 * 8192, (2.0,), (2.0,)),
    ]


@pytest.mark.parametrize(("shared", "expected"), [(0, 7.0), (32, 9.0)])
def test_expert_layers_share_tensor_parallel_traffic_only_in_attention(shared: int, expected: float) -> None:
    """Four attentions, two dense MLPs, the embedding, and shared experts where there are any."""
    assert rows(moe_job(moe_shared_expert_intermediate_size=shared), Layout(tp=2, etp=1))[0][3] == (expected,)


def test_a_depth_of_prediction_exchanges_what_a_layer_and_both_ends_do() -> None:
    """On the last stage: two more for the layer, one for the lookup, one and three for the head."""
    expected = [
        ("all_reduce", "tp", 8192, (5.0, 7.0), (0.0, 0.0)),
        ("all_reduce", "tp", 8192, (0.0, 0.0), (4.0, 8.0)),
        ("all_reduce", "tp", 128, (0.0, 6.0), (0.0, 0.0)),
    ]

    assert expected == rows(tiny_job(model=tiny_model(mtp_num_layers=1)), Layout(tp=2, pp=2))


def test_a_depth_apart_from_the_head_leaves_its_head_there() -> None:
    """Three stages: the second has the depth's layer and lookup, the last both heads."""
    expected = [
        ("all_reduce", "tp", 8192, (5.0, 7.0, 0.0), (0.0, 0.0, 0.0)),
        ("all_reduce", "tp", 8192, (0.0, 0.0, 0.0), (4.0, 6.0, 2.0)),
        ("all_reduce", "tp", 128, (0.0, 0.0, 6.0), (0.0, 0.0, 0.0)),
    ]
    layout = Layout(tp=2, pp=3, layers_per_chunk=(2, 2, 0), chunks_after_mtp=1)

    assert expected == rows(tiny_job(model=tiny_model(mtp_num_layers=1)), layout)


def test_predicted_layers_with_experts_send_tokens_to_them() -> None:
    """A depth has experts as the last layer has: two all-to-alls more each way, four with uniform recompute."""
    flags = ("--moe-token-dispatcher-type alltoall",)
    job = moe_job(performance_flags=flags, mtp_num_layers=1)
    uniform = Recompute(granularity="full", method="uniform", num_layers=1)

    ((*_, forward, backward),) = rows(job, Layout(ep=2, dp=2, pp=2))
    ((*_, forward_of_all, again),) = rows(job, Layout(ep=2, dp=2, pp=2, recompute=uniform))

    assert ((2.0, 4.0), (2.0, 4.0)) == (forward, backward)
    assert ((2.0, 4.0), (4.0, 8.0)) == (forward_of_all, again)


def test_rings_carry_latent_attentions_own_keys_and_values() -> None:
    """Every head has its own: 4 heads with 24 channels of key and 12 of value, for 32 tokens in fp32."""
    latent = LatentAttention(q_lora_rank=48, kv_lora_rank=32, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=12)
    (item,) = exchanges(tiny_job(model=tiny_model(latent_attention=latent)), Layout(cp=2), Hiding())

    assert 4 * 4 * (24 + 12) * 32 == item.size_bytes


LAYER = 4.0 * 49_984
EMBEDDING = 4.0 * (16_384 + 2_048)
NORM = 4.0 * 128
SHARDED = Layout(dp=4, use_distributed_optimizer=True)
MEGATRON = "--use-megatron-fsdp"
NOTHING_S: dict[OfLayer, float] = {
    (name, kind): 0.0 for name in ("forward", "backward") for kind in ("layer", "moe_layer")
}
ShardRow = tuple[str, str, float, float, float, Behind | None]


def job(strategy: str, **model: object) -> Job:
    """A job under Megatron-FSDP."""
    flags = (MEGATRON, f"--data-parallel-sharding-strategy {strategy}")
    return tiny_job(model=tiny_model(**model), performance_flags=flags)


def shard_rows(found: tuple[Exchange, ...]) -> list[ShardRow]:
    """Kind, group, bytes, times in the forward and in the backward of the only stage, and what hides it."""
    return [(one.kind, one.group, one.size_bytes, one.forward[0], one.backward[0], one.behind) for one in found]


def test_everything_is_sharded() -> None:
    """Layers are gathered for both passes; nothing hides the first gather and the last reductions."""
    expected = [
        ("all_gather", "shard", LAYER, 1, 0, None),
        ("all_gather", "shard", LAYER, 3, 0, ("forward", "layer")),
        ("all_gather", "shard", LAYER, 0, 4, ("backward", "layer")),
        ("reduce_scatter", "shard", LAYER, 0, 1, None),
        ("reduce_scatter", "shard", LAYER, 0, 3, ("backward", "layer")),
        ("reduce_scatter", "shard", EMBEDDING, 0, 1, None),
        ("reduce_scatter", "shard", NORM, 0, 1, ("backward", "layer")),
    ]

    found = exchanges(
        job("optim_grads_params"),
        SHARDED,
        Hiding(layers_s=NOTHING_S | {("forward", "layer"): 1e-3, ("backward", "layer"): 3e-3}),
    )

    assert expected == shard_rows(found)
    assert [0.0, 1e-3, 1.5e-3, 0.0, 1.5e-3, 0.0, 3e-3] == [one.hidden_s for one in found]
    assert {"data_parallel"} == {one.part for one in found}


def test_once_a_step_only_the_ends_are_gathered() -> None:
    """Everything else is exchanged in the micro-batches."""
    traffic = step_traffic(job("optim_grads_params"), SHARDED)

    assert traffic.gradient_bytes == ((0, 0),)
    assert traffic.parameter_bytes == ((EMBEDDING + NORM, 0),)
    assert traffic.held_gradients == traffic.resident_parameters


def test_gradients_alone() -> None:
    """Reduced in every micro-batch; the weights are gathered once a step."""
    found = exchanges(job("optim_grads"), SHARDED, Hiding(layers_s=NOTHING_S))
    traffic = step_traffic(job("optim_grads"), SHARDED)

    assert {"reduce_scatter"} == {one.kind for one in found}
    assert traffic.gradient_bytes == ((0, 0),)
    assert traffic.parameter_bytes == ((4 * LAYER + EMBEDDING + NORM, 0),)


@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_states_alone(strategy: str) -> None:
    """As without FSDP: gradients are reduced once a step, parameters gathered once."""
    assert exchanges(job(strategy), SHARDED, Hiding(layers_s=NOTHING_S)) == ()
    assert step_traffic(job(strategy), SHARDED).gradient_bytes == step_traffic(tiny_job(), SHARDED).gradient_bytes


def test_experts_share_the_pass_of_their_layer() -> None:
    """Dense weights go over all ranks, experts over two of them; both pass behind the same layer."""
    found = exchanges(
        job("optim_grads_params", num_experts=4, moe_layer_freq=(1,) * 4),
        Layout(dp=4, ep=2, use_distributed_optimizer=True),
        Hiding(layers_s=NOTHING_S | {("forward", "moe_layer"): 1e-3}),
    )
    ahead = [one for one in found if one.behind == ("forward", "moe_layer")]

    assert ["shard", "expert_shard"] == [one.group for one in ahead]
    assert 1e-3 == pytest.approx(sum(one.hidden_s for one in ahead))


def test_one_rank_exchanges_nothing() -> None:
    """There is nobody to gather from."""
    assert (
        exchanges(job("optim_grads_params"), Layout(use_distributed_optimizer=True), Hiding(layers_s=NOTHING_S)) == ()
    )


def test_copies_gather_for_themselves() -> None:
    """Two copies of shards over two ranks each: they exchange inside, and add up half of all gradients once a step."""
    this = job("optim_grads_params")
    two = changed_job(this, performance_flags=(*this.performance_flags, "--num-distributed-optimizer-instances 2"))
    gradients = 4 * LAYER + EMBEDDING + NORM

    assert shard_rows(exchanges(two, SHARDED, Hiding(layers_s=NOTHING_S))) == shard_rows(
        exchanges(this, SHARDED, Hiding(layers_s=NOTHING_S))
    )
    assert step_traffic(two, SHARDED).gradient_bytes == ((gradients / 2, 0),)


def test_as_many_copies_as_ranks_shard_nothing() -> None:
    """Each rank then has everything."""
    this = job("optim_grads_params")
    four = changed_job(this, performance_flags=(*this.performance_flags, "--num-distributed-optimizer-instances 4"))

    assert exchanges(four, SHARDED, Hiding(layers_s=NOTHING_S)) == ()


def test_hops_carry_one_activation() -> None:
    """s*b*h, over cp, and over tp only with sequence parallelism."""
    assert residual_bytes(tiny_job(), Layout(tp=2, pp=2)) == 8192
    assert residual_bytes(tiny_job(), Layout(tp=2, pp=2, sequence_parallel=True)) == 4096
    assert residual_bytes(tiny_job(), Layout(cp=2, pp=2)) == 4096


def test_gradients_and_parameters() -> None:
    """4 bytes of gradient for each parameter; parameters are gathered only by the distributed optimizer."""
    layout = Layout(pp=2, dp=2)
    counts = [part.dense for part in chunk_parameters(tiny_job(), layout)]
    plain = step_traffic(tiny_job(), layout)
    sharded = step_traffic(tiny_job(), Layout(pp=2, dp=2, use_distributed_optimizer=True))

    assert plain.gradient_bytes == tuple((4 * count, 0) for count in counts)
    assert plain.parameter_bytes == ((0, 0), (0, 0))
    assert sharded.parameter_bytes == tuple((4 * count, 0) for count in counts)


@pytest.mark.parametrize(("pp", "untied", "expected"), [(1, False, 0), (2, True, 0), (2, False, 256 * 64 * 4)])
def test_tied_embedding(pp: int, untied: bool, expected: int) -> None:
    """Two copies on two ranks have to agree."""
    job = tiny_job(model=tiny_model(untie_embeddings_and_output_weights=untied))

    assert step_traffic(job, Layout(pp=pp)).embedding_bytes == expected


def test_only_the_first_chunk_is_split_into_buckets() -> None:
    """Gradients are split only to overlap: 40M parameters in each part."""
    large = tiny_job(model=tiny_model(hidden_size=4096, ffn_hidden_size=16384, kv_channels=1024))
    overlapped = step_traffic(large, Layout(pp=2, overlap_grad_reduce=True)).num_buckets

    assert step_traffic(large, Layout(pp=2)).num_buckets == (1, 1)
    assert overlapped[0] == -(-chunk_parameters(large, Layout(pp=2))[0].dense // 40_000_000)
    assert overlapped[0] > 1
    assert overlapped[1] == 1


def test_gloo_sends_what_is_asked_for() -> None:
    """Without virtual stages, or without overlap; what NCCL does is not known, so its messages travel ahead."""
    apart = changed_job(tiny_job(2), performance_flags=("--no-overlap-p2p-communication",))

    assert Waits.of(tiny_job(2), 1, "cpu").meets_receivers
    assert not Waits.of(tiny_job(2), 2, "cpu").meets_receivers
    assert Waits.of(apart, 2, "cpu").meets_receivers
    assert not Waits.of(tiny_job(2), 1, "cuda").meets_receivers


def test_warm_up_and_cool_down_wait_for_their_messages_unless_the_user_asks_early() -> None:
    """With virtual stages over gloo; without any overlap all messages meet their receivers anyway."""
    early = tiny_job(2, performance_flags=("--overlap-p2p-communication-warmup-flush",))
    apart = tiny_job(2, performance_flags=("--no-overlap-p2p-communication",))

    assert Waits.of(tiny_job(2), 2, "cpu").blocks_at_ends
    assert not Waits.of(tiny_job(2), 1, "cpu").blocks_at_ends
    assert not Waits.of(tiny_job(2), 2, "cuda").blocks_at_ends
    assert not Waits.of(early, 2, "cpu").blocks_at_ends
    assert not Waits.of(apart, 2, "cpu").blocks_at_ends


def test_prediction_copies_the_embedding_of_an_untied_head_too() -> None:
    """The embedding's gradient is summed over both ends of a pipeline; a single stage has one copy."""
    untied = {"untie_embeddings_and_output_weights": True}
    found = [
        step_traffic(tiny_job(model=tiny_model(mtp_num_layers=depths, **untied)), Layout(pp=pp)).embedding_bytes
        for depths, pp in ((0, 2), (1, 2), (1, 1))
    ]

    assert [0, 4 * 64 * 256, 0] == found


def test_buffers_of_dense_and_expert_parameters_have_buckets_of_their_own() -> None:
    """With 8 replicas a bucket has 40 M parameters: 41 M and 10 M are 2 + 1 buckets, and with 64 replicas 1 + 1."""
    assert 3 == num_buckets(41_000_000, 10_000_000, 8)
    assert 2 == num_buckets(41_000_000, 10_000_000, 64)
    assert [2, 3] == num_buckets(np.array([41_000_000] * 2), np.array([0, 10_000_000]), 8).tolist()
