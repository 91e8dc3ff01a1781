"""Every legal layout, nothing else, and a counted reason for the rest."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from facts_for_tests import LATENT, tiny_cluster, tiny_job, tiny_measurements, tiny_model
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from search import naive
from search.legal import cuts, legal_layouts, variants

from pipette_launch.cost.compute.stages import ComputeTable
from pipette_launch.errors import MegatronError
from pipette_launch.facts import ComputeCase, Layout, Samples
from pipette_launch.facts.co_location import Domains
from pipette_launch.facts.job import Batch
from pipette_launch.facts.layout import NO_RECOMPUTE, LayoutColumns, MemoryOptions
from pipette_launch.megatron import read_job, write_arguments
from pipette_launch.megatron.flags import releases
from pipette_launch.megatron.rules.broken import Rules
from pipette_launch.megatron.rules.judge import broken_rule
from pipette_launch.search.layout_axes import micro_batch_sizes
from pipette_launch.search.layouts import BaseLayouts, base_layouts, compute_cases

NO_SAVERS: dict[str, Any] = {name: getattr(Layout(), name) for name in MemoryOptions._fields}


def found_in(case: naive.Case) -> BaseLayouts:
    """The layouts that the product lists for a case."""
    job, world_size, kind = case
    return base_layouts(job, world_size=world_size, domains=Domains(devices_per_host=2), device_kind=kind)


@settings(max_examples=40, deadline=None)
@given(naive.cases())
def test_cuts_agree_with_trying_everything(case: naive.Case) -> None:
    """No legal cut is left out, no illegal one is let in, and none comes twice."""
    expected = {cut for cut, is_legal in naive.cuts(case) if is_legal}
    found = [replace(cut, **NO_SAVERS) for cut in cuts(found_in(case))]

    assert len(expected) == len(found)
    assert expected == set(found)


@settings(max_examples=40, deadline=None)
@given(naive.cases())
def test_savers_agree_with_trying_everything(case: naive.Case) -> None:
    """Every cut has exactly its legal savers, the first of them in its row; all are counted."""
    found = found_in(case)
    every = [variants(found, row) for row in range(len(found))]
    expected = [{replace(cut, **saver._asdict()) for saver in naive.savers(case, cut)} for cut in cuts(found)]
    row_M, columns = found.variants(np.arange(len(found)))

    assert expected == [set(each) for each in every]
    assert cuts(found) == [each[0] for each in every]
    assert [layout for each in every for layout in each] == [columns.layout(row) for row in range(len(columns))]
    assert [row for row, each in enumerate(every) for _ in each] == row_M.tolist()
    assert found.num_layouts == sum(map(len, every))


@settings(max_examples=30, deadline=None)
@given(naive.cases())
def test_rules_see_the_same_faults(case: naive.Case) -> None:
    """A layout has no fault exactly where Megatron's constraints, written a second time, all hold."""
    job, _, kind = case
    rules = Rules.of(job, device_kind=kind)
    for cut, _ in list(naive.cuts(case))[::7]:
        holds = all((*naive.degrees_hold(case, cut), *naive.divides(job, cut)))
        faults = [broken_rule(rules, replace(cut, sequence_parallel=parallel)) for parallel in (True, False)]

        assert holds == (None in faults)


@settings(max_examples=20, deadline=None)
@given(naive.cases())
def test_layouts_are_all_variants_of_all_base_layouts(case: naive.Case) -> None:
    """The flat list holds the user's own layout first and each other once; all of them are legal."""
    job, world_size, kind = case
    found = legal_layouts(job, world_size=world_size, devices_per_host=2, device_kind=kind)
    rules = Rules.of(job, device_kind=kind)

    assert job.own == found[0]
    assert len(found) == len(set(found))
    assert {None} >= {broken_rule(rules, layout) for layout in found[1:]}
    assert found_in(case).num_layouts == len(found[1:]) + (job.own in found_in(case))


@settings(max_examples=20, deadline=None)
@given(naive.cases(), st.data())
def test_pins_hold(case: naive.Case, data: st.DataObject) -> None:
    """A pinned field keeps the user's value in every layout, and the rest stays legal."""
    job, world_size, kind = case
    legal = legal_layouts(job, world_size=world_size, devices_per_host=2, device_kind=kind)
    # Without experts ETP means nothing, and a pinned one only changes how it is written.
    names = [field.name for field in fields(Layout) if job.model.num_experts or field.name != "etp"]
    pinned = data.draw(st.lists(st.sampled_from(names), unique=True).map(lambda chosen: tuple(sorted(chosen))))
    own = data.draw(st.sampled_from(legal))
    job = replace(job, own=own)
    rules = Rules.of(job, device_kind=kind)

    found = legal_layouts(replace(job, pinned=pinned), world_size=world_size, devices_per_host=2, device_kind=kind)

    assert own == found[0]
    # Megatron itself switches sequence parallelism off where tp = 1.
    differ = [
        (layout, name)
        for layout in found
        for name in pinned
        if getattr(layout, name) != getattr(own, name) and not (name == "sequence_parallel" and layout.tp == 1)
    ]
    assert differ == []
    assert [layout for layout in found[1:] if broken_rule(rules, layout)] == []


