"""Bytes outside the model's tensors are stated with their origin, and decide which layouts fit."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from facts_for_tests import changed_job, stage_reading, tiny_cluster, tiny_job, tiny_measurements, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from search.worlds import on_gpus as cluster_on_gpus

from pipette_launch.cost.learned import CorrectedPredictor
from pipette_launch.cost.memory.overhead import (
    Figure,
    Overhead,
    allowed_bytes,
    measured_overhead,
    num_communicators,
    num_group_kinds,
    overhead_of,
    uncounted,
    with_expandable_segments,
    workspace_bytes,
)
from pipette_launch.cost.memory.peak import peak_memory_bytes
from pipette_launch.facts import Batch, Cluster, Job, Layout, Measurements, StageReading
from pipette_launch.facts.layout import LayoutColumns
from pipette_launch.facts.measurements import DeviceOverhead
from pipette_launch.text import MIB

A100, H100, B200 = 8, 9, 10
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


@pytest.mark.parametrize(
    ("capability", "environment", "expected"),
    [
        (A100, {}, 2 * 4 * MIB + 128 * 1024),
        (A100, DETERMINISTIC, 32 * MIB),
        (A100, {"CUBLAS_WORKSPACE_CONFIG": ":4096:2:16:8"}, 8 * MIB + 128 * 1024),
        (A100, {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, 128 * 1024),
        (H100, {"CUBLAS_WORKSPACE_CONFIG": "lots"}, 32 * MIB),
        (H100, {}, 32 * MIB),
        (B200, {}, 2 * 4 * MIB + 128 * 1024),
        (H100, DETERMINISTIC, 32 * MIB),
    ],
)
def test_one_cublas_workspace(capability: int, environment: dict[str, str], expected: int) -> None:
    """The environment counts before the device."""
    job = tiny_job(
        model=tiny_model(transformer_impl="local"),
        cublas_workspace_config=environment.get("CUBLAS_WORKSPACE_CONFIG", ""),
    )

    assert workspace_bytes(job, capability=capability) == 2 * expected


def test_newer_torch_gives_blackwell_a_large_workspace() -> None:
    """The containers of core_v0.18 have torch 2.12, whose default on Blackwell is the size on Hopper."""
    job = changed_job(tiny_job(model=tiny_model(transformer_impl="local")), megatron_version="0.18.0")

    assert 2 * 32 * MIB == workspace_bytes(job, capability=B200)


@pytest.mark.parametrize(
    ("impl", "capability", "expected"),
    [
        ("local", A100, 64 * MIB),
        ("local", H100, 64 * MIB),
        ("transformer_engine", A100, 68 * MIB),
        ("transformer_engine", H100, 96 * MIB),
    ],
)
def test_two_threads_and_transformer_engine(impl: str, capability: int, expected: int) -> None:
    """Forward and backward threads, and one workspace of TransformerEngine's own."""
    job = tiny_job(model=tiny_model(transformer_impl=impl), cublas_workspace_config=":4096:8")

    assert workspace_bytes(job, capability=capability) == expected


def test_grouped_gemms_have_four_more() -> None:
    """One for each of TransformerEngine's streams, and only where experts use them."""
    model = tiny_model(
        transformer_impl="transformer_engine", num_experts=4, moe_layer_freq=(1,) * 4, moe_ffn_hidden_size=128
    )
    plain = tiny_job(model=model, cublas_workspace_config=":4096:8")
    grouped = changed_job(plain, performance_flags=("--moe-grouped-gemm",))

    sizes = [workspace_bytes(job, capability=A100) for job in (plain, grouped)]

    assert sizes == [68 * MIB, 84 * MIB]


