"""The planner and the reader of a job judge the user's own layout by the same rules."""

from __future__ import annotations

import pytest
from megatron_lines import job

from pipette_launch.errors import MegatronError
from pipette_launch.facts import Job
from pipette_launch.megatron.rules.broken import Rules
from pipette_launch.megatron.rules.judge import broken_rule

TP, PP, EP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--expert-model-parallel-size"
CP, ETP = "--context-parallel-size", "--expert-tensor-parallel-size"
STAGES = "--num-virtual-stages-per-pipeline-rank"
ONE = "change one of them"

DENSE_STAGE = (
    f"--position-embedding-type rope --num-layers 4 --num-experts 8 --mtp-num-layers 1 --moe-aux-loss-coeff 1e-2 {PP} 2"
)
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
            "tp is not a divisor or multiple of num_query_groups=6",
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
            f"--use-megatron-fsdp --ckpt-format fsdp_dtensor --use-distributed-optimizer {PP}=2",
            f"{PP}=2",
            "--use-megatron-fsdp needs pp = 1",
            "remove one",
        ),
    ],
)
def test_the_planner_and_the_reader_judge_alike(words: str, flags: str, reason: str, remedy: str) -> None:
    """A plan counts the reason and drops the layout; the reader's error adds the user's flags and a remedy."""
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
            "recompute of mlp hangs if layers have biases",
        ),
        (
            f"{FSDP} --use-distributed-optimizer --data-parallel-sharding-strategy optim_grads {TP} 8",
            "Megatron-FSDP adds gradients twice if one rank holds them alone",
        ),
        (
            f"--num-experts 8 --disable-bias-linear --sequence-parallel {TP} 2 --expert-tensor-parallel-size 1",
            "before 0.19 expert gradients are not summed over tp if ep = 1 and etp is not tp",
        ),
        (
            f"{DENSE_STAGE} --moe-layer-freq [0]*2+[1]*2",
            "before 0.17, auxiliary losses with multi-token prediction need experts on each pipeline rank",
        ),
    ],
)
def test_what_starts_and_goes_wrong_later_is_predicted_with_a_note(words: str, reason: str) -> None:
    """Megatron starts with the layout, so it is predicted with a note, but no plan has it."""
    asked = job(words, for_prediction=True)
    broken = broken_rule(Rules.of(asked, device_kind="cuda"), asked.own)

    assert broken is not None
    assert reason == broken.reason
    assert reason in asked.notes[-1]
    assert asked.notes[-1].endswith("; Megatron itself does not stop")


@pytest.mark.parametrize(
    ("words", "version"),
    [
        ("--moe-layer-freq [0]*1+[1]*3", "0.16.1"),
        ("--moe-layer-freq [0]*2+[1]*2", "0.17.1"),
        ("--moe-layer-freq [0]*2+[1]*2 --num-layers-per-virtual-pipeline-stage 1", "0.16.1"),
    ],
)
def test_ranks_that_report_equal_tables_of_losses_are_planned(words: str, version: str) -> None:
    """Each pipeline rank has experts, in one of its chunks, or the release makes tables of one length."""
    asked = job(f"{DENSE_STAGE} {words}", version=version)

    assert broken_rule(Rules.of(asked, device_kind="cuda"), asked.own) is None


def test_an_error_without_flags_begins_with_the_reason() -> None:
    """The error does not repeat a flag that its reason contains."""
    with pytest.raises(MegatronError) as error:
        job("--use-megatron-fsdp")

    assert ("--use-megatron-fsdp needs the distributed optimizer; add --use-distributed-optimizer or remove it") == str(
        error.value
    )


def test_flags_that_no_layout_mends_are_refused_for_plans_too() -> None:
    """TransformerConfig allows overlapped experts one depth of multi-token prediction, under every layout."""
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


