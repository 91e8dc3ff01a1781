"""Prediction for one configuration: memory of each pipeline rank, and step time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipette_launch.cost.layers.block import compute_dtype
from pipette_launch.cost.layers.parameters import stage_parameters
from pipette_launch.cost.memory import overhead as overheads
from pipette_launch.cost.memory.overhead import MeasuredStages, Overhead
from pipette_launch.cost.memory.peak import NO_MASK, mask_notes, peak_memory_bytes, without_mask
from pipette_launch.cost.step.assemble import StepTime
from pipette_launch.cost.step.predictor import Predictor, launching_notes
from pipette_launch.defaults import MEMORY_MARGIN
from pipette_launch.errors import FactError, OptionError, PlanError, check_share
from pipette_launch.facts import Job, Layout, Measurements
from pipette_launch.facts.devices import DeviceFile
from pipette_launch.facts.fabric import FabricSpec
from pipette_launch.facts.job import EXPANDABLE_SEGMENTS
from pipette_launch.facts.plan import Rate
from pipette_launch.facts.prediction import MemoryFit, Prediction, StageMemory
from pipette_launch.planning.machines import Kind, TargetMachines, machines_of
from pipette_launch.text import numbered


def predict(
    arguments: Sequence[str],
    *,
    gpu: str | Path | DeviceFile | None = None,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    world_size: int | None = None,
    cluster: str | Path | Measurements | None = None,
    fabric: str | Path | FabricSpec | None = None,
    rank: int | None = None,
    stage: int | None = None,
    memory_margin: float = MEMORY_MARGIN,
    megatron_version: str | None = None,
    device_kind: Kind = "cuda",
    script: str = "pretrain_gpt.py",
    environment: Mapping[str, str] | None = None,
    bridge_config: str | Path | None = None,
) -> Prediction:
    """Predict memory and step time of exactly the configuration of a Megatron command line, but start nothing.

    Args:
        arguments: words of the job's command line after the script's name.
        gpu: a device type: a name such as `H100-SXM` (`pipette devices` lists them), or a file of kind `device`.
        nodes: hosts of the job.
        gpus_per_node: devices and ranks of each host. None = the usual number for `gpu`, else 8 if 8 divides
            `world_size`.
        world_size: ranks of the job. `world_size` can replace `nodes` or `gpus_per_node`.
        cluster: path or contents of a warm-up's cluster.json. Without `gpu` and `cluster`, only memory is predicted.
        fabric: network between hosts of `gpu`: a file of kind `fabric`, or a name such as `fat-tree-2:1`.
        rank: show only the pipeline rank of this RANK.
        stage: show only this pipeline rank.
        memory_margin: share of the device memory that must stay free.
        megatron_version: such as `0.16.1`. None = the version that `script` would import, else the newest known.
        device_kind: kind of the devices, if neither `gpu` nor `cluster` is given.
        script: path of the script, which may not exist. A Megatron in the same folder gives the version.
        environment: environment variables of the job's workers.
        bridge_config: configuration that Megatron-Bridge saved, for a job whose arguments are overrides of a recipe.

    Raises:
        PipetteError: wrong flags or sizes, or an unknown name.

    """
    sizes = {"world_size": world_size, "nodes": nodes, "gpus_per_node": gpus_per_node}
    machines = machines_of(**sizes, gpu=gpu, cluster=cluster, fabric=fabric, device_kind=device_kind)
    check_share("memory_margin", memory_margin)
    job = machines.job(
        machines.dialect(arguments, script=script, bridge_config=bridge_config),
        script=script,
        megatron_version=megatron_version,
        environment=environment or {},
        for_prediction=True,
    )
    pp_ranks = _pp_ranks(job.own, rank=rank, stage=stage)
    counted = count_stages(job, pp_ranks, _overhead(job, machines), measured=machines.measured)
    return _prediction(job, machines, counted, rank=rank, margin=memory_margin, script=script)


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedStages:
    """Memory of the requested pipeline ranks, with notes."""

    stages: tuple[StageMemory, ...]
    overhead: Overhead
    stepping: tuple[int, ...]
    """Pipeline ranks whose memory peak is in the optimizer's step, which keeps no activations."""
    notes: tuple[str, ...] = ()


