"""A fenced host has so much processor, alone on the machine or beside busy others."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import time

import psutil
import pytest
from labs import needs_lab

from benchmarks.netlab import Lab, LabError, fence, topology
from benchmarks.netlab.awake import awake
from benchmarks.netlab.brake import GROUPS, Brake
from benchmarks.netlab.topology import Host, Topology, TopologyError, parse

BUSY = """
import time
began_s, computed_s = time.monotonic(), time.process_time()
while time.process_time() - computed_s < 0.4:
    pass
print(time.monotonic() - began_s, flush=True)
"""
IDLE = os.SCHED_IDLE
needs_groups = pytest.mark.skipif(not GROUPS.exists(), reason=f"netlab: no control groups of version 1 in {GROUPS}")


def fenced(num_hosts: int, cores_per_slot: float, **more: int) -> Topology:
    """Hosts that are all alike."""
    made = topology.uniform(num_hosts, rate_mbit=100, **more)
    return dataclasses.replace(made, cores_per_slot=cores_per_slot)


def test_the_file_says_so() -> None:
    """The key is read, absent by default, and more than nothing."""
    assert 0.45 == parse({"hosts": 2, "cores_per_slot": 0.45}).cores_per_slot
    assert parse({"hosts": 2}).cores_per_slot is None
    with pytest.raises(TopologyError, match=r"cores_per_slot=0 must be above 0"):
        parse({"hosts": 2, "cores_per_slot": 0})


def test_hosts_keep_to_the_fewest_cores_that_hold_them() -> None:
    """Two hosts of 0.45 share a core; one of two whole slots has two; larger hosts choose first."""
    assert {"n0": (0,), "n1": (1,), "n2": (0,), "n3": (1,)} == fence.places(fenced(4, 0.45), [0, 1])
    assert {"n0": (4,), "n1": (5,)} == fence.places(fenced(2, 0.5, slots=2), [4, 5])
    mixed = parse({"cores_per_slot": 0.5, "host": [{"name": "a"}, {"name": "b", "slots": 3}]})
    assert {"a": (2,), "b": (0, 1)} == fence.places(mixed, [0, 1, 2])


@pytest.mark.parametrize(("num_hosts", "cores_per_slot"), [(4, 0.55), (3, 0.6), (1, 2.5)])
def test_a_fence_larger_than_the_machine_is_refused(num_hosts: int, cores_per_slot: float) -> None:
    """Quotas that cannot all be had at once would be no promise."""
    with pytest.raises(TopologyError, match="make it smaller"):
        fence.places(fenced(num_hosts, cores_per_slot), [0, 1])


def test_small_quotas_have_longer_periods() -> None:
    """The kernel takes no quota below a millisecond; the share of the processor is kept."""
    assert (2250, 5000) == fence.timing_us(0.45, 5000)
    assert (1000, 10_000) == fence.timing_us(0.1, 5000)


def test_no_fence_without_control_groups() -> None:
    """Stopping and continuing processes would be another experiment."""
    with pytest.raises(LabError, match="leave cores_per_slot out"):
        Brake(fenced(1, 0.5), {"n0": "none"}, by_signals=True)


@pytest.mark.processes
@pytest.mark.timeout(120)
@needs_lab
@needs_groups
def test_a_host_is_as_fast_beside_busy_ones_as_alone() -> None:
    """Nobody is faster than the fence says, as anyone would be without it, nor much slower beside busy hosts."""

    def wall_s(busy: int) -> float:
        """Let so many hosts work; how long the first of them took."""
        jobs = [
            lab.run(host, [sys.executable, "-I", "-S", "-c", BUSY], stdout=subprocess.PIPE) for host in lab.hosts[:busy]
        ]
        first_s, *_ = [float(job.communicate(timeout=60)[0]) for job in jobs]
        return first_s

    def least_s(busy: int, promised_s: float) -> float:
        """The least of as many looks as it takes: a busy machine makes a host slower, never faster."""
        looks_s = [wall_s(busy)]
        deadline_s = time.monotonic() + 20
        while min(looks_s) > 1.03 * promised_s and time.monotonic() < deadline_s:
            looks_s.append(wall_s(busy))
        return min(looks_s)

    promised_s = 0.4 / 0.35
    with Lab(fenced(4, 0.35)) as lab:
        alone_s, beside_s = least_s(1, promised_s), least_s(4, promised_s)
        lab.slow("n0", 0.5)
        slowed_s = least_s(4, 2 * promised_s)
    print(f"0.4 s of processor: {alone_s:.3f} s alone, {beside_s:.3f} s beside busy hosts, {slowed_s:.3f} s slowed")

    # Without a fence: 0.4 s alone, 0.8 s beside. What neighbours of a virtual machine take lies in the upper bound.
    assert 0.98 * promised_s < alone_s < 1.25 * promised_s
    assert 0.98 * promised_s < beside_s < 1.25 * promised_s
    assert 0.98 * 2 * promised_s < slowed_s < 1.25 * 2 * promised_s


@pytest.mark.processes
@pytest.mark.timeout(60)
@needs_lab
@needs_groups
def test_a_stopped_lab_leaves_no_fence() -> None:
    """An error on the way in takes everything back."""
    with pytest.raises(TopologyError, match="make it smaller"), Lab(fenced(2, 64.0)):
        pass

    with Lab(Topology(hosts=(Host(name="solo"),), cores_per_slot=0.3)) as lab:
        began_s = time.monotonic()
        code = lab.run("solo", ["true"]).wait(timeout=30)
        assert (0, True) == (code, time.monotonic() - began_s < 20)


@needs_lab
@needs_groups
@pytest.mark.processes
@pytest.mark.timeout(60)
def test_the_cores_of_a_fence_never_sleep() -> None:
    """Each has company in the scheduler's idle class while the laboratory is there, and none after it."""

    def idlers() -> list[psutil.Process]:
        return [one for one in psutil.Process().children(recursive=True) if os.sched_getscheduler(one.pid) == IDLE]

    def settled() -> list[psutil.Process]:
        """Those that have gone to their core: they are in the idle class a moment before."""
        return [one for one in idlers() if len(one.cpu_affinity()) == 1]

    with Lab(fenced(2, 0.4)):
        deadline_s = time.monotonic() + 20
        while len(settled()) < len(os.sched_getaffinity(0)) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        cores = sorted(core for one in settled() for core in one.cpu_affinity())

    assert sorted(os.sched_getaffinity(0))[: len(cores)] == cores
    assert 2 == len(cores)
    assert [] == idlers()


@pytest.mark.timeout(60)
def test_awake_cores_need_their_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing is named, and where it comes from."""
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "setpriv" else tool)

    with pytest.raises(LabError, match="needs setpriv, of util-linux"), awake([0]):
        pass
