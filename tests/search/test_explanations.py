"""Reasons and notes are sentences that name figures, and nothing is left out in silence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from facts_for_tests import changed_job, tiny_cluster, tiny_job, tiny_measurements, tiny_model, with_one_full
from search.worlds import ALL_FIELDS, SLOW_BYTES_PER_S, on_gpus, pipeline_job, planned, two_racks

from pipette_launch.cost.compute.device_model import published
from pipette_launch.errors import PlanError
from pipette_launch.facts import Batch, ComputeCase, Layout, Measurements
from pipette_launch.facts.devices import KNOWN_DEVICES
from pipette_launch.report.plan import chosen_line
from pipette_launch.text import bytes_text


def test_all_is_said_in_sentences() -> None:
    """Each reason and each note ends as a sentence does."""
    plan = planned(tiny_job(4, notes=("Something is pinned.",)))

    assert all(
        sentence.endswith(".") and sentence[0] == sentence[0].upper() for sentence in (*plan.advice, *plan.notes)
    )
    assert all(sentence.endswith(".") for sentence in plan.reasons)
    assert plan.advice[0] == "Something is pinned."


def test_a_lead_is_compared_with_published_leads() -> None:
    """Without measurements a reason says which leads exceed the usual error of leads; measured leads have scatter."""
    measured = tiny_measurements(tiny_cluster(bandwidth_bytes_per_s=SLOW_BYTES_PER_S))
    imagined = replace(measured, cluster=replace(measured.cluster, imagined=KNOWN_DEVICES["H100-SXM"]))
    plan, plain = planned(tiny_job(4), imagined), planned(tiny_job(4))
    lead = 1 - plan.chosen.step_time_s / plan.own.step_time_s

    (found,) = [reason for reason in plan.reasons if "Leads of published layouts were predicted" in reason]
    errors = published(tiny_job(4))
    size = "larger" if lead > errors.lead_error else "smaller"
    assert f"predicted {errors.lead_error:.1%} off in the mean ({errors.pairs} pairs of layouts of" in found
    assert f"the lead over your own configuration, {lead:.1%}, is {size}" in found
    assert not any("Leads of published" in reason for reason in plain.reasons)


def test_a_plan_names_the_wait_for_launches() -> None:
    """The plan has the wait as a part of the chosen step, and a note with its cures."""
    measured = tiny_measurements(tiny_cluster())
    idle = replace(measured, compute=tuple(replace(time, forward_idle_s=2e-4) for time in measured.compute))
    plan, plain = planned(tiny_job(4), idle), planned(tiny_job(4), measured)
    waits_s = plan.chosen.breakdown_s["launching_kernels"]

    assert waits_s > 0.1 * plan.chosen.step_time_s
    assert plain.chosen.breakdown_s["launching_kernels"] == 0
    has_note = [any("hosts to launch kernels. Cures" in note for note in one.notes) for one in (plan, plain)]
    assert [True, False] == has_note


def test_another_layout_draws_other_random_numbers() -> None:
    """A note names a change of tensor or pipeline degree, but not a change of placement alone."""
    job = tiny_job(4, pinned=("dp", "ep", "cp", "vpp", "micro_batch_size", "tp"))
    moved = planned(pipeline_job(), tiny_measurements(two_racks()))
    changed = planned(tiny_job(4))

    assert planned(job).chosen.layout.tp == 1
    assert not any("Initial weights" in note for note in moved.notes)
    assert any("Initial weights are drawn rank by rank" in note for note in changed.notes)


def test_dropout_masks_follow_the_ranks() -> None:
    """With dropout even another micro-batch gives other masks."""
    job = tiny_job(4, model=tiny_model(hidden_dropout=0.1), own=Layout(dp=4), pinned=("tp", "pp", "ep"))
    plan = planned(job)

    assert plan.keeps_own or any("Dropout masks" in note for note in plan.notes)


def test_padding_that_cannot_be_kept_is_told() -> None:
    """A vocabulary of 129 rows in steps of 1 is odd, so two tensor ranks must pad it further."""
    model = tiny_model(vocab_size=129, make_vocab_size_divisible_by=1)
    plan = planned(tiny_job(4, model=model))

    assert plan.chosen.layout.tp > 1
    assert any("pads the vocabulary to 130 rows instead of 129." in note for note in plan.notes)


def test_memory_that_is_taken_is_told() -> None:
    """The fullest GPU is named; the driver's own share is not worth a word."""

    def notes(free_bytes: int) -> tuple[str, ...]:
        cluster = with_one_full(on_gpus(tiny_cluster()), free_bytes)
        return planned(tiny_job(4), replace(tiny_measurements(cluster), overhead_bytes=1 << 20)).notes

    expected = "Only 1.00 GiB of 8.00 GiB are free on cpu-0 of node0; every rank is planned for that."
    assert expected in notes(1 << 30)
    assert not any(note.startswith("Only") for note in notes(int(7.9 * (1 << 30))))


