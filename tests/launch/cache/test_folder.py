"""A cache that others may change, that is full, read-only, or shared by jobs that die: no damage, and clear words."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from facts_for_tests import tiny_cluster
from launch.cache.test_plans import outcome
from launch.worlds import plan

from pipette_launch.cli import _cache
from pipette_launch.errors import FileFormatError
from pipette_launch.facts import Layout, Plan, files
from pipette_launch.launch.cache.folder import distrust, inside
from pipette_launch.launch.cache.plans import OUTCOMES, PLAN, Cache, machines_of

HOSTS = tiny_cluster().hosts
MADE = plan(Layout(pp=2, dp=2))
IS_ROOT = os.geteuid() == 0
TESTS = Path(__file__).parents[2]


def test_what_is_kept_is_private(tmp_path: Path) -> None:
    """Folders 0700 and files 0600, whatever the umask; a file that is shared on purpose follows the umask."""
    before = os.umask(0o022)
    try:
        root = tmp_path / "new" / "cache"
        Cache(root, "k").save(PLAN, MADE)
        files.write(tmp_path / "shared" / PLAN, MADE, shared=True)
    finally:
        os.umask(before)

    made = [root.parent, root, root / "k", root / "k" / PLAN, tmp_path / "shared", tmp_path / "shared" / PLAN]
    assert [0o700, 0o700, 0o700, 0o600, 0o755, 0o644] == [stat.S_IMODE(path.stat().st_mode) for path in made]


def test_a_folder_that_everybody_may_write_is_not_believed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Said in one line; one that is still to be made is fine."""
    assert tmp_path / "new" == _cache(str(tmp_path / "new"))
    tmp_path.chmod(0o777)

    assert _cache(str(tmp_path)) is None
    told = capsys.readouterr().err
    assert 1 == told.count("\n")
    assert "may be written by everybody" in told


@pytest.mark.skipif(not IS_ROOT, reason="only root can give a folder away")
def test_a_folder_of_somebody_else_is_not_believed(tmp_path: Path) -> None:
    """It is named with its owner."""
    os.chown(tmp_path, 12345, -1)

    assert f"the cache {tmp_path} belongs to user 12345 and not to you" in distrust(tmp_path)


@pytest.mark.parametrize("key", ["..", "../..", "a/b", "/etc", "", ".", "a\x00", "x" * 200, ".hidden"])
def test_a_key_is_no_path(tmp_path: Path, key: str) -> None:
    """Nothing is read or written there, and the reason is said."""
    cache = Cache(tmp_path / "cache", key)

    found, trouble = cache.load(HOSTS)
    assert found is None
    assert "leads out of the cache" in trouble
    assert "leads out of the cache" in cache.save(PLAN, MADE)
    assert [] == list(tmp_path.rglob("*.json"))


def test_links_out_of_the_cache_are_not_followed(tmp_path: Path) -> None:
    """Neither a file nor a folder; a link inside, and a cache that is a link itself, may be."""
    root, out = tmp_path / "cache", tmp_path / "out"
    Cache(out, "k").save(PLAN, MADE)
    root.mkdir()
    (root / "k").symlink_to(out / "k")
    (root / "loop").symlink_to(root / "loop")
    (root / "file").mkdir()
    (root / "file" / PLAN).symlink_to(out / "k" / PLAN)
    (tmp_path / "link").symlink_to(out)

    for key in ("k", "loop", "file"):
        assert "leads out of the cache" in Cache(root, key).load(HOSTS)[1]
        assert Cache(root, key).save(PLAN, MADE)
    assert Cache(tmp_path / "link", "k").load(HOSTS)[0] is not None
    with pytest.raises(FileFormatError, match="leads out"):
        inside(root, "k", PLAN)


LIMITED = """
import resource, sys
from pathlib import Path
from launch.cache.test_folder import MADE, PLAN, Cache
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
print(Cache(Path(sys.argv[1]), "k").save(PLAN, MADE))
"""
KILLED = """
import os, signal, sys
from pathlib import Path
from launch.cache.test_folder import MADE, PLAN, Cache
Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
Cache(Path(sys.argv[1]), "k").save(PLAN, MADE)
"""
WRITER = """
import sys
from pathlib import Path
from launch.cache.test_folder import MADE, PLAN, Cache
from dataclasses import replace
made = replace(MADE, notes=(sys.argv[2] * 100_000,))
print("ready", flush=True)
for _ in range(60):
    assert Cache(Path(sys.argv[1]), "k").save(PLAN, made) == ""
"""


