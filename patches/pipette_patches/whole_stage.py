"""One whole stage of a training job on a real device: the memory and the seconds that one rank really uses.

`play` runs the job's own script as one rank of the full world size with real tensors. Warm-up, steady state and
cooldown run with as many micro-batches in flight as in the job. The optimizer step follows. No message is sent to other
ranks. Random noise of the same shape replaces each received tensor.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from pipette_launch.facts import Cell, Job, Layout
from pipette_launch.facts.schedule import num_warmup
from pipette_patches.play import Play, Step, Stop, played
from pipette_patches.replacements import Replacement, Replacements, nothing, wrapping
from pipette_patches.storage_meter import StorageMeter, metered, recounting, under
from pipette_patches.workload import MakeProgram, refusals_named

_STEPS = 2
_TIMED = {"cpu": 3, "cuda": 1}
"""Number of timed steps. On a CPU the timed steps follow the metered steps, because the meter slows each operation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRun:
    """The memory and the seconds that one stage used during its run."""

    tally_bytes: int
    """Peak bytes of all tensors, rounded up as by CUDA's allocator, without temporaries of operations; 0 on CUDA."""
    parts: dict[str, int]
    """`tally_bytes` by the label under which the meter counted them."""
    times: dict[str, Any] = field(default_factory=dict)
    """Fields of `StageReading` with the time of a step; empty without a stopwatch."""


def run_stage(
    job: Job,
    layout: Layout,
    pp_rank: int,
    *,
    device_kind: str,
    program: MakeProgram,
    stopwatch: Any = None,
    captures: bool = False,
) -> StageRun:
    """Train the first rank of a stage for two steps, and with a stopwatch for three more on a CPU; free everything.

    `workload.load` must have run, and no process group may exist.

    `program` is the job's own script. `stopwatch` is a stopwatch of `probe.instruments`; None times no step. If the
    script `captures` CUDA graphs, each step runs all micro-batches. Raises WorkloadError if the script refuses the
    stage. Raises out-of-memory errors of torch unchanged.
    """
    every = layout.num_microbatches(job.batch.global_batch_size)
    num_microbatches = every if captures else enough_microbatches(layout, pp_rank, every)
    steps = _Steps(
        layout=layout,
        num_microbatches=num_microbatches,
        captures=captures,
        on_cpu=device_kind == "cpu",
        timer=_StepTimer(stopwatch, num_microbatches) if stopwatch else None,
    )

    def start() -> None:
        with steps.metered():
            program(job, layout)()

    rank = first_rank(layout, pp_rank)
    with (
        refusals_named(stage_words(layout, pp_rank)),
        Replacements((_received(steps.timer), *_WITHOUT_PEERS)),
        played(start, rank=rank, world_size=layout.world_size, on_step=steps.on_step),
    ):
        peak = max(steps.meter.stretches, key=lambda stretch: stretch.total)
    parts = {name: size for name, size in peak.at_peak.items() if size}
    times = steps.timer.times() if steps.timer else {}
    return StageRun(tally_bytes=peak.total, parts=parts, times=times)


@dataclass(kw_only=True)
class _Steps:
    """The training steps of a stage: the meter counts the first two, and a stopwatch takes the time of the last."""

    layout: Layout
    num_microbatches: int
    captures: bool
    on_cpu: bool
    timer: _StepTimer | None
    meter: StorageMeter = field(default_factory=StorageMeter)
    _unmetered: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @contextlib.contextmanager
    def metered(self) -> Iterator[StorageMeter]:
        """Count tensors during the block. On a GPU torch's allocator counts, and includes the memory of kernels."""
        with metered() if self.on_cpu else contextlib.nullcontext(self.meter) as self.meter, self._unmetered:
            yield self.meter

    def on_step(self, play: Play, step: Step) -> Any:
        """Run a step, or end the play."""
        timed = 0 if self.timer is None else _TIMED["cpu" if self.on_cpu else "cuda"]
        last = _STEPS + (timed if self.on_cpu else 0)
        for optimizer in play.optimizers:
            _never_skips(optimizer)
        if self.timer:
            self.timer.end()
        if play.num_steps == _STEPS + 1:
            self.meter.mark()
            play.may_end = True
            if self.on_cpu:
                # Operations run at full speed until the program ends.
                self.meter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
                self._unmetered.callback(self.meter.__enter__)
        if play.num_steps > last:
            raise Stop
        if play.num_steps == 1 and not self.captures:
            # The first step makes the optimizer's states. Interleaved stages take micro-batches in groups.
            few = 1 if self.layout.vpp == 1 else self.layout.microbatch_group_size or self.layout.pp
            return step.run(num_microbatches=min(few, self.num_microbatches))
        if self.timer and play.num_steps > last - timed:
            return self.timer.run(step, play.optimizers)
        return step.run(num_microbatches=self.num_microbatches)


