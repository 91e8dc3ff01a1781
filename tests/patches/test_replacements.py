"""Actions on modules run at once or right after the import, and leave no trace on the module."""

import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType

import pytest

from pipette_patches import replacements
from pipette_patches.replacements import PatchError, Replacement, Replacements, forget, when_imported


@pytest.fixture
def absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name a module that is on the path and not imported, in an import system where nothing else waits."""
    # A patch that another test has left in force may still wait for modules of its own.
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if finder is not replacements._waiting])
    monkeypatch.setattr(replacements, "_waiting", replacements._Waiting())
    (tmp_path / "not_yet.py").write_text("value = 1\n\n\ndef f():\n    return 'original'\n")
    (tmp_path / "copies.py").write_text("from not_yet import f\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("not_yet", "copies"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "not_yet"


def test_a_later_import_acts_once_and_looks_untouched(absent: str) -> None:
    """The action runs after the module's own code; loader, spec and source are the module's own."""
    seen: list[int] = []
    when_imported(absent, lambda module: seen.append(module.value))
    assert seen == []
    module = importlib.import_module(absent)
    importlib.reload(module)

    assert seen == [1]
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert module.__spec__ is not None
    assert module.__spec__.loader is module.__loader__
    assert inspect.getsource(module).startswith("value = 1")


def test_a_loaded_module_is_acted_upon_at_once(absent: str) -> None:
    """An action for a module that is already imported runs at once."""
    module = importlib.import_module(absent)
    seen: list[ModuleType] = []
    when_imported(absent, seen.append)

    assert seen == [module]


def test_forgotten_actions_do_not_run_and_no_finder_stays(absent: str) -> None:
    """After the last action is forgotten the import system is as it was."""
    before = list(sys.meta_path)
    seen: list[ModuleType] = []
    when_imported(absent, seen.append)
    assert len(sys.meta_path) == len(before) + 1
    forget(absent, seen.append)
    importlib.import_module(absent)

    assert seen == []
    assert sys.meta_path == before


def replacement(module: str, path: str = "f") -> Replacement:
    """Put quotes around the result of a function."""
    return Replacement(module=module, path=path, make=lambda original: lambda: f"<{original()}>")


def test_a_copied_name_is_replaced_once_and_restored(absent: str) -> None:
    """`from a import f` copies the successor; replacing the copy wraps the original, and revert restores that."""
    both = Replacements([replacement(absent), replacement("copies")])
    both.apply()
    copies = importlib.import_module("copies")
    original = importlib.import_module(absent)

    assert (original.f(), copies.f()) == ("<original>", "<original>")
    both.revert()
    assert (original.f(), copies.f()) == ("original", "original")


def test_a_missing_attribute_is_named_and_nothing_is_left_half_done(absent: str) -> None:
    """A set of replacements is in force as a whole or not at all."""
    module = importlib.import_module(absent)
    with pytest.raises(PatchError, match=r"not_yet\.no\.such|not_yet.nothing does not exist"):
        Replacements([replacement(absent), replacement(absent, "nothing")]).apply()

    assert module.f() == "original"


def test_what_was_absent_is_absent_again(absent: str) -> None:
    """A name that is only defined for the time of the patch goes away with it."""
    module = importlib.import_module(absent)
    defined = Replacements([Replacement(module=absent, path="extra", make=lambda _: 3, may_be_absent=True)])
    defined.apply()
    assert module.extra == 3
    defined.revert()

    assert not hasattr(module, "extra")