def names(folder: Path) -> list[str]:
    """Of all files there."""
    return [path.name for path in folder.iterdir()]


def started(program: str, *words: str | Path) -> subprocess.Popen[str]:
    """A process that runs a program of these tests."""
    paths = os.pathsep.join(map(str, (TESTS.parent, TESTS.parent / "patches", TESTS)))
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.Popen(
        [sys.executable, "-c", program, *words], env=environment, stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )


def test_a_file_that_cannot_be_written_whole_is_not_left_behind(tmp_path: Path) -> None:
    """Here a limit of the process; the plan that was there stays."""
    Cache(tmp_path, "k").save(PLAN, MADE)
    told, _ = started(LIMITED, tmp_path).communicate(timeout=60)

    assert "cannot be written (File too large)" in told
    assert [PLAN] == names(tmp_path / "k")
    assert "" == Cache(tmp_path, "k").load(HOSTS)[1]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    place = tmp_path / "small"
    place.mkdir()
    options = ["-t", "tmpfs", "-o", "size=64k,mode=700", "tmpfs", str(place)]
    if not IS_ROOT or subprocess.run(["mount", *options], check=False, capture_output=True).returncode:  # noqa: S607
        pytest.skip("no file system can be mounted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)  # noqa: S607


def test_a_full_disk_is_said_and_does_no_damage(small: Path) -> None:
    """The plan that was there stays, and so does the job."""
    cache = Cache(small, "k")
    cache.save(PLAN, MADE)
    with pytest.raises(OSError, match="No space left"):
        (small / "filler").write_bytes(b"x" * 100_000)

    assert "cannot be written (No space left on device): the next start will measure again" in cache.save(PLAN, MADE)
    assert [PLAN] == names(small / "k")
    assert "" == cache.load(HOSTS)[1]
    assert "No space left" in cache.keep_outcome(outcome(), HOSTS[0])


def test_a_read_only_home_is_said(small: Path) -> None:
    """What was kept before is still read."""
    cache = Cache(small, "k")
    cache.save(PLAN, MADE)
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)  # noqa: S607

    assert "cannot be written (Read-only file system)" in cache.save(PLAN, MADE)
    assert "Read-only file system" in Cache(small, "other").save(PLAN, MADE)
    assert "" == cache.load(HOSTS)[1]


def test_a_writer_that_is_killed_leaves_what_was_there(tmp_path: Path) -> None:
    """Its temporary file is not read, and removed a day later by the next that writes there."""
    Cache(tmp_path, "k").save(PLAN, MADE)
    with started(KILLED, tmp_path) as killed:
        assert -9 == killed.wait(60)
    (left,) = (tmp_path / "k").glob(f".{PLAN}.*")

    assert "" == Cache(tmp_path, "k").load(HOSTS)[1]
    Cache(tmp_path, "k").save(PLAN, MADE)
    assert left.exists()
    os.utime(left, (0, time.time() - 2 * files.LEFTOVER_S))
    Cache(tmp_path, "k").save(PLAN, MADE)
    assert [PLAN] == names(tmp_path / "k")


def test_two_processes_write_one_key(tmp_path: Path) -> None:
    """A reader finds one plan or the other, whole, at every moment."""
    Cache(tmp_path, "k").save(PLAN, MADE)
    writers = [started(WRITER, tmp_path, letter) for letter in "ab"]
    for writer in writers:
        assert writer.stdout
        assert "ready\n" == writer.stdout.readline()
    found = []
    while any(writer.poll() is None for writer in writers):
        found.append(files.read(tmp_path / "k" / PLAN, Plan))

    assert [0, 0] == [writer.returncode for writer in writers]
    assert {len(made.notes[0]) for made in found if made.notes} <= {100_000}
    assert {len(set(made.notes[0])) for made in found if made.notes} <= {1}
    assert [PLAN] == names(tmp_path / "k")
    for writer in writers:
        assert writer.stdout
        writer.stdout.close()


@pytest.mark.parametrize("year_s", [0.0, 4e9])
def test_outcomes_of_a_host_with_a_wrong_clock_are_read(tmp_path: Path, year_s: float) -> None:
    """From long ago or from the future: the time of a file only says which is newer."""
    cache = Cache(tmp_path, "k")
    cache.keep_outcome(outcome(), HOSTS[0])
    cache.keep_outcome(outcome("other"), HOSTS[0])
    for path in (tmp_path / OUTCOMES / machines_of(HOSTS[0])).glob("other*.json"):
        os.utime(path, (year_s, year_s))

    assert {"k", "other"} == {one.key for one in cache.outcomes(HOSTS[0])}
