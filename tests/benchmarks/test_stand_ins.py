"""Modules that only exist beside a GPU can be imported, and do nothing."""

from __future__ import annotations

import importlib
import sys

import pytest

from benchmarks.stand_ins import Record, StandIns


def test_decorators_and_classes_of_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decorator with or without options leaves a function as it is, and a class takes any values."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, StandIns({"missing"})])
    module = importlib.import_module("missing.language")

    assert [abs, abs] == [module.jit(abs), module.jit(number=1)(abs)]
    assert isinstance(module.Configuration(size=3), Record)
    assert (3, None) == (module.Configuration(size=3).size, module.Configuration().size)


def test_other_packages_stay_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-LM chooses other code without an optional package, so it must not find one."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, StandIns({"missing"})])

    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("absent")
