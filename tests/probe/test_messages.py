"""Tests of the messages between agent and warm-up workers, and of their waits."""

from __future__ import annotations

from pathlib import Path

import pytest
from facts_for_tests import tiny_cluster, tiny_job
from hypothesis import given
from hypothesis import strategies as st
from probe.workers import REFERENCE, tiny_options

from pipette_launch.defaults import START_S
from pipette_launch.errors import FactError
from pipette_launch.facts import files
from pipette_launch.probe.messages import WarmupOrder, WorkerResult, joined, wait_s


@pytest.mark.parametrize(
    ("num_ranks", "left_s", "expected"), [(2, 0.0, 60.125), (2, -9.0, 60.125), (4096, 0.0, 316.0), (4096, 30.0, 346.0)]
)
def test_a_wait_by_hand(num_ranks: int, left_s: float, expected: float) -> None:
    """A minute, a second for every 16 ranks, and the rest of the phase."""
    assert pytest.approx(expected) == wait_s(num_ranks, left_s)


def test_imports_may_take_three_minutes_in_a_small_job() -> None:
    """The wait for a start on a cold file system is longer than after a phase."""
    assert 180 < wait_s(8, START_S) < 181


@given(
    ranks=st.integers(1, 20_000), more=st.integers(0, 20_000), left_s=st.floats(-1e3, 1e4), later_s=st.floats(0, 1e3)
)
def test_more_ranks_and_more_work_are_waited_for_longer(ranks: int, more: int, left_s: float, later_s: float) -> None:
    """A wait never shrinks with ranks or remaining time, and never falls below the minimum."""
    assert 5.0 <= wait_s(ranks, left_s, least_s=5.0) <= wait_s(ranks + more, left_s + later_s, least_s=5.0)


def test_groups_of_two_hosts_by_hand(tmp_path: Path) -> None:
    """Two hosts of two: all slots, each host, and one device of each host."""
    groups = {one.name: one.groups for one in tiny_options(tmp_path, hosts=2, devices=2).dimensions()}

    assert {
        "4 x stride 1": ((0, 1, 2, 3),),
        "2 x stride 1": ((0, 1), (2, 3)),
        "2 x stride 2": ((0, 2), (1, 3)),
    } == groups
    assert "4 x stride 1" == next(iter(groups))


@given(hosts=st.integers(1, 12), devices=st.integers(1, 8))
def test_groups_of_a_dimension_cover_every_slot_once(hosts: int, devices: int) -> None:
    """All groups of a dimension can be timed together; a single slot has no dimension."""
    dimensions = tiny_options(Path("unused"), hosts=hosts, devices=devices).dimensions()

    for dimension in dimensions:
        assert list(range(hosts * devices)) == sorted(slot for group in dimension.groups for slot in group)
    assert (hosts * devices == 1) == (dimensions == ())


def test_options_survive_their_file(tmp_path: Path) -> None:
    """The worker reads the same order that the agent wrote."""
    options = tiny_options(tmp_path, hosts=2, devices=2)
    files.write(tmp_path / "options.json", options)

    assert options == files.read(tmp_path / "options.json", WarmupOrder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hosts": ()}, "equally many devices, got no hosts"),
        ({"hosts": (tiny_cluster(1, 1).hosts[0], tiny_cluster(1, 2).hosts[0])}, "node0: 1, node0: 2"),
        ({"cases": ()}, "at least one compute case"),
        ({"script": ()}, "needs the job's script"),
    ],
)
def test_bad_options_are_refused(changes: dict[str, object], message: str) -> None:
    """The error names each contradiction with its values."""
    fields = {
        "job": tiny_job(1),
        "hosts": tiny_cluster(1, 1).hosts,
        "cases": (REFERENCE,),
        "output": "out",
        "progress_dir": "progress",
        "message_sizes_bytes": (8, 64, 512),
        "script": ("train.py",),
    }

    with pytest.raises(FactError, match=message):
        WarmupOrder(**{**fields, **changes})  # type: ignore[arg-type]


def test_parts_of_a_result_are_joined() -> None:
    """Tuples are joined, and of single values the later counts."""
    first = WorkerResult(slot=1, notes=("a",), phase_s={"links": 1.0}, optimizer_s_per_parameter=5.0)
    second = WorkerResult(slot=1, notes=("b",), phase_s={"compute": 2.0}, optimizer_s_per_parameter=3.0)

    assert WorkerResult(
        slot=1, notes=("a", "b"), phase_s={"links": 1.0, "compute": 2.0}, optimizer_s_per_parameter=3.0
    ) == joined(first, second)