def test_everything_pinned_leaves_the_own_layout() -> None:
    """With all fields pinned there is nothing to search."""
    job = tiny_job(4, pinned=tuple(field.name for field in fields(Layout)))

    found = legal_layouts(job, world_size=4, devices_per_host=4, device_kind="cpu")

    assert (job.own,) == found


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_attention_heads": 3, "num_query_groups": 3}, "tp does not divide num_attention_heads=3"),
        ({"num_layers": 3}, "more pipeline ranks than num_layers=3"),
        ({"ffn_hidden_size": 255}, "tp does not divide ffn_hidden_size=255"),
        ({"transformer_impl": "transformer_engine"}, "context parallelism does not run on CPU"),
        ({"latent_attention": replace(LATENT, q_lora_rank=33)}, "tp does not divide q_lora_rank=33"),
        ({"latent_attention": replace(LATENT, kv_lora_rank=33)}, "tp does not divide kv_lora_rank=33 + 8"),
    ],
)
def test_a_dropped_layout_has_a_reason(changes: dict[str, object], reason: str) -> None:
    """Refused layouts are counted by the rule that they break."""
    found = base_layouts(
        tiny_job(4, model=tiny_model(**changes)), world_size=4, domains=Domains(devices_per_host=4), device_kind="cpu"
    )

    assert found.dropped[reason] > 0


def test_query_groups_are_replicated() -> None:
    """With one query group, tensor parallelism is legal."""
    job = tiny_job(4, model=tiny_model(num_query_groups=1))
    found = legal_layouts(job, world_size=4, devices_per_host=4, device_kind="cpu")

    assert max(layout.tp for layout in found) == 4


