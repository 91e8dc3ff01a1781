"""The step time of layouts on given slots, for one placement or many at once."""

# Letters of array axes: K = placements, W = ranks = slots, P = pipeline ranks, D = replicas, S = stages (model chunks).
# R = replicas of all placements, sorted by placement. G = groups of one kind, M = members of a group. L = groups of one
# kind with members in the same pipeline rank and replica.

from __future__ import annotations

import copy
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from pipette_launch.cost.communication.collectives import Fabric, Routes
from pipette_launch.cost.communication.exchanges import Groups, group_sizes, rank_strides
from pipette_launch.cost.compute.device_model import case_of
from pipette_launch.cost.compute.stages import ComputeTable
from pipette_launch.cost.layers.loads import Collective
from pipette_launch.cost.layers.parameters import sharding_of
from pipette_launch.cost.pipeline.engine import Engine, StageTimes
from pipette_launch.cost.pipeline.streams import StreamEngine
from pipette_launch.cost.step.assemble import LAUNCHING, StepTime, stage_times, step_parts, totals_s_K
from pipette_launch.cost.step.work import LayoutWork, Prices, once_a_step
from pipette_launch.errors import PlanError
from pipette_launch.facts.job import ENGINE, LOCAL, OPTIMIZERS, RING, Job, flag_of
from pipette_launch.facts.layout import Floats, Ints, Layout
from pipette_launch.facts.measurements import Measurements
from pipette_launch.facts.schedule import Schedule
from pipette_launch.text import rate_text, seconds_text

_SLOTS_AT_ONCE = 1 << 18
"""Placements are priced in batches of at most this number of slots, so that each array takes some MB."""


