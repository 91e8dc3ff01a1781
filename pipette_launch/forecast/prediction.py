"""Predicts one configuration, from a Megatron command line and the machines, with a note on every assumption."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, ParamSpec, TypeVar, get_args

from pipette_launch import megatron
from pipette_launch.cost.layers.parameters import stage_parameters
from pipette_launch.cost.memory.overhead import Overhead, allowed_bytes, measured_overhead, overhead_of, uncounted
from pipette_launch.cost.memory.peak import NO_MASK, mask_notes, without_mask
from pipette_launch.cost.step.predictor import NOT_MODELLED, Predictor, StepTime
from pipette_launch.defaults import MEMORY_MARGIN
from pipette_launch.errors import FactError, PipetteError, PlanError, UsageError
from pipette_launch.facts import Job, Layout, Measurements
from pipette_launch.facts.fabric import FabricSpec
from pipette_launch.facts.known_devices import DeviceFile
from pipette_launch.facts.plan import Rate
from pipette_launch.facts.prediction import MemoryFit, Prediction, StageMemory
from pipette_launch.forecast import stages
from pipette_launch.forecast.machines import Kind, TargetMachines, machines_of

Method = Literal["closed", "abstract"]
P = ParamSpec("P")
T = TypeVar("T")
ARGUMENTS = {
    "--cluster": "cluster",
    "--device": "device_kind",
    "--fabric": "fabric",
    "--gpu": "gpu",
    "--gpus-per-node": "devices_per_host",
    "--hosts": "num_hosts",
    "--megatron-version": "megatron_version",
    "--memory-margin": "memory_margin",
    "--method": "method",
    "--nnodes": "num_hosts",
    "--nodes": "num_hosts",
    "--nproc-per-node": "devices_per_host",
    "--rank": "rank",
    "--stage": "stage",
    "--world-size": "world_size",
}
"""What the flags of `pipette predict` and of torchrun are called in Python; all others are Megatron's own."""


def predict_configuration(
    arguments: Sequence[str],
    *,
    world_size: int | None = None,
    num_hosts: int | None = None,
    devices_per_host: int | None = None,
    gpu: str | Path | DeviceFile | None = None,
    cluster: str | Path | Measurements | None = None,
    fabric: str | Path | FabricSpec | None = None,
    rank: int | None = None,
    stage: int | None = None,
    method: Method = "closed",
    memory_margin: float = MEMORY_MARGIN,
    megatron_version: str | None = None,
    device_kind: Kind = "cuda",
    script: str = "pretrain_gpt.py",
    environment: Mapping[str, str] | None = None,
    cache: Path | None = None,
) -> Prediction:
    """Predict memory and step time of exactly the configuration that a Megatron command line describes; start nothing.

    Args:
        arguments: the words behind the script's name, as the job would be given them.
        world_size: ranks of the job; `num_hosts` and `devices_per_host` or `cluster` tell it as well.
        num_hosts: nodes of the job.
        devices_per_host: ranks on each; 8 where it divides the world and nothing is said.
        gpu: a device type: a name such as `H100-SXM` (`pipette devices` lists them), or a file of kind `device`.
        cluster: cluster.json of a warm-up, or its contents. Without `gpu` and `cluster` only memory is predicted.
        fabric: what lies between hosts of `gpu`: a file of kind `fabric`, or `uniform`, `fat-tree-2:1` and the like.
        rank: tell only the stage that this RANK runs.
        stage: tell only this pipeline rank.
        method: `closed` counts by formula; `abstract` runs megatron-core's own code without data.
        memory_margin: part of the device's memory that must stay free.
        megatron_version: as `0.16.1`; None for the one that `script` would import, else the newest that is known.
        device_kind: `cuda` or `cpu`, where neither `gpu` nor `cluster` says it.
        script: looked at only for the Megatron beside it; it need not exist.
        environment: of the job's workers; None for none.
        cache: a folder that keeps the answers of `abstract`; None keeps none.

    Raises:
        PipetteError: the flags or sizes make no sense, a name is unknown, or what `abstract` needs is missing.

    """
    machines = machines_of(
        world_size=world_size,
        num_hosts=num_hosts,
        devices_per_host=devices_per_host,
        gpu=gpu,
        cluster=Path(cluster) if isinstance(cluster, str) else cluster,
        fabric=fabric,
        device_kind=device_kind,
    )
    margin, variables = _checked(memory_margin, method), environment or {}
    version, version_note = megatron.version_or_newest(megatron_version, script, variables)
    job = _job(arguments, machines, version, variables)
    pp_ranks, overhead = _pp_ranks(job.own, rank=rank, stage=stage), _overhead(job, machines)
    counted, notes = _memory(job, machines, pp_ranks, overhead, method, cache)
    first = (*version_note, *_rank_note(job.own, rank), *machines.notes, *job.notes)
    memory = _Memory(method, counted, margin, _remedies(job, machines, pp_ranks, overhead, margin))
    return _prediction(job, machines, memory, script, (*first, *notes))


