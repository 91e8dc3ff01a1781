"""Bytes that a rank's device holds beside the model's tensors, with each figure measured or a stated default.

Every part of pipette-launch uses one rule (`MemoryNeed.verdict`): a layout fits if `reserve * (model's peak +
workspace) + context + communicators` stays below the device's memory minus a margin. A layout is too large if the same
sum with a reserve of 1 exceeds the device's memory. Layouts in between are tight. The rule leaves out uneven routing of
tokens to experts, and fragmentation beyond the allocator's reserve.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, overload

from pipette_launch.cost.layers.parameters import expert_dp
from pipette_launch.facts.devices import capability_named
from pipette_launch.facts.job import ALLOCATOR_VARIABLES, EXPANDABLE, ITERATION, RING, Job, allocator_options, flag_of
from pipette_launch.facts.layout import Ints, Layout, LayoutColumns
from pipette_launch.facts.measurements import Measurements, MemoryNeed, StageReading
from pipette_launch.text import MIB, numbered

NUM_CUBLAS_THREADS = 2
"""Number of threads with a cuBLAS workspace: the main thread and autograd's thread for the backward."""
NUM_GROUPED_GEMM_STREAMS = 4
NUM_OVERLAP_STREAMS = 3
"""Number of streams that share TransformerEngine's own workspace under `--tp-comm-overlap` (pytorch/module/base.py)."""
# First releases of Megatron whose containers have the named behaviour of a library.
_BLACKWELL_IS_LARGE = (0, 18)
"""torch 2.12 or later (pull request 175344 of PyTorch)."""
_KIB = 1 << 10
_HOPPER = 9
_LARGE_BYTES = 32 << 20
_SMALL_CUBLAS_BYTES = (2 * 4096 + 8 * 16) * _KIB
_SMALL_TE_BYTES = 4 << 20

DENSE_RESERVE = 1.03
MOE_RESERVE = 1.15
RESERVE_SOURCE = "default: max reserved over max allocated in public Megatron logs, dense 1.004-1.06, MoE 1.1-1.2"
EXPANDABLE_SHARE = 0.54
"""Reserved minus allocated bytes with expandable segments, divided by the same difference without expandable segments.
The value is the median of 6 groups of ranks in STAlloc's artifact, with ratios from 0.08 to 0.89
(github.com/infinigence/STAlloc, example/analyze). For a 7B model, pull request 388 of cosmos-rl reports the same ratio,
0.54."""
EXPANDABLE_SOURCE = (
    f"default with expandable segments: {EXPANDABLE_SHARE:.0%} of the usual reserve, as max reserved over max "
    f"allocated of Megatron-LM in STAlloc's artifact (arXiv 2507.16274)"
)
MOST_RESERVE = 1.2
"""Upper limit on the ratio of reserved to allocated bytes. Reserved memory above this ratio is a cache, which torch's
allocator frees before a job runs out of memory."""
CONTEXT_BYTES = 500_000_000
CONTEXT_SOURCE = "default: a CUDA context takes 300 to 500 MB"
COMMUNICATOR_BYTES = 500_000_000
COMMUNICATOR_SOURCE = (
    "default: 0.5 GB for each of tp, cp, pp, dp and ep above 1 (arXiv 2411.06465); NCCL users report 0.5 to 4 GB"
)
RING_BATCHED = 2
"""Number of ranks in a context-parallel ring for which Transformer Engine sends keys and values in batches
(`batch_p2p_comm`)."""
UNKNOWN_CAPABILITY = 9
NATIVE = "native"
"""Name of torch's own allocator, the default of the option `backend`."""
UNCOUNTED_OPTIONS = ("backend", "max_split_size_mb", "per_process_memory_fraction", "roundup_power2_divisions")
"""Options of torch's allocator that change the reserved bytes in an unknown way."""
MEASURED = "measured by the warm-up"


