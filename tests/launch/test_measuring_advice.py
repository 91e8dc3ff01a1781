"""The groups and stages of shortlisted plans, and answers to question files."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from facts_for_tests import (
    drawn_cluster,
    memory_need,
    tiny_cluster,
    tiny_job,
    tiny_measurements,
    tiny_model,
)
from search.worlds import still

from pipette_launch.cost.communication.exchanges import exchanges, step_traffic
from pipette_launch.cost.compute.stages import ComputeTable
from pipette_launch.cost.layers.loads import Hiding
from pipette_launch.facts import Choice, Layout, files
from pipette_launch.facts.co_location import Domains
from pipette_launch.facts.messages import Advice, MeasuringQuestion
from pipette_launch.launch import measuring_advice
from pipette_launch.search.solve import SolveOptions

QUESTION = MeasuringQuestion(
    job=tiny_job(8),
    measurements=tiny_measurements(drawn_cluster(random.Random(5), hosts=4, devices=2)),
    budget_s=2.0,
)
EXPERTS = tiny_model(num_experts=4, moe_layer_freq=(1, 1, 1, 1))


def choice(layout: Layout, placement: tuple[int, ...] | None = None, peaks: tuple[int, ...] = ()) -> Choice:
    """One way to run a job, of which only layout, placement and peaks matter here."""
    return Choice(
        layout=layout,
        placement=placement or tuple(range(layout.world_size)),
        schedule=layout.schedule_name,
        step_time_s=1.0,
        breakdown_s={"compute": 1.0},
        memory=memory_need(peaks or (1,) * layout.pp, 10),
        bound_s=0.5,
    )


def domains(devices: int) -> Domains:
    """Hosts without NVLink between them."""
    return Domains.of(tiny_cluster(8, devices))


def test_experts_exchange_with_everyone_in_their_group() -> None:
    """Experts have groups of an all-to-all, and groups of their own replicas."""
    job = tiny_job(8, model=EXPERTS, performance_flags=("--moe-token-dispatcher-type alltoall",))
    some = choice(Layout(dp=8, ep=4, use_distributed_optimizer=True), (0, 4, 1, 5, 2, 6, 3, 7))
    found = {one.name: (one.kinds, one.groups) for one in measuring_advice.dimensions(job, [some], domains(1))}

    assert (("all_to_all",), ((0, 2, 4, 6), (1, 3, 5, 7))) == found["ep"]
    assert (("reduce_scatter", "all_gather"), ((0, 1), (2, 3), (4, 5), (6, 7))) == found["expert dp"]
    assert (("reduce_scatter", "all_gather"), (tuple(range(8)),)) == found["dp"]


def test_the_advice_measures_the_messages_that_the_prediction_sends() -> None:
    """In an NVLink domain of 8 slots, a token of HybridEP goes to several ranks, and with one slot to all domains."""
    flags = ("--moe-token-dispatcher-type flex", "--moe-flex-dispatcher-backend hybridep")
    job, layout = tiny_job(8, model=EXPERTS, performance_flags=flags), Layout(dp=8, ep=4)
    for devices in (1, 8):
        (found,) = [
            one for one in measuring_advice.dimensions(job, [choice(layout)], domains(devices)) if one.name == "ep"
        ]
        sent = exchanges(job, layout, Hiding(), devices)

        assert found.most_bytes == int(max(one.size_bytes for one in sent if one.group == "ep"))


def test_shards_are_exchanged_by_layers() -> None:
    """Each of two copies of Megatron-FSDP's shards over its own four ranks, a layer at a time."""
    flags = ("--use-megatron-fsdp", "--data-parallel-sharding-strategy optim_grads_params")
    job = tiny_job(8, performance_flags=(*flags, "--num-distributed-optimizer-instances 2"))
    found = measuring_advice.dimensions(job, [choice(Layout(dp=8, use_distributed_optimizer=True))], domains(1))
    (shards,) = [one for one in found if one.name == "shard"]

    assert {"all_gather", "reduce_scatter"} == set(shards.kinds)
    assert ((0, 1, 2, 3), (4, 5, 6, 7)) == shards.groups
    assert 4 * 49_984 == shards.most_bytes


def test_dimensions_of_several_plans_come_once() -> None:
    """Two plans that reduce over the same slots share a dimension; the dimensions of the first plan come first."""
    first = choice(Layout(tp=2, pp=2, dp=2))
    second = choice(Layout(tp=2, dp=4, use_distributed_optimizer=True))
    third = choice(Layout(tp=2, pp=2, dp=2, use_distributed_optimizer=True))
    found = measuring_advice.dimensions(tiny_job(8), [first, second, third], domains(1))

    assert ["dp", "tp", "dp"] == [one.name for one in found]
    assert ((0, 2), (1, 3), (4, 6), (5, 7)) == found[0].groups
    assert ("all_reduce", "reduce_scatter", "all_gather") == found[0].kinds
    assert ((0, 1), (2, 3), (4, 5), (6, 7)) == found[1].groups
    assert ((0, 2, 4, 6), (1, 3, 5, 7)) == found[2].groups


