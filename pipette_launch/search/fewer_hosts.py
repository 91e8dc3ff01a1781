"""A job on fewer hosts: what it keeps, and a rough step time that tells which numbers are worth a search."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from pipette_launch.errors import LayoutError
from pipette_launch.facts import Job, Layout
from pipette_launch.megatron.chunks import Split


def rough_step(num_devices: int, *, devices_per_host: int, samples: int, layers: int, least_devices: int) -> float:
    """Estimate the step on so many devices, in units of its own: only ratios between numbers of devices matter.

    Equal replicas share the batch equally, so a number that shares few factors with it needs deep pipelines. They wait
    while they fill, and the stage with the most layers sets their pace. Infinite where no replica has enough layers.

    Args:
        num_devices: all of them train.
        devices_per_host: TP is the largest divisor of a replica's devices that divides them.
        samples: of a step.
        layers: of the model.
        least_devices: of a replica, so that it fits.

    """
    most_replicas = math.gcd(num_devices, samples)
    best = math.inf
    for replicas in range(1, most_replicas + 1):
        devices = num_devices // replicas
        if most_replicas % replicas or devices < least_devices:
            continue
        depth = devices // math.gcd(devices, devices_per_host)
        if depth > layers:
            continue
        fills = 1 + (depth - 1) * replicas / samples
        best = min(best, fills * math.ceil(layers / depth) * depth / layers / num_devices)
    return best


def keeping(job: Job, before: Layout, names: Sequence[str]) -> Job:
    """Pin some fields of a layout at the values that they had; raises LayoutError where these ranks cannot have them.

    What else the user's own layout says stays, as far as it goes with them.
    """
    if not names:
        return job
    values = {name: getattr(before, name) for name in names}
    if {"tp", "pp"} <= values.keys():
        # Chunks and experts that suit other sizes need not suit these.
        fields = (*Split._fields, "microbatch_group_size", "ep", "etp", "sequence_parallel")
        values = {name: getattr(before, name) for name in fields} | values
    world_size = job.own.world_size
    model_size = 1
    for name in ("tp", "pp", "cp"):
        model_size *= values.get(name, getattr(job.own, name))
    if world_size % model_size:
        raise LayoutError(
            f"tp{before.tp} pp{before.pp} cp{values.get('cp', job.own.cp)} do not divide {world_size} ranks"
        )
    dp = world_size // model_size
    if values.get("dp", dp) != dp:
        raise LayoutError(f"dp{values['dp']} has to stay, and {world_size} ranks make dp{dp}")
    own = replace(job.own, **{**values, "dp": dp})
    return replace(job, own=own, pinned=tuple(sorted({*job.pinned, *names})))
