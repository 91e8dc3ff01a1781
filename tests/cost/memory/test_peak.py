"""Every part of the peak by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from facts_for_tests import changed_job, tiny_job, tiny_model
from hypothesis import assume, given
from hypothesis import strategies as st

from pipette_launch.cost.layers.kinds import kind_parameters
from pipette_launch.cost.layers.mlp import Mlp
from pipette_launch.cost.layers.parameters import dummy_gradient_bytes, narrow_weight_bytes, stage_parameters
from pipette_launch.cost.memory.peak import (
    MemoryParts,
    folded_peaks,
    kept_by_chunk,
    peak_live_bytes,
    peak_memory_bytes,
    shared_buffer_bytes,
)
from pipette_launch.errors import LayoutError
from pipette_launch.facts import Batch, Job, Layout, Recompute
from pipette_launch.facts.schedule import schedule_of

FULL_UNIFORM = Recompute(granularity="full", method="uniform", num_layers=1)
KEPT = 32 * 2048 + 4 * 4 * 32
"""Kept bytes of one layer of `job`; see test_kinds."""


SHARDED_4 = Layout(dp=4, use_distributed_optimizer=True)


def job(**changes: object) -> Job:
    """A bf16 GPT of four layers with fused attention, h 64, s 32."""
    model = {"params_dtype": "bf16", "transformer_impl": "transformer_engine", "attention_backend": "fused"}
    return tiny_job(model=tiny_model(**(model | changes)))


def with_batch(samples: int) -> Job:
    """The same job with another number of samples in a step."""
    return replace(job(), batch=Batch(global_batch_size=samples))


def test_later_stages_offload_less() -> None:
    """1,000 bytes stay for each stage before, but never more than without offloading."""
    flags = ("--fine-grained-activation-offloading", "--min-offloaded-tensor-size 1", "--offload-modules qkv_linear")
    layout, plain = Layout(pp=4), job()
    even, some, all_stay = (
        changed_job(
            plain,
            megatron_version="0.19.0",
            performance_flags=(*flags, f"--delta-offload-bytes-across-pp-ranks {delta}"),
        )
        for delta in (0, 1000, 10**9)
    )
    kept = [[part.activations for part in peak_memory_bytes(one, layout)] for one in (even, some, all_stay, plain)]

    assert kept[1] == [live + 1000 * stage for stage, live in enumerate(kept[0])]
    assert kept[2] == [kept[0][0], *kept[3][1:]]


def test_a_peak_by_hand() -> None:
    """fp32, Adam, one rank: four layers of 49,984 parameters, embedding 16,384, positions 2,048, final norm 128."""
    parameters = 4 * 49984 + 16384 + 2048 + 128
    layer = 64 * 2048 + 8 * 2048

    (parts,) = peak_memory_bytes(tiny_job(), Layout(dp=4))

    assert parts == MemoryParts(
        weights=4 * parameters,
        gradients=4 * parameters,
        optimizer=8 * parameters,
        shared_buffer=8 * 2048,
        dummy_gradients=0,
        activations=4 * layer,
        kept_masks=0,
        recompute=0,
        backward=4 * 2048 + 16 * 2048,
        mask=32 * 32,
        loading=0,
        deferred=0,
        head=8 * 2048 + 4 * 32 * 256,
        buffers=0,
        optimizer_step=4 * parameters,
        whole=0,
        graph=0,
    )
    passes = 4 * layer + 32 * 32 + 8 * 2048 + 4 * 32 * 256
    assert parts.static == 16 * parameters + 8 * 2048
    assert parts.total == parts.static + max(passes, 4 * parameters)


def test_a_graph_of_an_iteration_owns_its_pool() -> None:
    """The optimizer step finds no free bytes in the pool, and 4 samples have 28 bytes a token and a mask of s * s."""
    job = tiny_job(2, own=Layout(pp=2, dp=1), batch=Batch(global_batch_size=4), megatron_version="0.18.0")
    graphed = changed_job(job, performance_flags=("--cuda-graph-impl full_iteration",))
    inputs = 4 * (28 * job.model.seq_length + job.model.seq_length**2)

    for bare, held in zip(peak_memory_bytes(job, job.own), peak_memory_bytes(graphed, job.own), strict=True):
        assert bare.optimizer_step > 0
        assert held.total == bare.static + bare.passing + bare.optimizer_step + inputs
        assert sum(held.by_kind().values()) == held.total


def test_live_microbatches_of_1f1b() -> None:
    """min(m, p - r)."""
    for samples, expected in ((8, [4, 3, 2, 1]), (2, [2, 2, 2, 1])):
        parts = peak_memory_bytes(with_batch(samples), Layout(pp=4))

        assert [part.activations for part in parts] == [KEPT * live for live in expected]
        assert [peak_live_bytes(4, 1, 0, rank, samples, (10,)) for rank in range(4)] == [10 * live for live in expected]


def test_live_chunks_of_an_interleaved_schedule() -> None:
    """With p 2, v 2, g 2: five chunk passes on rank 0, three on rank 1, as many as (p(v + 1) - 1)/v micro-batches."""
    parts = peak_memory_bytes(with_batch(4), Layout(pp=2, vpp=2))

    assert [part.activations for part in parts] == [5 * KEPT, 3 * KEPT]
    assert [peak_live_bytes(2, 2, 0, rank, 4, (10, 10)) for rank in range(2)] == [50, 30]


@given(st.integers(2, 4), st.integers(1, 3), st.integers(1, 9), st.integers(0, 3), st.randoms())
def test_live_bytes_are_those_of_the_schedule(pp: int, vpp: int, rounds: int, extra: int, rng: random.Random) -> None:
    """Walking the actions with each chunk's own bytes gives the same peak."""
    group = pp + extra
    layout = Layout(pp=pp, vpp=vpp, microbatch_group_size=group if vpp > 1 else 0)
    schedule = schedule_of(layout, rounds * group)
    sizes = [rng.randint(0, 9) for _ in range(layout.num_chunks)]
    for rank in range(pp):
        live = peak = 0
        for action in schedule.ranks[rank]:
            live += sizes[action.stage] if action.kind == "F" else -sizes[action.stage]
            peak = max(peak, live)

        shape = (pp, vpp, group, rank, rounds * group, tuple(sizes[rank::pp]))
        assert peak == peak_live_bytes(*shape)


