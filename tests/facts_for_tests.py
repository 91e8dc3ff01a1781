"""Small clusters, models and measurements for tests, built from the real facts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pipette_launch.facts import (
    Batch,
    Cluster,
    ComputeCase,
    ComputeTime,
    Device,
    Host,
    Job,
    Layout,
    Links,
    Measurements,
    ModelSpec,
    Samples,
    StageReading,
)
from pipette_launch.facts.job import PerformanceOptions
from pipette_launch.facts.measurements import CollectiveTime, MemoryNeed, memory_digest
from pipette_launch.facts.messages import Node
from pipette_launch.facts.model import GatedDelta, LatentAttention
from pipette_launch.megatron.performance import options_of_flags

DELTA_NET = GatedDelta(
    linear_conv_kernel_dim=4,
    linear_key_head_dim=8,
    linear_value_head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
)
"""16 channels of keys, 64 of values, 96 convolved, 168 columns of the input projection."""


def nodes(*hosts: str, tokens: Sequence[str] = (), num_slots: int = 1) -> tuple[Node, ...]:
    """Return the nodes of a decision; a token is the name of the host unless `tokens` has others."""
    pairs = zip(tokens or hosts, hosts, strict=True)
    return tuple(Node(token=token, host=host, num_slots=num_slots) for token, host in pairs)


def tiny_model(**changes: object) -> ModelSpec:
    """A GPT of 4 layers and hidden size 64."""
    model = ModelSpec(
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=256,
        num_attention_heads=4,
        num_query_groups=4,
        kv_channels=16,
        seq_length=32,
        max_position_embeddings=32,
        vocab_size=256,
        make_vocab_size_divisible_by=128,
        gated_linear_unit=False,
        normalization="LayerNorm",
        add_bias_linear=True,
        add_qkv_bias=False,
        position_embedding_type="learned_absolute",
        untie_embeddings_and_output_weights=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype="fp32",
        transformer_impl="local",
        attention_backend="auto",
        num_experts=None,
        moe_layer_freq=(),
        moe_router_topk=2,
        moe_ffn_hidden_size=256,
        moe_shared_expert_intermediate_size=0,
    )
    return replace(model, **changes)  # type: ignore[arg-type]


LATENT = LatentAttention(q_lora_rank=32, kv_lora_rank=16, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=12)
"""Values narrower than keys."""


def fine_grained_model(**changes: object) -> ModelSpec:
    """Latent attention, a dense layer before those with experts, a shared expert, two depths of token prediction."""
    model = tiny_model(
        latent_attention=LATENT,
        qk_layernorm=True,
        mtp_num_layers=2,
        num_experts=4,
        moe_layer_freq=(0, 1, 1, 1),
        moe_ffn_hidden_size=32,
        moe_shared_expert_intermediate_size=48,
        add_bias_linear=False,
        position_embedding_type="rope",
        untie_embeddings_and_output_weights=True,
    )
    return replace(model, **changes)  # type: ignore[arg-type]


def tiny_job(world_size: int = 4, **changes: object) -> Job:
    """A job whose own configuration is plain data parallelism."""
    job = Job(
        model=tiny_model(),
        batch=Batch(global_batch_size=2 * world_size),
        own=Layout(dp=world_size),
        pinned=(),
        notes=(),
        megatron_version="0.16.1",
        grad_reduce_in_bf16=False,
        optimizer="adam",
        log_interval=1,
        train_iters=10,
        options=PerformanceOptions(),
        performance_flags=(),
    )
    return changed_job(job, **changes)


def changed_job(job: Job, **changes: object) -> Job:
    """The job with other fields; its options are those of its flags and its release."""
    job = replace(job, **changes)  # type: ignore[arg-type]
    return replace(job, options=options_of_flags(job.performance_flags, job.megatron_version))


def tiny_cluster(
    hosts: int = 2,
    devices: int = 2,
    *,
    latency_s: float = 1e-4,
    bandwidth_bytes_per_s: float = 1e8,
    memory_bytes: int = 8 << 30,
) -> Cluster:
    """Equal CPU hosts, ten times slower between than within."""
    return Cluster(
        hosts=tuple(
            Host(
                name=f"node{h}",
                address=f"10.0.0.{h + 1}",
                cores=devices,
                devices=tuple(
                    Device(
                        kind="cpu",
                        uuid=f"cpu-{d}",
                        name="test cpu",
                        memory_total_bytes=memory_bytes,
                        memory_free_bytes=memory_bytes,
                    )
                    for d in range(devices)
                ),
            )
            for h in range(hosts)
        ),
        between_hosts=Links.uniform(hosts, latency_s=latency_s, bandwidth_bytes_per_s=bandwidth_bytes_per_s),
        within_host=tuple(
            Links.uniform(devices, latency_s=latency_s / 10, bandwidth_bytes_per_s=bandwidth_bytes_per_s * 10)
            for _ in range(hosts)
        ),
        slot_speed=(1.0,) * (hosts * devices),
    )


def with_free_bytes(cluster: Cluster, free_bytes: int) -> Cluster:
    """The same machines, with so much memory free on each device."""
    hosts = tuple(
        replace(host, devices=tuple(replace(device, memory_free_bytes=free_bytes) for device in host.devices))
        for host in cluster.hosts
    )
    return replace(cluster, hosts=hosts)


def with_one_full(cluster: Cluster, free_bytes: int) -> Cluster:
    """The same machines, with so much memory free on the first device."""
    first, *rest = cluster.hosts
    device = replace(first.devices[0], memory_free_bytes=free_bytes)
    return replace(cluster, hosts=(replace(first, devices=(device, *first.devices[1:])), *rest))


def tiny_measurements(cluster: Cluster, cases: tuple[ComputeCase, ...] | None = None) -> Measurements:
    """Compute times proportional to micro-batch over tp, on slot 0; no collectives, no memory readings."""
    cases = cases or tuple(ComputeCase(tp=tp, cp=1, micro_batch_size=mbs) for tp in (1, 2, 4) for mbs in (1, 2, 4))
    compute = []
    for case in cases:
        for part, unit_s in (("layer", 1e-3), ("embedding", 1e-4), ("head", 5e-4)):
            seconds = unit_s * case.micro_batch_size / (case.tp * case.cp)
            sample = Samples(values_s=(seconds,))
            compute.append(
                ComputeTime(case=case, part=part, slot=0, forward=sample, input_grad=sample, weight_grad=sample)  # type: ignore[arg-type]
            )
    return Measurements(
        cluster=cluster,
        compute=tuple(compute),
        collectives=(),
        memory=(),
        overhead_bytes=0,
        versions={"torch": "2.13.0", "megatron-core": "0.16.1"},
        taken_at="2026-11-21T00:00:00Z",
        phase_s={},
        notes=(),
    )


def memory_need(peaks_bytes: tuple[int, ...], limit_bytes: int, free_bytes: int = 0, **changes: Any) -> MemoryNeed:
    """A need without overhead: each device holds only the model's tensors."""
    peaks = dict.fromkeys(("need_bytes", "least_bytes", "model_bytes"), peaks_bytes)
    return MemoryNeed(**{**peaks, "limit_bytes": limit_bytes, "free_bytes": free_bytes or limit_bytes, **changes})


