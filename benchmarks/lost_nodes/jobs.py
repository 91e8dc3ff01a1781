"""The jobs whose hosts are lost, and the machines that they run on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.gpt import gpt_job
from pipette_launch.cost.compute.carried_over import with_extrapolated_times
from pipette_launch.cost.compute.device_model import imagined
from pipette_launch.facts import Job, Layout, Measurements
from pipette_launch.facts.accelerators import DeviceSpec
from pipette_launch.facts.co_location import Domains
from pipette_launch.facts.known_devices import device_named
from pipette_launch.facts.measurements import without_hosts
from pipette_launch.search.fallback_plans import with_cases_of
from pipette_launch.search.layouts import base_layouts

DEVICES_PER_HOST = 8
DEVICE = "A100-80GB"
MODELS = {"6.7B": (32, 4096, 32), "175B": (96, 12288, 96)}
"""Layers, hidden size, heads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One model on one cluster."""

    model: str
    hosts: int
    batch: int
    """Samples of a step."""

    @property
    def name(self) -> str:
        """Short, for a table."""
        return f"{self.model}, {self.hosts:,} hosts, batch {self.batch:,}"

    def job(self, hosts: int) -> Job:
        """The job for N hosts. Its own layout is TP inside a host and data parallel over hosts."""
        own = Layout(
            tp=DEVICES_PER_HOST,
            dp=hosts,
            sequence_parallel=True,
            use_distributed_optimizer=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
        )
        return gpt_job(
            MODELS[self.model],
            seq_length=2048,
            vocab_size=50257,
            params_dtype="bf16",
            transformer_impl="transformer_engine",
            attention_backend="flash",
            global_batch_size=self.batch,
            own=own,
        )


CASES = tuple(
    Case(model=model, hosts=hosts, batch=batch)
    for model, hosts, batch in (
        ("6.7B", 64, 1024),
        ("6.7B", 128, 1024),
        ("175B", 256, 1536),
        ("175B", 512, 1536),
        ("175B", 1024, 3072),
    )
)


def device() -> DeviceSpec:
    """The device of all hosts."""
    return device_named(DEVICE)


def machines(case: Case) -> Measurements:
    """Equal hosts with equal links, as a warm-up would have measured them."""
    job = case.job(case.hosts)
    world = case.hosts * DEVICES_PER_HOST
    found = base_layouts(job, world_size=world, domains=Domains(devices_per_host=DEVICES_PER_HOST), device_kind="cuda")
    return imagined(
        job,
        device(),
        num_hosts=case.hosts,
        devices_per_host=DEVICES_PER_HOST,
        layouts=[*map(found.columns.layout, range(len(found)))],
    )


def of_hosts(job: Job, measured: Measurements, hosts: int) -> Measurements:
    """Measurements of the first N hosts, with the other shapes that a job on N hosts computes."""
    names = [host.name for host in measured.cluster.hosts]
    left = without_hosts(measured, names[hosts:])
    return with_extrapolated_times(job, with_cases_of(job, left))


def for_layouts(job: Job, layouts: tuple[Layout, ...], *, hosts: int) -> Measurements:
    """Equal hosts on which just these layouts are priced."""
    return imagined(job, device(), num_hosts=hosts, devices_per_host=DEVICES_PER_HOST, layouts=layouts)


def with_batch(job: Job, batch: int) -> Job:
    """The same job with another number of samples in a step."""
    return replace(job, batch=replace(job.batch, global_batch_size=batch))