def test_activations_of_chunks() -> None:
    """Each chunk keeps its own layers."""
    layout = Layout(pp=2, layers_per_chunk=(3, 1))

    assert [part.activations for part in peak_memory_bytes(with_batch(1), layout)] == [3 * KEPT, KEPT]


@pytest.mark.parametrize(
    ("recompute", "kept", "working_set"),
    [
        (Recompute(granularity="none"), 4 * KEPT, 0),
        # 2*s*b*h for each unit, and one unit's layers for a while.
        (FULL_UNIFORM, 4 * 4096, KEPT),
        (Recompute(granularity="full", method="uniform", num_layers=2), 2 * 4096, 2 * KEPT),
        (Recompute(granularity="full", method="uniform", num_layers=3), 2 * 4096, 3 * KEPT),
        # The three layers that are kept are gone when the first one is run again.
        (Recompute(granularity="full", method="block", num_layers=1), 4096 + 3 * KEPT, 0),
        (Recompute(granularity="full", method="block", num_layers=9), 4 * 4096, KEPT),
        (Recompute(granularity="selective", modules=("mlp",)), 4 * (KEPT - 18 * 2048), 18 * 2048),
    ],
)
def test_recompute(recompute: Recompute, kept: int, working_set: int) -> None:
    """Bytes kept for every micro-batch, and bytes of recompute."""
    (parts,) = peak_memory_bytes(job(), Layout(recompute=recompute))

    assert (parts.activations, parts.recompute) == (kept, working_set)


