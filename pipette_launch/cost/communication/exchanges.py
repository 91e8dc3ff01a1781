"""Groups of ranks, and their data exchanges: inside the passes of a micro-batch, between stages, and once a step.

FSDP = megatron/core/distributed/fsdp/src/megatron_fsdp of core_v0.16.1.
"""

# Letters of array axes: W = ranks, P = pipeline ranks, D = data-parallel replicas, C = cp, T = tp, E = ep, X = etp, Y =
# expert data-parallel, S = stages (model chunks) in model order, G = groups of one kind, K = members of a group in ring
# order.

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost.layers import parameters
from pipette_launch.cost.layers.block import FP32_BYTES, Block, Sizes, recompute_modules
from pipette_launch.cost.layers.kinds import CLASSES
from pipette_launch.cost.layers.loads import Behind, Exchange, Group, Hiding
from pipette_launch.cost.layers.parameters import expert_dp
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Ints, Layout
from pipette_launch.facts.measurements import CollectiveKind
from pipette_launch.facts.model import BLOCKS, LayerKind, ModelSpec

Ranks = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """The communication groups of a layout. The ranks of each group are sorted, as torch sorts them."""

    grid_PDCT: Ranks
    """RANK of each cell (pipeline rank, replica, cp, tp)."""
    tp: Ranks
    cp: Ranks
    ep: Ranks
    etp: Ranks
    ep_etp: Ranks
    """Groups over ep and etp together, in which the dispatcher `allgather` gathers tokens."""
    dp_cp: Ranks
    """Data-parallel groups with cp included; rows ordered by (pp, tp)."""
    expert_dp: Ranks
    """Data-parallel groups of experts; rows ordered by (pp, ep, etp)."""
    shard: Ranks
    """Subgroups of the `dp_cp` groups; the ranks of a subgroup share one copy of FSDP's shards."""
    expert_shard: Ranks
    embedding: Ranks
    """Pairs of first and last pipeline rank with equal (dp, cp, tp)."""
    forward_hop: Ranks
    """Pairs (sender, receiver) of ranks in neighbouring stages, and from the last stage to the first; rows ordered by
    the sender's (pp, dp, cp, tp)."""

    @classmethod
    def of(cls, layout: Layout, *, instances: int = 1) -> Groups:
        """Return all groups of a layout; `instances` = number of copies of FSDP's shards."""
        grid = rank_grid(layout)
        expert = _grid(layout, expert_dp(layout), layout.ep, layout.etp)
        dp_cp = grid.transpose(0, 3, 1, 2).reshape(layout.pp * layout.tp, -1)
        expert_dp_rows = _rows(expert, (0, 2, 3, 1))
        sizes = group_sizes(layout, instances=instances)
        hop = np.stack([grid, np.roll(grid, -1, axis=0)], axis=-1)
        return cls(
            grid_PDCT=grid,
            tp=grid.reshape(-1, layout.tp),
            cp=_rows(grid, (0, 1, 3, 2)),
            ep=_rows(expert, (0, 1, 3, 2)),
            etp=_rows(expert, (0, 1, 2, 3)),
            ep_etp=expert.reshape(-1, layout.ep * layout.etp),
            dp_cp=dp_cp,
            expert_dp=expert_dp_rows,
            # Consecutive members of a data-parallel group share one copy of FSDP's shards (parallel_state.py,
            # intra_partial_data_parallel_group).
            shard=dp_cp.reshape(-1, sizes["shard"]),
            expert_shard=expert_dp_rows.reshape(-1, sizes["expert_shard"]),
            embedding=np.stack([grid[0], grid[-1]], axis=-1).reshape(-1, 2),
            forward_hop=hop.reshape(-1, 2),
        )

    def met_PDL(self, groups_GK: Ranks) -> NDArray[np.int64]:
        """Return, for each pipeline rank of each replica, the rows of `groups_GK` that contain its ranks.

        If every group contains all ranks along the tensor axis or the context axis, each group is listed once for these
        ranks.
        """
        group_W = np.empty(self.grid_PDCT.size, dtype=np.int64)
        group_W[groups_GK] = np.arange(len(groups_GK))[:, None]
        met_PDCT = group_W[self.grid_PDCT]
        if (met_PDCT == met_PDCT[..., :1]).all():
            met_PDCT = met_PDCT[..., :1]
        if (met_PDCT == met_PDCT[:, :, :1]).all():
            met_PDCT = met_PDCT[:, :, :1]
        return np.asarray(met_PDCT.reshape(*met_PDCT.shape[:2], -1))


