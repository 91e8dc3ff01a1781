"""The Megatron that a script would import is found without importing it; variables follow the layout."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from pipette_launch.errors import MegatronError
from pipette_launch.facts import Layout
from pipette_launch.megatron import environment, script_version


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


@pytest.mark.parametrize(
    ("layout", "kind", "name", "expected"),
    [
        (Layout(tp=2, etp=2), "cuda", "NVIDIA H200", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        (Layout(cp=2), "cuda", "NVIDIA A100-SXM4-80GB", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        (Layout(tp=2, etp=2), "cpu", "Some CPU", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        (Layout(tp=2, etp=2), "cuda", "NVIDIA B200", {}),
        (Layout(tp=2, etp=2), "cuda", "NVIDIA GB300", {}),
        (Layout(pp=2, dp=4), "cuda", "NVIDIA H200", {}),
    ],
)
def test_connections_follow_the_layout(layout: Layout, kind: str, name: str, expected: dict[str, str]) -> None:
    """One connection for tensor or context parallelism before Blackwell, none asked for otherwise."""
    assert expected == environment(layout, device_kind=kind, device_name=name)