@pytest.mark.parametrize(("impl", "expected"), [("transformer_engine", (64 + 4 * 32) * MIB), ("local", 64 * MIB)])
def test_overlapped_tensor_parallelism(impl: str, expected: int) -> None:
    """Overlap needs three workspaces of TransformerEngine beside the usual one."""
    job = tiny_job(model=tiny_model(transformer_impl=impl), performance_flags=("--tp-comm-overlap",))

    assert expected == workspace_bytes(job, capability=H100)


@pytest.mark.parametrize(("flags", "expected"), [((), 96), (("--moe-router-dtype fp64",), 64)])
def test_a_router_has_a_workspace_of_transformer_engine(flags: tuple[str, ...], expected: int) -> None:
    """In Megatron's own layers the router is the only user, and not with double precision."""
    model = tiny_model(transformer_impl="local", num_experts=4, moe_layer_freq=(1,) * 4, moe_ffn_hidden_size=128)
    job = tiny_job(model=model, performance_flags=flags)

    assert expected * MIB == workspace_bytes(job, capability=H100)


GIB = 1 << 30
GPT = replace(tiny_job(8), model=tiny_model(transformer_impl="transformer_engine"))


def overhead(workspace: float = 0, context: float = 0, communicators: float = 0, reserve: float = 1.0) -> Overhead:
    """Figures from nowhere."""
    return Overhead(
        workspace=Figure(value=workspace, source="test"),
        context=Figure(value=context, source="test"),
        communicators=Figure(value=communicators, source="test"),
        reserve=Figure(value=reserve, source="test"),
    )


def on_h100(**changes: Any) -> Measurements:
    """A warm-up that measured this."""
    return replace(tiny_measurements(cluster_on_gpus(tiny_cluster())), **changes)


def test_only_what_the_allocator_holds_is_multiplied_by_its_reserve() -> None:
    """1.5 x (100 + 20) + 30 + 40, and the context is no part of the reserve."""
    assert 250 == overhead(workspace=20, context=30, communicators=40, reserve=1.5).device_peak_bytes(100)


@given(
    st.integers(0, 200 * GIB),
    st.integers(0, GIB),
    st.integers(0, 4 * GIB),
    st.sampled_from((1.0, 1.03, 1.15)),
    st.sampled_from((0.0, 0.08, 0.2)),
    st.integers(-2, 2),
)
def test_the_limit_is_the_other_side_of_what_fits(
    capacity: int, workspace: int, context: int, reserve: float, margin: float, beside: int
) -> None:
    """A peak fits exactly if it is not above the limit, one byte more or less included."""
    one = overhead(workspace=workspace, context=context, reserve=reserve)
    limit = one.limit_bytes(capacity, memory_margin=margin)
    peak = max(limit + beside, 0)
    if limit == 0:
        return

    assert (peak <= limit) == (one.device_peak_bytes(peak) <= allowed_bytes(capacity, memory_margin=margin))


def test_a_host_has_no_overhead() -> None:
    """On CPU nothing is added that was not measured."""
    one = overhead_of(GPT, Layout(tp=8), device_kind="cpu")

    assert (100, ()) == (one.device_peak_bytes(100), one.notes())


def test_what_was_measured_takes_the_place_of_defaults() -> None:
    """The warm-up's figure holds context and communicators together, so neither default is added to it."""
    one = overhead_of(
        GPT, Layout(tp=8), device_kind="cuda", device_name="NVIDIA H100", measured=on_h100(overhead_bytes=7)
    )

    assert 7 == one.outside_bytes
    assert ("measured by the warm-up, communicators included", "part of the measured context") == (
        one.context.source,
        one.communicators.source,
    )


def test_communicators_are_counted_one_by_one() -> None:
    """Four communicators added 4 GiB to 1 GiB; a layout that needs six has six times 1 GiB, another has 0."""
    apart = DeviceOverhead(alone_bytes=GIB, together_bytes=5 * GIB, num_communicators=4, workspace_bytes=0)

    def outside(layout: Layout) -> int:
        return overhead_of(
            GPT, layout, device_kind="cuda", measured=on_h100(overhead_bytes=5 * GIB, overhead=apart)
        ).outside_bytes

    assert 7 * GIB == outside(Layout(tp=2, pp=2, dp=2))
    assert GIB == outside(Layout())


