"""A firewall that rejects TCP: it answers each packet with RST, as `iptables -j REJECT --reject-with tcp-reset` does.

`python -S firewall.py FROM>TO ...` runs in the namespace of the router. FROM and TO are the first three bytes of an
address, such as `10.77.0`. The kernel drops the packets themselves (`ip rule ... blackhole`), because kernels of small
virtual machines have no packet filter.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Collection

IPV4, TCP = 0x0800, 6
ETHERNET_BYTES = 14
FIN, SYN, RST, ACK = 1, 2, 4, 16


def main(cuts: Collection[str]) -> None:
    """Answer all packets between cut parts of the network, until this process is killed."""
    wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(IPV4))
    sys.stdout.write("up\n")
    sys.stdout.flush()
    while True:
        frame, (port, _, kind, *_) = wire.recvfrom(1 << 16)
        if kind != socket.PACKET_OUTGOING and (answer := reset(frame, cuts)):
            wire.sendto(answer, (port, 0))


def reset(frame: bytes, cuts: Collection[str]) -> bytes:
    """Return the RST that answers a TCP packet; empty for packets that pass, other protocols, and RST."""
    packet = frame[ETHERNET_BYTES:]
    head_bytes = (packet[0] & 15) * 4
    source, target = packet[12:16], packet[16:20]
    way = ">".join(socket.inet_ntoa(one).rpartition(".")[0] for one in (source, target))
    if packet[9] != TCP or way not in cuts:
        return b""
    segment = packet[head_bytes : int.from_bytes(packet[2:4], "big")]
    source_port, target_port, number, acknowledged, words, flags = struct.unpack("!HHIIBB", segment[:14])
    if flags & RST:
        return b""
    num_bytes = len(segment) - (words >> 4) * 4 + bool(flags & SYN) + bool(flags & FIN)
    numbers = (acknowledged, 0, RST) if flags & ACK else (0, (number + num_bytes) % (1 << 32), RST | ACK)
    answered = struct.pack("!HHIIBBHHH", target_port, source_port, numbers[0], numbers[1], 5 << 4, numbers[2], 0, 0, 0)
    pseudo = target + source + struct.pack("!BBH", 0, TCP, len(answered))
    answered = answered[:16] + checksum(pseudo + answered) + answered[18:]
    outer = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(answered), 0, 0, 64, TCP, 0, target, source)
    outer = outer[:10] + checksum(outer) + outer[12:]
    return frame[6:12] + frame[:6] + frame[12:14] + outer + answered


def checksum(data: bytes) -> bytes:
    """Return the checksum of IP and TCP over data of even length."""
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return struct.pack("!H", ~total & 0xFFFF)


if __name__ == "__main__":
    main(sys.argv[1:])
