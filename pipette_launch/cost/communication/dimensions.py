"""The collectives of a layout by parallel dimension: which groups of ranks run which of them."""

# G = groups of one dimension, K = members of a group in the order of their ring.

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipette_launch.cost.communication.exchanges import Exchange, exchanges
from pipette_launch.cost.communication.groups import Groups
from pipette_launch.cost.communication.hiding import Hiding
from pipette_launch.cost.communication.traffic import step_traffic
from pipette_launch.cost.layers.sharding import shard_copies
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.messages import CollectiveKind


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
