"""What FSDP exchanges in every micro-batch: weights are gathered layer by layer, gradients reduced and scattered.

FSDP = megatron/core/distributed/fsdp/src/megatron_fsdp of core_v0.16.1.
"""

# S = stages (model chunks) in model order.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pipette_launch.cost.communication.groups import group_sizes
from pipette_launch.cost.communication.hiding import Behind, OfLayer
from pipette_launch.cost.communication.steps import Kind
from pipette_launch.cost.layers.optimizer import gradient_bytes_per_parameter
from pipette_launch.cost.layers.parameters import Parameters, unit_parameters
from pipette_launch.cost.layers.sharding import Sharding, end_parameters, layer_weight_bytes, shard_copies, sharding_of
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Ints, Layout
from pipette_launch.facts.model import LayerKind

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