def workspace_bytes(job: Job, *, capability: float) -> int:
    """Count the workspaces of matrix libraries that a rank holds from its first step on.

    The sizes of workspaces come from the source code of these libraries. PyTorch gives each pair of thread and stream
    that multiplies matrices a cuBLAS workspace and never frees it. A training rank has two cuBLAS workspaces, because
    the main thread runs forwards and autograd's own thread runs backwards (ATen, CublasHandlePool.cpp). As in PyTorch,
    a value of CUBLAS_WORKSPACE_CONFIG without any `:SIZE:COUNT` is ignored. TransformerEngine adds one workspace
    (`get_cublas_workspace_size_bytes`), and four workspaces for grouped GEMMs, one for each stream
    (`get_multi_stream_cublas_workspace`). Routers multiply with TransformerEngine even in Megatron's own layers (MC
    transformer/moe/moe_utils.py, RouterGatingLinearFunction). `capability` is the compute capability, such as
    8.9.
    """
    options, model, release = job.options, job.model, job.release
    pools = re.findall(r":(\d+):(\d+)", job.cublas_workspace_config)
    is_large = capability == _HOPPER or (capability > _HOPPER and release >= _BLACKWELL_IS_LARGE)
    cublas = _LARGE_BYTES if is_large else _SMALL_CUBLAS_BYTES
    total = NUM_CUBLAS_THREADS * (sum(int(size) * int(count) * _KIB for size, count in pools) if pools else cublas)
    streams = 0
    if model.transformer_impl == "transformer_engine":
        # Products without overlap have a workspace of their own (cpp_extensions/gemm.py, TE 2.10 or later).
        streams = 1 + (NUM_OVERLAP_STREAMS if options.tp_comm_overlap else 0)
        streams += NUM_GROUPED_GEMM_STREAMS if model.num_experts and options.moe_grouped_gemm else 0
    elif model.num_experts and options.moe_router_dtype != "fp64":
        streams = 1
    return total + (_LARGE_BYTES if capability >= _HOPPER else _SMALL_TE_BYTES) * streams


class Figure(NamedTuple):
    """A number of bytes or a ratio, with a text that names the number's origin."""

    value: float
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Overhead:
    """Bytes that a rank's device holds beside the model's tensors, and the allocator's reserve as a ratio."""

    workspace: Figure
    """Bytes of the workspaces of cuBLAS and Transformer Engine, inside torch's allocator."""
    context: Figure
    """Bytes of the CUDA context and of CUDA's libraries, outside torch's allocator."""
    communicators: Figure
    """Bytes of the NCCL communicators of all groups of the rank."""
    reserve: Figure
    """Ratio, at least 1, of the bytes that torch's allocator reserves at its peak to the bytes it has allocated."""

    @property
    def outside_bytes(self) -> int:
        """Bytes on the device that never pass through torch's allocator: context and communicators."""
        return int(self.context.value) + int(self.communicators.value)

    def device_peak_bytes(self, allocated_bytes: int) -> int:
        """Return the bytes on the device when the model's tensors (`MemoryParts.total`) are at their peak."""
        return math.ceil(self.reserve.value * (allocated_bytes + int(self.workspace.value))) + self.outside_bytes

    def least_bytes(self, allocated_bytes: int) -> int:
        """Return `device_peak_bytes` without the allocator's cache."""
        return allocated_bytes + int(self.workspace.value) + self.outside_bytes

    def limit_bytes(self, capacity_bytes: int, *, memory_margin: float) -> int:
        """Return the most bytes that the model's tensors may take so that the device keeps its margin; at least 0."""
        inside = allowed_bytes(capacity_bytes, memory_margin=memory_margin) - self.outside_bytes
        return max(0, math.floor(inside / self.reserve.value) - int(self.workspace.value))

    def need(self, peaks_bytes: Sequence[int], capacity_bytes: int, *, memory_margin: float) -> MemoryNeed:
        """Return each pipeline rank's device bytes for these peaks of the model's tensors, and the limit in bytes."""
        return MemoryNeed(
            need_bytes=tuple(map(self.device_peak_bytes, peaks_bytes)),
            free_bytes=capacity_bytes,
            limit_bytes=allowed_bytes(capacity_bytes, memory_margin=memory_margin),
            least_bytes=tuple(map(self.least_bytes, peaks_bytes)),
            model_bytes=tuple(peaks_bytes),
        )

    def notes(self) -> tuple[str, ...]:
        """Return one sentence about the origin of each overhead figure that is not 0."""
        named = {"Workspaces inside the allocator": self.workspace, "Context": self.context}
        named["Communicators"] = self.communicators
        notes = [f"{name}: {one.value / MIB:.0f} MiB, {one.source}." for name, one in named.items() if one.value]
        if self.reserve.value != 1:
            notes.append(f"The allocator's reserve: {self.reserve.value:g} x what it allocates, {self.reserve.source}.")
        return tuple(notes)


