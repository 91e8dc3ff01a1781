"""What a layout makes its ranks send each other inside the passes of a micro-batch, and how often."""

# S = stages (model chunks) in model order.
# G = groups of one dimension, K = members of a group in the order of their ring.

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost.communication.collectives import Kind
from pipette_launch.cost.communication.groups import Groups, group_sizes
from pipette_launch.cost.layers import activations, attention
from pipette_launch.cost.layers.parameters import (
    Parameters,
    Sharding,
    by_rank,
    chunk_kinds,
    chunk_parameters,
    end_parameters,
    gradient_bytes_per_parameter,
    has_two_embeddings,
    held_gradients,
    layer_weight_bytes,
    resident_parameters,
    shard_copies,
    sharding_of,
    unit_parameters,
    word_embedding_parameters,
)
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Ints, Layout
from pipette_launch.facts.messages import CollectiveKind
from pipette_launch.facts.model import KINDS_WITH_ATTENTION, KINDS_WITH_EXPERTS, LayerKind, ModelSpec
from pipette_launch.megatron.performance import performance_options

OfLayer: TypeAlias = tuple[Literal["forward", "backward"], LayerKind]
Behind: TypeAlias = Literal["core_attention_s", "input_grad_s", "weight_grad_s", "forward_s", "other_layer_s"] | OfLayer
"""A field of `Hiding`, or a pass of a whole layer of a kind."""


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
    layers_s: Mapping[OfLayer, float] = field(default_factory=dict)
    """A pass of one layer, the backward with recompute: behind it go weights of the next and gradients of the one
    before."""

    def seconds(self, behind: Behind) -> float:
        """Look up the compute that `behind` names; 0 of what was not given."""
        return self.layers_s.get(behind, 0.0) if isinstance(behind, tuple) else float(getattr(self, behind))


Group = Literal["tp", "cp", "ep", "etp", "ep_etp", "shard", "expert_shard"]
"""Fields of `Groups`."""

_FP32_BYTES = 4
IN_DOMAIN_SHARE = 0.42
"""Of the fastest links, by `flex` dispatchers within their domain (fitted; see `compute.expert_work`)."""
OVERLAP_COSTS = 0.15
"""Of an exchange that passes behind compute: what its kernels take from the products beside them, 20 of 132
multiprocessors (`--moe-deepep-num-sms`)."""
_CROSS_ENTROPY_REDUCTIONS = 3
"""Largest logit, logit of the target, sum of exponentials (cross_entropy.py)."""


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
    """Behind which compute each passes; None = behind nothing."""
    behind_share: float = 1.0
    """How much of that part is there for it."""
    hidden_s: float = 0.0
    """Seconds of each that pass behind compute; known once there is a `Hiding`."""

    @property
    def part(self) -> str:
        """The part of a step to which it belongs (`StepTime.breakdown_s`)."""
        names = {"tp": "tensor_parallel", "cp": "context_parallel"}
        return "data_parallel" if self.is_sharding else names.get(self.group, "expert_parallel")

    @property
    def is_sharding(self) -> bool:
        """Whether it moves weights or gradients, of which a larger micro-batch has no more."""
        return self.group in ("shard", "expert_shard")


def exchanges(job: Job, layout: Layout, hiding: Hiding, domain: int = 1) -> tuple[Exchange, ...]:
    """List the collectives of a micro-batch, each with the seconds that pass behind compute; see `exchanges_of`."""
    return tuple(
        replace(item, hidden_s=hiding.seconds(item.behind) * item.behind_share) if item.behind else item
        for item in exchanges_of(job, layout, LayerCounts.of(job, layout), domain)
    )


