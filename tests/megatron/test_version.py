"""The Megatron that a script would import is found without importing it; the user may name another."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from pipette_launch.errors import MegatronError
from pipette_launch.megatron import newest_release, script_version, version_or_newest


def checkout(folder: Path, version: str) -> Path:
    """A checkout of some release: a script, and the file that tells the version."""
    core = folder / "megatron" / "core"
    core.mkdir(parents=True)
    numbers = dict(zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True))
    core.joinpath("package_info.py").write_text("".join(f"{name} = {number}\n" for name, number in numbers.items()))
    script = folder / "pretrain_gpt.py"
    script.write_text("")
    return script


def test_sources_beside_the_script_come_first(tmp_path: Path) -> None:
    """As Python would: the script's own folder, also through a link, before PYTHONPATH."""
    script = checkout(tmp_path / "a", "0.14.2")
    checkout(tmp_path / "b", "0.15.0")
    link = tmp_path / "link.py"
    link.symlink_to(script)

    assert [script_version(str(path), {"PYTHONPATH": str(tmp_path / "b")}) for path in (script, link)] == ["0.14.2"] * 2


def test_pythonpath_comes_before_what_is_installed(tmp_path: Path) -> None:
    """Entries are tried in order; those without Megatron are passed over."""
    checkout(tmp_path / "b", "0.15.0")
    script = tmp_path / "mine.py"
    script.write_text("")

    assert script_version(str(script), {"PYTHONPATH": f"/nowhere:{tmp_path / 'b'}"}) == "0.15.0"


def test_a_module_is_looked_for_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`-m pretrain_gpt` has the working directory first on its path."""
    checkout(tmp_path, "0.17.0")
    monkeypatch.chdir(tmp_path)

    assert script_version("pretrain_gpt", {}) == "0.17.0"


def test_installed_package_is_the_rest(tmp_path: Path) -> None:
    """Without sources the installed megatron-core counts."""
    assert metadata.version("megatron-core") == script_version(str(tmp_path / "mine.py"), {})


def test_no_megatron_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing anywhere: what to do is said; a checkout above the script still counts."""

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)

    with pytest.raises(MegatronError, match="install megatron-core"):
        script_version(str(tmp_path / "mine.py"), {})
    checkout(tmp_path, "0.16.0")
    assert script_version(str(tmp_path / "examples" / "mine.py"), {}) == "0.16.0"


def test_a_named_release_comes_first_and_the_newest_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tag of Megatron's is understood; where no Megatron is found the guess is said."""
    script = str(checkout(tmp_path / "a", "0.14.2"))

    assert ("0.15.1", ()) == version_or_newest("core_v0.15.1", script, {})
    assert ("0.14.2", ()) == version_or_newest(None, script, {})

    monkeypatch.setattr("pipette_launch.megatron.version.script_version", _no_megatron)
    version, notes = version_or_newest(None, "mine.py", {})
    assert f"{newest_release()}.0" == version
    assert "--megatron-version" in notes[0]


def _no_megatron(script: str, environ: object) -> str:
    raise MegatronError(f"none beside {script}")
