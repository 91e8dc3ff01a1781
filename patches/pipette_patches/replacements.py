"""Replace named attributes of modules, whether those are imported yet or not, and put the originals back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from packaging.specifiers import SpecifierSet

from pipette_patches.errors import PatchError
from pipette_patches.imports import forget, when_imported

_INHERITED = object()


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
        self._actions = [(replacement.module, self._putter(replacement)) for replacement in replacements]
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

    def _putter(self, replacement: Replacement) -> Callable[[ModuleType], None]:
        def put(module: ModuleType) -> None:
            owner, name = owner_of(module, replacement.path, may_be_absent=replacement.may_be_absent)
            raw = vars(owner).get(name, _INHERITED)
            # `from a import f` may have copied our successor of `a.f`: start from what it succeeded.
            _, raw = self._original_of.get(id(raw), (None, raw))
            successor = replacement.make(getattr(owner, name, None) if raw is _INHERITED else _bound(owner, raw))
            self._replaced.append((owner, name, raw))
            self._original_of[id(successor)] = (successor, raw)
            setattr(owner, name, successor)

        return put


def _bound(owner: Any, raw: Any) -> Any:
    """What an attribute of a class gives when it is read: the function of a static method, the bound class method."""
    return raw.__get__(None, owner) if isinstance(raw, (staticmethod, classmethod)) else raw
