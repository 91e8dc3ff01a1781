"""Do something to a module as soon as it is imported, or at once if it already is."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Action = Callable[[ModuleType], None]


class _LoadThenAct(Loader):
    """A module's own loader, followed by the actions that wait for the module."""

    def __init__(self, loader: Loader, finish: Action) -> None:
        self._loader = loader
        self._finish = finish

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Let the module's own loader make it."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, give it its own loader back, then act."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._finish(module)

    def __getattr__(self, name: str) -> Any:
        """Answer whatever else a loader is asked (source, resources) as the module's own would."""
        return getattr(self._loader, name)


class _Waiting(MetaPathFinder):
    """The actions that wait for modules which nobody has imported yet."""

    def __init__(self) -> None:
        self.actions: dict[str, list[Action]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find an awaited module as every other finder would, and add its actions to its loader."""
        if fullname not in self.actions:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _LoadThenAct(spec.loader, self._act)
                return spec
        return None

    def _act(self, module: ModuleType) -> None:
        for action in self.actions.pop(module.__name__, []):
            action(module)


_waiting = _Waiting()


def when_imported(module: str, action: Action) -> None:
    """Call `action` with the module: now if it is loaded, else right after it was executed."""
    loaded = sys.modules.get(module)
    if loaded is not None:
        action(loaded)
        return
    if _waiting not in sys.meta_path:
        sys.meta_path.insert(0, _waiting)
    _waiting.actions.setdefault(module, []).append(action)


def forget(module: str, action: Action) -> None:
    """Drop an action whose module was not imported yet."""
    actions = _waiting.actions.get(module, [])
    if action in actions:
        actions.remove(action)
    if not actions:
        _waiting.actions.pop(module, None)
    if not _waiting.actions and _waiting in sys.meta_path:
        sys.meta_path.remove(_waiting)