def uncounted(job: Job) -> tuple[str, ...]:
    """Return sentences about flags that change the memory of devices but not the predicted memory.

    No formula for the memory of CUDA graphs is published. NVIDIA's notes report some GB for Transformer Engine's
    graphs, and above 10 GB in pipelines. For graphs of whole iterations, NVIDIA's notes report 1.5 to 2 times the peak
    without graphs.
    """
    options, found = job.options, []
    names = ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph", "cuda_graph_scope_deprecated")
    flags = [flag_of(name) for name in names if getattr(options, name) not in (False, "none", ())]
    flags = flags or [flag_of("cuda_graph_modules")]
    if options.graphs.impl == ITERATION:
        found.append(
            f"{flags[0]}: the predicted memory has the graph's own pool and the inputs of all micro-batches, but no "
            f"graph for evaluation. Tensors of side streams stay until the graph ends, so devices may hold up to twice "
            f"the predicted memory."
        )
    elif options.graphs.impl != "none":
        found.append(
            f"{flags[0]}: the memory of captured graphs is not in the predicted memory. Devices hold some GB more."
        )
    allocator = allocator_options(job.allocator_config)
    unknown = [name for name in UNCOUNTED_OPTIONS if allocator.get(name, NATIVE) != NATIVE]
    if unknown:
        found.append(
            f"Not in the allocator's reserve: {', '.join(unknown)} of {ALLOCATOR_VARIABLES[0]}. "
            "The reserve may be larger or smaller."
        )
    return tuple(found)


def allowed_bytes(capacity_bytes: int, *, memory_margin: float) -> int:
    """Return all bytes that a rank may hold on a device of this capacity."""
    return int((1 - memory_margin) * capacity_bytes)


def overhead_of(
    job: Job,
    layout: Layout,
    *,
    device_kind: str,
    device_name: str = "",
    capability: float | None = None,
    measured: Measurements | None = None,
) -> Overhead:
    """Return the bytes that a rank of this layout holds beside the model; measured figures replace defaults.

    `device_kind` is `cuda` or `cpu`, and the driver or the user gives `device_name`. `capability` is the compute
    capability, such as 8.9; None = that of the known device `device_name`. Without `measured` all figures of the
    overhead are defaults.
    """
    measured_bytes = measured.overhead_bytes if measured else None
    if device_kind == "cpu":
        nothing = Figure(0, "a host has no context, no communicators and no workspaces on a device")
        outside = Figure(measured_bytes, MEASURED) if measured_bytes else nothing
        reserve = Figure(1.0, "a host's allocator keeps no reserve")
        return Overhead(workspace=nothing, context=outside, communicators=nothing, reserve=reserve)
    apart = measured.overhead if measured else None
    if apart is not None and apart.communicator_bytes:
        needed = num_communicators(job, layout)
        source = f"{needed} of them, each as large as the {apart.num_communicators} {MEASURED} were on average"
        context = Figure(apart.alone_bytes, MEASURED)
        communicators = Figure(needed * apart.communicator_bytes, source)
    elif measured_bytes:  # a GPU's context is never 0, so 0 bytes were not measured
        context = Figure(measured_bytes, f"{MEASURED}, communicators included")
        communicators = Figure(0, "part of the measured context")
    else:
        context = Figure(CONTEXT_BYTES, CONTEXT_SOURCE)
        communicators = Figure(COMMUNICATOR_BYTES * num_group_kinds(layout), COMMUNICATOR_SOURCE)
    capability = capability or capability_named(device_name)
    known = device_name if capability else "a GPU of unknown type, taken as of capability 9"
    workspace = workspace_bytes(job, capability=capability or UNKNOWN_CAPABILITY)
    return Overhead(
        workspace=Figure(workspace, f"default: the libraries' own constants for {known}"),
        context=context,
        communicators=communicators,
        reserve=_reserve(job, measured.stages_of(job) if measured else ()),
    )


