"""Laboratories of real namespaces: they have the rates of their file, and nothing is left of them."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path as FilePath

import pytest
from labs import needs_lab

from benchmarks.netlab import Lab, LabError, everywhere, leftovers, selfcheck, system, topology, wires
from benchmarks.netlab.brake import GROUPS, Brake
from benchmarks.netlab.topology import Host, Topology, parse

pytestmark = [pytest.mark.timeout(120), pytest.mark.processes, needs_lab]
ROOT = FilePath(__file__).parent.parent.parent
RATES = {
    "hosts": 3,
    "rate_mbit": 200,
    "link": [{"between": ["n0", "n1"], "rate_mbit": 50}, {"from": "n2", "to": "n0", "rate_mbit": 100}],
}
SPIN = """
import time
end_s = time.monotonic() + 1
while time.monotonic() < end_s:
    pass
print(time.process_time())
"""
OWNER = """
import sys, time
from benchmarks.netlab import Lab, topology
with Lab(topology.uniform(2, rate_mbit=100)) as lab:
    lab.run("n1", ["sleep", "1000"])
    lab.slow("n1", 0.5)
    while not lab.pids("n1"):
        time.sleep(0.01)
    print(lab._prefix, flush=True)
    time.sleep(1000)
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Three hosts with links of different rates."""
    with Lab(parse(RATES)) as made:
        yield made


def fastest(lab: Lab, ways: list[tuple[str, str]], least_mbit: float) -> dict[tuple[str, str], float]:
    """The best rate of each way in as many looks as it takes: a busy machine makes a link slower, never faster."""
    found = dict.fromkeys(ways, 0.0)
    deadline_s = time.monotonic() + 40
    while min(found.values()) < least_mbit and time.monotonic() < deadline_s:
        for one in selfcheck.measure(lab.topology, lab.within, ways):
            way = (one.sender, one.receiver)
            found[way] = max(found[way], one.got_mbit)
    return found


def left_of(prefix: str) -> list[str]:
    """Whatever still bears the name of a lab."""
    groups = [path.name for path in GROUPS.iterdir()] if GROUPS.exists() else []
    folders = [path.name for path in leftovers.FOLDER.iterdir()]
    return [name for name in (*system.namespaces(prefix), *groups, *folders) if name.startswith(prefix)]


def test_links_have_the_rates_of_the_file(lab: Lab) -> None:
    """Every direction of every link is within ten per cent of its rate, the slow one slow both ways."""
    readings = {(one.sender, one.receiver): one for one in lab.readings()}

    lab.check()
    assert lab.topology.paths.keys() == readings.keys()
    assert all(0.9 < one.ratio < 1.1 for one in readings.values()), readings
    assert readings["n2", "n0"].got_mbit < 0.7 * readings["n0", "n2"].got_mbit


def test_hosts_speak_as_clusters_do(lab: Lab) -> None:
    """No host controls congestion by bbr, whatever this machine prefers: rings would be slow by chance."""
    found = {lab.within(host, wires.CONGESTION_CONTROL.read_text).strip() for host in lab.hosts}

    assert found <= set(wires.CONGESTION_CONTROLS)


def test_a_throttled_link_is_slower_one_way_or_both(lab: Lab) -> None:
    """A throttled link has its new rate, which the check of the file's rates notices, until it is set back."""
    throttled = [("n1", "n2"), ("n2", "n1"), ("n0", "n2")]
    lab.throttle(("n1", "n2"), 120)
    lab.throttle(("n0", "n2"), 120, one_way=True)
    try:
        slow = fastest(lab, throttled, 108)
        other_way = fastest(lab, [("n2", "n0")], 90)
        with pytest.raises(LabError, match="n0 to n2: "):
            lab.check()
    finally:
        lab.throttle(("n1", "n2"), 200)
        lab.throttle(("n0", "n2"), 200, one_way=True)

    assert all(108 < rate < 132 for rate in slow.values()), slow
    assert 90 < other_way["n2", "n0"] < 110
    assert all(rate > 180 for rate in fastest(lab, throttled, 180).values())


def test_a_wire_may_take_time_each_way_its_own() -> None:
    """A round trip takes both latencies, whatever the direction; rates hold, and other wires are as fast as ever."""
    far = {"rate_mbit": 100, "latency": "far"}
    made = parse(
        {
            "hosts": 3,
            "rate_mbit": 100,
            "latency_ms": {"near": 0, "far": 5, "back": 1},
            "link": [{"between": ["n0", "n1"], **far}, {"from": "n1", "to": "n0", "latency": "back"}],
        }
    )
    with Lab(made) as lab:
        readings = {(one.sender, one.receiver): one for one in lab.readings()}
        prefix = lab._prefix

    assert 6 <= readings["n0", "n1"].round_trip_ms < 8
    assert 6 <= readings["n1", "n0"].round_trip_ms < 8
    assert 2 > readings["n0", "n2"].round_trip_ms
    assert all(one.fits(0.1) for one in readings.values()), readings
    assert [] == left_of(prefix)