def test_without_communicators_the_total_stands() -> None:
    """A slot alone had none to tell their size from."""
    apart = DeviceOverhead(alone_bytes=7, together_bytes=7, num_communicators=0, workspace_bytes=0)

    assert (
        7
        == overhead_of(
            GPT, Layout(), device_kind="cuda", measured=on_h100(overhead_bytes=7, overhead=apart)
        ).outside_bytes
    )


def test_a_gpu_without_any_overhead_was_not_measured() -> None:
    """No context takes 0 bytes: such a file tells nothing."""
    unmeasured = overhead_of(GPT, Layout(tp=8), device_kind="cuda", measured=on_h100(overhead_bytes=0))

    assert overhead_of(GPT, Layout(tp=8), device_kind="cuda") == unmeasured
    assert 1_000_000_000 == unmeasured.outside_bytes


@pytest.mark.parametrize(
    ("layout", "flags", "count"),
    [
        pytest.param(Layout(), (), 0, id="alone"),
        # All ranks, gradients; the distributed optimizer's norm has a group of all ranks of its own.
        pytest.param(Layout(dp=8), (), 2, id="dp"),
        pytest.param(Layout(dp=8, use_distributed_optimizer=True), (), 3, id="distributed optimizer"),
        # All ranks, tp, and the model-parallel group of the step's success.
        pytest.param(Layout(tp=8), (), 3, id="tp"),
        # All ranks, the model-parallel group, the embedding of first and last stage, and messages.
        pytest.param(Layout(pp=8), (), 4, id="pp"),
        pytest.param(Layout(pp=4, vpp=2), (), 5, id="interleaved with overlap: one for each neighbour"),
        pytest.param(Layout(pp=2, vpp=2), (), 5, id="both ways of two stages"),
        pytest.param(Layout(pp=4, vpp=2), ("--no-overlap-p2p-communication",), 4, id="interleaved in batches"),
        # Keys and values go around in batches on two ranks; on more they go to one neighbour and come from another.
        pytest.param(Layout(cp=2), (), 3, id="cp of two"),
        pytest.param(Layout(cp=4), (), 4, id="ring of four"),
        pytest.param(Layout(cp=4), ("--cp-comm-type a2a",), 3, id="all-to-all of four"),
        pytest.param(Layout(tp=2, pp=2, dp=2), (), 6, id="all three"),
    ],
)
def test_communicators_are_counted_as_torch_opens_them(layout: Layout, flags: tuple[str, ...], count: int) -> None:
    """One for each group that Megatron uses, and one for each neighbour where messages are not batched."""
    assert count == num_communicators(changed_job(GPT, performance_flags=flags), layout)


@pytest.mark.parametrize(
    ("layout", "count"),
    [
        # All ranks, gradients; of experts ep, the counts of their tokens, and gradients of two ranks with the same.
        pytest.param(Layout(dp=8, ep=4), 5, id="ep"),
        pytest.param(Layout(dp=8, ep=8), 4, id="every expert once"),
        # All ranks, tp, the model-parallel group, gradients; ep, the counts, etp.
        pytest.param(Layout(tp=2, etp=2, dp=4, ep=4), 7, id="tensor-parallel experts"),
    ],
)
def test_experts_have_communicators_of_their_own(layout: Layout, count: int) -> None:
    """Groups of expert parallelism differ from groups of dense layers, even with the same ranks."""
    moe = replace(GPT, model=tiny_model(num_experts=8, moe_layer_freq=(1, 1, 1, 1)))

    assert count == num_communicators(moe, layout)