def _job(arguments: Sequence[str], machines: TargetMachines, version: str, environment: Mapping[str, str]) -> Job:
    return megatron.read_job(
        checked_words(arguments),
        world_size=machines.world_size,
        megatron_version=version,
        device_kind=machines.kind,
        for_prediction=True,
        environment=environment,
        device_name=machines.device_name,
        capability=machines.capability,
    )


def _overhead(job: Job, machines: TargetMachines) -> Overhead:
    if machines.measured is not None:
        return measured_overhead(job, job.own, machines.measured)
    return overhead_of(
        job,
        job.own,
        device_kind=machines.kind,
        device_name=machines.device_name,
        capability=machines.capability,
    )


def _memory(
    job: Job,
    machines: TargetMachines,
    pp_ranks: Sequence[int],
    overhead: Overhead,
    method: Method,
    cache: Path | None,
) -> tuple[tuple[StageMemory, ...], tuple[str, ...]]:
    """Count the stages, and say what that rests on."""
    counted = (
        stages.closed_form(job, pp_ranks, overhead, measured=machines.measured)
        if method == "closed"
        else stages.executed(job, pp_ranks, overhead, cache=cache)
    )
    return counted.stages, (*mask_notes(job, job.own), *overhead.notes(), *_memory_notes(job, counted))


def _remedies(
    job: Job, machines: TargetMachines, pp_ranks: Sequence[int], overhead: Overhead, memory_margin: float
) -> tuple[str, ...]:
    """Name the flag with which the job fits: it leaves the data loader's mask out. Counted by formula."""
    bare = without_mask(job)
    if bare is None:
        return ()
    peaks = [[one.peak_bytes for one in stages.closed_form(each, pp_ranks, overhead).stages] for each in (job, bare)]
    verdicts = [_verdict(each, machines.capacity_bytes, memory_margin) for each in peaks]
    return (NO_MASK,) if verdicts[0] in {"tight", "too large"} and verdicts[1] == "fits" else ()


def checked_words(arguments: Sequence[str]) -> Sequence[str]:
    """Refuse a whole command line in one string: it is a sequence of strings too, of one letter each."""
    if isinstance(arguments, str) or not all(isinstance(word, str) for word in arguments):
        raise UsageError("the arguments must be a sequence of words, each a str; shlex.split makes them of one line")
    return arguments


def _checked(memory_margin: float, method: str) -> float:
    if method not in get_args(Method):
        raise UsageError(f"method must be one of {', '.join(get_args(Method))}, got {method!r}")
    if not 0 <= memory_margin < 1:
        raise UsageError(f"--memory-margin must be at least 0 and below 1 (0.08 is 8 %), got {memory_margin:g}")
    return memory_margin


@dataclass(frozen=True, slots=True)
class _Memory:
    """What was counted, how, and what must stay free."""

    method: Method
    stages: tuple[StageMemory, ...]
    margin: float
    remedies: tuple[str, ...]


def _prediction(job: Job, machines: TargetMachines, memory: _Memory, script: str, notes: tuple[str, ...]) -> Prediction:
    layout = job.own
    capacity = machines.capacity_bytes
    verdict = _verdict([one.peak_bytes for one in memory.stages], capacity, memory.margin)
    step, rate, step_notes = _step(job, machines)
    return Prediction(
        script=script,
        layout=layout,
        schedule=layout.schedule_name,
        world_size=machines.world_size,
        num_hosts=machines.num_hosts,
        devices_per_host=machines.devices_per_host,
        device_kind=machines.kind,
        device_name=machines.device_name,
        machines=machines.origin,
        global_batch_size=job.batch.global_batch_size,
        num_microbatches=layout.num_microbatches(job.batch.global_batch_size),
        num_parameters=sum(part.count for part in stage_parameters(job.model, Layout())),
        tokens_per_step=job.batch.global_batch_size * job.model.seq_length,
        method=memory.method,
        stages=memory.stages,
        capacity_bytes=capacity,
        memory_margin=memory.margin,
        fits=None if verdict == "unknown" else verdict == "fits",
        verdict=verdict,
        step_time_s=step.total_s if step else None,
        breakdown_s=dict(step.breakdown_s) if step else {},
        notes=tuple(dict.fromkeys((*notes, *step_notes))),
        megatron_version=job.megatron_version,
        rate=rate,
        limit_bytes=None if capacity is None else allowed_bytes(capacity, memory_margin=memory.margin),
        remedies=memory.remedies,
    )


