"""Whoever can connect to the ports of a job cannot give it orders."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from agent.test_elastic import finish, free_port, seen, start, two_nodes
from torch.distributed import TCPStore

from pipette_launch.agent import store as agent_store
from pipette_launch.agent.signature import FILE, VARIABLE
from pipette_launch.agent.store import open_store
from pipette_launch.facts import files
from pipette_launch.facts.messages import Stop

HERE = Path(__file__).parent
REFUSED = "refused a message without this job's signature"
UNSIGNED = "messages between the nodes are not signed"

WAITS = """
import os, time
while not os.path.exists(os.environ['OUT'] + '/stranger-is-done'):
    time.sleep(0.05)
"""


def forged(folder: Path) -> Path:
    """A decision that ends the job."""
    path = folder / "forged.json"
    made = Stop(nodes=(), failed=True, reason="FORGED")
    path.write_text(files.dumps(made))
    return path


def play_stranger(folder: Path, port: int, agents: list[subprocess.Popen[str]]) -> dict[str, object]:
    """Let a stranger write to all stores once the warm-up's workers wait; return what it found."""
    words = [sys.executable, HERE / "stranger.py", port, forged(folder), *[agent.pid for agent in agents]]
    done = subprocess.run([*map(str, words)], check=True, capture_output=True, text=True, timeout=60)
    (folder / "stranger-is-done").touch()
    return dict(json.loads(done.stdout))


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(TCPStore, "list_keys"), reason="this torch cannot list the keys of a store")
def test_a_running_job_obeys_no_stranger(tmp_path: Path) -> None:
    """The job trains with the true plan, and each launcher prints one line about the first forged message."""
    port, started = free_port(), tmp_path / "started"
    table = {"warmup": f"open({str(started)!r} + __import__('os').environ['RANK'], 'w'){WAITS}", "placements": [[1, 0]]}
    flags = [word.replace("per-node=2", "per-node=1") for word in two_nodes(port)]
    agents = [start(tmp_path, table, {"alone": True}, *flags, node=node) for node in "ab"]
    while not all(Path(f"{started}{rank}").exists() for rank in range(2)):
        assert [None, None] == [agent.poll() for agent in agents], finish(*agents)
    found = play_stranger(tmp_path, port, agents)

    codes, text = finish(*agents)

    # Stores of two agents and of RANK 0's workers.
    assert {"addresses": ["127.0.0.1"] * 3, "rounds": 1, "tokens": 1} == found
    assert [0, 0] == codes, text
    assert {"0-0", "1-0"} == set(seen(tmp_path))
    assert "FORGED" not in text
    assert 2 == text.count(REFUSED), text
    assert UNSIGNED not in text


@pytest.mark.processes
def test_the_secret_is_nowhere_to_be_seen(tmp_path: Path) -> None:
    """Neither the output, the environment of the workers, a command line nor a file of the job contains it."""
    secret = "a-secret-that-nobody-else-knows"  # noqa: S105, it is the test's own
    script = "import os; print(dict(os.environ), open('/proc/self/cmdline').read())"
    environment = {**os.environ, VARIABLE: secret}
    (tmp_path / "table.json").write_text(json.dumps({"warmup": script}))
    (tmp_path / "script.py").write_text(script)
    words = [sys.executable, HERE / "drive.py", tmp_path / "table.json", "--nproc-per-node=1", tmp_path / "script.py"]
    paths = f"{HERE.parent.parent}:{HERE.parent}"
    environment |= {"OUT": str(tmp_path), "TMPDIR": str(tmp_path), "NODE": "a", "PYTHONPATH": paths}
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, env=environment, timeout=100, check=False)

    assert 0 == done.returncode, done.stderr
    assert "PYTHONPATH" in done.stdout
    assert secret not in done.stdout + done.stderr
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and secret in path.read_text(errors="replace")]


@pytest.mark.processes
def test_nodes_without_a_common_secret_work_and_say_so(tmp_path: Path) -> None:
    """One line of the first node names the other node and the remedy."""
    flags = [word.replace("per-node=2", "per-node=1") for word in two_nodes(free_port())]
    agents = []
    for node in "ab":
        folder = tmp_path / node
        folder.mkdir()
        (folder / FILE).write_text(f"the secret of the home of {node}\n")
        (folder / FILE).chmod(0o600)
        agents.append(start(folder, {}, {"alone": True}, *flags, node=node))

    codes, text = finish(*agents)

    assert [0, 0] == codes, text
    assert 1 == text.count(f"{UNSIGNED}, so strangers on the network can give orders: 127.0.0.1 has another secret")


# -- the address --------------------------------------------------------------------------------------------------


def answers_at(address: str, port: int) -> bool:
    """Return whether anything listens there."""
    try:
        socket.create_connection((address, port), timeout=2).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("address", "elsewhere"),
    [
        ("127.0.0.2", False),
        # A name may stand for several addresses, and an address may be forwarded to this machine.
        ("localhost", True),
        ("192.0.2.1", True),
    ],
)
def test_a_store_listens_at_the_address_of_its_node(address: str, *, elsewhere: bool) -> None:
    """Other interfaces of the machine do not reach it, if the address is one of the machine's own."""
    store = open_store(address)
    store.set("key", "value")

    assert elsewhere == answers_at("127.0.0.3", store.port)
    assert answers_at("127.0.0.1" if elsewhere else address, store.port)


def test_a_store_of_ipv6() -> None:
    """An address of the newer kind."""
    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    store = open_store("::1")
    store.set("key", "value")

    assert not answers_at("127.0.0.1", store.port)


def test_a_torch_whose_store_takes_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stores of torch 2.6 and 2.7 listen on all addresses, and no socket is left open."""
    ports: list[int] = []

    def refuses(address: str, port: int, *, master_listen_fd: int | None = None, **more: bool) -> TCPStore:
        if master_listen_fd is not None:
            ports.append(port)
            raise NotImplementedError("no socket\nC++ frames")
        return TCPStore(address, port, **more)

    monkeypatch.setattr(agent_store, "TCPStore", refuses)
    store = open_store("127.0.0.2")

    assert answers_at("127.0.0.3", store.port)
    assert not answers_at("127.0.0.2", *ports)
