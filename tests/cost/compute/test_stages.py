"""Stage times from measured parts, and the stated way to get those that were not measured."""

from dataclasses import replace

import pytest
from facts_for_tests import stage_reading, tiny_cluster, tiny_job, tiny_measurements, tiny_model
from search.worlds import on_gpus as cluster_on_gpus

from pipette_launch.cost.compute.stages import ComputeTable, PassSeconds
from pipette_launch.cost.layers.kinds import offloaded
from pipette_launch.errors import PlanError
from pipette_launch.facts import (
    ComputeCase,
    ComputeTime,
    Layout,
    LoadingTime,
    Measurements,
    Recompute,
    Samples,
    StageReading,
)

CASE = ComputeCase(tp=1, cp=1, micro_batch_size=1)
TWO = ComputeCase(tp=1, cp=1, micro_batch_size=2)


def table(*cases: ComputeCase) -> ComputeTable:
    """Layer 1 ms, embedding 0.1 ms, head 0.5 ms a pass, times micro-batch over tp * cp; a backward is two passes."""
    return ComputeTable(tiny_job(), tiny_measurements(tiny_cluster(), cases or (CASE,)))


def milliseconds(passes: tuple[PassSeconds, ...]) -> list[tuple[float, float, float]]:
    """Forward, backward, recompute."""
    return [
        tuple(round(1e3 * value, 9) for value in (part.forward_s, part.backward_s, part.recompute_s))  # type: ignore[misc]
        for part in passes
    ]


def test_ends_are_not_free() -> None:
    """The embedding adds to the first stage, the head to the last."""
    assert milliseconds(table().chunk_passes(Layout(pp=4))) == [(1.1, 2.2, 0), (1, 2, 0), (1, 2, 0), (1.5, 3.0, 0)]


def test_stages_that_need_tokens_or_labels_load_every_micro_batch() -> None:
    """Once before the first and the last forward of a pipeline, and once where one stage needs both."""
    measured = tiny_measurements(tiny_cluster(), (CASE, TWO))
    loading = LoadingTime(batch_s=2e-4, sample_s=1e-4)
    loads = ComputeTable(tiny_job(), replace(measured, loading=loading))
    plain = ComputeTable(tiny_job(), measured)

    def longer_ms(layout: Layout) -> list[float]:
        """Ratio of the forwards of two tables."""
        with_and_without = zip(loads.chunk_passes(layout), plain.chunk_passes(layout), strict=True)
        return [round(1e3 * (one.forward_s - other.forward_s), 9) for one, other in with_and_without]

    assert [0.3, 0, 0, 0.3] == longer_ms(Layout(pp=2, vpp=2))
    assert [0.4, 0.4] == longer_ms(Layout(pp=2, micro_batch_size=2))
    assert [0.3] == longer_ms(Layout(dp=4))


def test_every_predicted_token_costs_a_layer_and_a_head() -> None:
    """Two depths on the last stage: 2 * (1 + 0.5) ms more a pass than its layer and its head."""
    deep = ComputeTable(tiny_job(model=tiny_model(mtp_num_layers=2)), tiny_measurements(tiny_cluster(), (CASE,)))

    assert milliseconds(deep.chunk_passes(Layout(pp=4)))[-1] == (4.5, 9.0, 0)


@pytest.mark.parametrize("part_ms", [None, 1.5])
def test_depths_apart_from_the_head_leave_their_heads_there(part_ms: float | None) -> None:
    """Two depths of 1 ms on their own stage, two heads of 0.5 ms more on the last, whose layers stay as they are."""
    layout = Layout(pp=4, layers_per_chunk=(2, 2, 0, 0), chunks_after_mtp=1)

    assert [(2.1, 4.2, 0), (2.0, 4.0, 0), (2.0, 4.0, 0), (1.5, 3.0, 0)] == stages_predicting(part_ms, layout)


def predicting(part_ms: float | None, layout: Layout) -> tuple[float, float, float]:
    """Milliseconds of the last stage of a model with two depths, each of which was timed to take so long a pass."""
    return stages_predicting(part_ms, layout)[-1]


def stages_predicting(part_ms: float | None, layout: Layout) -> list[tuple[float, float, float]]:
    """The same of all stages."""
    measured = tiny_measurements(tiny_cluster(), (CASE,))
    if part_ms is not None:
        depth = Samples(values_s=(part_ms * 1e-3,))
        like = measured.compute[0]
        timed = replace(like, part="prediction", forward=depth, input_grad=depth, weight_grad=depth)
        measured = replace(measured, compute=(*measured.compute, timed))
    deep = ComputeTable(tiny_job(model=tiny_model(mtp_num_layers=2)), measured)
    return milliseconds(deep.chunk_passes(layout))


def test_a_depth_that_was_timed_costs_what_it_took() -> None:
    """Two of 1.75 ms a pass beside the layer and the head, and nowhere else."""
    assert (1 + 0.5 + 2 * 1.75, 2 * (1.5 + 3.5), 0) == predicting(1.75, Layout(pp=4))


