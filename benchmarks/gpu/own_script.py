"""Play a script on one device in each precision, with windows and with CUDA graphs, beside its training under torchrun.

The script is `pretrain_gpt.py` of the checkout in MEGATRON_LM_DIR, else the example trainer, which has fewer flags. The
warm-up's own benches (`probe.compute.benches`) play it. The sum of its timed parts stands beside the measured step, and
the played stage's peaks beside those of the training.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch.distributed import HashStore

from benchmarks.gpu.jobs import COMMON_WORDS, ENGINE_WORDS, LOCAL_WORDS, kernel_flags
from benchmarks.gpu.launches import GRACE_S, ROOT, TORCHRUN, TRAINER, Launch, Run
from benchmarks.gpu.main_job import MODELS
from benchmarks.gpu.notebook import Notebook, Record, of_kind
from pipette_launch import megatron
from pipette_launch.cost.layers.parameters import stage_parameters
from pipette_launch.errors import PipetteError
from pipette_launch.facts import ComputeCase, Host, Job, StageReading
from pipette_launch.facts.messages import StageCase
from pipette_launch.megatron.script import version_or_newest
from pipette_launch.probe.compute.benches import LayerBench, StageBench
from pipette_launch.probe.compute.own_script import OwnScript
from pipette_launch.probe.instruments import MemoryMeter, meter
from pipette_launch.probe.lockstep import Budget, Lockstep
from pipette_launch.probe.messages import WarmupOrder
from pipette_launch.text import MIB, seconds_text
from pipette_patches import workload

ITERATIONS = 12
BUDGET_S = {"cuda": 15.0, "cpu": 5.0}
CASE_S = 45.0
"""Less time is not enough for one more case on a GPU: a training, a first lap, timings and a stage."""
MOST_APART, PEAK_APART = 0.25, 0.05
"""Largest relative differences of times and of peaks on a GPU. Toy times on a CPU are only printed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Flags of one case, and what it needs besides a device."""

    name: str
    words: tuple[str, ...] = ()
    needs_engine: bool = False
    capability: tuple[int, int] = (0, 0)
    """Least compute capability; (0, 0) = the case also runs on a CPU."""


CASES = (
    Case(name="16 bits"),
    Case(name="windows", words=("--window-size", "511,0", "--window-attn-skip-freq", "4"), capability=(7, 0)),
    Case(name="FP8", words=("--fp8-format", "hybrid"), needs_engine=True, capability=(8, 9)),
    Case(name="CUDA graphs, local", words=("--cuda-graph-impl", "local"), capability=(7, 0)),
    Case(
        name="CUDA graphs, Transformer Engine",
        words=("--cuda-graph-impl", "transformer_engine", "--te-rng-tracker"),
        needs_engine=True,
        capability=(7, 0),
    ),
    Case(
        name="FP8 with CUDA graphs",
        words=("--fp8-format", "hybrid", "--cuda-graph-impl", "local", "--te-rng-tracker"),
        needs_engine=True,
        capability=(8, 9),
    ),
    Case(name="FP4", words=("--fp4-format", "e2m1"), needs_engine=True, capability=(10, 0)),
)


def script_of() -> Path:
    """Return the script that is played."""
    checkout = os.environ.get("MEGATRON_LM_DIR")
    return Path(checkout) / "pretrain_gpt.py" if checkout else TRAINER


def measure(book: Notebook) -> None:
    """Run every case that script, device and time allow."""
    # Before this process uses the device, because the meter subtracts the memory of other processes.
    reads = meter(book.kind, book.device.uuid)
    script = script_of()
    if script != TRAINER:
        sys.path.insert(0, str(script.parent))
    workload.load(book.kind)
    book.add("script", name="the example trainer" if script == TRAINER else "pretrain_gpt.py of MEGATRON_LM_DIR")
    for case in CASES:
        reason = why_not(case, book.kind, script)
        if reason:
            book.miss(case.name, reason)
        else:
            book.attempt(case.name, partial(run, book, reads, case, script), needs_s=CASE_S)


def why_not(case: Case, device_kind: str, script: Path) -> str:
    """Return why a case cannot run here; empty if it can."""
    if case.words and script == TRAINER:
        return f"the example trainer has no {case.words[0]}; name a checkout in MEGATRON_LM_DIR"
    if case.capability > (0, 0) and device_kind == "cpu":
        return "it needs a GPU"
    if case.needs_engine and importlib.util.find_spec("transformer_engine") is None:
        return "it needs Transformer Engine, which is not installed"
    if device_kind == "cuda" and torch.cuda.get_device_capability() < case.capability:
        return f"it needs compute capability {'.'.join(map(str, case.capability))}"
    return ""


def run(book: Notebook, reads: MemoryMeter, case: Case, script: Path) -> None:
    """Train the case under torchrun, play it, and compare."""
    has_te = book.kind == "cuda" and importlib.util.find_spec("transformer_engine") is not None
    layers = (*ENGINE_WORDS, *kernel_flags(has_te=True)) if has_te else LOCAL_WORDS
    words = [*MODELS[book.kind].split(), *COMMON_WORDS[book.kind], *layers, *case.words]
    words += ["--train-iters", str(ITERATIONS)]
    if script != TRAINER:
        words += ["--mock-data", "--tokenizer-type", "NullTokenizer", "--eval-interval", "1000"]
    version, _ = version_or_newest(None, str(script), os.environ)
    job = megatron.read_job(words, world_size=1, megatron_version=version, device_kind=book.kind, is_launched=True)
    with tempfile.TemporaryDirectory() as folder:
        real = train(book, Path(folder), script, words)
        bench, stages = play(book, reads, Path(folder), script, words, job)
    if book.kind == "cuda":
        # The next training needs the memory.
        torch.cuda.empty_cache()
    step_s = parts_s(bench, job)
    steps_s = [one.step_time_s for one in real.iterations]
    measured_s = statistics.median(steps_s[len(steps_s) // 2 :])
    memory = [found for line in real.out.splitlines() if (found := megatron.parse_memory(line))]
    (reading,) = stages.found.stages
    book.add(
        "case",
        name=case.name,
        parts={time.part: sum_s(time) for time in bench.found.compute},
        stage_s=stage_s(reading, job),
        said_s=step_s,
        measured_s=measured_s,
        said_bytes=reading.allocator_peak_bytes,
        measured_bytes=memory[-1].max_allocated_bytes if memory else 0,
        said_device_bytes=reading.device_peak_bytes,
        measured_device_bytes=real.most_bytes,
        notes=[*bench.found.notes, *stages.found.notes],
    )
    judge(book, book.records[-1])


def judge(book: Notebook, found: Record) -> None:
    """Let the part fail if the script was not played as it is, or on a GPU if times or peaks are apart."""
    for note in found["notes"]:
        if "without CUDA graphs" in note:
            book.fail(f"{found['name']}: the script's own graphs", note)
    if book.kind == "cpu":
        return
    for what, most in (("s", MOST_APART), ("bytes", PEAK_APART)):
        said, measured = found[f"said_{what}"], found[f"measured_{what}"]
        if measured and abs(said / measured - 1) > most:
            name = {"s": "seconds of a step", "bytes": "peak of torch's allocator"}[what]
            book.fail(f"{found['name']}: {name}", f"{said:.4g} played, {measured:.4g} in training")


def train(book: Notebook, folder: Path, script: Path, words: Sequence[str]) -> Run:
    """Train under torchrun; raises PipetteError if the training does not end well."""
    path = os.pathsep.join(map(str, (script.parent, ROOT, ROOT / "patches")))
    launch = Launch(
        words=["--nproc-per-node", 1, script, *words],
        folder=folder,
        device=book.device,
        launcher=TORCHRUN,
        variables={"PYTHONPATH": path, "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    )
    done = launch.finish(max(book.left_s() - GRACE_S, 1.0) if book.kind == "cuda" else 400.0)
    if done.code != 0 or not done.iterations:
        raise done.failure(TORCHRUN)
    return done


def play(
    book: Notebook, reads: MemoryMeter, folder: Path, script: Path, words: Sequence[str], job: Job
) -> tuple[LayerBench, StageBench]:
    """Time the layers and run the stage as a warm-up of one device does."""
    options = WarmupOrder(
        job=job,
        hosts=(Host(name="here", address="", cores=1, devices=(book.device,)),),
        cases=(ComputeCase(tp=1, cp=1, micro_batch_size=job.own.micro_batch_size),),
        message_sizes_bytes=(8, 1 << 20, 16 << 20),
        output=str(folder),
        progress_dir=str(folder),
        script=(str(script),),
        script_arguments=tuple(words),
    )
    lockstep = Lockstep(store=HashStore(), rank=0, world_size=1, timeout_s=60.0)
    budget = Budget(started_s=time.perf_counter(), budget_s=BUDGET_S[book.kind], clock=time.perf_counter)
    bench = LayerBench(options=options, slot=0, meter=reads, script=OwnScript.of(options))
    workspace_bytes = bench.first_lap()
    bench.measure(lockstep, budget)
    stages = StageBench(options=options, slot=0, meter=reads, script=bench.script, workspace_bytes=workspace_bytes)
    stages.measure([StageCase(layout=job.own, pp_rank=0)], lockstep, budget.with_room(0.0, 1.0))
    if not bench.found.compute or not stages.found.stages:
        raise PipetteError("; ".join((*bench.found.notes, *stages.found.notes)))
    return bench, stages


def sum_s(time: object) -> float:
    """Return the seconds of forward and backward of a part."""
    return sum(getattr(time, name).median_s for name in ("forward", "input_grad", "weight_grad"))


def parts_s(bench: LayerBench, job: Job) -> float:
    """Return the seconds of a step: all micro-batches through all layers and both ends, and the optimizer."""
    times = {time.part: bench.found.stretch * sum_s(time) for time in bench.found.compute}
    batches = job.own.num_microbatches(job.batch.global_batch_size)
    passes_s = sum(times[kind] for kind in job.model.layer_kinds) + times["embedding"] + times["head"]
    count = stage_parameters(job, job.own)[0].count
    optimizer_s = count * (
        (bench.found.optimizer_s_per_parameter or 0.0) + 4 * (bench.found.gradient_s_per_byte or 0.0)
    )
    return batches * passes_s + bench.found.stretch * optimizer_s


def stage_s(reading: StageReading, job: Job) -> float:
    """Return the seconds of a step from the played stage, which may have run fewer micro-batches than the job."""
    batches = job.own.num_microbatches(job.batch.global_batch_size)
    return reading.schedule_s * batches / max(reading.num_microbatches, 1) + reading.update_s


def lines(records: Sequence[Record]) -> Iterator[str]:
    """Write a row for each case: seconds and peaks of the play beside those of the training."""
    yield from (f"The played script is {one['name']}." for one in of_kind(records, "script"))
    cases = of_kind(records, "case")
    if cases:
        yield "| case | layer | stage | by its parts | in training | | stage peak | training | | NVML | training |"
        yield "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
    for one in cases:
        layer_s = next(iter(one["parts"].values()))
        cells = [one["name"], *map(seconds_text, (layer_s, one["stage_s"], one["said_s"], one["measured_s"]))]
        cells += [_off(one["said_s"], one["measured_s"]), _mib(one["said_bytes"]), _mib(one["measured_bytes"])]
        cells += [_off(one["said_bytes"], one["measured_bytes"])]
        cells += [_mib(one["said_device_bytes"]), _mib(one["measured_device_bytes"])]
        yield f"| {' | '.join(cells)} |"
    for one in cases:
        yield from (f"{one['name']} noted: {note}" for note in one["notes"])


def _off(said: float, measured: float) -> str:
    return f"{said / measured - 1:+.1%}" if measured else "-"


def _mib(size: int) -> str:
    return f"{size / MIB:,.0f} MiB" if size else "-"
