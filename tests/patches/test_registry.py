"""Patches are found by name, applied once, taken back whole, and refused where they do not fit."""

import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from pipette_patches import registry
from pipette_patches.replacements import PatchError, megatron_core_version


class Counting:
    """A patch that counts what is asked of it."""

    name = "counting"
    supports = SpecifierSet(">=0.14")
    PATCH: "Counting"

    def __init__(self) -> None:
        self.in_force = 0
        self.calls: list[str] = []

    def apply(self) -> None:
        """Count up."""
        self.in_force += 1
        self.calls.append("apply")

    def revert(self) -> None:
        """Count down."""
        self.in_force -= 1
        self.calls.append("revert")


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    """Register a patch of the test's own."""
    patch = Counting()
    patch.PATCH = patch
    monkeypatch.setitem(registry._MODULES, "counting", "counting_patch")
    monkeypatch.setitem(sys.modules, "counting_patch", patch)
    monkeypatch.setattr(registry, "_applied", {})
    return patch


def test_undo_apply_apply_undo_undo(counting: Counting) -> None:
    """Whatever is repeated is done once."""
    registry.revert("counting")
    registry.apply("counting")
    registry.apply("counting")
    assert registry.applied() == ("counting",)
    registry.revert("counting")
    registry.revert("counting")

    assert counting.calls == ["apply", "revert"]
    assert registry.applied() == ()


def test_use_reverts_even_after_an_error(counting: Counting) -> None:
    """A `with` block leaves nothing behind."""
    with pytest.raises(ZeroDivisionError), registry.use("counting"):
        raise ZeroDivisionError

    assert counting.in_force == 0


def test_use_keeps_what_was_in_force_before(counting: Counting) -> None:
    """A `with` block inside a patched process does not take the patch away."""
    registry.apply("counting")
    with registry.use("counting"):
        pass

    assert counting.in_force == 1


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    """A typo gets a suggestion, anything else the list."""
    with pytest.raises(PatchError, match="unknown patch 'cpu_backnd'; did you mean cpu_backend"):
        registry.apply("cpu_backnd")
    with pytest.raises(PatchError, match="unknown patch 'xyz'; there are cpu_backend"):
        registry.find("xyz")


def test_an_unsupported_version_is_refused_by_name_and_version(
    counting: Counting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The checkout that would be imported decides, and nothing is applied."""
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

    assert counting.calls == []


def test_a_damaged_checkout_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A package_info.py without a version is not taken for some version."""
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "megatron" / "core" / "package_info.py").write_text("MAJOR = 0\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)

    with pytest.raises(PatchError, match=f"{tmp_path}/megatron/core/package_info.py does not define MAJOR"):
        megatron_core_version()


def test_every_patch_says_its_name_and_versions() -> None:
    """The list of names is the list of patches."""
    for name in registry.names():
        patch = registry.find(name)

        assert name == patch.name
        assert patch.supports.contains(megatron_core_version())