def test_tensors_in_flight() -> None:
    """Three with a pipeline, of what sequence parallelism leaves to a rank."""
    for layout, expected in (
        (Layout(tp=2), 0),
        (Layout(pp=2), 3 * 4096),
        (Layout(tp=2, pp=2, sequence_parallel=True), 3 * 2048),
    ):
        assert {part.buffers for part in peak_memory_bytes(job(), layout)} == {expected}


def test_the_shared_buffer() -> None:
    """The gathered input of the head, or on every rank of local layers; local scores of 4 * 2048 / tp share it."""
    parallel = Layout(tp=2, pp=2, sequence_parallel=True)

    assert [part.shared_buffer for part in peak_memory_bytes(job(), parallel)] == [0, 4096]
    assert shared_buffer_bytes(job(), Layout(tp=2), has_head=True) == 0
    local = job(transformer_impl="local")
    assert [part.shared_buffer for part in peak_memory_bytes(local, parallel)] == [4096, 4096]
    assert shared_buffer_bytes(local, Layout(), has_head=True) == 8192


def test_ends_of_the_pipeline() -> None:
    """The last rank holds the head."""
    parts = peak_memory_bytes(job(), Layout(pp=4))

    assert [part.head for part in parts] == [0, 0, 0, 4 * 2048 + 6 * 32 * 256]


PARTS = MemoryParts(
    weights=1,
    gradients=2,
    optimizer=3,
    shared_buffer=0,
    dummy_gradients=0,
    activations=10,
    kept_masks=1,
    recompute=4,
    backward=2,
    mask=1,
    loading=0,
    head=6,
    deferred=1,
    buffers=1,
    optimizer_step=18,
    whole=0,
    graph=0,
)


def test_loss_and_backward_are_never_at_once() -> None:
    """6 static and 13 kept, with the loss 7, a layer's backward 6 or a loaded mask; or the step, without the 13."""
    assert PARTS.total == 26
    assert replace(PARTS, head=2).total == 25
    assert replace(PARTS, loading=9).total == 28
    assert replace(PARTS, optimizer_step=21).total == 27


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"activations": 12, "logits": 7, "buffers": 1}),
        ({"head": 2}, {"activations": 17, "logits": 1, "buffers": 1}),
        ({"loading": 9}, {"activations": 20, "logits": 1, "buffers": 1}),
        (
            {"optimizer_step": 30, "shared_buffer": 5, "dummy_gradients": 2},
            {"activations": 0, "logits": 0, "buffers": 37},
        ),
    ],
)
def test_kinds_add_up_to_the_peak(changes: dict[str, int], expected: dict[str, int]) -> None:
    """Users read six kinds, at every instant of the peak."""
    parts = replace(PARTS, **changes)

    assert parts.by_kind() == {"weights": 1, "gradients": 2, "optimizer": 3, **expected}
    assert sum(parts.by_kind().values()) == parts.total


def test_a_batch_that_does_not_divide_is_refused() -> None:
    """The error names the numbers."""
    with pytest.raises(LayoutError, match="micro_batch_size"):
        peak_memory_bytes(job(), Layout(dp=4, micro_batch_size=3))


