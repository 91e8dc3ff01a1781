"""Verdicts about a job of many launchers."""

from __future__ import annotations

import random
import socket
import struct
from typing import Any

import pytest

from benchmarks.bench_launchers import is_well, late
from benchmarks.launchers import firewall
from benchmarks.launchers.faults import CASES, ENDS_S, Case

KILLED, CUT, TOLD = (next(case for case in CASES if name in case.name) for name in ("5 % killed", "halves", "all told"))


@pytest.mark.parametrize(
    ("case", "found", "expected"),
    [
        (KILLED, {"recovered_s": 3.5}, False),
        (KILLED, {"recovered_s": 60.0}, True),
        (KILLED, {"recovered_s": 60.0, "last_worker_s": 59.5}, True),
        (KILLED, {"recovered_s": None, "last_worker_s": None}, True),
        (KILLED, {"recovered_s": 3.5, "ends_s": ENDS_S + 1}, True),
        (KILLED, {"recovered_s": 3.5, "reached": False}, True),
        (CUT, {"recovered_s": 20.5, "last_worker_s": 20.0, "hit_ends_s": 45.0}, False),
        (CUT, {"recovered_s": 20.5, "last_worker_s": 20.0, "hit_ends_s": 400.0}, True),
        (TOLD, {"recovered_s": None, "last_worker_s": None}, False),
    ],
)
def test_a_run_that_misses_a_deadline_is_late(case: Case, found: dict[str, Any], expected: bool) -> None:
    """A recovery, an end, or the end of the smaller part of a cut network."""
    usual = {"size": 64, "last_worker_s": 3.0, "ends_s": 1.0, "hit_ends_s": 5.0, "reached": True}

    assert expected == late(case, usual | found)


def test_a_fault_of_any_kind_makes_a_run_bad() -> None:
    """A run whose verdict is missing is bad too."""
    well: dict[str, Any] = {"late": False, "false": [], "hung": [], "left": [], "trouble": [], "split": False}

    assert is_well(well)
    assert not any(is_well(well | {name: ["h001"]}) for name in well)
    assert not is_well({})


def test_hosts_that_are_hit_are_as_many_as_the_case_says() -> None:
    """At least one; the first host only if the case names it."""
    draw = random.Random(0)
    hit = {case.name: case.hosts(64, draw) for case in CASES}

    assert (1, 3, 13, 4, 32) == tuple(
        len(hit[name])
        for name in (
            "1 % killed",
            "5 % killed",
            "20 % killed",
            "first host and 5 % killed",
            "the network cut into halves",
        )
    )
    assert all((0 in hit[case.name]) == (case.first or case.share == 1) for case in CASES)


def test_a_firewall_answers_only_packets_between_cut_parts() -> None:
    """The answer to a first packet (SYN) acknowledges it, as RFC 9293 requires of RST, and has valid checksums."""
    source, target = (socket.inet_aton(one) for one in ("10.77.0.1", "10.77.2.3"))
    outer = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 40, 0, 0, 64, firewall.TCP, 0, source, target)
    frame = b"routerhost01\x08\x00" + outer + struct.pack("!HHIIBBHHH", 4000, 29400, 7, 0, 0x50, firewall.SYN, 0, 0, 0)

    answer = firewall.reset(frame, {"10.77.0>10.77.2"})
    ports = struct.unpack("!HHIIBB", answer[34:48])
    pseudo = answer[26:34] + struct.pack("!BBH", 0, firewall.TCP, 20)

    assert (b"host01router", target + source) == (answer[:12], answer[26:34])
    assert (29400, 4000, 0, 8, 0x50, firewall.RST | firewall.ACK) == ports
    assert [b"\0\0"] * 2 == [firewall.checksum(part) for part in (answer[14:34], pseudo + answer[34:])]
    assert b"" == firewall.reset(frame, {"10.77.2>10.77.0"})