@pytest.mark.parametrize(
    ("flag", "holds"),
    [
        ("--no-overlap-p2p-communication", lambda layout: layout.vpp == 1 or layout.pp > 2),
        ("--padded-vocab-size 258", lambda layout: layout.tp <= 2),
        ("--rampup-batch-size 2 2 100", lambda layout: 2 % (layout.micro_batch_size * layout.dp) == 0),
        ("--eval-global-batch-size 2", lambda layout: 2 % (layout.micro_batch_size * layout.dp) == 0),
        ("--eval-micro-batch-size 4", lambda layout: 8 % (4 * layout.dp) == 0),
        ("--use-precision-aware-optimizer", lambda layout: layout.use_distributed_optimizer),
        ("--defer-embedding-wgrad-compute", lambda layout: layout.pp > 1),
        ("--cpu-offloading-num-layers 1", lambda layout: layout.pp == 1 and layout.recompute == NO_RECOMPUTE),
        ("--cuda-graph-impl local", lambda layout: layout.recompute.granularity != "full"),
        ("--tp-comm-overlap", lambda layout: layout.sequence_parallel),
        ("--cp-comm-type a2a", lambda layout: 4 // layout.tp % layout.cp == 0),
        ("--hierarchical-context-parallel-sizes 2 1", lambda layout: layout.cp == 2),
        (
            "--distribute-saved-activations",
            lambda layout: layout.tp > 1 and layout.recompute.granularity == "full" and not layout.sequence_parallel,
        ),
    ],
)
def test_the_users_own_flags_bind(flag: str, holds: object) -> None:
    """Flags that have no field of their own still rule layouts out."""
    model = tiny_model(transformer_impl="transformer_engine")
    # The first release that has all of them, and the last in which the batch ramps up.
    version = "0.17.1" if "rampup" in flag else "0.18.0"
    job = tiny_job(4, model=model, performance_flags=(flag,), megatron_version=version)

    found = legal_layouts(job, world_size=4, devices_per_host=4, device_kind="cuda")[1:]

    assert found
    assert [layout for layout in found if not holds(layout)] == []  # type: ignore[operator]


def test_layouts_divide_all_batch_sizes_of_a_schedule() -> None:
    """The own layout may not divide earlier batch sizes, because a training may continue on more replicas."""
    batch = Batch(global_batch_size=8, earlier_sizes=(6,))
    for own, samples in ((Layout(tp=4), {1, 2}), (Layout(dp=4), {1, 2, 4})):
        job = replace(tiny_job(4, megatron_version="0.18.0"), batch=batch, own=own)
        found = legal_layouts(job, world_size=4, devices_per_host=4, device_kind="cuda")
        assert {layout.micro_batch_size * layout.dp for layout in found} == samples


@pytest.mark.parametrize(("flags", "most"), [((), 1), (("--cp-comm-type all_gather",), 2)])
def test_windows_bind_context_parallelism(flags: tuple[str, ...], most: int) -> None:
    """Transformer Engine passes keys round a ring only without windows."""
    model = tiny_model(transformer_impl="transformer_engine", attention_windows=(4, 0, 4, 0))
    job = tiny_job(4, model=model, performance_flags=flags, megatron_version="0.18.0")

    assert most == max(one.cp for one in legal_layouts(job, world_size=2, devices_per_host=2, device_kind="cuda")[1:])


@pytest.mark.parametrize(("backend", "most"), [("unfused", 1), ("flash", 2), ("fused", 2), ("auto", 2)])
def test_unfused_attention_binds_context_parallelism(backend: str, most: int) -> None:
    """Transformer Engine has kernels for it, and no backend without."""
    model = tiny_model(transformer_impl="transformer_engine", attention_backend=backend, params_dtype="bf16")
    found = legal_layouts(tiny_job(4, model=model), world_size=2, devices_per_host=2, device_kind="cuda")

    assert most == max(one.cp for one in found)


@pytest.mark.parametrize(
    ("pinned", "expected"), [((), {(1, ()), (2, (3, 2)), (4, (1, 1, 2, 1))}), (("layers_per_chunk",), {(2, (3, 2))})]
)
def test_the_users_uneven_cut_stays(pinned: tuple[str, ...], expected: set[tuple[int, tuple[int, ...]]]) -> None:
    """Uneven stages of the user's are kept wherever a layout has as many; other pipelines get balanced ones."""
    own = Layout(pp=2, dp=2, layers_per_chunk=(3, 2))
    job = tiny_job(4, model=tiny_model(num_layers=5, vocab_size=1), own=own, pinned=pinned)

    found = legal_layouts(job, world_size=4, devices_per_host=4, device_kind="cpu")

    assert expected == {(layout.pp, layout.layers_per_chunk) for layout in found if layout.vpp == 1} - {(2, (2, 3))}


def test_measured_times_decide_where_layers_go() -> None:
    """A head as slow as four layers takes them off the last stage; FLOPs, which know better, do not come in."""
    measurements = tiny_measurements(tiny_cluster())
    slow_head = tuple(
        replace(time, forward=Samples(values_s=(4 * 3e-3 * time.case.micro_batch_size / time.case.tp,)))
        if time.part == "head"
        else time
        for time in measurements.compute
    )
    job = tiny_job(4, model=tiny_model(num_layers=8))
    table = ComputeTable(job, replace(measurements, compute=slow_head))

    found = base_layouts(job, world_size=4, domains=Domains(devices_per_host=4), device_kind="cpu", table=table)

    assert {(), (6, 2)} == {cut.layers_per_chunk for cut in cuts(found) if (cut.pp, cut.vpp) == (2, 1)}


def test_large_micro_batches_have_a_cut_of_their_own() -> None:
    """A head that grows with the micro-batch, beside layers that do not, is worth more layers there."""
    measurements = tiny_measurements(tiny_cluster())
    host_bound = tuple(
        replace(time, forward=Samples(values_s=(2e-3,)), input_grad=Samples(values_s=(2e-3,)))
        if time.part == "layer"
        else replace(time, forward=Samples(values_s=(1e-2 * time.case.micro_batch_size,)))
        if time.part == "head"
        else time
        for time in measurements.compute
    )
    job = tiny_job(4, model=tiny_model(num_layers=8))
    table = ComputeTable(job, replace(measurements, compute=host_bound))

    found = base_layouts(job, world_size=4, domains=Domains(devices_per_host=4), device_kind="cpu", table=table)
    by_cut = {cut.layers_per_chunk for cut in cuts(found) if (cut.tp, cut.pp, cut.vpp) == (1, 2, 1)}

    assert {(), (5, 3), (7, 1)} == by_cut


def test_an_illegal_own_layout_is_marked() -> None:
    """The user's own layout is never dropped, even where Megatron would refuse it."""
    job = tiny_job(4, own=Layout(tp=4), model=tiny_model(num_attention_heads=2, num_query_groups=2))

    found = base_layouts(job, world_size=4, domains=Domains(devices_per_host=4), device_kind="cpu")

    assert found.own_fault == "tp does not divide num_attention_heads=2"


def test_tensor_parallel_groups_over_hosts_come_last() -> None:
    """They are legal and stay in, after all that keep tensor parallelism inside a host."""
    found = legal_layouts(tiny_job(4), world_size=4, devices_per_host=2, device_kind="cpu")
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
    """The user's own case is measured first, then the most promising cases, each once."""
    own = Layout(tp=2, dp=1, micro_batch_size=1)
    others = (Layout(dp=2, micro_batch_size=4), Layout(dp=2, micro_batch_size=2), Layout(pp=2, micro_batch_size=2))

    cases = compute_cases(own, LayoutColumns.of((*others, own)))

    assert [(case.tp, case.micro_batch_size) for case in cases] == [(2, 1), (1, 2), (1, 4)]
    assert (ComputeCase(tp=2, cp=1, micro_batch_size=1),) == compute_cases(own, LayoutColumns.of(()))


GPT = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 1 --global-batch-size 64 --bf16 --tokenizer-type NullTokenizer --vocab-size 32000 --lr 1e-4 "
    "--train-iters 10"
)