def test_a_cut_link_is_silent_until_it_is_mended(lab: Lab) -> None:
    """Over a cut wire nobody can be reached, over the others everybody can."""

    def reaches(server: socket.socket) -> bool:
        try:
            with lab.within("n0", lambda: socket.create_connection(server.getsockname(), timeout=0.5)):
                return True
        except OSError:
            return False

    servers = {
        host: lab.within(host, lambda host=host: socket.create_server((lab.address(host), 0))) for host in lab.hosts
    }
    try:
        lab.cut(("n0", "n1"))
        cut = {host: reaches(server) for host, server in servers.items()}
        lab.mend(("n0", "n1"))
        mended = {host: reaches(server) for host, server in servers.items()}
    finally:
        for server in servers.values():
            server.close()

    assert {"n0": True, "n1": False, "n2": True} == cut
    assert {"n0": True, "n1": True, "n2": True} == mended


def test_hosts_know_themselves_and_each_other(lab: Lab, tmp_path: FilePath) -> None:
    """A host has its own name, finds others by theirs, and its folders are its own."""
    script = "import os, socket; print(socket.gethostname(), socket.gethostbyname('n2'), os.environ['TMPDIR'])"
    with (tmp_path / "out").open("w+") as out:
        codes = [lab.run(host, [sys.executable, "-c", script], stdout=out).wait() for host in ("n0", "n1")]
        out.seek(0)
        first, second = (line.split() for line in out)

    assert [0, 0] == codes
    assert (["n0", "10.77.0.103"], ["n1", "10.77.0.103"]) == (first[:2], second[:2])
    assert first[2] != second[2]


def test_a_command_runs_everywhere_and_the_first_failure_counts(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    """Output is marked by host, places are filled, the exit code is the first failure's, the rest is ended."""
    command = (
        'echo "{index} of {nnodes} at $PET_LOCAL_ADDR {not ours}"; '
        "[ {host} = n1 ] && exit 7; [ {host} = n0 ] || sleep 60"
    )

    began_s = time.monotonic()
    code, blamed = everywhere.run(lab, ["sh", "-c", command], patience_s=0.2)

    assert (7, "n1") == (code, blamed)
    assert time.monotonic() - began_s < 30
    lines = capfd.readouterr().out.splitlines()
    assert [f"[n{i}] {i} of 3 at 10.77.0.10{i + 1} {{not ours}}" for i in range(3)] == sorted(lines)


def test_a_killed_host_is_empty_and_its_peers_are_not(lab: Lab) -> None:
    """All processes of the host die, children in sessions of their own, too; nobody else's do."""
    doomed = lab.run("n2", ["sh", "-c", "setsid sleep 1000 & sleep 1000"])
    spared = lab.run("n1", ["sleep", "1000"])
    deadline_s = time.monotonic() + 10
    while len(lab.pids("n2")) < 3 and time.monotonic() < deadline_s:
        time.sleep(0.02)

    lab.kill("n2")
    try:
        assert -signal.SIGKILL == doomed.wait(timeout=5)
        assert [] == lab.pids("n2")
        assert spared.poll() is None
    finally:
        spared.kill()
        for peer in ("n0", "n1"):
            lab.mend(("n2", peer))


def test_unknown_links_and_hosts_are_named(lab: Lab) -> None:
    """A link that is not there is an error that says which hosts are."""
    with pytest.raises(LabError, match="no link n0 to n9; hosts are n0, n1, n2"):
        lab.cut(("n0", "n9"))


@pytest.mark.parametrize("by_signals", [False, True])
def test_a_slowed_host_computes_less(by_signals: bool) -> None:
    """A host held to a fifth of its processor gets little of it: by a quota, and by signals where there is none."""
    made = Topology(hosts=(Host(name="solo"),), paths={})

    with Lab(made) as lab:
        if by_signals:
            lab._brake = lab._stack.enter_context(Brake(made, lab._homes, by_signals=True))
        lab.slow("solo", 0.2)
        words = lab.slowed_by
        with lab.run("solo", [sys.executable, "-S", "-c", SPIN], stdout=subprocess.PIPE) as process:
            busy_s = float(process.communicate(timeout=30)[0])

    assert ("SIGSTOP" in words) == (by_signals or not GROUPS.exists())
    assert busy_s < 0.5


def test_an_exception_leaves_nothing() -> None:
    """However the block ends, processes, namespaces, groups and files are gone, and the exception goes on."""
    lab = Lab(topology.uniform(2, rate_mbit=100))

    def fail() -> None:
        with lab:
            lab.run("n0", ["sleep", "1000"])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()

    assert [-signal.SIGKILL] == [process.returncode for process in lab._processes]
    assert [] == left_of(lab._prefix)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing(number: signal.Signals) -> None:
    """An interrupt and SIGTERM unwind the lab before its process ends."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, cwd=ROOT, text=True, stderr=subprocess.DEVNULL
    ) as owner:
        assert owner.stdout is not None
        prefix = owner.stdout.readline().strip()
        assert 2 == len(system.namespaces(prefix))
        owner.send_signal(number)
        code = owner.wait(timeout=30)

    assert code != 0
    assert [] == left_of(prefix)


def test_the_next_lab_removes_a_killed_one_and_spares_a_living(lab: Lab) -> None:
    """SIGKILL lets nobody clean up; whoever comes next does, processes included, and touches no living lab."""
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, cwd=ROOT, text=True) as owner:
        assert owner.stdout is not None
        prefix = owner.stdout.readline().strip()
        owner.kill()
    orphans = [pid for name in system.namespaces(prefix) for pid in system.inhabitants(name)]

    with Lab(topology.uniform(1, rate_mbit=100)):
        left = left_of(prefix)

    assert orphans
    assert [] == left
    assert not any(FilePath(f"/proc/{pid}/ns/net").exists() for pid in orphans)
    assert 3 == len(system.namespaces(lab._prefix))