def exchanges_of(job: Job, layout: Layout, counts: LayerCounts, domain: int = 1) -> tuple[Exchange, ...]:
    """List the collectives of stages that hold other layers than the layout gives them; they are linear in `counts`.

    Each depth of multi-token prediction has layers and a lookup where the depths are, and a head beside the model's.

    Args:
        job: its model and flags.
        layout: who exchanges with whom.
        counts: what the stages hold.
        domain: slots that the fastest links join, which `flex` dispatchers tell from all others.

    """
    depths_S = job.model.mtp_num_layers * counts.prediction_S
    found = [*_projection(job, layout, depths_S), *_sharded(job, layout, counts)]
    counts = counts.with_depths(job, layout)
    found += _tensor_parallel(job, layout, counts)
    found += _context_parallel(job, layout, counts)
    found += _expert_parallel(job, layout, counts, domain)
    return tuple(exchange for exchange in found if any(exchange.forward) or any(exchange.backward))


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCounts:
    """Content of each stage: layers, the layers that run again in the backward, embedding, head and prediction."""

    layers_S: Mapping[LayerKind, Ints]
    """By kind; every kind that the model may have."""
    again_S: Mapping[LayerKind, Ints]
    """Those of them that full recompute runs again."""
    embedding_S: Ints
    head_S: Ints
    prediction_S: Ints
    """1 where the depths of multi-token prediction are, or would be."""

    @classmethod
    def of(cls, job: Job, layout: Layout) -> LayerCounts:
        """Count them for every chunk of a layout, in model order."""
        chunks, possible = chunk_kinds(job.model, layout), job.model.possible_kinds
        stage_S = np.arange(len(chunks))
        return cls(
            layers_S={kind: np.array([kinds.count(kind) for kinds, _ in chunks]) for kind in possible},
            again_S={kind: np.array([kinds[:again].count(kind) for kinds, again in chunks]) for kind in possible},
            embedding_S=(stage_S == 0).astype(np.int64),
            head_S=(stage_S == len(chunks) - 1).astype(np.int64),
            prediction_S=(stage_S == layout.mtp_chunk).astype(np.int64),
        )

    @classmethod
    def one_of_each(cls, model: ModelSpec) -> LayerCounts:
        """Return a stage for each part of a chunk: each kind of layer, run once and run again; then the other parts."""
        kinds = model.possible_kinds
        stages = np.eye(2 * len(kinds) + 3, dtype=np.int64)
        return cls(
            layers_S={kind: stages[2 * place] + stages[2 * place + 1] for place, kind in enumerate(kinds)},
            again_S={kind: stages[2 * place + 1] for place, kind in enumerate(kinds)},
            embedding_S=stages[-3],
            head_S=stages[-2],
            prediction_S=stages[-1],
        )

    def with_depths(self, job: Job, layout: Layout) -> LayerCounts:
        """Add the depths of multi-token prediction; method block runs none of their layers again."""
        depth, depths_S = Counter(job.model.prediction_kinds), job.model.mtp_num_layers * self.prediction_S
        again_S = depths_S * (layout.recompute.granularity == "full" and layout.recompute.method == "uniform")
        return LayerCounts(
            layers_S={kind: count_S + depth[kind] * depths_S for kind, count_S in self.layers_S.items()},
            again_S={kind: count_S + depth[kind] * again_S for kind, count_S in self.again_S.items()},
            embedding_S=self.embedding_S + depths_S,
            head_S=self.head_S * (1 + job.model.mtp_num_layers),
            prediction_S=self.prediction_S,
        )

    def run(self, blocks: Mapping[LayerKind, int]) -> tuple[Ints, Ints]:
        """Count blocks, of which a layer of a kind has so many: in the forward, and run again in the backward."""
        none_S = 0 * self.head_S
        once_S = sum((count * self.layers_S[kind] for kind, count in blocks.items() if kind in self.layers_S), none_S)
        again_S = sum((count * self.again_S[kind] for kind, count in blocks.items() if kind in self.again_S), none_S)
        return once_S, again_S


