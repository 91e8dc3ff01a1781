"""Contract with torch and the kernel: the ports that docs/reactions.md tells users to open."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("localhost", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize(("backend", "shares"), [("static", True), ("c10d", False)])
def test_torch_shares_the_port_of_a_static_rendezvous_only(backend: str, shares: bool) -> None:
    """Under c10d the agent of RANK 0 opens a store for the workers on another port, as ours does in each phase."""
    port = free_port()
    parameters = RendezvousParameters(
        backend=backend,
        endpoint=f"localhost:{port}",
        run_id="ports",
        min_nodes=1,
        max_nodes=1,
        local_addr="localhost",
        rank=0,
        **({"is_host": "true", "last_call_timeout": "1"} if backend == "c10d" else {}),
    )
    handler = get_rendezvous_handler(parameters)
    met = handler.next_rendezvous()
    handler.shutdown()

    assert shares == (port == met.bootstrap_store_info.master_port)


def test_stores_listen_in_the_kernels_range() -> None:
    """A store on port 0 gets an ephemeral port, whose range an administrator sets."""
    low, high = map(int, RANGE.read_text(encoding="ascii").split())
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    assert low <= store.port <= high
