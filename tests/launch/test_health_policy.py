"""The policy for sick hosts, from verdicts alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipette_launch.facts.health import Verdict
from pipette_launch.launch.health_policy import Policy, Ruling, hosts_to_leave, measured

HOSTS = ("node0", "node1", "node2")


def verdict(host: str, **changes: Any) -> Verdict:
    """Something is amiss with a host."""
    return Verdict(**{"kind": "busy", "host": host, "figure": "61 GB of 80 GB are held", **changes})


def link(host: str, other: str) -> Verdict:
    """The link between two hosts is slow."""
    return verdict(host, kind="slow-link", figure="1 GB/s", other_host=other)


def ruled(*verdicts: Verdict, policy: Any = "exclude", least: int = 2, hinders: str = "", **more: Any) -> Ruling:
    """Return the ruling for three hosts."""
    return Policy(on_sick=policy, least_nodes=least, **more).rule(verdicts, HOSTS, lambda _: hinders)


def test_healthy_hosts_and_notes_change_nothing() -> None:
    """A verdict that is only worth a note is nobody's fault, and neither is one about a host that is not there."""
    for policy in ("warn", "exclude", "fail"):
        assert Ruling() == ruled(verdict("node1", is_sick=False), verdict("node9"), policy=policy)


def test_by_default_it_is_said() -> None:
    """The job goes on with all hosts."""
    assert Ruling(reasons=("node1: 61 GB of 80 GB are held",)) == ruled(verdict("node1"), policy="warn")


def test_fail_stops() -> None:
    """With the sentence."""
    ruling = ruled(verdict("node1"), policy="fail")

    assert (True, ()) == (ruling.stops, ruling.leave_out)
    assert "node1: 61 GB of 80 GB are held" == ruling.reasons[0]


def test_exclude_leaves_the_sick_out() -> None:
    """As far as --nnodes allows."""
    ruling = ruled(verdict("node1"))

    assert (("node1",), False) == (ruling.leave_out, ruling.stops)
    assert "node1 runs no workers and waits on standby, because of --pipette-on-sick=exclude" == ruling.reasons[-1]


@pytest.mark.parametrize(
    ("verdicts", "more", "expected"),
    [
        (
            [verdict("node1")],
            {"least": 3},
            (
                "node1 cannot be excluded: 2 of 3 nodes would be left, and --nnodes needs at least 3; "
                "start with --nnodes 2:3, or keep it out of the job with sbatch --exclude=node1; "
                "the job goes on with it"
            ),
        ),
        (
            [verdict("node1")],
            {"least": 3, "is_static": True},
            "start with --rdzv-backend c10d --nnodes 2:3, or keep it out",
        ),
        (
            [verdict("node1"), verdict("node2")],
            {},
            (
                "node1, node2 cannot be excluded: 1 of 3 nodes would be left, and --nnodes needs at least 2; "
                "start with --nnodes 1:3, or keep them out of the job with sbatch --exclude=node1,node2"
            ),
        ),
        (
            [verdict(host) for host in HOSTS],
            {"least": 1},
            "no healthy node would be left; add a spare node, or keep them out",
        ),
        (
            [verdict("node1")],
            {"hinders": "--global-batch-size 9 is no multiple of 2"},
            "node1 cannot be excluded: --global-batch-size 9 is no multiple of 2; add a spare node, or",
        ),
    ],
)
def test_where_nothing_can_be_left_out_it_is_said_why(verdicts: list[Verdict], more: Any, expected: str) -> None:
    """The sentence says what to do at the next start; the job goes on as under `warn`."""
    ruling = ruled(*verdicts, **more)

    assert ((), False) == (ruling.leave_out, ruling.stops)
    assert expected in ruling.reasons[-1]
    assert len(verdicts) + 1 == len(ruling.reasons)


def test_of_a_slow_link_one_end_is_left_out() -> None:
    """The end of the most slow links; no second one where the first is out for another reason."""
    assert ("node1",) == hosts_to_leave([link("node0", "node1"), link("node1", "node2"), link("node2", "node1")], HOSTS)
    assert ("node2",) == hosts_to_leave([link("node0", "node2"), link("node2", "node0")], HOSTS)
    assert ("node0",) == hosts_to_leave([link("node0", "node2"), verdict("node0")], HOSTS)


@given(st.sets(st.sampled_from([*itertools.permutations("abcdef", 2)])), st.sets(st.sampled_from("abcdef")))
def test_no_slow_link_is_left(slow: set[tuple[str, str]], sick: set[str]) -> None:
    """Every sick host is out, and one end of every slow link."""
    out = hosts_to_leave([*map(verdict, sorted(sick)), *(link(*ends) for ends in sorted(slow))], "abcdef")

    assert sick <= {*out}
    assert all({*ends} & {*out} for ends in slow)
    assert len(out) == len({*out}) <= len(sick) + len({frozenset(ends) for ends in slow})


def test_what_a_driver_says_is_asked_anew() -> None:
    """Only what takes a warm-up to find is remembered."""
    slow = verdict("node1", kind="slow-device")

    assert (slow,) == measured([verdict("node1"), slow])
