"""The split of memory by kind counts every byte once."""

from __future__ import annotations

import pytest
from facts_for_tests import tiny_job, tiny_model

from pipette_launch.cost.memory.overhead import overhead_of
from pipette_launch.cost.memory.peak import peak_memory_bytes
from pipette_launch.facts import Batch, Job, Layout, Recompute
from pipette_launch.planning.predict import count_stages

FULL = Recompute(granularity="full", method="uniform", num_layers=1)


def job(layout: Layout, **changes: object) -> Job:
    """Return a job with this layout."""
    return tiny_job(layout.world_size, own=layout, batch=Batch(global_batch_size=8), model=tiny_model(**changes))


JOBS = [
    job(Layout(dp=2)),
    job(Layout(pp=4)),
    job(Layout(tp=2, pp=2, vpp=2, sequence_parallel=True, use_distributed_optimizer=True)),
    job(Layout(pp=2, recompute=FULL), params_dtype="bf16"),
    job(Layout(ep=2, dp=2), num_experts=4, moe_layer_freq=(1, 1, 1, 1)),
]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("one", JOBS, ids=lambda one: one.own.words())
def test_overhead_is_what_is_added_to_the_model(one: Job, kind: str) -> None:
    """A stage needs the model's peak plus the overhead; CPUs have no overhead."""
    overhead = overhead_of(one, one.own, device_kind=kind)
    stages = count_stages(one, range(one.own.pp), overhead).stages

    assert tuple(range(one.own.pp)) == tuple(stage.pp_rank for stage in stages)
    assert one.own.stage_layers(4) == tuple(stage.num_layers for stage in stages)
    for stage, parts in zip(stages, peak_memory_bytes(one, one.own), strict=True):
        assert (parts.total, overhead.device_peak_bytes(parts.total)) == (stage.model_peak_bytes, stage.peak_bytes)
        assert (stage.parts_bytes["overhead"] == 0) == (kind == "cpu")


def test_only_the_stages_that_were_asked_for_are_told() -> None:
    """The stages come in the requested order."""
    one = job(Layout(pp=4))
    stages = count_stages(one, (2,), overhead_of(one, one.own, device_kind="cpu")).stages

    assert [2] == [stage.pp_rank for stage in stages]


def test_stages_that_peak_in_the_optimizer_are_named() -> None:
    """With one short sequence and torch's own Adam, the optimizer's temporaries make the peak."""
    one = job(Layout(pp=4), seq_length=1, vocab_size=1, make_vocab_size_divisible_by=1)
    overhead = overhead_of(one, one.own, device_kind="cpu")

    assert (0, 1, 2, 3) == count_stages(one, range(4), overhead).stepping
