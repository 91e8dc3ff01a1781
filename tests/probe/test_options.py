"""Tests of what a warm-up worker is asked to measure."""

from pathlib import Path

import pytest
from facts_for_tests import tiny_cluster, tiny_job
from hypothesis import given
from hypothesis import strategies as st
from probe.workers import REFERENCE, tiny_options

from pipette_launch.errors import FactError
from pipette_launch.facts import files
from pipette_launch.probe.options import GroupShape, ProbeOptions, WorkerResult, group_shapes, joined


def test_groups_by_hand() -> None:
    """Four slots in pairs two apart: the first and third, the second and fourth."""
    assert ((0, 2), (1, 3)) == GroupShape(size=2, stride=2).groups(4)


@given(size=st.integers(2, 6), stride=st.integers(1, 6), blocks=st.integers(1, 4))
def test_groups_cover_every_slot_once(size: int, stride: int, blocks: int) -> None:
    """Groups of one shape are a partition of the slots, so all of them can be measured at the same time."""
    slots = size * stride * blocks
    groups = GroupShape(size=size, stride=stride).groups(slots)

    assert list(range(slots)) == sorted(slot for group in groups for slot in group)


def test_groups_that_do_not_divide_are_refused() -> None:
    """The error names the shape and the slots."""
    with pytest.raises(FactError, match="groups of 3 slots, 1 apart, do not divide 4 slots"):
        GroupShape(size=3, stride=1).groups(4)


def test_shapes_of_two_hosts_by_hand() -> None:
    """Two hosts of four: everyone, half and whole hosts, and one device of each host."""
    assert (
        GroupShape(size=8, stride=1),
        GroupShape(size=4, stride=1),
        GroupShape(size=2, stride=1),
        GroupShape(size=2, stride=4),
    ) == group_shapes(num_hosts=2, devices_per_host=4)


@given(hosts=st.integers(1, 12), devices=st.integers(1, 8))
def test_every_shape_fits_the_cluster(hosts: int, devices: int) -> None:
    """Default shapes always divide the slots, and a single slot has none."""
    shapes = group_shapes(num_hosts=hosts, devices_per_host=devices)

    assert all(shape.groups(hosts * devices) for shape in shapes)
    assert (hosts * devices == 1) == (shapes == ())


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