def group_sizes(layout: Layout, *, instances: int = 1) -> dict[str, int]:
    """Return the size of each kind of group, by its name in `Groups`; `instances` = copies of FSDP's shards."""
    replicas, expert_replicas = layout.dp * layout.cp, expert_dp(layout)
    return {
        "tp": layout.tp,
        "cp": layout.cp,
        "ep": layout.ep,
        "etp": layout.etp,
        "ep_etp": layout.ep * layout.etp,
        "dp_cp": replicas,
        "expert_dp": expert_replicas,
        # Megatron accepts only layouts whose replicas the number of copies divides.
        "shard": replicas // math.gcd(replicas, instances),
        "expert_shard": expert_replicas // math.gcd(expert_replicas, instances),
        "forward_hop": min(layout.pp, 2),
    }


def rank_strides(layout: Layout) -> dict[str, int]:
    """Return, for each kind of group, a number that divides the difference of any two of its ranks."""
    return {
        "tp": 1,
        "cp": layout.tp,
        "ep": layout.etp,
        "etp": 1,
        "ep_etp": 1,
        "dp_cp": layout.tp,
        "expert_dp": layout.ep * layout.etp,
        "shard": layout.tp,
        "expert_shard": layout.ep * layout.etp,
        "forward_hop": layout.tp * layout.cp * (1 if layout.use_tp_pp_dp_mapping else layout.dp),
    }


def rank_grid(layout: Layout) -> Ranks:
    """Return the RANK of each cell (pp, dp, cp, tp): order tp-cp-ep-dp-pp, or tp-cp-ep-pp-dp (parallel_state.py)."""
    return _grid(layout, layout.dp, layout.cp, layout.tp)


def _grid(layout: Layout, replicas: int, outer: int, inner: int) -> Ranks:
    """Return the RANK of each (pp, replica, outer, inner). Outer and inner are cp and tp, or ep and etp for experts."""
    ranks = np.arange(layout.world_size, dtype=np.int64)
    if layout.use_tp_pp_dp_mapping:
        return np.asarray(ranks.reshape(replicas, layout.pp, outer, inner).transpose(1, 0, 2, 3).copy())
    return ranks.reshape(layout.pp, replicas, outer, inner)


def _rows(grid: Ranks, axes: tuple[int, int, int, int]) -> Ranks:
    """Return groups whose members differ only along the last of `axes`."""
    return np.asarray(grid.transpose(axes).reshape(-1, grid.shape[axes[-1]]))


_CROSS_ENTROPY_REDUCTIONS = 3
"""Reductions over tp in the loss: largest logit, logit of the target, sum of exponentials (cross_entropy.py)."""


def exchanges(job: Job, layout: Layout, hiding: Hiding, domain: int) -> tuple[Exchange, ...]:
    """Return the collectives of a micro-batch with the seconds that compute hides; see `exchanges_of`."""
    return tuple(
        replace(item, hidden_s=hiding.seconds(item.behind) * item.behind_share) if item.behind else item
        for item in exchanges_of(job, layout, LayerCounts.of(job, layout), domain)
    )