def test_a_large_mask_of_the_data_loader_is_named() -> None:
    """Once, whether the chosen or the user's own layout loads it, and not where it is small."""
    long = tiny_model(
        transformer_impl="transformer_engine", attention_backend="flash", seq_length=4096, max_position_embeddings=4096
    )
    count = [
        sum(note.startswith("The data loader's attention mask") for note in planned(tiny_job(4, model=model)).notes)
        for model in (long, tiny_model())
    ]

    assert [1, 0] == count


LONG: dict[str, Any] = {
    "transformer_impl": "transformer_engine",
    "attention_backend": "flash",
    "seq_length": 4096,
    "max_position_embeddings": 4096,
}


def gpus(memory_bytes: int) -> Measurements:
    """Measurements of GPUs with this memory."""
    return tiny_measurements(on_gpus(tiny_cluster(memory_bytes=memory_bytes)))


def message(job: object, measurements: object, **options: float) -> str:
    """The error message of a job without a plan."""
    with pytest.raises(PlanError) as caught:
        planned(job, measurements, **options)  # type: ignore[arg-type]
    return str(caught.value)


def test_a_pin_that_forbids_everything_is_named() -> None:
    """A pipeline of 4 cannot hold 3 layers; another depth could."""
    job = tiny_job(4, model=tiny_model(num_layers=3), own=Layout(pp=4), pinned=("pp",))
    text = message(job, tiny_measurements(tiny_cluster()))

    assert "no layout is legal for 4 ranks with pp fixed" in text
    assert "pp*vpp does not divide num_layers=3" in text
    assert "let pp change (" in text


def test_a_world_that_no_layout_fits_proposes_a_smaller_one() -> None:
    """Five ranks cannot share a batch of 2, four heads and four layers; four can."""
    job = tiny_job(5, own=Layout(dp=5), batch=Batch(global_batch_size=2), model=tiny_model(ffn_hidden_size=256))
    text = message(job, tiny_measurements(tiny_cluster(5, 1)))

    assert "no layout is legal for 5 ranks; the user's own tp1 pp1 dp5 mbs1 breaks: micro_batch_size*dp does" in text
    assert "What would help: use 4 hosts (4 ranks)" in text


def test_too_little_memory_names_the_leanest_layout() -> None:
    """The error names the need, the available memory and the missing memory."""
    job = tiny_job(4, pinned=ALL_FIELDS)
    text = message(job, tiny_measurements(tiny_cluster(memory_bytes=1 << 20)))

    assert "no layout fits in memory: the leanest of 1, tp1 pp1 dp4 mbs1, is predicted to need" in text
    assert "but only 942.08 KiB is available (free on the fullest device 1.00 MiB, margin 8%)" in text
    assert "more memory each" in text


def test_a_pin_that_costs_memory_is_named() -> None:
    """Without the pinned micro-batch a leaner layout would fit."""
    job = tiny_job(4, own=Layout(dp=4, micro_batch_size=16), batch=Batch(global_batch_size=64), pinned=ALL_FIELDS)
    small = replace(job, own=replace(job.own, micro_batch_size=1))
    limit = max(planned(small).own.memory.model_bytes)
    text = message(job, tiny_measurements(tiny_cluster(memory_bytes=limit)), memory_margin=0.0)

    assert "let micro_batch_size change (" in text


