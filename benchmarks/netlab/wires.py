"""The commands that make hosts and links out of namespaces, veth pairs and token buckets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path as FilePath

from benchmarks.netlab.topology import Path, Topology

OWN = "own0"
"""Device with a host's address; gloo and NCCL get its name."""
MTU = 9000
BURST_S = 0.001
MIN_BURST_BYTES = 16 << 10
QUEUE_MS = 100
CONGESTION_CONTROL = FilePath("/proc/sys/net/ipv4/tcp_congestion_control")
CONGESTION_CONTROLS = ("cubic", "reno")


def address(index: int) -> str:
    """Return the address of a host. Its last number has three digits, because torch sorts addresses as text."""
    return f"10.77.0.{101 + index}"


def device(peer: str) -> str:
    """The device that leads to a peer."""
    return f"to-{peer}"


def make(topology: Topology, homes: Mapping[str, str]) -> list[str]:
    """Commands for `ip` that make all namespaces, and all wires without a latency.

    Args:
        topology: what to make.
        homes: the namespace of each host.

    """
    slow = set(delayed_pairs(topology))
    lines = [f"netns add {home}" for home in homes.values()]
    # The address sits on a wire of its own: gloo takes 127.0.0.1 when told to use the loopback device.
    lines += [f"link add name {OWN} netns {home} type veth peer name own1 netns {home}" for home in homes.values()]
    lines += [
        f"link add name {device(b)} netns {homes[a]} type veth peer name {device(a)} netns {homes[b]}"
        for a, b in topology.pairs()
        if (a, b) not in slow
    ]
    return lines


def delayed_pairs(topology: Topology) -> list[tuple[str, str]]:
    """Pairs of hosts whose wire has a latency; these are made of taps (`delay`)."""
    return [(a, b) for a, b in topology.pairs() if topology.paths[a, b].latency_ms or topology.paths[b, a].latency_ms]


def furnish(topology: Topology, host: str) -> list[str]:
    """Commands for `ip` inside one host's namespace: addresses, and a route to every peer by its own wire."""
    peers = [other.name for other in topology.hosts if other.name != host]
    # No link-local addresses: nothing here speaks IPv6, and neighbour discovery would disturb measurements.
    lines = [f"link set {name} addrgenmode none" for name in (OWN, "own1", *map(device, peers))]
    lines += ["link set lo up", "link set own1 up", f"link set {OWN} up"]
    lines.append(f"addr add {address(topology.index(host))}/32 dev {OWN}")
    for peer in peers:
        lines += [f"link set {device(peer)} mtu {MTU}", *connect(topology, host, peer)]
    return lines


def connect(topology: Topology, host: str, peer: str) -> list[str]:
    """Commands for `ip` inside `host` that bring its end of a wire up; a wire that goes down loses its route."""
    ours, theirs = address(topology.index(host)), address(topology.index(peer))
    return [f"link set {device(peer)} up", f"route replace {theirs}/32 dev {device(peer)} src {ours}"]


def disconnect(peer: str) -> list[str]:
    """Return the commands for `ip` that take an end of a wire down: packets vanish without an error."""
    return [f"link set {device(peer)} down"]


def free(peer: str) -> str:
    """Return the command for `tc` that removes the rate towards a peer, with its queue."""
    return f"qdisc del dev {device(peer)} root"


def limit(peer: str, path: Path) -> str:
    """The command for `tc` that sets the rate towards a peer."""
    rate_bytes_per_s = path.rate_mbit * 1e6 / 8
    # A burst passes at once and would flatter small messages; below some milliseconds' worth a late timer loses tokens.
    burst_bytes = max(MIN_BURST_BYTES, int(rate_bytes_per_s * BURST_S))
    rate = f"rate {path.rate_mbit * 1000:.0f}kbit burst {burst_bytes}b latency {QUEUE_MS}ms"
    return f"qdisc add dev {device(peer)} root tbf {rate}"


def limits(topology: Topology, host: str) -> list[str]:
    """The commands for `tc` that set the rates towards all peers."""
    return [limit(peer, path) for peer, path in outgoing(topology, host)]


def outgoing(topology: Topology, host: str) -> Iterator[tuple[str, Path]]:
    """All peers of a host, and the paths towards them."""
    return ((b, path) for (a, b), path in topology.paths.items() if a == host)


def names(topology: Topology) -> str:
    """Return the text of /etc/hosts on every host."""
    # torch listens on IPv6 sockets, to which IPv4 peers look mapped; without a name it warns of each.
    known = [
        f"{before}{address(index)} {host.name}"
        for index, host in enumerate(topology.hosts)
        for before in ("", "::ffff:")
    ]
    return "\n".join(["127.0.0.1 localhost", "::1 localhost", "::ffff:127.0.0.1 localhost", *known]) + "\n"


def tune() -> None:
    """Inside a host: the congestion control of nearly every cluster, or its forerunner where a namespace may not.

    bbr, which some kernels prefer, all but stops every ten seconds to measure its round trip, and where a ring waits
    for its neighbours it takes the pauses for the link: one process in four ran at six tenths of the rate to its end.
    """
    for name in CONGESTION_CONTROLS:
        with suppress(OSError):
            CONGESTION_CONTROL.write_text(name)
            return
