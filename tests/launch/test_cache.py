"""Plans kept from job to job: what their key covers, and what becomes of files that cannot be used."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from facts_for_tests import tiny_cluster, tiny_job, tiny_measurements, tiny_model
from launch.worlds import plan

from pipette_launch.facts import Host, Layout, Plan, files
from pipette_launch.launch.cache import CLUSTER, PLAN, Cache, key_of

HOSTS = tiny_cluster().hosts
GIVEN: dict[str, Any] = {
    "hosts": HOSTS,
    "job": tiny_job(),
    "versions": {"torch": "2.13.0"},
    "settings": (0.02, 0.08),
    "environ": {"OMP_NUM_THREADS": "1", "HOME": "/root"},
}
MADE = plan(Layout(pp=2, dp=2))


def with_device(**changes: Any) -> tuple[Host, ...]:
    """The hosts with another first device."""
    first = replace(HOSTS[0], devices=(replace(HOSTS[0].devices[0], **changes), *HOSTS[0].devices[1:]))
    return (first, *HOSTS[1:])


@pytest.mark.parametrize(
    "changes",
    [
        {"hosts": HOSTS[:1]},
        {"hosts": (replace(HOSTS[0], name="elsewhere"), HOSTS[1])},
        {"hosts": (replace(HOSTS[0], cores=99), HOSTS[1])},
        {"hosts": with_device(uuid="GPU-1")},
        {"hosts": with_device(memory_total_bytes=9 << 30)},
        {"job": tiny_job(model=tiny_model(num_layers=8))},
        {"job": tiny_job(own=Layout(tp=2, dp=2))},
        {"job": tiny_job(pinned=("tp",))},
        {"job": tiny_job(performance_flags=("--cross-entropy-loss-fusion",))},
        {"job": tiny_job(megatron_version="0.15.0")},
        {"versions": {"torch": "2.12.0"}},
        {"settings": (0.05, 0.08)},
        {"environ": {"OMP_NUM_THREADS": "2"}},
        {"environ": {"OMP_NUM_THREADS": "1", "NCCL_P2P_DISABLE": "1"}},
    ],
    ids=lambda changes: str(next(iter(changes))),
)
def test_whatever_a_plan_depends_on_is_in_the_key(changes: dict[str, Any]) -> None:
    """Another machine, model, batch, pin, version, margin or steering variable makes another key."""
    assert key_of(**GIVEN) != key_of(**{**GIVEN, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"hosts": HOSTS[::-1]},
        {"hosts": with_device(memory_free_bytes=1)},
        {"job": tiny_job(train_iters=77, log_interval=5, notes=("a remark",))},
        {"environ": {"OMP_NUM_THREADS": "1", "NCCL_DEBUG_FILE": "/tmp/job-17", "SLURM_JOB_ID": "17"}},
    ],
    ids=["host order", "free memory", "iterations", "environment"],
)
def test_what_changes_from_job_to_job_is_not(changes: dict[str, Any]) -> None:
    """The order of the hosts, free memory, the number of iterations and log files change no plan."""
    assert key_of(**GIVEN) == key_of(**{**GIVEN, **changes})


def test_keeps_a_plan(tmp_path: Path) -> None:
    """What was saved comes back, marked as cached, with what it rests on."""
    cache, measured = Cache(tmp_path, "k"), tiny_measurements(tiny_cluster())

    assert ("", "") == (cache.save(PLAN, MADE), cache.save(CLUSTER, measured))
    assert (replace(MADE, provenance=replace(MADE.provenance, source="cached")), "") == cache.load(HOSTS)
    assert measured == cache.measurements()


def test_an_empty_cache_is_no_trouble(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither a first job nor one that keeps nothing is told anything."""
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
    assert trouble.startswith("the cached plan cannot be used, so the machines are measured anew")
    assert expected in trouble
    assert str(path) in trouble


def test_damaged_measurements_are_logged_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are shown on the screen, and nothing depends on them."""
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
    """A reader finds a whole plan at every moment, whoever wrote last."""
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
