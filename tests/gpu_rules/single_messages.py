"""Messages of some ranks of a process group over NCCL, before any collective of all its ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist


class Mail:
    """Stands for torch.distributed in one process that plays the ranks of a group one after another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, size: int) -> None:
        self.rank = 0
        self.kept: list[tuple[int, torch.Tensor]] = []
        """Target and content of messages that wait for their receiver."""
        monkeypatch.setattr(dist, "get_process_group_ranks", lambda _group: list(range(size)))
        monkeypatch.setattr(dist, "P2POp", lambda *given: given)
        monkeypatch.setattr(dist, "batch_isend_irecv", self.batch)
        monkeypatch.setattr(dist, "isend", self.send)
        monkeypatch.setattr(dist, "irecv", self.receive)

    # torch/distributed/distributed_c10d.py, `batch_isend_irecv`: if it is the first call of a group over NCCL, all
    # ranks of the group must take part; else its behaviour is undefined.
    def batch(self, _operations: list[Any]) -> list[Any]:
        """Refuse: only some ranks call."""
        raise AssertionError("the first call of the group is not made by all its ranks")

    # torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, `pointToPoint`: unbatched operations have a communicator of the
    # two ranks. A send ends on its stream, and the host goes on at once.
    def send(self, tensor: torch.Tensor, target: int, _group: Any) -> Any:
        """Keep a message."""
        self.kept.append((target, tensor.clone()))
        return SimpleNamespace(wait=lambda: None)

    def receive(self, tensor: torch.Tensor, _source: int, _group: Any) -> Any:
        """Take the oldest message to this rank, which must be as long as the tensor."""
        place = next(index for index, (target, _) in enumerate(self.kept) if target == self.rank)
        _, content = self.kept.pop(place)
        assert content.shape == tensor.shape
        tensor.copy_(content)
        return SimpleNamespace(wait=lambda: None)
