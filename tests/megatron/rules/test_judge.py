"""The planner and the reader of a job judge the user's own layout by the same rules."""

from __future__ import annotations

import pytest
from megatron_lines import job

from pipette_launch.errors import MegatronError
from pipette_launch.megatron.rules.judge import broken_rule
from pipette_launch.megatron.rules.rules import Rules

TP, PP, EP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--expert-model-parallel-size"
CP, ETP = "--context-parallel-size", "--expert-tensor-parallel-size"
STAGES = "--num-virtual-stages-per-pipeline-rank"
ONE = "change one of them"

FSDP = "--use-megatron-fsdp --ckpt-format fsdp_dtensor"


@pytest.mark.parametrize(
    ("words", "flags", "reason", "remedy"),
    [
        (
            f"{TP} 8 --num-attention-heads 4",
            f"{TP} 8 and --num-attention-heads 4",
            "tp does not divide num_attention_heads=4",
            ONE,
        ),
        (
            f"{TP} 4 --num-attention-heads 12 --hidden-size 96 --group-query-attention --num-query-groups=6",
            f"{TP} 4 and --num-query-groups=6",
            "tp is no divisor or multiple of num_query_groups=6",
            ONE,
        ),
        (
            f"{CP} 8 --seq-length 24",
            f"{CP} 8 and --seq-length 24",
            "2*cp does not divide seq_length=24",
            f"--seq-length must be a multiple of 16; {ONE}",
        ),
        (
            f"{CP} 2 --seq-length 24 --bf16 --attention-backend unfused",
            f"{CP} 2 and --attention-backend unfused",
            "Transformer Engine's unfused attention has no context parallelism",
            "use --attention-backend auto, flash or fused",
        ),
        (
            f"{TP} 4 --sequence-parallel --seq-length 30",
            f"--sequence-parallel, {TP} 4 and --seq-length 30",
            "tp does not divide seq_length=30/cp for sequence parallelism",
            ONE,
        ),
        (f"{EP} 2", f"{EP} 2", "expert parallelism needs experts", "remove it, or add --num-experts"),
        (
            f"--num-experts 4 --disable-bias-linear {TP} 2",
            f"{TP} 2",
            "experts with tp > 1 need sequence parallelism",
            f"add --sequence-parallel or use {TP} 1",
        ),
        # ETP follows TP where no flag gives it.
        (
            f"--num-experts 4 {TP} 2 --sequence-parallel",
            f"{ETP} 2",
            "experts with biases need etp = 1 (--disable-bias-linear would free it)",
            f"use {ETP} 1",
        ),
        (
            f"{TP} 2 --tp-comm-overlap",
            f"{TP} 2",
            "--tp-comm-overlap needs sequence parallelism",
            f"add --sequence-parallel with {TP} above 1, or remove it",
        ),
        (
            "--global-batch-size 12 --micro-batch-size 2",
            "--global-batch-size 12 and --micro-batch-size 2",
            "micro_batch_size*dp does not divide global_batch_size=12",
            f"on 8 data-parallel ranks it must be a multiple of 16; {ONE}",
        ),
        (
            f"{PP} 4 {STAGES} 2 --global-batch-size 6",
            f"{PP} 4, {STAGES} 2, --global-batch-size 6 and --micro-batch-size 1",
            "interleaving needs at least pp micro-batches",
            "3 micro-batches do not fill groups of 4; change one, or give up virtual stages",
        ),
        (
            f"{PP} 4 {STAGES} 2 --microbatch-group-size-per-virtual-pipeline-stage 2",
            f"{PP} 4, {STAGES} 2 and --microbatch-group-size-per-virtual-pipeline-stage 2",
            "interleaving needs groups of at least pp micro-batches",
            "groups of 2 are too small; change one, or give up virtual stages",
        ),
        (
            f"--use-torch-fsdp2 --untie-embeddings-and-output-weights --no-gradient-accumulation-fusion {PP}=2",
            f"{PP}=2",
            "--use-torch-fsdp2 needs pp = 1",
            "remove one",
        ),
    ],
)
def test_the_planner_and_the_reader_judge_alike(words: str, flags: str, reason: str, remedy: str) -> None:
    """A plan counts the reason and keeps the layout out; elsewhere the user gets his flags, the reason and a remedy."""
    planned = job(words, for_prediction=True, for_planning=True)
    broken = broken_rule(Rules.of(planned, device_kind="cuda"), planned.own)

    assert broken is not None
    assert reason == broken.reason
    with pytest.raises(MegatronError) as error:
        job(words, for_prediction=True)
    assert f"{flags}: {reason}; {remedy}" == str(error.value)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            "--recompute-granularity selective --recompute-modules mlp",
            "recompute of mlp hangs where layers have biases",
        ),
        (
            f"{FSDP} --use-distributed-optimizer --data-parallel-sharding-strategy optim_grads {TP} 8",
            "Megatron-FSDP adds gradients twice that one rank holds alone",
        ),
    ],
)
def test_what_starts_and_goes_wrong_later_is_predicted_with_a_note(words: str, reason: str) -> None:
    """Megatron does not stop, so that its memory and time can be told; no plan has it."""
    asked = job(words, for_prediction=True)
    broken = broken_rule(Rules.of(asked, device_kind="cuda"), asked.own)

    assert broken is not None
    assert reason == broken.reason
    assert reason in asked.notes[-1]
    assert asked.notes[-1].endswith("; Megatron itself does not stop")


def test_an_error_without_flags_begins_with_the_reason() -> None:
    """A flag that stands in the reason is not repeated."""
    with pytest.raises(MegatronError) as error:
        job("--use-megatron-fsdp")

    assert ("--use-megatron-fsdp needs the distributed optimizer; add --use-distributed-optimizer or remove it") == str(
        error.value
    )


def test_flags_that_no_layout_mends_are_refused_for_plans_too() -> None:
    """Overlapped experts allow one depth of multi-token prediction (TransformerConfig)."""
    with pytest.raises(MegatronError) as error:
        job(
            "--bf16 --position-embedding-type rope --moe-token-dispatcher-type alltoall --num-experts 8",
            f"{EP} 2 --overlap-moe-expert-parallel-comm --mtp-num-layers 2",
            for_planning=True,
        )

    assert (
        "--overlap-moe-expert-parallel-comm and --mtp-num-layers 2: allows one depth of multi-token prediction; "
        "change one of them"
    ) == str(error.value)
