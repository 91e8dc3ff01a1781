"""Devices of pickled CUDA tensors."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.serialization


@contextlib.contextmanager
def on_gpu(number: int) -> Iterator[list[int]]:
    """Let every storage of this process be on one GPU; yields the GPUs on which unpickling restored storages."""
    restored: list[int] = []

    # torch/serialization.py, `location_tag`: the pickle of a storage names its device, number included.
    def tag(_storage: Any) -> str:
        return f"cuda:{number}"

    # torch/serialization.py, `default_restore_location`: the storage goes to the named device, or to the current device
    # if no number is named. torch/storage.py, `__reduce__` and `_load_from_bytes`: pickles of tensors name a number.
    def restore(storage: Any, location: str) -> Any:
        if not location.startswith("cuda"):
            return None
        restored.append(int(location.removeprefix("cuda").removeprefix(":") or number))
        return storage

    torch.serialization.register_package(0, tag, restore)
    try:
        yield restored
    finally:
        torch.serialization._package_registry.remove((0, tag, restore))