def exchanges_of(job: Job, layout: Layout, counts: LayerCounts, domain: int = 1) -> tuple[Exchange, ...]:
    """Return the collectives of stages that `counts` describes; the number of collectives is linear in `counts`.

    The layers and the embedding lookup of each multi-token prediction depth are on one stage, its head on the last.
    `domain` is the number of slots in one NVLink domain. `flex` dispatchers send fewer copies of a token to other
    NVLink domains.
    """
    counts = counts.with_depths(job, layout)
    found = [*shard_exchanges(job, layout, counts), *_tensor_parallel(job, layout, counts)]
    for block, once_S, again_S in counts.blocks(job, layout, domain):
        found += block.exchanges(once_S, again_S)
    return tuple(exchange for exchange in found if any(exchange.forward) or any(exchange.backward))


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCounts:
    """Number of layers and other parts of the model on each stage."""

    layers_S: Mapping[LayerKind, Ints]
    """Number of layers of each kind on each stage, for every kind that the model may have."""
    again_S: Mapping[LayerKind, Ints]
    """Number of layers of each kind on each stage that full recompute runs again."""
    embedding_S: Ints
    head_S: Ints
    prediction_S: Ints
    """1 on the stage that the layout chooses for the depths of multi-token prediction (`mtp_chunk`), else 0."""

    @classmethod
    def of(cls, job: Job, layout: Layout) -> LayerCounts:
        """Count the layers, embeddings, heads and prediction depths of every chunk of a layout, in model order."""
        chunks, possible = parameters.chunk_kinds(job.model, layout), job.model.possible_kinds
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
        """Return counts of stages with one part each: a layer with or without recompute, embedding, head, or depths."""
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
        """Add the layers, lookups and heads of multi-token prediction depths.

        Recompute method `block` never runs the layers of these depths again.
        """
        depth, depths_S = Counter(job.model.prediction_kinds), job.model.mtp_num_layers * self.prediction_S
        again_S = depths_S * (layout.recompute.granularity == "full" and layout.recompute.method == "uniform")
        return replace(
            self,
            layers_S={kind: count_S + depth[kind] * depths_S for kind, count_S in self.layers_S.items()},
            again_S={kind: count_S + depth[kind] * again_S for kind, count_S in self.again_S.items()},
            embedding_S=self.embedding_S + depths_S,
            head_S=self.head_S * (1 + job.model.mtp_num_layers),
        )

    def blocks(self, job: Job, layout: Layout, domain: int = 1) -> Iterator[tuple[Block, Ints, Ints]]:
        """Yield each class of blocks with its count on each stage, and the count that the backward runs again."""
        for name, kind_of_block in CLASSES.items():
            once_S, again_S = (
                sum((BLOCKS[kind].count(name) * count_S for kind, count_S in layers.items()), 0 * self.head_S)
                for layers in (self.layers_S, self.again_S)
            )
            if once_S.any():
                block = kind_of_block(job, layout, domain)
                yield block, once_S, once_S if block.recompute_module in recompute_modules(layout) else again_S


def _tensor_parallel(job: Job, layout: Layout, counts: LayerCounts) -> Iterator[Exchange]:
    """Yield one all-reduce in each pass of each block that tp cuts (Shoeybi et al. 2019, section 3).

    Tensor parallelism (tp) cuts attention, Mamba and MLP blocks. With sequence parallelism the all-reduce is an
    all-gather and a reduce-scatter (Korthikanti et al. 2022, section 4.2.2). With sequence parallelism, the backward
    gathers the input of each column-parallel matrix again for the weight gradient (layers.py). The computation of the
    input gradient hides this second gather. The computation of the weight gradient hides the reduction of input
    gradients, unless `--no-async-tensor-model-parallel-allreduce` forbids the overlap (until v16, and without sequence
    parallelism). With `--tp-comm-overlap`, the products of layers hide all chunks of an exchange but one. The
    column-parallel matrices of multi-latent attention read inputs that are narrower than the hidden size.
    `tests/patches/test_exchanges.py` compares counts and bytes with Megatron's.
    """
    if layout.tp == 1:
        return
    count, options, hidden = Sizes(job, layout).tokens, job.options, job.model.hidden_size
    size = job.model.dtype_bytes * count * hidden
    embedding_S, head_S, none_S = counts.embedding_S, counts.head_S, 0 * counts.head_S
    once_S, again_S, columns = _cut_by_tp(job, layout, counts)
    column_S, column_again_S = columns[hidden]
    behind: Behind | None
    if layout.sequence_parallel:
        # Learned positions are added to the embeddings of all tokens, so each rank cuts out its own tokens afterwards.
        scatters = job.model.position_embedding_type != "learned_absolute"
        yield Exchange.of("reduce_scatter" if scatters else "all_reduce", "tp", size, embedding_S, none_S)
    if layout.sequence_parallel and options.tp_comm_overlap:
        yield Exchange.of("all_gather", "tp", size, head_S, embedding_S)
        for part, hides in ((size / layout.tp, False), (size - size / layout.tp, True)):
            behind = "forward_s" if hides else None
            yield Exchange.of("all_gather", "tp", part, column_S, once_S + column_again_S, behind=behind)
            yield Exchange.of("reduce_scatter", "tp", part, once_S, again_S, behind=behind)
    elif layout.sequence_parallel:
        yield Exchange.of("all_gather", "tp", size, column_S + head_S, once_S + column_again_S + embedding_S)
        yield Exchange.of("reduce_scatter", "tp", size, once_S, again_S)
    else:
        yield Exchange.of("all_reduce", "tp", size, once_S + embedding_S, again_S)
    for width, (input_S, input_again_S) in columns.items():
        size, backward_S = job.model.dtype_bytes * count * width, input_S + head_S * (width == hidden)
        if layout.sequence_parallel:
            if width != hidden:
                yield Exchange.of("all_gather", "tp", size, input_S, input_again_S)
            yield Exchange.of("all_gather", "tp", size, none_S, backward_S, behind="input_grad_s")
            yield Exchange.of("reduce_scatter", "tp", size, none_S, backward_S, behind="weight_grad_s")
        else:
            behind = "weight_grad_s" if options.async_tensor_model_parallel_allreduce else None
            yield Exchange.of("all_reduce", "tp", size, none_S, backward_S, behind)
    yield Exchange.of("all_reduce", "tp", FP32_BYTES * count, _CROSS_ENTROPY_REDUCTIONS * head_S, none_S)


