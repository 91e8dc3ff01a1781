"""The controller of one node, which describes the node, carries out decisions, and shows the results."""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread

from pipette_launch import megatron
from pipette_launch.defaults import FILES_S, START_S
from pipette_launch.facts import Choice, files
from pipette_launch.facts.messages import (
    AttemptEnd,
    Decision,
    Failure,
    NodeRecord,
    RunScript,
    RunTraining,
    RunTrial,
    RunWarmup,
    TrialReport,
)
from pipette_launch.facts.outcome import Outcome, PeakReading
from pipette_launch.launch import commands
from pipette_launch.launch.cache import CLUSTER, OUTCOME, Cache
from pipette_launch.launch.commands import WorkerCommand
from pipette_launch.launch.coordinator import Coordinator
from pipette_launch.launch.hosts import described
from pipette_launch.launch.metrics import MetricsFile
from pipette_launch.launch.options import Options
from pipette_launch.launch.plan_reports import draw_again
from pipette_launch.launch.terminal import Terminal, parts_words
from pipette_launch.launch.training import OutcomeTracker, Recovery, Slowdown, device_peaks, has_trained
from pipette_launch.launch.trials import trial_progress
from pipette_launch.probe.health import inventory
from pipette_launch.probe.messages import WarmupOrder, wait_s
from pipette_launch.probe.progress import Sign, last_error, last_sign, open_question
from pipette_launch.report.plan import outcome_line
from pipette_launch.text import say

logger = logging.getLogger(__name__)


class PrivateFolder:
    """Folder of this launcher's files, which no other user can open or foresee.

    The folder is made when it is needed, so a launcher that a signal ends early leaves no folder.
    """

    def __init__(self) -> None:
        self._made: Path | None = None

    @property
    def path(self) -> Path:
        """Path of the folder, which the first use makes."""
        if self._made is None:
            self._made = Path(tempfile.mkdtemp(prefix="pipette_"))
        return self._made

    def remove(self) -> None:
        """Delete the folder, if it was made."""
        if self._made is not None:
            shutil.rmtree(self._made, ignore_errors=True)


class FileWriter:
    """Thread that writes files, one after the other. A file system that hangs stops only this thread."""

    def __init__(self) -> None:
        self._writes: SimpleQueue[Callable[[], object]] = SimpleQueue()
        Thread(target=self._run, name="pipette-files", daemon=True).start()

    def submit(self, write: Callable[[], object]) -> None:
        """Call a function in the thread, after all earlier functions. The log reports its error."""
        self._writes.put(write)

    def finish(self, *, within_s: float = FILES_S) -> None:
        """Wait until all files are whole. A line on stderr reports that they are not."""
        is_done = Event()
        self.submit(is_done.set)
        if not is_done.wait(within_s):
            say(f"the file system did not answer within {within_s:g} s, so files of this job are missing")

    def _run(self) -> None:
        while True:
            write = self._writes.get()
            try:
                write()
            except Exception:
                logger.exception("a file beside the plan is missing; the job goes on")