def test_untied_embeddings_have_no_communicator() -> None:
    """Nothing is exchanged between first and last stage."""
    untied = replace(GPT, model=tiny_model(untie_embeddings_and_output_weights=True))

    assert 3 == num_communicators(untied, Layout(pp=8))


@given(
    st.lists(
        st.builds(
            Layout,
            tp=st.sampled_from((1, 2)),
            pp=st.sampled_from((1, 2, 4)),
            dp=st.sampled_from((1, 4)),
            cp=st.sampled_from((1, 2, 4)),
            use_distributed_optimizer=st.booleans(),
        ),
        min_size=1,
    )
)
def test_many_layouts_are_counted_as_one_by_one(layouts: list[Layout]) -> None:
    """Columns give the same counts."""
    columns = LayoutColumns.of(layouts)

    assert [num_communicators(GPT, layout) for layout in layouts] == num_communicators(GPT, columns).tolist()
    assert [num_group_kinds(layout) for layout in layouts] == num_group_kinds(columns).tolist()


def test_without_measurements_half_a_gigabyte_counts_for_each_degree() -> None:
    """The rule of the literature counts tp, cp, pp, dp and ep; its unit includes the small groups beside them."""
    assert 3 == num_group_kinds(Layout(tp=2, pp=2, dp=2))
    assert 2_000_000_000 == overhead_of(GPT, Layout(tp=2, pp=2, dp=2), device_kind="cuda").outside_bytes


def stage(allocated: int, reserved: int, *, job: Job = GPT) -> StageReading:
    """A stage that the warm-up ran."""
    peaks = {"allocator_peak_bytes": allocated, "reserved_peak_bytes": reserved, "device_peak_bytes": 0}
    return stage_reading(job, Layout(dp=8), **peaks)


@pytest.mark.parametrize(
    ("readings", "reserve"),
    [
        pytest.param([], 1.03, id="no stage was run"),
        pytest.param([stage(100 * GIB, 101 * GIB)], 1.01, id="as measured"),
        pytest.param([stage(100 * GIB, 101 * GIB), stage(50 * GIB, 55 * GIB)], 1.1, id="the largest counts"),
        pytest.param([stage(100 * GIB, 190 * GIB)], 1.2, id="cached memory is given back"),
        pytest.param([stage(100 * GIB, 99 * GIB)], 1.0, id="never below what is allocated"),
        pytest.param([stage(100, 0), stage(0, 100)], 1.03, id="nothing was read"),
        pytest.param([stage(100, 110, job=replace(GPT, grad_reduce_in_bf16=True))], 1.03, id="another job"),
    ],
)
def test_the_reserve_is_the_measured_one(readings: list[StageReading], reserve: float) -> None:
    """Reserved over allocated of the stages that the warm-up ran for this job, within limits; else the default."""
    found = overhead_of(GPT, Layout(dp=8), device_kind="cuda", measured=on_h100(stages=tuple(readings))).reserve

    assert reserve == found.value
    assert (reserve != 1.03) == found.source.startswith("measured by the warm-up")


def test_the_reserve_of_a_warm_up_counts_in_its_plans() -> None:
    """1.1 in the file of measurements is 1.1 in the overhead of every layout, and in the note beside the plan."""
    measured = replace(
        tiny_measurements(cluster_on_gpus(tiny_cluster())), stages=(stage(10 * GIB, 11 * GIB),), overhead_bytes=7
    )
    found = measured_overhead(GPT, Layout(tp=2), measured)

    assert 1.1 == found.reserve.value
    assert (
        "The allocator's reserve: 1.1 x what it allocates, measured by the warm-up in 1 of its runs of stages."
        in found.notes()
    )