def _overhead(job: Job, machines: TargetMachines) -> Overhead:
    if machines.measured is not None:
        return overheads.measured_overhead(job, job.own, machines.measured)
    name, capability = machines.device_name, machines.capability
    return overheads.overhead_of(job, job.own, device_kind=machines.kind, device_name=name, capability=capability)


def count_stages(
    job: Job, pp_ranks: Sequence[int], overhead: Overhead, *, measured: Measurements | None = None
) -> CountedStages:
    """Count the memory of some pipeline ranks in the job's own layout, by the planner's formula of the peak.

    A stage with a measured peak has this peak, and the formula's kinds of memory are scaled to the peak.
    """
    parts = peak_memory_bytes(job, job.own)
    predicted = [one.total for one in parts]
    ran = MeasuredStages(job, measured) if measured else None
    peaks = ran.peaks(job.own, predicted) if ran else predicted
    at_optimizer = [one.optimizer_step > 0 and one.total == one.static + one.optimizer_step for one in parts]
    return CountedStages(
        stages=tuple(_stage(job, rank, scaled(parts[rank].by_kind(), peaks[rank]), overhead) for rank in pp_ranks),
        overhead=overhead,
        stepping=tuple(rank for rank in pp_ranks if at_optimizer[rank]),
        notes=ran.notes(job.own) if ran else (),
    )


def scaled(kinds: Mapping[str, int], peak_bytes: int) -> dict[str, int]:
    """Scale sizes by kind so that their sum is a given peak. The largest kind absorbs the rounding error."""
    counted = sum(kinds.values())
    scaled = {name: size * peak_bytes // counted for name, size in kinds.items()}
    scaled[max(scaled, key=lambda name: scaled[name])] += peak_bytes - sum(scaled.values())
    return scaled


def _stage(job: Job, pp_rank: int, kinds: Mapping[str, int], overhead: Overhead) -> StageMemory:
    allocated = sum(kinds.values())
    peak = overhead.device_peak_bytes(allocated)
    return StageMemory(
        pp_rank=pp_rank,
        num_layers=job.own.stage_layers(job.model.num_layers)[pp_rank],
        parts_bytes={**kinds, "overhead": peak - allocated},
        model_peak_bytes=allocated,
        peak_bytes=peak,
        least_bytes=overhead.least_bytes(allocated),
    )


def _prediction(
    job: Job,
    machines: TargetMachines,
    counted: CountedStages,
    *,
    rank: int | None,
    margin: float,
    script: str,
) -> Prediction:
    layout, capacity, samples = job.own, machines.capacity_bytes, job.batch.global_batch_size
    verdict = _verdict(counted, capacity, margin)
    step, rate, step_notes = _step(job, machines)
    cell = layout.cell_of(rank or 0)
    which = [] if rank is None else [f"Rank {rank} is pp {cell.pp}, dp {cell.dp}, cp {cell.cp}, tp {cell.tp}."]
    notes = (*which, *machines.notes, *job.notes, *_memory_notes(job, counted), *step_notes)
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
        global_batch_size=samples,
        num_microbatches=layout.num_microbatches(samples),
        num_parameters=sum(part.count for part in stage_parameters(job, Layout())),
        tokens_per_step=samples * job.model.seq_length,
        stages=counted.stages,
        capacity_bytes=capacity,
        memory_margin=margin,
        fits=None if verdict == "unknown" else verdict == "fits",
        verdict=verdict,
        step_time_s=step.total_s if step else None,
        breakdown_s=dict(step.breakdown_s) if step else {},
        notes=tuple(dict.fromkeys(notes)),
        megatron_version=job.megatron_version,
        rate=rate,
        limit_bytes=None if capacity is None else overheads.allowed_bytes(capacity, memory_margin=margin),
        remedies=_remedies(job, machines, counted, margin),
        expandable_peak_bytes=_expandable_peak_bytes(job, machines, counted),
    )