@given(
    st.sampled_from([(1, 1), (2, 1), (4, 1), (2, 2)]),
    st.sampled_from([1, 2]),
    st.booleans(),
    st.sampled_from([Recompute(granularity="none"), Recompute(granularity="selective"), FULL_UNIFORM]),
    st.sampled_from([1, 2, 3, 4, 6]),
)
def test_memory_never_falls_as_the_microbatch_grows(
    pipeline: tuple[int, int], tp: int, sequence_parallel: bool, recompute: Recompute, micro_batch_size: int
) -> None:
    """More samples at once, more bytes on every rank, although fewer micro-batches are alive."""
    pp, vpp = pipeline
    this = replace(job(num_layers=4), batch=Batch(global_batch_size=24))
    sizes = []
    for size in (micro_batch_size, 2 * micro_batch_size):
        assume(24 % size == 0 and (vpp == 1 or (24 // size) % pp == 0))
        layout = Layout(
            tp=tp,
            pp=pp,
            vpp=vpp,
            micro_batch_size=size,
            sequence_parallel=sequence_parallel and tp > 1,
            recompute=recompute,
        )
        sizes.append([parts.total for parts in peak_memory_bytes(this, layout)])

    assert all(small <= large for small, large in zip(*sizes, strict=True))


@pytest.mark.parametrize(
    ("layout", "measured_bytes"),
    [
        (Layout(dp=8, micro_batch_size=4, use_distributed_optimizer=True), 4_735_983_616),
        (Layout(pp=2, dp=4, micro_batch_size=4), 3_632_653_312),
        (Layout(pp=4, dp=2, micro_batch_size=4), 2_748_673_024),
    ],
)
def test_published_peaks_lie_a_workspace_above(layout: Layout, measured_bytes: int) -> None:
    """NVIDIA's own CI on A100, core_v0.16.1, local implementation, last rank: cuBLAS workspaces are the rest.

    Source: golden values of gpt3_mcore_tp1_pp1_dist_optimizer_overlap_grad_reduce_param_gather, gpt3_mcore_tp1_pp2 and
    gpt3_mcore_tp1_pp4 (tests/functional_tests of Megatron-LM).
    Two workspaces of 32 MiB (cost.workspaces), and token ids and dropout mask of the embedding, which have no formula;
    the rest of the difference comes and goes between runs.
    """
    model = tiny_model(
        num_layers=12,
        hidden_size=512,
        ffn_hidden_size=2048,
        num_attention_heads=8,
        num_query_groups=8,
        kv_channels=64,
        seq_length=1024,
        max_position_embeddings=1024,
        vocab_size=50257,
        params_dtype="bf16",
        attention_dropout=0.1,
        hidden_dropout=0.1,
    )
    golden = replace(job(), model=model, batch=Batch(global_batch_size=32))

    rest_bytes = measured_bytes - peak_memory_bytes(golden, layout)[-1].total

    assert 62 << 20 <= rest_bytes <= 68 << 20


def test_shards_and_what_stands_whole() -> None:
    """Under FSDP ranks hold a quarter of all states, weights and gradients of two layers, and the ends."""
    flags = (
        "--use-megatron-fsdp",
        "--data-parallel-sharding-strategy optim_grads_params",
        "--fsdp-double-buffer",
    )
    (parts,) = peak_memory_bytes(tiny_job(performance_flags=flags), SHARDED_4)
    layer, ends = 49984, 16384 + 2048 + 128
    parameters = 4 * layer + ends

    assert parts.weights == parts.gradients == parameters
    assert parts.optimizer == 2 * parameters
    assert parts.whole == 2 * 4 * (2 * layer + ends)


@pytest.mark.parametrize(
    ("size", "layers_gathered", "grown"), [(0, 4, 0), (49984 + 128, 2, 2 * (4 * 49984 - 72 * 2048))]
)
def test_gradients_wait_while_activations_go(size: int, layers_gathered: int, grown: int) -> None:
    """Two layers' wait where a third is being reduced; where all layers were gathered, their weights go meanwhile."""
    words = (f"--suggested-communication-unit-size {size}",) if size else ()
    flags = ("--use-megatron-fsdp", "--data-parallel-sharding-strategy optim_grads_params", *words)
    (parts,) = peak_memory_bytes(tiny_job(performance_flags=flags), SHARDED_4)
    layer, ends = 49984, 16384 + 2048 + 128

    assert parts.whole == 4 * (layers_gathered * layer + ends) + 4 * (layer + ends) + grown


def test_a_single_rank_has_no_shards() -> None:
    """Everything is whole, once."""
    flags = ("--use-megatron-fsdp", "--data-parallel-sharding-strategy optim_grads_params")
    (parts,) = peak_memory_bytes(tiny_job(performance_flags=flags), Layout(use_distributed_optimizer=True))

    assert parts.whole == 0


MATRICES = 12480 + 4160 + 16640 + 16448
"""A GPT layer of h 64 without its two norms."""
LAYER = 2 * (192 * 64 + 64 * 64 + 256 * 64 + 64 * 256)
"""Query-key-value, projection, and the two of the MLP, in bf16."""


def fp8_job(*flags: str, **changes: object) -> Job:
    """A bf16 GPT of four layers on core_v0.16."""
    model = {"params_dtype": "bf16", "transformer_impl": "transformer_engine"}
    return tiny_job(model=tiny_model(**(model | changes)), performance_flags=flags)


def test_two_bytes_for_each_parameter_of_the_layers() -> None:
    """On each rank its own layers; embeddings, norms and the head stay as they are."""
    fp8 = fp8_job("--fp8-format hybrid")

    assert narrow_weight_bytes(fp8, Layout()) == (8 * MATRICES,)
    assert narrow_weight_bytes(fp8, Layout(pp=2, layers_per_chunk=(3, 1))) == (6 * MATRICES, 2 * MATRICES)
    assert narrow_weight_bytes(fp8, Layout(pp=2, vpp=2)) == (4 * MATRICES, 4 * MATRICES)


def test_first_and_last_layers_stay_in_bf16() -> None:
    """The first layer and the last two of four keep bf16 inputs, and have no FP8 copies."""
    flags = ("--fp8-format hybrid", "--fp8-recipe tensorwise", "--first-last-layers-bf16")
    mixed, layout = fp8_job(*flags, "--num-layers-at-end-in-bf16 2"), Layout(pp=2)
    narrow, wide = (kept_by_chunk(each, layout)[0] // 2 for each in (fp8_job(*flags[:2]), fp8_job()))

    assert narrow < wide
    assert narrow_weight_bytes(mixed, layout) == (2 * MATRICES, 0)
    assert kept_by_chunk(mixed, layout) == (narrow + wide, 2 * wide)


def test_experts_are_copied_and_the_router_is_not() -> None:
    """Two dense layers and two with experts, of which a rank has two."""
    moe = {"num_experts": 4, "moe_layer_freq": (0, 1, 0, 1), "moe_ffn_hidden_size": 128, "add_bias_linear": False}
    fp8 = fp8_job("--fp8-format e4m3", **moe)
    plain, experts = (kind_parameters(fp8, Layout(dp=2, ep=2), kind).count for kind in ("layer", "moe_layer"))

    expected = 2 * (2 * (plain - 256) + 2 * (experts - 256 - 4 * 64))
    assert narrow_weight_bytes(fp8, Layout(dp=2, ep=2)) == (expected,)


def test_no_copies() -> None:
    """Without FP8, with weights that are FP8 themselves, and in Megatron's own layers."""
    for plain in (
        fp8_job(),
        fp8_job("--fp8-format hybrid", "--fp8-param-gather"),
        fp8_job("--fp8-format hybrid", transformer_impl="local"),
    ):
        assert narrow_weight_bytes(plain, Layout(pp=2)) == (0, 0)


@pytest.mark.parametrize(
    ("flags", "version", "bytes_more"),
    [
        ("--fp8-format hybrid --fp8-recipe tensorwise", "0.19.0", 1.0),
        ("--fp8-format hybrid --fp8-param-gather", "0.19.0", -1.0),
        ("--fp8-format e4m3 --fp8-recipe mxfp8", "0.19.0", 2.0),
        ("--fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather", "0.19.0", 0.0),
        ("--fp4-format e2m1", "0.19.0", 1.125),
        ("--fp4-format e2m1 --fp4-param-gather", "0.19.0", -0.875),
        ("--fp4-format e2m1 --fp4-param-gather", "0.16.0", -0.875),
    ],
)
def test_blackwell_keeps_no_transpose_of_weights_with_one_scale(flags: str, version: str, bytes_more: float) -> None:
    """MXFP8 and NVFP4 keep two copies, because scales of rows and of columns differ."""
    words = [f"--{part.strip()}" for part in flags.split("--")[1:]]
    job = changed_job(fp8_job(*words), compute_capability=10, megatron_version=version)

    assert narrow_weight_bytes(job, Layout()) == (4 * bytes_more * MATRICES,)


def test_inputs_of_matrices_in_fp4_take_half_a_byte_and_scales() -> None:
    """One byte of scales for 16 elements."""
    wide, narrow = (changed_job(fp8_job(*words), megatron_version="0.19.0") for words in ((), ("--fp4-format e2m1",)))
    kept = [Mlp(job, Layout()).activations().mlp_activation for job in (wide, narrow)]

    assert kept[1] == kept[0] * 9 / 32


def test_layers_that_are_offloaded_whole_keep_nothing() -> None:
    """Transformer Engine holds the activations of as many layers as it does not offload."""
    jobs = [fp8_job(*words) for words in ((), ("--cpu-offloading-num-layers 3",))]
    whole, rest = (peak_memory_bytes(job, Layout())[0].activations for job in jobs)

    assert whole == 4 * rest > 0


def test_one_for_each_shape() -> None:
    """However many layers there are; the head's on the last rank."""
    assert dummy_gradient_bytes(fp8_job(), Layout(), has_head=False) == LAYER
    assert dummy_gradient_bytes(fp8_job(num_layers=2), Layout(), has_head=False) == LAYER
    assert dummy_gradient_bytes(fp8_job(vocab_size=512), Layout(), has_head=True) == LAYER + 2 * 512 * 64


def test_equal_shapes_share_one() -> None:
    """A vocabulary of 256 and a first matrix of 256, both from 64 inputs."""
    assert dummy_gradient_bytes(fp8_job(), Layout(), has_head=True) == LAYER


def test_tensor_parallelism_cuts_the_matrices() -> None:
    """All of them in halves; a gated unit's first matrix is twice as high."""
    assert dummy_gradient_bytes(fp8_job(), Layout(tp=2), has_head=False) == LAYER // 2
    assert dummy_gradient_bytes(fp8_job(gated_linear_unit=True), Layout(), has_head=False) == LAYER + 2 * 256 * 64


def test_grouped_experts_have_dummies() -> None:
    """Attention 192 + 64 rows, a shared expert of width 32, and experts of width 128, all from or to 64."""
    moe = {"num_experts": 4, "moe_layer_freq": (1,) * 4, "moe_ffn_hidden_size": 128}
    grouped = fp8_job("--moe-grouped-gemm", **moe, moe_shared_expert_intermediate_size=32)
    attention = 2 * (192 + 64) * 64

    assert dummy_gradient_bytes(grouped, Layout(), has_head=False) == attention + 2 * 2 * (32 + 128) * 64


@pytest.mark.parametrize(
    "this",
    [
        fp8_job("--no-gradient-accumulation-fusion"),
        fp8_job(transformer_impl="local"),
    ],
)
def test_nothing_without_the_store(this: Job) -> None:
    """Gradients that are computed apart, and Megatron's own layers."""
    assert dummy_gradient_bytes(this, Layout(), has_head=True) == 0


LAYOUT = Layout(pp=4, vpp=2)
MODEL = tiny_model(num_layers=8, untie_embeddings_and_output_weights=True)
JOB = replace(tiny_job(4, own=LAYOUT, batch=Batch(global_batch_size=8)), model=MODEL)


def test_the_first_rank_holds_both_ends_and_nothing_is_lost() -> None:
    """Weights of all ranks add up to Megatron's placement; the first rank has both ends."""
    folded = folded_peaks(JOB, LAYOUT, [100, 90, 80, 70])
    stock = peak_memory_bytes(JOB, LAYOUT)
    counts = [each.dense for each in stage_parameters(tiny_job(model=MODEL), LAYOUT)]

    for kind in ("weights", "gradients", "optimizer"):
        assert sum(getattr(each, kind) for each in folded) == sum(getattr(each, kind) for each in stock)
    assert folded[0].weights == 4 * (counts[0] + counts[3] - counts[1])
    assert [100, 90, 80, 70] == [each.activations for each in folded]
    assert folded[0].head == stock[-1].head
    assert {0} == {each.head for each in folded[1:]}
