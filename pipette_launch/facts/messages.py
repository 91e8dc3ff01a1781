"""Messages between the processes of one job: failures, requests, advice, and agreements of the agents."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, TypeVar

from typing_extensions import Self

from pipette_launch.errors import FactError
from pipette_launch.facts.cluster import Host
from pipette_launch.facts.files import check_numbers, loads
from pipette_launch.facts.health import DeviceCondition
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.measurements import CollectiveKind, Measurements
from pipette_launch.facts.plan import Choice, Plan, Shortage

SomeDecision = TypeVar("SomeDecision", bound="Decision")
FailureKind = Literal[
    "out-of-memory", "out-of-host-memory", "unknown-flags", "refused-flag", "missing", "exception", "other"
]
"""`missing`: a file or module is missing under every plan. `exception`: no layout is known to cause the exception."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Cause of an early end of a worker or a trial, and the rank that reported the cause."""

    cause: str
    """Cause as one sentence for the user. The text is empty if the cause is unknown."""
    kind: FailureKind = "other"
    flags: tuple[str, ...] = ()
    """Flags that the script does not know or refuses, such as `--seed`."""
    rank: int | None = None
    """RANK of the worker that ended early. The RANK is `None` if no worker ended."""
    exit_code: int = 0
    """Exit code of the worker that ended, or minus the signal that ended the worker."""

    @property
    def ran_out_of_memory(self) -> bool:
        """True if the memory of the device or of the host was full."""
        return self.kind in ("out-of-memory", "out-of-host-memory")

    @property
    def sentence(self) -> str:
        """Sentence for the user: rank, exit code and cause."""
        if self.rank is None:
            return self.cause
        end = f"rank {self.rank} ended with {exit_words(self.exit_code)}"
        return f"{end}: {self.cause}" if self.cause else end


