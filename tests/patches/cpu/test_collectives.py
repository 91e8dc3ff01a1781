"""Collectives over gloo do what Megatron expects of NCCL's."""

import inspect

import pytest
import torch

from pipette_patches.cpu_backend import _alone, _one_by_one


def test_nobody_waits_for_a_collective_of_one() -> None:
    """A collective of one rank leaves its tensor unchanged and does not call the backend, except for a handle."""
    asked: list[tuple[object, bool]] = []

    def original(_tensor: object, _op: object = "sum", group: object = None, async_op: bool = False) -> str:
        asked.append((group, async_op))
        return "work"

    group = object()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.distributed, "get_world_size", lambda one: 1 if one is group else 2)
        all_reduce = _alone(original)
        values = torch.ones(2)

        assert all_reduce(values, group=group) is None
        assert "work" == all_reduce(values, group=group, async_op=True)
        assert "work" == all_reduce(values)

    assert [(group, True), (None, False)] == asked
    assert [1.0, 1.0] == values.tolist()


@pytest.mark.parametrize("name", ["all_reduce", "broadcast"])
def test_collectives_name_their_group_and_handle_as_expected(name: str) -> None:
    """The patch reads `group` and `async_op` by name, wherever they stand."""
    assert {"group", "async_op"} <= set(inspect.signature(getattr(torch.distributed, name)).parameters)


# Megatron's own name for a gather, which torch 2.13 calls old.
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_coalesced_gathers_that_nobody_waits_for_are_started_one_by_one() -> None:
    """Each has a handle of its own, and all bring their values; gloo is never given several at once."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        coalesce = _one_by_one(torch.distributed._coalescing_manager)
        shards, wholes = [torch.full((3,), float(k)) for k in range(4)], [torch.zeros(3) for _ in range(4)]
        with coalesce(async_ops=True) as manager:
            for shard, whole in zip(shards, wholes, strict=True):
                torch.distributed.all_gather_into_tensor(whole, shard, async_op=True)
        manager.wait()
        total = torch.ones(2)
        with coalesce(async_ops=True) as summing:
            torch.distributed.all_reduce(total, async_op=True)
        summing.wait()
    finally:
        torch.distributed.destroy_process_group()

    assert (4, 1) == (len(manager.works), len(summing.works))
    assert [shard.tolist() for shard in shards] == [whole.tolist() for whole in wholes]
    assert [1.0, 1.0] == total.tolist()