def stage_reading(job: Job, layout: Layout, pp_rank: int = 0, **changes: object) -> StageReading:
    """A stage of a job that ran on slot 0, without steps that were timed."""
    peaks = dict.fromkeys(("allocator_peak_bytes", "reserved_peak_bytes", "device_peak_bytes"), 1)
    plain = StageReading(job_digest=memory_digest(job), layout=layout, pp_rank=pp_rank, slot=0, **peaks)
    return replace(plain, **changes)  # type: ignore[arg-type]


def drawn_cluster(rng: random.Random, *, hosts: int = 2, devices: int = 2) -> Cluster:
    """Every link and every slot its own speed."""

    def links(size: int, scale: float) -> Links:
        def matrix(low: float, high: float) -> tuple[tuple[float, ...], ...]:
            return tuple(tuple(0.0 if i == j else rng.uniform(low, high) for j in range(size)) for i in range(size))

        return Links(
            latency_s=matrix(1e-5 / scale, 1e-3 / scale), bandwidth_bytes_per_s=matrix(1e7 * scale, 1e9 * scale)
        )

    return replace(
        tiny_cluster(hosts, devices),
        between_hosts=links(hosts, 1),
        within_host=tuple(links(devices, 3) for _ in range(hosts)),
        slot_speed=tuple(rng.choice((1.0, 1.0, 0.8, 1.25)) for _ in range(hosts * devices)),
    )


def drawn_fits(rng: random.Random) -> tuple[CollectiveTime, ...]:
    """Some groups measured, at times that their links do not explain."""
    kinds = ("all_reduce", "all_gather", "all_to_all", "send")
    return tuple(
        CollectiveTime(
            kind=rng.choice(kinds),  # type: ignore[arg-type]
            slots=slots,
            latency_s=rng.uniform(0, 2e-3),
            seconds_per_byte=rng.uniform(0, 2e-8),
            spread=0.0,
            sizes_bytes=(1,),
        )
        for slots in ((0, 1), (0, 2), (0, 1, 2, 3))
        if rng.random() < 0.5
    )


def expert_groups(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Ranks that exchange tokens for experts: rank = etp + ETP*(ep + EP*(edp + EDP*pp)), or pp and edp swapped."""
    edp = layout.world_size // (layout.etp * layout.ep * layout.pp)
    members: dict[tuple[int, int, int], list[int]] = {}
    for rank in range(layout.world_size):
        outer = rank // (layout.etp * layout.ep)
        pp, replica = (outer % layout.pp, outer // layout.pp) if layout.use_tp_pp_dp_mapping else divmod(outer, edp)
        members.setdefault((rank % layout.etp, replica, pp), []).append(rank)
    return tuple(tuple(group) for group in members.values())


def groups_of(layout: Layout, dimension: str) -> tuple[tuple[int, ...], ...]:
    """Ranks that communicate along `tp`, `cp`, `dp`, `pp` or `dp_cp`, each group sorted as torch sorts it."""
    free = {"dp_cp": ("dp", "cp")}.get(dimension, (dimension,))
    members: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world_size):
        cell = layout.cell_of(rank)
        key = tuple(value for name, value in zip(cell._fields, cell, strict=True) if name not in free)
        members.setdefault(key, []).append(rank)
    return tuple(tuple(group) for group in members.values())