def exit_words(exit_code: int) -> str:
    """Return a text for the end of the worker, such as `exit code 1` or `signal 9`."""
    return f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuringQuestion:
    """A request of the warm-up for advice on further measurements."""

    KIND: ClassVar[str] = "question"

    job: Job
    measurements: Measurements
    budget_s: float

    def __post_init__(self) -> None:
        check_numbers(self, "budget_s", limit=0, above=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dimension:
    """Groups of slots that communicate at the same time, and are therefore measured at the same time."""

    name: str
    """The parallel dimension, such as `dp`, or another common property of the groups."""
    kinds: tuple[CollectiveKind, ...]
    groups: tuple[tuple[int, ...], ...]
    """Slots of each group in ascending order, as torch sorts ranks: at least two in a group, each slot in one group."""
    most_bytes: int = 0
    """Bytes of the largest full tensor in one message. 0 = unknown."""

    def __post_init__(self) -> None:
        members = [slot for group in self.groups for slot in group]
        if len(set(members)) != len(members) or any(len(group) < 2 for group in self.groups):
            raise FactError(f"{self.name}: groups need at least 2 slots, and each slot once, got {self.groups}")
        if any(list(group) != sorted(group) for group in self.groups):
            raise FactError(f"{self.name}: the slots of a group must ascend, got {self.groups}")


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCase:
    """One pipeline rank of a layout, as a case whose memory can be measured."""

    layout: Layout
    pp_rank: int
    predicted_bytes: int = 0
    """Predicted memory peak of the rank. 0 = no prediction."""
    state_bytes: int = 0
    """Predicted bytes of weights, gradients and optimizer states. 0 = no prediction."""

    def __post_init__(self) -> None:
        if not 0 <= self.pp_rank < self.layout.pp:
            raise FactError(f"pp_rank={self.pp_rank} is not one of the layout's {self.layout.pp}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """Groups and stages that the warm-up should measure next, because promising plans use them."""

    KIND: ClassVar[str] = "advice"

    dimensions: tuple[Dimension, ...] = ()
    """Groups to measure, beginning with the most important groups."""
    stages: tuple[StageCase, ...] = ()
    """Stages whose memory decides whether a plan fits, beginning with the most promising plan."""
    words: str = ""
    """One sentence on the considered plans, or on the reason why there is no advice."""


AttemptEnd = Literal["none", "before-first-iteration", "after-first-iteration", "done"]
"""End of an attempt at training on one node. `none`: no attempt yet. `done`: all workers succeeded."""

MOST_SLOTS = 1 << 12
"""Upper limit of the number of slots on one host. Real machines have far fewer slots."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRecord:
    """Message in which an agent describes its machine, and the end of the last attempt at training on this machine."""

    KIND: ClassVar[str] = "node"

    token: str
    """Identifier of the agent during its life, because two hosts may have the same name."""
    host: Host | None
    """Host with its devices. The host is `None` if the search for devices failed, and `trouble` gives the reason."""
    trouble: str
    num_slots: int
    node_rank: int
    """Value of `--node-rank` under static rendezvous, otherwise -1."""
    script_digest: str
    """Digest of the script's path and arguments, which all nodes must have in common."""
    versions: dict[str, str]
    attempt: int
    """Index of the last attempt at training. -1 = no attempt."""
    verdict: AttemptEnd
    failure: Failure | None
    """Cause of the failure of the last attempt. None = the attempt did not fail on this node."""
    is_misuse: bool = False
    """True if the cause of `trouble` is a flag that requests something which this machine lacks."""
    conditions: tuple[DeviceCondition, ...] = ()
    """Reports of the driver on this node's devices, in the order of local ranks."""
    notes: tuple[str, ...] = ()
    """Problems of this node with which a plan is still possible, such as lost GPUs."""
    max_restarts: int = 0
    iteration: int = 0
    """Last iteration in the output of this node's workers. 0 = no iteration."""
    slowed: str = ""
    """Description of a slowdown for which the user wants a new measurement. Empty = no slowdown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One agent of a round, and the host on which it runs."""

    token: str
    """Identifier of the agent."""
    host: str
    """Unique name of the host."""
    num_slots: int

    def __post_init__(self) -> None:
        if not 0 <= self.num_slots <= MOST_SLOTS:
            raise FactError(f"num_slots must be from 0 to {MOST_SLOTS}, got {self.num_slots}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Common part of all decisions: the nodes of a round, and what a round takes over from the round before.

    All agents of a round (the agents that agreed to run together) get the same decision about the job's next phase:
    `RunWarmup`, `RunTrial`, `RunTraining` or `Stop`.
    """

    KIND: ClassVar[str]
    phase: ClassVar[str] = ""

    nodes: tuple[Node, ...]
    """Nodes that run workers, in torchrun's order."""
    standby: tuple[Node, ...] = ()
    """Nodes without workers, in torchrun's order."""
    reason: str = ""
    """Sentence for the user about this decision. The text is empty if there is nothing to say."""
    restarts_left: int = 0
    """Number of failures that may still restart the job. Lost hosts and plans that cannot start do not count."""
    iteration: int = 0
    """Last iteration that any node printed before this decision. 0 = before the training."""
    shortage: Shortage | None = None
    """Plan with the least predicted need among plans of similar jobs that ran out of memory. None = no plan."""

    def __post_init__(self) -> None:
        if len(self.names) < len(self.nodes) + len(self.standby):
            raise FactError("an agent is named twice among the nodes of a decision")

    @classmethod
    def of(cls, common: Decision, **own: Any) -> Self:
        """Make a decision of this class with the common part of another decision, and with fields of its own."""
        return cls(**{field.name: getattr(common, field.name) for field in fields(Decision)} | own)

    @property
    def choice(self) -> Choice | None:
        """Candidate to run. With None, the workers run the user's own configuration, or a warm-up."""
        return None

    @property
    def key(self) -> str:
        """Name of this phase, unique within a round."""
        return self.phase

    @property
    def tokens(self) -> tuple[str, ...]:
        """Identifiers of the agents that run workers, in torchrun's order."""
        return tuple(node.token for node in self.nodes)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of the hosts that run workers, in torchrun's order."""
        return tuple(node.host for node in self.nodes)

    @property
    def num_ranks(self) -> int:
        """Number of workers on all nodes."""
        return sum(node.num_slots for node in self.nodes)

    @property
    def names(self) -> dict[str, str]:
        """Host name of each agent, by token."""
        return {node.token: node.host for node in (*self.nodes, *self.standby)}

    def leaving_out(self, hosts: Collection[str]) -> Decision:
        """Return the common part of the decision with some hosts on standby. Hosts on standby run no workers."""
        leaving = tuple(node for node in self.nodes if node.host in hosts)
        staying = tuple(node for node in self.nodes if node.host not in hosts)
        return Decision.of(self, nodes=staying, standby=(*self.standby, *leaving))

    def by_host(self, by_token: Mapping[str, str]) -> dict[str, str]:
        """Replace agents' tokens by host names. Unknown tokens are dropped."""
        names = self.names
        return {names[token]: text for token, text in by_token.items() if token in names}

    def tokens_of(self, hosts: Collection[str]) -> list[str]:
        """Return the tokens of the agents with workers on these hosts."""
        return [node.token for node in self.nodes if node.host in hosts]

    def place_of(self, token: str) -> int:
        """Return the GROUP_RANK of an agent. Agents on standby come after all agents with workers."""
        return [*self.names].index(token)

    def ranks_of(self, token: str) -> tuple[int, ...]:
        """Return the RANK of each local device of an agent. The result is empty for an agent on standby."""
        return _successive_ranks(self.nodes, token)


def _successive_ranks(nodes: Sequence[Node], token: str) -> tuple[int, ...]:
    """Return the ranks of an agent if the nodes take successive ranks in this order."""
    first = 0
    for node in nodes:
        if node.token == token:
            return tuple(range(first, first + node.num_slots))
        first += node.num_slots
    return ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RunWarmup(Decision):
    """The decision to measure the hosts."""

    KIND: ClassVar[str] = "decision-warmup"
    phase: ClassVar[str] = "warmup"

    order: str
    """Options of the warm-up as a document of `probe`."""
    only_links: bool = False
    """True if the warm-up measures only links, because the job cannot be planned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunScript(Decision):
    """Common part of the decisions to run the user's script: for a trial, or for the training."""

    plan: Plan | None
    """Plan of the candidate to run. None = the job has no plan, and the user's own configuration runs."""
    script_arguments: tuple[str, ...] | None = None
    """Arguments of the script. With None, the script gets the user's own arguments, unchanged."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of the workers, in addition to torchrun's."""
    patches: tuple[str, ...] = ()

    def ranks_of(self, token: str) -> tuple[int, ...]:
        choice, host = self.choice, next((node.host for node in self.nodes if node.token == token), None)
        if choice is None or self.plan is None:
            return Decision.ranks_of(self, token)
        if host is None:
            return ()
        size, index = self.plan.devices_per_host, self.plan.hosts.index(host)
        return choice.placement[index * size : (index + 1) * size]

    def _check_hosts(self) -> None:
        if self.plan and self.choice and not {*self.hosts} <= {*self.plan.hosts}:
            raise FactError(f"the plan is for {', '.join(self.plan.hosts)}, not for {', '.join(self.hosts)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunTrial(RunScript):
    """The decision to run a candidate for a few iterations."""

    KIND: ClassVar[str] = "decision-trial"
    phase: ClassVar[str] = "trial"

    plan: Plan
    trial: int
    """Index of the trial: 0 is the user's own configuration, and i is the i-th plan that competes."""
    iterations: int
    """Number of iterations, including warm-up iterations."""

    def __post_init__(self) -> None:
        Decision.__post_init__(self)
        if not 0 <= self.trial <= len(self.plan.contenders()):
            raise FactError(f"trial={self.trial} does not exist in the plan")
        self._check_hosts()

    @property
    def choice(self) -> Choice | None:
        return self.plan.contenders()[self.trial - 1] if self.trial else None

    @property
    def key(self) -> str:
        return f"trial-{self.trial}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunTraining(RunScript):
    """The decision to train."""

    KIND: ClassVar[str] = "decision-train"
    phase: ClassVar[str] = "train"

    attempt: int = 0
    """Index of the candidate to run. An index past the last candidate means the user's own configuration."""
    proven: bool = False
    """True if the candidate has trained. A later failure of this candidate does not mean that its plan cannot start."""
    failures: tuple[Failure, ...] = ()
    """Failures of earlier candidates that could not start. Each node reports one failure."""
    is_refitted: bool = False
    """True if an earlier plan was fitted to the hosts of this decision. `reason` names the earlier plan."""
    host_order: tuple[str, ...] = ()
    """Names of `hosts` in the order of their ranks, for a training without a plan. Empty = torchrun's order."""

    def __post_init__(self) -> None:
        Decision.__post_init__(self)
        if self.attempt < 0:
            raise FactError(f"attempt={self.attempt} does not exist in the plan")
        if self.host_order and (self.plan or sorted(self.host_order) != sorted(self.hosts)):
            raise FactError(f"host_order has {', '.join(self.host_order)}, but {', '.join(self.hosts)} have workers")
        self._check_hosts()

    @property
    def choice(self) -> Choice | None:
        candidates = self.plan.candidates() if self.plan else ()
        return candidates[self.attempt] if self.attempt < len(candidates) else None

    def ranks_of(self, token: str) -> tuple[int, ...]:
        if not self.host_order:
            return RunScript.ranks_of(self, token)
        return _successive_ranks(sorted(self.nodes, key=lambda node: self.host_order.index(node.host)), token)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop(Decision):
    """The decision to end the job."""

    KIND: ClassVar[str] = "decision-stop"
    phase: ClassVar[str] = "stop"

    failed: bool = False
    """True if a failure stops the job, False if the job is complete."""
    is_misuse: bool = False
    """True if the user's own flags caused the failure. The exit code is then the exit code of argparse."""
    unrun: RunTraining | None = None
    """Training that a dry run shows instead of running it. None = no dry run, or no plan."""


def read_decision(text: str, source: str) -> Decision:
    """Read a decision from JSON text; raises FileFormatError, which names `source`, for any other text."""
    found = re.match(r'\{"kind": ?"([a-z-]+)"', text)
    kinds = {kind.KIND: kind for kind in (RunWarmup, RunTrial, RunTraining, Stop)}
    return loads(kinds.get(found[1] if found else "", RunTraining), text, source)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialReport:
    """Step times and failure of one trial, as one agent observed them."""

    KIND: ClassVar[str] = "trial-report"

    step_s: tuple[float, ...]
    """Step times in the order in which the script printed them. The list is empty on nodes without the last rank."""
    failure: Failure | None
    """Cause of an early end of the trial. The cause is `None` if the trial ended normally."""
    took_s: float
    """Seconds from the start of the workers until the workers' devices were free again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One agent of a job, and the address of the agent's key-value store."""

    KIND: ClassVar[str] = "member"

    token: str
    address: str
    port: int
    node_rank: int
    """Value of `--node-rank` under static rendezvous, otherwise -1."""
    role: str = "default"
    """Value of `--role`. Workers of different roles have a ROLE_RANK in their own role."""
    name: str = ""
    """Host name or `--local-addr`. torchrun orders nodes by name and process id."""
    pid: int = 0
    proof: str = ""
    """Proof in an introduction that the agent has the job's secret; empty in all lists of agents."""

    def __post_init__(self) -> None:
        if not 0 < self.port < 1 << 16:
            raise FactError(f"port must be from 1 to 65535, got {self.port}")

    @property
    def order(self) -> tuple[int, str, int]:
        """Key by which torchrun orders nodes: --node-rank, else name and process id."""
        return self.node_rank, self.name, self.pid


@dataclass(frozen=True, kw_only=True, slots=True)
class Members:
    """Agents of a round. The first agent decides and has the key-value store of the round; the next one succeeds it."""

    KIND: ClassVar[str] = "members"

    generation: str
    """Name of the round."""
    members: tuple[Member, ...]
    cut: tuple[tuple[str, str], ...] = ()
    """Pairs of agents, by token, that cannot reach each other."""
    num_arrived: int = 0
    """Largest number of an introduction that this or an earlier meeting has considered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Invitation:
    """Message to an agent that has introduced itself: it may come to a meeting."""

    KIND: ClassVar[str] = "invitation"

    leader: Member
    """Agent that leads the meeting."""
    is_signed: bool
    """True if the leader found that all agents of the job have its secret."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """Message of an agent that arrives at a meeting, in which agents agree on the next round."""

    KIND: ClassVar[str] = "arrival"

    meeting: int
    """Number of meetings that this agent has attended, which distinguishes answers to this arrival from older ones."""
    record: NodeRecord
    held: str = ""
    """Document of the last decision that this agent got. Empty = the deciding agent knows this decision."""
    out_of_reach: tuple[str, ...] = ()
    """Tokens (identifiers) of the agents that this agent could not reach."""


def best_left_out(pairs: Collection[tuple[str, str]], order: Sequence[str]) -> dict[str, str]:
    """Choose agents or hosts to leave out, so that no link of `pairs` remains; those with most links are chosen first.

    Return each choice with the first agent or host at its links. Among equals, the last one in `order` is left out.
    """
    place = {token: index for index, token in enumerate(order)}
    cut = {frozenset(pair) for pair in pairs if set(pair) <= set(place) and len(set(pair)) == 2}
    left_out: dict[str, str] = {}
    while cut:
        missed = Counter(token for pair in cut for token in pair)
        worst = max(missed, key=lambda token: (missed[token], place[token]))
        others = {token for pair in cut if worst in pair for token in pair} - {worst}
        left_out[worst] = min(others, key=place.__getitem__)
        cut = {pair for pair in cut if worst not in pair}
    return left_out
