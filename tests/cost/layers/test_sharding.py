"""What FSDP shards, and what stands whole beside the shards: layers of 49,984 parameters."""

from dataclasses import replace

import pytest
from facts_for_tests import tiny_job, tiny_model

from pipette_launch.cost.layers.optimizer import held_gradients, resident_parameters, weight_bytes
from pipette_launch.cost.layers.sharding import Whole, end_parameters, sharding_of, whole_beside_shards
from pipette_launch.facts import Job, Layout

LAYER = 49_984
EMBEDDING = 16_384 + 2_048
SHARDED = Layout(dp=4, use_distributed_optimizer=True)
MEGATRON = "--use-megatron-fsdp"
ALL = "--data-parallel-sharding-strategy optim_grads_params"


def job(*flags: str, **model: object) -> Job:
    """A GPT of four layers in fp32, or in what `model` says."""
    return tiny_job(model=tiny_model(**model), performance_flags=flags)


def test_without_fsdp_nothing_is_sharded() -> None:
    """The distributed optimizer is a matter of the layout."""
    assert sharding_of(job()) is None
    assert Whole() == whole_beside_shards(job(), SHARDED, 4)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("no_shard", (4096, 1000, 1000)),
        ("optim", (4096, 1000, 250)),
        ("optim_grads", (4096, 250, 250)),
        ("optim_grads_params", (1000, 250, 250)),
    ],
)
def test_strategies(strategy: str, expected: tuple[int, ...]) -> None:
    """Bytes of weights, gradients and stepped parameters of 1,000, over four ranks; what is whole is padded to 128."""
    this = job(MEGATRON, f"--data-parallel-sharding-strategy {strategy}")
    counts = (held_gradients(this, 1000, 0, SHARDED), resident_parameters(this, 1000, 0, SHARDED))

    assert expected == (int(weight_bytes(this, 1000, 0, 100, SHARDED)), *map(int, counts))


def test_experts_are_sharded_over_their_own_ranks() -> None:
    """With as many expert ranks as replicas there is nobody to share them with."""
    this = job(MEGATRON, ALL, num_experts=4, moe_layer_freq=(1,) * 4)

    assert int(held_gradients(this, 1000, 1000, Layout(dp=4, ep=4))) == 250 + 1000


def test_instances_shard_for_themselves() -> None:
    """Two of them over four ranks: halves, and quarters only of what `outer` shards across them."""
    two = "--num-distributed-optimizer-instances 2"
    outer = "--outer-dp-sharding-strategy optim"

    assert int(resident_parameters(job(MEGATRON, ALL, two), 1000, 0, SHARDED)) == 500
    assert int(resident_parameters(job(MEGATRON, ALL, two, outer), 1000, 0, SHARDED)) == 250
    assert int(held_gradients(job(MEGATRON, ALL, two, outer), 1000, 0, SHARDED)) == 500


def test_layers_in_eight_bits() -> None:
    """A byte of each parameter of a layer, two in MXFP8; embedding and head stay in 16 bits."""
    precise = {"params_dtype": "bf16", "transformer_impl": "transformer_engine"}
    flags = (MEGATRON, ALL, "--fp8-format hybrid", "--fp8-param-gather")

    assert int(weight_bytes(job(*flags, **precise), 900, 0, 100, SHARDED)) == 200 + 50
    assert int(weight_bytes(job(*flags, "--fp8-recipe mxfp8", **precise), 900, 0, 100, SHARDED)) == 400 + 50


def test_small_layers_are_gathered_all_at_once() -> None:
    """A thousand million parameters may wait, which is all: four layers, and the embedding, which is the head too."""
    whole = whole_beside_shards(job(MEGATRON, ALL), SHARDED, 4)

    assert end_parameters(tiny_model(), SHARDED) == (EMBEDDING, 128)
    assert whole == Whole(
        weights=4 * (4 * LAYER + EMBEDDING + 128),
        gradients=4 * (LAYER + EMBEDDING + 128),
        layer_gradients=4 * LAYER,
        layer_weights=4 * LAYER,
        waiting_at_end=3,
    )


def test_a_head_of_its_own_is_reduced_first() -> None:
    """The embedding's gradients come when the backward is over."""
    whole = whole_beside_shards(job(MEGATRON, ALL, untie_embeddings_and_output_weights=True), SHARDED, 4)

    assert whole.gradients == 4 * (LAYER + 16_384 + 128)


def test_a_small_unit_of_communication() -> None:
    """A layer is gathered ahead; with the layer at work one is being reduced, and one more may wait."""
    whole = whole_beside_shards(job(MEGATRON, ALL, f"--suggested-communication-unit-size {LAYER + 128}"), SHARDED, 4)

    assert whole.weights == 4 * (2 * LAYER + EMBEDDING + 128)
    assert (whole.waiting, whole.waiting_at_end) == (2, 0)


def test_two_buffers_stay() -> None:
    """Of weights and of gradients, and nothing waits."""
    whole = whole_beside_shards(job(MEGATRON, ALL, "--fsdp-double-buffer"), SHARDED, 4)

    assert whole.weights == whole.gradients == 4 * (2 * LAYER + EMBEDDING + 128)
    assert whole.waiting == whole.waiting_at_end == 0


def test_weights_that_are_not_sharded_are_not_gathered() -> None:
    """Their gradients still need whole buffers before they are reduced: one for all."""
    whole = whole_beside_shards(job(MEGATRON, "--data-parallel-sharding-strategy optim_grads"), SHARDED, 4)

    assert whole.weights == 0
    assert whole.gradients == 4 * (4 * LAYER + EMBEDDING + 128)
    assert whole.waiting == 0


def test_reductions_that_overlap_go_by_buckets() -> None:
    """Of forty million parameters; what is beyond the first of them waits."""
    long = job(MEGATRON, "--data-parallel-sharding-strategy optim_grads", num_layers=1000)
    overlapped = replace(long, own=replace(long.own, overlap_grad_reduce=True))
    whole = whole_beside_shards(overlapped, SHARDED, 4)

    assert whole.gradients == 4 * 40_000_000
    assert whole.waiting == (1000 * LAYER + EMBEDDING + 128 - 40_000_000) // LAYER


def test_torch_holds_two_units() -> None:
    """A layer beside another, or beside the head."""
    assert whole_beside_shards(job("--use-torch-fsdp2"), SHARDED, 4) == Whole(weights=8 * LAYER, gradients=8 * LAYER)