class NodeController:
    """Describes one node, decides for all nodes on the deciding node, and chooses the command of this node's workers.

    `decide`, `after_warmup` and `after_trial` run on the deciding node only.
    """

    warmup_deadline_s: float
    """Seconds after which a warm-up counts as hung."""
    slowed: str = ""
    """Sentence about slower training steps if the slowdown is a reason to measure all machines again; else empty."""

    def __init__(
        self,
        options: Options,
        folder: PrivateFolder,
        *,
        least_nodes: int,
        node_rank: int,
        metrics: MetricsFile,
        writer: FileWriter,
    ) -> None:
        """Take the job's settings: `least_nodes` is MIN of --nnodes, and `node_rank` is -1 without --node-rank."""
        self._writer = writer
        self._unwritten: list[Callable[[], None]] = []
        """Functions that write files after the next decision has reached the other nodes."""
        self._options = options
        self._metrics = metrics
        self._least_nodes, self._node_rank = least_nodes, node_rank
        self._folder = folder
        self._token = uuid.uuid4().hex
        self._cache = Cache(None, "")
        """Cache folder of the plan that the job runs now, and of the plan's outcome."""
        self._tracker: OutcomeTracker | None = None
        self._running: tuple[Choice, tuple[int, ...]] | None = None
        """Configuration that trains, and this node's ranks; None if no plan trains."""
        self._saved_before = ""
        self._recovery = Recovery()
        self._slowdown: Slowdown | None = None
        self._terminal = Terminal(options)
        self._leads, self._measured_from_s, self._num_iterations = False, 0.0, 0
        self._answering: Thread | None = None
        """Thread that answers a question of the warm-up; None before the first question."""

    def describe(self, script: WorkerCommand, *, num_slots: int, address: str, interruption: type[Exception]) -> str:
        """Describe this node, which would run `script` under torchrun; return the token that names its agent.

        A signal to the launcher raises `interruption`, which must reach torch, and does not count as a failure.
        """
        self._script, self._interruption = script, interruption
        self._coordinator = Coordinator(
            self._options,
            lambda: self.measured_path,
            interruption=interruption,
            least_nodes=self._least_nodes,
            is_static=self._node_rank >= 0,
            later=self._unwritten.append,
        )
        bare = NodeRecord(
            token=self._token,
            host=None,
            trouble="",
            num_slots=num_slots,
            node_rank=self._node_rank,
            script_digest=files.digest(self._options.script, self._options.script_arguments),
            versions={},
            attempt=-1,
            verdict="none",
            failure=None,
            max_restarts=self._options.max_restarts,
        )
        self._record = described(bare, address, self._options.device)
        self._host = self._record.host
        return self._token

    def record(self, *, attempt: int, verdict: AttemptEnd, failure: Failure | None) -> NodeRecord:
        """Return this node's description and the end of its last attempt, for the other nodes."""
        self._recovery.ended()
        return replace(
            self._record,
            attempt=attempt,
            verdict=verdict,
            failure=failure,
            iteration=self._recovery.iteration,
            slowed=self.slowed,
        )

    @property
    def progress_folder(self) -> Path:
        """Folder where the warm-up's workers of this node write their progress."""
        return self._folder.path / "progress"

    @property
    def measured_path(self) -> Path:
        """File where the warm-up's first worker writes the measurements."""
        return self._folder.path / CLUSTER

    # -- decisions for all nodes, on the first node ---------------------------------------------------------------

    def decide(
        self, records: Sequence[NodeRecord], held: Decision | None, lost: Mapping[str, str] | None = None
    ) -> Decision:
        """Decide the next phase of all nodes. `lost` maps each lost host of the last round to the reason."""
        self._metrics.lost(lost or ())
        return self._coordinator.decide(records, held, lost)

    def after_warmup(self, decision: RunWarmup, failure: str) -> Decision:
        """Make a plan from the measurements, and print how long the warm-up and the planning took."""
        began_s = time.monotonic()
        self._terminal.begin("choosing a plan, {:.0f} s".format)
        try:
            following = self._coordinator.after_warmup(decision, failure)
        finally:
            self._terminal.end()
        measured, now_s = self._coordinator.planner.measurements, time.monotonic()
        if measured is not None and not failure:
            total_s = now_s - self._measured_from_s
            self._metrics.note(warmup_s=began_s - self._measured_from_s, search_s=now_s - began_s)
            self._terminal.say(parts_words(measured.phase_s, plan_s=now_s - began_s, total_s=total_s))
        return following

    def after_trial(self, decision: RunTrial, report: TrialReport) -> Decision:
        """Return the decision to run the next trial, or to train."""
        return self._coordinator.after_trial(decision, report)

    # -- the phase on this node -----------------------------------------------------------------------------------

    def show(self, decision: Decision, *, speaks: bool) -> None:
        """Note a decision. The deciding node (`speaks`) prints the decision."""
        self._terminal.end()
        while self._unwritten:
            self._writer.submit(self._unwritten.pop(0))
        self._begin_attempt(decision)
        self._metrics.decided(decision, self._coordinator.planner.cache if speaks else self._cache, decides=speaks)
        if not speaks:
            return
        try:
            self._terminal.tell(decision, self._coordinator.planner.measurements, self._cache)
            if isinstance(decision, RunTrial):
                asked = self._options.trials
                self._terminal.begin(
                    lambda elapsed_s: trial_progress(decision, self._num_iterations, elapsed_s, asked=asked)
                )
        except self._interruption:
            raise
        except Exception:
            logger.exception("the plan could not be shown; the job goes on")

    def _begin_attempt(self, decision: Decision) -> None:
        """Reset all counts of iterations and memory, so that no outcome mixes two attempts."""
        self._tracker, self._running, self._saved_before, self._num_iterations = None, None, "", 0
        self._recovery.decided(decision)
        self._slowdown, self.slowed = None, ""
        if isinstance(decision, RunTraining) and self._options.watch != "off":
            restarts = self._options.watch == "restart" and self._options.plan is None
            self._slowdown = Slowdown(self._options.watch_limit, restarts=restarts)
        if isinstance(decision, RunWarmup):
            self._measured_from_s, num_ranks = time.monotonic(), decision.num_ranks
            # The limit exceeds the budget: workers may start late, and a phase may end after the budget.
            self.warmup_deadline_s = wait_s(num_ranks, START_S.of(num_ranks)) + wait_s(
                num_ranks, self._options.budget_s
            )
        plan = decision.plan if isinstance(decision, RunTraining) else None
        if plan is None:
            return
        runs = decision.choice or plan.own
        self._tracker = OutcomeTracker(plan.provenance.key, runs)
        self._running = runs, decision.ranks_of(self._token)
        self._saved_before = megatron.saved_iteration(self._options.script_arguments)
        decided_here = self._coordinator.planner.cache.key == plan.provenance.key
        self._cache = (
            self._coordinator.planner.cache if decided_here else Cache(self._options.cache, plan.provenance.key)
        )

    def command(self, decision: RunWarmup | RunScript) -> WorkerCommand:
        """Return the command that this node's workers run under a decision."""
        if isinstance(decision, RunScript):
            return commands.training(decision, self._options, self._script, folder=lambda: self._folder.path)
        shutil.rmtree(self.progress_folder, ignore_errors=True)
        self.progress_folder.mkdir()
        path = self._folder.path / "probe-options.json"
        order = files.loads(WarmupOrder, decision.order, "the order of the warm-up")
        files.write(path, replace(order, progress_dir=str(self.progress_folder), output=str(self.measured_path)))
        return commands.warmup(path)

    # -- output of the workers -------------------------------------------------------------------------------------

    def saw_line(self, line: str) -> float | None:
        """Read a line of the last rank's stdout; return its step time (s) if it reports an iteration, else None."""
        iteration = megatron.parse_iteration(line)
        if iteration is None:
            memory = megatron.parse_memory(line)
            if memory is not None and self._tracker is not None:
                self._tracker.add_memory(memory)
            return None
        self._num_iterations += 1
        slower = ""
        if self._slowdown:
            slower = self._slowdown.add(iteration.step_time_s, iteration.iteration)
            self.slowed = self._slowdown.wants_restart
        for words in filter(None, (self._recovery.sees(iteration.iteration), slower)):
            self._terminal.warn(words)
        self._metrics.iterated(iteration)
        outcome = self._tracker.add(iteration) if self._tracker else None
        if outcome is not None:
            self._keep_outcome(replace(outcome, peaks=(*outcome.peaks, *self._device_peaks())))
        return iteration.step_time_s

    def _keep_outcome(self, outcome: Outcome) -> None:
        peak = outcome.fullest
        self._metrics.note(measured_memory_bytes=peak.measured_bytes if peak else None)
        self._terminal.say(outcome_line(outcome))
        # This thread drains the workers' pipes. If it waited for a file system that hangs, the training would stop.
        self._writer.submit(partial(self._write_outcome, outcome, self._cache))

    def _write_outcome(self, outcome: Outcome, cache: Cache) -> None:
        trouble = cache.keep_outcome(outcome, self._host) if self._host else cache.save(OUTCOME, outcome)
        if trouble := trouble or draw_again(cache.plan_path):
            self._terminal.warn(trouble)

    def _device_peaks(self) -> tuple[PeakReading, ...]:
        """Read the memory that this node's GPUs hold for the job."""
        if self._running is None or self._host is None or self._host.devices[0].kind != "cuda":
            return ()
        choice, ranks = self._running
        try:
            used = {
                rank: inventory.device_used_bytes(device.uuid) - device.memory_total_bytes + device.memory_free_bytes
                for rank, device in zip(ranks, self._host.devices, strict=True)
            }
        except Exception:
            # A driver error while the memory is read must not end a running job.
            logger.exception("the memory in use cannot be read")
            return ()
        return device_peaks(choice, used)

    def trained(self, *, lived_s: float, exit_codes: Collection[int]) -> bool:
        """Return whether workers trained although their output shows no iteration."""
        return has_trained(
            lived_s=lived_s,
            runs=self._running[0] if self._running else None,
            exit_codes=exit_codes,
            saved_before=self._saved_before,
            saved_now=megatron.saved_iteration(self._options.script_arguments),
        )

    # -- warm-up and trials ---------------------------------------------------------------------------------------

    def warmup_goes_on(self, *, leads: bool) -> None:
        """Show the progress of the warm-up on the node of RANK 0 (`leads`), and answer its questions."""
        self._leads = leads
        if leads:
            # On the node of RANK 0, the first worker is RANK 0.
            sign = self.warmup_sign(0)[0]
            self._terminal.warmup_goes_on(sign)
            self._metrics.warming_up(sign)
            self._answer_question()

    def _answer_question(self) -> None:
        """Answer a question of the warm-up's first worker in a thread, because the search for an answer takes seconds.

        A daemon thread never delays the end of the launcher.
        """
        asked = open_question(self.progress_folder)
        if asked is None or (self._answering is not None and self._answering.is_alive()):
            return
        # Import the search only here, because a start with a cached plan does not search.
        from pipette_launch.launch.measuring_advice import answer

        options = self._coordinator.planner.options
        margins = {"margin": options.margin, "memory_margin": options.memory_margin, "seed": options.seed}
        self._answering = Thread(target=answer, args=asked, kwargs=margins, name="pipette-advice", daemon=True)
        self._answering.start()

    def warmup_sign(self, local_rank: int) -> tuple[Sign | None, str]:
        """Return the last progress message of a local warm-up worker, and the error that this worker reported."""
        return last_sign(self.progress_folder, local_rank), last_error(self.progress_folder, local_rank)

    def workers_are_gone(self) -> None:
        """Clear the progress line, and wait until the workers have released the memory that training needs."""
        self._terminal.end()
        self._terminal.warmup_is_over(self.warmup_sign(0)[0] if self._leads else None)
        self._leads = False
        if self._host is None:
            return
        try:
            for trouble in inventory.await_memory(self._host):
                self._terminal.warn(trouble)
        except self._interruption:
            raise
        except Exception:
            logger.exception("the free memory of the devices cannot be read; the job goes on")
