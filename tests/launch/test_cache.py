"""A cache that others may change, or that is full, read-only or shared by dying jobs: no damage, and clear messages."""

from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from facts_for_tests import tiny_cluster, tiny_job, tiny_measurements, tiny_model
from launch.worlds import plan

from pipette_launch.cli.launcher import _cache
from pipette_launch.errors import FileFormatError
from pipette_launch.facts import Layout, Plan, Samples, files
from pipette_launch.facts.outcome import Outcome
from pipette_launch.facts.plan import Shortage
from pipette_launch.launch.cache import (
    CLUSTER,
    OUTCOME,
    OUTCOMES,
    PLAN,
    Cache,
    MachineMeasurements,
    ShortageFile,
    distrust,
    inside,
    machines_of,
)

HOSTS = tiny_cluster().hosts
MADE = plan(Layout(pp=2, dp=2))
IS_ROOT = os.geteuid() == 0
TESTS = Path(__file__).parents[1]


def test_what_is_kept_is_private(tmp_path: Path) -> None:
    """Folders have mode 0700 and files 0600 under any umask. A shared file follows the umask."""
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
    """One line says so. A folder that does not exist yet is fine."""
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
    """Nothing is read or written there, and the reason is reported."""
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
from launch.test_cache import MADE, PLAN, Cache
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
print(Cache(Path(sys.argv[1]), "k").save(PLAN, MADE))
"""
KILLED = """
import os, signal, sys
from pathlib import Path
from launch.test_cache import MADE, PLAN, Cache
Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
Cache(Path(sys.argv[1]), "k").save(PLAN, MADE)
"""
WRITER = """
import sys
from pathlib import Path
from launch.test_cache import MADE, PLAN, Cache
from dataclasses import replace
made = replace(MADE, notes=(sys.argv[2] * 100_000,))
print("ready", flush=True)
for _ in range(60):
    assert Cache(Path(sys.argv[1]), "k").save(PLAN, made) == ""
"""


def names(folder: Path) -> list[str]:
    """Return the names of all files in the folder."""
    return [path.name for path in folder.iterdir()]


def started(program: str, *words: str | Path) -> subprocess.Popen[str]:
    """Start a process that runs one of the programs above."""
    paths = os.pathsep.join(map(str, (TESTS.parent, TESTS.parent / "patches", TESTS)))
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.Popen(
        [sys.executable, "-c", program, *words], env=environment, stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )


def test_a_file_that_cannot_be_written_whole_is_not_left_behind(tmp_path: Path) -> None:
    """A limit of the process cuts the file off; the earlier plan stays."""
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
    """The earlier plan stays, and the job goes on."""
    cache = Cache(small, "k")
    cache.save(PLAN, MADE)
    with pytest.raises(OSError, match="No space left"):
        (small / "filler").write_bytes(b"x" * 100_000)

    assert "cannot be written (No space left on device): the next start will measure again" in cache.save(PLAN, MADE)
    assert [PLAN] == names(small / "k")
    assert "" == cache.load(HOSTS)[1]
    assert "No space left" in cache.keep_outcome(outcome(), HOSTS[0])


def test_a_read_only_home_is_said(small: Path) -> None:
    """Files that were kept before are still read."""
    cache = Cache(small, "k")
    cache.save(PLAN, MADE)
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)  # noqa: S607

    assert "cannot be written (Read-only file system)" in cache.save(PLAN, MADE)
    assert "Read-only file system" in Cache(small, "other").save(PLAN, MADE)
    assert "" == cache.load(HOSTS)[1]


def test_a_writer_that_is_killed_leaves_what_was_there(tmp_path: Path) -> None:
    """Its temporary file is not read. The next writer removes it when it is a day old."""
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
    """Times from long ago or from the future only order the files."""
    cache = Cache(tmp_path, "k")
    cache.keep_outcome(outcome(), HOSTS[0])
    cache.keep_outcome(outcome("other"), HOSTS[0])
    for path in (tmp_path / OUTCOMES / machines_of(HOSTS[0])).glob("other*.json"):
        os.utime(path, (year_s, year_s))

    assert {"k", "other"} == {one.key for one in cache.outcomes(HOSTS[0])}


def test_keeps_a_plan(tmp_path: Path) -> None:
    """The plan comes back, marked as cached, with its measurements."""
    cache, measured = Cache(tmp_path, "k"), tiny_measurements(tiny_cluster())

    assert ("", "") == (cache.save(PLAN, MADE), cache.save(CLUSTER, measured))
    assert (replace(MADE, provenance=replace(MADE.provenance, source="cached")), "") == cache.load(HOSTS)
    assert measured == cache.measurements()


def test_a_plan_has_a_path_where_it_was_kept(tmp_path: Path) -> None:
    """Without a cache, or if an older plan could not be replaced, it has no path."""
    kept, refused, off = Cache(tmp_path, "k"), Cache(tmp_path, "old"), Cache(None, "k")
    (tmp_path / "old" / PLAN).mkdir(parents=True)
    assert (None, tmp_path / "old" / PLAN) == (kept.plan_path, refused.plan_path)
    for cache in (kept, refused, off):
        cache.keep_plan(MADE)

    assert (tmp_path / "k" / PLAN, "") == (kept.plan_path, kept.trouble)
    assert (None, "") == (off.plan_path, off.trouble)
    assert refused.plan_path is None
    assert refused.trouble.startswith(f"{tmp_path / 'old' / PLAN} cannot be written (Is a directory): ")


def test_an_empty_cache_is_no_trouble(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A first job, or a job without a cache, gets no message."""
    for cache in (Cache(tmp_path, "k"), Cache(None, "k")):
        assert (None, "") == cache.load(HOSTS)
        assert cache.measurements() is None
    assert "" == Cache(None, "k").save(PLAN, MADE)
    assert [] == caplog.records


