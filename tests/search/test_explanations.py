"""Reasons and notes are sentences that name figures, and nothing is left out in silence."""

from __future__ import annotations

from dataclasses import replace

from facts_for_tests import tiny_cluster, tiny_job, tiny_measurements, tiny_model, with_one_full
from search.worlds import on_gpus, pipeline_job, planned, two_racks

from pipette_launch.cost.step.predictor import NOT_MODELLED
from pipette_launch.facts import Layout
from pipette_launch.report.figures import NOT_MODELLED as PREFIX


def test_all_is_said_in_sentences() -> None:
    """Each reason and each note ends as a sentence does."""
    plan = planned(tiny_job(4, notes=("Something is pinned.",)))

    assert all(sentence.endswith(".") and sentence[0] == sentence[0].upper() for sentence in plan.notes)
    assert all(sentence.endswith(".") for sentence in plan.reasons)
    assert plan.notes[0] == "Something is pinned."


def test_what_is_not_modelled_is_listed() -> None:
    """Every term that the cost model leaves out is in the plan, marked so that the screen can count it."""
    plan = planned(tiny_job(4))

    assert sum(note.startswith(PREFIX) for note in plan.notes) == len(NOT_MODELLED)


def test_another_layout_draws_other_random_numbers() -> None:
    """A change of tensor or pipeline degree is told; a change of place alone is not."""
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
    assert any("pads the vocabulary to 130 rows in place of 129." in note for note in plan.notes)


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
