"""Step times of one given layout by the latency models of AMP, Varuna and Pipette.

The planners of the same names in `benchmarks.rivals` price what their own search visits. These functions price
any layout and placement, and refuse options that a model does not know, so that these count as infeasible.
"""

# S = slots, W = ranks, G = groups, K = members of a group, P = stages, L = lanes of the pipeline (dp, tp), H = hosts.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.rivals import amp, pipette_planner
from benchmarks.rivals.inputs import Array, UnitPrices, slot_of_rank
from benchmarks.rivals.pipette_planner import Messages
from benchmarks.rivals.varuna import Priority, VarunaPrices
from pipette_launch.cost.communication.exchanges import Groups, rank_grid
from pipette_launch.errors import PlanError
from pipette_launch.facts.cluster import Cluster
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.measurements import Measurements

WORDS = {
    "tp": "tensor parallelism",
    "cp": "context parallelism",
    "ep": "expert parallelism",
    "vpp": "interleaved schedule",
}


def refuse(model_name: str, layout: Layout, *degrees: str) -> None:
    """Raise PlanError where a degree that a published model does not know is above 1.

    Args:
        model_name: for the message.
        layout: layout to price.
        degrees: names of `WORDS`.

    """
    for name in degrees:
        if getattr(layout, name) > 1:
            raise PlanError(f"{model_name} has no {WORDS[name]}; take {name}=1")


def amp_s(job: Job, layout: Layout, measurements: Measurements, placement: Sequence[int] | None = None) -> float:
    """Predict seconds per step as AMP does, for the stages that the layout says.

    Args:
        job: the model and batch.
        layout: degrees; distributed optimizer, sequence parallelism, recompute and overlap make no difference.
        measurements: compute times and links.
        placement: RANK of each slot; None = torchrun's own.

    Raises:
        PlanError: something that AMP has no notion of, or that was not measured.
        LayoutError: the batch or the layers do not divide.

    """
    refuse("AMP", layout, "cp", "ep", "vpp")
    slot_W = slot_of_rank(layout, measurements, placement)
    units = UnitPrices(job, measurements).of(layout, slot_W)
    return amp.priced_s(job, layout, units, amp.node_seconds_per_byte(measurements.cluster), slot_W)


def varuna_s(
    job: Job,
    layout: Layout,
    measurements: Measurements,
    placement: Sequence[int] | None = None,
    *,
    priority: Priority = "varuna",
) -> float:
    """Predict seconds per step as Varuna does.

    Args:
        job: the model and batch.
        layout: pp, dp and micro-batch; recompute is always on.
        measurements: compute times and links.
        placement: RANK of each slot; None = Varuna's own: consecutive slots are consecutive stages.
        priority: Varuna's order, backward > recompute > forward, or Megatron's 1F1B with full recompute.

    Raises:
        PlanError: something that Varuna has no notion of, or that was not measured.
        LayoutError: the batch or the layers do not divide.

    """
    refuse("Varuna", layout, "tp", "cp", "ep", "vpp")
    if placement is None:
        layout = replace(layout, use_tp_pp_dp_mapping=True)
    return VarunaPrices(job, measurements).step_time_s(layout, placement, priority=priority)


def pipette_s(job: Job, layout: Layout, measurements: Measurements, placement: Sequence[int] | None = None) -> float:
    """Predict seconds per step as Pipette does.

    Args:
        job: the model and batch.
        layout: degrees; distributed optimizer, sequence parallelism and overlap make no difference to this model.
        measurements: compute times and links.
        placement: RANK of each slot; None = torchrun's own.

    Raises:
        PlanError: something that Pipette has no notion of, or that was not measured.
        LayoutError: the batch or the layers do not divide.

    """
    slot_W = slot_of_rank(layout, measurements, placement)
    forward, backward, microbatches = _stages(job, layout, measurements, slot_W, "Pipette")
    # Its timers include the forward that the backward repeats.
    again = forward if layout.recompute.granularity == "full" else 0.0
    messages = Messages.of(job.model, layout)
    cluster = measurements.cluster
    return pipette_planner.pipette_s(
        stages=layout.pp,
        microbatches=microbatches,
        pass_s=float((forward + backward + again).max()),
        transfer_s=transfer_s(layout, slot_seconds_per_byte(cluster), slot_W, messages.pipeline),
        data_parallel_s=data_parallel_s(layout, cluster, slot_W, messages.data_parallel),
    )


