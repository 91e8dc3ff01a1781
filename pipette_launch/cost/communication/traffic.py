"""What a layout makes its ranks send each other: how often in a micro-batch, how much once a step."""

# S = stages (model chunks) in model order.

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost.communication.steps import Kind
from pipette_launch.cost.layers import activations, attention
from pipette_launch.cost.layers.optimizer import gradient_bytes_per_parameter, resident_parameters
from pipette_launch.cost.layers.parameters import by_rank, chunk_kinds, chunk_parameters, word_embedding_parameters
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.model import KINDS_WITH_EXPERTS, TRANSFORMER_KINDS, LayerKind, ModelSpec
from pipette_launch.megatron.performance import performance_options

Ints = NDArray[np.int64]
Group = Literal["tp", "cp", "ep", "etp", "ep_etp"]
"""Fields of `Groups`."""
Behind = Literal["core_attention_s", "input_grad_s", "weight_grad_s", "forward_s", "other_layer_s"]
"""Fields of `Hiding`."""

_FP32_BYTES = 4
IN_DOMAIN_SHARE = 0.42
"""Of the fastest links, by `flex` dispatchers within their domain (fitted; see `compute.expert_work`)."""
OVERLAP_COSTS = 0.15
"""Of an exchange that passes behind compute: what its kernels take from the products beside them, 20 of 132
multiprocessors (`--moe-deepep-num-sms`)."""
_CROSS_ENTROPY_REDUCTIONS = 3
"""Largest logit, logit of the target, sum of exponentials (cross_entropy.py)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hiding:
    """Compute of one layer, for one micro-batch, behind which a collective passes."""

    core_attention_s: float = 0.0
    """The forward's scores and context: behind them go the rings of context parallelism."""
    input_grad_s: float = 0.0
    """Input gradient of one column-parallel matrix."""
    weight_grad_s: float = 0.0
    """Weight gradient of one column-parallel matrix."""
    forward_s: float = 0.0
    """Forward of one column-parallel matrix: behind it go chunks of `--tp-comm-overlap`."""
    other_layer_s: float = 0.0
    """A quarter of a layer's two passes: behind each go the tokens of one exchange of another micro-batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """One collective inside the passes of a micro-batch."""

    kind: Kind
    group: Group
    size_bytes: float
    """The full tensor on one rank, as in `CollectiveTime`."""
    forward: tuple[float, ...]
    """How many of them the forward of each stage runs."""
    backward: tuple[float, ...]
    behind: Behind | None = None
    """The part of `Hiding` behind which each passes; None = behind nothing."""
    behind_share: float = 1.0
    """How much of that part is there for it."""
    hidden_s: float = 0.0
    """Seconds of each that pass behind compute; known once there is a `Hiding`."""

    @property
    def part(self) -> str:
        """The part of a step to which it belongs (`StepTime.breakdown_s`)."""
        return {"tp": "tensor_parallel", "cp": "context_parallel"}.get(self.group, "expert_parallel")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTraffic:
    """What is exchanged once a step, in bytes on one rank."""

    gradient_bytes: tuple[tuple[int, int], ...]
    """Of each stage: dense, expert."""
    parameter_bytes: tuple[tuple[int, int], ...]
    """What the distributed optimizer gathers; zeros without it."""
    num_buckets: tuple[int, ...]
    """Parts of each stage's gradients that can leave one by one."""
    resident_parameters: tuple[int, ...]
    """Parameters that each pipeline rank steps."""
    embedding_bytes: int
    """Gradient of the tied word embedding, summed over first and last pipeline rank; 0 when there is one copy."""


def hop_bytes(job: Job, layout: Layout) -> int:
    """One activation between neighbouring stages: s*b*h/c, over t with sequence parallelism (schedules.py)."""
    return activations.residual_bytes(job.model, layout)


def meets_receivers(job: Job, layout: Layout, device_kind: str) -> bool:
    """Whether a message between stages starts only once its receiver, done with its pass, asks for it.

    Megatron asks right before it needs, but for `overlap_p2p_comm`, which holds with virtual stages only and there
    unless the user says no (arguments.py, validate_args). gloo then sends to nobody who has not asked: between 4 hosts,
    an activation that had long been sent took all its 13 ms when it was asked for. NCCL has not been measured here; the
    published step times are met better (by 0.1 to 0.7 points) if its messages travel ahead.
    """
    asks_late = layout.vpp == 1 or not performance_options(job).overlap_p2p_comm
    return device_kind == "cpu" and asks_late