def test_more_hosts_are_proposed_where_they_help() -> None:
    """A pinned pipeline of one stage shards its optimizer over more hosts."""
    job = tiny_job(2, own=Layout(dp=2, use_distributed_optimizer=True), batch=Batch(global_batch_size=64))
    pins = ("tp", "pp", "use_distributed_optimizer", "recompute", "micro_batch_size")
    job = tiny_job(2, own=job.own, batch=job.batch, pinned=pins)
    need = max(planned(job, tiny_measurements(tiny_cluster(2, 1))).own.memory.model_bytes)
    text = message(job, tiny_measurements(tiny_cluster(2, 1, memory_bytes=need - 1)), memory_margin=0.0)

    assert "use 4 hosts (4 ranks)" in text
    assert "The budget ended" not in text


def test_the_data_loaders_mask_is_proposed_to_be_left_out_where_that_helps() -> None:
    """A mask of 4096 x 4096 takes 16 MiB and does not fit; jobs without a mask fit."""
    job = tiny_job(4, model=tiny_model(**LONG), pinned=ALL_FIELDS)
    bare = changed_job(job, performance_flags=("--no-create-attention-mask-in-dataloader",))
    limit = max(planned(bare).own.memory.model_bytes)
    text = message(job, tiny_measurements(tiny_cluster(memory_bytes=limit)), memory_margin=0.0)

    assert "pass --no-create-attention-mask-in-dataloader (1 layout)" in text
    assert planned(bare, tiny_measurements(tiny_cluster(memory_bytes=limit)), memory_margin=0.0).own.fits


def test_expandable_segments_are_proposed_where_a_layout_then_fits() -> None:
    """The usual cache of 3 % does not fit on the GPUs, and 1.6 % with expandable segments does."""
    job = tiny_job(4, pinned=ALL_FIELDS)
    eased = replace(job, allocator_config="expandable_segments:True")
    need = max(planned(eased, gpus(1 << 50)).own.memory.need_bytes)
    text = message(job, gpus(need), memory_margin=0.0)

    assert "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (1 layout)" in text
    assert "without the allocator's cache), and a plan may use" in text
    assert planned(eased, gpus(need), memory_margin=0.0).own.fits


def test_an_own_layout_that_is_tight_is_called_so() -> None:
    """A plan replaces a tight layout by one that fits, and says that the own layout is tight by the cache."""
    need = planned(tiny_job(4), gpus(1 << 50)).own.memory
    found = planned(tiny_job(4), gpus(max(need.least_bytes)), memory_margin=0.0)

    assert "tight" == found.own.verdict
    assert found.chosen.fits
    assert any("without the allocator's cache), and a plan may use" in reason for reason in found.reasons)
    eased = planned(tiny_job(4, allocator_config="expandable_segments:True"), gpus(1 << 50)).own.memory
    helps = f"With PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True it needs about {bytes_text(max(eased.need_bytes))}."
    assert helps in found.reasons
    assert chosen_line(found).endswith("your own configuration is tight in memory")


def test_what_would_help_is_looked_for_until_the_budget_ends() -> None:
    """Without time neither pins nor hosts are tried, and the error says so."""
    job = tiny_job(4, pinned=ALL_FIELDS)
    text = message(job, tiny_measurements(tiny_cluster(memory_bytes=1 << 20)), budget_s=0.0)

    assert "What would help: use devices with" in text
    assert text.endswith("The budget ended before all ways to help were tried")


def test_nothing_measured_is_said() -> None:
    """Compute times of another tensor-parallel size do not help a job that is pinned to one."""
    job = tiny_job(4, pinned=("tp",))
    cases = (ComputeCase(tp=4, cp=1, micro_batch_size=1),)
    text = message(job, tiny_measurements(tiny_cluster(), cases))

    assert "no layout can be priced: compute was measured for tp4 cp1 mbs1" in text
