"""Stand-ins for packages that a checkout imports but that are not installed, or whose work is not wanted."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
from collections.abc import Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any


class Record:
    """Values that code has set. A value that was never set is None."""

    def __init__(self, *_: Any, **values: Any) -> None:
        vars(self).update(values)

    def __call__(self, *args: Any, **_: Any) -> Any:
        """Return the first argument, as a decorator that changes nothing."""
        return next(iter(args), None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class _Names(type):
    """A class whose members are their own names, such as an enumeration that is indexed."""

    def __getitem__(cls, name: str) -> str:
        return name

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Record if name.startswith("from_") else _Name(name)


class _Name(str):
    """A function or value of a stand-in: a call returns a record, and a decorator changes nothing."""

    __slots__ = ()

    def __call__(self, *args: Any, **values: Any) -> Any:
        is_decorator = len(args) == 1 and callable(args[0]) and not isinstance(args[0], str)
        return args[0] if is_decorator and not values else Record(**values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name)


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins for all modules of some packages. Their classes are records, and functions return records.

    Modules whose names are in `real`, and modules inside them, come from the folder `source`. `classes` replaces
    classes of stand-ins by name.
    """

    def __init__(
        self,
        packages: Collection[str],
        *,
        source: Path | None = None,
        real: Collection[str] = (),
        classes: Mapping[str, type] | None = None,
    ) -> None:
        self._packages, self._source, self._real, self._classes = packages, source, real, classes or {}

    def find_spec(self, name: str, _path: Any, _target: Any = None) -> Any:
        """Find a real module or a stand-in. Return None for modules of other packages."""
        if name.partition(".")[0] not in self._packages:
            return None
        if self._source and any(f"{name}.".startswith(f"{real}.") for real in self._real):
            place = self._source.joinpath(*name.split("."))
            folder = [str(place)] if place.is_dir() else None
            file = place / "__init__.py" if folder else place.with_suffix(".py")
            return importlib.util.spec_from_file_location(name, file, submodule_search_locations=folder)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        """Make an empty stand-in, whose members are made on request."""
        return _StandIn(spec.name, self._classes)

    def exec_module(self, _module: ModuleType) -> None:
        """Run nothing."""


class _StandIn(ModuleType):
    __version__ = "0"

    def __init__(self, name: str, classes: Mapping[str, type]) -> None:
        super().__init__(name)
        self._classes = classes

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = self._classes.get(name) or (_Names(name, (Record,), {}) if name[:1].isupper() else _Name(name))
        setattr(self, name, made)
        return made
