"""Names of Transformer Engine for a process that imports code for it but runs none of its layers.

Transformer Engine needs a GPU. Each of its modules is empty here, and each name in a module is an empty class.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

PACKAGE = "transformer_engine"
VERSION = "2.8.0"


class _Named(type):
    """Type of the classes, which have every attribute that megatron-core looks up while it is imported."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (torch.nn.Module,), {})


class _Module(ModuleType):
    __version__ = VERSION

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Named(name, (torch.nn.Module,), {})
        setattr(self, name, made)
        return made


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if f"{name}.".startswith(f"{PACKAGE}.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module empty."""


def install() -> None:
    """Let this process import every name of Transformer Engine."""
    sys.meta_path.insert(0, _Finder())
