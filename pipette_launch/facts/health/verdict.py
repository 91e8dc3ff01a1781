"""What was found amiss with a host, a device or a link: one sentence with figure, peers' figure and what to do."""

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
    """Something that is not as its peers are, or not as it should be."""

    kind: VerdictKind
    host: str
    """The node that it is about; of a link, the end that sends."""
    figure: str
    """What was seen, with its unit: `2 of 18 NVLinks are up`."""
    device: str = ""
    """UUID, empty where it is about the whole host."""
    other_host: str = ""
    """Of a link, the end that receives; else empty."""
    peers: str = ""
    """The same of its peers, `18`; empty where the figure speaks for itself."""
    advice: str = ""
    """What to do, `exclude it with --exclude=node17`."""
    is_sick: bool = True
    """Bad enough to act upon; else worth a note."""

    def words(self) -> str:
        """Say it in one sentence."""
        where = f"{self.host} -> {self.other_host}" if self.other_host else self.host
        compared = f", its peers {self.peers}" if self.peers else ""
        advice = f"; {self.advice}" if self.advice else ""
        return f"{where}{' ' + self.device if self.device else ''}: {self.figure}{compared}{advice}"