def test_the_order_of_the_hosts_does_not_matter(tmp_path: Path) -> None:
    """A plan names its hosts."""
    cache = Cache(tmp_path, "k")
    cache.save(PLAN, MADE)

    assert cache.load(HOSTS[::-1])[0] is not None


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda path: path.write_text("{"), "not JSON"),
        (
            lambda path: files.write(path, replace(MADE, hosts=("node0", "node7"))),
            "the plan is for the hosts node0, node7",
        ),
        (lambda path: files.write(path, plan(Layout(pp=2, dp=2), key="other")), "the plan has the key other"),
        (lambda path: (path.unlink(), path.mkdir()), "cannot be read"),
    ],
    ids=["damaged", "hosts", "key", "folder"],
)
def test_a_plan_that_cannot_be_used_is_named_and_measured_anew(tmp_path: Path, spoil: Any, expected: str) -> None:
    """The reason names the file; it is never fatal."""
    cache = Cache(tmp_path, "k")
    cache.save(PLAN, MADE)
    path = tmp_path / "k" / PLAN
    spoil(path)

    found, trouble = cache.load(HOSTS)

    assert found is None
    assert trouble.startswith("the cached plan cannot be used, so the machines are measured again")
    assert expected in trouble
    assert str(path) in trouble


def test_damaged_measurements_are_logged_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Only the screen shows them, so the plan stays usable."""
    (tmp_path / "k").mkdir()
    (tmp_path / "k" / CLUSTER).write_text("{")

    with caplog.at_level(logging.WARNING):
        assert Cache(tmp_path, "k").measurements() is None

    assert "not JSON" in caplog.text


def test_a_folder_that_cannot_be_written_is_explained(tmp_path: Path) -> None:
    """The message says where, why and what to do."""
    (tmp_path / "file").write_text("")

    trouble = Cache(tmp_path / "file", "k").save(PLAN, MADE)

    assert str(tmp_path / "file" / "k" / PLAN) in trouble
    assert "--pipette-cache" in trouble


def test_two_jobs_may_write_one_key(tmp_path: Path) -> None:
    """A reader finds a whole plan at every moment, from one writer or the other."""
    plans = [plan(Layout(pp=2, dp=2)), plan(Layout(tp=2, dp=2))]
    Cache(tmp_path, "k").save(PLAN, plans[0])

    def write(made: Plan) -> None:
        for _ in range(20):
            Cache(tmp_path, "k").save(PLAN, made)

    jobs = [threading.Thread(target=write, args=(made,)) for made in plans]
    for job in jobs:
        job.start()
    found = []
    while any(job.is_alive() for job in jobs):
        found.append(Cache(tmp_path, "k").load(HOSTS))
    for job in jobs:
        job.join()

    assert {""} == {trouble for _, trouble in found}
    assert [PLAN] == [path.name for path in (tmp_path / "k").iterdir()]


def outcome(key: str = "k", layout: Layout = MADE.chosen.layout, step_s: float = 1.0) -> Outcome:
    """Return an outcome of a plan."""
    return Outcome(
        key=key,
        layout=layout,
        placement=tuple(range(layout.world_size)),
        predicted_step_s=1.0,
        measured_step=Samples(values_s=(step_s,)),
        first_iteration=1,
        last_iteration=20,
        losses=(),
        configuration_digest="a",
    )


def test_outcomes_of_all_jobs_are_kept_for_like_machines(tmp_path: Path) -> None:
    """A job on other hosts of the same make finds them. The newest outcome of a plan replaces the last one."""
    first, second = HOSTS
    for number, one in enumerate((outcome(), outcome("other"), outcome(layout=Layout(dp=4)), outcome(step_s=2.0))):
        assert "" == Cache(tmp_path, one.key).keep_outcome(one, first)
        newest = max((tmp_path / "outcomes").glob("*/*.json"), key=lambda path: path.stat().st_mtime_ns)
        os.utime(newest, (number, number))
    found = Cache(tmp_path, "third").outcomes(replace(second, name="elsewhere", address="10.9.9.9"))

    assert [outcome("other"), outcome(layout=Layout(dp=4)), outcome(step_s=2.0)] == list(found)
    assert files.read(tmp_path / "k" / OUTCOME, Outcome) == outcome(step_s=2.0)


def test_outcomes_of_other_machines_are_not_mixed_in(tmp_path: Path) -> None:
    """A GPU with more memory, or more devices, make another machine."""
    gpus = [replace(HOSTS[0].devices[0], kind="cuda", memory_total_bytes=size << 30) for size in (9, 10)]
    usual, larger = (replace(HOSTS[0], devices=(gpu, *HOSTS[0].devices[1:])) for gpu in gpus)
    Cache(tmp_path, "k").keep_outcome(outcome(), usual)

    assert (outcome(),) == Cache(tmp_path, "k").outcomes(usual)
    assert () == Cache(tmp_path, "k").outcomes(larger)
    assert machines_of(HOSTS[0]) != machines_of(replace(HOSTS[0], devices=HOSTS[0].devices[:1]))


def test_outcomes_that_teach_nothing_or_cannot_be_read_do_no_harm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An outcome that teaches nothing is not kept for others, and a damaged file is skipped."""
    cache = Cache(tmp_path, "k")
    cache.keep_outcome(replace(outcome(), configuration_digest=""), HOSTS[0])
    assert () == cache.outcomes(HOSTS[0])
    assert not (tmp_path / "outcomes").exists()

    cache.keep_outcome(outcome(), HOSTS[0])
    (tmp_path / "outcomes" / machines_of(HOSTS[0]) / "broken.json").write_text("{")

    with caplog.at_level(logging.WARNING):
        assert (outcome(),) == cache.outcomes(HOSTS[0])
    assert "broken.json: not JSON" in caplog.text
    assert () == Cache(None, "k").outcomes(HOSTS[0])


