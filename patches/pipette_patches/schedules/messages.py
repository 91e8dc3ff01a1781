"""Sends and receives of one pipeline rank in a step: each is posted alone, and waited for before its tensor is used."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist

from pipette_launch.facts.schedule import Message
from pipette_patches.errors import PatchError


def runs_in_streams(group: Any) -> bool:
    """Return True if messages of a pipeline go over NCCL, each way in a stream; elsewhere they do not wait in streams.

    PyTorch opens a communicator with a stream for each pair of ranks that exchange unbatched messages, in each process
    group (ProcessGroupNCCL.cpp, pointToPoint). A group that was bound to a device at its start has one stream for all.

    Raises:
        PatchError: all messages would share a stream, in which a late one holds up the others.

    """
    if "nccl" not in dist.get_backend(group):
        return False
    if any(getattr(each, "bound_device_id", None) is not None for each in (group, dist.group.WORLD)):
        raise PatchError(
            "the script binds its process groups to devices (device_id of init_process_group), so all messages of a "
            "rank would wait for each other; remove device_id, or keep Megatron's own schedules"
        )
    return True


def open_ways(group: Any, ways: Collection[tuple[int, int]]) -> None:
    """Open the communicator of each way of a pipeline that begins or ends on this rank.

    The host waits for the other rank meanwhile. All ranks take their ways in the same order, so none wait in a circle;
    pairs of neighbours that begin with an even rank come first, all at the same time.
    """
    rank = dist.get_rank(group)
    messages = PendingMessages(group, lambda: torch.empty(1, device=torch.cuda.current_device()), in_streams=True)
    for way in sorted(ways, key=lambda way: (min(way) % 2, *sorted(way), way)):
        if rank in way:
            greeting = Message(*way, is_gradient=False, stage=0, microbatch=0)
            messages.give(greeting, torch.zeros(1, device=torch.cuda.current_device()), then=_nothing)
            messages.post(greeting)
            messages.wait(greeting)


class PendingMessages:
    """Posts messages with the other ranks of a pipeline, and keeps their tensors until they have arrived.

    Args:
        group: the ranks of the pipeline.
        empty: makes the tensor that a message is received into.
        in_streams: see `runs_in_streams`.

    """

    def __init__(self, group: Any, empty: Callable[[], torch.Tensor], *, in_streams: bool) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        self._peers = dist.get_process_group_ranks(group)
        self._empty = empty
        self._in_streams = in_streams
        self._outgoing: dict[Message, tuple[torch.Tensor, Callable[[], None]]] = {}
        self._under_way: dict[Message, tuple[Any, torch.Tensor, Callable[[], None]]] = {}

    def give(self, message: Message, tensor: torch.Tensor, *, then: Callable[[], None]) -> None:
        """Keep a tensor until its message is posted; `then` is called once it has been sent."""
        self._outgoing[message] = tensor, then

    def post(self, message: Message) -> None:
        """Hand a message to the network; nothing waits here."""
        # The two ways of a pair lie in two process groups, as in Megatron's own `_p2p_ops` with two ranks.
        goes_up = self._in_streams and message.source > message.target
        group = dist.group.WORLD if goes_up else self._group
        if message.source == self._rank:
            tensor, then = self._outgoing.pop(message)
            work = dist.isend(tensor, self._peers[message.target], group)
        else:
            tensor, then = self._empty(), _nothing
            work = dist.irecv(tensor, self._peers[message.source], group)
        self._under_way[message] = work, tensor, then

    def wait(self, message: Message) -> torch.Tensor:
        """Wait for a message to arrive or to have left; returns its tensor."""
        work, tensor, then = self._under_way.pop(message)
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
            if self._under_way[message][0].is_completed():
                self.wait(message)

    def finish(self) -> None:
        """Wait for all that is still under way."""
        for message in list(self._under_way):
            self.wait(message)


def _nothing() -> None:
    pass