def _verdict(counted: CountedStages, capacity_bytes: int | None, memory_margin: float) -> MemoryFit:
    if capacity_bytes is None:
        return "unknown"
    peaks = [stage.model_peak_bytes for stage in counted.stages]
    return counted.overhead.need(peaks, capacity_bytes, memory_margin=memory_margin).verdict


def _remedies(job: Job, machines: TargetMachines, counted: CountedStages, memory_margin: float) -> tuple[str, ...]:
    """Return flags and variables, each of which makes a job fit that does not fit as it is."""
    pp_ranks = [stage.pp_rank for stage in counted.stages]

    def fits(job: Job) -> bool:
        found = count_stages(job, pp_ranks, _overhead(job, machines), measured=machines.measured)
        return _verdict(found, machines.capacity_bytes, memory_margin) == "fits"

    changed = {NO_MASK: without_mask(job), EXPANDABLE_SEGMENTS: overheads.with_expandable_segments(job)}
    if machines.capacity_bytes is None or not any(changed.values()) or fits(job):
        return ()
    return tuple(words for words, other in changed.items() if other and fits(other))


def _expandable_peak_bytes(job: Job, machines: TargetMachines, counted: CountedStages) -> int | None:
    changed = overheads.with_expandable_segments(job)
    if changed is None:
        return None
    fullest = max(counted.stages, key=lambda stage: stage.peak_bytes)
    peak = _overhead(changed, machines).device_peak_bytes(fullest.model_peak_bytes)
    return peak if peak < fullest.peak_bytes else None


def _pp_ranks(layout: Layout, *, rank: int | None, stage: int | None) -> tuple[int, ...]:
    if rank is not None and stage is not None:
        raise OptionError(("rank", "stage"), "exclude each other: a rank has one stage")
    if rank is not None and not 0 <= rank < layout.world_size:
        raise OptionError("rank", f"must be between 0 and {layout.world_size - 1}, got {rank}")
    if stage is not None and not 0 <= stage < layout.pp:
        raise OptionError("stage", f"must be between 0 and {layout.pp - 1} for pp {layout.pp}, got {stage}")
    shown = stage if rank is None else layout.cell_of(rank).pp
    return tuple(range(layout.pp)) if shown is None else (shown,)


def _memory_notes(job: Job, counted: CountedStages) -> tuple[str, ...]:
    found = [*mask_notes(job, job.own), *counted.overhead.notes(), *counted.notes, *overheads.uncounted(job)]
    if counted.stepping:
        number = len(counted.stepping)
        which = f"{numbered('Stage', counted.stepping)} {'has its' if number == 1 else 'have their'}"
        which = "Every stage shown has its" if 1 < number == len(counted.stages) else which
        found.append(f"{which} memory peak in the optimizer's step; the step's temporary tensors count as buffers.")
    if job.model.num_experts:
        found.append("Tokens are assumed to be routed evenly: an expert with more tokens needs more memory and time.")
    return tuple(found)


def _step(job: Job, machines: TargetMachines) -> tuple[StepTime | None, Rate | None, tuple[str, ...]]:
    """Price the step in torchrun's rank order. If the step cannot be priced, the note gives the reason."""
    try:
        measurements = machines.measurements(job)
        if measurements is None:
            return None, None, ("No step time: the machines are unknown; name a device type or a measured cluster.",)
        predictor = Predictor(job, measurements)
        if not predictor.can_price(job.own):
            return None, None, (f"No step time: {job.own.words()} was not measured; measure with this configuration.",)
        step = predictor.step_time(job.own, range(machines.world_size))
    except (FactError, PlanError) as error:
        return None, None, (f"No step time: {error}.",)
    rate = Rate.of(job, job.own, step.total_s, measurements.cluster, dtype=compute_dtype(job))
    launching = launching_notes(job, job.own, step.breakdown_s, step.total_s)
    return step, rate, (*measurements.notes, *predictor.notes(job.own), *launching)
