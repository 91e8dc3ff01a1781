"""Collectives and messages of CUDA tensors over gloo, each staged through the host: for ranks that share one GPU.

Where NCCL refuses that (see `ranks`), this takes its place. Its times say nothing; what is computed is the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from pipette_patches.replacements import Replacement, Replacements

if TYPE_CHECKING:
    import torch

NAME = "staged"
OPERATIONS = (
    "_allgather_base", "_reduce_scatter_base", "all_gather_single", "all_gather_single_coalesced", "all_to_all_single",
    "allgather", "allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced", "alltoall", "alltoall_base",
    "barrier", "broadcast", "gather", "recv", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "scatter", "send",
)  # fmt: skip
"""Of a process group, by the names that torch has for them up to 2.13; all take tensors, lists of them, and options."""


def stand_in_for(backend: str) -> None:
    """Take the place of a backend in this process, as soon as torch.distributed is imported."""
    replacements = [
        Replacement(module="torch.distributed", path=path, make=_maker(backend))
        for path in ("init_process_group", "new_group")
    ]
    Replacements(replacements).apply()


def _maker(backend: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Use our backend in place of the other, without its own options."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def ask(*args: Any, **kwargs: Any) -> Any:
            _register()
            if args and args[0] == backend:
                args = (NAME, *args[1:])
            if kwargs.get("backend") == backend:
                kwargs["backend"] = NAME
            for option in ("pg_options", "device_id"):
                kwargs.pop(option, None)
            return original(*args, **kwargs)

        return ask

    return make


def _register() -> None:
    """Make the backend known to torch, once."""
    import torch.distributed as dist

    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, devices=["cuda", "cpu"])


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    import torch
    import torch.distributed as dist
    from torch.utils import _pytree as pytree

    def on_host(value: Any) -> Any:
        # Always copy, because the sender may free or change the tensor before it was sent.
        return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value

    class Work(dist._Work):
        """An operation on copies, whose results go back to the device when it is waited for."""

        def __init__(self, inner: Any, given: list[torch.Tensor], copies: list[torch.Tensor]) -> None:
            super().__init__()
            self._inner, self._given, self._copies = inner, given, copies

        def wait(self, *timeout: Any) -> bool:
            done = bool(self._inner.wait(*timeout))
            with torch.no_grad():
                for tensor, copy in zip(self._given, self._copies, strict=True):
                    tensor.copy_(copy)
            self._given, self._copies = [], []
            return done

        def is_completed(self) -> bool:
            return bool(self._inner.is_completed())

    class Group(dist.ProcessGroup):
        """Gloo's group, on copies."""

        def __init__(self) -> None:
            super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stub knows one constructor of two
            backend = dist.ProcessGroupGloo(store, rank, size, timeout)
            self._gloo = dist.ProcessGroup(store, rank, size)
            self._gloo._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            self._gloo._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)

        def getBackendName(self) -> str:
            return NAME

        def run(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Work:
            copies, named = pytree.tree_map(on_host, args), pytree.tree_map(on_host, kwargs)
            inner = getattr(self._gloo, name)(*copies, **named)
            # Tensors that are sent come back unchanged, and may be freed by then.
            results = [] if name == "send" else _tensors(pytree, (args, kwargs))
            return Work(inner, results, _tensors(pytree, (copies, named)) if results else [])

    for name in set(OPERATIONS) & {*dir(dist.ProcessGroup)}:
        setattr(Group, name, lambda self, *args, _name=name, **kwargs: self.run(_name, args, kwargs))
    return Group()


def _tensors(pytree: Any, value: Any) -> list[Any]:
    import torch

    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
