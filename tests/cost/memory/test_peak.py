"""Every part of the peak by hand, and what must hold whatever the layout."""

import random
from dataclasses import replace

import pytest
from facts_for_tests import tiny_job, tiny_model
from hypothesis import assume, given
from hypothesis import strategies as st

from pipette_launch.cost.memory.live_activations import peak_live_bytes
from pipette_launch.cost.memory.parts import MemoryParts
from pipette_launch.cost.memory.peak import kept_by_chunk, peak_memory_bytes, shared_buffer_bytes
from pipette_launch.errors import LayoutError
from pipette_launch.facts import Batch, Job, Layout, Recompute
from pipette_launch.facts.known_schedules import schedule_of

FULL_UNIFORM = Recompute(granularity="full", method="uniform", num_layers=1)
KEPT = 32 * 2048 + 4 * 4 * 32
"""What one layer of `job` keeps: see test_activations."""


SHARDED_4 = Layout(dp=4, use_distributed_optimizer=True)


def job(**changes: object) -> Job:
    """A bf16 GPT of four layers with fused attention, h 64, s 32."""
    model = {"params_dtype": "bf16", "transformer_impl": "transformer_engine", "attention_backend": "fused"}
    return tiny_job(model=tiny_model(**(model | changes)))


def with_batch(samples: int) -> Job:
    """The same with so many samples in a step."""
    return replace(job(), batch=Batch(global_batch_size=samples))


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
        embedding=8 * 32,
        recompute=0,
        backward=4 * 2048 + 16 * 2048,
        mask=32 * 32,
        loading=0,
        deferred=0,
        head=8 * 2048 + 4 * 32 * 256,
        buffers=0,
        optimizer_step=4 * parameters,
        whole=0,
    )
    passes = 4 * layer + 8 * 32 + 32 * 32 + 8 * 2048 + 4 * 32 * 256
    assert parts.static == 16 * parameters + 8 * 2048
    assert parts.total == parts.static + max(passes, 4 * parameters)


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

        assert peak == peak_live_bytes(pp, vpp, group, rank, rounds * group, tuple(sizes[rank::pp]))


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
    """What stays for every micro-batch, and what comes back for a while."""
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
    """The first rank holds inputs of its live micro-batches, the last one the head, the middle neither."""
    parts = peak_memory_bytes(job(), Layout(pp=4))

    assert [part.embedding for part in parts] == [4 * 8 * 32, 0, 0, 0]
    assert [part.head for part in parts] == [0, 0, 0, 4 * 2048 + 6 * 32 * 256]


PARTS = MemoryParts(
    weights=1,
    gradients=2,
    optimizer=3,
    shared_buffer=0,
    dummy_gradients=0,
    activations=10,
    embedding=1,
    recompute=4,
    backward=2,
    mask=1,
    loading=0,
    head=6,
    deferred=1,
    buffers=1,
    optimizer_step=18,
    whole=0,
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
    """Users read six kinds, whatever the instant of the peak."""
    parts = replace(PARTS, **changes)

    assert parts.by_kind() == {"weights": 1, "gradients": 2, "optimizer": 3, **expected}
    assert sum(parts.by_kind().values()) == parts.total


def test_only_the_ends_of_the_pipeline_load_a_mask() -> None:
    """32 * 32 bytes on the first and the last rank, during a forward pass."""
    assert [part.mask for part in peak_memory_bytes(with_batch(8), Layout(pp=4))] == [1024, 0, 0, 1024]


def test_full_recompute_keeps_the_mask_of_every_live_microbatch() -> None:
    """Units are called again with it: four micro-batches on the first of four ranks, one on the last."""
    parts = peak_memory_bytes(with_batch(8), Layout(pp=4, recompute=FULL_UNIFORM))

    assert [part.embedding for part in parts] == [4 * (8 * 32 + 1024), 0, 0, 1024]
    assert [part.mask for part in parts] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("layout", "live", "loaded_mib"),
    [
        (Layout(cp=4), {0: 1}, 80),
        (Layout(tp=2, cp=2, sequence_parallel=True), {0: 1}, 96),
        (Layout(pp=4, cp=4), {0: 4, 3: 1}, 80),
        (Layout(pp=2, cp=2, micro_batch_size=2), {0: 2, 1: 1}, 192),
        (Layout(pp=2, cp=8, recompute=FULL_UNIFORM), {0: 2, 1: 1}, 72),
        (Layout(pp=2, cp=8, recompute=Recompute(granularity="selective")), {0: 2, 1: 1}, 72),
    ],
)
def test_the_whole_mask_is_loaded_before_context_parallelism_cuts_it(
    layout: Layout, live: dict[int, int], loaded_mib: int
) -> None:
    """8192 * 8192 bytes a sample and the rank's part, while one micro-batch less is kept than at most."""
    this = replace(job(seq_length=8192), batch=Batch(global_batch_size=8))
    for stage, num_live in live.items():
        one = peak_memory_bytes(this, layout)[stage]
        kept = (one.activations + one.embedding) // num_live * (num_live - 1)

        assert one.total - one.static - one.buffers == kept + (loaded_mib << 20)