def blocks_at_ends(job: Job, layout: Layout, device_kind: str) -> bool:
    """Whether ranks with virtual stages wait for the messages of warm-up and cool-down before their next pass.

    Megatron overlaps those of the steady part alone, unless it is asked for more. On 2 x 2 hosts, groups of 4
    micro-batches in place of 2, whose warm-up and cool-down are longer, took 8 % more and not 1 % less. As with
    `meets_receivers`, NCCL has not been measured.
    """
    overlaps = performance_options(job).overlap_p2p_comm
    asks_early = performance_options(job).overlap_p2p_comm_warmup_flush
    return device_kind == "cpu" and layout.vpp > 1 and overlaps and not asks_early


def loss_report_bytes(device_kind: str) -> int:
    """What the replicas of the last stage add up once a step to report its loss: the sum and the count of its tokens.

    Over gloo that waits for all replicas once more: with four ranks on two cores 5 to 7 ms of a step of 57. Over NCCL
    it takes some tens of microseconds, and a ring's latencies would make more of it: it counts as nothing.
    """
    return 2 * _FP32_BYTES if device_kind == "cpu" else 0


def aligns_gathers(job: Job, layout: Layout) -> bool:
    """Whether overlapped parameter gathers start on all pipeline ranks at once (see `first_gathers`).

    Megatron does so with virtual stages, and never without (arguments.py, validate_args).
    """
    return layout.vpp > 1 and performance_options(job).align_param_gather


def exchanges(job: Job, layout: Layout, hiding: Hiding, domain: int = 1) -> tuple[Exchange, ...]:
    """List the collectives of a micro-batch, each with the seconds that pass behind compute; see `exchanges_of`."""
    return tuple(
        replace(item, hidden_s=getattr(hiding, item.behind) * item.behind_share) if item.behind else item
        for item in exchanges_of(job, layout, LayerCounts.of(job, layout), domain)
    )


def exchanges_of(job: Job, layout: Layout, counts: LayerCounts, domain: int = 1) -> tuple[Exchange, ...]:
    """List the collectives of stages that hold other layers than the layout gives them; they are linear in `counts`.

    Args:
        job: its model and flags.
        layout: who exchanges with whom.
        counts: what the stages hold.
        domain: slots that the fastest links join, which `flex` dispatchers tell from all others.

    """
    found = itertools.chain(
        _tensor_parallel(job, layout, counts),
        _context_parallel(job, layout, counts),
        _expert_parallel(job, layout, counts, domain),
    )
    return tuple(exchange for exchange in found if any(exchange.forward) or any(exchange.backward))


def step_traffic(job: Job, layout: Layout) -> StepTraffic:
    """Count gradients to reduce and parameters to gather of each stage, by who shares them."""
    gradient, element = gradient_bytes_per_parameter(job), job.model.dtype_bytes
    chunks = chunk_parameters(job.model, layout)
    gathers = element if layout.use_distributed_optimizer else 0
    tied = not job.model.untie_embeddings_and_output_weights and layout.pp > 1
    return StepTraffic(
        gradient_bytes=tuple((chunk.dense * gradient, chunk.expert * gradient) for chunk in chunks),
        parameter_bytes=tuple((chunk.dense * gathers, chunk.expert * gathers) for chunk in chunks),
        # Only the first chunk of pipeline rank 0 is split, and only to overlap (param_and_grad_buffer.py).
        num_buckets=tuple(
            1 if stage or not layout.overlap_grad_reduce else int(num_buckets(chunk.count, layout.dp * layout.cp))
            for stage, chunk in enumerate(chunks)
        ),
        resident_parameters=tuple(
            int(resident_parameters(job, part.dense, part.expert, layout)) for part in by_rank(chunks, layout.pp)
        ),
        embedding_bytes=word_embedding_parameters(job.model, layout) * gradient if tied else 0,
    )


