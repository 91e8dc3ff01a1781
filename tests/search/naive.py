"""Megatron's constraints and the declared sets of values, written a second time: loops over everything, and tests."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from facts_for_tests import tiny_job, tiny_model
from hypothesis import strategies as st

from pipette_launch.facts import Batch, Job, Layout, ModelSpec, Recompute
from pipette_launch.facts.layout import MemoryOptions
from pipette_launch.facts.model import LatentAttention
from pipette_launch.search.layout_axes import balanced_chunks, by_flops, stage_seconds

POWERS = (1, 2, 4, 8)
Case = tuple[Job, int, str]
"""A job, its world size and its kind of device."""


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A small job of any kind of model, its world and its device."""
    world_size = draw(st.sampled_from([1, 2, 3, 4, 6]))
    job = tiny_job(
        world_size,
        model=draw(models()),
        batch=Batch(global_batch_size=draw(st.sampled_from([world_size, 2 * world_size, 4, 6]))),
        optimizer=draw(st.sampled_from(["adam", "adam", "sgd"])),
        megatron_version=draw(st.sampled_from(["0.16.1", "0.19.0"])),
        performance_flags=draw(st.sampled_from([(), ("--moe-grouped-gemm",)])),
        own=Layout(dp=world_size, use_tp_pp_dp_mapping=draw(st.booleans())),
    )
    return job, world_size, draw(st.sampled_from(["cpu", "cuda"]))


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    """Dense or with experts, with query groups, latent attention or prediction, of either implementation."""
    heads = draw(st.sampled_from([2, 4, 6]))
    experts = draw(st.sampled_from([None, None, 2, 4]))
    layers = draw(st.sampled_from([2, 3, 4]))
    freq = draw(st.sampled_from([(1,) * layers, (0, *(1,) * (layers - 1))])) if experts else ()
    latent = LatentAttention(q_lora_rank=None, kv_lora_rank=8, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=8)
    return tiny_model(
        num_layers=layers,
        num_attention_heads=heads,
        num_query_groups=draw(st.sampled_from([1, heads])),
        seq_length=draw(st.sampled_from([6, 8])),
        transformer_impl=draw(st.sampled_from(["local", "transformer_engine"])),
        num_experts=experts,
        moe_layer_freq=freq,
        moe_ffn_hidden_size=draw(st.sampled_from([9, 16])),
        moe_shared_expert_intermediate_size=draw(st.sampled_from([0, 24])) if experts else 0,
        ffn_hidden_size=draw(st.sampled_from([12, 64])),
        add_bias_linear=draw(st.booleans()),
        latent_attention=draw(st.sampled_from([None, None, latent])),
        mtp_num_layers=draw(st.sampled_from([0, 0, 1])),
    )


def cuts(case: Case) -> Iterator[tuple[Layout, bool]]:
    """Every combination of the declared sets, and whether it is legal with some saver."""
    job, world_size, _ = case
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    for tp, pp, dp, cp in product(sizes, repeat=4):
        if tp * pp * dp * cp != world_size or pp > job.model.num_layers:
            continue
        for ep, etp in product(range(1, (job.model.num_experts or 1) + 1), range(1, world_size + 1)):
            if world_size % (etp * ep * pp) or (not job.model.num_experts and etp != tp):
                continue
            swapped = job.own.use_tp_pp_dp_mapping and (pp == 1 or etp * ep == tp * cp)
            for vpp, chunks, mbs, group in tails(job, pp, dp):
                layout = Layout(
                    tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, etp=etp, vpp=vpp, layers_per_chunk=chunks,
                    micro_batch_size=mbs, microbatch_group_size=group, use_tp_pp_dp_mapping=swapped,
                )  # fmt: skip
                yield layout, all((*degrees_hold(case, layout), *tail_holds(job, layout)))