def amp_arm_s(job: Job, layout: Layout, measurements: Measurements) -> float:
    """Predict seconds per step as the AMP in Pipette's code does; it knows no placement.

    Raises:
        PlanError: something that this model has no notion of, or that was not measured.
        LayoutError: the batch or the layers do not divide.

    """
    forward, _, _ = _stages(job, layout, measurements, slot_of_rank(layout, measurements, None), "AMP")
    return pipette_planner.amp_arm_of(job, layout, measurements.cluster, float(forward.max()))


def transfer_s(layout: Layout, seconds_per_byte_SS: Array, slot_W: NDArray[np.int64], message_bytes: float) -> float:
    """T_PP of Pipette: the slowest lane's sum over its links of a message there and one back, both at the way there.

    Args:
        layout: its pp and the order of its ranks.
        seconds_per_byte_SS: of the links, from the slot of the row.
        slot_W: the slot of each RANK.
        message_bytes: of one micro-batch.

    """
    if layout.pp == 1:
        return 0.0
    slots_PL = slot_W[rank_grid(layout)].reshape(layout.pp, -1)
    lanes_s = 2 * message_bytes * seconds_per_byte_SS[slots_PL[:-1], slots_PL[1:]].sum(axis=0)
    return float(lanes_s.max())


def data_parallel_s(layout: Layout, cluster: Cluster, slot_W: NDArray[np.int64], message_bytes: float) -> float:
    """T_DP = T_out + T_in of Pipette, for the slowest of the first stage's groups.

    T_out: a ring over the d_out hosts of a group in rank order, 2(d_out - 1)/d_out of the message over its slowest
    link; T_in: the same over the d_in ranks on one host, over the slowest of its links.

    Args:
        layout: whose data-parallel groups exchange.
        cluster: its links.
        slot_W: the slot of each RANK.
        message_bytes: of a replica.

    """
    groups_GK = slot_W[Groups.of(layout).dp_cp[: layout.tp]]
    return max(_two_level_s(cluster, group.tolist(), message_bytes) for group in groups_GK)


def slot_seconds_per_byte(cluster: Cluster) -> Array:
    """Return 1 / bandwidth from slot (row) to slot (column); 0 on the diagonal."""
    size = cluster.devices_per_host
    full_SS = np.repeat(np.repeat(cluster.between_hosts.seconds_per_byte, size, axis=0), size, axis=1)
    for host, links in enumerate(cluster.within_host):
        place = slice(host * size, (host + 1) * size)
        full_SS[place, place] = links.seconds_per_byte
    return full_SS


def _two_level_s(cluster: Cluster, slots: Sequence[int], message_bytes: float) -> float:
    seconds_per_byte_SS = slot_seconds_per_byte(cluster)
    members: dict[int, list[int]] = {}
    for slot in slots:
        members.setdefault(cluster.host_of(slot), []).append(slot)
    first_H = [group[0] for group in members.values()]
    out_s = _ring_share(len(first_H)) * _slowest(seconds_per_byte_SS, first_H)
    inner = max(members.values(), key=len)
    inner_s = max(_slowest(seconds_per_byte_SS, group) for group in members.values())
    return message_bytes * (out_s + _ring_share(len(inner)) * inner_s)


def _ring_share(size: int) -> float:
    return 2 * (size - 1) / size


def _slowest(seconds_per_byte_SS: Array, ring: Sequence[int]) -> float:
    """Largest 1 / bandwidth around the closed ring."""
    if len(ring) == 1:
        return 0.0
    return float(seconds_per_byte_SS[list(ring), [*ring[1:], ring[0]]].max())


def _stages(
    job: Job, layout: Layout, measurements: Measurements, slot_W: NDArray[np.int64], name: str
) -> tuple[Array, Array, int]:
    """Forward and backward seconds of each stage, and micro-batches."""
    refuse(name, layout, "cp", "ep", "vpp")
    if len(set(layout.layers_per_chunk)) > 1:
        raise PlanError(f"{name} has no uneven stages; leave layers_per_chunk empty")
    units = UnitPrices(job, measurements).of(layout, slot_W)
    forward, backward = units.stages_s(layout.stage_layers(job.model.num_layers))
    return forward, backward, layout.num_microbatches(job.batch.global_batch_size)