def _cut_by_tp(job: Job, layout: Layout, counts: LayerCounts) -> tuple[Ints, Ints, dict[int, tuple[Ints, Ints]]]:
    """Count the blocks that tp cuts on each stage, and their column-parallel matrices by the width of the input.

    Each count is a pair: the count in the forward, and the count that recompute adds in the backward.
    """
    none_S = 0 * counts.head_S
    once_S, again_S, columns = none_S, none_S, {job.model.hidden_size: (none_S, none_S)}
    for block, block_S, block_again_S in counts.blocks(job, layout):
        if block.is_cut_by_tp():
            once_S, again_S = once_S + block_S, again_S + block_again_S
            for width in block.column_inputs():
                before_S, before_again_S = columns.get(width, (none_S, none_S))
                columns[width] = before_S + block_S, before_again_S + block_again_S
    return once_S, again_S, columns


def shard_exchanges(job: Job, layout: Layout, counts: LayerCounts) -> Iterator[Exchange]:
    """Yield the collectives of FSDP in a micro-batch: each layer gathers its weights and reduce-scatters its gradients.

    The compute of the neighbouring layers hides the gather and the reduction of a layer. Gathers and reductions use one
    communicator, so they share the time of a layer's backward in proportion to their bytes. Nothing hides the first
    layer's gather, because only the embedding computes before it. Nothing hides the reductions of the first layer and
    of the embedding, because every micro-batch waits for their end (FSDP megatron_fsdp.py:755-791,
    param_and_grad_buffer.py:3018). `counts` includes the layers and heads of multi-token prediction depths.
    """
    sharding = parameters.sharding_of(job)
    if sharding is None or not sharding.gradients:
        return
    members = group_sizes(layout, instances=parameters.shard_copies(job))
    weight, gradient = parameters.layer_weight_bytes(job)[1], parameters.reduced_gradient_bytes(job)
    gathers = sharding.weights * weight
    layers = parameters.unit_parameters(job, layout).layers
    groups: tuple[Group, Group] = ("shard", "expert_shard")
    for kind, layers_S in counts.layers_S.items():
        forward: Behind = ("forward", kind)
        backward: Behind = ("backward", kind)
        first_S = counts.embedding_S * (kind == job.model.layer_kinds[0])
        none_S, hidden_S = 0 * layers_S, layers_S - first_S
        sizes = zip(groups, (layers[kind].dense, layers[kind].expert), strict=True)
        used = [(group, count, count * (1 - 1 / members[group])) for group, count in sizes if members[group] > 1]
        moved = sum(each for _, _, each in used)
        for group, count, each in used:
            if not count:
                continue
            size, reduced, share = float(count * weight), float(count * gradient), each / moved
            in_backward = share / (gathers + gradient)
            if gathers:
                yield Exchange.of("all_gather", group, size, first_S, none_S)
                yield Exchange.of("all_gather", group, size, hidden_S, none_S, forward, share)
                yield Exchange.of("all_gather", group, size, none_S, layers_S, backward, gathers * in_backward)
            yield Exchange.of("reduce_scatter", group, reduced, none_S, first_S)
            yield Exchange.of("reduce_scatter", group, reduced, none_S, hidden_S, backward, gradient * in_backward)
    if members["shard"] > 1:
        # The compute of the layer next to the head hides the reduction of the head's gradients.
        embedding, head = parameters.end_parameters(job, layout)
        last: Behind = ("backward", job.model.layer_kinds[-1])
        none_S = 0 * counts.head_S
        yield Exchange.of("reduce_scatter", "shard", embedding * gradient, none_S, counts.embedding_S)
        yield Exchange.of("reduce_scatter", "shard", head * gradient, none_S, counts.head_S, last)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTraffic:
    """Data exchanged once a step, in bytes on one rank."""

    gradient_bytes: tuple[tuple[int, int], ...]
    """Bytes of gradients of each stage: (dense, expert)."""
    parameter_bytes: tuple[tuple[int, int], ...]
    """Bytes of parameters that a distributed optimizer gathers on each stage: (dense, expert); 0 without it."""
    num_buckets: tuple[int, ...]
    """Number of buckets of each stage's gradients; each bucket is reduced separately."""
    resident_parameters: tuple[int, ...]
    """Number of parameters that the optimizer of each pipeline rank updates."""
    held_gradients: tuple[int, ...]
    """Number of gradient elements that each pipeline rank accumulates over the micro-batches of a step."""
    embedding_bytes: int
    """Bytes of the word embedding's gradient that first and last rank add up; 0 if one rank has the embedding."""


