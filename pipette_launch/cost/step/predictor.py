"""Seconds per step: simulated pipeline plus exposed data-parallel and optimizer time."""

# S = stages (model chunks), P = pipeline ranks, D = data-parallel replicas, W = ranks = slots.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from pipette_launch.cost.communication.collectives import Fabric
from pipette_launch.cost.communication.exchanges import loss_report_bytes
from pipette_launch.cost.compute.device_model import case_of
from pipette_launch.cost.compute.stages import ComputeTable
from pipette_launch.cost.layers.parameters import OnceAStep, sharding_of
from pipette_launch.cost.pipeline.engine import Engine, StageTimes
from pipette_launch.cost.pipeline.extra import StreamEngine
from pipette_launch.cost.step.assemble import StepTime, stage_times, step_parts, totals_s_K
from pipette_launch.cost.step.placed import PlacementCost, best_prices
from pipette_launch.cost.step.work import LayoutWork
from pipette_launch.errors import PlanError
from pipette_launch.facts.job import RING, Job, flag_of
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.measurements import Measurements
from pipette_launch.facts.schedule import Schedule
from pipette_launch.megatron.performance import performance_options

__all__ = ["NOT_MODELLED", "PlacementCost", "Predictor", "StepTime"]

NOT_MODELLED = (
    "What waiting slots give back: compute is measured on all slots of a host at once, so shared cores are in it.",
    "Contention for one link or network card between groups or pipelines, beyond what was measured with all at work.",
    "Sends that delay each other in Megatron's schedules: each takes its link's time, over gloo its receiver's too.",
    "Collectives that slow down the matrix product that they pass behind.",
    "Aligned starts of overlapped gradient reduction over the pipeline ranks.",
    "Gradients of norms under sequence parallelism, of learned positions, and the gradient norm: their reductions.",
    "Collectives that selective recompute of mlp or moe runs again.",
    "Megatron's own code between the passes of micro-batches, about 1 ms of a CPU each.",
    "The gradient of the whole embedding table, which torch makes and Megatron adds up for each micro-batch.",
    "Random numbers of dropout inside flash attention.",
    "On measured machines: clearing, checking and scaling gradients, and the host's work once a step, logging in it.",
    "Evaluation, checkpoints, and data loading but for Megatron-LM's own trainer on CPUs.",
)
"""What the predicted step time leaves out, one sentence each."""

_ONE_BY_ONE = "kernels are priced as launched one by one, and the step may be too long"
UNEVEN = (
    "Every expert is priced with equally many tokens, as under --moe-router-force-load-balancing; where the router "
    "chooses, published steps are 6 to 25 % longer."
)
"""Measured and imagined machines alike: the warm-up times one rank's experts with one rank's share of the tokens."""
_NCCL_DEFAULTS = "collectives are measured and priced with NCCL's default settings, and the step may be too"
UNPRICED: tuple[tuple[str, frozenset[bool | str], str], ...] = (
    ("enable_cuda_graph", frozenset({True}), _ONE_BY_ONE),
    ("external_cuda_graph", frozenset({True}), _ONE_BY_ONE),
    (
        "optimizer_cpu_offload",
        frozenset({True}),
        "the optimizer is priced as on the device, and the step is too short",
    ),
    ("use_sharp", frozenset({True}), f"{_NCCL_DEFAULTS} long"),
    ("nccl_ub", frozenset({True}), f"{_NCCL_DEFAULTS} long"),
    ("nccl_communicator_config_path", frozenset(), f"{_NCCL_DEFAULTS} long or too short"),
)
"""Performance options, their values that change the step but not the predicted one (empty = every value but None), and
the effect on the prediction."""

_CACHED_LAYOUTS = 64