def _verdict(peaks_bytes: Sequence[int], capacity_bytes: int | None, memory_margin: float) -> MemoryFit:
    if capacity_bytes is None:
        return "unknown"
    if max(peaks_bytes) <= allowed_bytes(capacity_bytes, memory_margin=memory_margin):
        return "fits"
    return "tight" if max(peaks_bytes) <= capacity_bytes else "too large"


def _pp_ranks(layout: Layout, *, rank: int | None, stage: int | None) -> tuple[int, ...]:
    """Return the pipeline ranks that the prediction shows."""
    if rank is not None and stage is not None:
        raise UsageError("--rank and --stage exclude each other: a rank has one stage")
    if rank is not None:
        if not 0 <= rank < layout.world_size:
            raise UsageError(f"--rank must be between 0 and {layout.world_size - 1}, got {rank}")
        return (layout.cell_of(rank).pp,)
    if stage is not None:
        if not 0 <= stage < layout.pp:
            raise UsageError(f"--stage must be between 0 and {layout.pp - 1} for pp {layout.pp}, got {stage}")
        return (stage,)
    return tuple(range(layout.pp))


def _rank_note(layout: Layout, rank: int | None) -> tuple[str, ...]:
    if rank is None:
        return ()
    cell = layout.cell_of(rank)
    return (f"Rank {rank} is pp {cell.pp}, dp {cell.dp}, cp {cell.cp}, tp {cell.tp}.",)


def _memory_notes(job: Job, counted: stages.Counted) -> tuple[str, ...]:
    found = [*counted.notes, *uncounted(job)]
    if counted.stepping:
        every = len(counted.stepping) == len(counted.stages)
        which = "Every stage shown holds" if every else f"Stages {', '.join(map(str, counted.stepping))} hold"
        found.append(
            f"{which} most while the optimizer steps: no activation lives then, and its temporaries are buffers."
        )
    if job.model.num_experts:
        found.append("Tokens are taken to be routed evenly: an expert that gets more needs more memory and more time.")
    return tuple(found)


def _step(job: Job, machines: TargetMachines) -> tuple[StepTime | None, Rate | None, tuple[str, ...]]:
    """Price the step in torchrun's own order of ranks; without a price, the note says why."""
    try:
        measurements = machines.measurements(job)
        if measurements is None:
            why = "No step time: nothing is known of the machines; name a device with --gpu or --cluster."
            return None, None, (why,)
        predictor = Predictor(job, measurements)
        if not predictor.can_price(job.own):
            why = f"No step time: none was measured for {job.own.words()}; measure with this configuration."
            return None, None, (why,)
        step = predictor.step_time(job.own, range(machines.world_size))
    except (FactError, PlanError) as error:
        return None, None, (f"No step time: {error}.",)
    left_out = (f"Not modelled: {sentence[0].lower()}{sentence[1:]}" for sentence in NOT_MODELLED)
    rate = Rate.of(job, job.own, step.total_s, measurements.cluster)
    return step, rate, (*measurements.notes, *predictor.notes(job.own), *left_out)


def for_python(arguments: Mapping[str, str], name: str | None = None) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make errors of a function name arguments where those of a command name flags.

    Args:
        arguments: the argument that each flag of ours is called; Megatron's flags stay flags.
        name: what help() calls the function; None for its own name.

    """

    def decorated(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def named(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return function(*args, **kwargs)
            except PipetteError as error:
                error.args = (re.sub(r"--[\w-]+", lambda flag: arguments.get(flag[0], flag[0]), str(error)),)
                raise

        named.__name__ = named.__qualname__ = name or function.__name__
        return named

    return decorated


predict = for_python(ARGUMENTS, "predict")(predict_configuration)
"""`pipette_launch.predict`: the same for Python."""