INSTANCES = "--num-distributed-optimizer-instances"
GRAPHS = "--attention-dropout 0 --hidden-dropout 0 --cuda-graph-impl"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
RAMP = "--train-iters 0 --train-samples 1000 --rampup-batch-size"
NO_CHECK = "--no-check-for-nan-in-loss-and-grad"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
LOW = "--fp8-format e4m3 --fp8-recipe tensorwise --first-last-layers-bf16 --num-layers-at-start-in-bf16 3"
ENGINE = "--cuda-graph-impl transformer_engine"
EXPERTS = "--num-experts 8 --disable-bias-linear --moe-token-dispatcher-type alltoall"
WIDE = f"{EXPERTS} --moe-ffn-hidden-size 96 --ffn-hidden-size 250 {TP} 4 --sequence-parallel"
OPTIMIZER = "--use-distributed-optimizer"
OVERLAP = f"{EXPERTS} --bf16 --overlap-moe-expert-parallel-comm"
CASES = {
    "instances of the optimizer": [
        ("0.16.1", f"{EXPERTS} {OPTIMIZER} {INSTANCES} 2 {EP} 8", f"{EXPERTS} {OPTIMIZER} {INSTANCES} 2 {EP} 4"),
        ("0.20.0", f"{EXPERTS} {OPTIMIZER} {INSTANCES} 4 {EP} 4", f"{EXPERTS} {OPTIMIZER} {INSTANCES} 2 {EP} 4"),
        ("0.16.1", f"{OPTIMIZER} {INSTANCES} 4 {TP} 4", f"{OPTIMIZER} {INSTANCES} 2 {TP} 4"),
        ("0.16.1", f"{INSTANCES} 2", f"{OPTIMIZER} {INSTANCES} 2"),
    ],
    "sequence parallelism": [
        ("0.16.1", f"--tp-comm-overlap {TP} 2", f"--tp-comm-overlap {TP} 2 --sequence-parallel"),
        ("0.16.1", "--tp-comm-overlap", f"--tp-comm-overlap {TP} 2 --sequence-parallel"),
        ("0.18.0", "--tp-comm-overlap --sequence-parallel", f"--tp-comm-overlap {TP} 4 --sequence-parallel"),
    ],
    "overlapped experts": [
        ("0.16.1", f"{OVERLAP} {EP} 2 {PP} 4", f"{OVERLAP} {EP} 2 {PP} 4 {STAGES} 2"),
        ("0.16.1", f"{OVERLAP} {EP} 2 {FULL}", f"{OVERLAP} {EP} 2"),
        ("0.16.1", OVERLAP, f"{OVERLAP} {EP} 8"),
        ("0.17.1", f"{OVERLAP} {EP} 2 {SELECTIVE} moe", f"{OVERLAP} {EP} 2 {SELECTIVE} core_attn"),
    ],
    "virtual stages": [
        (
            "0.16.1",
            f"{PP} 4 --overlap-p2p-communication-warmup-flush",
            f"{PP} 4 {STAGES} 2 --overlap-p2p-communication-warmup-flush",
        ),
        (
            "0.20.0",
            f"{PP} 4 {STAGES} 2 --overlap-p2p-communication-warmup-flush --no-overlap-p2p-communication",
            f"{PP} 4 {STAGES} 2 --no-overlap-p2p-communication",
        ),
        ("0.16.1", "--overlap-p2p-communication-warmup-flush", ""),
        ("0.16.1", f"{RAMP} 4 4 100 {PP} 4 {STAGES} 2", f"{RAMP} 8 8 100 {PP} 4 {STAGES} 2"),
        ("0.17.1", f"{RAMP} 8 4 100 {PP} 4 {STAGES} 2", f"{RAMP} 8 4 100 {PP} 4"),
        ("0.16.1", f"{RAMP} 4 4 100 {PP} 4 {STAGES} 2", f"{RAMP} 4 4 100 {PP} 4"),
    ],
    "widths": [
        ("0.16.1", f"{WIDE} --moe-layer-freq 2", WIDE),
        ("0.20.0", f"{WIDE} --moe-layer-freq ([1]*7+[0]*1)", WIDE),
        ("0.16.1", f"--ffn-hidden-size 250 {TP} 4", f"--ffn-hidden-size 252 {TP} 4"),
        ("0.18.0", f"{WIDE} --moe-ffn-hidden-size 90", f"{WIDE} --moe-ffn-hidden-size 92"),
    ],
    "kinds of exchange": [
        ("0.16.1", f"{CP} 2 --cp-comm-type p2p a2a", "--cp-comm-type p2p a2a"),
        ("0.16.1", f"{CP} 2 --cp-comm-type allgather", f"{CP} 2 --cp-comm-type all_gather"),
        ("0.20.0", f"{CP} 2 --cp-comm-type ring", "--cp-comm-type ring"),
        ("0.18.0", f"{CP} 2 --cp-comm-type p2p p2p p2p", f"{CP} 2 --cp-comm-type {' '.join(['p2p'] * 8)}"),
        (
            "0.16.1",
            (
                f"{CP} 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2 --group-query-attention "
                f"--num-query-groups 1"
            ),
            f"{CP} 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
        ),
        ("0.19.0", f"{CP} 2 --attention-backend flash --batch-invariant-mode", f"{CP} 2 --attention-backend flash"),
    ],
    "rank order": [
        ("0.16.1", f"--use-tp-pp-dp-mapping {PP} 2 {CP} 2", f"--use-tp-pp-dp-mapping {PP} 2 {TP} 2"),
        ("0.20.0", f"--use-tp-pp-dp-mapping {PP} 4 {CP} 2", f"--use-tp-pp-dp-mapping {CP} 4"),
    ],
    "checkpoints": [
        (
            "0.16.1",
            f"{OPTIMIZER} --ckpt-format torch --disable-gloo-process-groups",
            "--ckpt-format torch --disable-gloo-process-groups",
        ),
        (
            "0.18.0",
            f"{OPTIMIZER} --ckpt-format torch --disable-gloo-process-groups",
            f"{OPTIMIZER} --ckpt-format torch",
        ),
    ],
    "FP8": [
        (
            "0.16.1",
            f"{LOW} {PP} 4",
            f"{LOW} {PP} 2",
        ),
    ],
    "experts": [
        ("0.16.1", f"{EXPERTS} --moe-token-dispatcher-type flex", f"{EXPERTS} --moe-token-dispatcher-type flex {EP} 2"),
        (
            "0.18.0",
            f"{EXPERTS} --moe-token-dispatcher-type flex",
            f"{EXPERTS} --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep",
        ),
        (
            "0.16.1",
            f"{EXPERTS} {EP} 2 {GRAPHS} local",
            f"{EXPERTS} {EP} 2 {GRAPHS} local --moe-pad-experts-for-cuda-graph-inference",
        ),
        ("0.17.1", f"{EXPERTS} {EP} 2 {GRAPHS} local", f"{EXPERTS} {GRAPHS} local"),
    ],
    "CUDA graphs": [
        ("0.16.1", f"{GRAPHS} local {FULL}", f"{GRAPHS} local --cuda-graph-scope full_iteration {NO_CHECK} {FULL}"),
        ("0.18.0", f"{GRAPHS} transformer_engine {FULL}", f"{GRAPHS} full_iteration {NO_CHECK} {FULL}"),
        (
            "0.16.1",
            f"{ENGINE} {SELECTIVE} core_attn",
            f"{GRAPHS} transformer_engine {SELECTIVE} core_attn",
        ),
        (
            "0.18.0",
            f"{EXPERTS} {EP} 2 {ENGINE} --cuda-graph-modules attn moe_router {SELECTIVE} moe",
            f"{EXPERTS} {EP} 2 {ENGINE} --cuda-graph-modules attn {SELECTIVE} moe",
        ),
    ],
    "other optimizers": [
        ("0.16.1", "--optimizer sgd --use-distributed-optimizer", "--optimizer sgd"),
        ("0.17.1", "--optimizer muon --overlap-grad-reduce", "--optimizer dist_muon --overlap-grad-reduce"),
        ("0.16.1", "--optimizer dist_muon --overlap-grad-reduce", "--optimizer dist_muon"),
        ("0.17.1", f"--optimizer muon {OPTIMIZER}", "--optimizer muon"),
        ("0.18.0", f"--optimizer sgd {OPTIMIZER}", f"--optimizer muon {OPTIMIZER} --overlap-grad-reduce"),
    ],
}


