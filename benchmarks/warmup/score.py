"""Compares the measurements of a warm-up with the known rates and faults of a network. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from benchmarks.netlab.topology import Topology
from pipette_launch.facts import Measurements
from pipette_launch.facts.health import Verdict

APART = 1.15
"""Rates that differ by a smaller factor are a tie: their order does not count."""
TOLERANCE = 0.10
BITS_PER_MBIT = 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One direction of a link: the set rate and the measured bandwidth."""

    sender: str
    receiver: str
    set_mbit: float
    got_mbit: float

    @property
    def error(self) -> float:
        """Relative error of the measurement; negative = too slow."""
        return self.got_mbit / self.set_mbit - 1

    def words(self) -> str:
        """Describe it on one line."""
        return (
            f"{self.sender} to {self.receiver}: set {self.set_mbit:g}, measured {self.got_mbit:.0f} ({self.error:+.1%})"
        )


def compared(topology: Topology, measurements: Measurements) -> list[Compared]:
    """Compare the measured matrix with the topology, by host names.

    The matrix has the bandwidth of each slot while all slots of its host send; here they share one wire.
    """
    places = {host.name: index for index, host in enumerate(measurements.cluster.hosts)}
    bandwidth = measurements.cluster.between_hosts.bandwidth_bytes_per_s
    return [
        Compared(
            sender=a,
            receiver=b,
            set_mbit=topology.paths[a, b].rate_mbit / topology.host(a).slots,
            got_mbit=float(bandwidth[places[a]][places[b]]) * 8 / BITS_PER_MBIT,
        )
        for a, b in topology.directions()
    ]


def outside(rows: Sequence[Compared], tolerance: float = TOLERANCE) -> list[Compared]:
    """Return the links whose error exceeds the tolerance, worst first."""
    return sorted((row for row in rows if abs(row.error) > tolerance), key=lambda row: -abs(row.error))


def ranked(rows: Sequence[Compared], apart: float = APART) -> tuple[int, list[tuple[Compared, Compared]]]:
    """Return the number of link pairs whose rates are apart, and those pairs that were measured in the wrong order.

    The half per cent is for rates that were rounded to whole Mbit/s.
    """
    apart_pairs = [
        (slow, fast)
        for slow, fast in (sorted(pair, key=lambda row: row.set_mbit) for pair in combinations(rows, 2))
        if fast.set_mbit >= slow.set_mbit * (apart - 0.005)
    ]
    return len(apart_pairs), [(slow, fast) for slow, fast in apart_pairs if slow.got_mbit >= fast.got_mbit]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """An injected fault: a throttled link, or a slowed host if there is no peer."""

    host: str
    peer: str = ""
    one_way: bool = False
    level: float
    """Mbit/s of the link, or the share of the processor that the host keeps."""

    def words(self) -> str:
        """Describe it on one line."""
        if not self.peer:
            return f"{self.host} gets {self.level:.0%} of its processor"
        return f"{self.host} {'to' if self.one_way else 'and'} {self.peer} at {self.level:g} Mbit/s"


def names_fault(verdict: Verdict, fault: Fault) -> bool:
    """Return whether a verdict names this fault: the host's device, or the link in a slow direction."""
    if not fault.peer:
        return verdict.kind in ("slow-device", "slow-host") and verdict.host == fault.host
    ways = [(fault.host, fault.peer)] + ([] if fault.one_way else [(fault.peer, fault.host)])
    return verdict.kind == "slow-link" and (verdict.host, verdict.other_host) in ways


def judged(verdicts: Sequence[Verdict], faults: Sequence[Fault]) -> tuple[list[Fault], list[Verdict]]:
    """Return the faults that no verdict names, and the faulty verdicts that name no injected fault."""
    missed = [fault for fault in faults if not any(names_fault(verdict, fault) for verdict in verdicts)]
    false = [
        verdict for verdict in verdicts if verdict.is_sick and not any(names_fault(verdict, fault) for fault in faults)
    ]
    return missed, false