def _projection(job: Job, layout: Layout, depths_S: Ints) -> Iterator[Exchange]:
    """Each depth of multi-token prediction projects 2h to h, by columns, and gathers the columns.

    With sequence parallelism the input is gathered first, and the gathered output split again
    (multi_token_prediction.py, _concat_embeddings).
    """
    if layout.tp == 1:
        return
    size = job.model.dtype_bytes * attention.tokens(job.model, layout) * job.model.hidden_size
    none_S = 0 * depths_S
    yield _exchange("all_gather", "tp", size, depths_S, depths_S if layout.sequence_parallel else none_S)
    if layout.sequence_parallel:
        yield _exchange("all_gather", "tp", 2 * size, depths_S, depths_S)
        yield _exchange("reduce_scatter", "tp", 2 * size, none_S, depths_S)
    else:
        yield _exchange("all_reduce", "tp", 2 * size, none_S, depths_S)


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
    once_S, again_S = counts.run({kind: _tensor_parallel_blocks(job.model, kind) for kind in counts.layers_S})
    embedding_S, head_S = counts.embedding_S, counts.head_S
    none_S = 0 * head_S
    if layout.sequence_parallel and performance_options(job).tp_comm_overlap:
        yield _exchange("all_gather", "tp", size, head_S, embedding_S)
        yield _exchange("reduce_scatter", "tp", size, embedding_S, none_S)
        for part, hides in ((size / layout.tp, False), (size - size / layout.tp, True)):
            behind: Behind | None = "forward_s" if hides else None
            yield _exchange("all_gather", "tp", part, once_S, once_S + again_S, behind=behind)
            yield _exchange("reduce_scatter", "tp", part, once_S, again_S, behind=behind)
        yield _exchange("all_gather", "tp", size, none_S, once_S + head_S, behind="input_grad_s")
        yield _exchange("reduce_scatter", "tp", size, none_S, once_S + head_S, behind="weight_grad_s")
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