def read(words: str, version: str) -> Job:
    """Read a job for a prediction; jobs with experts or graphs get a shape that suits them."""
    return job(words, version=version, for_prediction=True)


@pytest.mark.parametrize(
    ("version", "refused", "taken"), [case for cases in CASES.values() for case in cases], ids=lambda text: text[:60]
)
def test_refusals_are_megatrons(version: str, refused: str, taken: str) -> None:
    """Each line is refused; the line beside it meets the rule and is accepted."""
    assert read(taken, version).own
    with pytest.raises(MegatronError):
        read(refused, version)


NVFP4 = "--fp4-format e2m1"


@pytest.mark.parametrize(
    ("words", "device", "capability", "message"),
    [
        (
            "--fp8-format hybrid",
            "A100-80GB",
            8,
            "--fp8-format hybrid: A100-80GB does not compute in FP8, which needs compute capability 8.9; remove",
        ),
        ("--fp8-format e4m3", "NVIDIA GeForce RTX 3090", None, "RTX 3090 does not compute in FP8, which"),
        ("--fp8-format e4m3", "V100-SXM2-32GB", 7, "V100-SXM2-32GB does not compute in FP8"),
        ("--fp8-format e4m3", "mine", 7, "mine does not compute in FP8"),
        (
            "--fp8-format e4m3 --fp8-recipe mxfp8",
            "NVIDIA H100 80GB HBM3",
            None,
            "--fp8-format e4m3 and --fp8-recipe mxfp8: NVIDIA H100 80GB HBM3 does not compute in FP8 (mxfp8), which",
        ),
        (
            "--fp8-format e4m3 --fp8-recipe blockwise",
            "L40S",
            8.9,
            "FP8 (blockwise), which needs compute capability 9",
        ),
        (NVFP4, "H200-SXM", 9, "--fp4-format e2m1: H200-SXM does not compute in FP4, which needs"),
    ],
)
def test_a_format_that_the_chip_lacks_is_refused(words: str, device: str, capability: float, message: str) -> None:
    """The error has flags, device, the needed compute capability and a remedy."""
    with pytest.raises(MegatronError) as caught:
        job(words, for_prediction=True, device_name=device, capability=capability)

    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("words", "device", "capability"),
    [
        ("--fp8-format hybrid", "H100-SXM", 9),
        ("--fp8-format hybrid", "L40S", 8.9),
        ("--fp8-format hybrid", "NVIDIA GeForce RTX 4090", None),
        ("--fp8-format hybrid", "unknown", None),
        ("--fp8-format hybrid", "mine, like Ada", 8.9),
        ("--fp8-format e4m3 --fp8-recipe blockwise", "H20-SXM", 9),
        ("--fp8-format e4m3 --fp8-recipe mxfp8", "GB200-NVL72", 10),
        (NVFP4, "B200", 10),
        ("--fp8-recipe mxfp8", "A100-80GB", 8),
    ],
)
def test_other_formats_are_read(words: str, device: str, capability: float) -> None:
    """Formats that the chip computes are accepted, and any format on an unknown GPU."""
    assert job(words, for_prediction=True, device_name=device, capability=capability).model.num_layers