def step_traffic(job: Job, layout: Layout) -> StepTraffic:
    """Count each stage's reduced gradients and gathered parameters, without FSDP's collectives inside passes.

    If Megatron-FSDP keeps n copies of its shards, an all-reduce over the copies moves 2 (n - 1) / n of a shard once a
    step. The prediction takes the time of an all-reduce over all replicas instead. FSDP gathers parameters outside the
    layers once a step if they stay gathered from pass to pass.
    """
    sharding, copies, replicas = parameters.sharding_of(job), parameters.shard_copies(job), layout.dp * layout.cp
    gradient, chunks = parameters.reduced_gradient_bytes(job), parameters.chunk_parameters(job, layout)
    dense = expert = float(gradient)
    if sharding and sharding.gradients:
        members, moved = group_sizes(layout, instances=copies), 2 * (copies - 1) / copies * gradient
        dense, expert = moved / members["shard"], moved / members["expert_shard"]
    sizes = sent = [(chunk.dense, chunk.expert) for chunk in chunks]
    if sharding and sharding.weights:
        first, last = parameters.end_parameters(job, layout)
        sent = [(0, 0) for _ in chunks]
        sent[0] = (first, 0)
        sent[-1] = (sent[-1][0] + last, 0)
    gathered = job.model.dtype_bytes if layout.use_distributed_optimizer else 0
    has_expert_groups = job.model.num_experts and (layout.ep > 1 or layout.etp != layout.tp)
    if has_expert_groups and sharding is None and not layout.overlap_param_gather:
        # One optimizer updates expert parameters, another dense parameters, and each gathers all parameters.
        gathered *= 2
    dense_R, expert_R = (
        [sum(each[rank :: layout.pp]) for rank in range(layout.pp)] for each in zip(*sizes, strict=True)
    )
    ranks = list(zip(dense_R, expert_R, strict=True))
    shared = layout.pp > 1 and parameters.has_two_embeddings(job.model)
    return StepTraffic(
        gradient_bytes=tuple((int(chunk.dense * dense), int(chunk.expert * expert)) for chunk in chunks),
        parameter_bytes=tuple((dense * gathered, expert * gathered) for dense, expert in sent),
        # Only the first chunk of pipeline rank 0 has several buckets, and only with overlap (param_and_grad_buffer.py).
        num_buckets=tuple(
            1 if stage or not layout.overlap_grad_reduce else int(num_buckets(chunk.dense, chunk.expert, replicas))
            for stage, chunk in enumerate(chunks)
        ),
        resident_parameters=tuple(int(parameters.resident_parameters(job, *rank, layout)) for rank in ranks),
        held_gradients=tuple(int(parameters.held_gradients(job, *rank, layout)) for rank in ranks),
        embedding_bytes=parameters.word_embedding_parameters(job.model, layout.tp) * gradient if shared else 0,
    )