class PlacementCost:
    """The step time of one layout as a function of the placement alone."""

    def __init__(self, work: LayoutWork, fabric: Fabric, slowness_W: Floats, *, factor: float = 1.0) -> None:
        self.work = work
        self.fabric = fabric
        self.slowness_W = slowness_W
        self.factor = factor
        """Learned factor on the predicted step of this layout; `cost` and `costs` include the factor."""
        self.groups = Groups.of(work.layout, instances=work.shard_copies)
        self._slots = np.arange(work.layout.world_size)
        self._lanes: dict[str, Ints] = {}

    def times(self, factor: float) -> PlacementCost:
        """Return a copy of this step time function with another learned factor."""
        same = copy.copy(self)
        same.factor = factor
        return same

    def of(self, work: LayoutWork) -> PlacementCost:
        """Return a copy of this step time function with other work, such as the work under another schedule."""
        same = copy.copy(self)
        same.work = work
        return same

    def cost(self, placement: Sequence[int] | Ints) -> float:
        """Return the predicted seconds of a step; `placement` is the RANK of each slot."""
        return float(self.costs(np.asarray(placement, dtype=np.int64)[None])[0])

    def costs(self, placement_KW: Ints) -> Floats:
        """Return the predicted seconds of a step for each placement (row), with the same digits as `cost`."""
        block = max(1, _SLOTS_AT_ONCE // len(self._slots))
        blocks = [placement_KW[first : first + block] for first in range(0, len(placement_KW), block)]
        seconds = [totals_s_K(self.work, self._prices(some)) for some in blocks]
        return (np.concatenate(seconds) if seconds else np.zeros(0)) * self.factor

    def prices(self, placement: Sequence[int] | Ints) -> Prices:
        """Return the seconds of each group's exchanges under a placement, without the learned `factor`."""
        return self._prices(np.asarray(placement, dtype=np.int64)[None])

    def _prices(self, placement_KW: Ints) -> Prices:
        work, groups = self.work, self.groups
        # Slot of each RANK.
        slot_KW = np.empty_like(placement_KW)
        slot_KW[np.arange(len(placement_KW))[:, None], placement_KW] = self._slots
        forward_s, backward_s = self._hops_PR(slot_KW)
        reduce_s, gather_s = self._once_a_step_SK(slot_KW)
        embedding_s_K = np.zeros(len(slot_KW))
        if work.traffic.embedding_bytes:
            pairs = _placed(slot_KW, groups.embedding)
            seconds_G = self.fabric.seconds_G("all_reduce", pairs, work.traffic.embedding_bytes)
            embedding_s_K = seconds_G.reshape(len(slot_KW), -1).max(axis=1)
        return Prices(
            slowness_PD=_columns(self.slowness_W[slot_KW][:, groups.grid_PDCT].max(axis=(3, 4))),
            exchange_s_PD=self._exchange_s_PR(slot_KW),
            forward_hop_s_PD=forward_s,
            backward_hop_s_PD=backward_s,
            reduce_s_SK=reduce_s,
            gather_s_SK=gather_s,
            embedding_s_K=embedding_s_K,
        )

    def _exchange_s_PR(self, slot_KW: Ints) -> tuple[Floats, ...]:
        # A collective appears twice in `exchanges` if compute hides only one of its two uses, so cache its price.
        priced: dict[tuple[str, str, float], Floats] = {}
        for item in self.work.exchanges:
            key = (item.kind, item.group, item.size_bytes)
            if key not in priced:
                slots_GM = _placed(slot_KW, getattr(self.groups, item.group))
                seconds_G = self.fabric.seconds_G(item.kind, slots_GM, item.size_bytes)
                priced[key] = self._lanes_PR(item.group, seconds_G.reshape(len(slot_KW), -1))
        return tuple(priced[item.kind, item.group, item.size_bytes] for item in self.work.exchanges)

    def _lanes_PR(self, group: str, seconds_KG: Floats) -> Floats:
        """Return the seconds of the slowest group on each pipeline rank of each replica, for which all ranks wait."""
        if group not in self._lanes:
            self._lanes[group] = self.groups.met_PDL(getattr(self.groups, group))
        lane_PDL = self._lanes[group]
        if lane_PDL.shape[2] == 1:
            return _columns(seconds_KG[:, lane_PDL[:, :, 0]])
        return _columns(seconds_KG[:, lane_PDL].max(axis=3))

    def _hops_PR(self, slot_KW: Ints) -> tuple[Floats, Floats]:
        """Return the seconds of a send from each pipeline rank to the next, and back, on a replica's slowest link."""
        layout = self.work.layout
        if layout.pp == 1:
            zero = np.zeros((1, len(slot_KW) * layout.dp))
            return zero, zero
        shape = (len(slot_KW), layout.pp, layout.dp, layout.cp * layout.tp)
        sender, receiver = (slot_KW[:, end] for end in self.groups.forward_hop.T)
        forward_s, backward_s = (
            _columns(self.fabric.send_s(*way, self.work.hop_bytes).reshape(shape).max(axis=3))
            for way in ((sender, receiver), (receiver, sender))
        )
        return forward_s, backward_s

    def _once_a_step_SK(self, slot_KW: Ints) -> tuple[Floats, Floats]:
        """Return the seconds of gradient reduction and parameter gather of the slowest group of every stage."""
        work, layout = self.work, self.work.layout
        reduce_s, gather_s = (np.zeros((layout.num_chunks, len(slot_KW))) for _ in range(2))
        uses = [(reduce_s, work.reduce_kind, work.gradient_bytes_S2)]
        if layout.use_distributed_optimizer:
            uses.append((gather_s, "all_gather", work.parameter_bytes_S2))
        for ranks_GM, column in ((self.groups.dp_cp, 0), (self.groups.expert_dp, 1)):
            if ranks_GM.shape[1] == 1 or not any(sizes_S2[:, column].any() for _, _, sizes_S2 in uses):
                continue
            rings: dict[int, Routes] = {}
            for seconds_SK, kind, sizes_S2 in uses:
                shift = self.fabric.ring_shift(kind)
                if shift not in rings:
                    rings[shift] = self.fabric.routes(kind, _placed(slot_KW, ranks_GM))
                known: dict[bytes, Floats] = {}
                for first in range(0, layout.num_chunks, layout.pp):
                    size_P = sizes_S2[first : first + layout.pp, column]
                    # Most chunks of a pipeline rank have equal sizes, so price each size once.
                    if size_P.tobytes() not in known:
                        known[size_P.tobytes()] = self._rings_s_PK(kind, ranks_GM.shape, rings[shift], size_P)
                    seconds_SK[first : first + layout.pp] += known[size_P.tobytes()]
        return reduce_s, gather_s

    def _rings_s_PK(self, kind: Collective, shape: tuple[int, ...], routes: Routes, size_P: Floats) -> Floats:
        """Return the seconds of the slowest ring of each pipeline rank; a ring without data takes 0 s."""
        lanes = shape[0] // self.work.layout.pp
        num_placements = len(routes.hosts_G) // shape[0]
        size_G = np.tile(np.repeat(size_P, lanes), num_placements)
        seconds_G = self.fabric.routed_s_G(kind, shape[1], routes, size_G) * (size_G > 0)
        return np.asarray(seconds_G.reshape(num_placements, -1, lanes).max(axis=2).T)


def fewest_hosts(work: LayoutWork, fabric: Fabric) -> dict[str, int]:
    """Return the least number of hosts of each kind of group, by its name in `Groups`, over all placements."""
    sizes = group_sizes(work.layout, instances=work.shard_copies)
    return {name: fabric.least_hosts(sizes[name], stride) for name, stride in rank_strides(work.layout).items()}


def best_prices(work: LayoutWork, fabric: Fabric, slowness_PK: Floats) -> Prices:
    """Price every group over the best links (`Fabric.bound_s`), so that no placement of the layout has lower prices.

    `slowness_PK` is 1 / speed of the slot of each pipeline rank, one column for each priced step.
    """
    layout, cases = work.layout, (1, slowness_PK.shape[1])
    sizes, fewest = group_sizes(layout, instances=work.shard_copies), fewest_hosts(work, fabric)

    def least_s(kind: Collective, group: str, size_bytes: float) -> float:
        return fabric.bound_s(kind, sizes[group], size_bytes, fewest=fewest[group])

    def once_a_step_SK(kind: Collective, bytes_S2: Floats) -> Floats:
        dense_S, expert_S = (
            fabric.bounds_s(kind, sizes[group], bytes_S, fewest=fewest[group])
            for group, bytes_S in zip(("dp_cp", "expert_dp"), bytes_S2.T, strict=True)
        )
        return np.tile((dense_S + expert_S)[:, None], cases)

    hop_PK = np.full(slowness_PK.shape, least_s("send", "forward_hop", work.hop_bytes))
    tied = work.traffic.embedding_bytes
    return Prices(
        slowness_PD=slowness_PK,
        exchange_s_PD=tuple(
            np.full(slowness_PK.shape, least_s(item.kind, item.group, item.size_bytes)) for item in work.exchanges
        ),
        forward_hop_s_PD=hop_PK,
        backward_hop_s_PD=hop_PK,
        reduce_s_SK=once_a_step_SK(work.reduce_kind, work.gradient_bytes_S2),
        gather_s_SK=once_a_step_SK("all_gather", work.parameter_bytes_S2),
        embedding_s_K=np.array([fabric.bound_s("all_reduce", 2, tied) if tied else 0.0]),
    )


def _placed(slot_KW: Ints, ranks_GM: Ints) -> Ints:
    return slot_KW[:, ranks_GM].reshape(-1, ranks_GM.shape[1])


def _columns(values_KPD: Floats) -> Floats:
    return np.asarray(values_KPD.transpose(1, 0, 2).reshape(values_KPD.shape[1], -1))


UNEVEN = (
    "Every expert is priced with the same number of tokens, as under --moe-router-force-load-balancing. Published "
    "steps with a free router are 6 to 25 % longer."
)
"""Assumption on measured and imagined machines: the warm-up also gives all experts equal shares of the tokens."""
WHOLE_LAYERS = (
    "CUDA graphs of whole layers are priced, but a graph cannot hold experts whose number of tokens changes. Name the "
    "other parts: --cuda-graph-modules attn moe_router moe_preprocess (before 0.18: --cuda-graph-scope)."
)
"""Note on layers with experts that Megatron cannot capture (core_v0.20, docs/user-guide/features/cuda_graph.md)."""
_NCCL_DEFAULTS = "collectives have the times of NCCL's default settings, and the step may be too"
_WHOLE = "attention is priced over whole sequences instead of single documents, and the step may be too long"
UNPRICED: tuple[tuple[str, Container[bool | str | int], str], ...] = (
    ("optimizer_cpu_offload", frozenset({True}), "the optimizer is priced as on the device, and the step is too short"),
    (
        "cpu_offloading_num_layers",
        range(1, 1 << 20),
        "copies to the host may take longer than the layers that hide them",
    ),
    ("use_sharp", frozenset({True}), f"{_NCCL_DEFAULTS} long"),
    ("nccl_ub", frozenset({True}), f"{_NCCL_DEFAULTS} long"),
    ("moe_flex_dispatcher_backend", frozenset({"ncclep"}), "exchanges of experts are priced as with HybridEP"),
    ("sft", frozenset({True}), _WHOLE),
    ("dataloader_inter_document_masking", frozenset({True}), _WHOLE),
    ("nccl_communicator_config_path", frozenset(), f"{_NCCL_DEFAULTS} long or too short"),
)
"""Triples of a performance option, its values that change the step but not the prediction, and the effect. An empty
tuple of values means all values except None."""

_LAUNCHES_MATTER = 0.1
"""A note names cures if devices wait for launches during at least this share of a step."""

_CACHED_LAYOUTS = 64


class Predictor:
    """Predicts step times for layouts of one job on one allocation."""

    def __init__(self, job: Job, measurements: Measurements) -> None:
        self._job = job
        self._measurements = measurements
        self.compute = ComputeTable(job, measurements)
        self._once = once_a_step(job, measurements)
        self.fabric = Fabric(measurements.cluster, measurements.collectives)
        self._slowness_W = 1.0 / np.array(measurements.cluster.slot_speed)
        self._work = lru_cache(_CACHED_LAYOUTS)(self._new_work)
        self._placement_cost = lru_cache(_CACHED_LAYOUTS)(
            lambda layout: PlacementCost(self._work(layout), self.fabric, self._slowness_W)
        )

    def can_price(self, layout: Layout) -> bool:
        """Return whether compute times of this layout were measured or can be scaled; `notes` reports scaling."""
        return self.compute.source(case_of(layout)) is not None

    def notes(self, layout: Layout) -> tuple[str, ...]:
        """Return the assumptions behind this layout's step time, one sentence each."""
        case = self.compute.note(case_of(layout))
        assumed = [*filter(None, (case, self.compute.flags_note(case_of(layout)), self.compute.stages_note))]
        if self._measurements.optimizer_s_per_parameter is None:
            assumed.append("The optimizer step was not measured and counts as 0 s.")
        cluster = self._measurements.cluster
        if cluster.num_slots > 1 and not cluster.imagined and not self._measurements.group_times:
            assumed.append("No collective was measured; collectives are priced as rings over single links.")
        options = self._job.options
        if options.fine_grained_activation_offloading and not self.compute.copies_to_host:
            assumed.append(
                f"{flag_of('fine_grained_activation_offloading')} is not in the predicted step time, because its "
                f"copies to the host were not measured: the step may be too short."
            )
        if self._measurements.host_bytes_per_s and layout.recompute.offload_modules:
            rate = rate_text(self._measurements.host_bytes_per_s)
            assumed.append(f"Activations go to the host and come back at {rate} each way.")
        if not OPTIMIZERS[self._job.optimizer].is_elementwise:
            optimizer = f"--optimizer {self._job.optimizer}"
            assumed.append(f"{optimizer} is priced by its memory traffic alone, so the step is too short.")
        graphs, has_fixed_shapes = options.graphs, options.moe_pad_expert_input_to_capacity or options.moe_paged_stash
        if self._job.model.num_experts and graphs.impl in (LOCAL, ENGINE) and not (graphs.modules or has_fixed_shapes):
            assumed.append(WHOLE_LAYERS)
        balanced = options.moe_router_force_load_balancing or options.moe_pad_expert_input_to_capacity
        if self._job.model.num_experts and layout.ep > 1 and not balanced:
            assumed.append(UNEVEN)
        if layout.cp > 1 and options.cp_comm_type != (RING,) and not self._job.model.sparse_attention:
            given = f"{flag_of('cp_comm_type')} {' '.join(options.cp_comm_type)}"
            assumed.append(f"Context parallelism is priced as a ring, not with {given}.")
        return (*assumed, *_unpriced(self._job, self._measurements.timed_flags))

    def step_time(self, layout: Layout, placement: Sequence[int], schedule: Schedule | None = None) -> StepTime:
        """Predict the step of a layout for which `can_price` is true. `placement` is the RANK of each slot.

        Without `schedule`, Megatron's own schedule is used. Raises PlanError if the placement does not suit the layout
        or the cluster, or if compute times are missing. Raises LayoutError if layers or batch are divided unevenly.
        """
        ranks = [int(rank) for rank in placement]
        if sorted(ranks) != list(range(self._slots_of(layout))):
            raise PlanError(f"a placement holds every RANK from 0 to {layout.world_size - 1} once, got {ranks}")
        cost = self.placement_cost(layout, schedule)
        return step_parts(cost.work, cost.prices(ranks))

    def stage_times(self, layout: Layout, placement: Sequence[int], schedule: Schedule | None = None) -> StageTimes:
        """Return the seconds of the slowest pipeline's passes and messages; arguments as in `step_time`."""
        cost = self.placement_cost(layout, schedule)
        return stage_times(cost.work, cost.prices([int(rank) for rank in placement]))

    def placement_cost(self, layout: Layout, schedule: Schedule | None = None) -> PlacementCost:
        """Return the function that predicts steps for placements of this layout, with the same digits as `step_time`.

        Raises PlanError if the layout has another number of ranks than the cluster, or if compute times are missing.
        """
        self._slots_of(layout)
        cost = self._placement_cost(layout)
        if schedule is None:
            return cost
        in_streams = self._measurements.cluster.device_kind == "cuda"
        engine = StreamEngine(schedule) if in_streams else Engine(schedule)
        return cost.of(replace(cost.work, engine=engine, rank_S=np.array(schedule.rank_S)))

    def bound_s(self, layout: Layout) -> float:
        """Return a lower bound of the step time over all placements: every exchange uses the best link.

        All slots are in use, so some pipeline rank has the slowest slot. The bound is the least result of trying the
        slowest slot on each pipeline rank.
        """
        self._slots_of(layout)
        work = self._work(layout)
        fastest, slowest = float(self._slowness_W.min()), float(self._slowness_W.max())
        slowness_PK = np.full((layout.pp, layout.pp), fastest)
        np.fill_diagonal(slowness_PK, slowest)
        tried = slowness_PK if slowest > fastest else slowness_PK[:, :1]
        return float(totals_s_K(work, best_prices(work, self.fabric, tried)).min())

    def _slots_of(self, layout: Layout) -> int:
        num_slots = self._measurements.cluster.num_slots
        if layout.world_size != num_slots:
            raise PlanError(f"a layout of {layout.world_size} ranks for the {num_slots} slots of this cluster")
        return layout.world_size

    def _new_work(self, layout: Layout) -> LayoutWork:
        return LayoutWork.of(self._job, layout, self.compute, self._once, domain=self.fabric.domain_slots)


def launching_notes(job: Job, layout: Layout, parts_s: Mapping[str, float], step_s: float) -> tuple[str, ...]:
    """Return a sentence about the wait for launched kernels and its cures, if the wait is a large part of a step.

    `parts_s` has the parts of the step (`StepTime.breakdown_s`).
    """
    waits_s, options = parts_s.get(LAUNCHING, 0.0), job.options
    if waits_s < _LAUNCHES_MATTER * step_s:
        return ()
    graphs, has_experts = options.graphs, job.model.num_experts
    # A graph cannot hold experts whose number of tokens changes.
    parts = {"attn", *(("moe_router", "moe_preprocess") if has_experts else ("mlp",))}
    cures = {
        f"CUDA graphs ({flag_of('cuda_graph_impl')})": graphs.impl == "none",
        "CUDA graphs of more parts of a layer": graphs.impl != "none" and graphs.captured(parts) != parts,
        "a larger --micro-batch-size": layout.num_microbatches(job.batch.global_batch_size) > 1,
        f"grouped products of experts ({flag_of('moe_grouped_gemm')})": has_experts and not options.moe_grouped_gemm,
    }
    names = [cure for cure, helps in cures.items() if helps]
    during = f"For {seconds_text(waits_s)} of the step ({waits_s / step_s:.0%})"
    found = f"{during}, devices wait for hosts to launch kernels."
    return (f"{found} Cures: {', '.join(names)}." if names else found,)


def _unpriced(job: Job, timed_flags: tuple[str, ...]) -> Iterator[str]:
    options = job.options
    for name, values, meaning in UNPRICED:
        value = getattr(options, name)
        is_timed = flag_of(name) in timed_flags
        if not is_timed and (value in values or (not values and value is not None)):
            flag = flag_of(name) if value is True else f"{flag_of(name)} {value}"
            yield f"{flag} is not in the predicted step time: {meaning}."
    sharding = sharding_of(job)
    if sharding and sharding.gradients:
        yield (
            "FSDP is in the predicted step time with its exchanges, but without the host time of its hooks and its "
            "passes over the gradients of each micro-batch: the step may be too short."
        )
    instances = options.num_distributed_optimizer_instances
    if instances > 1 and not (sharding and sharding.gradients):
        yield (
            f"{flag_of('num_distributed_optimizer_instances')} {instances} is in the predicted memory, but not in the "
            f"step time: gradients and parameters are priced as exchanged by all replicas at once."
        )
