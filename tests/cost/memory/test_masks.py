"""The attention mask of the data loader: its memory on each stage, and the advice to make none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cost.memory.test_peak import FULL_UNIFORM, job, with_batch
from facts_for_tests import changed_job, tiny_job, tiny_model

from pipette_launch.cost.memory.peak import NO_MASK, mask_notes, peak_memory_bytes, without_mask
from pipette_launch.facts import Batch, Job, Layout, Recompute


def test_only_the_ends_of_the_pipeline_load_a_mask() -> None:
    """32 * 32 bytes on the first and the last rank, during a forward pass."""
    assert [part.mask for part in peak_memory_bytes(with_batch(8), Layout(pp=4))] == [1024, 0, 0, 1024]


def test_full_recompute_keeps_the_mask_of_every_live_microbatch() -> None:
    """Units are called again with it: four micro-batches on the first of four ranks, one on the last."""
    parts = peak_memory_bytes(with_batch(8), Layout(pp=4, recompute=FULL_UNIFORM))

    assert [part.kept_masks for part in parts] == [4 * 1024, 0, 0, 1024]
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
        kept = (one.activations + one.kept_masks) // num_live * (num_live - 1)

        assert one.total - one.static - one.buffers == kept + (loaded_mib << 20)


@pytest.mark.parametrize("flag", ["--no-create-attention-mask-in-dataloader", "--dataloader-inter-document-masking"])
def test_no_mask_is_loaded_that_is_not_made(flag: str) -> None:
    """Megatron makes none with either flag."""
    this = changed_job(job(seq_length=8192), performance_flags=(flag,), megatron_version="0.19.0")
    parts = peak_memory_bytes(this, Layout(cp=4, recompute=FULL_UNIFORM))

    assert [(0, 0)] == [(one.mask, one.loading) for one in parts]


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Layout(pp=2, vpp=2), [3, 1]),
        (Layout(pp=4, layers_per_chunk=(2, 1, 1, 0), chunks_after_mtp=1), [4, 0, 2, 1]),
        (Layout(pp=2, layers_per_chunk=(4, 0), chunks_after_mtp=1), [2, 1]),
    ],
)
def test_recompute_keeps_the_mask_wherever_it_is_loaded(layout: Layout, expected: list[int]) -> None:
    """On both ends, and on the stage of multi-token prediction."""
    this = replace(job(mtp_num_layers=1 if layout.chunks_after_mtp else 0), batch=Batch(global_batch_size=8))
    parts = peak_memory_bytes(this, replace(layout, recompute=FULL_UNIFORM))

    assert [1024 * live for live in expected] == [one.kept_masks for one in parts]


RESET = "--reset-attention-mask"


def mask_job(*flags: str, **changes: object) -> Job:
    """A small model with sequences of 64 Ki tokens, whose mask has 4 GiB."""
    model = {
        "params_dtype": "bf16",
        "transformer_impl": "transformer_engine",
        "attention_backend": "flash",
        "seq_length": 1 << 16,
        "max_position_embeddings": 1 << 16,
    }
    return changed_job(
        tiny_job(model=tiny_model(**(model | changes))),
        performance_flags=flags,
        batch=Batch(global_batch_size=16),
    )


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Layout(), "4.00 GiB a micro-batch, goes whole to the device: with the mask the tensors of stage 0 need "),
        (Layout(cp=8, micro_batch_size=2), "8.00 GiB a micro-batch, goes whole to the device before context parallel"),
        (Layout(pp=2, cp=2), "4.00 GiB a micro-batch, goes whole to the device before context parallelism cuts it"),
    ],
)
def test_a_large_mask_is_named(layout: Layout, expected: str) -> None:
    """Its bytes, the stage, the flag, and 8 bytes an entry of host memory for each worker of a data loader."""
    (note,) = mask_notes(mask_job(), layout)

    assert f"The data loader's attention mask, {expected}" in note
    assert f"{NO_MASK} leaves the mask out" in note
    assert "each of the 2 workers of a data loader needs 32.00 GiB of host memory" in note


@pytest.mark.parametrize(
    "small",
    [
        mask_job(NO_MASK),
        mask_job(seq_length=512),
        mask_job("--dataloader-inter-document-masking"),
        mask_job(num_layers=64, seq_length=256),
    ],
)
def test_a_mask_that_adds_nothing_is_not_named(small: Job) -> None:
    """Data loaders that make none, and short sequences."""
    newest = changed_job(small, megatron_version="0.19.0")

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
    assert is_read == (without_mask(mask_job(*flags, **changes)) is None)


def test_a_job_without_a_mask_has_none_to_leave_out() -> None:
    """Nothing is proposed twice."""
    bare = without_mask(mask_job())

    assert bare
    assert not bare.options.create_attention_mask_in_dataloader
    assert without_mask(bare) is None


@pytest.mark.parametrize(("flags", "expected"), [(("--sft",), True), (("--sft", NO_MASK), False), ((), False)])
def test_a_data_set_that_makes_no_mask_is_named(flags: tuple[str, ...], expected: bool) -> None:
    """The data set for supervised fine-tuning asserts that no mask is made."""
    notes = mask_notes(mask_job(*flags, seq_length=512), Layout())

    assert expected == any("With --sft the first sample ends the job" in note for note in notes)
