"""A problem of a host, a device or a link: its figure, the figure of its peers, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

VerdictKind = Literal[
    "busy",
    "throttled",
    "ecc",
    "remapped-rows",
    "nvlink",
    "pcie",
    "nic",
    "slow-device",
    "slow-host",
    "slow-link",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One problem: a figure that differs from that of the peers, or from what it should be."""

    kind: VerdictKind
    host: str
    """The node with the problem; of a link, the sender."""
    figure: str
    """What was seen, with its unit: `2 of 18 NVLinks are up`."""
    device: str = ""
    """UUID; empty where the whole host has the problem."""
    other_host: str = ""
    """Of a link, the receiver; else empty."""
    peers: str = ""
    """The figure of its peers, `18`; empty where no comparison is needed."""
    advice: str = ""
    """What to do, `exclude it with --exclude=node17`."""
    is_sick: bool = True
    """Whether the launcher may leave the host out because of it; else it is only shown."""

    def words(self) -> str:
        """Say it in one sentence."""
        where = f"{self.host} -> {self.other_host}" if self.other_host else self.host
        compared = f", its peers {self.peers}" if self.peers else ""
        advice = f"; {self.advice}" if self.advice else ""
        return f"{where}{' ' + self.device if self.device else ''}: {self.figure}{compared}{advice}"