def test_predicted_layers_run_again_with_method_uniform_alone() -> None:
    """Two layers of 1 ms beside the stage's own; method block leaves them alone, and so does no recompute."""
    uniform = Recompute(granularity="full", method="uniform", num_layers=1)
    block = Recompute(granularity="full", method="block", num_layers=1)

    assert [1 + 2, 1, 0] == [
        predicting(part_ms, Layout(pp=4, recompute=recompute))[2]
        for part_ms, recompute in ((1.75, uniform), (None, block), (1.75, Recompute(granularity="none")))
    ]


def test_full_recompute_adds_a_forward() -> None:
    """All layers with method uniform, the first of each chunk with block; embedding and head never."""
    uniform = Recompute(granularity="full", method="uniform", num_layers=2)
    block = Recompute(granularity="full", method="block", num_layers=1)

    assert milliseconds(table().chunk_passes(Layout(pp=2, recompute=uniform))) == [(2.1, 4.2, 2), (2.5, 5.0, 2)]
    assert milliseconds(table().chunk_passes(Layout(pp=2, recompute=block))) == [(2.1, 4.2, 1), (2.5, 5.0, 1)]


def test_full_recompute_costs_what_it_was_measured_to() -> None:
    """A measured 1.25 ms for a forward of 1 ms; other cases go by the median of those that were timed."""
    base = tiny_measurements(tiny_cluster(), (CASE, replace(CASE, tp=2)))
    again = Samples(values_s=(1.25e-3,))
    compute = tuple(
        replace(time, recompute=again) if time.part == "layer" and time.case == CASE else time for time in base.compute
    )
    measured = ComputeTable(tiny_job(), replace(base, compute=compute))
    uniform = Recompute(granularity="full", method="uniform", num_layers=1)

    assert milliseconds(measured.chunk_passes(Layout(pp=2, recompute=uniform))) == [(2.1, 4.2, 2.5), (2.5, 5.0, 2.5)]
    assert milliseconds(measured.chunk_passes(Layout(pp=4, tp=2, recompute=uniform)))[1] == (0.5, 1.0, 0.625)
    assert milliseconds(measured.chunk_passes(Layout(pp=2))) == [(2.1, 4.2, 0), (2.5, 5.0, 0)]


def test_expert_layers_have_their_own_time() -> None:
    """Dense and expert layers are measured apart."""
    model = tiny_model(num_experts=4, moe_layer_freq=(0, 1, 0, 1))
    measurements = tiny_measurements(tiny_cluster(), (CASE,))
    sample = Samples(values_s=(5e-3,))
    expert = ComputeTime(case=CASE, part="moe_layer", slot=0, forward=sample, input_grad=sample, weight_grad=sample)
    with_expert = replace(measurements, compute=(*measurements.compute, expert))

    passes = ComputeTable(tiny_job(model=model), with_expert).chunk_passes(Layout(pp=2))

    assert milliseconds(passes) == [(6.1, 12.2, 0), (6.5, 13.0, 0)]
    assert ComputeTable(tiny_job(model=model), measurements).source(CASE) is None


def test_a_missing_microbatch_is_scaled_by_tokens() -> None:
    """From the nearest of equal tp, and the note says so."""
    scaled = table(replace(CASE, micro_batch_size=2), replace(CASE, micro_batch_size=16))
    wanted = replace(CASE, micro_batch_size=4)

    assert scaled.source(wanted) == replace(CASE, micro_batch_size=2)
    assert milliseconds(scaled.chunk_passes(Layout(micro_batch_size=4))) == [(18.4, 36.8, 0)]
    assert scaled.note(wanted) == (
        "Compute time of tp=1 cp=1 micro-batch 4 was not measured. The time of tp=1 cp=1 micro-batch 2 is multiplied "
        "by 2, in proportion to the tokens."
    )
    assert table().note(CASE) is None


def test_context_parallelism_is_scaled_by_tokens() -> None:
    """Half the tokens on each rank."""
    assert milliseconds(table().chunk_passes(Layout(cp=2))) == [(2.3, 4.6, 0)]


def test_nothing_is_carried_over_to_another_tp() -> None:
    """No time for it, and the error says what to do."""
    assert table().source(replace(CASE, tp=2)) is None
    with pytest.raises(PlanError, match="nothing with tp=2 was measured"):
        table().chunk_passes(Layout(tp=2))