def test_the_drivers_compute_capability_sizes_the_workspaces_of_a_gpu_with_an_unknown_name() -> None:
    """Two workspaces of 8.1 MiB of torch's own and 4 MiB of Transformer Engine's, as on an A100, not Hopper's 96."""
    (host,) = cluster_on_gpus(tiny_cluster(1, 1)).hosts
    host = replace(host, devices=(replace(host.devices[0], name="GPU 3000", compute_capability=8),))
    measured = tiny_measurements(replace(tiny_cluster(1, 1), hosts=(host,)))
    found = measured_overhead(GPT, Layout(), measured).workspace

    assert overhead_of(GPT, Layout(), device_kind="cuda", device_name="A100-80GB").workspace.value == found.value
    assert "constants for GPU 3000" in found.source


def test_workspaces_of_unknown_devices_are_those_of_hopper() -> None:
    """The most that is common: 64 MiB of torch's own and 32 MiB of Transformer Engine's."""
    unknown = overhead_of(GPT, Layout(), device_kind="cuda", device_name="Gaudi 2")

    assert 96 * MIB == unknown.workspace.value
    assert "a GPU of unknown type" in unknown.workspace.source


def test_a_described_device_has_the_workspaces_of_its_capability() -> None:
    """The name of a device that a file describes tells nothing; 8 MiB of torch's own and 4 MiB of the engine's."""
    described = overhead_of(GPT, Layout(), device_kind="cuda", device_name="Gaudi 2", capability=8)

    assert (
        described.workspace.value
        == overhead_of(GPT, Layout(), device_kind="cuda", device_name="A100-80GB").workspace.value
    )
    assert "constants for Gaudi 2" in described.workspace.source


def test_the_workers_environment_sizes_the_workspaces() -> None:
    """Deterministic runs set 8 buffers of 4 MiB for each of two threads."""
    local = replace(GPT, model=tiny_model(transformer_impl="local"))
    read_with = replace(local, cublas_workspace_config=":4096:8")

    assert 64 * MIB == overhead_of(read_with, Layout(), device_kind="cuda", device_name="V100-32GB").workspace.value


def test_experts_make_the_allocator_reserve_more() -> None:
    """Shapes that change with the routing fragment the allocator's memory."""
    moe = replace(GPT, model=tiny_model(num_experts=4, moe_layer_freq=(1, 1, 1, 1)))

    assert (1.03, 1.15) == (
        overhead_of(GPT, Layout(), device_kind="cuda").reserve.value,
        overhead_of(moe, Layout(), device_kind="cuda").reserve.value,
    )


EXPANDABLE = "expandable_segments:True"


@pytest.mark.parametrize(
    ("config", "dense", "experts"),
    [
        ("", 1.03, 1.15),
        ("expandable_segments:False", 1.03, 1.15),
        ("garbage_collection_threshold:0.8", 1.03, 1.15),
        (EXPANDABLE, 1.016, 1.081),
        (f"{EXPANDABLE},garbage_collection_threshold:0.8", 1.016, 1.081),
        (f"max_split_size_mb:128,{EXPANDABLE}", 1.016, 1.081),
        (f"backend:native,{EXPANDABLE}", 1.016, 1.081),
        (f"backend:cudaMallocAsync,{EXPANDABLE}", 1.03, 1.15),
    ],
)
def test_expandable_segments_reserve_less(config: str, dense: float, experts: float) -> None:
    """54 % of the usual reserve beyond allocated bytes, with torch's own allocator; the source is named."""
    moe = tiny_model(num_experts=4, moe_layer_freq=(1, 1, 1, 1))
    jobs = (replace(GPT, allocator_config=config), replace(GPT, model=moe, allocator_config=config))
    found = [overhead_of(job, Layout(), device_kind="cuda").reserve for job in jobs]

    assert [dense, experts] == [one.value for one in found]
    assert (dense != 1.03) == all("STAlloc's artifact (arXiv 2507.16274)" in one.source for one in found)