def num_buckets(dense: Ints | int, expert: Ints | int, replicas: Ints | int) -> Ints:
    """Return the number of gradient buckets that are reduced during the backward.

    A bucket has 40 million parameters, or 1 million parameters for each replica. Megatron takes the larger of these
    two bucket sizes, also for the parameters of experts, which have a buffer of their own
    (distributed_data_parallel.py). `replicas` is the product dp * cp. All arguments are numbers or arrays.
    """
    bucket = np.maximum(40_000_000, 1_000_000 * replicas)
    return np.asarray(-(-dense // bucket) - (-expert // bucket))


class Waits(NamedTuple):
    """Waits of pipeline ranks for messages, by the job's options and the library of messages."""

    meets_receivers: bool
    """True if a message between stages starts only when its receiver ends a pass and requests the message.

    Without `overlap_p2p_comm` Megatron requests a message just before the pass that needs the message. Megatron sets
    `overlap_p2p_comm` by default with virtual stages, and ignores it without virtual stages (arguments.py,
    validate_args). Before the receiver's request gloo sends nothing: between 4 hosts, an activation took its full 13 ms
    even after a late request. Messages over NCCL have not been measured. The prediction lets NCCL send before the
    request, which lowers its error on published step times by 0.1 to 0.7 percentage points.
    """
    blocks_at_ends: bool
    """True if ranks with virtual stages wait for the messages of warm-up and cool-down before their next pass.

    Megatron overlaps the messages of warm-up and cool-down only with `overlap_p2p_comm_warmup_flush`. On 4 CPU hosts, a
    step with micro-batch groups of 4, whose warm-up and cool-down are longer, took 8 % longer than with groups of 2. A
    prediction without the wait says instead that the step with groups of 4 is 1 % shorter. Waits over NCCL have not
    been measured.
    """

    @classmethod
    def of(cls, job: Job, vpp: int, device_kind: str) -> Waits:
        """Read the waits of a job with `vpp` chunks on each rank."""
        options, is_cpu = job.options, device_kind == "cpu"
        overlaps = vpp > 1 and options.overlap_p2p_comm
        return cls(
            meets_receivers=is_cpu and not overlaps,
            blocks_at_ends=is_cpu and overlaps and not options.overlap_p2p_comm_warmup_flush,
        )


class CollectiveDimension(NamedTuple):
    """Collectives of one parallel dimension of a layout, and the groups of ranks that run them."""

    name: str
    kinds: tuple[CollectiveKind, ...]
    ranks_GK: NDArray[np.int64]
    most_bytes: int
    """Bytes of the largest full tensor that these collectives move on one rank."""
    parts: tuple[str, ...]
    """Parts of a step that contain these collectives (`StepTime.breakdown_s`)."""


def collective_dimensions(job: Job, layout: Layout, domain: int) -> Iterator[CollectiveDimension]:
    """Yield the collectives of each parallel dimension that has at least 2 ranks.

    Dimensions whose collectives run once a step come first, because compute hides the least of these large tensors.
    `domain` is the number of slots in one NVLink domain, which decides the bytes of `flex` dispatchers.
    """
    groups = Groups.of(layout, instances=parameters.shard_copies(job))
    reduced: tuple[CollectiveKind, ...] = ("all_reduce",)
    parts: tuple[str, ...] = ("data_parallel",)
    if layout.use_distributed_optimizer:
        reduced, parts = ("reduce_scatter", "all_gather"), ("data_parallel", "parameter_gather")
    dense, expert = (max(sizes) for sizes in zip(*step_traffic(job, layout).gradient_bytes, strict=True))
    found = [CollectiveDimension("dp", reduced, groups.dp_cp, dense, parts)]
    if job.model.num_experts:
        found.append(CollectiveDimension("expert dp", reduced, groups.expert_dp, expert, parts))
    sent = exchanges(job, layout, Hiding(), domain)
    for name in dict.fromkeys(one.group for one in sent):
        mine = [one for one in sent if one.group == name]
        kinds = tuple(dict.fromkeys(one.kind for one in mine if one.kind != "send"))
        most_bytes = int(max(one.size_bytes for one in mine))
        found.append(CollectiveDimension(name, kinds, getattr(groups, name), most_bytes, (mine[0].part,)))
    yield from (one for one in found if one.ranks_GK.shape[1] > 1)
