"""The split that users see holds every byte once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from facts_for_tests import tiny_job, tiny_model

from pipette_launch.cost.memory import peak_memory_bytes
from pipette_launch.cost.overhead import overhead_of
from pipette_launch.facts import Batch, Job, Layout, Recompute
from pipette_launch.forecast.stages import closed_form, peaks_in_optimizer, split, steps_highest

FULL = Recompute(granularity="full", method="uniform", num_layers=1)


def job(layout: Layout, **changes: object) -> Job:
    """A job of this layout."""
    return tiny_job(layout.world_size, own=layout, batch=Batch(global_batch_size=8), model=tiny_model(**changes))


JOBS = [
    job(Layout(dp=2)),
    job(Layout(pp=4)),
    job(Layout(tp=2, pp=2, vpp=2, sequence_parallel=True, use_distributed_optimizer=True)),
    job(Layout(pp=2, recompute=FULL), params_dtype="bf16"),
    job(Layout(ep=2, dp=2), num_experts=4, moe_layer_freq=(1, 1, 1, 1)),
]


@pytest.mark.parametrize("one", JOBS, ids=lambda one: one.own.words())
def test_the_parts_are_the_peak(one: Job) -> None:
    """The kinds sum to what the memory model has as the peak, and none is negative."""
    for parts in peak_memory_bytes(one, one.own):
        assert parts.total == sum(split(parts).values())
        assert min(split(parts).values()) >= 0


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("one", JOBS, ids=lambda one: one.own.words())
def test_overhead_is_what_is_added_to_the_model(one: Job, kind: str) -> None:
    """Each stage's device holds the model's peak and the overhead; on CPU there is none."""
    overhead = overhead_of(one, one.own, device_kind=kind)
    stages = closed_form(one, range(one.own.pp), overhead)

    assert tuple(range(one.own.pp)) == tuple(stage.pp_rank for stage in stages)
    assert one.own.stage_layers(4) == tuple(stage.num_layers for stage in stages)
    for stage, parts in zip(stages, peak_memory_bytes(one, one.own), strict=True):
        assert (parts.total, overhead.device_peak_bytes(parts.total)) == (stage.model_peak_bytes, stage.peak_bytes)
        assert (stage.parts_bytes["overhead"] == 0) == (kind == "cpu")


def test_only_the_stages_that_were_asked_for_are_told() -> None:
    """In the order of the question."""
    one = job(Layout(pp=4))
    stages = closed_form(one, (2,), overhead_of(one, one.own, device_kind="cpu"))

    assert [2] == [stage.pp_rank for stage in stages]


def test_at_an_optimizer_peak_no_activation_lives() -> None:
    """The optimizer's temporaries take the place of activations and logits, and the peak stays the same."""
    (parts,) = peak_memory_bytes(job(Layout()), Layout())
    stepping = replace(parts, optimizer_step=parts.total)

    assert steps_highest(stepping)
    assert (parts.optimizer + parts.total, 0, 0) == tuple(
        split(stepping)[kind] for kind in ("optimizer", "activations", "logits")
    )
    assert stepping.total == sum(split(stepping).values())
    assert not steps_highest(replace(parts, optimizer_step=0))


def test_stages_that_peak_in_the_optimizer_are_named() -> None:
    """A batch of one short sequence under torch's own Adam: temporaries of 4 bytes a parameter are the most."""
    one = job(Layout(pp=4), seq_length=1, vocab_size=1, make_vocab_size_divisible_by=1)

    assert [0, 1, 2, 3] == list(peaks_in_optimizer(one, range(4)))