@pytest.mark.parametrize(
    ("config", "flags", "expected"),
    [
        ("", (), EXPANDABLE),
        ("expandable_segments:False", (), EXPANDABLE),
        ("roundup_power2_divisions:[256:1,>:4]", (), f"roundup_power2_divisions:[256:1,>:4],{EXPANDABLE}"),
        (EXPANDABLE, (), None),
        ("backend:cudaMallocAsync", (), None),
        ("", ("--use-megatron-fsdp", "--use-nccl-ub"), None),
    ],
)
def test_segments_can_expand_unless_the_allocator_or_megatron_refuses(
    config: str, flags: tuple[str, ...], expected: str | None
) -> None:
    """The setting is added to the job's own options of the allocator, or replaces its opposite."""
    changed = with_expandable_segments(changed_job(GPT, allocator_config=config, performance_flags=flags))

    assert expected == (changed and changed.allocator_config)


def test_the_least_bytes_leave_only_the_cache_out() -> None:
    """The allocator's cache is the difference: 15 % of tensors and workspaces of a model with experts."""
    moe = replace(GPT, model=tiny_model(num_experts=4, moe_layer_freq=(1, 1, 1, 1)))
    found = overhead_of(moe, Layout(dp=8), device_kind="cuda", device_name="H100")
    memory = found.need((40 * GIB,), 80 * GIB, memory_margin=0.08)

    assert (40 * GIB + int(found.workspace.value) + found.outside_bytes,) == memory.least_bytes
    assert memory.need_bytes[0] - memory.least_bytes[0] == math.ceil(0.15 * (40 * GIB + found.workspace.value))


@pytest.mark.parametrize(("measured_with", "expected"), [(EXPANDABLE, 1.01), ("", 1.016)])
def test_a_reserve_that_was_measured_counts_first_where_the_allocator_was_the_same(
    measured_with: str, expected: float
) -> None:
    """Segments that do not expand say nothing about those that do."""
    job = replace(GPT, allocator_config=EXPANDABLE)
    reading = replace(stage(100 * GIB, 101 * GIB), allocator_config=measured_with)

    assert (
        expected
        == overhead_of(job, Layout(dp=8), device_kind="cuda", measured=on_h100(stages=(reading,))).reserve.value
    )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (EXPANDABLE, ""),
        ("garbage_collection_threshold:0.8", ""),
        ("backend:native", ""),
        ("roundup_power2_divisions:[256:1,>:4]", "roundup_power2_divisions"),
        (f"backend:cudaMallocAsync,{EXPANDABLE},max_split_size_mb:64", "backend, max_split_size_mb"),
    ],
)
def test_options_of_the_allocator_without_a_price_are_named(config: str, expected: str) -> None:
    """Options that round or limit the allocator's blocks are named."""
    notes = uncounted(replace(GPT, allocator_config=config))

    assert [expected] * bool(expected) == [
        note.removeprefix("Not in the allocator's reserve: ").partition(" of ")[0] for note in notes
    ]


def test_each_assumption_is_said() -> None:
    """Every figure that adds something has a sentence with its origin."""
    notes = overhead_of(GPT, Layout(tp=8), device_kind="cuda", device_name="H100").notes()

    assert 4 == len(notes)
    assert all("default" in note for note in notes)


JOB = tiny_job(4, batch=Batch(global_batch_size=32))
PIPELINE, PLAIN = Layout(pp=2, dp=2), Layout(dp=4)
LAYOUTS = [PLAIN, PIPELINE, replace(PIPELINE, micro_batch_size=2), replace(PIPELINE, layers_per_chunk=(1, 3))]


def on_gpus(cluster: Cluster) -> Cluster:
    """The same machines with GPUs."""
    hosts = tuple(
        replace(host, devices=tuple(replace(device, kind="cuda", name="NVIDIA H100") for device in host.devices))
        for host in cluster.hosts
    )
    return replace(cluster, hosts=hosts)


