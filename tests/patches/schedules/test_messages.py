"""Messages of a pipeline over NCCL: each way has a communicator, and none waits for another to be opened for ever."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipette_launch.facts.programs import Message
from pipette_patches.replacements import PatchError
from pipette_patches.schedules import executor


class FakeDistributed:
    """A stand-in for torch.distributed on one rank of a pipeline of `size` ranks; it keeps posted messages.

    Rule: an unbatched operation has the communicator of its process group and pair of ranks (getKeySendRecv in
    ProcessGroupNCCL.cpp, where the group is not bound to a device).
    """

    def __init__(self, rank: int, size: int, *, backend: str = "nccl", bound: bool = False) -> None:
        device = torch.device("cuda:0") if bound else None
        self.group = SimpleNamespace(WORLD=SimpleNamespace(name="world", bound_device_id=device))
        self.pipeline = SimpleNamespace(name="pipeline", bound_device_id=device)
        self.rank, self.size, self.backend = rank, size, backend
        self.posted: list[tuple[str, int, int]] = []
        """Process group, source and target."""

    def get_rank(self, _: Any) -> int:
        """Return the rank in the pipeline."""
        return self.rank

    def get_backend(self, _: Any) -> str:
        """Return the backend's name."""
        return self.backend

    def get_process_group_ranks(self, _: Any) -> list[int]:
        """Return RANKs of the pipeline, which are not its own ranks."""
        return [10 + 2 * rank for rank in range(self.size)]

    def isend(self, _: torch.Tensor, target: int, group: Any) -> Any:
        """Post a send."""
        return self._post(group, self.rank, (target - 10) // 2)

    def irecv(self, _: torch.Tensor, source: int, group: Any) -> Any:
        """Post a receive."""
        return self._post(group, (source - 10) // 2, self.rank)

    def _post(self, group: Any, source: int, target: int) -> Any:
        self.posted.append((group.name, source, target))
        return SimpleNamespace(wait=lambda: None, is_completed=lambda: True)


def opened(
    monkeypatch: pytest.MonkeyPatch, rank: int, size: int, ways: set[tuple[int, int]]
) -> list[tuple[str, int, int]]:
    """Return the messages that a rank posts to open its ways."""
    fake = FakeDistributed(rank, size)
    monkeypatch.setattr(executor, "dist", fake)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    executor.open_ways(fake.pipeline, ways)
    return fake.posted


def ring(size: int) -> set[tuple[int, int]]:
    """The ways of a pipeline with virtual stages."""
    return {way for rank in range(size) for way in ((rank, (rank + 1) % size), ((rank + 1) % size, rank))}


@pytest.mark.parametrize("size", range(2, 10))
def test_each_way_has_its_own_communicator_and_both_ends_know_which(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """One process group and one pair of ranks have one communicator with one stream."""
    posted = [opened(monkeypatch, rank, size, ring(size)) for rank in range(size)]

    group_of = {(source, target): group for ranks in posted for group, source, target in ranks}
    assert set(group_of) == ring(size)
    assert len({(group, *sorted(way)) for way, group in group_of.items()}) == len(ring(size))
    assert all(
        ranks.count((group, *way)) == (rank in way)
        for rank, ranks in enumerate(posted)
        for way, group in group_of.items()
    )


@pytest.mark.parametrize("size", [2, 3, 8, 9, 32])
def test_no_ranks_wait_in_a_circle_for_their_communicators(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """The host waits for the other rank each time; all are open after a few rounds, however long the pipeline."""
    left = [[way for _, *way in opened(monkeypatch, rank, size, ring(size))] for rank in range(size)]
    rounds = 0
    while any(left):
        met = [ways[0] for ways in left if ways and all(left[rank][:1] == ways[:1] for rank in ways[0])]
        assert met
        left = [ways[1:] if ways and ways[0] in met else ways for ways in left]
        rounds += 1

    assert rounds <= 8


@pytest.mark.parametrize(
    ("backend", "found"), [("nccl", True), ("cpu:gloo,cuda:nccl", True), ("gloo", False), ("ucc", False)]
)
def test_messages_over_nccl_run_in_streams(monkeypatch: pytest.MonkeyPatch, backend: str, found: bool) -> None:
    """Messages over gloo and UCC do not, and neither do those that the GPU check stages through gloo."""
    fake = FakeDistributed(0, 2, backend=backend)
    monkeypatch.setattr(executor, "dist", fake)

    assert executor.runs_in_streams(fake.pipeline) is found


def test_one_stream_for_all_messages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receive that is posted early would hold up all sends behind it."""
    fake = FakeDistributed(0, 2, bound=True)
    monkeypatch.setattr(executor, "dist", fake)

    with pytest.raises(PatchError, match="device_id"):
        executor.runs_in_streams(fake.pipeline)


def test_over_gloo_both_ways_lie_in_the_pipelines_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its messages do not wait for each other."""
    fake = FakeDistributed(1, 2, backend="gloo")
    monkeypatch.setattr(executor, "dist", fake)
    pending = executor.PendingMessages(fake.pipeline, lambda: torch.empty(1), in_streams=False)
    pending.give(Message(1, 0, True, 1, 0), torch.empty(1), then=lambda: None)
    pending.post(Message(1, 0, True, 1, 0))
    pending.post(Message(0, 1, False, 0, 0))

    assert fake.posted == [("pipeline", 1, 0), ("pipeline", 0, 1)]