class Predictor:
    """Prices the layouts of one job on one allocation."""

    def __init__(self, job: Job, measurements: Measurements) -> None:
        self._job = job
        self._measurements = measurements
        self.compute = ComputeTable(job, measurements)
        """What passes take on a slot of speed 1."""
        self.fabric = Fabric(measurements.cluster, measurements.collectives)
        """What groups of slots take to exchange something."""
        self._slowness_W = 1.0 / np.array(measurements.cluster.slot_speed)
        # Those that were asked for last are kept.
        self._work = lru_cache(_CACHED_LAYOUTS)(self._new_work)
        self._placement_cost = lru_cache(_CACHED_LAYOUTS)(self._new_placement_cost)

    def can_price(self, layout: Layout) -> bool:
        """Whether compute times for this layout were measured, or can be scaled from measured ones as `notes` says."""
        return self.compute.source(case_of(layout)) is not None

    def notes(self, layout: Layout) -> tuple[str, ...]:
        """What was assumed for this layout, one sentence each."""
        case = self.compute.note(case_of(layout))
        assumed = [*filter(None, (case, self.compute.flags_note(case_of(layout))))]
        if self._measurements.optimizer_s_per_parameter is None:
            assumed.append("The optimizer step was not measured and counts as 0 s.")
        if not self._measurements.collectives:
            assumed.append("No collective was measured; they are priced as rings over the measured links.")
        options = performance_options(self._job)
        if options.fine_grained_activation_offloading and not self.compute.copies_to_host:
            assumed.append(
                f"{flag_of('fine_grained_activation_offloading')} is not in the predicted step time: what its copies "
                f"take was not measured, and the step may be too short."
            )
        balanced = options.moe_router_force_load_balancing or options.moe_pad_expert_input_to_capacity
        if self._job.model.num_experts and layout.ep > 1 and not balanced:
            assumed.append(UNEVEN)
        if layout.cp > 1 and options.cp_comm_type != (RING,):
            assumed.append(
                f"Context parallelism is priced as a ring, not with {flag_of('cp_comm_type')} "
                f"{' '.join(options.cp_comm_type)}."
            )
        return (*assumed, *_unpriced(self._job))

    def step_time(self, layout: Layout, placement: Sequence[int], schedule: Schedule | None = None) -> StepTime:
        """Predict the step of a layout on given slots.

        Args:
            layout: one for which `can_price` holds.
            placement: RANK of each slot.
            schedule: what its pipeline follows; None = the schedule of stock Megatron.

        Raises:
            PlanError: the placement is not one of this layout on this cluster, or compute times are missing.
            LayoutError: the layout divides layers or batch unevenly.

        """
        ranks = [int(rank) for rank in placement]
        if sorted(ranks) != list(range(self._slots_of(layout))):
            raise PlanError(f"a placement holds every RANK from 0 to {layout.world_size - 1} once, got {ranks}")
        cost = self.placement_cost(layout, schedule)
        return step_parts(cost.work, cost.prices(ranks))

    def stage_times(self, layout: Layout, placement: Sequence[int], schedule: Schedule | None = None) -> StageTimes:
        """Return the passes and hops of the slowest pipeline of a layout; arguments as of `step_time`."""
        cost = self.placement_cost(layout, schedule)
        return stage_times(cost.work, cost.prices([int(rank) for rank in placement]))

    def placement_cost(self, layout: Layout, schedule: Schedule | None = None) -> PlacementCost:
        """Return what prices placements of this layout, one by one or many at once, as `step_time` does to the digit.

        Raises:
            PlanError: the layout is not one for this cluster, or compute times are missing.

        """
        self._slots_of(layout)
        cost = self._placement_cost(layout)
        if schedule is None:
            return cost
        in_streams = self._measurements.cluster.device_kind == "cuda"
        engine = StreamEngine(schedule) if in_streams else Engine(schedule)
        return cost.of(replace(cost.work, engine=engine, rank_S=np.array(schedule.rank_S)))

    def bound_s(self, layout: Layout) -> float:
        """No placement of this layout is faster: the same model with the best link everywhere.

        All slots are in use, so some pipeline rank has the slowest one; it is tried on each.
        """
        self._slots_of(layout)
        work = self._work(layout)
        fastest, slowest = float(self._slowness_W.min()), float(self._slowness_W.max())
        slowness_PK = np.full((layout.pp, layout.pp), fastest)
        np.fill_diagonal(slowness_PK, slowest)
        tried = slowness_PK if slowest > fastest else slowness_PK[:, :1]
        return float(totals_s_K(work, best_prices(work, self.fabric, tried)).min())

    def _slots_of(self, layout: Layout) -> int:
        if layout.world_size != self._measurements.cluster.num_slots:
            raise PlanError(
                f"a layout of {layout.world_size} ranks for the {self._measurements.cluster.num_slots} slots of this "
                f"cluster"
            )
        return layout.world_size

    def _new_work(self, layout: Layout) -> LayoutWork:
        report_bytes = loss_report_bytes(self._measurements.cluster.device_kind)
        loss_s = self.fabric.bound_s("all_reduce", layout.dp * layout.cp, report_bytes) if report_bytes else 0.0
        once, domain = OnceAStep.of(self._measurements), self.fabric.domain_slots
        return LayoutWork.of(self._job, layout, self.compute, once, loss_s=loss_s, domain=domain)

    def _new_placement_cost(self, layout: Layout) -> PlacementCost:
        return PlacementCost(self._work(layout), self.fabric, self._slowness_W)


def _unpriced(job: Job) -> Iterator[str]:
    """Report which of the job's flags change its step and not the prediction."""
    options = performance_options(job)
    for name, values, meaning in UNPRICED:
        value = getattr(options, name)
        if value in values or (not values and value is not None):
            flag = flag_of(name) if value is True else f"{flag_of(name)} {value}"
            yield f"{flag} is not in the predicted step time: {meaning}."
    sharding = sharding_of(job)
    if sharding and sharding.gradients:
        yield (
            "FSDP is in the predicted step time with what it exchanges, but not with the host's work in its hooks and "
            "its passes over the gradients of each micro-batch: the step may be too short."
        )
    instances = options.num_distributed_optimizer_instances
    if instances > 1 and not (sharding and sharding.gradients):
        yield (
            f"{flag_of('num_distributed_optimizer_instances')} {instances} is in the memory and not in the predicted "
            f"step time: "
            f"gradients and parameters are priced as exchanged by all replicas at once."
        )