def measured_overhead(job: Job, layout: Layout, measured: Measurements) -> Overhead:
    """Return the overhead of a rank, with the figures that the warm-up measured on the machines."""
    device, capability = measured.cluster.hosts[0].devices[0], measured.cluster.compute_capability
    return overhead_of(
        job, layout, device_kind=device.kind, device_name=device.name, capability=capability, measured=measured
    )


def _reserve(job: Job, readings: Sequence[StageReading]) -> Figure:
    """Return the largest ratio of reserved to allocated bytes in the job's measured stages; else the default."""
    ratios = [
        one.reserved_peak_bytes / one.allocator_peak_bytes
        for one in readings
        if one.allocator_config == job.allocator_config and one.reserved_peak_bytes and one.allocator_peak_bytes
    ]
    if ratios:
        value = round(min(max(*ratios, 1.0), MOST_RESERVE), 4)
        return Figure(value, f"{MEASURED} in {len(ratios)} of its runs of stages")
    usual = MOE_RESERVE if job.model.num_experts else DENSE_RESERVE
    if not has_expandable_segments(job):
        return Figure(usual, RESERVE_SOURCE)
    return Figure(round(1 + EXPANDABLE_SHARE * (usual - 1), 3), EXPANDABLE_SOURCE)


def has_expandable_segments(job: Job) -> bool:
    """Return True if torch's own allocator uses expandable segments. Other allocator backends ignore the option."""
    options = allocator_options(job.allocator_config)
    return options.get("backend", NATIVE) == NATIVE and options.get(EXPANDABLE) == "True"


def with_expandable_segments(job: Job) -> Job | None:
    """Return the job with expandable segments; None if it has them, or if its allocator or a flag excludes them.

    Before torch 2.11, Megatron refuses expandable segments with `--use-nccl-ub`
    (megatron-core, distributed_data_parallel_config.py).
    """
    options = allocator_options(job.allocator_config)
    is_native = options.get("backend", NATIVE) == NATIVE
    if not is_native or has_expandable_segments(job) or job.options.nccl_ub:
        return None
    others = [f"{name}:{value}" for name, value in options.items() if name != EXPANDABLE]
    return replace(job, allocator_config=",".join((*others, f"{EXPANDABLE}:True")))


@overload
def num_group_kinds(layout: Layout) -> int: ...
@overload
def num_group_kinds(layout: LayoutColumns) -> Ints: ...
def num_group_kinds(layout: Layout | LayoutColumns) -> int | Ints:
    """Count the degrees tp, cp, pp, dp and ep above 1, each of which adds the default bytes of communicators."""
    return sum(several(size) for size in (layout.tp, layout.cp, layout.pp, layout.dp * layout.cp, layout.ep))


