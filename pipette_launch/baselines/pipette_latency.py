"""Pipette's latency model (DATE 2024), and the arm of its code that stands for AMP.

Re-derived from facts pipette.md section 2. f and b are one forward and backward of one micro-batch on one stage, with
the tensor-parallel collectives inside; here those of the slowest stage, priced as ours are. Kept as they are: messages
not divided by tp, 16 h^2 parameters a layer, leftover micro-batches that vanish, no latency, no overlap, no optimizer.
"""

# S = slots, W = ranks, L = lanes of the pipeline (dp, tp), H = hosts of a ring.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipette_launch.baselines.inputs import Array, refuse, slot_of_rank, units
from pipette_launch.cost.communication.groups import Groups, rank_grid
from pipette_launch.errors import PlanError
from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.machines.cluster import Cluster
from pipette_launch.facts.measurements import Measurements
from pipette_launch.facts.model import ModelSpec

_GPT_WEIGHTS = 16
"""Parameters of a layer over h^2 in Pipette's code; a GPT has about 12."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Messages:
    """Bytes that Pipette counts."""

    pipeline: float
    """mbs*s*h*e, not divided by tp."""
    data_parallel: float
    """e*(h*V + L_s*16*h^2)/tp: an embedding on every stage."""

    @classmethod
    def of(cls, model: ModelSpec, layout: Layout) -> Messages:
        """Count them for a layout of even stages."""
        h, element = model.hidden_size, model.dtype_bytes
        stage_layers = model.num_layers // layout.pp
        parameters = h * model.padded_vocab_size(layout.tp) + stage_layers * _GPT_WEIGHTS * h * h
        return cls(
            pipeline=layout.micro_batch_size * model.seq_length * h * element,
            data_parallel=element * parameters / layout.tp,
        )


def step_time_s(job: Job, layout: Layout, measurements: Measurements, placement: Sequence[int] | None = None) -> float:
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
    # Its timers see whatever the backward runs again.
    again = forward if layout.recompute.granularity == "full" else 0.0
    messages = Messages.of(job.model, layout)
    cluster = measurements.cluster
    return pipette_s(
        stages=layout.pp,
        microbatches=microbatches,
        pass_s=float((forward + backward + again).max()),
        transfer_s=transfer_s(layout, cluster.seconds_per_byte_SS(), slot_W, messages.pipeline),
        data_parallel_s=data_parallel_s(layout, cluster, slot_W, messages.data_parallel),
    )


def amp_arm_s(job: Job, layout: Layout, measurements: Measurements) -> float:
    """Predict seconds per step as the AMP arm of Pipette's code does: backward = 2f, nominal links, one flat ring.

    The nominal bandwidths are those of the best link between hosts and of the best within one. It knows no placement.

    Raises:
        PlanError: something that this arm has no notion of, or that was not measured.
        LayoutError: the batch or the layers do not divide.

    """
    slot_W = slot_of_rank(layout, measurements, None)
    forward, _, microbatches = _stages(job, layout, measurements, slot_W, "AMP")
    messages = Messages.of(job.model, layout)
    within, between = nominal_seconds_per_byte(measurements.cluster)
    is_one_host = layout.world_size <= measurements.cluster.devices_per_host
    ring = 2 * (layout.dp - 1) / layout.dp * messages.data_parallel
    return amp_arm(
        stages=layout.pp,
        microbatches=microbatches,
        forward_s=float(forward.max()),
        hop_s=messages.pipeline * (within if is_one_host else between),
        data_parallel_s=ring * (within if is_one_host else max(within, between)),
    )


def pipette_s(
    *, stages: int, microbatches: int, pass_s: float, transfer_s: float, data_parallel_s: float = 0.0
) -> float:
    """q*(p*F + T_PP) + (p - 1)*F + T_DP with q = n // p, or (p*F + T_PP) + (n - 1)*F + T_DP where q = 0.

    T_PP, a round trip over all links, is the hidden critical path: every p micro-batches expose one.
    """
    rounds = microbatches // stages
    if rounds == 0:
        return stages * pass_s + transfer_s + (microbatches - 1) * pass_s + data_parallel_s
    return rounds * (stages * pass_s + transfer_s) + (stages - 1) * pass_s + data_parallel_s


def amp_arm(*, stages: int, microbatches: int, forward_s: float, hop_s: float, data_parallel_s: float = 0.0) -> float:
    """(n - 1)*3f + p*3f + 2(p - 1)*hop + T_DP: the pipeline's communication once."""
    return (microbatches + stages - 1) * 3 * forward_s + 2 * (stages - 1) * hop_s + data_parallel_s


def transfer_s(layout: Layout, seconds_per_byte_SS: Array, slot_W: NDArray[np.int64], message_bytes: float) -> float:
    """T_PP: the slowest lane's sum over its links of a message there and one back, both at the way there."""
    if layout.pp == 1:
        return 0.0
    slots_PL = slot_W[rank_grid(layout)].reshape(layout.pp, -1)
    lanes_s = 2 * message_bytes * seconds_per_byte_SS[slots_PL[:-1], slots_PL[1:]].sum(axis=0)
    return float(lanes_s.max())


def data_parallel_s(layout: Layout, cluster: Cluster, slot_W: NDArray[np.int64], message_bytes: float) -> float:
    """T_DP = T_out + T_in of the first stage's groups, the slowest of them.

    T_out: a ring over the d_out hosts of a group in rank order, 2(d_out - 1)/d_out of the message over its slowest
    link; T_in: the same over the d_in ranks on one host, over the slowest of its links.
    """
    groups_GK = slot_W[Groups.of(layout).dp_cp[: layout.tp]]
    return max(_two_level_s(cluster, group.tolist(), message_bytes) for group in groups_GK)


def _two_level_s(cluster: Cluster, slots: Sequence[int], message_bytes: float) -> float:
    seconds_per_byte_SS = cluster.seconds_per_byte_SS()
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


def nominal_seconds_per_byte(cluster: Cluster) -> tuple[float, float]:
    """1 / bandwidth of the best link within a host and between hosts: what a data sheet would say; 0 for no link."""
    within = [1 / rate for links in cluster.within_host for row in links.bandwidth_bytes_per_s for rate in row if rate]
    between = [1 / rate for row in cluster.between_hosts.bandwidth_bytes_per_s for rate in row if rate]
    return min(within, default=0.0), min(between, default=0.0)


def _stages(
    job: Job, layout: Layout, measurements: Measurements, slot_W: NDArray[np.int64], name: str
) -> tuple[Array, Array, int]:
    """Forward and backward of each stage, and micro-batches."""
    refuse(name, layout, cp=1, ep=1, vpp=1)
    if len(set(layout.layers_per_chunk)) > 1:
        raise PlanError(f"{name} has no uneven stages; leave layers_per_chunk empty")
    forward, backward = units(job, layout, measurements, slot_W).stages_s(layout.stage_layers(job.model.num_layers))
    return forward, backward, layout.num_microbatches(job.batch.global_batch_size)
