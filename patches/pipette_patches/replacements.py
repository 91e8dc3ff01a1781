"""Replace attributes of modules, at once or right after the module is imported, and put the originals back."""

import functools
import importlib.metadata
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from packaging.specifiers import SpecifierSet

from pipette_launch.errors import PipetteError

Action = Callable[[ModuleType], None]
T = TypeVar("T")
_INHERITED = object()


class PatchError(PipetteError):
    """Error: a patch does not exist, or does not fit the megatron-core that this process would import."""


class _Waiting(MetaPathFinder):
    """An import hook that keeps actions for modules that are not imported yet."""

    def __init__(self) -> None:
        self.actions: dict[str, list[Action]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module with Python's other import hooks, and run the stored actions after the module's code."""
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
            # Remove this wrapper first, so that the module keeps an unchanged loader.
            vars(loader).pop("exec_module", None)
            run(module)
            for action in self.actions.pop(module.__name__, []):
                action(module)

        vars(loader)["exec_module"] = run_and_act


_waiting = _Waiting()


def when_imported(module: str, action: Action) -> None:
    """Call `action` with the module: now if the module is imported already, otherwise right after its import."""
    loaded = sys.modules.get(module)
    if loaded is not None:
        action(loaded)
        return
    if _waiting not in sys.meta_path:
        sys.meta_path.insert(0, _waiting)
    _waiting.actions.setdefault(module, []).append(action)


def forget(module: str, action: Action) -> None:
    """Cancel an action whose module has not been imported yet."""
    actions = _waiting.actions.get(module, [])
    if action in actions:
        actions.remove(action)
    if not actions:
        _waiting.actions.pop(module, None)
    if not _waiting.actions and _waiting in sys.meta_path:
        sys.meta_path.remove(_waiting)


@dataclass(frozen=True, kw_only=True, slots=True)
class Replacement:
    """One attribute of a module, and a function that makes the replacement of this attribute."""

    module: str
    path: str
    """Dotted name below the module, such as `Tensor.cuda`."""
    make: Callable[[Any], Any]
    """Function that receives the original object and returns the replacement, which may call the original."""
    versions: str = ""
    """megatron-core versions that have the attribute; empty means all supported versions."""
    may_be_absent: bool = False
    """True if the replacement may add an attribute that the module lacks. Then `make` receives None."""

    def fits(self, version: str) -> bool:
        """Return whether this megatron-core version has the attribute."""
        return SpecifierSet(self.versions).contains(version, prereleases=True)


def in_module(module: str, makers: Mapping[str, Callable[[Any], Any]], **options: Any) -> tuple[Replacement, ...]:
    """Return one replacement for each path below a module, all with the same further fields."""
    return tuple(Replacement(module=module, path=path, make=make, **options) for path, make in makers.items())


def owner_of(module: ModuleType, path: str, *, may_be_absent: bool = False) -> tuple[Any, str]:
    """Return the object that holds the attribute of a dotted path, and the attribute's name."""
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
    """Return a value for `Replacement.make` that ignores the original object and returns `successor`."""
    return lambda _original: successor


def answer(value: Any) -> Callable[[object], Callable[..., Any]]:
    """Return a value for `Replacement.make` that replaces a function by a function that always returns `value`."""
    # Make a new function for each original, because torch._dynamo refuses one function under two names.
    return lambda _original: lambda *_args, **_kwargs: value


nothing = answer(None)
"""Value for `Replacement.make` that replaces a function by a function that does nothing."""


def wrapping(successor: Callable[..., T]) -> Callable[[Callable[..., Any]], Callable[..., T]]:
    """Return a value for `Replacement.make`, from a function whose first argument is the original function."""
    return lambda original: functools.wraps(original)(lambda *args, **kwargs: successor(original, *args, **kwargs))


class Replacements:
    """A set of replacements that are applied and reverted together."""

    def __init__(self, replacements: Sequence[Replacement]) -> None:
        self._actions = [
            (replacement.module, functools.partial(self._put, replacement)) for replacement in replacements
        ]
        self._replaced: list[tuple[Any, str, Any]] = []
        self._original_of: dict[int, tuple[Any, Any]] = {}

    def apply(self) -> None:
        """Replace attributes of imported modules now, and of other modules when they are imported."""
        try:
            for module, put in self._actions:
                when_imported(module, put)
        except BaseException:
            self.revert()
            raise

    def revert(self) -> None:
        """Restore all original attributes in reverse order. Modules that are imported later keep their own."""
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
        # After `from a import f`, a module may hold the replacement of `a.f`. Start from the original of `a.f`.
        _, raw = self._original_of.get(id(raw), (None, raw))
        original = getattr(owner, name, None) if raw is _INHERITED else raw
        if isinstance(original, (staticmethod, classmethod)):
            # Give `make` a callable: the function of a static method, or the bound class method.
            original = original.__get__(None, owner)
        successor = replacement.make(original)
        self._replaced.append((owner, name, raw))
        self._original_of[id(successor)] = (successor, raw)
        setattr(owner, name, successor)


@dataclass(frozen=True, kw_only=True, slots=True)
class Patch:
    """A named change to megatron-core that consists of replacements."""

    name: str
    supports: SpecifierSet
    """Versions of megatron-core that the patch supports."""
    replacements: Callable[[], Sequence[Replacement]]
    """Makes the replacements for all supported versions when the patch is applied. May raise PatchError."""


def megatron_core_version() -> str:
    """Return the version of megatron-core that this process would import, without importing megatron-core."""
    loaded = sys.modules.get("megatron.core")
    if loaded is not None and hasattr(loaded, "__version__"):
        return str(loaded.__version__)
    # Python prefers a checkout beside the script to the installed package. So search sys.path before the metadata.
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
    values = dict(re.findall(r"""^([A-Z_]+) *= *['"]?(\w*)""", file.read_text(encoding="utf-8"), re.MULTILINE))
    if not {"MAJOR", "MINOR", "PATCH"} <= values.keys():
        raise PatchError(f"{file} does not define MAJOR, MINOR and PATCH; check that it belongs to megatron-core")
    return f"{values['MAJOR']}.{values['MINOR']}.{values['PATCH']}{values.get('PRE_RELEASE', '')}"
