"""A script writes, renames and removes copies of files, sees what it did, and changes no file."""

import glob
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pipette_patches.scratch import Scratch, writing_copies


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A folder with a file and a folder, whose contents are as before at the end."""
    home, scratch = tmp_path / "home", tmp_path / "scratch"
    (home / "data").mkdir(parents=True)
    scratch.mkdir()
    (home / "text").write_text("old")
    (home / "data" / "kept").write_text("kept")
    before = {path: path.is_file() and path.read_text() for path in home.rglob("*")}
    with writing_copies(Scratch(str(scratch), lambda whole: whole.startswith(str(scratch)))):
        yield home
    assert before == {path: path.is_file() and path.read_text() for path in home.rglob("*")}


def test_what_is_written_is_read_back(home: Path) -> None:
    """By `open`, pathlib, descriptors and `torch.save`; an appended file has its old beginning."""
    with open(home / "new", "w") as file:
        file.write("new")
    with open(home / "text", "a") as file:
        file.write(" and new")
    (home / "data" / "kept").write_text("other")
    torch.save({"a": 1}, home / "saved.pt")
    descriptor = os.open(home / "low", os.O_WRONLY | os.O_CREAT)
    os.write(descriptor, b"low")
    os.close(descriptor)

    assert ["new", "old and new", "other", "low"] == [
        (home / name).read_text() for name in ("new", "text", "data/kept", "low")
    ]
    assert {"a": 1} == torch.load(home / "saved.pt")


def test_folders_have_old_and_new_files(home: Path) -> None:
    """A new folder may be filled, and each way to list a folder shows both kinds of files once."""
    os.makedirs(home / "out" / "deep")
    (home / "out" / "deep" / "file").write_text("x")
    (home / "data" / "added").write_text("y")
    (home / "data" / "kept").write_text("z")

    assert {"kept", "added"} == set(os.listdir(home / "data"))
    assert {"text", "data", "out"} == {Path(path).name for path in glob.glob(f"{home}/*")}
    assert [str(home), str(home / "out"), str(home / "out" / "deep")] == [
        top for top, *_ in os.walk(home) if "data" not in top
    ]
    with pytest.raises(FileExistsError):
        os.mkdir(home / "data")
    os.makedirs(home / "data", exist_ok=True)


def test_removed_and_renamed_files_are_gone(home: Path) -> None:
    """A removed file may be written again; a renamed file has its content."""
    os.remove(home / "text")
    assert not (home / "text").exists()
    assert ["data"] == os.listdir(home)
    with pytest.raises(FileNotFoundError):
        os.remove(home / "text")

    (home / "text").write_text("again")
    os.replace(home / "text", home / "moved")
    os.rename(home / "data" / "kept", home / "data" / "other")

    assert ["again", "kept"] == [(home / "moved").read_text(), (home / "data" / "other").read_text()]
    assert (False, False) == ((home / "text").exists(), (home / "data" / "kept").exists())
    assert "kept" == Path(shutil.copy(home / "data" / "other", home / "copied")).read_text()


def test_a_removed_tree_may_be_made_again(home: Path) -> None:
    """The new folder is empty, and a temporary folder ends as usual."""
    (home / "data" / "new").write_text("x")
    shutil.rmtree(home / "data")
    assert (False, False) == ((home / "data").exists(), (home / "data" / "kept").exists())

    with pytest.raises(FileNotFoundError):
        os.listdir(home / "data")

    os.makedirs(home / "data" / "deep")
    assert ["deep"] == os.listdir(home / "data")
    shutil.rmtree(home / "data")
    shutil.rmtree(home / "nowhere", ignore_errors=True)
    assert ["text"] == os.listdir(home)


def test_times_and_modes_change_on_copies(home: Path) -> None:
    """`touch` and `chmod` work."""
    (home / "touched").touch()
    os.chmod(home / "text", 0o600)

    assert 0o600 == (home / "text").stat().st_mode & 0o777
    assert (home / "touched").exists()


def test_paths_that_are_free_have_no_copy(tmp_path: Path) -> None:
    """A cache folder keeps what the script writes."""
    with writing_copies(Scratch(str(tmp_path), lambda _: True)):
        (tmp_path / "cached").write_text("x")

    assert "x" == (tmp_path / "cached").read_text()
