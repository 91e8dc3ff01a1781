"""The data loader's mask is named where it makes a stage larger, with the flag that leaves it out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from facts_for_tests import tiny_job, tiny_model

from pipette_launch.cost.memory.attention_mask import NO_MASK, mask_notes, without_mask
from pipette_launch.facts import Batch, Job, Layout

RESET = "--reset-attention-mask"


def job(*flags: str, **changes: object) -> Job:
    """A small model with sequences of 64 Ki tokens, whose mask has 4 GiB."""
    model = {
        "params_dtype": "bf16",
        "transformer_impl": "transformer_engine",
        "attention_backend": "flash",
        "seq_length": 1 << 16,
        "max_position_embeddings": 1 << 16,
    }
    return replace(
        tiny_job(model=tiny_model(**(model | changes))),
        performance_flags=flags,
        batch=Batch(global_batch_size=16),
    )


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Layout(), "4.00 GiB a micro-batch, goes whole to the device: with it the tensors of stage 0 need "),
        (Layout(cp=8, micro_batch_size=2), "8.00 GiB a micro-batch, goes whole to the device before context parallel"),
        (Layout(pp=2, cp=2), "4.00 GiB a micro-batch, goes whole to the device before context parallelism cuts it"),
    ],
)
def test_a_large_mask_is_named(layout: Layout, expected: str) -> None:
    """Its bytes, the stage, the flag, and 8 bytes an entry of host memory for each worker of a data loader."""
    (note,) = mask_notes(job(), layout)

    assert f"The data loader's attention mask, {expected}" in note
    assert f"{NO_MASK} leaves it out" in note
    assert "each of the 2 workers of a data loader needs 32.00 GiB of host memory" in note


@pytest.mark.parametrize(
    "small",
    [job(NO_MASK), job(seq_length=512), job("--dataloader-inter-document-masking"), job(num_layers=64, seq_length=256)],
)
def test_a_mask_that_adds_nothing_is_not_named(small: Job) -> None:
    """Data loaders that make none, and short sequences."""
    newest = replace(small, megatron_version="0.19.0")

    assert mask_notes(newest, Layout(tp=2, cp=2)) == ()


@pytest.mark.parametrize(
    ("changes", "flags", "is_read"),
    [
        ({}, (), False),
        ({}, (RESET,), False),
        ({"attention_backend": "unfused"}, (), False),
        ({"attention_backend": "unfused"}, (RESET,), True),
        ({"transformer_impl": "local", "attention_backend": "local"}, (RESET,), True),
    ],
)
def test_the_flag_is_advised_where_no_attention_reads_the_mask(
    changes: dict[str, object], flags: tuple[str, ...], is_read: bool
) -> None:
    """Unfused attention reads the documents that a mask separates; it needs no other mask than the causal one."""
    assert is_read == (without_mask(job(*flags, **changes)) is None)


def test_a_job_without_a_mask_has_none_to_leave_out() -> None:
    """Nothing is proposed twice."""
    bare = without_mask(job())

    assert bare
    assert (NO_MASK,) == bare.performance_flags
    assert without_mask(bare) is None


@pytest.mark.parametrize(
    ("flags", "version", "expected"),
    [
        (("--sft",), "0.16.1", True),
        (("--sft",), "0.20.0", True),
        (("--sft",), "0.15.0", False),
        (("--sft", NO_MASK), "0.16.1", False),
        ((), "0.16.1", False),
    ],
)
def test_a_data_set_that_makes_no_mask_is_named(flags: tuple[str, ...], version: str, expected: bool) -> None:
    """The one for supervised fine-tuning asserts so from 0.16 on, whatever the length of its samples."""
    short = replace(job(*flags, seq_length=512), megatron_version=version)
    notes = mask_notes(short, Layout())

    assert expected == any("With --sft the first sample ends the job" in note for note in notes)