def test_dimensions_know_the_most_that_is_sent_in_one_piece() -> None:
    """A stage's gradients between replicas, activations between tensor ranks; where both are, the larger."""
    job = tiny_job(4)
    stages, tensors = choice(Layout(pp=2, dp=2)), choice(Layout(tp=2, dp=2))
    gradients = [max(dense for dense, _ in step_traffic(job, some.layout).gradient_bytes) for some in (stages, tensors)]
    activations = job.model.seq_length * job.model.hidden_size * job.model.dtype_bytes
    both = measuring_advice.dimensions(job, [stages, tensors], domains(1))
    alone = measuring_advice.dimensions(job, [tensors], domains(1))

    assert [((0, 1), (2, 3)), ((0, 2), (1, 3))] == [one.groups for one in both]
    assert [max(gradients[0], activations), gradients[1]] == [one.most_bytes for one in both]
    assert {"dp": gradients[1], "tp": activations} == {one.name: one.most_bytes for one in alone}


def test_the_best_two_plans_run_both_stages_that_decide() -> None:
    """Then each plan's fullest, slowest and middle stage; a layout that differs in nothing else is not run twice."""
    one, other, third = Layout(pp=2, dp=2), Layout(pp=4), Layout(pp=4, micro_batch_size=2)
    table = ComputeTable(tiny_job(4), tiny_measurements(tiny_cluster()))
    found = measuring_advice.stage_cases(
        tiny_job(4),
        [
            choice(one, peaks=(7, 5)),
            choice(other, peaks=(9, 1, 2, 3)),
            choice(one, (1, 0, 2, 3)),
            choice(third, peaks=(1, 1, 1, 2)),
        ],
        table,
    )

    # The last stage is the slowest, because of the head. In the last plan the last stage is also the fullest.
    assert [(one, 0), (one, 1), (other, 0), (other, 3), (third, 3), (third, 2), (other, 2), (third, 0)] == [
        (case.layout, case.pp_rank) for case in found
    ]
    # A rank that holds a layer of 49,984 parameters, the embedding and positions has 4 bytes for each of four copies.
    assert 16 * (49_984 + (256 + 32) * 64) == found[2].state_bytes


def test_the_user_own_plan_is_looked_at_too() -> None:
    """The answer begins with the chosen plan, and includes the user's own configuration."""
    found = measuring_advice.advise(QUESTION, SolveOptions(budget_s=0.5), time.monotonic)

    assert tuple(range(8)) in {group for one in found.dimensions for group in one.groups}
    assert 0 < len(found.dimensions) <= measuring_advice.MOST_DIMENSIONS
    assert QUESTION.job.own in {case.layout for case in found.stages}
    assert " shortlisted in " in found.words


def test_without_a_plan_the_answer_says_why() -> None:
    """If no plan fits, nothing more is measured, and the warm-up goes on."""
    small = tiny_measurements(tiny_cluster(2, 2, memory_bytes=1 << 10))
    found = measuring_advice.advise(
        MeasuringQuestion(job=tiny_job(4), measurements=small, budget_s=1.0), SolveOptions(budget_s=1.0), still
    )

    assert ((), ()) == (found.dimensions, found.stages)
    assert found.words.startswith("the measurements so far give no plan: ")


SETTINGS: dict[str, Any] = {"margin": 0.02, "memory_margin": 0.08, "seed": 0}


def test_a_question_file_is_answered(tmp_path: Path) -> None:
    """The answer has groups of the job's plans."""
    files.write(tmp_path / "question.json", replace(QUESTION, budget_s=0.5))
    measuring_advice.answer(tmp_path / "question.json", tmp_path / "advice.json", **SETTINGS)

    assert files.read(tmp_path / "advice.json", Advice).dimensions


def test_a_bad_question_is_answered_with_the_reason(tmp_path: Path) -> None:
    """The warm-up goes on at once. If its folder is gone, nothing happens."""
    (tmp_path / "question.json").write_text("{}")
    measuring_advice.answer(tmp_path / "question.json", tmp_path / "advice.json", **SETTINGS)
    measuring_advice.answer(tmp_path / "question.json", tmp_path / "gone" / "advice.json", **SETTINGS)

    found = files.read(tmp_path / "advice.json", Advice)
    assert found.words.startswith("there is no advice: FileFormatError: ")
    assert "question.json" in found.words
