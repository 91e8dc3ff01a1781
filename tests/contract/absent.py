"""Empty stand-ins for packages that Megatron-Bridge imports, but that need a GPU or decide no setting."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import torch

PACKAGES = ("comet_ml", "diffusers", "flashinfer", "megatron.energon", "mistral_common", "mlflow", "modelopt")
PACKAGES += ("nvidia_resiliency_ext", "open_clip", "qwen_vl_utils", "timm", "torch.utils.tensorboard", "wandb")
PACKAGES += ("webdataset",)


class _Module(torch.nn.Module):
    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


def _function(*args: Any, **_: Any) -> Any:
    is_decorator = len(args) == 1 and callable(args[0])
    return args[0] if is_decorator else lambda function=None, *_more, **_options: function


class _Absent(ModuleType):
    __version__ = "9.9.9"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (_Module,), {}) if name[:1].isupper() else _function
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, _path: Any, _target: Any = None) -> Any:
        is_absent = any(f"{fullname}.".startswith(f"{package}.") for package in PACKAGES)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if is_absent else None

    def create_module(self, spec: Any) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing."""


def install() -> None:
    """Let this process import the stand-ins."""
    sys.meta_path.insert(0, _Finder())
