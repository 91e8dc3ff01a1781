"""A folded pipeline has its head on the first rank, and trainers read losses on the last."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from patches.checkout import megatron_lm

from pipette_patches.replacements import Replacement, Replacements, megatron_core_version, owner_of
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
