"""Plans kept from job to job: what their key covers, and what becomes of files that cannot be used."""

from __future__ import annotations

import json
import logging
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from facts_for_tests import tiny_cluster, tiny_job, tiny_measurements, tiny_model
from launch.worlds import plan

from pipette_launch.facts import Host, Layout, Plan, Samples, files
from pipette_launch.facts.outcome import Outcome
from pipette_launch.launch.cache.plans import CLUSTER, OUTCOME, PLAN, Cache, key_of, machines_of

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


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("CUDA_DEVICE_MAX_CONNECTIONS", True),
        ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", True),
        ("CUBLAS_WORKSPACE_CONFIG", True),
        ("NCCL_P2P_DIRECT_DISABLE", True),
        ("FI_EFA_USE_DEVICE_RDMA", True),
        ("FI_PROVIDER", True),
        ("OFI_NCCL_PROTOCOL", True),
        ("PYTORCH_ALLOC_CONF", True),
        ("PYTORCH_CUDA_ALLOC_CONF", True),
        ("PYTORCH_HIP_ALLOC_CONF", True),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", True),
        ("SHARP_COLL_ENABLE_SAT", True),
        ("TORCHINDUCTOR_MAX_AUTOTUNE", True),
        ("TORCHDYNAMO_DISABLE", True),
        ("TORCH_COMPILE_DISABLE", True),
        ("NVTE_FUSED_ATTN", True),
        ("NVSHMEM_IB_ENABLE_IBGDA", True),
        ("OMP_PROC_BIND", True),
        ("ONEDNN_MAX_CPU_ISA", True),
        ("FI_LOG_LEVEL", False),
        ("ONEDNN_VERBOSE", False),
        ("TORCHINDUCTOR_CACHE_DIR", False),
        ("CUDA_MPS_PIPE_DIRECTORY", False),
        ("CUDA_MPS_LOG_DIRECTORY", False),
        ("CUDA_VISIBLE_DEVICES", False),
        ("CUDA_CACHE_PATH", False),
    ],
)
def test_variables_that_change_speed_or_memory_are_in_the_key(name: str, counts: bool) -> None:
    """Libraries' settings count; folders and logs, which batch systems name after the job, do not."""
    changed = {**GIVEN, "environ": {**GIVEN["environ"], name: "1"}}

    assert counts == (key_of(**GIVEN) != key_of(**changed))


def test_keeps_a_plan(tmp_path: Path) -> None:
    """What was saved comes back, marked as cached, with what it rests on."""
    cache, measured = Cache(tmp_path, "k"), tiny_measurements(tiny_cluster())

    assert ("", "") == (cache.save(PLAN, MADE), cache.save(CLUSTER, measured))
    assert (replace(MADE, provenance=replace(MADE.provenance, source="cached")), "") == cache.load(HOSTS)
    assert measured == cache.measurements()


def test_a_plan_has_a_path_where_it_was_kept(tmp_path: Path) -> None:
    """And nowhere else: neither without a cache, nor where an older plan could not be replaced."""
    measured = tiny_measurements(tiny_cluster())
    kept, refused, off = Cache(tmp_path, "k"), Cache(tmp_path, "old"), Cache(None, "k")
    refused.save(PLAN, MADE)
    (tmp_path / "old" / CLUSTER).mkdir()
    assert (None, tmp_path / "old" / PLAN) == (kept.plan_path, refused.plan_path)
    for cache in (kept, refused, off):
        cache.keep_plan(MADE, measured)

    assert (tmp_path / "k" / PLAN, "") == (kept.plan_path, kept.trouble)
    assert (None, "") == (off.plan_path, off.trouble)
    assert refused.plan_path is None
    assert refused.trouble.startswith(f"{tmp_path / 'old' / CLUSTER} cannot be written (Is a directory): ")


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


def outcome(key: str = "k", layout: Layout = MADE.chosen.layout, step_s: float = 1.0) -> Outcome:
    """What became of a plan."""
    return Outcome(
        key=key,
        layout=layout,
        placement=tuple(range(layout.world_size)),
        predicted_step_s=1.0,
        measured_step=Samples(values_s=(step_s,)),
        first_iteration=1,
        last_iteration=20,
        losses=(),
        features={"tp": 0.0},
    )


def test_outcomes_of_all_jobs_are_kept_for_like_machines(tmp_path: Path) -> None:
    """Another job finds them on other hosts of the same make; a plan's newest outcome takes the place of its last."""
    first, second = HOSTS
    for number, one in enumerate((outcome(), outcome("other"), outcome(layout=Layout(dp=4)), outcome(step_s=2.0))):
        assert "" == Cache(tmp_path, one.key).keep_outcome(one, first)
        newest = max((tmp_path / "outcomes").glob("*/*.json"), key=lambda path: path.stat().st_mtime_ns)
        os.utime(newest, (number, number))
    found = Cache(tmp_path, "third").outcomes(replace(second, name="elsewhere", address="10.9.9.9"))

    assert [outcome("other"), outcome(layout=Layout(dp=4)), outcome(step_s=2.0)] == list(found)
    assert files.read(tmp_path / "k" / OUTCOME, Outcome) == outcome(step_s=2.0)


def test_outcomes_of_other_machines_are_not_mixed_in(tmp_path: Path) -> None:
    """More memory of a GPU or more devices are another machine."""
    usual, larger = (with_device(kind="cuda", memory_total_bytes=size << 30)[0] for size in (9, 10))
    Cache(tmp_path, "k").keep_outcome(outcome(), usual)

    assert (outcome(),) == Cache(tmp_path, "k").outcomes(usual)
    assert () == Cache(tmp_path, "k").outcomes(larger)
    assert machines_of(HOSTS[0]) != machines_of(replace(HOSTS[0], devices=HOSTS[0].devices[:1]))


def test_outcomes_that_teach_nothing_or_cannot_be_read_do_no_harm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without features one is not kept for others; a damaged one is skipped; without a cache there are none."""
    cache = Cache(tmp_path, "k")
    cache.keep_outcome(replace(outcome(), features={}), HOSTS[0])
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
    for name in ("step_correction", "features", "peaks"):
        del plain[name]
    found = files.loads(Outcome, json.dumps(plain), "old")

    assert (1.0, {}, ()) == (found.step_correction, found.features, found.peaks)