@pytest.mark.parametrize("flag", ["--no-create-attention-mask-in-dataloader", "--dataloader-inter-document-masking"])
def test_no_mask_is_loaded_that_is_not_made(flag: str) -> None:
    """Megatron makes none with either flag."""
    this = replace(job(seq_length=8192), performance_flags=(flag,), megatron_version="0.19.0")
    parts = peak_memory_bytes(this, Layout(cp=4, recompute=FULL_UNIFORM))

    assert [(0, 0)] == [(one.mask, one.loading) for one in parts]


@given(st.sampled_from([(2, 2), (2, 4), (4, 2)]), st.integers(1, 4), st.sampled_from([1, 2, 4]))
def test_an_early_mask_meets_few_live_microbatches(pipeline: tuple[int, int], rounds: int, cp: int) -> None:
    """The first stage loads with what is kept before its first chunk, by the order of its passes."""
    pp, vpp = pipeline
    layout = Layout(pp=pp, vpp=vpp, cp=cp)
    this = replace(job(seq_length=8192, num_layers=8), batch=Batch(global_batch_size=rounds * pp))
    one = peak_memory_bytes(this, layout)[0]
    (kept,) = set(kept_by_chunk(this, layout))
    most = at_load = live = 0
    for action in schedule_of(layout, rounds * pp).ranks[0]:
        at_load = max(at_load, live if action.kind == "F" and action.stage == 0 else 0)
        live += {"F": 1, "B": -1}[action.kind]
        most = max(most, live)
    part = 8192 * 8192 // cp
    whole = part * (cp + 1) if cp > 1 else part

    assert max(0, whole - (most - at_load) * kept - 8 * 8192 // cp) == one.loading
    assert max(0, part - (most - at_load - 1) * kept) == one.mask


@pytest.mark.parametrize(
    ("version", "layout", "expected"),
    [
        ("0.16.1", Layout(pp=2, vpp=2), [4, 1]),
        ("0.14.0", Layout(pp=2, vpp=2), [5, 3]),
        ("0.14.0", Layout(pp=4), [4, 0, 0, 1]),
        ("0.16.1", Layout(pp=4, layers_per_chunk=(2, 1, 1, 0), chunks_after_mtp=1), [4, 0, 2, 1]),
        ("0.16.1", Layout(pp=2, layers_per_chunk=(4, 0), chunks_after_mtp=1), [4, 1]),
    ],
)
def test_recompute_keeps_the_mask_wherever_it_is_loaded(version: str, layout: Layout, expected: list[int]) -> None:
    """On both ends, before 0.15 for all their chunks, and on the stage of multi-token prediction."""
    this = replace(job(mtp_num_layers=1 if layout.chunks_after_mtp else 0), megatron_version=version)
    asked = replace(layout, recompute=FULL_UNIFORM)
    parts = peak_memory_bytes(replace(this, batch=Batch(global_batch_size=8)), asked)
    bare = replace(this, performance_flags=("--no-create-attention-mask-in-dataloader",))
    without = peak_memory_bytes(replace(bare, batch=Batch(global_batch_size=8)), asked)

    assert [1024 * live for live in expected] == [
        one.embedding - two.embedding for one, two in zip(parts, without, strict=True)
    ]


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
    Two workspaces of 32 MiB (cost.workspaces); the rest of the difference comes and goes between runs.
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

    assert 62 << 20 <= rest_bytes <= 66 << 20


def test_shards_and_what_stands_whole() -> None:
    """Under FSDP ranks hold a quarter of everything, two layers' weights and gradients, and those of the ends."""
    flags = (
        "--use-megatron-fsdp",
        "--data-parallel-sharding-strategy optim_grads_params",
        "--fsdp-double-buffer",
    )
    (parts,) = peak_memory_bytes(replace(tiny_job(), performance_flags=flags), SHARDED_4)
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
    (parts,) = peak_memory_bytes(replace(tiny_job(), performance_flags=flags), SHARDED_4)
    layer, ends = 49984, 16384 + 2048 + 128

    assert parts.whole == 4 * (layers_gathered * layer + ends) + 4 * (layer + ends) + grown


def test_a_single_rank_has_no_shards() -> None:
    """Everything is whole, once."""
    flags = ("--use-megatron-fsdp", "--data-parallel-sharding-strategy optim_grads_params")
    (parts,) = peak_memory_bytes(replace(tiny_job(), performance_flags=flags), Layout(use_distributed_optimizer=True))

    assert parts.whole == 0
