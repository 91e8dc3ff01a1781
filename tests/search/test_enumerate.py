"""Every legal layout, nothing else, and a counted reason for the rest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import product
from typing import Any

import pytest
from facts_for_tests import tiny_job, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from pipette_launch.facts import Batch, ComputeCase, Job, Layout, Recompute
from pipette_launch.megatron import read_job, write_arguments
from pipette_launch.search.axes import FULL, NO_RECOMPUTE, SELECTIVE, micro_batch_sizes
from pipette_launch.search.enumerate import compute_cases, cuts, layouts
from pipette_launch.search.rules import Rules, Saver

NO_SAVERS: dict[str, Any] = {name: getattr(Layout(), name) for name in Saver._fields}


def is_legal(job: Job, layout: Layout, *, kind: str) -> bool:
    """Megatron's constraints and our own choices, written a second time, field by field."""
    return all(
        holds
        for holds in (
            *degrees_hold(job, layout, kind=kind),
            *batch_holds(job, layout),
            *experts_hold(job, layout),
            *savers_hold(job, layout, kind=kind),
        )
    )


def degrees_hold(job: Job, layout: Layout, *, kind: str) -> Iterator[bool]:
    """Heads, query groups, widths and sequences divide."""
    model, tp, cp = job.model, layout.tp, layout.cp
    yield model.num_attention_heads % tp == 0
    yield model.ffn_hidden_size % tp == 0
    yield model.num_query_groups % tp == 0 or tp % model.num_query_groups == 0
    yield cp == 1 or kind == "cuda"
    yield cp == 1 or model.transformer_impl == "transformer_engine"
    yield cp == 1 or model.seq_length % (2 * cp) == 0


def batch_holds(job: Job, layout: Layout) -> Iterator[bool]:
    """Layers and micro-batches divide, and the interleaved schedule has enough of them."""
    samples, rest = divmod(job.batch.global_batch_size, layout.dp)
    mbs, pp = layout.micro_batch_size, layout.pp
    yield rest == 0 and samples % mbs == 0
    yield mbs in micro_batch_sizes(samples, own=job.own.micro_batch_size)
    yield job.model.num_layers % (pp * layout.vpp) == 0
    yield layout.vpp == 1 or (pp > 1 and samples // mbs % pp == 0 and samples // mbs > 0)


def experts_hold(job: Job, layout: Layout) -> Iterator[bool]:
    """Experts divide over EP and ETP, and stay away from dense models."""
    model = job.model
    if model.num_experts:
        yield model.num_experts % layout.ep == 0
        yield model.moe_ffn_hidden_size % layout.etp == 0
        yield layout.etp in (layout.tp, job.own.etp)
        yield layout.tp == 1 or layout.sequence_parallel
    else:
        yield (layout.ep, layout.etp) == (1, layout.tp)


def savers_hold(job: Job, layout: Layout, *, kind: str) -> Iterator[bool]:
    """Sequence parallelism, optimizer, overlap and recompute are of use where they are on."""
    model, sharded = job.model, layout.use_distributed_optimizer
    possible = kind == "cuda" and layout.tp > 1 and model.seq_length // layout.cp % layout.tp == 0
    overlap = (layout.overlap_grad_reduce, layout.overlap_param_gather)
    matters = model.transformer_impl == "local" or model.attention_backend in ("unfused", "local")
    yield layout.sequence_parallel == possible
    yield not sharded or (job.optimizer == "adam" and layout.dp * layout.cp > 1)
    yield overlap == (False, False) or (overlap == (True, True) and sharded and kind == "cuda")
    yield layout.recompute in (NO_RECOMPUTE, FULL) or (layout.recompute == SELECTIVE and matters)


def naive(job: Job, *, world_size: int, kind: str) -> Iterator[Layout]:
    """Try every tuple of values."""
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    experts = range(1, (job.model.num_experts or 1) + 1)
    degrees = (
        values for values in product(sizes, repeat=4) if values[0] * values[1] * values[2] * values[3] == world_size
    )
    for (tp, pp, dp, cp), ep, etp in product(degrees, experts, sizes):
        if world_size % (etp * ep * pp):
            continue
        for vpp, mbs in product(range(1, job.model.num_layers + 1), range(1, job.batch.global_batch_size + 1)):
            if vpp > 1 and pp == 1:
                continue
            for sp, sharded, reduce, gather in product((False, True), repeat=4):
                for recompute in (NO_RECOMPUTE, SELECTIVE, FULL):
                    layout = Layout(
                        tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, etp=etp, vpp=vpp, micro_batch_size=mbs,
                        sequence_parallel=sp, use_distributed_optimizer=sharded, overlap_grad_reduce=reduce,
                        overlap_param_gather=gather, recompute=recompute,
                    )  # fmt: skip
                    if is_legal(job, layout, kind=kind):
                        yield layout


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Job, int, str]:
    """A small job, its world and its device."""
    world_size = draw(st.sampled_from([1, 2, 3, 4, 6]))
    heads = draw(st.sampled_from([2, 4, 6]))
    experts = draw(st.sampled_from([None, None, 2, 4]))
    layers = draw(st.sampled_from([2, 3, 4]))
    kind = draw(st.sampled_from(["cpu", "cuda"]))
    model = tiny_model(
        num_layers=layers,
        num_attention_heads=heads,
        num_query_groups=draw(st.sampled_from([1, heads])),
        seq_length=draw(st.sampled_from([6, 8])),
        transformer_impl=draw(st.sampled_from(["local", "transformer_engine"])),
        num_experts=experts,
        moe_layer_freq=(1,) * layers if experts else (),
        moe_ffn_hidden_size=draw(st.sampled_from([9, 16])),
        ffn_hidden_size=draw(st.sampled_from([12, 64])),
    )
    batch = draw(st.sampled_from([world_size, 2 * world_size, 4]))
    job = tiny_job(
        world_size, model=model, batch=Batch(global_batch_size=batch), optimizer=draw(st.sampled_from(["adam", "sgd"]))
    )
    return job, world_size, kind


