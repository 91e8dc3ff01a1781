"""Why a worker or a trial ended early, as data: made where its output is read, matched by kind everywhere else."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import compress
from typing import ClassVar, Literal, TypeAlias

from pipette_launch.errors import FactError
from pipette_launch.facts.cluster import Host
from pipette_launch.facts.files import check_numbers
from pipette_launch.facts.health import DeviceCondition
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.measurements import Measurements
from pipette_launch.facts.plan import Choice, Plan, Shortage

FailureKind = Literal[
    "out-of-memory", "out-of-host-memory", "unknown-flags", "refused-flag", "missing", "exception", "other"
]
"""`out-of-memory`: of a GPU; `out-of-host-memory`: of the host or its cgroup.
`missing`: a file or module that is missing under every plan. `exception`: one that no layout is known to cause."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """One cause, and the rank that told it."""

    cause: str
    """One sentence for the user; empty where nothing is known."""
    kind: FailureKind = "other"
    flags: tuple[str, ...] = ()
    """Names of the flags that the script does not know or refuses, as `--seed`."""
    rank: int | None = None
    """RANK of the worker that ended; None where none did."""
    exit_code: int = 0
    """Of that worker; negative for the signal that ended it."""

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether the memory of the device or of the host was used up."""
        return self.kind in ("out-of-memory", "out-of-host-memory")

    @property
    def sentence(self) -> str:
        """Say what the user reads: the cause, behind the rank and how it ended."""
        if self.rank is None:
            return self.cause
        told = f"rank {self.rank} ended with {exit_words(self.exit_code)}"
        return f"{told}: {self.cause}" if self.cause else told


def exit_words(exit_code: int) -> str:
    """Return an exit code as people say it: `exit code 1`, `signal 9`."""
    return f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionRequest:
    """Ranks to execute: one for each pipeline rank named."""

    job: Job
    layout: Layout
    pp_ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutedParts:
    """Bytes on a rank at the moment of its peak, by what made them; together they are the peak."""

    weights: int = 0
    gradients: int = 0
    """Gradient buffers, with the padding of their buckets."""
    optimizer: int = 0
    """Master weights and states."""
    activations: int = 0
    """Made by the layers' forward, and kept for backward."""
    working: int = 0
    """Made during a backward: gradients of activations, and what recompute brings back."""
    embedding: int = 0
    """Micro-batches read from the data loader, and what the embedding makes."""
    logits: int = 0
    """Made by output layer and loss."""
    buffers: int = 0
    """Pipeline messages, and buffers that all layers share."""
    optimizer_step: int = 0
    """Temporaries of the optimizer step."""

    @property
    def total(self) -> int:
        """The peak."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutedMemory:
    """Bytes of tensors on one rank, each rounded up as CUDA's caching allocator does.

    Not in it: workspaces of libraries, context, communicators, fragmentation.
    """

    pp_rank: int
    weights: int
    gradients: int
    optimizer: int
    allocated_after_step: int
    """What is left when a step is over."""
    first_peak: int
    """The peak of the first iteration: its passes lack the optimizer's states, its step makes them."""
    peak: int
    """The most, the optimizer's states and its step included."""
    parts: ExecutedParts
    """The peak, split."""
    notes: tuple[str, ...]
    """In what the executed job differs from the real one, one sentence each."""

    @property
    def static(self) -> int:
        """What is there all the time."""
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionAnswer:
    """The ranks, as they were asked for; or why not."""

    ranks: tuple[ExecutedMemory, ...] = ()
    error: str | None = None


CollectiveKind: TypeAlias = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuringQuestion:
    """What is known so far of a job and of the machines, and how long an answer may take."""

    KIND: ClassVar[str] = "question"
    SCHEMA_VERSION: ClassVar[int] = 1

    job: Job
    measurements: Measurements
    """What was measured so far; what is still to come is empty."""
    budget_s: float
    """Seconds that the search for plans may take."""

    def __post_init__(self) -> None:
        check_numbers(self, "budget_s", limit=0, above=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dimension:
    """Groups of slots that communicate at the same time, so they are measured at the same time."""

    name: str
    """The parallel dimension, such as `dp`, or what else the groups have in common."""
    kinds: tuple[CollectiveKind, ...]
    """The collectives that it uses."""
    groups: tuple[tuple[int, ...], ...]
    """Each of two or more slots, ascending, as torch sorts them; no slot is in two."""
    most_bytes: int = 0
    """The largest full tensor that is exchanged there in one piece; 0 = unknown."""

    def __post_init__(self) -> None:
        members = [slot for group in self.groups for slot in group]
        if len(set(members)) != len(members) or any(len(group) < 2 for group in self.groups):
            raise FactError(f"{self.name}: groups need two or more slots each, and no slot twice, got {self.groups}")
        if any(list(group) != sorted(group) for group in self.groups):
            raise FactError(f"{self.name}: the slots of a group must ascend, got {self.groups}")


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCase:
    """One pipeline rank of a layout."""

    layout: Layout
    pp_rank: int
    predicted_bytes: int = 0
    """Predicted peak of its tensors; 0 = no prediction."""

    def __post_init__(self) -> None:
        if not 0 <= self.pp_rank < self.layout.pp:
            raise FactError(f"pp_rank={self.pp_rank} is not one of the layout's {self.layout.pp}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """What the plans that may win would use."""

    KIND: ClassVar[str] = "advice"
    SCHEMA_VERSION: ClassVar[int] = 1

    host_pairs: tuple[tuple[int, ...], ...] = ()
    """Indices of hosts whose link they use, the lower first."""
    dimensions: tuple[Dimension, ...] = ()
    """Most important first."""
    stages: tuple[StageCase, ...] = ()
    """Stages whose memory decides, most promising first."""
    words: str = ""
    """Which plans were considered, or why there is no advice, one sentence."""

    def __post_init__(self) -> None:
        bad = [pair for pair in self.host_pairs if len(pair) != 2 or not 0 <= pair[0] < pair[1]]
        if bad:
            raise FactError(f"a link is between two hosts, the lower first, got {bad[0]}")


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
