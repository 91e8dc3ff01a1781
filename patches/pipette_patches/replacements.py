"""Replace named attributes of modules, at once or as soon as those are imported, and put the originals back."""

import ast
import importlib.metadata
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from packaging.specifiers import SpecifierSet

from pipette_launch.errors import PipetteError


class PatchError(PipetteError):
    """A patch is unknown, or does not fit the megatron-core that this process would import."""


Action = Callable[[ModuleType], None]
_INHERITED = object()


class _Waiting(MetaPathFinder):
    """The actions that wait for modules which nobody has imported yet."""

    def __init__(self) -> None:
        self.actions: dict[str, list[Action]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find an awaited module as every other finder would, and let its loader act after it has run the module."""
        if fullname not in self.actions:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                self._act_after(spec.loader)
                return spec
        return None

    def _act_after(self, loader: Loader) -> None:
        run = loader.exec_module

        def run_and_act(module: ModuleType) -> None:
            # From here on the loader is its own again.
            vars(loader).pop("exec_module", None)
            run(module)
            for action in self.actions.pop(module.__name__, []):
                action(module)

        vars(loader)["exec_module"] = run_and_act


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Replacement:
    """One attribute: its module, its path, and how its successor is made from it."""

    module: str
    path: str
    """Dotted below the module: `Tensor.cuda`."""
    make: Callable[[Any], Any]
    """From the original to its successor; the successor calls the original whenever it has nothing to add."""
    versions: str = ""
    """The megatron-core versions that have the attribute; all supported ones if empty."""

    may_be_absent: bool = False
    """Put the successor there even if there is nothing to succeed; `make` is then given None."""

    def fits(self, version: str) -> bool:
        """Tell whether this megatron-core has the attribute."""
        return SpecifierSet(self.versions).contains(version, prereleases=True)


def in_module(module: str, makers: Mapping[str, Callable[[Any], Any]]) -> tuple[Replacement, ...]:
    """One replacement for each path below a module."""
    return tuple(Replacement(module=module, path=path, make=make) for path, make in makers.items())


def owner_of(module: ModuleType, path: str, *, may_be_absent: bool = False) -> tuple[Any, str]:
    """Find the object whose attribute the last name of a dotted path is, and that name."""
    owner: Any = module
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    if not may_be_absent and not hasattr(owner, name):
        raise PatchError(
            f"{module.__name__}.{path} does not exist; this patch does not know this version of {module.__name__}"
        )
    return owner, name


def instead(successor: Any) -> Callable[[object], Any]:
    """Make a successor of an object that is there already."""
    return lambda _original: successor


def answer(value: Any) -> Callable[[object], Callable[..., Any]]:
    """Make a successor of a function that always returns a value."""
    return lambda _original: lambda *_args, **_kwargs: value


def nothing(_original: object) -> Callable[..., None]:
    """Make a function that does nothing."""
    return lambda *_args, **_kwargs: None


class Replacements:
    """A set of replacements that is in force as a whole or not at all."""

    def __init__(self, replacements: Sequence[Replacement]) -> None:
        self._actions = [(replacement.module, partial(self._put, replacement)) for replacement in replacements]
        self._replaced: list[tuple[Any, str, Any]] = []
        self._original_of: dict[int, tuple[Any, Any]] = {}

    def apply(self) -> None:
        """Replace what is imported now, and the rest as soon as it is."""
        try:
            for module, put in self._actions:
                when_imported(module, put)
        except BaseException:
            self.revert()
            raise

    def revert(self) -> None:
        """Put every original object back, in the reverse order; modules imported later stay as they are."""
        for module, put in self._actions:
            forget(module, put)
        while self._replaced:
            owner, name, original = self._replaced.pop()
            if original is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._original_of.clear()

    def __enter__(self) -> None:
        self.apply()

    def __exit__(self, *_error: object) -> None:
        self.revert()

    def _put(self, replacement: Replacement, module: ModuleType) -> None:
        owner, name = owner_of(module, replacement.path, may_be_absent=replacement.may_be_absent)
        raw = vars(owner).get(name, _INHERITED)
        # `from a import f` may have copied our successor of `a.f`: start from what it succeeded.
        _, raw = self._original_of.get(id(raw), (None, raw))
        original = getattr(owner, name, None) if raw is _INHERITED else raw
        if isinstance(original, (staticmethod, classmethod)):
            # What it gives when it is read: the function of a static method, the bound class method.
            original = original.__get__(None, owner)
        successor = replacement.make(original)
        self._replaced.append((owner, name, raw))
        self._original_of[id(successor)] = (successor, raw)
        setattr(owner, name, successor)


def megatron_core_version() -> str:
    """The version that `import megatron.core` gives or would give here, found without importing it."""
    loaded = sys.modules.get("megatron.core")
    if loaded is not None and hasattr(loaded, "__version__"):
        return str(loaded.__version__)
    # A checkout beside the script comes before the installed package, so the path decides, not the metadata.
    for folder in sys.path:
        file = Path(folder or ".") / "megatron" / "core" / "package_info.py"
        if file.is_file():
            return _version_in(file)
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        raise PatchError(
            "megatron-core is neither installed nor beside the script; install it (pip install megatron-core)"
        ) from None


def _version_in(file: Path) -> str:
    """Read MAJOR, MINOR, PATCH and PRE_RELEASE of Megatron's package_info.py."""
    values: dict[str, object] = {}
    for node in ast.parse(file.read_text()).body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        ):
            values[node.targets[0].id] = node.value.value
    if not {"MAJOR", "MINOR", "PATCH"} <= values.keys():
        raise PatchError(f"{file} names no MAJOR, MINOR and PATCH; is this megatron-core?")
    return f"{values['MAJOR']}.{values['MINOR']}.{values['PATCH']}{values.get('PRE_RELEASE', '')}"