def tails(job: Job, pp: int, dp: int) -> Iterator[tuple[int, tuple[int, ...], int, int]]:
    """Virtual stages, chunks, micro-batches, groups: even chunks, or balanced ones that are quicker."""
    layers, seconds = job.model.num_layers, by_flops(job.model)
    for vpp in range(1, layers // pp + 1):
        if (vpp > 1 and pp == 1) or (vpp not in (1, 2, 4) and layers % (pp * vpp)):
            continue
        even = (layers // (pp * vpp),) * (pp * vpp)
        balanced = balanced_chunks(seconds, pp=pp, vpp=vpp)
        even_s, balanced_s = (max(stage_seconds(seconds, cut, pp)) for cut in (even, balanced))
        divides = sum(even) == layers
        chunks = [(), *([balanced] if balanced_s < even_s - 1e-3 else [])] if divides else [balanced]
        for cut, mbs in product(chunks, range(1, job.batch.global_batch_size // dp + 1)):
            groups = [0] if vpp == 1 else [0, *range(pp + 1, 2 * pp + 1)]
            yield from ((vpp, cut, mbs, group) for group in groups)


def degrees_hold(case: Case, layout: Layout) -> Iterator[bool]:
    """Heads, query groups, widths, sequences and experts divide."""
    job, _, kind = case
    model, tp, cp = job.model, layout.tp, layout.cp
    yield model.num_attention_heads % tp == 0
    yield model.ffn_hidden_size % tp == 0 or (model.num_experts is not None and all(model.moe_layer_freq))
    yield model.num_query_groups % tp == 0 or tp % model.num_query_groups == 0
    yield model.moe_shared_expert_intermediate_size % tp == 0
    yield cp == 1 or (
        kind == "cuda" and model.transformer_impl == "transformer_engine" and model.seq_length % (2 * cp) == 0
    )
    if model.num_experts:
        yield model.num_experts % layout.ep == 0
        yield model.moe_ffn_hidden_size % layout.etp == 0
        yield layout.etp == 1 or not model.add_bias_linear
        yield layout.ep > 1 or layout.etp == tp or job.release >= (0, 19)
        yield tp == 1 or (kind == "cuda" and model.seq_length // cp % tp == 0)


def tail_holds(job: Job, layout: Layout) -> Iterator[bool]:
    """Micro-batches divide and are worth trying, and the interleaved schedule's groups are the ones to try."""
    samples = job.batch.global_batch_size // layout.dp
    yield from divides(job, layout)
    yield layout.micro_batch_size in POWERS or samples // layout.micro_batch_size in POWERS
    if layout.vpp > 1:
        legal = groups(layout, samples // layout.micro_batch_size)
        yield (layout.microbatch_group_size or layout.pp) in {*legal[:1], *({2 * layout.pp} & {*legal})}


def divides(job: Job, layout: Layout) -> Iterator[bool]:
    """Micro-batches divide, and are enough for the interleaved schedule's groups."""
    samples, rest = divmod(job.batch.global_batch_size, layout.dp)
    yield rest == 0 and samples % layout.micro_batch_size == 0
    many = samples // layout.micro_batch_size
    yield layout.vpp == 1 or (layout.microbatch_group_size or layout.pp) in groups(layout, many)


def groups(layout: Layout, many: int) -> list[int]:
    """Sizes of groups that leave no last group shorter than the pipeline."""
    return [size for size in range(layout.pp, many + 1) if many % size in (0, *range(layout.pp, size))]


def savers(case: Case, cut: Layout) -> Iterator[MemoryOptions]:
    """Every legal saver of a cut."""
    job, _, kind = case
    for flags in product((True, False), repeat=4):
        for recompute in recomputes(job, cut):
            saver = MemoryOptions(*flags, recompute)
            if all(saver_holds(job, cut, saver, kind=kind)):
                yield saver


def saver_holds(job: Job, cut: Layout, saver: MemoryOptions, *, kind: str) -> Iterator[bool]:
    """Sequence parallelism, optimizer and overlap are possible, and of use where they are on."""
    model, sharded = job.model, saver.use_distributed_optimizer
    replicas = max(cut.dp * cut.cp, cut.tp * cut.cp * cut.dp // (cut.ep * cut.etp))
    hides = kind == "cuda" and replicas > 1
    yield not saver.sequence_parallel or (kind == "cuda" and cut.tp > 1 and model.seq_length // cut.cp % cut.tp == 0)
    yield saver.sequence_parallel or cut.tp == 1 or not model.num_experts
    # Sequence parallelism is on wherever it is legal, as layers are timed so.
    yield saver.sequence_parallel or kind != "cuda" or cut.tp == 1 or bool(model.seq_length // cut.cp % cut.tp)
    yield not sharded or (job.optimizer == "adam" and replicas > 1)
    # Overlap is on wherever it hides something.
    yield saver.overlap_grad_reduce == hides
    yield saver.overlap_param_gather == (hides and sharded)


def recomputes(job: Job, cut: Layout) -> Iterator[Recompute]:
    """None, modules that exist and free something, some of the layers, all of them."""
    model, uses_te = job.model, job.model.transformer_impl == "transformer_engine"
    layers = cut.chunk_layers(model.num_layers)
    yield Recompute(granularity="none")
    for size in range(1, max(layers)):
        yield Recompute(granularity="full", method="block", num_layers=size)
    for size in (1, 2, 4):
        if (
            size <= max(layers)
            and all(chunk % size == 0 for chunk in layers)
            and (size == 1 or not model.mtp_num_layers)
        ):
            yield Recompute(granularity="full", method="uniform", num_layers=size)
    norms = ["layernorm"] if uses_te and (model.num_experts or model.latent_attention) else []
    core = [] if uses_te else ["core_attn"]
    grouped = "--moe-grouped-gemm" in job.performance_flags
    acts = ["moe_act"] if uses_te and model.num_experts and grouped else []
    ups = ["mla_up_proj"] if uses_te and model.latent_attention else []
    shared = ["shared_experts"] if model.moe_shared_expert_intermediate_size else []
    has_dense = not model.num_experts or 0 in model.moe_layer_freq
    mlp = ["mlp"] if has_dense and not model.add_bias_linear else []
    experts = ["moe"] if model.num_experts else []
    light = norms + core + ups
    cheap = norms + core + acts + ups
    growing = [norms, norms + core, norms + core + acts, cheap, cheap + shared]
    growing += [light + mlp] * bool(mlp) + [light + mlp + experts] * bool(experts)
    for modules in {tuple(names) for names in growing if names}:
        yield Recompute(granularity="selective", modules=modules)
