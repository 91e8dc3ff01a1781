"""What runs before the training, in the same rendezvous round: a warm-up, then trials where the user wants them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipette_launch.agent.phases import standby
from pipette_launch.agent.phases.trial import TrialRun
from pipette_launch.agent.phases.warmup import Warmup
from pipette_launch.agent.sync.agreement import PEER_WAIT_S, plan_of_first
from pipette_launch.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from subprocess import Popen

    from torch.distributed.elastic.multiprocessing.api import LogsSpecs

    from pipette_launch.agent.controller import Controller
    from pipette_launch.agent.device_binding import DeviceBinding
    from pipette_launch.agent.streams import Streams
    from pipette_launch.agent.sync.store import RoundStore
    from pipette_launch.facts.messages import Decision


class PhasesBeforeTraining:
    """The phases before the training, as one agent sees them."""

    def __init__(self, controller: Controller, address: str) -> None:
        self._controller = controller
        self._warmup = Warmup(controller, address)
        self._trial = TrialRun(controller, controller)

    def begin(self, decision: Decision) -> None:
        """Forget an earlier trial; called on every node, also where no worker runs."""
        if decision.phase == "trial":
            self._trial.begin()

    def open_logs(self, decision: Decision) -> tuple[Streams | None, LogsSpecs]:
        """Return who reads the output of this phase's workers, if anyone does, and where they write."""
        return (None, self._warmup.begin()) if decision.phase == "warmup" else self._trial.open_logs()

    def variables(self, decision: Decision) -> dict[str, str]:
        """Return the variables that the workers of this phase get beside those of the decision."""
        return self._trial.variables if decision.phase == "trial" else {}

    def drop_logs(self) -> None:
        """Leave of the output only that of a failed warm-up."""
        self._warmup.drop_logs()
        self._trial.drop_logs()

    def is_over(
        self,
        round_store: RoundStore,
        decision: Decision,
        token: str,
        *,
        processes: Mapping[int, Popen[bytes]],
        bindings: Sequence[DeviceBinding],
    ) -> bool:
        """Whether the phase is over on all nodes; one that fails or hangs is over, too."""
        if decision.phase == "warmup":
            return self._warmup.look(round_store, decision, token, processes) != "running"
        return self._trial.look(round_store, decision, token, processes, bindings)

    def absent(self, decision: Decision) -> tuple[str, ...]:
        """Return the hosts that are gone, so that the round must end with the phase."""
        return self._warmup.absent if decision.phase == "warmup" else self._trial.absent

    def following(self, round_store: RoundStore, decision: Decision, token: str) -> Decision:
        """Return what all nodes do next."""
        if decision.phase == "warmup":
            return self._plan(round_store, decision, token)
        if self._trial.following is None:
            raise ClusterError("a trial ended without a word on what comes next")
        return self._trial.following

    def _plan(self, round_store: RoundStore, decision: Decision, token: str) -> Decision:
        relay = standby.Relay(round_store, decision, token, policy=self._controller, view=self._controller)
        relay.hand_over()
        return plan_of_first(
            round_store,
            make=lambda: relay.plan(self._warmup.failure),
            deadline_s=PEER_WAIT_S + self._controller.warmup_deadline_s,
        )
