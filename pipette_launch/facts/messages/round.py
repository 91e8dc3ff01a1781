"""What agents tell each other when a rendezvous round begins, and what is then decided for all of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import ClassVar, Literal

from pipette_launch.errors import FactError
from pipette_launch.facts.health.condition import DeviceCondition
from pipette_launch.facts.machines.cluster import Host
from pipette_launch.facts.messages.failure import Failure
from pipette_launch.facts.results.plan import Choice, Plan
from pipette_launch.facts.results.shortage import Shortage

AttemptEnd = Literal["none", "before-first-iteration", "after-first-iteration", "done"]
"""How an attempt at training ended on one node; `none` before the first, `done` where all its workers ended well."""

MOST_SLOTS = 1 << 12
"""Of one host; no machine has nearly as many devices or cores to share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRecord:
    """One agent's introduction: its machine, and how its last attempt at training ended."""

    KIND: ClassVar[str] = "node"
    SCHEMA_VERSION: ClassVar[int] = 1

    token: str
    """Names the agent for as long as it lives; host names may be equal."""
    host: Host | None
    """None where the inventory failed; `trouble` then says why."""
    trouble: str
    num_slots: int
    node_rank: int
    """What `--node-rank` said under static rendezvous, else -1."""
    script_digest: str
    """Of the script's path and arguments: all nodes must have been given the same."""
    versions: dict[str, str]
    attempt: int
    """Index of the last attempt at training, -1 before the first."""
    verdict: AttemptEnd
    failure: Failure | None
    """Why that attempt ended; None when it did not fail on this node."""
    is_misuse: bool = False
    """Whether the trouble is that a flag asks for what this machine does not have."""
    conditions: tuple[DeviceCondition, ...] = ()
    """What the driver reports of this node's devices, in the order of the local ranks."""
    notes: tuple[str, ...] = ()
    """Troubles of this node that stop no plan, such as GPUs that are lost."""
    max_restarts: int = 0
    """--max-restarts."""
    iteration: int = 0
    """The last iteration that this node has seen in the output of its workers; 0 for none."""
    slowed: str = ""
    """How the steps have slowed down, where the user wants all machines measured again for it; else empty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What all agents of a round do next."""

    KIND: ClassVar[str] = "decision"
    SCHEMA_VERSION: ClassVar[int] = 1

    phase: Literal["warmup", "trial", "train", "stop"]
    tokens: tuple[str, ...]
    """The agents that run workers, in torchrun's own order."""
    hosts: tuple[str, ...]
    """Their host names, made unique."""
    num_slots: tuple[int, ...]
    standby: tuple[str, ...] = ()
    """The agents that are in the round and run no workers, in torchrun's own order."""
    standby_hosts: tuple[str, ...] = ()
    """Their host names."""
    plan: Plan | None = None
    attempt: int = 0
    """Which of the plan's candidates to run; past the last one, the user's own configuration."""
    trial: int = 0
    """In a trial, which one: 0 is the user's own configuration, i the plan's i-th contender."""
    iterations: int = 0
    """A trial is over after so many of them, warm-ups included."""
    checks_order: bool = False
    """In a trial: workers check NCCL on the GPUs in the order of the candidate, and train nothing."""
    proven: bool = False
    """The candidate has trained, so that a later failure does not mean that its plan cannot start."""
    script_arguments: tuple[str, ...] | None = None
    """What the script is given; None for the user's own words, untouched."""
    failures: tuple[Failure, ...] = ()
    """Why the candidates before this one could not start, one of each node."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that the workers get beside torchrun's own."""
    patches: tuple[str, ...] = ()
    """Replacements in megatron-core that the script runs under, by name."""
    reason: str = ""
    """The sentence that the user reads about this step; empty for none."""
    failed: bool = False
    """`stop` because something went wrong, not because the user asked for no more."""
    is_misuse: bool = False
    """It failed by what the user's own flags ask for: the exit code is argparse's."""
    restarts_left: int = 0
    """How many failures of the job are still forgiven. The loss of a host is none, nor is a plan that cannot start."""
    is_refitted: bool = False
    """The plan was made before and is fitted to these hosts; `reason` says which one it is."""
    iteration: int = 0
    """The last iteration that any node had seen when this was decided; 0 before the training."""
    shortage: Shortage | None = None
    """Which plan of such a job ran out of memory, the one predicted to need the least; None where none did."""
    probe_options: str = ""
    """Options of the warm-up, a document of the probe; empty in other phases."""

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.hosts) == len(self.num_slots):
            raise FactError(f"{len(self.tokens)} agents, {len(self.hosts)} hosts, {len(self.num_slots)} slot counts")
        if not all(0 <= count <= MOST_SLOTS for count in self.num_slots):
            raise FactError(f"num_slots must be from 0 to {MOST_SLOTS} each, got {max(self.num_slots, key=abs)}")
        if len(self.standby) != len(self.standby_hosts) or set(self.standby) & set(self.tokens):
            raise FactError(f"on standby are {len(self.standby)} agents of {len(self.standby_hosts)} other hosts")

        most = len(self.plan.contenders()) if self.plan and self.phase == "trial" else self.trial
        if self.attempt < 0 or not 0 <= self.trial <= most:
            raise FactError(f"attempt={self.attempt} or trial={self.trial} is none of the plan's")
        if self.plan and self.choice and self.phase in ("trial", "train") and not set(self.hosts) <= {*self.plan.hosts}:
            raise FactError(f"the plan is for {', '.join(self.plan.hosts)}, not for {', '.join(self.hosts)}")

    @property
    def choice(self) -> Choice | None:
        """What to run; None for the user's own configuration in torchrun's order."""
        if self.plan is not None and self.phase == "trial":
            return self.plan.contenders()[self.trial - 1] if self.trial else None
        candidates = self.plan.candidates() if self.plan else ()
        return candidates[self.attempt] if self.attempt < len(candidates) else None

    @property
    def key(self) -> str:
        """What names this phase among those of its round."""
        if self.checks_order:
            return f"order-{self.attempt}"
        return f"trial-{self.trial}" if self.phase == "trial" else self.phase

    def leaving_out(self, names: Collection[str]) -> Decision:
        """Return the decision with these of its hosts on standby."""
        stays = [host not in names for host in self.hosts]
        leaves = [host in names for host in self.hosts]
        return replace(
            self,
            tokens=tuple(compress(self.tokens, stays)),
            hosts=tuple(compress(self.hosts, stays)),
            num_slots=tuple(compress(self.num_slots, stays)),
            standby=(*self.standby, *compress(self.tokens, leaves)),
            standby_hosts=(*self.standby_hosts, *compress(self.hosts, leaves)),
        )

    @property
    def names(self) -> dict[str, str]:
        """The host of each agent, by token."""
        return dict(zip((*self.tokens, *self.standby), (*self.hosts, *self.standby_hosts), strict=True))

    def by_host(self, by_token: Mapping[str, str]) -> dict[str, str]:
        """Turn what is known of agents, by token, into what is known of their hosts; of others there is none."""
        names = self.names
        return {names[token]: text for token, text in by_token.items() if token in names}

    def tokens_of(self, hosts: Collection[str]) -> list[str]:
        """Return the agents of hosts that run workers."""
        return [token for token, host in zip(self.tokens, self.hosts, strict=True) if host in hosts]

    def place_of(self, token: str) -> int:
        """GROUP_RANK of an agent: those on standby stand behind the others."""
        return (*self.tokens, *self.standby).index(token)

    def ranks_of(self, token: str) -> tuple[int, ...]:
        """RANK of each local device of an agent, under this decision; none on standby."""
        if token in self.standby:
            return ()
        here = self.tokens.index(token)
        choice = self.choice if self.phase in ("trial", "train") else None
        if choice is None or self.plan is None:
            first = sum(self.num_slots[:here])
            return tuple(range(first, first + self.num_slots[here]))
        size = self.plan.devices_per_host
        host = self.plan.hosts.index(self.hosts[here])
        return choice.placement[host * size : (host + 1) * size]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialReport:
    """What all agents together observed of one trial."""

    KIND: ClassVar[str] = "trial-report"
    SCHEMA_VERSION: ClassVar[int] = 1

    step_s: tuple[float, ...]
    """The step times that the script printed, in their order; empty on nodes without the last rank."""
    failure: Failure | None
    """Why the trial ended early; None when it did not."""
    took_s: float
    """From the start of the workers until their devices were free again."""
