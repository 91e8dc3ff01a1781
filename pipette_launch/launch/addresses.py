"""Addresses of this machine: which of them other nodes reach, and which names mean this machine."""

from __future__ import annotations

import ipaddress
import socket

import psutil


def own_address(host: str, port: int) -> str:
    """Return the address of this node's interface towards a host, by which other nodes reach this node.

    The result is this machine's name if no address towards the host is known.
    """
    if is_loopback(host):
        return "127.0.0.1"
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Connecting a datagram socket sends nothing; the kernel only looks up the route.
            probe.connect(target)
            address = str(probe.getsockname()[0])
    except (OSError, UnicodeError):
        return socket.getfqdn()
    # A host may resolve its own name to 127.0.1.1, which no other node can use.
    return socket.getfqdn() if is_loopback(address) else address


def can_bind(port: int) -> bool:
    """Return True if a store can open that listens on all addresses of this machine."""
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    try:
        with socket.create_server(("", port), family=family, dualstack_ipv6=is_dual):
            return True
    except OSError:
        return False


def is_loopback(host: str) -> bool:
    """Return True for `localhost` and for loopback addresses."""
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return host == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def loopback_of(host: str) -> str:
    """Return the loopback address that a host name or an address means on this machine; empty for other hosts."""
    if is_loopback(host):
        return host
    found = sorted(_found(host))
    return found[0] if found and all(map(is_loopback, found)) else ""


def is_here(host: str) -> bool:
    """Return True if a host name or address belongs to this machine; torch compares only the host name."""
    if is_loopback(host) or host in (socket.gethostname(), socket.getfqdn()):
        return True
    own = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    # Behind address translation, the address of this machine's name is on no interface.
    return bool(_found(host) & (own | _found(socket.gethostname())))


def _found(host: str) -> set[str]:
    """Return the addresses of a host name; empty if it has none."""
    try:
        return {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return set()
