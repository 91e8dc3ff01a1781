"""What agents tell each other about who they are, and what one says when it comes to a meeting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pipette_launch.errors import FactError
from pipette_launch.facts.messages.round import Decision, NodeRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One agent of a job, and where the store that it holds is reached."""

    KIND: ClassVar[str] = "member"
    SCHEMA_VERSION: ClassVar[int] = 1

    token: str
    """Names the agent for as long as it lives."""
    address: str
    port: int
    node_rank: int
    """What `--node-rank` said under static rendezvous, else -1."""

    def __post_init__(self) -> None:
        if not 0 < self.port < 1 << 16:
            raise FactError(f"port must be from 1 to 65535, got {self.port}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Members:
    """The agents of a round, in torchrun's own order: the first decides for all, and holds the store of the round."""

    KIND: ClassVar[str] = "members"
    SCHEMA_VERSION: ClassVar[int] = 1

    generation: str
    """Names the round; empty before the first."""
    members: tuple[Member, ...]
    cut: tuple[tuple[str, str], ...] = ()
    """Two agents each, by token, that do not reach each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """What an agent says when it comes to a meeting."""

    KIND: ClassVar[str] = "arrival"
    SCHEMA_VERSION: ClassVar[int] = 1

    meeting: int
    """Counts the meetings of this agent, so that an answer to an earlier arrival is not taken for this one's."""
    record: NodeRecord
    held: Decision | None
    """What the agent went by before, where whoever decides may not know it."""
    out_of_reach: tuple[str, ...] = ()
    """Other agents that it could not connect to, by token."""