def test_an_outcome_of_an_earlier_release_is_read() -> None:
    """Fields that came later have their defaults."""
    plain = json.loads(files.dumps(outcome()))
    for name in ("step_correction", "configuration_digest", "peaks"):
        del plain[name]
    found = files.loads(Outcome, json.dumps(plain), "old")

    assert (1.0, "", ()) == (found.step_correction, found.configuration_digest, found.peaks)


MACHINES = tiny_cluster(2, 1)
VERSIONS = {"torch": "2"}


def at_once(write: Callable[[], None]) -> None:
    """Write at once."""
    write()


def machines(root: Path | None, **environ: str) -> MachineMeasurements:
    """Two hosts."""
    return MachineMeasurements(root, MACHINES.hosts, VERSIONS, environ=environ)


def test_what_was_measured_is_found_by_any_job_on_the_same_hosts(tmp_path: Path) -> None:
    """The order of hosts does not matter; other hosts, versions or network settings do."""
    found = tiny_measurements(MACHINES)
    assert machines(tmp_path).load() is None
    machines(tmp_path).keep(found, at_once)

    assert found == machines(tmp_path).load()
    assert found == MachineMeasurements(tmp_path, MACHINES.hosts[::-1], VERSIONS, environ={"HOME": "/"}).load()
    assert machines(tmp_path, NCCL_ALGO="Tree").load() is None
    assert MachineMeasurements(tmp_path, tiny_cluster(3, 1).hosts, VERSIONS, environ={}).load() is None
    assert MachineMeasurements(tmp_path, MACHINES.hosts, {"torch": "3"}, environ={}).load() is None


