"""Pipette's agent of one node, which measures the machines before training, and takes ranks from the plan.

`PipetteAgent._invoke_run` is the life of a job on this node. torch's agent starts, watches and stops the processes of
each phase. Warm-up and training are two phases of ONE round, because a second meeting would let spare nodes replace
measured nodes.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server.api import (
    DEFAULT_ROLE,
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import LogsSpecs, SignalException

from pipette_launch.agent import signals, workers
from pipette_launch.agent.first_meeting import MeetingPlace
from pipette_launch.agent.membership import LeftOut, Membership
from pipette_launch.agent.phases import Attempt, FirstIteration, PhaseBeforeTraining
from pipette_launch.agent.rendezvous import RendezvousSettings
from pipette_launch.agent.signature import Signer
from pipette_launch.agent.store import RoundOver, RoundStore, await_all, open_store, say_goodbye
from pipette_launch.agent.streams import Streams, WatchedLogs
from pipette_launch.agent.trial import TrialRun
from pipette_launch.agent.warmup import SETTLE_S, Warmup
from pipette_launch.defaults import NEWS_S, PEER_WAIT_S, SIGNALLED_S
from pipette_launch.errors import PipetteError, UsageError
from pipette_launch.facts.co_location import DeviceBinding, bindings
from pipette_launch.facts.messages import Decision, Failure, RunScript, RunTraining, RunTrial, RunWarmup, Stop
from pipette_launch.launch.commands import WorkerCommand
from pipette_launch.launch.node_controller import NodeController

logger = logging.getLogger(__name__)


class PipetteAgent(LocalElasticAgent):
    """The agent of one node. The agent's controller makes all decisions."""

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        *args: Any,
        controller: NodeController,
        rendezvous_settings: RendezvousSettings,
        place: MeetingPlace,
        termination: signals.Termination,
        signer: Signer,
        **kwargs: Any,
    ) -> None:
        super().__init__(spec, logs_specs, *args, **kwargs)
        self._controller = controller
        self._place = place
        self._termination = termination
        self._user_logs = logs_specs
        self._base_environment = dict(os.environ)
        self._address = spec.local_addr or rendezvous_settings.own_address()
        self._round_store: RoundStore | None = None
        self._decision: Decision | None = None
        self._bindings: tuple[DeviceBinding, ...] = ()
        self._store_of_phase: TCPStore | None = None
        self._streams: Streams | None = None
        self._failed: RunResult | None = None
        """Failure of this node's workers in the last attempt at training."""
        self._attempt = Attempt()
        self._stopped_workers = workers.StoppedWorkers()
        self._starts = self._oom_kills = 0
        self._first_iteration: FirstIteration | None = None
        self._phase: PhaseBeforeTraining | None = None
        """Warm-up or trial of this round; None during a training."""
        arguments = tuple(str(word) for word in spec.args)
        script = WorkerCommand(entrypoint=spec.entrypoint or sys.executable, arguments=arguments, environment={})
        self._token = controller.describe(
            script, num_slots=spec.local_world_size, address=self._address, interruption=SignalException
        )
        self._membership = Membership(
            self._token,
            self._address,
            rendezvous_settings.node_rank,
            spec.role,
            name=spec.local_addr or "",
            signer=signer,
        )

    @property
    def has_begun(self) -> bool:
        """True after the start of the first phase, which may have no workers on this node."""
        return self._first_iteration is not None

    @property
    def is_training(self) -> bool:
        """True if the present or last workers run the training."""
        return self._decision is not None and self._decision.phase == "train"

    # -- the life of a job ----------------------------------------------------------------------------------------

    def run(self, *args: Any, **kwargs: Any) -> RunResult:
        """Run the job. The cleanup after the loop must not delay a signal to the workers."""
        signalled = False
        try:
            result: RunResult = super().run(*args, **kwargs)
        except SignalException:
            signalled = True
            raise
        finally:
            # Read the output again: workers that got a signal may have printed more, as about a saved checkpoint.
            self._drop_logs(patience_s=SIGNALLED_S if signalled else None)
            if self._round_store is not None and not signalled:
                if self._round_store.is_coordinator:
                    self._place.end()
                say_goodbye(self._round_store, holds_store=self._round_store.is_coordinator)
        return result

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:  # noqa: ARG002, torch's agents have one role
        following: Decision | None = None
        try:
            while True:
                try:
                    if following is None:
                        self._decision, self._round_store = self._next_round()
                    else:
                        self._decision, following = following, None
                    match self._decision:
                        case Stop() as stop:
                            return self._end(stop)
                        case RunTraining():
                            return self._train()
                        case _:
                            following = self._prepare()
                except RoundOver as error:
                    logger.info("the agents meet again: %s", error)
                self._stop()
        except SignalException as error:
            # Other nodes need not wait until this node's workers have ended.
            self._membership.say_leaving(f"its agent was told to end by {error.sigval.name}")
            raise

    def _prepare(self) -> Decision:
        """Run a warm-up or a trial; return the next decision. Raises RoundOver if the agents have to meet again."""
        self._start()
        decision, round_store = self._current()
        phase = self._phase
        assert phase is not None
        while not self._is_prepared(decision, round_store, phase):
            self._check_goes_on(round_store)
        if phase.absent:
            self._membership.leave_behind(decision.tokens_of(phase.absent), "its agent does not answer")
            raise RoundOver(f"{', '.join(phase.absent)} did not answer")
        self._stop_workers(self._worker_group)
        if self._bindings and decision.phase == "warmup":
            self._await_all(decision, round_store)
        return phase.following()

    def _is_prepared(self, decision: Decision, round_store: RoundStore, phase: PhaseBeforeTraining) -> bool:
        """Return whether a warm-up or trial is over on all nodes, because the workers are done, fail or hang."""
        time.sleep(self._worker_group.spec.monitor_interval)
        self._termination.check()
        if decision.phase == "warmup" and not self._bindings:
            return round_store.glance("over/warmup")
        return phase.look(workers.processes(self._pcontext) if self._bindings else {}, self._bindings)

    def _train(self) -> RunResult:
        """Train until all nodes have finished. Raises RoundOver if the agents have to meet again."""
        self._start()
        decision, round_store = self._current()
        while (result := self._look(decision, round_store)).state is WorkerState.HEALTHY:
            self._check_goes_on(round_store)
        self._worker_group.state = result.state
        if result.state is not WorkerState.SUCCEEDED:
            self._note_failure(result, round_store)
            raise RoundOver("workers failed")
        if self._bindings:
            try:
                self._await_all(decision, round_store)
            except RoundOver:
                self._attempt = replace(self._attempt, ended="done")
                raise
        return result

    def _look(self, decision: Decision, round_store: RoundStore) -> RunResult:
        """Return the state of this node's training."""
        time.sleep(self._worker_group.spec.monitor_interval)
        self._termination.check()
        if not self._bindings:
            is_over = round_store.glance(f"over/{decision.phase}")
            return self._succeeded() if is_over else RunResult(state=WorkerState.HEALTHY)
        if not callable(self._worker_group.spec.entrypoint):
            self._stopped_workers.end(workers.processes(self._pcontext))
        result: RunResult = self._monitor_workers(self._worker_group)
        assert self._first_iteration is not None
        self._first_iteration.share()
        if result.state is WorkerState.HEALTHY and round_store.is_over():
            time.sleep(SETTLE_S)
            result = self._monitor_workers(self._worker_group)
        return result

    def _check_goes_on(self, round_store: RoundStore) -> None:
        """Raise RoundOver if the agents have to meet again; call a meeting if this node's steps became slower."""
        if self._controller.slowed:
            round_store.put("alarm", self._controller.slowed)
        round_store.check_goes_on()

    def _await_all(self, decision: Decision, round_store: RoundStore) -> None:
        """Wait until all nodes have finished the phase. Raises RoundOver if an agent called a meeting."""
        if not await_all(round_store, decision.phase, num_nodes=len(decision.tokens)):
            raise RoundOver("a node calls a meeting")

    def _note_failure(self, result: RunResult, round_store: RoundStore) -> None:
        """Agree with all nodes whether the job died before its first iteration, and call all nodes to a meeting."""
        assert self._first_iteration is not None
        self._failed = result
        # First read the last lines of the workers' output, because these lines may report an iteration.
        self._close_streams()
        trained = self._first_iteration.has_trained(wait_s=NEWS_S) or self._controller.trained(
            lived_s=time.monotonic() - self._attempt.began_s,
            exit_codes={failure.exitcode for failure in result.failures.values()},
        )
        ended = self._first_iteration.settle(trained=trained)
        self._attempt = replace(self._attempt, ended=ended, failure=self._describe(result))
        round_store.say("alarm", "workers failed")

    def _describe(self, result: RunResult) -> Failure | None:
        ranks = [binding.rank for binding in self._bindings]
        found = workers.first_failure(result, ranks, self._streams.tail if self._streams else lambda _local: ())
        return workers.as_oom_kill(found, kills=workers.oom_kills() - self._oom_kills)

    def _end(self, decision: Stop) -> RunResult:
        """End the job, after a dry run or an error."""
        _, round_store = self._current()
        if decision.failed and self._failed is None:
            raise (UsageError if decision.is_misuse else PipetteError)(decision.reason)
        self._controller.show(decision, speaks=round_store.is_coordinator)
        # torch prints the failure of this node, with the error file, as under torchrun.
        result = self._failed or self._succeeded()
        self._worker_group.state = result.state
        return result

    def _succeeded(self) -> RunResult:
        ranks = [worker.global_rank for worker in self._worker_group.workers]
        return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks))

    # -- the round ------------------------------------------------------------------------------------------------

    def _next_round(self) -> tuple[Decision, RoundStore]:
        """Meet the other agents; return the decision for all agents, and the store of the round."""
        while True:
            # torchrun records the events of a rendezvous at the start of a job only.
            timed = nullcontext if self._membership.has_joined else self.record_duration
            if not self._membership.has_joined:
                with self.record_duration("RENDEZVOUS"):
                    self._membership.join(self._place)
            try:
                with timed("ASSIGN_WORKER_RANKS"):
                    return self._meet()
            except LeftOut:  # The other nodes went on, so this agent's last decision is outdated.
                self._decision, self._attempt = None, Attempt()

    def _meet(self) -> tuple[Decision, RoundStore]:
        """Describe this node to the other nodes, and receive the decision for all nodes."""
        last, ended = self._attempt, self._attempt.ended
        if ended == "none" and self._first_iteration is not None and self._first_iteration.has_trained():
            ended = "after-first-iteration"
        record = self._controller.record(attempt=last.index, verdict=ended, failure=last.failure)
        met = self._membership.meet(record, self._decision, decide=self._controller.decide)
        self._attempt = Attempt(index=last.index)
        return met

    def _current(self) -> tuple[Decision, RoundStore]:
        assert self._decision is not None
        assert self._round_store is not None
        return self._decision, self._round_store

    # -- the workers ----------------------------------------------------------------------------------------------

    def _rendezvous(self, worker_group: Any) -> None:
        """Give each worker the RANK of its slot, and open the job's own store on the node of RANK 0."""
        decision, round_store = self._current()
        ranks = decision.ranks_of(self._token)
        # With NUMA options torch binds a worker to the cores near device LOCAL_RANK, so devices must keep their order.
        is_numa_bound = getattr(worker_group.spec, "numa_options", None) is not None
        # Without a plan, nodes may have different numbers of slots, and devices keep torchrun's order.
        self._bindings = bindings(ranks, keep_devices=is_numa_bound or decision.choice is None)
        size, of_role = decision.num_ranks, self._ranks_of_role(decision)
        worker_group.workers = [
            Worker(
                local,
                global_rank=one.rank,
                role_rank=of_role.index(one.rank),
                world_size=size,
                role_world_size=len(of_role),
            )
            for local, one in enumerate(self._bindings)
        ]
        # Under static rendezvous the decision orders agents by --node-rank: torch promises GROUP_RANK == --node-rank.
        worker_group.store = self._membership.server
        worker_group.group_rank = decision.place_of(self._token)
        worker_group.group_world_size = len(decision.tokens)
        key, self._store_of_phase = f"store/{decision.key}", None
        if 0 in ranks:
            # Use any free port of the node of RANK 0, because this node may not be the host of the rendezvous.
            self._store_of_phase = open_store(self._address)
            round_store.put(key, f"{self._address} {self._store_of_phase.port}")
        place = round_store.take(key, what="the store of RANK 0", deadline_s=PEER_WAIT_S)
        worker_group.master_addr, port = place.split()
        worker_group.master_port = int(port)

    def _ranks_of_role(self, decision: Decision) -> Sequence[int]:
        """Return the ranks of all workers that have the `--role` of this node, in ascending order."""
        tokens = self._membership.with_own_role(decision.tokens)
        if len(tokens) == len(decision.tokens):
            return range(decision.num_ranks)
        return sorted(rank for token in tokens for rank in decision.ranks_of(token))

    def _start(self) -> None:
        """Start the workers of the decided phase."""
        decision, round_store = self._current()
        self._drop_logs()
        self._phase = None
        if isinstance(decision, RunWarmup):
            self._phase = Warmup(self._controller, round_store, decision, self._token)
        elif isinstance(decision, RunTrial):
            self._phase = TrialRun(self._controller, round_store, decision, self._token)
        training = decision if isinstance(decision, RunTraining) else None
        self._first_iteration = FirstIteration(round_store, proven=training is not None and training.proven)
        self._attempt = Attempt(index=training.attempt if training else -1, began_s=time.monotonic())
        self._failed, self._oom_kills = None, workers.oom_kills()
        # torch counts restarts of each node, but the decision counts restarts of the job.
        self._remaining_restarts = decision.restarts_left
        if self._token not in decision.tokens:
            # torch installs the handlers of its signals when it starts workers.
            self._termination.install()
            self._rendezvous(self._worker_group)
            self._controller.show(decision, speaks=round_store.is_coordinator)
            return
        self._termination.held_by = os.getpid()
        try:
            self._initialize_workers(self._worker_group)
        finally:
            self._termination.held_by = 0

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        decision, round_store = self._current()
        assert isinstance(decision, RunWarmup | RunScript)
        self._set_up(worker_group.spec, decision)
        self._controller.show(decision, speaks=round_store.is_coordinator)
        return dict(super()._start_workers(worker_group))

    def _set_up(self, spec: WorkerSpec, decision: RunWarmup | RunScript) -> None:
        """Set command, output and variables of the workers."""
        command = self._controller.command(decision)
        spec.entrypoint, spec.args = command.entrypoint, command.arguments
        if self._phase is not None:
            self._streams, self._logs_specs = self._phase.open_logs()
        else:
            # torch seeks in the streams of a function (--run-path), so no pipe can replace these files.
            self._streams = None if callable(command.entrypoint) else Streams(self._on_line)
            self._logs_specs = WatchedLogs(self._user_logs, self._streams, self._starts)
            self._starts += 1
        if self._streams is not None:
            self._streams.start()
        order = workers.visible_devices(self._base_environment.get("CUDA_VISIBLE_DEVICES"), self._bindings)
        os.environ.clear()
        os.environ.update(self._base_environment | command.environment | order)
        os.environ.update(self._phase.variables if self._phase else {})

    def _drop_logs(self, *, patience_s: float | None = None) -> None:
        self._close_streams(patience_s=patience_s)
        if self._phase is not None:
            self._phase.drop_logs()

    def _close_streams(self, *, patience_s: float | None = None) -> None:
        if self._streams is not None:
            self._streams.close(patience_s=patience_s)

    def _on_line(self, line: str) -> None:
        if self._controller.saw_line(line) is not None and self._first_iteration is not None:
            self._first_iteration.see()

    def _stop(self) -> None:
        self._stop_workers(self._worker_group)
        workers.end_children(self._pcontext)
        self._close_streams()
