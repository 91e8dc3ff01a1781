"""Job and machines of `bench_plan`: a GPT of 175B parameters on imagined hosts with random links and speeds."""

# H = hosts, S = slots.

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.gpt import gpt_job
from pipette_launch.cost.compute.device_model import imagined
from pipette_launch.facts import Job, Layout, Links, Measurements
from pipette_launch.facts.co_location import Domains
from pipette_launch.facts.devices import device_named
from pipette_launch.search.layouts import base_layouts

SEED = 0
DEVICES_PER_HOST = 8
LEAF_HOSTS = 16
POD_HOSTS = 128
TIERS = (1.0, 0.8, 0.6)
"""Bandwidth within a leaf, within a pod, and across the core, as shares of the nominal."""
NOISE = 0.08
SLOW_HOSTS = 0.02
SLOW_SHARE = 0.6
SLOW_SLOTS = 0.005
SLOW_SPEED = 0.85

WORDS = (
    "A GPT of 96 layers, hidden size 12,288, sequences of 2,048, bf16, in steps of max(1,536, 3 x hosts) sequences, on "
    f"imagined hosts of {DEVICES_PER_HOST} A100-80GB (`cost.compute.device_model`), all cuts' shapes covered. Links "
    f"between hosts: leaves of {LEAF_HOSTS} hosts and pods of {POD_HOSTS}, in torchrun's order shuffled; bandwidths "
    f"times a normal factor of deviation {NOISE:g}; {SLOW_HOSTS:.0%} of hosts have {SLOW_SHARE:g} of theirs; "
    f"{SLOW_SLOTS:.1%} of devices run at {SLOW_SPEED:g} of their speed. The user's own layout is tp8 pp16."
)


def job_of(hosts: int) -> Job:
    """The job; its own layout is TP in a host, 16 pipeline ranks and the rest data parallel."""
    own = Layout(
        tp=8,
        pp=16,
        dp=hosts * DEVICES_PER_HOST // 128,
        micro_batch_size=1,
        sequence_parallel=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
    )
    return gpt_job(
        (96, 12288, 96),
        seq_length=2048,
        vocab_size=50257,
        params_dtype="bf16",
        transformer_impl="transformer_engine",
        attention_backend="flash",
        global_batch_size=max(1536, 3 * hosts),
        own=own,
    )


def measured(job: Job, hosts: int) -> Measurements:
    """Measurements that a warm-up would make, with random links and speeds."""
    slots = hosts * DEVICES_PER_HOST
    found = base_layouts(job, world_size=slots, domains=Domains(devices_per_host=DEVICES_PER_HOST), device_kind="cuda")
    equal = imagined(
        job,
        device_named("A100-80GB"),
        num_hosts=hosts,
        devices_per_host=DEVICES_PER_HOST,
        layouts=[*map(found.columns.layout, range(len(found)))],
    )
    rng = np.random.default_rng(SEED)
    cluster = equal.cluster
    speeds_S = np.where(rng.random(cluster.num_slots) < SLOW_SLOTS, SLOW_SPEED, 1.0)
    links = drawn_links(cluster.between_hosts, rng)
    return replace(equal, cluster=replace(cluster, between_hosts=links, slot_speed=tuple(speeds_S.tolist())))


def drawn_links(equal: Links, rng: np.random.Generator) -> Links:
    """Tiers, noise and slow hosts; the order of hosts says nothing of who is near whom."""
    size = equal.size
    place_H = rng.permutation(size)
    leaf_HH = np.equal.outer(place_H // LEAF_HOSTS, place_H // LEAF_HOSTS)
    pod_HH = np.equal.outer(place_H // POD_HOSTS, place_H // POD_HOSTS)
    share_HH = np.where(leaf_HH, TIERS[0], np.where(pod_HH, TIERS[1], TIERS[2]))
    share_HH = share_HH * np.clip(rng.normal(1.0, NOISE, (size, size)), 0.5, 1.2)
    slow_H = np.where(rng.random(size) < SLOW_HOSTS, SLOW_SHARE, 1.0)
    share_HH = share_HH * np.minimum.outer(slow_H, slow_H)
    return replace(equal, bandwidth_bytes_per_s=equal.bandwidth_bytes_per_s * share_HH)
