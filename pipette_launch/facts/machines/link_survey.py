"""Where the figure of each link between hosts comes from, how much it scatters, and how many rounds were measured."""

# H = hosts, row sends to column.

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipette_launch.errors import FactError
from pipette_launch.facts.files import to_plain

Origin = Literal["measured", "again", "estimated", "cached"]
ORIGINS: dict[str, Origin] = {"m": "measured", "a": "again", "e": "estimated", "c": "cached"}
"""`again`: the link looked slow and was measured twice; the better value counts."""
UNSTABLE_SPREAD = 0.10
"""A spread above this makes a value unstable (pyperf's rule)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RailRates:
    """What each device of a host got, all of them sending to their counterparts of another host at once."""

    source: int
    target: int
    bytes_per_s: tuple[float, ...]
    """D numbers; 0 = not measured."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LinkSurvey:
    """Where each entry of `Cluster.between_hosts` comes from."""

    spread_HH: NDArray[np.float64]
    """Median absolute deviation over the median, of the largest message; 0 where nothing was measured."""
    origin_HH: tuple[str, ...]
    """H rows of H letters, see `ORIGINS`; `-` on the diagonal."""
    rails: tuple[RailRates, ...] = ()
    """Of hosts with several devices; among very many pairs only those whose rails differ."""
    rounds: int = 0
    """Rounds between hosts in which everything was first measured."""
    rounds_again: int = 0
    """Rounds in which suspects were measured a second time."""

    def __post_init__(self) -> None:
        size = len(self.origin_HH)
        spread = np.array(self.spread_HH, dtype=np.float64)
        if spread.shape != (size, size) or not (spread >= 0).all():
            raise FactError(f"survey: spread_HH must be {size} x {size} numbers and none below 0")
        spread.flags.writeable = False
        object.__setattr__(self, "spread_HH", spread)
        for host, row in enumerate(self.origin_HH):
            links = row[:host] + row[host + 1 :]
            if len(row) != size or row[host] != "-" or not set(links) <= set(ORIGINS):
                raise FactError(
                    f"survey: origin_HH[{host}] must be {size} letters, '-' at {host} and else of {''.join(ORIGINS)}, "
                    f"got {row!r}"
                )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LinkSurvey) and to_plain(self) == to_plain(other)

    def __hash__(self) -> int:
        return hash(self.origin_HH)

    def origin(self, source: int, target: int) -> Origin:
        """Where the figure of the link from host `source` to host `target` comes from."""
        return ORIGINS[self.origin_HH[source][target]]
