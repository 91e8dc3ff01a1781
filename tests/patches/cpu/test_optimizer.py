"""The patch corrects how Megatron saves and loads torch's Adam."""

from types import SimpleNamespace
from typing import Any

import torch

from pipette_patches.cpu_backend import _keeping_steps, _with_first_state, _with_own_steps


def distributed_optimizer() -> Any:
    """Stand for Megatron's distributed optimizer: a torch Adam over two shards, and where each shard is."""
    shards = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]
    adam = torch.optim.AdamW(shards, lr=0.1)
    return SimpleNamespace(optimizer=adam, model_param_group_index_map={"a": (0, 0), "b": (0, 1)}, shards=shards)


def test_the_state_is_there_before_the_first_step() -> None:
    """Megatron, which counts the steps in Adam's state, finds one count: zero; a second look changes nothing."""
    optimizer = distributed_optimizer()
    state_dict = _with_first_state(lambda this: this.optimizer.state_dict())
    first = state_dict(optimizer)
    second = state_dict(optimizer)

    assert {state["step"].item() for state in first["state"].values()} == {0.0}
    assert [state["exp_avg"].shape for state in first["state"].values()] == [(2,), (3,)]
    assert second["state"][0]["exp_avg"] is first["state"][0]["exp_avg"]


def test_the_given_state_trains_as_torchs_own() -> None:
    """Zero moments and zero steps are what torch would have made in the first step."""
    prepared, plain = distributed_optimizer(), distributed_optimizer()
    _with_first_state(lambda this: this.optimizer.state_dict())(prepared)
    for optimizer in (prepared, plain):
        for shard in optimizer.shards:
            shard.grad = torch.full_like(shard, 0.5)
        optimizer.optimizer.step()

    assert prepared.shards[0].tolist() == plain.shards[0].tolist()


def test_every_parameter_counts_its_own_steps_after_a_load() -> None:
    """One shared counter would be advanced once for each parameter."""
    optimizer = distributed_optimizer()

    def load(this: Any, step: float) -> None:
        shared = torch.tensor(step)
        for shard in this.shards:
            this.optimizer.state[shard] = {
                "step": shared,
                "exp_avg": torch.zeros_like(shard),
                "exp_avg_sq": torch.zeros_like(shard),
            }
            shard.grad = torch.ones_like(shard)

    _with_own_steps(load)(optimizer, 3.0)
    optimizer.optimizer.step()

    assert [4.0, 4.0] == [optimizer.optimizer.state[shard]["step"].item() for shard in optimizer.shards]


def test_a_shards_state_does_not_turn_the_steps_back() -> None:
    """The step counter of the parameter groups stays, if the shard's state has no counter or an old one."""
    optimizer = distributed_optimizer()
    for shard in optimizer.shards:
        optimizer.optimizer.state[shard] = {"step": torch.tensor(3.0), "exp_avg": torch.zeros_like(shard)}

    def copy_all(this: Any, model_param: str, tensors: dict[str, Any]) -> None:
        group, order = this.model_param_group_index_map[model_param]
        state = this.optimizer.state[this.optimizer.param_groups[group]["params"][order]]
        for name, tensor in state.items():
            tensor.copy_(tensors[name])

    set_states = _keeping_steps(copy_all)
    set_states(optimizer, "a", {"exp_avg": torch.full((2,), 7.0)})
    set_states(optimizer, "b", {"exp_avg": torch.full((3,), 8.0), "step": torch.tensor(0.0)})
    states = [optimizer.optimizer.state[shard] for shard in optimizer.shards]

    assert [3.0, 3.0] == [state["step"].item() for state in states]
    assert [7.0, 8.0] == [state["exp_avg"][0].item() for state in states]