@settings(max_examples=25, deadline=None)
@given(jobs())
def test_it_agrees_with_trying_everything(case: tuple[Job, int, str]) -> None:
    """No legal layout is left out, and no illegal one is let in."""
    job, world_size, kind = case
    expected = set(naive(job, world_size=world_size, kind=kind)) | {job.own}

    found = layouts(job, world_size=world_size, devices_per_host=2, device_kind=kind).layouts

    assert job.own == found[0]
    assert len(expected) == len(found)
    assert expected == set(found)


@settings(max_examples=30, deadline=None)
@given(jobs())
def test_cuts_with_their_savers_are_all_layouts(case: tuple[Job, int, str]) -> None:
    """Cuts, each with its first saver, stand for all layouts, and say how many these are."""
    job, world_size, kind = case
    found = cuts(job, world_size=world_size, devices_per_host=2, device_kind=kind)
    every = layouts(job, world_size=world_size, devices_per_host=2, device_kind=kind)

    assert len(every.layouts) == found.num_layouts
    assert all(cut == found.savers(row)[0] for row, cut in enumerate(found.layouts))
    assert len({replace(layout, **NO_SAVERS) for layout in every.layouts} | {replace(job.own, **NO_SAVERS)}) == len(
        {replace(cut, **NO_SAVERS) for cut in found.layouts} | {replace(job.own, **NO_SAVERS)}
    )


