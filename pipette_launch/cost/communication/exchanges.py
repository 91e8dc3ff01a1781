"""What a layout makes its ranks send each other inside the passes of a micro-batch, and how often."""

# S = stages (model chunks) in model order.

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost.communication.hiding import Behind, Hiding
from pipette_launch.cost.communication.shards import shard_exchanges
from pipette_launch.cost.communication.steps import Kind
from pipette_launch.cost.layers import attention
from pipette_launch.cost.layers.parameters import chunk_kinds
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.model import KINDS_WITH_ATTENTION, KINDS_WITH_EXPERTS, LayerKind, ModelSpec
from pipette_launch.megatron.performance import performance_options

Ints = NDArray[np.int64]
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
