"""Tests of what a warm-up worker is asked to measure."""

from pathlib import Path

import pytest
from facts_for_tests import tiny_cluster, tiny_job
from hypothesis import given
from hypothesis import strategies as st
from probe.workers import REFERENCE, tiny_options

from pipette_launch.errors import FactError
from pipette_launch.facts import files
from pipette_launch.probe.options import ProbeOptions, WorkerResult, joined


def test_groups_of_two_hosts_by_hand(tmp_path: Path) -> None:
    """Two hosts of two: everyone, each host, and one device of each host."""
    groups = {one.name: one.groups for one in tiny_options(tmp_path, hosts=2, devices=2).dimensions()}

    assert {
        "4 x stride 1": ((0, 1, 2, 3),),
        "2 x stride 1": ((0, 1), (2, 3)),
        "2 x stride 2": ((0, 2), (1, 3)),
    } == groups
    assert "4 x stride 1" == next(iter(groups))


@given(hosts=st.integers(1, 12), devices=st.integers(1, 8))
def test_groups_of_a_dimension_cover_every_slot_once(hosts: int, devices: int) -> None:
    """All groups of a dimension can be timed at the same time; a single slot has no dimension."""
    dimensions = tiny_options(Path("unused"), hosts=hosts, devices=devices).dimensions()

    for dimension in dimensions:
        assert list(range(hosts * devices)) == sorted(slot for group in dimension.groups for slot in group)
    assert (hosts * devices == 1) == (dimensions == ())


def test_options_survive_their_file(tmp_path: Path) -> None:
    """What the agent writes is what the worker reads."""
    options = tiny_options(tmp_path, hosts=2, devices=2)
    files.write(tmp_path / "options.json", options)

    assert options == files.read(tmp_path / "options.json", ProbeOptions)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hosts": ()}, "equally many devices, got no hosts"),
        ({"hosts": (tiny_cluster(1, 1).hosts[0], tiny_cluster(1, 2).hosts[0])}, "node0: 1, node0: 2"),
        ({"cases": ()}, "at least one compute case"),
        ({"message_sizes_bytes": ()}, "at least 3 sizes, ascending"),
        ({"message_sizes_bytes": (8, 8, 64)}, "at least 3 sizes, ascending"),
        ({"message_sizes_bytes": (64, 8, 1)}, "at least 3 sizes, ascending"),
        ({"timeout_s": 0.0}, "timeout_s=0.0"),
    ],
)
def test_bad_options_are_refused(changes: dict[str, object], message: str) -> None:
    """Each contradiction is named with its values."""
    fields = {
        "job": tiny_job(1),
        "hosts": tiny_cluster(1, 1).hosts,
        "cases": (REFERENCE,),
        "output": "out",
        "progress_dir": "progress",
        "message_sizes_bytes": (8, 64, 512),
    }

    with pytest.raises(FactError, match=message):
        ProbeOptions(**{**fields, **changes})  # type: ignore[arg-type]


def test_parts_of_a_result_are_joined() -> None:
    """Lists grow, and of single figures the later one counts."""
    first = WorkerResult(slot=1, notes=("a",), phase_s={"links": 1.0}, optimizer_s_per_parameter=5.0)
    second = WorkerResult(slot=1, notes=("b",), phase_s={"compute": 2.0}, optimizer_s_per_parameter=3.0)

    assert WorkerResult(
        slot=1, notes=("a", "b"), phase_s={"links": 1.0, "compute": 2.0}, optimizer_s_per_parameter=3.0
    ) == joined(first, second)