@settings(max_examples=30, deadline=None)
@given(jobs(), st.data())
def test_pins_hold(case: tuple[Job, int, str], data: st.DataObject) -> None:
    """A pinned field keeps the user's value in every layout, and the rest stays legal."""
    job, world_size, kind = case
    legal = layouts(job, world_size=world_size, devices_per_host=2, device_kind=kind).layouts
    # Without experts ETP means nothing, and a pinned one only changes how it is written.
    names = [field.name for field in fields(Layout) if job.model.num_experts or field.name != "etp"]
    pinned = data.draw(st.lists(st.sampled_from(names), unique=True).map(lambda chosen: tuple(sorted(chosen))))
    own = data.draw(st.sampled_from(legal))
    job = replace(job, own=own)
    rules = Rules.of(job, device_kind=kind)

    found = layouts(replace(job, pinned=pinned), world_size=world_size, devices_per_host=2, device_kind=kind).layouts

    assert own == found[0]
    # Megatron itself switches sequence parallelism off where tp = 1.
    differ = [
        (layout, name)
        for layout in found
        for name in pinned
        if getattr(layout, name) != getattr(own, name) and not (name == "sequence_parallel" and layout.tp == 1)
    ]
    assert differ == []
    assert [layout for layout in found[1:] if rules.fault(layout)] == []


def test_everything_pinned_leaves_the_own_layout() -> None:
    """Where the user fixed all, there is nothing to search."""
    job = tiny_job(4, pinned=tuple(field.name for field in fields(Layout)))

    found = layouts(job, world_size=4, devices_per_host=4, device_kind="cpu")

    assert (job.own,) == found.layouts


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_attention_heads": 3, "num_query_groups": 3}, "tp does not divide num_attention_heads=3"),
        ({"num_layers": 3}, "pp*vpp does not divide num_layers=3"),
        ({"ffn_hidden_size": 255}, "tp does not divide ffn_hidden_size=255"),
        ({"transformer_impl": "transformer_engine"}, "context parallelism does not run on CPU"),
    ],
)
def test_a_dropped_layout_has_a_reason(changes: dict[str, object], reason: str) -> None:
    """What falls out is counted under the constraint that it breaks."""
    found = layouts(tiny_job(4, model=tiny_model(**changes)), world_size=4, devices_per_host=4, device_kind="cpu")

    assert found.dropped[reason] > 0


def test_query_groups_were_never_replicated_before_016() -> None:
    """With one query group, tensor parallelism is legal from megatron-core 0.16 on."""

    def widest(version: str) -> int:
        job = tiny_job(4, model=tiny_model(num_query_groups=1), megatron_version=version)
        return max(layout.tp for layout in layouts(job, world_size=4, devices_per_host=4, device_kind="cpu").layouts)

    assert (widest("0.15.3"), widest("0.16.1")) == (1, 4)


