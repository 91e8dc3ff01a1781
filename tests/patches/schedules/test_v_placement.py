"""A folded pipeline has its head on the first rank, and its results travel to the last rank."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_rules.pickled_tensors import on_gpu
from patches.checkout import megatron_lm

from pipette_launch.cost.pipeline.zero_bubble import named_schedule
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


class Mail:
    """Stands for torch.distributed in one process that plays the four ranks of a pipeline one after another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kept: list[tuple[int, list[Any]]] = []
        """Target and objects of messages that wait for their receiver."""
        self.pipeline = SimpleNamespace(size=lambda: 4)
        monkeypatch.setattr(dist, "get_process_group_ranks", lambda _group: [10, 11, 12, 13])
        monkeypatch.setattr(dist, "send_object_list", lambda objects, dst, _group: self.kept.append((dst, objects)))
        monkeypatch.setattr(dist, "recv_object_list", self.receive)

    def receive(self, objects: list[Any], _source: int, _group: Any) -> None:
        """Take the oldest message."""
        _, objects[:] = self.kept.pop(0)

    def carried(self, rank: int, results: Any) -> Any:
        """Return what a rank gets, if the last stage is on rank 0."""
        self.pipeline.rank = lambda: rank
        return v_placement.carry(results, self.pipeline, 0)


def test_only_the_last_rank_receives_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses in dicts, tuples of tensors and numbers arrive unchanged; ranks between take no part."""
    mail, results = Mail(monkeypatch), [{"lm loss": torch.ones(2)}, (torch.zeros(3, dtype=torch.int32), 5, None)]

    assert mail.carried(0, results) is None
    assert [13] == [target for target, _ in mail.kept]
    assert (None, None) == (mail.carried(1, []), mail.carried(2, []))
    arrived = mail.carried(3, [])

    assert repr(results) == repr(arrived)
    assert [] == mail.kept


def test_results_lie_on_the_receivers_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of the sender's GPU goes with the tensors, and is not used."""
    mail = Mail(monkeypatch)
    with on_gpu(0) as restored:
        mail.carried(0, [{"lm loss": torch.ones(2)}])
    with on_gpu(3) as restored:
        mail.carried(3, [])

    assert [3] == restored


@pytest.mark.parametrize("name", ["v-half", "zb-1p"])
def test_the_way_of_results_is_opened_before_the_first_step(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A folded pipeline of four has it from rank 0 to rank 3, which exchange nothing else."""
    opened: list[set[tuple[int, int]]] = []
    known = named_schedule(name, pp=4, num_microbatches=4)
    monkeypatch.setattr(patch, "_document", lambda _path: (None, known))
    monkeypatch.setattr(patch.executor, "open_ways", lambda _group, ways: opened.append(ways))
    patch._open_ways.__wrapped__("path", None)

    neighbours = {way for rank in range(3) for way in ((rank, rank + 1), (rank + 1, rank))}
    assert [neighbours | ({(0, 3)} if name == "v-half" else set())] == opened
