"""A folded pipeline has its head on the first rank, and its results travel to the last rank."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_rules.pickled_tensors import on_gpu
from gpu_rules.single_messages import Mail
from hypothesis import given
from hypothesis import strategies as st
from patches.checkout import megatron_lm

from pipette_launch.cost.pipeline.extra import named_schedule
from pipette_patches.replacements import Replacement, Replacements, megatron_core_version, owner_of
from pipette_patches.schedules import patch, v_placement
from pipette_patches.schedules.v_placement import REPLACEMENTS, _whole_batch

TRAINER = "megatron.training.training"
IN_CORE = [one for one in REPLACEMENTS if one.module.startswith("megatron.core")]
IN_TRAINING = [one for one in REPLACEMENTS if one not in IN_CORE]


def label(replacement: Replacement) -> str:
    """The attribute."""
    return f"{replacement.module}.{replacement.path}"


def group(rank: int) -> Any:
    """A pipeline of four ranks, seen by one of them."""
    return SimpleNamespace(rank=lambda: rank, size=lambda: 4)


def trainer() -> Any:
    """A trainer as Megatron-LM's of 0.19 and 0.20: it asks the same where it builds a model and where losses are."""
    module: Any = ModuleType(TRAINER)
    module.is_pp_last_stage = lambda group: group.rank() == group.size() - 1

    def get_model(group: Any) -> Any:
        return module.is_pp_last_stage(group)

    module.get_model = get_model
    return module


def test_a_trainer_builds_the_head_on_the_first_rank_and_reads_losses_on_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Training and evaluation ask outside of `get_model`, also after a model could not be built."""
    module = trainer()
    monkeypatch.setitem(sys.modules, TRAINER, module)
    with Replacements([one for one in REPLACEMENTS if one.module == TRAINER]):
        built = [module.get_model(group(rank)) for rank in range(4)]
        with pytest.raises(AttributeError):
            module.get_model(SimpleNamespace())
        read = [module.is_pp_last_stage(group(rank)) for rank in range(4)]

    assert [True, False, False, False] == built
    assert [False, False, False, True] == read


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_gets_labels_too(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """The argument is found in the functions of 0.16 to 0.20, by position or by name."""
    state = pytest.importorskip("megatron.core.parallel_state", reason="needs megatron-core")
    monkeypatch.setattr(state, "get_pipeline_model_parallel_rank", lambda: rank)

    def older(data_iterator: object, mtp_on_this_rank: bool = False) -> bool:
        return mtp_on_this_rank

    def newer(batch: object, seq_length: int, mtp_on_this_rank: bool, is_pipeline_first_stage: bool = False) -> bool:
        return mtp_on_this_rank

    assert [rank == 0] * 4 == [
        _whole_batch(older)(None),
        _whole_batch(older)(None, mtp_on_this_rank=False),
        _whole_batch(newer)(None, 8, False),
        _whole_batch(newer)({}, seq_length=8, mtp_on_this_rank=False, is_pipeline_first_stage=True),
    ]


@pytest.mark.filterwarnings("ignore::UserWarning:megatron.*")
@pytest.mark.parametrize("replacement", IN_CORE, ids=label)
def test_the_installed_megatron_core_has_what_is_replaced(replacement: Replacement) -> None:
    """The attribute exists where its module does."""
    if not replacement.fits(megatron_core_version()):
        pytest.skip(f"only in megatron-core {replacement.versions}")

    assert owner_of(importlib.import_module(replacement.module), replacement.path)


@pytest.mark.parametrize("replacement", IN_TRAINING, ids=label)
def test_a_checkout_of_megatron_lm_has_what_is_replaced(replacement: Replacement) -> None:
    """The trainer defines or imports the attribute."""
    root = megatron_lm(replacement)

    assert f" {replacement.path}" in root.joinpath(*replacement.module.split(".")).with_suffix(".py").read_text()


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
    monkeypatch.setattr(patch, "_document", lambda _path: (None, known))
    monkeypatch.setattr(patch.executor, "open_ways", lambda _group, ways: opened.append(ways))
    patch._open_ways.__wrapped__("path", None)

    neighbours = {way for rank in range(3) for way in ((rank, rank + 1), (rank + 1, rank))}
    assert [neighbours | ({(0, 3)} if name == "1f1b-v" else set())] == opened