class _StepTimer:
    """Times training steps of a stage, without the loading of batches and without the noise of received tensors."""

    def __init__(self, stopwatch: Any, num_microbatches: int) -> None:
        self._stopwatch, self._num_microbatches = stopwatch, num_microbatches
        self._marks: list[Any] = []
        """Begin and end of the present schedule, then the end of each optimizer's step."""
        self._pauses: list[tuple[Any, Any]] = []
        self._times_s: list[tuple[float, float]] = []

    def run(self, step: Step, optimizers: list[Any]) -> Any:
        """Run forward and backward of a step; the step ends with the next call of `end`."""
        for optimizer in optimizers:
            if "step" not in vars(optimizer):
                optimizer.step = self._marked(optimizer.step)
        batches = step.arguments["data_iterator"]
        loaded = [*map(self._loaded, batches)] if isinstance(batches, list) else self._loaded(batches)
        self._stopwatch.check_speed()
        run = self._marked(step.run)
        self._marks.append(self._stopwatch.mark())
        return run(num_microbatches=self._num_microbatches, data_iterator=loaded)

    def _loaded(self, batches: Any) -> Any:
        """Load the batches of a step; returns None for a stage without data."""
        if batches is None:
            return None
        endless = iter(functools.partial(next, batches), None)
        return itertools.chain([*itertools.islice(endless, self._num_microbatches)], endless)

    def _marked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def marked(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self._marks.append(self._stopwatch.mark())
            return result

        return marked

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the block out of the present schedule."""
        before = self._stopwatch.mark()
        yield
        self._pauses.append((before, self._stopwatch.mark()))

    def end(self) -> None:
        """Keep the seconds of the present step, at the speeds of the device before and after the step."""
        between = self._stopwatch.seconds
        if len(self._marks) > 2:
            begin, middle, *_, end = self._marks
            for _ in range(2):
                paused_s = sum(itertools.starmap(between, self._pauses))
                self._times_s.append((between(begin, middle) - paused_s, between(middle, end)))
                self._stopwatch.check_speed()
        self._marks.clear()
        self._pauses.clear()

    def times(self) -> dict[str, Any]:
        """Return the medians over all timed steps by `StageReading`'s names; empty if no optimizer has made a step."""
        self.end()
        medians = map(statistics.median, zip(*self._times_s, strict=True))
        found = dict(zip(("schedule_s", "update_s"), medians, strict=False))
        return found and {**found, "num_microbatches": self._num_microbatches}


def first_rank(layout: Layout, pp_rank: int) -> int:
    """Return the first rank of a pipeline stage, whose shard of the distributed optimizer has no padding."""
    return layout.rank_of(Cell(pp=pp_rank, dp=0, cp=0, tp=0))


def enough_microbatches(layout: Layout, pp_rank: int, num_microbatches: int) -> int:
    """Return the number of micro-batches after which a rank only repeats its passes, at most `num_microbatches`.

    With 1F1B the result covers the warm-up and two rounds of one forward and one backward. With interleaved stages the
    result covers the warm-up and two rounds of a micro-batch group through all chunks, rounded up to whole groups.
    """
    if layout.vpp == 1:
        return min(num_microbatches, layout.pp - pp_rank - 1 + 2)
    group = layout.microbatch_group_size or layout.pp
    ahead = num_warmup(layout.pp, layout.vpp, group, pp_rank)
    groups = -(-ahead // (group * layout.vpp)) + 2
    # An incomplete last group of micro-batches has another order of passes, so run all micro-batches.
    return min(num_microbatches, groups * group) if num_microbatches % group == 0 else num_microbatches


def stage_words(layout: Layout, pp_rank: int) -> str:
    """Return the name of a stage for messages."""
    return f"stage {pp_rank} of {layout.words()}"


def inner_optimizers(optimizer: Any) -> list[Any]:
    """Return Megatron's optimizers for dense and expert parameters, or its single optimizer."""
    return list(getattr(optimizer, "chained_optimizers", None) or [optimizer])


def _never_skips(optimizer: Any) -> None:
    """Let an fp16 optimizer step even if gradients are not finite, because a skipped step makes no states."""
    name = "_unscale_main_grads_and_check_for_nan"
    for inner in inner_optimizers(optimizer):
        unscale: Callable[[], bool] | None = getattr(inner, name, None)
        if unscale is not None:
            setattr(inner, name, lambda unscale=unscale: bool(unscale()) and False)


def _received(timer: _StepTimer | None) -> Replacement:
    """Fill received tensors with noise, because with zeros all tokens would choose the same experts."""

    def noise(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        received = original(*args, **kwargs)
        with torch.no_grad(), timer.paused() if timer else contextlib.nullcontext():
            for tensor in received[:2]:
                if isinstance(tensor, torch.Tensor):
                    tensor.normal_()
        return received

    module = "megatron.core.pipeline_parallel.p2p_communication"
    return Replacement(module=module, path="P2PCommunicator._communicate", make=wrapping(noise))


_FSDP_BUFFER = "megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer"
_WITHOUT_PEERS = (
    # Megatron-FSDP would compare this rank's shard with the shards of ranks that do not exist.
    Replacement(module=_FSDP_BUFFER, path="validate_uneven_dtensor", make=nothing),
    # Gathered weights and unreduced gradients count as "whole". Megatron-FSDP frees them by resizing their storages.
    Replacement(module=_FSDP_BUFFER, path="DataParallelBuffer.fetch_bucket", make=functools.partial(under, "whole")),
    Replacement(module="torch", path="UntypedStorage.resize_", make=recounting),
)
