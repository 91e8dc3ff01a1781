"""What one pipeline rank sends and receives in a step, posted in batches and waited for where it is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pipette_patches.schedules.lowering import Batch, Message


class PendingMessages:
    """Posts batches of messages with the other ranks of a pipeline, and keeps what is under way.

    Args:
        group: the ranks of the pipeline.
        empty: makes the tensor that a message is received into.

    """

    def __init__(self, group: Any, empty: Callable[[], torch.Tensor]) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        self._peers = dist.get_process_group_ranks(group)
        self._empty = empty
        self._outgoing: dict[Message, tuple[torch.Tensor, Callable[[], None]]] = {}
        self._under_way: dict[Message, tuple[Sequence[Any], torch.Tensor, Callable[[], None]]] = {}

    def give(self, message: Message, tensor: torch.Tensor, *, then: Callable[[], None]) -> None:
        """Keep a tensor until its batch is posted; `then` is called once it has been sent."""
        self._outgoing[message] = tensor, then

    def post(self, batch: Batch) -> None:
        """Hand a batch to the network; nothing waits here.

        NCCL pairs sends and receives by their order alone, so all of a batch go to it at once.
        """
        kept = [
            self._outgoing.pop(message) if message.source == self._rank else (self._empty(), _nothing)
            for message in batch
        ]
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(
                    dist.isend if message.source == self._rank else dist.irecv,
                    tensor,
                    self._peers[message.target if message.source == self._rank else message.source],
                    self._group,
                )
                for message, (tensor, _) in zip(batch, kept, strict=True)
            ]
        )
        # NCCL gives one work for the whole batch, gloo one for each message.
        for index, (message, (tensor, then)) in enumerate(zip(batch, kept, strict=True)):
            self._under_way[message] = works if len(works) == 1 else works[index : index + 1], tensor, then

    def wait(self, message: Message) -> torch.Tensor:
        """Wait for a message to arrive or to have left; returns its tensor."""
        works, tensor, then = self._under_way.pop(message)
        for work in works:
            work.wait()
        then()
        return tensor

    def wait_for_sent(self, message: Message) -> None:
        """Wait until a message has left, unless that was seen already."""
        if message in self._under_way:
            self.wait(message)

    def reap(self) -> None:
        """Let go of what has been sent by now."""
        for message in [one for one in self._under_way if one.source == self._rank]:
            if all(work.is_completed() for work in self._under_way[message][0]):
                self.wait(message)

    def finish(self) -> None:
        """Wait for all that is still under way."""
        for message in list(self._under_way):
            self.wait(message)


def _nothing() -> None:
    pass