def reading(layout: Layout, pp_rank: int, peak: int, *, job: Job = JOB, ran_out: bool = False) -> StageReading:
    """A reading of a stage that held these bytes."""
    peaks = {"allocator_peak_bytes": peak, "reserved_peak_bytes": 0, "device_peak_bytes": 0}
    return stage_reading(job, layout, pp_rank, ran_out=ran_out, **peaks)


def measured(*readings: StageReading, cluster: Cluster | None = None) -> Measurements:
    """A warm-up that ran these."""
    return replace(tiny_measurements(cluster or tiny_cluster()), stages=readings)


def closed(layout: Layout) -> tuple[int, ...]:
    """The closed form."""
    return tuple(parts.total for parts in peak_memory_bytes(JOB, layout))


def test_only_the_stage_that_was_run_changes() -> None:
    """The other stage of the same layout, and every other layout, stay predictions; all ways to ask agree."""
    predictor = CorrectedPredictor(JOB, measured(reading(PIPELINE, 1, 12345678)))
    expected = [(closed(one)[0], 12345678) if one == PIPELINE else closed(one) for one in LAYOUTS]

    assert expected == [predictor.peaks(one) for one in LAYOUTS]
    assert tuple(expected) == predictor.all_peaks(LAYOUTS)
    assert [max(peaks) for peaks in expected] == list(predictor.fullest_N(LayoutColumns.of(LAYOUTS)))
    assert "Peak memory of stage 1 was measured by running it, not predicted." in predictor.notes(PIPELINE)
    assert not any("was measured by running" in note for note in predictor.notes(PLAIN))


def test_workspaces_are_not_counted_twice() -> None:
    """On a GPU the reading includes workspaces, and the limit already leaves room for them."""
    cluster = on_gpus(tiny_cluster())
    workspace = overhead_of(JOB, PLAIN, device_kind="cuda", device_name="NVIDIA H100").workspace.value
    predictor = CorrectedPredictor(JOB, measured(reading(PLAIN, 0, GIB), cluster=cluster))

    assert workspace > 0
    assert (GIB - workspace,) == predictor.peaks(PLAIN)


def test_a_stage_that_ran_out_of_memory_does_not_fit() -> None:
    """A stage that ran out needs at least the device's memory, also if less was reached before."""
    cluster = tiny_cluster(memory_bytes=GIB)
    predictor = CorrectedPredictor(JOB, measured(reading(PLAIN, 0, 5, ran_out=True), cluster=cluster))

    assert (GIB,) == predictor.peaks(PLAIN)


def test_another_jobs_stages_tell_nothing() -> None:
    """Readings of another batch size, or of another number of slots, are ignored."""
    other = replace(JOB, batch=Batch(global_batch_size=64))
    larger = Layout(dp=8)
    found = measured(reading(PLAIN, 0, 5, job=other), reading(larger, 0, 5))

    assert closed(PLAIN) == CorrectedPredictor(JOB, found).peaks(PLAIN)
    assert closed(larger) == CorrectedPredictor(JOB, found).peaks(larger)


def test_what_measuring_showed_is_no_error_of_the_closed_form() -> None:
    """The correction leads back to the closed form of the fullest stage, from which outcomes learn."""
    predictor = CorrectedPredictor(JOB, measured(reading(PIPELINE, 1, 2 * max(closed(PIPELINE)))))
    peaks = predictor.peaks(PIPELINE)

    assert closed(PIPELINE)[1] == round(max(peaks) / predictor.memory_correction(PIPELINE))
    assert 1.0 == predictor.memory_correction(PLAIN)


def test_a_layouts_rows_are_found() -> None:
    """Every row of a layout and no other, also where it stands twice."""
    columns = LayoutColumns.of([*LAYOUTS, PIPELINE])

    assert [1, 4] == columns.rows_of(PIPELINE).tolist()
    assert [3] == columns.rows_of(LAYOUTS[3]).tolist()
    assert 0 == len(columns.rows_of(Layout(tp=4)))
    assert np.int64 == columns.rows_of(PIPELINE).dtype
