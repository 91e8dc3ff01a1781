"""Pipette's agent of one node, which measures the machines before training, and takes ranks from the plan.

The agent overrides hooks of torch's LocalElasticAgent, and each override calls the original hook. Warm-up and training
are two phases of ONE rendezvous round, because a second rendezvous would let spare nodes replace measured nodes.
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
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import LogsSpecs, SignalException

from pipette_launch.agent import signals, workers
from pipette_launch.agent.first_meeting import MeetingPlace
from pipette_launch.agent.membership import LeftOut, Membership
from pipette_launch.agent.phases import Attempt, FirstIteration, PhaseBeforeTraining
from pipette_launch.agent.rendezvous import Rendezvous, RendezvousSettings
from pipette_launch.agent.signature import Signer
from pipette_launch.agent.store import RoundOver, RoundStore, await_all, open_store, say_goodbye
from pipette_launch.agent.streams import NoLogs, Streams, WatchedLogs
from pipette_launch.agent.trial import TrialRun
from pipette_launch.agent.warmup import SETTLE_S, Warmup
from pipette_launch.defaults import NEWS_S, PEER_WAIT_S, SIGNALLED_S
from pipette_launch.errors import ClusterError, PipetteError, UsageError
from pipette_launch.facts.co_location import DeviceBinding, bindings
from pipette_launch.facts.messages import Decision, Failure, RunScript, RunTraining, RunTrial, RunWarmup, Stop
from pipette_launch.launch.commands import WorkerCommand
from pipette_launch.launch.node_controller import NodeController

logger = logging.getLogger(__name__)


class _NothingToRun(Exception):  # noqa: N818
    """The agents decided to stop the job. Without workers, only an exception ends torch's monitoring loop."""


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
        assert isinstance(spec.rdzv_handler, Rendezvous)
        spec.rdzv_handler.is_round_over = self._is_round_over
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
        self._is_same_round = False
        """True if the nodes of the last phase stay together, and already have the next decision."""
        self._failed: RunResult | None = None
        """Failure of this node's workers in the last attempt at training."""
        self._is_called = False
        """True if an agent called a meeting while this node waited for other nodes to finish."""
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
    def is_training(self) -> bool:
        """True if the present or last workers run the training."""
        return self._decision is not None and self._decision.phase == "train"

    # -- the round ------------------------------------------------------------------------------------------------

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        has_met, self._is_same_round = self._is_same_round, False
        while not has_met:
            # torchrun's events of a rendezvous are those of the start of a job.
            timed = nullcontext if self._membership.has_joined else self.record_duration
            if not self._membership.has_joined:
                with timed("RENDEZVOUS"):
                    self._membership.join(self._place)
            try:
                with timed("ASSIGN_WORKER_RANKS"):
                    self._decision, self._round_store = self._meet()
                has_met = True
            except LeftOut:  # The other nodes went on, so this agent's last decision is outdated.
                self._decision, self._attempt = None, Attempt()
        self._apply(worker_group)

    def _meet(self) -> tuple[Decision, RoundStore]:
        """Describe this node to the other nodes, and receive the decision for all nodes."""
        last, ended = self._attempt, self._attempt.ended
        if ended == "none" and self._first_iteration is not None and self._first_iteration.has_trained():
            ended = "after-first-iteration"
        record = self._controller.record(attempt=last.index, verdict=ended, failure=last.failure)
        met = self._membership.meet(record, self._decision, decide=self._controller.decide)
        self._attempt = Attempt(index=last.index)
        return met

    def _apply(self, worker_group: Any) -> None:
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

    # -- the workers ----------------------------------------------------------------------------------------------

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        decision, round_store = self._current()
        if not isinstance(decision, RunWarmup | RunScript):
            raise _NothingToRun
        self._drop_logs()
        self._phase = None
        if isinstance(decision, RunWarmup):
            self._phase = Warmup(self._controller, round_store, decision, self._token)
        elif isinstance(decision, RunTrial):
            self._phase = TrialRun(self._controller, round_store, decision, self._token)
        training = decision if isinstance(decision, RunTraining) else None
        self._first_iteration = FirstIteration(round_store, proven=training is not None and training.proven)
        if self._bindings:
            self._set_up(worker_group.spec, decision)
        else:
            # On a node without workers, torch's agent still starts zero workers, and so installs its signal handlers.
            # The entrypoint is a program, because torch cannot start zero workers of a function.
            worker_group.spec.entrypoint, worker_group.spec.args = sys.executable, ()
            self._logs_specs = NoLogs()
        self._attempt = Attempt(index=training.attempt if training else -1, began_s=time.monotonic())
        self._failed, self._is_called, self._oom_kills = None, False, workers.oom_kills()
        # torch counts restarts of each node, but the decision counts restarts of the job.
        self._remaining_restarts = decision.restarts_left
        self._controller.show(decision, speaks=round_store.is_coordinator)
        self._termination.held_by = os.getpid()
        try:
            return dict(super()._start_workers(worker_group))
        finally:
            self._termination.held_by = 0

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

    def _stop_workers(self, *args: Any, **kwargs: Any) -> None:
        super()._stop_workers(*args, **kwargs)
        workers.end_children(self._pcontext)
        self._close_streams()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._termination.check()
        decision, round_store = self._current()
        if decision.phase == "trial" or (decision.phase == "warmup" and self._bindings):
            return self._monitor_before_training(worker_group)
        if not self._bindings:
            is_over = round_store.glance(f"over/{decision.phase}")
            return self._succeeded(worker_group) if is_over else RunResult(state=WorkerState.HEALTHY)
        if not callable(worker_group.spec.entrypoint):
            self._stopped_workers.end(workers.processes(self._pcontext))
        result: RunResult = super()._monitor_workers(worker_group)
        assert self._first_iteration is not None
        self._first_iteration.share()
        if result.state is WorkerState.HEALTHY and round_store.is_over():
            time.sleep(SETTLE_S)
            result = super()._monitor_workers(worker_group)
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            self._note_failure(result, round_store, self._first_iteration)
        return result

    def _monitor_before_training(self, worker_group: WorkerGroup) -> RunResult:
        """End the warm-up or trial on all nodes when the workers are done, fail or hang."""
        assert self._phase is not None
        if not self._phase.look(workers.processes(self._pcontext), self._bindings):
            return RunResult(state=WorkerState.HEALTHY)
        absent = self._phase.absent
        if absent:
            self._membership.leave_behind(self._current()[0].tokens_of(absent), "its agent does not answer")
            raise RoundOver(f"{', '.join(absent)} did not answer")
        super()._stop_workers(worker_group)
        return self._succeeded(worker_group)

    def _note_failure(self, result: RunResult, round_store: RoundStore, first_iteration: FirstIteration) -> None:
        """Agree with all nodes whether the job died before its first iteration, and call all nodes to a meeting."""
        self._failed = result
        # Raise the remaining restarts, because torch lowers this number, but only a decision of all nodes ends the job.
        self._remaining_restarts += 1
        # First read the last lines of the workers' output, because these lines may report an iteration.
        self._close_streams()
        trained = first_iteration.has_trained(wait_s=NEWS_S) or self._controller.trained(
            lived_s=time.monotonic() - self._attempt.began_s,
            exit_codes={failure.exitcode for failure in result.failures.values()},
        )
        ended = first_iteration.settle(trained=trained)
        self._attempt = replace(self._attempt, ended=ended, failure=self._describe(result))
        round_store.say("alarm", "workers failed")

    def _describe(self, result: RunResult) -> Failure | None:
        ranks = [binding.rank for binding in self._bindings]
        found = workers.first_failure(result, ranks, self._streams.tail if self._streams else lambda _local: ())
        return workers.as_oom_kill(found, kills=workers.oom_kills() - self._oom_kills)

    # -- the end --------------------------------------------------------------------------------------------------

    def run(self, *args: Any, **kwargs: Any) -> RunResult:
        """Run the job. The cleanup after torch's loop must not delay a signal to the workers."""
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

    def _invoke_run(self, *args: Any, **kwargs: Any) -> RunResult:
        while True:
            try:
                result: RunResult = super()._invoke_run(*args, **kwargs)
                if self._is_called:
                    continue
                if self.is_training:
                    return result
                assert self._phase is not None
                self._decision = self._phase.following()
                self._is_same_round = True
            except _NothingToRun:
                return self._end(*self._current())
            except RoundOver as error:
                logger.info("the agents meet again: %s", error)
                self._stop_workers(self._worker_group)
            except SignalException as error:
                # Other nodes need not wait until this node's workers have ended.
                self._membership.say_leaving(f"its agent was told to end by {error.sigval.name}")
                raise

    def _end(self, decision: Decision, round_store: RoundStore) -> RunResult:
        """End the job without training, after a dry run or an error."""
        if isinstance(decision, Stop) and decision.failed and self._failed is None:
            raise (UsageError if decision.is_misuse else PipetteError)(decision.reason)
        self._controller.show(decision, speaks=round_store.is_coordinator)
        # torch prints the failure of this node, with the error file, as under torchrun.
        return self._failed or self._succeeded(self._worker_group)

    def _exit_barrier(self) -> None:
        """Wait until all nodes have finished the phase. A failed node that calls a meeting ends the wait."""
        decision, round_store = self._current()
        if not self._bindings or decision.phase == "trial":
            return
        self._in_exit_barrier = True
        try:
            self._is_called = not await_all(round_store, decision.phase, num_nodes=len(decision.tokens))
            if self._is_called and decision.phase == "train":
                self._attempt = replace(self._attempt, ended="done")
        finally:
            self._in_exit_barrier = False

    def _is_round_over(self) -> bool:
        _, round_store = self._current()
        if self._controller.slowed:
            round_store.put("alarm", self._controller.slowed)
        return round_store.is_over()

    def _succeeded(self, worker_group: WorkerGroup) -> RunResult:
        return RunResult(
            state=WorkerState.SUCCEEDED, return_values={worker.global_rank: None for worker in worker_group.workers}
        )

    def _current(self) -> tuple[Decision, RoundStore]:
        if self._decision is None or self._round_store is None:
            raise ClusterError("no rendezvous has taken place yet")
        return self._decision, self._round_store