def test_slots_are_brought_to_speed_one() -> None:
    """The same work on a slot of half the speed takes twice as long; the median of both is one."""
    cluster = replace(tiny_cluster(1, 2), slot_speed=(1.0, 0.5))

    def measurements(slot: int, seconds: float) -> Measurements:
        base = tiny_measurements(cluster, (CASE,))
        sample = Samples(values_s=(seconds,))
        return replace(
            base,
            compute=tuple(
                replace(time, slot=slot, forward=sample, input_grad=sample, weight_grad=sample) for time in base.compute
            ),
        )

    fast, slow = measurements(0, 1e-3), measurements(1, 2e-3)
    both = replace(fast, compute=fast.compute + slow.compute)

    forwards = [ComputeTable(tiny_job(), each).chunk_passes(Layout())[0].forward_s for each in (fast, slow, both)]

    assert forwards == pytest.approx([6e-3] * 3)


def test_what_comes_back_from_the_host_is_waited_for_in_the_backward() -> None:
    """A layer's bytes at the link's rate, beyond its backward; nothing where the link is fast or was not measured."""
    flags = (
        "--fine-grained-activation-offloading",
        "--offload-modules core_attn",
        "--min-offloaded-tensor-size 1",
    )
    model = tiny_model(transformer_impl="transformer_engine", attention_backend="fused")
    job, layout = tiny_job(model=model, performance_flags=flags), Layout()
    moved = offloaded(job, layout, "layer").moved
    measured = tiny_measurements(tiny_cluster())
    plain, slow, fast = (
        ComputeTable(job, replace(measured, host_bytes_per_s=rate)).chunk_passes(layout)[0] for rate in (0, 1e6, 1e12)
    )
    layer_s = 0.002

    assert plain == fast
    assert slow.forward_s == plain.forward_s
    assert slow.backward_s - plain.backward_s == pytest.approx(4 * (moved / 1e6 - layer_s))


PIPELINE = Layout(pp=4)


def reading(pp_rank: int, schedule_s: float, layout: Layout = PIPELINE, **changes: object) -> StageReading:
    """One stage of the tiny job that ran two micro-batches on slot 0."""
    timed = {"num_microbatches": 2, "schedule_s": schedule_s, "update_s": 0.1}
    return stage_reading(tiny_job(), layout, pp_rank, **timed | changes)


def with_readings(*readings: StageReading, **changes: object) -> ComputeTable:
    """The table of `table`, whose slot 0 is the only one, with stages that ran."""
    measured = replace(tiny_measurements(cluster_on_gpus(tiny_cluster(1, 1)), (CASE, TWO)), stages=readings)
    return ComputeTable(tiny_job(), replace(measured, **changes))  # type: ignore[arg-type]


def test_all_layouts_get_the_median_ratio() -> None:
    """Four stages took 1.1 to 1.3 times their parts: 3 ms a layer, 0.3 ms the embedding, 1.5 ms the head."""
    middles = [reading(rank, 2 * 3e-3 * factor) for rank, factor in ((1, 1.1), (2, 1.2))]
    found = with_readings(*middles, reading(0, 2 * 3.3e-3 * 1.2), reading(3, 2 * 4.5e-3 * 1.3))

    assert "4 whole stages took 1.10 to 1.30 times the sum of their parts" in found.stages_note
    for layout in (PIPELINE, Layout(dp=4), Layout(pp=2, micro_batch_size=2)):
        plain = [one.backward_s for one in table(CASE, TWO).chunk_passes(layout)]
        assert [one.backward_s for one in found.chunk_passes(layout)] == pytest.approx([1.2 * each for each in plain])


def test_stages_on_cpus_change_nothing() -> None:
    """A core's speed changes within seconds, so the parts predict trained steps better than single stages."""
    found = with_readings(reading(1, 1.0), cluster=tiny_cluster(1, 1))

    assert found.chunk_passes(PIPELINE) == table(CASE, TWO).chunk_passes(PIPELINE)
    assert not found.stages_note


def test_loading_is_no_part_of_a_stage() -> None:
    """A middle stage of 3 ms that took 3 ms needs no factor, because its batches are ready before it starts."""
    found = with_readings(reading(1, 2 * 3e-3), loading=LoadingTime(batch_s=1.0, sample_s=0.0))
    plain = with_readings(loading=LoadingTime(batch_s=1.0, sample_s=0.0))

    assert milliseconds(plain.chunk_passes(PIPELINE)) == milliseconds(found.chunk_passes(PIPELINE))


@pytest.mark.parametrize("changes", [{"job_digest": "another job"}, {"num_microbatches": 0}])
def test_a_reading_without_time_or_of_another_job_changes_nothing(changes: dict[str, object]) -> None:
    """The times are those of the parts, and no note is made."""
    found = with_readings(reading(1, 1.0, **changes))  # type: ignore[arg-type]

    assert found.chunk_passes(PIPELINE) == table(CASE, TWO).chunk_passes(PIPELINE)
    assert not found.stages_note


def test_a_stage_whose_parts_were_not_timed_has_no_ratio() -> None:
    """The times of four samples come from two samples, so their error is not one of the sum of the parts."""
    found = with_readings(reading(1, 1.0, Layout(pp=4, micro_batch_size=4)))

    assert not found.stages_note