@pytest.mark.parametrize(
    ("flag", "holds"),
    [
        ("--no-overlap-p2p-communication", lambda layout: layout.vpp == 1 or layout.pp > 2),
        ("--padded-vocab-size 258", lambda layout: layout.tp <= 2),
        ("--rampup-batch-size 2 2 100", lambda layout: 2 % (layout.micro_batch_size * layout.dp) == 0),
        ("--use-precision-aware-optimizer", lambda layout: layout.use_distributed_optimizer),
        ("--defer-embedding-wgrad-compute", lambda layout: layout.pp > 1),
        ("--cpu-offloading-num-layers 1", lambda layout: layout.pp == 1 and layout.recompute == NO_RECOMPUTE),
        ("--cuda-graph-impl local", lambda layout: layout.recompute != FULL),
        ("--tp-comm-overlap", lambda layout: layout.sequence_parallel),
        ("--cp-comm-type a2a", lambda layout: 4 // layout.tp % layout.cp == 0),
        ("--hierarchical-context-parallel-sizes 2 1", lambda layout: layout.cp == 2),
        (
            "--distribute-saved-activations",
            lambda layout: layout.tp > 1 and layout.recompute == FULL and not layout.sequence_parallel,
        ),
    ],
)
def test_the_users_own_flags_bind(flag: str, holds: object) -> None:
    """Flags that have no field of their own still rule layouts out."""
    model = tiny_model(transformer_impl="transformer_engine")
    pinned = ("sequence_parallel",) if flag == "--distribute-saved-activations" else ()
    job = tiny_job(4, model=model, performance_flags=(flag,), pinned=pinned)

    found = layouts(job, world_size=4, devices_per_host=4, device_kind="cuda").layouts[1:]

    assert found
    assert [layout for layout in found if not holds(layout)] == []  # type: ignore[operator]


def test_the_users_uneven_cut_stays() -> None:
    """Uneven stages of the user's are kept wherever a layout has as many stages."""
    own = Layout(pp=2, dp=2, layers_per_chunk=(3, 2))
    job = tiny_job(4, model=tiny_model(num_layers=5), own=own)

    found = layouts(job, world_size=4, devices_per_host=4, device_kind="cpu").layouts

    assert {(), (3, 2)} == {layout.layers_per_chunk for layout in found}
    assert {(3, 2)} == {layout.layers_per_chunk for layout in found if layout.pp > 1}


def test_an_illegal_own_layout_is_marked() -> None:
    """The user's own layout is never dropped, even where Megatron would refuse it."""
    job = tiny_job(4, own=Layout(tp=4), model=tiny_model(num_attention_heads=2, num_query_groups=2))

    found = layouts(job, world_size=4, devices_per_host=4, device_kind="cpu")

    assert job.own == found.layouts[0]
    assert found.own_fault == "tp does not divide num_attention_heads=2"


def test_tensor_parallel_groups_over_hosts_come_last() -> None:
    """They are legal and stay in, after all that keep tensor parallelism inside a host."""
    found = layouts(tiny_job(4), world_size=4, devices_per_host=2, device_kind="cpu").layouts
    wide = [layout.tp > 2 for layout in found[1:]]

    assert any(wide)
    assert sorted(wide) == wide


def test_micro_batches_worth_trying() -> None:
    """Powers of two, quotients by them, and the user's own where it divides."""
    assert micro_batch_sizes(8, own=1) == (1, 2, 4, 8)
    assert micro_batch_sizes(12, own=1) == (1, 2, 3, 4, 6, 12)
    assert micro_batch_sizes(15, own=5) == (1, 5, 15)
    assert micro_batch_sizes(15, own=2) == (1, 15)


def test_compute_cases_start_with_the_users_own() -> None:
    """What the user runs is measured first, then what is likely to run best."""
    own = Layout(tp=2, dp=1, micro_batch_size=1)
    others = (Layout(dp=2, micro_batch_size=4), Layout(dp=2, micro_batch_size=2), Layout(pp=2, micro_batch_size=2))

    cases = compute_cases((own, *others))

    assert [(case.tp, case.micro_batch_size) for case in cases] == [(2, 1), (1, 2), (1, 4)]
    assert compute_cases(()) == ()
    assert (ComputeCase(tp=2, cp=1, micro_batch_size=1),) == compute_cases(
        (own, replace(own, recompute=Recompute(granularity="selective")))
    )


GPT = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 1 --global-batch-size 64 --bf16 --tokenizer-type NullTokenizer --vocab-size 32000 --lr 1e-4 "
    "--train-iters 10"
)


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("cuda", ""),
        ("cpu", "--transformer-impl local"),
        ("cuda", "--num-experts 8 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"),
        ("cuda", "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer --swiglu"),
        ("cuda", "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2"),
    ],
)
def test_every_layout_can_be_written_and_read_back(kind: str, flags: str) -> None:
    """Megatron's command line can say each of them, and means the same layout by it."""
    arguments = f"{GPT} {flags}".split()
    job = read_job(arguments, world_size=8, megatron_version="0.16.1", device_kind=kind)
    found = layouts(job, world_size=8, devices_per_host=8, device_kind=kind)

    assert found.own_fault is None
    for layout in found.layouts[:: max(1, len(found.layouts) // 40)]:
        words = write_arguments(arguments, job=job, layout=layout)
        read = read_job(words, world_size=8, megatron_version="0.16.1", device_kind=kind)

        assert layout == read.own
