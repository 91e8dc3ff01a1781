"""Patches are found by name, applied once, and refused if they do not fit the installed megatron-core."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest
from packaging.specifiers import SpecifierSet

from patches import patched
from pipette_patches import registry
from pipette_patches.replacements import Patch, PatchError, Replacement, megatron_core_version


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Register a patch `counting` that raises the value of a module by one."""
    target = ModuleType("counted")
    vars(target)["value"] = 0
    replacement = Replacement(module="counted", path="value", make=lambda value: value + 1)
    counting = Patch(name="counting", supports=SpecifierSet(">=0.14"), replacements=lambda: (replacement,))
    monkeypatch.setitem(sys.modules, "counted", target)
    monkeypatch.setitem(registry._MODULES, "counting", "counting_patch")
    monkeypatch.setitem(sys.modules, "counting_patch", cast("ModuleType", SimpleNamespace(PATCH=counting)))
    monkeypatch.setattr(registry, "_applied", {})
    return target


def test_a_patch_is_applied_once(target: ModuleType) -> None:
    """A second call changes nothing, and one revert puts the original back."""
    registry.apply("counting")
    registry.apply("counting")
    assert (("counting",), 1) == (registry.applied(), target.value)
    patched.revert("counting")

    assert ((), 0) == (registry.applied(), target.value)


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    """The error suggests a similar name, or lists all names."""
    with pytest.raises(PatchError, match="unknown patch 'cpu_backnd'; did you mean cpu_backend"):
        registry.apply("cpu_backnd")
    with pytest.raises(PatchError, match="unknown patch 'xyz'; there are cpu_backend"):
        registry.find("xyz")


def test_an_unsupported_version_is_refused_by_name_and_version(
    target: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The version of the checkout that Python would import decides, and nothing is applied."""
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    info = tmp_path / "megatron" / "core" / "package_info.py"
    info.write_text("MAJOR = 0\nMINOR = 12\nPATCH = 1\nPRE_RELEASE = 'rc2'\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)

    with pytest.raises(
        PatchError, match=r"patch 'counting' supports megatron-core >=0.14, but version 0.12.1rc2 would"
    ):
        registry.apply("counting")

    assert target.value == 0


def test_a_damaged_checkout_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The error names a package_info.py that has no version."""
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "megatron" / "core" / "package_info.py").write_text("MAJOR = 0\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)

    with pytest.raises(PatchError, match=f"{tmp_path}/megatron/core/package_info.py does not define MAJOR"):
        megatron_core_version()


def test_every_patch_has_its_name_and_supports_the_installed_version() -> None:
    """The registry's name is the patch's own name."""
    for name in registry._MODULES:
        patch = registry.find(name)

        assert name == patch.name
        assert patch.supports.contains(megatron_core_version())
