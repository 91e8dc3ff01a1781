"""How fast a step is, in tokens and in FLOPs, and what part of the devices' peak that is."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipette_launch.facts.job import Job
from pipette_launch.facts.layout import Layout
from pipette_launch.facts.machines.cluster import Cluster
from pipette_launch.facts.machines.known_devices import spec_of_cluster


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """What a job does in a second."""

    tokens_per_s: float
    """Of the whole job."""
    flops_per_s: float
    """Of each rank, by Megatron's count of the model's FLOPs: its `TFLOP/s/GPU`."""
    mfu: float | None
    """Part of the device's dense peak in the format of the weights (FP8 does not count); None where it is unknown."""

    @classmethod
    def of(cls, job: Job, layout: Layout, step_time_s: float, cluster: Cluster) -> Rate | None:
        """Return the rate of a job under a layout whose step takes so long; None without a time above 0.

        Args:
            job: model and batch.
            layout: what runs.
            step_time_s: of one optimizer step.
            cluster: whose devices' peak counts, if they are of one type.

        """
        if step_time_s <= 0:
            return None
        model, samples = job.model, job.batch.global_batch_size
        flops_per_s = model.step_flops(samples, tp=layout.tp) / step_time_s / layout.world_size
        names = {device.name for host in cluster.hosts for device in host.devices}
        device = spec_of_cluster(cluster) if len(names) == 1 else None
        peak = device.flops_per_s.get(model.params_dtype, 0.0) if device else 0.0
        return cls(
            tokens_per_s=samples * model.seq_length / step_time_s,
            flops_per_s=flops_per_s,
            mfu=flops_per_s / peak if peak else None,
        )

    def times(self, factor: float) -> Rate:
        """Return the rate of a step that is so many times as fast."""
        return replace(
            self,
            tokens_per_s=self.tokens_per_s * factor,
            flops_per_s=self.flops_per_s * factor,
            mfu=None if self.mfu is None else self.mfu * factor,
        )