def num_buckets(parameters: Ints | int, replicas: Ints | int) -> Ints:
    """Into how many parts Megatron splits overlapped gradients: of 40 million parameters, or of 1 million a replica.

    `replicas` is dp * cp (distributed_data_parallel.py). Numbers or arrays.
    """
    return np.asarray(-(-parameters // np.maximum(40_000_000, 1_000_000 * replicas)))


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCounts:
    """What each stage holds: layers that run a forward, those that run it again in the backward, embedding and head."""

    attention_S: Ints
    attention_again_S: Ints
    dense_mlp_S: Ints
    """Tensor-parallel blocks besides attention: dense MLPs, shared experts, and Mamba."""
    dense_mlp_again_S: Ints
    moe_S: Ints
    moe_again_S: Ints
    mamba_S: Ints
    mamba_again_S: Ints
    embedding_S: Ints
    head_S: Ints

    @classmethod
    def of(cls, job: Job, layout: Layout) -> LayerCounts:
        """Count them for every chunk of a layout, in model order."""
        chunks = chunk_kinds(job.model, layout)
        ends = [(int(stage == 0), int(stage == len(chunks) - 1)) for stage in range(len(chunks))]
        rows = [(*_blocks(job.model, kinds, again), *end) for (kinds, again), end in zip(chunks, ends, strict=True)]
        return cls.of_rows(rows)

    @classmethod
    def one_of_each(cls, model: ModelSpec) -> LayerCounts:
        """Return a stage for each part of a chunk: every kind of layer, run once and run again, embedding, head."""
        rows = [(*_blocks(model, (kind,), again), 0, 0) for kind in model.possible_kinds for again in (0, 1)]
        return cls.of_rows([*rows, (*_blocks(model, (), 0), 1, 0), (*_blocks(model, (), 0), 0, 1)])

    @classmethod
    def of_rows(cls, rows: Sequence[tuple[int, ...]]) -> LayerCounts:
        """One row for each stage, in the order of the fields."""
        return cls(**dict(zip(cls.__slots__, np.array(rows, dtype=np.int64).T, strict=True)))


def _blocks(model: ModelSpec, kinds: Sequence[LayerKind], again: int) -> tuple[int, ...]:
    """Count the blocks of some layers, in the order of `LayerCounts`; the first `again` layers run twice."""
    shared = KINDS_WITH_EXPERTS if model.moe_shared_expert_intermediate_size > 0 else ()
    groups: tuple[tuple[LayerKind, ...], ...] = (
        (*TRANSFORMER_KINDS, "attention_layer"),
        ("layer", "mlp_layer", "mamba_layer", *shared),
        KINDS_WITH_EXPERTS,
        ("mamba_layer",),
    )
    return tuple(sum(kind in group for kind in some) for group in groups for some in (kinds, kinds[:again]))


def _tensor_parallel(job: Job, layout: Layout, counts: LayerCounts) -> Iterator[Exchange]:
    """Attention and MLP each cost an all-reduce a pass (Shoeybi et al. 2019, section 3).

    With sequence parallelism it is an all-gather and a reduce-scatter (Korthikanti et al. 2022, section 4.2.2), and
    the backward gathers the input of each column-parallel matrix once more for the weight gradient (layers.py). That
    gather passes behind the matrix's input gradient, and the sum of its input's gradients behind its weight gradient,
    unless `--no-async-tensor-model-parallel-allreduce` says otherwise (until v16, and without sequence parallelism).
    With `--tp-comm-overlap` those of layers pass behind their matrices in chunks, one of which nothing hides.
    """
    if layout.tp == 1:
        return
    tokens = attention.tokens(job.model, layout)
    size = job.model.dtype_bytes * tokens * job.model.hidden_size
    once_S, again_S = counts.attention_S + counts.dense_mlp_S, counts.attention_again_S + counts.dense_mlp_again_S
    embedding_S, head_S = counts.embedding_S, counts.head_S
    none_S = 0 * head_S
    if layout.sequence_parallel and performance_options(job).tp_comm_overlap:
        yield _exchange("all_gather", "tp", size, head_S, embedding_S)
        yield _exchange("all_gather", "tp", size, none_S, head_S, behind="input_grad_s")
        yield _exchange("reduce_scatter", "tp", size, embedding_S, none_S)
        yield _exchange("reduce_scatter", "tp", size, none_S, head_S, behind="weight_grad_s")
        for part, hides in ((size / layout.tp, False), (size - size / layout.tp, True)):
            behind: Behind | None = "forward_s" if hides else None
            yield _exchange("all_gather", "tp", part, once_S, once_S + again_S, behind=behind)
            yield _exchange("reduce_scatter", "tp", part, once_S, again_S, behind=behind)
        yield _exchange("all_gather", "tp", size, none_S, once_S, behind="input_grad_s")
        yield _exchange("reduce_scatter", "tp", size, none_S, once_S, behind="weight_grad_s")
    elif layout.sequence_parallel:
        yield _exchange("all_gather", "tp", size, once_S + head_S, once_S + again_S + embedding_S)
        yield _exchange("all_gather", "tp", size, none_S, once_S + head_S, behind="input_grad_s")
        yield _exchange("reduce_scatter", "tp", size, once_S + embedding_S, again_S)
        yield _exchange("reduce_scatter", "tp", size, none_S, once_S + head_S, behind="weight_grad_s")
    else:
        is_async = performance_options(job).async_tensor_model_parallel_allreduce
        yield _exchange("all_reduce", "tp", size, once_S + embedding_S, again_S)
        yield _exchange("all_reduce", "tp", size, none_S, once_S + head_S, behind="weight_grad_s" if is_async else None)
    yield _exchange("all_reduce", "tp", _FP32_BYTES * tokens, _CROSS_ENTROPY_REDUCTIONS * head_S, none_S)


def _context_parallel(job: Job, layout: Layout, counts: LayerCounts) -> Iterator[Exchange]:
    """Ring attention: keys and values go once around in the forward; they and their gradients in the backward.

    Each of the cp - 1 hops passes behind the attention of one of the cp blocks (Liu et al. 2023, Ring Attention,
    section 3). Mamba layers change tokens for heads in front of the scan, and back behind it (mamba_context_parallel.py
    of core_v0.17.1, where nothing hides it).
    """
    if layout.cp == 1:
        return
    model = job.model
    if model.hybrid:
        turned = model.hybrid.mamba_projected + model.hybrid.mamba_channels
        sent = model.dtype_bytes * attention.tokens(model, layout) * turned / layout.tp
        yield _exchange("all_to_all", "cp", sent, counts.mamba_S, counts.mamba_S + counts.mamba_again_S)
    groups = max(1, model.num_query_groups // layout.tp) * model.kv_channels
    size = 2 * model.dtype_bytes * groups * attention.tokens(model, layout) * layout.cp
    backward_S = 2 * counts.attention_S + counts.attention_again_S
    one = _exchange("all_gather", "cp", size, counts.attention_S, backward_S, behind="core_attention_s")
    yield replace(one, behind_share=(layout.cp - 1) / layout.cp)


def _expert_parallel(job: Job, layout: Layout, counts: LayerCounts, domain: int) -> Iterator[Exchange]:
    """Tokens go to their experts and back, in both passes, under balanced routing.

    `alltoall` sends topk copies of each token over ep and gathers them over etp; `flex` sends one copy to each rank
    that has some of its experts, or to each domain of fast links where there are several; `allgather`, Megatron's
    default, gathers every token over ep * etp and scatters the sums (megatron-core, moe/token_dispatcher.py).
    """
    model, options = job.model, performance_options(job)
    size = model.dtype_bytes * attention.local_tokens(model, layout) * model.hidden_size
    group: Group = "ep_etp"
    forward_S, backward_S = counts.moe_S, counts.moe_S + counts.moe_again_S
    if options.moe_token_dispatcher_type != "allgather":  # noqa: S105
        copies = float(model.moe_router_topk)
        if options.moe_token_dispatcher_type == "flex":  # noqa: S105
            places = -(-layout.ep // domain) if layout.ep > domain else layout.ep
            copies = places * (1 - (1 - 1 / places) ** model.moe_router_topk)
            copies /= IN_DOMAIN_SHARE if layout.ep <= domain else 1.0
        size, group = size * model.moe_router_topk, "etp"
        if layout.ep > 1:
            sent, times = size / model.moe_router_topk * copies, (2 * forward_S, 2 * backward_S)
            if options.overlap_moe_expert_parallel_comm:
                yield _exchange("all_to_all", "ep", sent * OVERLAP_COSTS, *times)
                yield _exchange("all_to_all", "ep", sent * (1 - OVERLAP_COSTS), *times, behind="other_layer_s")
            else:
                yield _exchange("all_to_all", "ep", sent, *times)
    members = layout.etp * (layout.ep if group == "ep_etp" else 1)
    if members > 1:
        yield _exchange("all_gather", group, size * members, forward_S, backward_S)
        yield _exchange("reduce_scatter", group, size * members, forward_S, backward_S)


def _exchange(
    kind: Kind, group: Group, size_bytes: float, forward_S: Ints, backward_S: Ints, *, behind: Behind | None = None
) -> Exchange:
    """Return one collective; arguments as the fields of `Exchange`."""
    return Exchange(
        kind=kind,
        group=group,
        size_bytes=size_bytes,
        forward=tuple(map(float, forward_S.tolist())),
        backward=tuple(map(float, backward_S.tolist())),
        behind=behind,
    )
