"""Results of a step travel from the rank of the last stage to the last rank without a pickled tensor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_rules.pickled_tensors import on_gpu
from gpu_rules.single_messages import Mail
from hypothesis import given
from hypothesis import strategies as st

from pipette_launch.cost.pipeline.extra import named_schedule
from pipette_patches.schedules import patch, v_placement

CPU = torch.device("cpu")
TYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.bool, torch.complex128)
tensors = st.builds(
    lambda shape, dtype, seed: torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).to(dtype),
    st.sampled_from([(), (0,), (1,), (2,), (3, 5)]),
    st.sampled_from(TYPES),
    st.integers(0, 9),
)
leaves = tensors | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3) | st.none() | st.booleans()
stores = st.lists(
    st.recursive(
        leaves,
        lambda inner: (
            st.dictionaries(st.text(max_size=3), inner, max_size=3)
            | st.lists(inner, max_size=3)
            | st.tuples(inner, inner)
        ),
        max_leaves=8,
    ),
    max_size=4,
)


def same(one: Any, other: Any) -> bool:
    """Return whether two results have the same types and values, down to the last bit of their tensors."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(each, other[key]) for key, each in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@given(stores)
def test_results_of_any_kind_arrive_unchanged(store: list[Any]) -> None:
    """Losses in dicts, tuples of tensors, Python's numbers, other data, nothing at all."""
    assert same(store, v_placement.unpack(*v_placement.pack(store, CPU)))


def test_tensors_lie_on_the_receivers_device() -> None:
    """They are views of the bytes that were received there, and no storage is in the pickle."""
    store = [{"lm loss": torch.ones(2)}, (torch.zeros(3), 1)]
    with on_gpu(3) as restored:
        content, num_pickled = v_placement.pack(store, CPU)
        arrived = v_placement.unpack(content, num_pickled)

    assert [] == restored
    assert same(store, arrived)
    found = arrived[0]["lm loss"], arrived[1][0]
    assert all(each.untyped_storage().data_ptr() == content.untyped_storage().data_ptr() for each in found)


def test_the_source_does_not_wait_for_its_device() -> None:
    """Packing works on tensors without values: to read a value of a GPU is what waits for it."""
    store = [{"lm loss": torch.ones(2, device="meta")} for _ in range(3)]
    content, num_pickled = v_placement.pack(store, "meta")

    assert (3 * v_placement.ALIGNMENT + num_pickled, "meta") == (content.numel(), content.device.type)


def carried(mail: Mail, rank: int, store: Any) -> Any:
    """Return the results on one of four ranks."""
    mail.rank = rank
    return v_placement.carry(store, SimpleNamespace(rank=lambda: rank, size=lambda: 4), 0)


def test_only_the_last_rank_receives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two messages go to it; ranks between it and the source take no part."""
    mail, store = Mail(monkeypatch, size=4), [{"lm loss": torch.ones(2)}, 5]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: CPU)

    assert carried(mail, 0, store) is None
    assert [3, 3] == [target for target, _ in mail.kept]
    assert (None, None) == (carried(mail, 1, []), carried(mail, 2, []))
    assert same(store, carried(mail, 3, []))
    assert [] == mail.kept


@pytest.mark.parametrize(("name", "vpp"), [("1f1b-v", 2), ("zb-h1", 1)])
def test_the_way_of_results_is_opened_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch, name: str, vpp: int
) -> None:
    """A folded pipeline of four has it from rank 0 to rank 3, which exchange nothing else."""
    opened: list[set[tuple[int, int]]] = []
    known = named_schedule(name, pp=4, vpp=vpp, num_microbatches=4)
    monkeypatch.setattr(patch, "_document", lambda _path: None)
    monkeypatch.setattr(patch, "_schedule", lambda _document: known)
    monkeypatch.setattr(patch.executor, "open_ways", lambda _group, ways: opened.append(ways))
    patch._open_ways.__wrapped__("path", None)

    neighbours = {way for rank in range(3) for way in ((rank, rank + 1), (rank + 1, rank))}
    assert [neighbours | ({(0, 3)} if name == "1f1b-v" else set())] == opened
