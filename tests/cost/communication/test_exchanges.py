"""Who sends how much how often, by hand: s 32, b 1, h 64 in fp32, so one activation is 8,192 bytes."""

from collections.abc import Callable, Sequence

import pytest
from facts_for_tests import tiny_job, tiny_model

from pipette_launch.cost.communication.exchanges import IN_DOMAIN_SHARE, OVERLAP_COSTS, Exchange, exchanges
from pipette_launch.cost.communication.hiding import Hiding
from pipette_launch.facts import Job, Layout, Recompute
from pipette_launch.facts.model import LatentAttention

FULL = Recompute(granularity="full", method="block", num_layers=1)
Row = tuple[str, str, float, tuple[float, ...], tuple[float, ...]]


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
        ("all_gather", "tp", 8192, (4.0, 5.0), (5.0, 4.0)),
        ("all_gather", "tp", 8192, (0.0, 0.0), (4.0, 5.0)),
        ("reduce_scatter", "tp", 8192, (5.0, 4.0), (0.0, 0.0)),
        ("reduce_scatter", "tp", 8192, (0.0, 0.0), (4.0, 5.0)),
        ("all_reduce", "tp", 128, (0.0, 3.0), (0.0, 0.0)),
    ]

    assert expected == rows(tiny_job(), layout)


@pytest.mark.parametrize(
    ("sequence_parallel", "flags", "expected"),
    [
        (True, (), [0.0, 2e-3, 0.0, 3e-3, 0.0]),
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
    ("domain", "copies"),
    [(4, 4 * (1 - 0.75**2) / IN_DOMAIN_SHARE), (2, 2 * (1 - 0.5**2)), (1, 4 * (1 - 0.75**2))],
    ids=["one domain", "two domains", "no fast links"],
)
def test_flex_sends_one_copy_to_a_rank_or_domain(domain: int, copies: float) -> None:
    """Of four ranks a token with two experts goes to 1.75 in the mean, of two domains to 1.5."""
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
    """Of the layers' gathers and scatters forward; those of embedding and head stay as they are."""
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
    """On the last stage: two more for the layer, one for the lookup, one and three for the head, and the projection."""
    expected = [
        ("all_gather", "tp", 8192, (0.0, 1.0), (0.0, 0.0)),
        ("all_reduce", "tp", 16384, (0.0, 0.0), (0.0, 1.0)),
        ("all_reduce", "tp", 8192, (5.0, 7.0), (0.0, 0.0)),
        ("all_reduce", "tp", 8192, (0.0, 0.0), (4.0, 8.0)),
        ("all_reduce", "tp", 128, (0.0, 6.0), (0.0, 0.0)),
    ]

    assert expected == rows(tiny_job(model=tiny_model(mtp_num_layers=1)), Layout(tp=2, pp=2))


def test_a_depth_apart_from_the_head_leaves_its_head_there() -> None:
    """Three stages: the second has the depth's layer, lookup and projection, the last both heads."""
    expected = [
        ("all_gather", "tp", 8192, (0.0, 1.0, 0.0), (0.0, 0.0, 0.0)),
        ("all_reduce", "tp", 16384, (0.0, 0.0, 0.0), (0.0, 1.0, 0.0)),
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