@overload
def num_communicators(job: Job, layout: Layout) -> int: ...
@overload
def num_communicators(job: Job, layout: LayoutColumns) -> Ints: ...
def num_communicators(job: Job, layout: Layout | LayoutColumns) -> int | Ints:
    """Count the NCCL communicators of the rank that has the most, on the first or last pipeline stage.

    torch opens a communicator for each group at the group's first collective or batch of messages. A plain isend or
    irecv opens a communicator of the two ranks instead (ProcessGroupNCCL.cpp, pointToPoint). Groups of one rank have no
    communicator. Groups for sharded weights, checkpoints and MoE's auxiliary losses are left out. Megatron's
    parallel_state.py makes the groups, and each comment in the function names the Megatron file that uses a group.
    """
    options, model = job.options, job.model
    world = several(layout.tp * layout.cp * layout.pp * layout.dp)
    pipeline, gradients = several(layout.pp), several(layout.dp * layout.cp)
    return (
        # Megatron's training.py, pretrain(), reduces the start time over the group of all ranks.
        world
        + several(layout.tp)
        # finalize_model_grads.py, _allreduce_word_embedding_grads().
        + pipeline * (not model.untie_embeddings_and_output_weights)
        # training.py, train_step(): logical_and_across_model_parallel_group().
        + several(layout.tp * layout.pp)
        # In optimizer/__init__.py, the gradient norm of the distributed optimizer has its own group of all ranks.
        + world * (layout.use_distributed_optimizer > 0)
        # param_and_grad_buffer.py uses one group inside each instance of the distributed optimizer, and one between
        # instances.
        + gradients * (1 + (options.num_distributed_optimizer_instances > 1))
        # In p2p_communication.py, batched messages use the pipeline group. With overlap, a rank and each of its two
        # neighbours use a communicator of the pair. With two stages, one of these communicators belongs to the group of
        # all ranks.
        + pipeline * (1 + several(layout.vpp) * options.overlap_p2p_comm)
        # Transformer Engine's ring sends batched messages between two ranks, else plain messages from each rank to the
        # next.
        + several(layout.cp)
        + (layout.cp > RING_BATCHED) * (RING in options.cp_comm_type)
        # token_dispatcher.py and experts.py have groups for tokens and their counts, tensor-parallel experts, and
        # experts' gradients.
        + bool(model.num_experts)
        * (
            several(layout.ep)
            + several(layout.ep * layout.etp)
            + several(layout.etp)
            + several(layout.ep) * several(expert_dp(layout))
        )
    )


@overload
def several(size: int) -> int: ...
@overload
def several(size: Ints) -> Ints: ...
def several(size: int | Ints) -> int | Ints:
    """Return 1 for a group of several ranks, 0 for a single rank."""
    return (size > 1) * 1


class MeasuredStages:
    """Memory of a job's stages as the warm-up measured it; empty if the warm-up measured another job.

    On CPU the peak counts only the bytes of tensors, as predictions do. The resident set of the process also includes
    the interpreter and gaps in the heap, which predictions do not include.
    """

    def __init__(self, job: Job, measurements: Measurements) -> None:
        self._job, self._cluster = job, measurements.cluster
        self._readings: dict[Layout, dict[int, StageReading]] = {}
        for reading in measurements.stages_of(job):
            if reading.layout.world_size == self._cluster.num_slots:
                self._readings.setdefault(reading.layout, {})[reading.pp_rank] = reading

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Layouts of which the warm-up ran at least one stage."""
        return tuple(self._readings)

    def peaks(self, layout: Layout, predicted: Sequence[int]) -> tuple[int, ...]:
        """Return the peak bytes of the model's tensors on each pipeline rank: measured, or else predicted.

        If a stage ran out of memory, its peak is at least the device's memory.
        """
        peaks, known, cluster = list(predicted), self._readings.get(layout, {}), self._cluster
        device, capability = cluster.hosts[0].devices[0], cluster.compute_capability
        for rank, reading in known.items():
            if reading.ran_out:
                peaks[rank] = max(peaks[rank], cluster.memory_bytes)
            else:
                # Measured bytes include workspaces, but `limit_bytes` reserves memory for workspaces separately.
                overhead = overhead_of(
                    self._job, layout, device_kind=device.kind, device_name=device.name, capability=capability
                )
                peaks[rank] = max(reading.allocator_peak_bytes - int(overhead.workspace.value), 1)
        return tuple(peaks)

    def notes(self, layout: Layout) -> tuple[str, ...]:
        """Return a sentence that names the stages of a layout whose memory the warm-up measured, if any."""
        ranks = sorted(self._readings.get(layout, {}))
        them = "it" if len(ranks) == 1 else "them"
        where = numbered("stage", ranks)
        return (f"Peak memory of {where} was measured by running {them}, not predicted.",) if ranks else ()
