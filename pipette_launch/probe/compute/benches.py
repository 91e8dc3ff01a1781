"""Benchmarks that each slot (device) runs alone: layers of the user's model, and whole pipeline stages.

All slots measure the first compute case (the reference case), so that a comparison shows slow slots. The other cases
are divided among the slots. All benchmarks run under a fake process group, so no real process group may be open.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import groupby
from operator import attrgetter
from time import sleep
from typing import Any, ClassVar

from pipette_launch.facts import ComputeCase, ComputeTime, Job, Samples, StageReading
from pipette_launch.facts.measurements import LAYERS, MemoryReading, memory_digest
from pipette_launch.facts.messages import StageCase
from pipette_launch.probe.compute.own_script import OwnScript
from pipette_launch.probe.compute.slot_speeds import PaceTest
from pipette_launch.probe.compute.timing import (
    HABITS,
    WAIT_S,
    loading_time,
    loads_as_megatron_lm,
    short_layer,
    time_calls,
    time_part,
)
from pipette_launch.probe.health.nvml import read_under_load
from pipette_launch.probe.instruments import MemoryMeter, stopwatch_for
from pipette_launch.probe.lockstep import Budget, Lockstep
from pipette_launch.probe.messages import WarmupOrder, WorkerResult
from pipette_launch.text import MIB, bytes_text
from pipette_patches import whole_stage
from pipette_patches import workload as patches_workload
from pipette_patches.whole_stage import StageRun, stage_words
from pipette_patches.workload import Workload, WorkloadError, case_words, is_out_of_memory, optimizer_step

FP32_BYTES = 4
"""Bytes of one element of an fp32 main gradient or master weight."""
COMPUTE_SHARE = 0.45
"""Share of the time budget for layers; links and collectives get the rest."""
AGAIN_SHARE = 0.25
"""After this share of the budget, only the reference case times recompute."""
WORK_UP_S, WORK_UP_SHARE = 4.0, 0.07
"""Seconds of work on all GPUs before the first timing, and the largest share of the time budget for this work."""
HASTE = 4.0  # Factor by which cases after the reference case, and parts that are not layers, get less time
SWEEPS = {"cpu": 3, "cuda": 1}
"""Largest number of sweeps over a slot's compute cases. A CPU core changes its speed from one second to the next: ten
warm-ups with one sweep measured 8 to 16 ms for the same layer."""
STAGES_SHARE = 1.0
LEFT_BYTES = 64 * MIB  # If earlier layers left more memory than this in use, a note reports it
HEAP_FACTOR = 1.6
"""Factor from tensor bytes to memory on a CPU. In eleven stages of small models, the resident set grew by 1.16 to 1.61
times the bytes of the tensors (torch 2.13, megatron-core 0.16.1)."""


def weight_bytes(job: Job, case: ComputeCase) -> int:
    """Return a lower bound of the bytes of one layer, embedding and head: weights, gradients, fp32 main gradients.

    The experts are divided by the expert-parallel size, but not by the tensor-parallel size. Multi-token prediction
    counts as one more layer.
    """
    model = job.model
    experts = model.num_experts * model.expert_parameters() if model.num_experts else 0
    tables = 2 if model.untie_embeddings_and_output_weights else 1
    table = model.padded_vocab_size(case.tp) * model.hidden_size
    layers = 2 if model.mtp_num_layers else 1
    split = layers * (0 if experts else model.attention_parameters() + model.mlp_parameters()) + tables * table
    parameters = split // case.tp + layers * experts // job.own.ep
    return parameters * (2 * model.dtype_bytes + FP32_BYTES)


@dataclass(kw_only=True)
class Bench:
    """Measures one slot, case by case, and notes failed cases."""

    PHASE: ClassVar[str]

    options: WarmupOrder
    slot: int
    meter: MemoryMeter
    script: OwnScript
    """The job's own script, which builds the models."""
    found: WorkerResult = field(init=False)
    """Measurements and notes of this slot so far."""

    def __post_init__(self) -> None:
        self.found = WorkerResult(slot=self.slot)

    @property
    def job(self) -> Job:
        """Job whose layers are measured."""
        assert self.options.job is not None, "this warm-up times only links"
        return self.options.job

    def add(self, **found: object) -> None:
        """Add measurements of this slot, by the names of `WorkerResult`."""
        self.found = self.found.plus(**found)

    def note(self, words: object) -> None:
        """Add a note of this phase."""
        self.add(notes=(f"{self.PHASE}: {words}",))

    def _program(self, *, single_layers: bool) -> dict[str, Any]:
        """Return arguments that let the job's own script build a model."""
        program = partial(self.script.prepared, single_layers=single_layers)
        return {"program": program, "captures": self.script.captures}

    def check_free_memory(self, words: str, needed_bytes: int, purpose: str = "") -> None:
        """Raise WorkloadError if a case cannot fit into memory, because on a CPU the kernel would kill a process."""
        free = self.options.device(self.slot).memory_free_bytes
        if needed_bytes > free:
            raise WorkloadError(
                f"{words} needs {bytes_text(needed_bytes)}{purpose}, but slot {self.options.slot_name(self.slot)} has "
                f"{bytes_text(free)}"
            )

    def note_out_of_memory(self, words: str) -> None:
        """Add a note that a case ran out of memory on this slot."""
        self.note(f"{words} ran out of memory on slot {self.options.slot_name(self.slot)}")

    @contextmanager
    def noting(self, words: str, fail: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Turn the failure of a case into a note, and call `fail`, because other cases may work."""
        try:
            yield
        except WorkloadError as error:
            self.note(error)
            fail()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self.note_out_of_memory(words)
            fail()


def case_rounds(cases: tuple[ComputeCase, ...], slot: int, num_slots: int) -> tuple[ComputeCase, ...]:
    """Return one compute case of this slot for each round: the reference case, then the most promising cases.

    In the last round, slots without a case repeat an earlier case, so that the machine is equally busy in all rounds.
    """
    others = cases[1:]
    rounds = -(-len(others) // num_slots)
    return (cases[0], *(others[(turn * num_slots + slot) % len(others)] for turn in range(rounds)))


def joined_times(times: Sequence[ComputeTime]) -> tuple[ComputeTime, ...]:
    """Join the times of the same part and case from several sweeps, in the order of the first sweep."""
    found: dict[tuple[ComputeCase, str], ComputeTime] = {}
    for time in times:
        before = found.get((time.case, time.part))
        if before is not None:
            names = ("forward", "input_grad", "weight_grad", *(("recompute",) if time.recompute else ()))
            both = {name: [one for one in (getattr(before, name), getattr(time, name)) if one] for name in names}
            time = replace(before, **{name: reduce(Samples.joined, each) for name, each in both.items()})  # noqa: PLW2901
        found[time.case, time.part] = time
    return tuple(found.values())


def mean_time(shares: Sequence[ComputeTime]) -> ComputeTime:
    """Return the mean time of a kind of layer from its attention windows' times, each multiplied by its share."""
    if len(shares) == 1:
        return shares[0]

    def added(name: str) -> Any:
        samples = [getattr(time, name) for time in shares]
        values = zip(*(one.values_s for one in samples if one), strict=False)
        return None if None in samples else Samples(values_s=tuple(map(sum, values)))

    return replace(shares[0], **{name: added(name) for name in ("forward", "input_grad", "weight_grad", "recompute")})


def _untimed_lap(work: Workload) -> None:
    """Run each part in every way that will be timed, because a compiler makes separate code for each way."""
    for part in work.parts:
        with part.accumulating():
            part.backward(part.forward(1))
            if part.recomputed is not None:
                part.backward(part.recomputed(1))
            if part.source is not None:
                part.freeze(True)
                part.backward(part.forward(1))
                part.freeze(False)


def _run_layers(work: Workload) -> None:
    """Run one layer of each kind forward and backward."""
    for part in work.parts:
        if part.name in LAYERS:
            with part.accumulating():
                part.backward(part.forward(1))


@dataclass(kw_only=True)
class LayerBench(Bench):
    """Times the parts of a model on one slot, and reads the memory of a layer."""

    PHASE = "compute"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._habits = HABITS[self.options.device_kind]
        self._stopwatch = stopwatch_for(self.options.device_kind)

    def first_lap(self) -> int:
        """Run the reference case and its optimizer once before the time budget begins, so that compilers finish first.

        If the script fails here with CUDA graphs, but not for lack of memory, it runs without them from now on. If it
        fails without graphs, the failure is ignored here, because the later measurement fails in the same way and notes
        the reason. Returns the bytes that libraries keep as workspaces after this run.
        """
        try:
            self._build_and_run()
        except Exception as error:  # noqa: BLE001
            # A script may raise an error of any type.
            if self.script.captures and not is_out_of_memory(error):
                reason = " ".join(str(error).split()) or type(error).__name__
                self.note(f"layers were timed without CUDA graphs, because {reason}")
                self.script = replace(self.script, captures=False)
                with suppress(WorkloadError, RuntimeError, MemoryError):
                    self._build_and_run()
        self.add(notes=self.script.notes(self.job))
        # Read the workspaces after the layers are freed, because layers would count as workspaces.
        return self.meter.workspace_bytes()

    def _build_and_run(self) -> None:
        with ExitStack() as stack:
            work = self._build(self.options.cases[0], stack)
            _untimed_lap(work)
            optimizer_step(work).run()
            self._stopwatch.settle()

    def measure(self, lockstep: Lockstep, budget: Budget) -> None:
        """Measure this slot's compute cases until rank 0 decides that the time budget is spent.

        The predicted time of the next case is the shortest preparation so far, because later cases reuse compiled code,
        plus the longest timing so far without the reference case, because only this case is timed for long. All slots
        end both together, so that rank 0 knows the seconds of the slowest slot.
        """
        # Garbage collections between cases need not visit imported objects. Frozen garbage would keep its memory.
        gc.collect()
        gc.freeze()
        reference, *others = case_rounds(self.options.cases, self.slot, self.options.num_slots)
        mine = (reference, *others * SWEEPS[self.options.device_kind])
        lockstep.progress.step(0, len(mine), case_words(reference))
        untimed_s, _ = self._round(reference, lockstep, budget)
        longest_s = 0.0
        self._loading(reference)

        def goes_on() -> bool:
            return budget.allows(COMPUTE_SHARE, needs_s=untimed_s + longest_s)

        for index, case in enumerate(mine[1:], start=1):
            if not lockstep.agree(goes_on):
                break
            lockstep.progress.step(index, len(mine), case_words(case))
            case_untimed_s, case_timed_s = self._round(case, lockstep, budget)
            untimed_s, longest_s = min(untimed_s, case_untimed_s), max(longest_s, case_timed_s)
        self.found = replace(self.found, compute=joined_times(self.found.compute), stretch=self._stopwatch.stretch())

    def _round(self, case: ComputeCase, lockstep: Lockstep, budget: Budget) -> tuple[float, float]:
        """Build a case and time it; returns the seconds before and after the first timing begins.

        The layers are freed at the end of this call, because the next case needs the memory.
        """
        began_s = budget.clock()
        with ExitStack() as stack:
            work = self._ready(case, stack)
            # A slot whose case failed waits too, so that all other slots work at the same time.
            lockstep.barrier(budget.left_s())
            ready_s = budget.clock()
            if case == self.options.cases[0]:
                self._reference(work, lockstep, budget)
            elif work is not None:
                self._run(work, case, lockstep, again=budget.allows(AGAIN_SHARE))
            lockstep.barrier(budget.left_s())
        timed_s = budget.clock() - ready_s
        del work
        # Collect garbage, because Megatron's optimizer and its model refer to each other.
        gc.collect()
        return ready_s - began_s, timed_s

    def _ready(self, case: ComputeCase, stack: ExitStack) -> Workload | None:
        """Build the layers of a case and run each part once; returns None if the case fails here or failed before."""
        if case in self.found.refused:
            return None
        with self.noting(case_words(case), partial(self.add, refused=(case,))):
            work = self._build(case, stack)
            _untimed_lap(work)
            self._stopwatch.settle()
            return work
        return None  # type: ignore[unreachable]

    def _build(self, case: ComputeCase, stack: ExitStack) -> Workload:
        needed_bytes = weight_bytes(self.job, case)
        self.check_free_memory(case_words(case), needed_bytes, " for one layer's weights and gradients")
        options = {"device_kind": self.options.device_kind, **self._program(single_layers=True)}
        return stack.enter_context(patches_workload.workload(self.job, case, **options))

    def _loading(self, case: ComputeCase) -> None:
        """Measure how long loading of micro-batches keeps a CPU stage from computing."""
        if self.options.device_kind == "cuda" or not self.found.compute or not loads_as_megatron_lm(self.job):
            return
        program = self._program(single_layers=True)["program"]
        with (
            self.noting(f"the loading of micro-batches of {case_words(case)}"),
            short_layer(self.job, case, program) as layer,
        ):
            self.add(loading=loading_time(self.job, layer, case.micro_batch_size))

    def _reference(self, work: Workload | None, lockstep: Lockstep, budget: Budget) -> None:
        """Measure the reference case: the slot's speed, the parts, the speed of slow slots again, and the optimizer."""
        case, left_s = self.options.cases[0], budget.left_s()
        self._work_up(work, lockstep, budget)
        lap = None if work is None else partial(self._lap, work)
        test = PaceTest(options=self.options, slot=self.slot)
        test.first(lap, lockstep, left_s)
        if work is not None and self._run(work, case, lockstep, again=True):
            # Up to this point all slots timed the same case. In later cases some slots finish before others.
            self._stopwatch.keep_share()
        test.again(lap, lockstep, left_s)
        self.add(paces=tuple(test.paces))
        if work is None:
            return
        with self.noting(case_words(case)):
            step = optimizer_step(work)
            # In training the optimizer follows the exchange of gradients, so on a CPU the optimizer finds cold caches.
            wait = partial(sleep, WAIT_S) if self.options.device_kind == "cpu" else None
            whole_s, few_s = (
                time_calls(run, stopwatch=self._stopwatch, habits=self._habits, wait=wait).median_s
                for run in (step.run, step.run_on_single_elements)
            )
            # The distributed optimizer divides the elements among its ranks, but each rank visits all gradients.
            self.add(
                gradient_s_per_byte=min(few_s, whole_s) / step.gradient_bytes,
                optimizer_s_per_parameter=max(whole_s - few_s, 0.0) / step.num_parameters,
            )

    def _lap(self, work: Workload) -> None:
        _run_layers(work)
        self._stopwatch.settle()

    def _work_up(self, work: Workload | None, lockstep: Lockstep, budget: Budget) -> None:
        """Let all GPUs work until their clocks are as in a long training, then read clocks and power once.

        A GPU that was idle runs at boost clocks for a second or two, until the GPU is warm and its power is capped.
        """
        if self.options.device_kind != "cuda":
            return
        lockstep.barrier(budget.left_s())
        ends_s = budget.clock() + min(WORK_UP_S, WORK_UP_SHARE * budget.budget_s)
        while work is not None and budget.clock() < ends_s:
            self._lap(work)
        if work is not None:
            self.add(under_load=read_under_load(self.options.device(self.slot).uuid, partial(_run_layers, work)))
            self._stopwatch.settle()

    def _run(self, work: Workload, case: ComputeCase, lockstep: Lockstep, *, again: bool) -> bool:
        """Time all parts of a case, then read the peak memory of a layer; returns True if no part failed."""
        self.add(notes=work.notes)
        with self.noting(case_words(case), partial(self.add, refused=(case,))):
            for name, parts in groupby(work.parts, key=attrgetter("name")):
                haste = (1.0 if case == self.options.cases[0] else HASTE) * (1.0 if name in LAYERS else HASTE)
                habits = self._habits.hastier(haste) if haste > 1 else self._habits
                timed = partial(time_part, slot=self.slot, stopwatch=self._stopwatch, habits=habits, again=again)
                self.add(compute=(mean_time([timed(part, case).times(part.share) for part in parts]),))
            if any(reading.case == case for reading in self.found.memory):
                return True
            # Prefer the MoE layer, because an MoE layer holds more memory than a dense layer.
            layer = [part for part in work.parts if part.name in LAYERS][-1]
            with lockstep.progress.during("memory"), layer.accumulating():
                peak = self.meter.peak(lambda: layer.backward(layer.forward(1)))
            read = {"allocator_peak_bytes": peak.allocator_bytes, "device_peak_bytes": peak.device_bytes}
            self.add(memory=(MemoryReading(case=case, slot=self.slot, **read),))
            return True
        return False  # type: ignore[unreachable]


def stage_turns(cases: Sequence[StageCase], slot: int, num_slots: int) -> tuple[StageCase | None, ...]:
    """Return the stage that this slot runs in each turn, most promising first; None = the slot idles in the turn."""
    turns = -(-len(cases) // num_slots)
    return (*cases, *[None] * (turns * num_slots - len(cases)))[slot::num_slots]


@dataclass(kw_only=True)
class StageBench(Bench):
    """Runs whole pipeline stages, one rank on each device, and reads the peak memory.

    All slots run different stages at the same time, after the communicators were closed.
    """

    PHASE = "stages"

    workspace_bytes: int
    """Bytes that libraries keep as workspaces in torch's allocator after the untimed first run, as in training."""

    def measure(self, cases: Sequence[StageCase], lockstep: Lockstep, budget: Budget) -> None:
        """Measure this slot's stages until rank 0 decides that the time budget is spent; every rank calls this.

        All slots end a turn together, so that rank 0 knows the time of the slowest slot.
        """
        if not cases:
            return
        longest_s = 0.0

        def goes_on() -> bool:
            return budget.allows(STAGES_SHARE, needs_s=longest_s)

        for turn, case in enumerate(stage_turns(cases, self.slot, self.options.num_slots)):
            if not lockstep.agree(goes_on):
                left = len(cases) - turn * self.options.num_slots
                if self.slot == 0:
                    self.note(f"{left} of {len(cases)} were not measured, because the budget was spent")
                return
            before_s = budget.clock()
            turns = -(-len(cases) // self.options.num_slots)
            lockstep.progress.step(turn, turns, stage_words(case.layout, case.pp_rank) if case else "")
            if case is not None:
                self._measure(case)
            lockstep.barrier(budget.left_s())
            longest_s = max(longest_s, budget.clock() - before_s)

    def _measure(self, case: StageCase) -> None:
        words = stage_words(case.layout, case.pp_rank)
        on_cpu = self.options.device_kind == "cpu"
        if on_cpu:
            needed_bytes = int(HEAP_FACTOR * max(case.state_bytes, case.predicted_bytes))
        else:
            # On a GPU an out-of-memory error is a valid result. So a stage is left out only if its weights, gradients
            # and optimizer states cannot fit.
            needed_bytes = case.state_bytes + self.meter.overhead_bytes()
        with self.noting(words):
            self.check_free_memory(words, needed_bytes)
            runs: list[StageRun | None] = []
            peak = self.meter.peak(lambda: runs.append(self._run(case)))
            (run,) = runs
            kept_bytes = min(peak.idle_bytes, self.workspace_bytes)
            left_bytes = peak.idle_bytes - kept_bytes
            if left_bytes > LEFT_BYTES:
                self.note(
                    f"{words} ran beside {bytes_text(left_bytes)} that earlier layers left on slot "
                    f"{self.options.slot_name(self.slot)}; its peak does not include them"
                )
            if run is None:
                self.note_out_of_memory(words)
                if on_cpu:
                    return
            reading = StageReading(
                job_digest=memory_digest(self.job),
                layout=case.layout,
                pp_rank=case.pp_rank,
                slot=self.slot,
                allocator_peak_bytes=run.tally_bytes if run and on_cpu else peak.allocator_bytes + kept_bytes,
                reserved_peak_bytes=max(peak.reserved_bytes - left_bytes, 0),
                device_peak_bytes=peak.device_bytes,
                ran_out=run is None,
                allocator_config=self.job.allocator_config,
                **(run.times if run else {}),
            )
            self.add(stages=(reading,))

    def _run(self, case: StageCase) -> StageRun | None:
        """Run a stage; returns None if memory runs out, so that the meter still reads the peak."""
        kind = self.options.device_kind
        try:
            run = partial(whole_stage.run_stage, self.job, case.layout, case.pp_rank, device_kind=kind)
            return run(stopwatch=stopwatch_for(kind), **self._program(single_layers=False))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None
