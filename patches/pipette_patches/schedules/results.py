"""Carries the results of a step from the rank of the last stage to the last rank, where Megatron reads them.

torch pickles a CUDA tensor with the number of its device and restores it there (torch/serialization.py,
`_deserialize`). Inside a host this is the sender's GPU. So tensors stay out of the pickle and travel as bytes to the
receiver's own GPU.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

ALIGNMENT = 16
"""Bytes. Every tensor begins at a multiple of it, because torch views bytes as wider elements only there."""

Place = tuple[int, int, torch.dtype, tuple[int, ...], bool]
"""First byte, byte after the last, type, shape, and whether the tensor belongs on the CPU."""


def carry(results: Any, group: Any, source: int) -> Any:
    """Move results from one pipeline rank to the last, which returns them; other ranks return None at once.

    Only the last rank waits for its device: it reads the number of bytes before it can receive them.

    Args:
        results: any objects that pickle accepts, with tensors at any depth; used on the source alone.
        group: the ranks of the pipeline.
        source: pipeline rank that has the results.

    """
    device = torch.cuda.current_device()
    peers, rank, last = dist.get_process_group_ranks(group), group.rank(), group.size() - 1

    def exchange(work: Callable[..., Any], tensor: torch.Tensor, peer: int) -> torch.Tensor:
        # Unbatched, as the first batch of a group over NCCL needs all its ranks (torch, `batch_isend_irecv`).
        work(tensor, peers[peer], group).wait()
        return tensor

    if rank == source:
        content, num_pickled = pack(results, device)
        sizes = content.numel().to_bytes(8, "little") + num_pickled.to_bytes(8, "little")
        exchange(dist.isend, _on(device, sizes), last)
        exchange(dist.isend, content, last)
    elif rank == last:
        sizes = exchange(dist.irecv, torch.empty(16, dtype=torch.uint8, device=device), source).cpu().numpy().tobytes()
        num_bytes, num_pickled = (int.from_bytes(each, "little") for each in (sizes[:8], sizes[8:]))
        content = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return unpack(exchange(dist.irecv, content, source), num_pickled)
    return None


def pack(results: Any, device: Any) -> tuple[torch.Tensor, int]:
    """Return results as bytes on a device, tensors first and their pickle last, and the length of the pickle."""
    pickled = io.BytesIO()
    packer = _Packer(pickled, device)
    packer.dump(results)
    return torch.cat([*packer.parts, _on(device, pickled.getvalue())]), pickled.tell()


def unpack(content: torch.Tensor, num_pickled: int) -> Any:
    """Return what `pack` was given; tensors are views of the content, and lie on its device if they did on a GPU."""
    num_tensors = content.numel() - num_pickled
    return _Unpacker(io.BytesIO(content[num_tensors:].cpu().numpy().tobytes()), content).load()


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, device: Any) -> None:
        super().__init__(file)
        self.parts: list[torch.Tensor] = []
        self._device = device
        self._num_bytes = 0
        self._padding = _on(device, bytes(ALIGNMENT))

    def persistent_id(self, obj: Any) -> Place | None:
        if not isinstance(obj, torch.Tensor):
            return None
        there = obj.detach().to(self._device, non_blocking=True).contiguous()
        first, end = self._num_bytes, self._num_bytes + there.nbytes
        self.parts += [there.reshape(-1).view(torch.uint8), self._padding[: -end % ALIGNMENT]]
        self._num_bytes = end + -end % ALIGNMENT
        return first, end, obj.dtype, tuple(obj.shape), obj.is_cpu


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, content: torch.Tensor) -> None:
        super().__init__(file)
        self._content = content

    def persistent_load(self, pid: Place) -> torch.Tensor:
        first, end, dtype, shape, is_on_cpu = pid
        tensor = self._content[first:end].view(dtype).view(shape)
        return tensor.cpu() if is_on_cpu else tensor


def _on(device: Any, content: bytes) -> torch.Tensor:
    """Copy bytes to a device without waiting for its queued work."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device, non_blocking=True)
