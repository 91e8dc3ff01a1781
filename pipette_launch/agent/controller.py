"""Base class of a controller, which decides for an agent and chooses the command of the workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipette_launch.facts.messages import AttemptEnd, Decision, Failure, NodeRecord, TrialReport
from pipette_launch.probe.messages import Sign, last_error, last_sign


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerCommand:
    """The command that runs on every slot (device) of this node."""

    entrypoint: str | Callable[..., Any]
    arguments: tuple[str, ...]
    environment: dict[str, str]
    """Environment variables that the workers get besides the agent's own variables."""


class Controller(ABC):
    """Decides what each node runs. `decide`, `after_warmup` and `after_trial` run on the deciding node only."""

    warmup_deadline_s: float
    """Seconds after which a warm-up counts as hung."""
    slowed: str = ""
    """Sentence about slower training steps if the slowdown is a reason to measure all machines again; else empty."""

    @property
    @abstractmethod
    def progress_folder(self) -> Path:
        """Folder where the warm-up's workers of this node write their progress."""

    @property
    @abstractmethod
    def measured_path(self) -> Path:
        """File where the warm-up's first worker writes the measurements."""

    @abstractmethod
    def begin(self, script: WorkerCommand, *, num_slots: int, address: str, interruption: type[Exception]) -> str:
        """Describe this node, which would run `script` under torchrun; return the token that names the agent.

        A signal to the agent raises `interruption`, which must reach torch, and does not count as a failure.
        """

    @abstractmethod
    def record(self, *, attempt: int, verdict: AttemptEnd, failure: Failure | None) -> NodeRecord:
        """Describe this node and its last attempt at training for the other nodes."""

    @abstractmethod
    def decide(self, records: Sequence[NodeRecord], held: Decision | None, lost: Mapping[str, str]) -> Decision:
        """Decide the next phase of all nodes; `lost` maps each lost host to the reason."""

    @abstractmethod
    def after_warmup(self, decision: Decision, failure: str) -> Decision:
        """Make a plan from the measurements; `failure` is the reason why the warm-up failed, or empty."""

    @abstractmethod
    def after_trial(self, decision: Decision, report: TrialReport) -> Decision:
        """Return the decision to run the next trial, or to train."""

    @abstractmethod
    def command(self, decision: Decision) -> WorkerCommand:
        """Return the command that this node's workers run under a decision."""

    def show(self, decision: Decision, *, speaks: bool) -> None:  # noqa: B027 - an optional hook
        """Store a decision; `speaks` is true on the one node that prints for the user."""

    def saw_line(self, line: str) -> float | None:  # noqa: B027 - an optional hook
        """Read a line of the last rank's stdout; return the step time (s) if it reports an iteration, else None."""

    def trained(self, *, lived_s: float, exit_codes: Collection[int]) -> bool:  # noqa: ARG002
        """Return whether workers trained although they printed no iteration."""
        return False

    def warmup_goes_on(self, *, leads: bool) -> None:  # noqa: B027 - an optional hook
        """Show the progress of the warm-up, if this node runs RANK 0; called several times a second."""

    def workers_are_gone(self) -> None:  # noqa: B027 - an optional hook
        """Wait until the devices are free; called when no worker of a warm-up or trial is left on this node."""

    def warmup_sign(self, local_rank: int) -> tuple[Sign | None, str]:
        """Return the last progress message of a local warm-up worker, and the error that this worker reported."""
        return last_sign(self.progress_folder, local_rank), last_error(self.progress_folder, local_rank)