@pytest.mark.parametrize(
    ("kind", "flags", "version"),
    [
        ("cuda", "", "0.16.1"),
        ("cpu", "--transformer-impl local", "0.16.1"),
        ("cuda", "--num-experts 8 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall", "0.16.1"),
        ("cuda", "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer --swiglu", "0.16.1"),
        ("cuda", "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2", "0.16.1"),
        (
            "cuda",
            "--multi-latent-attention --mtp-num-layers 1 --position-embedding-type rope --disable-bias-linear",
            "0.16.1",
        ),
        ("cuda", "--use-megatron-fsdp --ckpt-format fsdp_dtensor --use-distributed-optimizer", "0.16.1"),
        ("cuda", "--hybrid-override-pattern M-M-M*M-", "0.16.1"),
        ("cuda", "--hybrid-layer-pattern M-M|-M*M-/*-", "0.17.1"),
        ("cuda", "--hybrid-layer-pattern M-M|-M*M-/*- --pipeline-model-parallel-size 2", "0.17.1"),
    ],
)
def test_every_layout_can_be_written_and_read_back(kind: str, flags: str, version: str) -> None:
    """Megatron's command line can say each of them, and means the same layout by it."""
    arguments = f"{GPT} {flags}".split()
    read = partial(read_job, world_size=8, megatron_version=version, device_kind=kind, without_probes=True)
    job = read(arguments, for_planning=True)
    found = legal_layouts(job, world_size=8, devices_per_host=8, device_kind=kind)

    assert broken_rule(Rules.of(job, device_kind=kind), job.own) is None
    for layout in found[:: max(1, len(found) // 25)]:
        assert layout == read(write_arguments(arguments, job=job, layout=layout)).own


JOB = tiny_job(4, own=Layout(pp=2, dp=2), batch=Batch(global_batch_size=16))


def legal(device_kind: str = "cuda") -> BaseLayouts:
    """All cuts of the job on two hosts."""
    return base_layouts(JOB, world_size=4, domains=Domains(devices_per_host=2), device_kind=device_kind)  # type: ignore[arg-type]


def without(layout: Layout, *names: str) -> Layout:
    """The layout with some of its fields at their defaults."""
    plain: dict[str, Any] = {name: getattr(Layout(), name) for name in names}
    return replace(layout, **plain)


@pytest.mark.parametrize("place", range(0, 400, 37))
def test_neighbours_differ_in_one_choice(place: int) -> None:
    """They are the legal layouts that are the same once one choice, and what follows it, is taken out."""
    found = legal()
    _, every = found.variants(np.arange(len(found.columns)))
    layouts = [every.layout(row) for row in range(len(every))]
    layout = layouts[place % len(layouts)]
    chunks = ("vpp", "layers_per_chunk", "microbatch_group_size")
    choices = (
        ("micro_batch_size", "microbatch_group_size"),
        chunks,
        ("sequence_parallel",),
        ("use_distributed_optimizer", "overlap_param_gather"),
        ("overlap_grad_reduce", "overlap_param_gather"),
        ("recompute",),
    )
    expected = {
        other
        for other in layouts
        if other != layout and any(without(other, *names) == without(layout, *names) for names in choices)
    }
    columns = found.neighbours(layout)

    assert expected == {columns.layout(row) for row in range(len(columns))}


BASE = (
    "--num-layers 12 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --max-position-embeddings 256 "
    "--micro-batch-size 1 --global-batch-size 48 --bf16 --tokenizer-type NullTokenizer --vocab-size 32000 --lr 1e-4 "
    "--train-iters 10 --disable-bias-linear"
)
EXPERTS = "--num-experts 8 --moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 96 --moe-router-topk 2"
MODELS = (
    "--swiglu",
    "--group-query-attention --num-query-groups 2 --position-embedding-type rope",
    EXPERTS,
    (
        f"{EXPERTS} --moe-grouped-gemm --moe-shared-expert-intermediate-size 64 --mtp-num-layers 1 "
        f"--position-embedding-type rope"
    ),
    (
        f"{EXPERTS} --multi-latent-attention --q-lora-rank 64 --kv-lora-rank 32 --qk-head-dim 16 "
        f"--qk-pos-emb-head-dim 16 --v-head-dim 16 --position-embedding-type rope --no-rope-fusion"
    ),
)
FLAGS = (
    "--overlap-p2p-communication-warmup-flush",
    "--no-overlap-p2p-communication",
    "--overlap-moe-expert-parallel-comm",
    "--tp-comm-overlap",
    "--num-distributed-optimizer-instances 2",
    "--use-tp-pp-dp-mapping",
    "--cp-comm-type a2a",
    "--cp-comm-type p2p a2a",
    "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
    "--attention-dropout 0 --hidden-dropout 0",
    "--cuda-graph-impl local",
    "--cuda-graph-impl transformer_engine",
    "--enable-cuda-graph",
    "--external-cuda-graph",
    "--defer-embedding-wgrad-compute",
    "--cpu-offloading-num-layers 2",
    "--fp8-format hybrid",
    "--fp8-format e4m3 --fp8-recipe tensorwise --first-last-layers-bf16 --num-layers-at-start-in-bf16 4",
    (
        "--distribute-saved-activations --tensor-model-parallel-size 2 --recompute-granularity full "
        "--recompute-method block --recompute-num-layers 1"
    ),
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "--use-distributed-optimizer --use-precision-aware-optimizer",
    "--optimizer sgd",
    "--optimizer muon",
    (
        "--use-megatron-fsdp --use-distributed-optimizer --data-parallel-sharding-strategy optim_grads_params "
        "--ckpt-format fsdp_dtensor"
    ),
    "--ckpt-format torch --disable-gloo-process-groups",
    "--eval-global-batch-size 16",
    "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    "--recompute-granularity selective --recompute-modules core_attn",
)
SAMPLES = 6
"""Layouts of each job that are written and read back."""


def sampled(found: BaseLayouts, rng: random.Random) -> list[Layout]:
    """Take some variants of some cuts."""
    rows = np.array(sorted(rng.sample(range(len(found)), min(SAMPLES, len(found)))), dtype=np.int64)
    if not len(rows):
        return []
    _, columns = found.variants(rows)
    return [columns.layout(row) for row in rng.sample(range(len(columns)), min(SAMPLES, len(columns)))]


@settings(max_examples=120, deadline=None)
@given(
    model=st.sampled_from(MODELS),
    flags=st.lists(st.sampled_from(FLAGS), max_size=3, unique=True),
    version=st.sampled_from(releases()),
    world_size=st.sampled_from((4, 8, 12, 16)),
    seed=st.integers(0, 1 << 16),
)
def test_no_plan_breaks_a_rule(model: str, flags: list[str], version: str, world_size: int, seed: int) -> None:
    """A listed layout breaks no rule, and the command line that says it is read as that layout, without complaint."""
    words = f"{BASE} {model} {' '.join(flags)}".split()
    release = f"{version}.0"

    def read(argv: tuple[str, ...] | list[str], **options: bool) -> Layout:
        job = read_job(argv, world_size=world_size, megatron_version=release, device_kind="cuda", **options)
        assert not [note for note in job.notes if "does not stop" in note]
        return job.own

    try:
        job = read_job(
            words,
            world_size=world_size,
            megatron_version=release,
            device_kind="cuda",
            for_planning=True,
            without_probes=True,
        )
    except MegatronError:
        assume(False)
    rules = Rules.of(job, device_kind="cuda")
    found = base_layouts(job, world_size=world_size, domains=Domains(devices_per_host=4), device_kind="cuda")
    for layout in sampled(found, random.Random(seed)):
        assert broken_rule(rules, layout) is None
        assert layout == read(write_arguments(words, job=job, layout=layout), for_prediction=True)
