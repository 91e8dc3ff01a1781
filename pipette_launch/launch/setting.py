"""What a plan is for, kept in its file, so that it can be shown and compared by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pipette_launch import megatron
from pipette_launch.facts import Layout, Setting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipette_launch.facts import Job, Measurements, Plan


def with_setting(
    plan: Plan,
    job: Job,
    measurements: Measurements,
    *,
    script: str,
    arguments: Sequence[str],
    machines: str,
    network: str = "",
) -> Plan:
    """Put into a plan what it is for.

    Args:
        plan: for this job on these machines.
        job: as the arguments were read.
        measurements: what it was priced by.
        script: as the user named it.
        arguments: the words behind its name.
        machines: where the machines' figures come from, in a few words.
        network: what lies between imagined hosts.

    """
    from pipette_launch.cost.layers.parameters import stage_parameters

    cluster = measurements.cluster
    setting = Setting(
        script=script,
        arguments=tuple(arguments),
        new_arguments=megatron.write_arguments(arguments, job=job, layout=plan.chosen.layout),
        num_parameters=sum(part.count for part in stage_parameters(job.model, Layout())),
        global_batch_size=job.batch.global_batch_size,
        seq_length=job.model.seq_length,
        device_name=cluster.hosts[0].devices[0].name,
        device_memory_bytes=cluster.memory_bytes,
        machines=machines,
        network=network,
    )
    return replace(plan, setting=setting)
