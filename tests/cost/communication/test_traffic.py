"""What is sent between stages and once a step, by hand: s 32, b 1, h 64 in fp32, so one activation is 8,192 bytes."""

from dataclasses import replace

import pytest
from facts_for_tests import tiny_job, tiny_model

from pipette_launch.cost.communication.traffic import (
    aligns_gathers,
    blocks_at_ends,
    hop_bytes,
    meets_receivers,
    step_traffic,
)
from pipette_launch.cost.layers.parameters import chunk_parameters
from pipette_launch.facts import Layout


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
    apart = replace(tiny_job(2), performance_flags=("--no-overlap-p2p-communication",))

    assert meets_receivers(tiny_job(2), 1, "cpu")
    assert not meets_receivers(tiny_job(2), 2, "cpu")
    assert meets_receivers(apart, 2, "cpu")
    assert not meets_receivers(tiny_job(2), 1, "cuda")


def test_warm_up_and_cool_down_wait_for_their_messages_unless_the_user_asks_early() -> None:
    """With virtual stages over gloo; without any overlap all messages meet their receivers anyway."""
    early = tiny_job(2, performance_flags=("--overlap-p2p-communication-warmup-flush",))
    apart = tiny_job(2, performance_flags=("--no-overlap-p2p-communication",))

    assert blocks_at_ends(tiny_job(2), 2, "cpu")
    assert not blocks_at_ends(tiny_job(2), 1, "cpu")
    assert not blocks_at_ends(tiny_job(2), 2, "cuda")
    assert not blocks_at_ends(early, 2, "cpu")
    assert not blocks_at_ends(apart, 2, "cpu")


def test_gathers_are_aligned_with_virtual_stages_unless_the_user_says_no() -> None:
    """Megatron's default with them; without them it never aligns."""
    plain, other = tiny_job(), tiny_job(performance_flags=("--no-align-param-gather",))

    assert [True, False] == [aligns_gathers(plain, vpp) for vpp in (2, 1)]
    assert not aligns_gathers(other, 2)


def test_prediction_copies_the_embedding_of_an_untied_head_too() -> None:
    """Its gradient is summed over both ends of a pipeline, as that of a tied head is; a single stage has one."""
    untied = {"untie_embeddings_and_output_weights": True}
    found = [
        step_traffic(tiny_job(model=tiny_model(mtp_num_layers=depths, **untied)), Layout(pp=pp)).embedding_bytes
        for depths, pp in ((0, 2), (1, 2), (1, 1))
    ]

    assert [0, 4 * 64 * 256, 0] == found
