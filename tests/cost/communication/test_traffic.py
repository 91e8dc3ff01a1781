"""Who sends how much how often, by hand: s 32, b 1, h 64 in fp32, so one activation is 8,192 bytes."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from facts_for_tests import tiny_job, tiny_model

from pipette_launch.cost.communication.hiding import Hiding
from pipette_launch.cost.communication.traffic import (
    IN_DOMAIN_SHARE,
    OVERLAP_COSTS,
    Exchange,
    aligns_gathers,
    blocks_at_ends,
    exchanges,
    hop_bytes,
    meets_receivers,
    step_traffic,
)
from pipette_launch.cost.layers.parameters import chunk_parameters
from pipette_launch.facts import Job, Layout, Recompute

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


def test_hops_carry_one_activation() -> None:
    """s*b*h, over cp, and over tp only with sequence parallelism."""
    assert hop_bytes(tiny_job(), Layout(tp=2, pp=2)) == 8192
    assert hop_bytes(tiny_job(), Layout(tp=2, pp=2, sequence_parallel=True)) == 4096
    assert hop_bytes(tiny_job(), Layout(cp=2, pp=2)) == 4096


def test_gradients_and_parameters() -> None:
    """4 bytes of gradient for each parameter; parameters are gathered only by the distributed optimizer."""
    layout = Layout(pp=2, dp=2)
    counts = [part.dense for part in chunk_parameters(tiny_model(), layout)]
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
    """And only to overlap: 40M parameters each."""
    large = tiny_job(model=tiny_model(hidden_size=4096, ffn_hidden_size=16384, kv_channels=1024))
    overlapped = step_traffic(large, Layout(pp=2, overlap_grad_reduce=True)).num_buckets

    assert step_traffic(large, Layout(pp=2)).num_buckets == (1, 1)
    assert overlapped[0] == -(-chunk_parameters(large.model, Layout(pp=2))[0].dense // 40_000_000)
    assert overlapped[0] > 1
    assert overlapped[1] == 1


def test_gloo_sends_what_is_asked_for() -> None:
    """Without virtual stages, or without overlap; what NCCL does is not known, so its messages travel ahead."""
    chunks = Layout(pp=2, vpp=2)
    apart = replace(tiny_job(2), performance_flags=("--no-overlap-p2p-communication",))

    assert meets_receivers(tiny_job(2), Layout(pp=2), "cpu")
    assert not meets_receivers(tiny_job(2), chunks, "cpu")
    assert meets_receivers(apart, chunks, "cpu")
    assert not meets_receivers(tiny_job(2), Layout(pp=2), "cuda")


def test_warm_up_and_cool_down_wait_for_their_messages_unless_the_user_asks_early() -> None:
    """With virtual stages over gloo; without any overlap all messages meet their receivers anyway."""
    chunks = Layout(pp=2, vpp=2)
    early = tiny_job(2, performance_flags=("--overlap-p2p-communication-warmup-flush",))
    apart = tiny_job(2, performance_flags=("--no-overlap-p2p-communication",))

    assert blocks_at_ends(tiny_job(2), chunks, "cpu")
    assert not blocks_at_ends(tiny_job(2), Layout(pp=2), "cpu")
    assert not blocks_at_ends(tiny_job(2), chunks, "cuda")
    assert not blocks_at_ends(early, chunks, "cpu")
    assert not blocks_at_ends(apart, chunks, "cpu")


def test_gathers_are_aligned_with_virtual_stages_unless_the_user_says_no() -> None:
    """Megatron's default with them; without them it never aligns."""
    plain, other = tiny_job(), tiny_job(performance_flags=("--no-align-param-gather",))

    assert [True, False] == [aligns_gathers(plain, Layout(pp=2, vpp=vpp)) for vpp in (2, 1)]
    assert not aligns_gathers(other, Layout(pp=2, vpp=2))
