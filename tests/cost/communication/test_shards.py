"""What FSDP exchanges in a micro-batch, by hand: four layers of 49,984 parameters in fp32."""

from dataclasses import replace

import pytest
from facts_for_tests import tiny_job, tiny_model

from pipette_launch.cost.communication.exchanges import Exchange, exchanges
from pipette_launch.cost.communication.hiding import Behind, Hiding, OfLayer
from pipette_launch.cost.communication.traffic import step_traffic
from pipette_launch.facts import Job, Layout

LAYER = 4.0 * 49_984
EMBEDDING = 4.0 * (16_384 + 2_048)
NORM = 4.0 * 128
SHARDED = Layout(dp=4, use_distributed_optimizer=True)
MEGATRON = "--use-megatron-fsdp"
NOTHING_S: dict[OfLayer, float] = {
    (name, kind): 0.0 for name in ("forward", "backward") for kind in ("layer", "moe_layer")
}
Row = tuple[str, str, float, float, float, Behind | None]


def job(strategy: str, **model: object) -> Job:
    """A job under Megatron-FSDP."""
    flags = (MEGATRON, f"--data-parallel-sharding-strategy {strategy}")
    return tiny_job(model=tiny_model(**model), performance_flags=flags)


def rows(found: tuple[Exchange, ...]) -> list[Row]:
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

    assert expected == rows(found)
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


def test_torch_gathers_the_ends_too() -> None:
    """Embedding and head are units of their own; without resharding nothing is gathered for the backward."""
    own_words = tiny_model(untie_embeddings_and_output_weights=True)
    flags = ("--use-torch-fsdp2", "--torch-fsdp2-no-reshard-after-forward")
    found = exchanges(tiny_job(model=own_words, performance_flags=flags[:1]), Layout(dp=4), Hiding(layers_s=NOTHING_S))
    kept = exchanges(tiny_job(model=own_words, performance_flags=flags), Layout(dp=4), Hiding(layers_s=NOTHING_S))

    assert sum(one.forward[0] for one in found if one.kind == "all_gather") == 4 + 2
    assert sum(one.backward[0] for one in found if one.kind == "all_gather") == 4 + 2
    assert sum(one.backward[0] for one in kept if one.kind == "all_gather") == 0


def test_copies_gather_for_themselves() -> None:
    """Two copies of shards over two ranks each: they exchange inside, and add up half of all gradients once a step."""
    this = job("optim_grads_params")
    two = replace(this, performance_flags=(*this.performance_flags, "--num-distributed-optimizer-instances 2"))
    gradients = 4 * LAYER + EMBEDDING + NORM

    assert rows(exchanges(two, SHARDED, Hiding(layers_s=NOTHING_S))) == rows(
        exchanges(this, SHARDED, Hiding(layers_s=NOTHING_S))
    )
    assert step_traffic(two, SHARDED).gradient_bytes == ((gradients / 2, 0),)


def test_as_many_copies_as_ranks_shard_nothing() -> None:
    """Each rank then has everything."""
    this = job("optim_grads_params")
    four = replace(this, performance_flags=(*this.performance_flags, "--num-distributed-optimizer-instances 4"))

    assert exchanges(four, SHARDED, Hiding(layers_s=NOTHING_S)) == ()