def test_without_a_folder_nothing_is_kept() -> None:
    """`--pipette-cache off` is no error."""
    found = tiny_measurements(MACHINES)

    machines(None).keep(found, at_once)
    assert machines(None).load() is None


def test_a_damaged_file_and_a_folder_that_takes_none_are_said_and_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The job measures anew."""
    path = machines(tmp_path).path
    assert path
    path.parent.mkdir(parents=True)
    path.write_text("{")
    assert machines(tmp_path).load() is None
    (tmp_path / "file").write_text("")
    machines(tmp_path / "file").keep(tiny_measurements(MACHINES), at_once)

    assert ["not JSON" in caplog.messages[0], "cannot be kept" in caplog.messages[-1]] == [True, True]


HOST = tiny_cluster().hosts[0]
SHORT: dict[str, Any] = {"host": HOST, "job": tiny_job(), "versions": {"torch": "2.13.0"}}
FOUND = Shortage(layout=Layout(dp=4), need_bytes=6, free_bytes=10, cause="out of memory", noticed_at="now")


def test_keeps_what_was_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The next job finds it. A first job, or a job without a cache, gets no message."""
    file, off = ShortageFile(tmp_path, **SHORT), ShortageFile(None, **SHORT)

    assert file.load() is None
    file.write(FOUND, "the shortage cannot be kept for later jobs")
    off.write(FOUND, "the shortage cannot be kept for later jobs")
    assert (FOUND, None, None) == (ShortageFile(tmp_path, **SHORT).load(), off.load(), off.path)
    assert file.path is not None
    assert [file.path] == [path for path in tmp_path.rglob("*") if path.is_file()]
    assert 0o600 == file.path.stat().st_mode & 0o777
    assert [] == caplog.records


@pytest.mark.parametrize(
    ("changes", "is_same"),
    [
        ({"host": tiny_cluster().hosts[1]}, True),
        ({"job": tiny_job(own=Layout(tp=2, dp=2), pinned=("tp",), train_iters=77)}, True),
        ({"host": replace(HOST, cores=99)}, False),
        ({"job": tiny_job(model=tiny_model(num_layers=8))}, False),
        ({"job": tiny_job(megatron_version="0.17.0")}, False),
        ({"job": tiny_job(performance_flags=("--cross-entropy-loss-fusion",))}, False),
        ({"versions": {"torch": "2.12.0"}}, False),
    ],
)
def test_holds_for_such_machines_and_such_a_training(tmp_path: Path, changes: dict[str, Any], is_same: bool) -> None:
    """Other hosts of the same make and other layouts are the same; another model, flag or version is not."""
    assert is_same == (ShortageFile(tmp_path, **SHORT).path == ShortageFile(tmp_path, **{**SHORT, **changes}).path)


@pytest.mark.parametrize("text", ["", '{"kind": "plan"}', '{"kind": "shortage", "schema_version": 2}'])
def test_a_file_that_cannot_be_used_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str) -> None:
    """The file is treated as missing."""
    file = ShortageFile(tmp_path, **SHORT)
    assert file.path is not None
    file.path.parent.mkdir(parents=True)
    file.path.write_text(text)

    assert file.load() is None
    assert str(file.path) in caplog.text


def test_a_link_out_of_the_cache_is_not_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is neither read nor written. If the folder cannot be written, only the shortage is lost."""
    file = ShortageFile(tmp_path / "cache", **SHORT)
    assert file.path is not None
    file.path.parent.parent.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    file.path.parent.symlink_to(tmp_path / "elsewhere")
    file.write(FOUND, "the shortage cannot be kept for later jobs")

    assert file.load() is None
    assert [] == [*(tmp_path / "elsewhere").iterdir()]
    assert "cannot be kept for later jobs" in caplog.text
