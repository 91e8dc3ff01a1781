"""Base of rival planners: from the job and our measurements to a layout and a placement.

A rival decides only the options that its paper knows (degrees, micro-batch, layers per stage, order of hosts). Other
options stay as the user has them: recompute, distributed optimizer, overlap. No rival interleaves, uses CP or uses EP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from pipette_launch.cost.memory.overhead import measured_overhead
from pipette_launch.cost.memory.peak import peak_memory_bytes
from pipette_launch.defaults import MEMORY_MARGIN, SEED
from pipette_launch.errors import FactError, PlanError
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout, Recompute
from pipette_launch.facts.measurements import Measurements

Clock = Callable[[], float]
Placement = tuple[int, ...]
"""RANK of each slot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannerOptions:
    """Options that a rival may use beside the job and the measurements."""

    capacity_bytes: int
    """Memory of a device, all of it: each rival keeps a margin of its own."""
    clock: Clock
    """Seconds that only grow, such as `time.monotonic`."""
    budget_s: float = 10.0
    """For each candidate of a rival that anneals; Pipette's scripts give 10 s."""
    seed: int = SEED
    memory_margin: float = MEMORY_MARGIN
    """Part of the device's memory that stays free, for rules that say no more than that it must fit."""

    def __post_init__(self) -> None:
        if self.capacity_bytes < 1 or not self.budget_s >= 0:
            raise FactError(
                f"planners need capacity_bytes >= 1 and budget_s >= 0, got {self.capacity_bytes} and {self.budget_s}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Pick:
    """One configuration of a rival's choice."""

    layout: Layout
    placement: Placement
    claimed_s: float | None
    """Step time by its own model; None without a model."""
    note: str
    """Layouts it priced and left out, in one sentence."""


Ranking = Callable[[Job, Measurements, PlannerOptions], tuple[Pick, ...]]
"""All picks of a rival, best first by its own model. Raises PlanError if it finds no layout."""


def ranked(name: str, picks: Iterator[Pick], *, nothing: str) -> tuple[Pick, ...]:
    """Sort picks by the time of their own model; equal times keep their order. Raises PlanError without picks."""
    found = tuple(sorted(picks, key=lambda pick: pick.claimed_s or 0.0))
    if not found:
        raise PlanError(f"{name} finds no layout: {nothing}")
    return found


def torchrun_order(world_size: int) -> Placement:
    """Slot s has RANK s."""
    return tuple(range(world_size))


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, rising; none of 0."""
    return tuple(size for size in range(1, number + 1) if number % size == 0)


def tensor_sizes(job: Job, measurements: Measurements) -> tuple[int, ...]:
    """Return the TP that divides a host's devices and the model's heads, query groups and MLP."""
    model = job.model
    sides = (model.num_attention_heads, model.num_query_groups, model.ffn_hidden_size)
    return tuple(
        size
        for size in divisors(measurements.cluster.devices_per_host)
        if all(side % size == 0 for side in sides)
        and model.moe_shared_expert_intermediate_size % size == 0
        and model.moe_ffn_hidden_size % size == 0
    )


def variant(
    job: Job,
    measurements: Measurements,
    *,
    tp: int,
    pp: int,
    dp: int,
    micro_batch_size: int,
    layers_per_chunk: tuple[int, ...] = (),
    recompute: Recompute | None = None,
    ep: int = 1,
) -> Layout | None:
    """Return the user's own layout with other degrees, or None where a pin or Megatron forbids them.

    Sequence parallelism comes with TP, as Megatron's guide asks for, unless the user runs TP without it.

    Args:
        job: its own layout, pins and model.
        measurements: GPUs and CPUs allow different options.
        tp: tensor-parallel ranks.
        pp: stages.
        dp: replicas.
        micro_batch_size: samples of one micro-batch.
        layers_per_chunk: uneven stages; empty = even ones.
        recompute: None = the user's own.
        ep: expert-parallel ranks, which share experts in whole; at 1 tensor parallelism slices them.

    """
    own = job.own
    is_open = own.tp == 1 and "sequence_parallel" not in job.pinned
    wants_sequence = own.sequence_parallel or (is_open and measurements.cluster.device_kind == "cuda")
    layout = replace(
        own,
        tp=tp,
        pp=pp,
        dp=dp,
        cp=1,
        ep=ep,
        etp=tp if ep == 1 else 1,
        vpp=1,
        microbatch_group_size=0,
        layers_per_chunk=layers_per_chunk,
        chunks_after_mtp=0,
        micro_batch_size=micro_batch_size,
        sequence_parallel=tp > 1 and wants_sequence and job.model.seq_length % tp == 0,
        use_tp_pp_dp_mapping=False,
        recompute=own.recompute if recompute is None else recompute,
    )
    if job.model.num_experts and tp > 1 and not layout.sequence_parallel:
        return None  # Megatron wants it where experts meet TP
    return layout if all(getattr(layout, name) == getattr(own, name) for name in job.pinned) else None


def device_peak_bytes(job: Job, layout: Layout, measurements: Measurements) -> int:
    """Bytes of the fullest device by our closed form, overhead included, for rivals without figures of their own."""
    overhead = measured_overhead(job, layout, measurements)
    return overhead.device_peak_bytes(max(parts.total for parts in peak_memory_bytes(job, layout)))
