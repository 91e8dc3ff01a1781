"""Runs whole pipeline stages of the layouts that may win, one rank on each device, and measures their peak memory.

Every slot runs other stages at the same time, under a fake process group, after the communicators were closed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from pipette_launch.facts import Job, Layout, StageReading
from pipette_launch.facts.machines.device_memory import memory_digest
from pipette_launch.facts.messages.measuring_advice import StageCase
from pipette_launch.probe.compute.peak_memory import MemoryMeter, Peak
from pipette_launch.probe.harness import Budget, Lockstep
from pipette_launch.probe.options import ProbeOptions
from pipette_launch.units import bytes_text
from pipette_patches import whole_stage
from pipette_patches.whole_stage import StageRun, stage_words
from pipette_patches.workload.layers import WorkloadError, is_out_of_memory

STAGES_SHARE = 1.0
OPTIMIZER_BYTES = {"adam": 8, "sgd": 4}
MASTER_BYTES = 4
HEAP_FACTOR = 1.6
"""On CPU the resident set grows by 1.12 to 1.61 times what the tensors hold (benchmarks/results/memory_cpu_*.md)."""


def cases_of(cases: Sequence[StageCase], slot: int, num_slots: int) -> tuple[StageCase | None, ...]:
    """One case or none of this slot for each turn; the most promising cases are measured first."""
    turns = -(-len(cases) // num_slots)
    mine = (turn * num_slots + slot for turn in range(turns))
    return tuple(cases[index] if index < len(cases) else None for index in mine)


def state_bytes(job: Job, layout: Layout, pp_rank: int) -> int:
    """Least memory of a stage's rank: the matrices of its layers, their gradients and the optimizer's states.

    Raises:
        LayoutError: the layout cuts the layers unevenly.

    """
    model = job.model
    layers = layout.stage_layers(model.num_layers)[pp_rank]
    latent = model.latent_attention
    attention = latent.weights(model.hidden_size, model.num_attention_heads) if latent else model.attention_parameters()
    dense, expert = attention + model.mlp_parameters(), 0
    if model.num_experts:
        dense, expert = attention, model.num_experts * model.mlp_parameters(model.moe_ffn_hidden_size)
    ends = (pp_rank == 0) + (pp_rank == layout.pp - 1 and model.untie_embeddings_and_output_weights)
    table = model.padded_vocab_size(layout.tp) * model.hidden_size
    parameters = (layers * dense + ends * table) // layout.tp
    # A layer may have no experts: then this counts none.
    if model.num_experts and all(model.moe_layer_freq):
        parameters += layers * expert // (layout.ep * layout.etp)
    gradient = 2 if job.grad_reduce_in_bf16 else 4
    master = MASTER_BYTES if model.dtype_bytes == 2 else 0
    shards = layout.dp * layout.cp if layout.use_distributed_optimizer else 1
    optimizer = (OPTIMIZER_BYTES.get(job.optimizer, 0) + master) // shards
    return parameters * (model.dtype_bytes + gradient + optimizer)


@dataclass(kw_only=True)
class StageBench:
    """One slot, and what it has measured so far."""

    options: ProbeOptions
    slot: int
    meter: MemoryMeter
    readings: list[StageReading] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def measure(self, cases: Sequence[StageCase], lockstep: Lockstep, budget: Budget) -> None:
        """Go through this slot's cases until rank 0 finds the budget spent; every rank makes this call.

        No process group may be open. All slots end a turn together, so that rank 0 knows how long the slowest takes.
        """
        if not cases:
            return
        whole_stage.load()
        longest_s = 0.0

        def goes_on() -> bool:
            return budget.allows(STAGES_SHARE, needs_s=longest_s)

        for turn, case in enumerate(cases_of(cases, self.slot, self.options.num_slots)):
            if not lockstep.agree(goes_on):
                left = len(cases) - turn * self.options.num_slots
                if self.slot == 0:
                    self.notes.append(f"stages: {left} of {len(cases)} were not measured for want of time")
                return
            before_s = budget.clock()
            lockstep.step(turn, -(-len(cases) // self.options.num_slots))
            if case is not None:
                self._measure(case)
            lockstep.barrier(max(budget.left_s(), 0.0))
            longest_s = max(longest_s, budget.clock() - before_s)

    def _measure(self, case: StageCase) -> None:
        with self._noting(case):
            self._check_room(case)
            runs: list[StageRun] = []
            failures: list[BaseException] = []
            peak = self.meter.peak(lambda: self._run(case, runs, failures))
            if not runs and self.options.device_kind == "cpu":
                raise failures[0]
            self.notes += runs[0].notes if runs else (self._ran_out(case),)
            self.readings.append(self._reading(case, peak, runs))

    def _run(self, case: StageCase, runs: list[StageRun], failures: list[BaseException]) -> None:
        """Run a stage; running out of memory is a result too, and the meter still reads the peak."""
        job, kind = self.options.job, self.options.device_kind
        try:
            runs.append(whole_stage.run_stage(job, case.layout, case.pp_rank, device_kind=kind))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            # The frames of the error would keep the tensors.
            failures.append(error.with_traceback(None))

    def _reading(self, case: StageCase, peak: Peak, runs: list[StageRun]) -> StageReading:
        on_cpu = self.options.device_kind == "cpu"
        return StageReading(
            job_digest=memory_digest(self.options.job),
            layout=case.layout,
            pp_rank=case.pp_rank,
            slot=self.slot,
            allocator_peak_bytes=runs[0].tally_bytes if on_cpu else peak.allocator_bytes + peak.idle_bytes,
            reserved_peak_bytes=peak.reserved_bytes,
            device_peak_bytes=peak.device_bytes,
            ran_out=not runs,
        )

    def _check_room(self, case: StageCase) -> None:
        """Refuse a stage that cannot fit: on CPU the kernel would kill this process, or another."""
        host, local = divmod(self.slot, self.options.devices_per_host)
        free = self.options.hosts[host].devices[local].memory_free_bytes
        least = state_bytes(self.options.job, case.layout, case.pp_rank)
        if self.options.device_kind == "cpu":
            needed = int(HEAP_FACTOR * max(least, case.predicted_bytes))
        else:
            # On a GPU running out of memory is a result; only a stage that cannot begin is left out.
            needed = least + self.meter.overhead_bytes()
        if needed > free:
            raise WorkloadError(
                f"{stage_words(case.layout, case.pp_rank)} needs {bytes_text(needed)}, slot "
                f"{self.options.slot_name(self.slot)} has {bytes_text(free)}"
            )

    def _ran_out(self, case: StageCase) -> str:
        words = stage_words(case.layout, case.pp_rank)
        return f"stages: {words} ran out of memory on slot {self.options.slot_name(self.slot)}"

    @contextmanager
    def _noting(self, case: StageCase) -> Iterator[None]:
        """Turn a failure of a stage into a note: the others may work."""
        try:
            yield
        except WorkloadError as error:
            self.notes.append(f"stages: {error}")
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self.notes.append(self._ran_out(case))
