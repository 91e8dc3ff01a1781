"""What the agent needs from above: who decides, and what is run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pipette_launch.facts.messages import AttemptEnd, Decision, Failure, NodeRecord, TrialReport
from pipette_launch.probe.messages import Sign


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """What torchrun knows of this node."""

    entrypoint: str | Callable[..., Any]
    """torchrun's own program for the workers."""
    arguments: tuple[str, ...]
    num_slots: int
    address: str
    interruption: type[Exception]
    """What a signal to the agent raises: it is nobody's failure, and must reach torch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerCommand:
    """What to start on every slot of this node."""

    entrypoint: str | Callable[..., Any]
    arguments: tuple[str, ...]
    environment: dict[str, str]
    """Variables added to the agent's own."""


class Policy(Protocol):
    """Decides for the job. Every node has one; `decide` and what follows it are called on the coordinator's alone."""

    def begin(self, node: Node) -> str:
        """Take what torchrun knows of this node; return the token that names the agent."""

    def record(self, *, attempt: int, verdict: AttemptEnd, failure: Failure | None) -> NodeRecord:
        """Introduce this node to the others."""

    def show(self, decision: Decision, *, speaks: bool) -> None:
        """Take note of what was decided; `speaks` is true on the one node that tells the user."""

    @property
    def slowed(self) -> str:
        """How the steps have slowed down, so that the agents are to meet; else empty."""

    def decide(self, records: Sequence[NodeRecord], held: Decision | None, lost: Mapping[str, str]) -> Decision:
        """Decide for all nodes what a new round does; `lost` says of hosts of the last one why they are gone."""

    def after_warmup(self, decision: Decision, failure: str) -> Decision:
        """Turn what the warm-up measured into a plan."""

    def after_trial(self, decision: Decision, report: TrialReport) -> Decision:
        """Turn what came of a trial into the next one, or into the training."""


class WorkerCommands(Protocol):
    """Says what the workers of this node run, and reads what they print."""

    def command(self, decision: Decision) -> WorkerCommand:
        """Return what this node's workers run under a decision."""

    @property
    def is_training(self) -> bool:
        """Whether the workers that run, or that ran last, are those of the training."""

    def saw_line(self, line: str) -> bool:
        """Read one line of the last rank's stdout; true when it is an iteration."""

    def trained(self, *, lived_s: float, exit_codes: Collection[int]) -> bool:
        """Whether workers that showed no iteration had trained all the same: how long they lived, how they ended."""

    def trial_is_over(self) -> tuple[float, ...]:
        """Take note that no worker of a trial is left here, once the devices are free; returns the steps it printed."""

    @property
    def trial_patience_s(self) -> tuple[float, float]:
        """After how long without the first iteration, and without each later one, a trial counts as hung."""


class WarmupView(Protocol):
    """Sees the warm-up's workers of this node, and holds what they measured."""

    @property
    def warmup_deadline_s(self) -> float:
        """After how long a warm-up counts as hung."""

    def warmup_sign(self, local_rank: int) -> tuple[Sign | None, str]:
        """Return what a local warm-up worker last said of itself, and why it failed if it said so."""

    def warmup_goes_on(self, *, leads: bool) -> None:
        """Show how far the warm-up is, on the node that leads it; called several times a second."""

    def warmup_is_over(self) -> None:
        """Take note that no worker of the warm-up is left on this node; returns once the devices are free again."""

    def measured(self) -> str:
        """Return what the warm-up left on this node; empty where it left nothing."""

    def receive(self, measured: str) -> None:
        """Take what the warm-up left on another node (called on a coordinator that took no part in it)."""


class Controller(Policy, WorkerCommands, WarmupView, Protocol):
    """All that one agent asks for; each phase gets the part that it needs."""