def _tensor_parallel_blocks(model: ModelSpec, kind: LayerKind) -> int:
    """Count a layer's blocks that tensor parallelism cuts: attention, Mamba, dense MLP, shared experts."""
    if kind in KINDS_WITH_EXPERTS:
        return int(kind in KINDS_WITH_ATTENTION) + int(model.moe_shared_expert_intermediate_size > 0)
    return 2 if kind == "layer" else 1


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
        once_S, again_S = counts.run({"mamba_layer": 1})
        yield _exchange("all_to_all", "cp", sent, once_S, once_S + again_S)
    latent = model.latent_attention
    channels = latent.query_channels + latent.v_head_dim if latent else 2 * model.kv_channels
    groups = max(1, (model.num_attention_heads if latent else model.num_query_groups) // layout.tp)
    size = model.dtype_bytes * groups * channels * attention.tokens(model, layout) * layout.cp
    once_S, again_S = counts.run(dict.fromkeys(KINDS_WITH_ATTENTION, 1))
    one = _exchange("all_gather", "cp", size, once_S, 2 * once_S + again_S, behind="core_attention_s")
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
    forward_S, again_S = counts.run(dict.fromkeys(KINDS_WITH_EXPERTS, 1))
    backward_S = forward_S + again_S
    dispatcher = options.moe_token_dispatcher_type
    if dispatcher != "allgather":
        if layout.ep > 1:
            copies = (
                _copies(model.moe_router_topk, layout.ep, domain) if dispatcher == "flex" else model.moe_router_topk
            )
            sent, times = size * copies, (2 * forward_S, 2 * backward_S)
            if options.overlap_moe_expert_parallel_comm:
                yield _exchange("all_to_all", "ep", sent * OVERLAP_COSTS, *times)
                yield _exchange("all_to_all", "ep", sent * (1 - OVERLAP_COSTS), *times, behind="other_layer_s")
            else:
                yield _exchange("all_to_all", "ep", sent, *times)
        size, group = size * model.moe_router_topk, "etp"
    members = layout.etp * (layout.ep if group == "ep_etp" else 1)
    if members > 1:
        yield _exchange("all_gather", group, size * members, forward_S, backward_S)
        yield _exchange("reduce_scatter", group, size * members, forward_S, backward_S)


def _copies(topk: int, ep: int, domain: int) -> float:
    """Count the ranks, or where there are several the domains, that have some of a token's experts, in the mean.

    Within a domain dispatchers reach a part of its links, which counts as so many more copies.
    """
    places = ep if ep <= domain else -(-ep // domain)
    hit = places * (1 - (1 - 1 / places) ** topk)
    return hit / IN_DOMAIN_SHARE if ep <= domain else hit


def _sharded(job: Job, layout: Layout, counts: LayerCounts) -> Iterator[Exchange]:
    for one in shard_exchanges(job, layout, counts):
        item = _exchange(one.kind, one.group, one.size_bytes, one.forward_S, one.backward_S, behind=one.behind)
        yield replace(item, behind_share=one.behind_share)


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


if TYPE_CHECKING:
    from pipette_launch.cost.communication.exchanges import LayerCounts


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardExchange:
    """One collective, with the fields of an `Exchange`."""

    kind: Kind
    group: Literal["shard", "expert_shard"]
    size_bytes: float
    forward_S: Ints
    backward_S: Ints
    behind: Behind | None = None
    behind_share: float = 1.0


def shard_exchanges(job: Job, layout: Layout, counts: LayerCounts) -> Iterator[ShardExchange]:
    """List the collectives of a micro-batch; they are linear in `counts`.

    A layer is gathered while the one before computes, and its gradients are reduced while the next does. Both take one
    communicator, so that they share the backward of a layer by what they move. Nothing hides the first layer's gather,
    as only the embedding computes before it, nor the reductions of the first layer and of the embedding, whose end
    every micro-batch waits for (FSDP megatron_fsdp.py:755-791, param_and_grad_buffer.py:3018).
    """
    sharding = sharding_of(job)
    if sharding is None or not sharding.gradients:
        return
    model = job.model
    units = unit_parameters(model, layout)
    counts = counts.with_depths(job, layout)
    for kind, layers_S in counts.layers_S.items():
        first_S = counts.embedding_S * (kind == model.layer_kinds[0])
        yield from _layers(job, layout, units.layers[kind], layers_S, first_S, kind)
    if group_sizes(layout, instances=shard_copies(job))["shard"] > 1:
        yield from _ends(job, layout, sharding, counts)


def gradients_of_copies(job: Job, layout: Layout, chunks: Sequence[Parameters]) -> tuple[tuple[int, int], ...]:
    """Bytes of each chunk's gradients, dense and of experts, that the copies of a shard add up once a step.

    An all-reduce over the copies moves 2 (n - 1) / n of a shard: so many bytes are priced as reduced by all replicas.
    """
    copies = shard_copies(job)
    members = group_sizes(layout, instances=copies)
    moved = 2 * (copies - 1) / copies * gradient_bytes_per_parameter(job)
    dense, expert = moved / members["shard"], moved / members["expert_shard"]
    return tuple((int(chunk.dense * dense), int(chunk.expert * expert)) for chunk in chunks)


def parameters_of_ends(job: Job, layout: Layout, gathers: int) -> tuple[tuple[int, int], ...]:
    """Bytes of each chunk's parameters outside the layers, which are gathered once a step, `gathers` bytes of each."""
    first, last = end_parameters(job.model, layout)
    return tuple(
        (((stage == 0) * first + (stage == layout.num_chunks - 1) * last) * gathers, 0)
        for stage in range(layout.num_chunks)
    )


def _layers(
    job: Job, layout: Layout, layer: Parameters, layers_S: Ints, first_S: Ints, kind: LayerKind
) -> Iterator[ShardExchange]:
    """Exchange layers of one kind; nothing hides `first_S` of them at the begin and at the end of a micro-batch."""
    sharding = sharding_of(job)
    members = group_sizes(layout, instances=shard_copies(job))
    gathered, gradient = layer_weight_bytes(job)[1], gradient_bytes_per_parameter(job)
    sizes: tuple[tuple[Literal["shard", "expert_shard"], int, int], ...] = (
        ("shard", layer.dense, members["shard"]),
        ("expert_shard", layer.expert, members["expert_shard"]),
    )
    used = [(group, count, count * (1 - 1 / size)) for group, count, size in sizes if count and size > 1]
    moved = sum(each for _, _, each in used)
    forward: OfLayer = ("forward", kind)
    backward: OfLayer = ("backward", kind)
    none_S = 0 * layers_S
    gathers = bool(sharding and sharding.weights) * gathered
    again = bool(sharding and sharding.gathers_twice) * gathers
    for group, count, each in used:
        share = each / moved
        size = float(count * gathered)
        if gathers:
            yield ShardExchange(kind="all_gather", group=group, size_bytes=size, forward_S=first_S, backward_S=none_S)
            yield ShardExchange(
                kind="all_gather",
                group=group,
                size_bytes=size,
                forward_S=layers_S - first_S,
                backward_S=none_S,
                behind=forward,
                behind_share=share,
            )
        if again:
            yield ShardExchange(
                kind="all_gather",
                group=group,
                size_bytes=size,
                forward_S=none_S,
                backward_S=layers_S,
                behind=backward,
                behind_share=share * again / (again + gradient),
            )
        size = float(count * gradient)
        yield ShardExchange(kind="reduce_scatter", group=group, size_bytes=size, forward_S=none_S, backward_S=first_S)
        yield ShardExchange(
            kind="reduce_scatter",
            group=group,
            size_bytes=size,
            forward_S=none_S,
            backward_S=layers_S - first_S,
            behind=backward,
            behind_share=share * gradient / (again + gradient),
        )


def _ends(job: Job, layout: Layout, sharding: Sharding, counts: LayerCounts) -> Iterator[ShardExchange]:
    """Reduce the gradients of embedding and head, and gather both where they do not stay from pass to pass.

    What the head exchanges passes behind the layer next to it.
    """
    model, gradient = job.model, gradient_bytes_per_parameter(job)
    embedding, head = end_parameters(model, layout)
    embedding_S, head_S = counts.embedding_S, counts.head_S
    none_S = 0 * head_S
    forward: OfLayer = ("forward", model.layer_kinds[-1])
    backward: OfLayer = ("backward", model.layer_kinds[-1])
    yield _end("reduce_scatter", embedding * gradient, none_S, embedding_S)
    yield _end("reduce_scatter", head * gradient, none_S, head_S, behind=backward)
    if sharding.weights and not sharding.keeps_ends:
        again = int(sharding.gathers_twice)
        yield _end("all_gather", embedding * model.dtype_bytes, embedding_S, none_S)
        yield _end("all_gather", embedding * model.dtype_bytes, none_S, again * embedding_S, behind=backward)
        yield _end("all_gather", head * model.dtype_bytes, head_S, none_S, behind=forward)
        yield _end("all_gather", head * model.dtype_bytes, none_S, again * head_S)


def _end(kind: Kind, size: int, forward_S: Ints, backward_S: Ints, *, behind: Behind | None = None) -> ShardExchange:
    return ShardExchange(
        kind=kind,
        group="shard",
        size_bytes=float(size),
        forward_S=forward_S,
        backward_S=backward_S,
        behind=behind,
    )


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
    held_gradients: tuple[int, ...]
    """Gradients that each pipeline rank keeps from micro-batch to micro-batch."""
    embedding_bytes: int
    """Gradient of the word embedding, summed over first and last pipeline rank; 0 when there is one copy."""


def hop_bytes(job: Job, layout: Layout) -> int:
    """One activation between neighbouring stages: s*b*h/c, over t with sequence parallelism (schedules.py)."""
    return activations.residual_bytes(job.model, layout)


def meets_receivers(job: Job, vpp: int, device_kind: str) -> bool:
    """Whether a message between stages starts only once its receiver, done with its pass, asks for it.

    Megatron asks right before it needs, but for `overlap_p2p_comm`, which holds with virtual stages only and there
    unless the user says no (arguments.py, validate_args). gloo then sends to nobody who has not asked: between 4 hosts,
    an activation that had long been sent took all its 13 ms when it was asked for. NCCL has not been measured here; the
    published step times are met better (by 0.1 to 0.7 points) if its messages travel ahead.
    """
    asks_late = vpp == 1 or not performance_options(job).overlap_p2p_comm
    return device_kind == "cpu" and asks_late


def blocks_at_ends(job: Job, vpp: int, device_kind: str) -> bool:
    """Whether ranks with virtual stages wait for the messages of warm-up and cool-down before their next pass.

    Megatron overlaps those of the steady part alone, unless it is asked for more. On 2 x 2 hosts, groups of 4
    micro-batches in place of 2, whose warm-up and cool-down are longer, took 8 % more and not 1 % less. As with
    `meets_receivers`, NCCL has not been measured.
    """
    overlaps = performance_options(job).overlap_p2p_comm
    asks_early = performance_options(job).overlap_p2p_comm_warmup_flush
    return device_kind == "cpu" and vpp > 1 and overlaps and not asks_early


def loss_report_bytes(device_kind: str) -> int:
    """What the replicas of the last stage add up once a step to report its loss: the sum and the count of its tokens.

    Over gloo that waits for all replicas once more: with four ranks on two cores 5 to 7 ms of a step of 57. Over NCCL
    it takes some tens of microseconds, and a ring's latencies would make more of it: it counts as nothing.
    """
    return 2 * _FP32_BYTES if device_kind == "cpu" else 0


def aligns_gathers(job: Job, vpp: int) -> bool:
    """Whether overlapped parameter gathers start on all pipeline ranks at once (see `first_gathers`).

    Megatron does so with virtual stages, and never without (arguments.py, validate_args).
    """
    return vpp > 1 and performance_options(job).align_param_gather


def step_traffic(job: Job, layout: Layout) -> StepTraffic:
    """Count gradients to reduce and parameters to gather of each stage, by who shares them.

    What FSDP exchanges in every micro-batch is not in it (`shard_exchanges`).
    """
    gradient, element, sharding = gradient_bytes_per_parameter(job), job.model.dtype_bytes, sharding_of(job)
    chunks = chunk_parameters(job.model, layout)
    gathers = element if layout.use_distributed_optimizer else 0
    ranks = [(part.dense, part.expert) for part in by_rank(chunks, layout.pp)]
    shared = layout.pp > 1 and has_two_embeddings(job.model)
    return StepTraffic(
        gradient_bytes=gradients_of_copies(job, layout, chunks)
        if sharding and sharding.gradients
        else tuple((chunk.dense * gradient, chunk.expert * gradient) for chunk in chunks),
        parameter_bytes=parameters_of_ends(job, layout, gathers)
        if sharding and sharding.weights
        else tuple((chunk.dense * gathers, chunk.expert * gathers) for chunk in chunks),
        # Only the first chunk of pipeline rank 0 is split, and only to overlap (param_and_grad_buffer.py).
        num_buckets=tuple(
            1 if stage or not layout.overlap_grad_reduce else int(num_buckets(chunk.count, layout.dp * layout.cp))
            for stage, chunk in enumerate(chunks)
        ),
        resident_parameters=tuple(int(resident_parameters(job, *rank, layout)) for rank in ranks),
        held_gradients=tuple(int(held_gradients(job, *rank, layout)) for rank in ranks),
        embedding_bytes=word_embedding_parameters(job.model, layout.tp) * gradient if shared else 0,
    )


def num_buckets(parameters: Ints | int, replicas: Ints | int) -> Ints:
    """Into how many parts Megatron splits overlapped gradients: of 40 million parameters, or of 1 million a replica.

    `replicas` is dp * cp (distributed_data_parallel.py). Numbers or arrays.
    """
    return np.asarray(-(-parameters // np.maximum(40_000_000, 1_000_000 * replicas)))


class CollectiveDimension(NamedTuple):
    """What one dimension of a layout runs, over groups of ranks."""

    name: str
    kinds: tuple[CollectiveKind, ...]
    ranks_GK: NDArray[np.int64]
    most_bytes: int
    """Of the full tensor on one rank."""
    parts: tuple[str, ...]
    """The parts of a step that these collectives are in (`StepTime.breakdown_s`)."""


def collective_dimensions(job: Job, layout: Layout) -> Iterator[CollectiveDimension]:
    """Dimensions of two ranks or more; what runs once a step first, as it is the least hidden and the most bytes."""
    groups = Groups.of(layout, instances=shard_copies(job))
    reduced: tuple[CollectiveKind, ...] = ("all_reduce",)
    parts: tuple[str, ...] = ("data_parallel",)
    if layout.use_distributed_optimizer:
        reduced, parts = ("reduce_scatter", "all_gather"), ("data_parallel", "parameter_gather")
    dense, expert = (max(sizes) for sizes in zip(*step_traffic(job, layout).gradient_bytes, strict=True))
    found = [CollectiveDimension("dp", reduced, groups.dp_cp, dense, parts)]
    if job.model.num_experts:
        found.append(CollectiveDimension("expert dp", reduced, groups.expert_dp, expert, parts))
    by_group: dict[str, list[Exchange]] = {}
    for exchange in exchanges(job, layout, Hiding()):
        if exchange.kind != "send":
            by_group.setdefault(exchange.group, []).append(exchange)
    for name, sent in by_group.items():
        kinds = tuple(dict.fromkeys(one.kind for one in sent if one.kind != "send"))
        most_bytes = int(max(one.size_bytes for one in sent))
        found.append(CollectiveDimension(name, kinds, getattr(groups, name), most_bytes, (sent[0].part,)))
    yield from (one for one in found if one.ranks_GK.shape[1] > 1)
