"""Tests of what is kept of measured hosts."""

from dataclasses import replace
from pathlib import Path

import pytest
from facts_for_tests import tiny_cluster, tiny_measurements

from pipette_launch.facts import ComputeCase
from pipette_launch.launch.cache.measurements import MachineMeasurements

CLUSTER = tiny_cluster(2, 1)
VERSIONS = {"torch": "2"}


def machines(root: Path | None, **environ: str) -> MachineMeasurements:
    """Two hosts."""
    return MachineMeasurements(root, CLUSTER.hosts, VERSIONS, environ=environ)


def test_what_was_measured_is_found_by_any_job_on_the_same_hosts(tmp_path: Path) -> None:
    """In whatever order they come; not on other hosts, versions or network settings."""
    found = tiny_measurements(CLUSTER)
    assert machines(tmp_path).load() is None
    machines(tmp_path).kept(found)

    assert found == machines(tmp_path).load()
    assert found == MachineMeasurements(tmp_path, CLUSTER.hosts[::-1], VERSIONS, environ={"HOME": "/"}).load()
    assert machines(tmp_path, NCCL_ALGO="Tree").load() is None
    assert MachineMeasurements(tmp_path, tiny_cluster(3, 1).hosts, VERSIONS, environ={}).load() is None
    assert MachineMeasurements(tmp_path, CLUSTER.hosts, {"torch": "3"}, environ={}).load() is None


def test_without_a_folder_nothing_is_kept() -> None:
    """`--pipette-cache off` is no error."""
    found = tiny_measurements(CLUSTER)

    assert found is machines(None).kept(found)
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
    machines(tmp_path / "file").kept(tiny_measurements(CLUSTER))

    assert ["not JSON" in caplog.messages[0], "cannot be kept" in caplog.messages[-1]] == [True, True]


def test_times_of_other_cases_are_added_to_what_is_kept(tmp_path: Path) -> None:
    """What an earlier job measured of the same model is returned with what this one measured."""
    one, two = (ComputeCase(tp=tp, cp=1, micro_batch_size=1) for tp in (1, 2))
    machines(tmp_path).kept(replace(tiny_measurements(CLUSTER, (one, two)), model_digest="m"))
    found = machines(tmp_path).kept(replace(tiny_measurements(CLUSTER, (one,)), model_digest="m"))

    assert (one, two) == found.compute_cases()
    assert found == machines(tmp_path).load()
