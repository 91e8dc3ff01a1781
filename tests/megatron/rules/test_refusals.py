"""Layouts that Megatron's own checks refuse, beside the nearest ones that they take, by release.

The contract of `tests/contract` compares many more with Megatron's own parser and configuration.
"""

from __future__ import annotations

import pytest
from megatron_lines import job

from pipette_launch.errors import MegatronError
from pipette_launch.facts import Job

TP, PP, EP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--expert-model-parallel-size"
CP, ETP = "--context-parallel-size", "--expert-tensor-parallel-size"
STAGES = "--num-virtual-stages-per-pipeline-rank"
EXPERTS = "--num-experts 8 --disable-bias-linear --moe-token-dispatcher-type alltoall"
WIDE = f"{EXPERTS} --moe-ffn-hidden-size 96 --ffn-hidden-size 250 {TP} 4 --sequence-parallel"
OPTIMIZER = "--use-distributed-optimizer"
INSTANCES = "--num-distributed-optimizer-instances"
GRAPHS = "--attention-dropout 0 --hidden-dropout 0 --cuda-graph-impl"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
RAMP = "--train-iters 0 --train-samples 1000 --rampup-batch-size"
NO_CHECK = "--no-check-for-nan-in-loss-and-grad"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
LOW = "--fp8-format e4m3 --fp8-recipe tensorwise --first-last-layers-bf16 --num-layers-at-start-in-bf16 3"
ENGINE = "--cuda-graph-impl transformer_engine"
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
        ("0.14.0", "--tp-comm-overlap", f"--tp-comm-overlap {TP} 2 --sequence-parallel"),
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
        ("0.14.0", "--overlap-p2p-communication-warmup-flush", ""),
        ("0.16.1", f"{RAMP} 4 4 100 {PP} 4 {STAGES} 2", f"{RAMP} 8 8 100 {PP} 4 {STAGES} 2"),
        ("0.17.1", f"{RAMP} 8 4 100 {PP} 4 {STAGES} 2", f"{RAMP} 8 4 100 {PP} 4"),
        ("0.14.0", f"{RAMP} 4 4 100 {PP} 4 {STAGES} 2", f"{RAMP} 4 4 100 {PP} 4"),
    ],
    "widths": [
        ("0.16.1", f"{WIDE} --moe-layer-freq 2", WIDE),
        ("0.20.0", f"{WIDE} --moe-layer-freq ([1]*7+[0]*1)", WIDE),
        ("0.14.0", f"--ffn-hidden-size 250 {TP} 4", f"--ffn-hidden-size 252 {TP} 4"),
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
            (
                f"--use-torch-fsdp2 --untie-embeddings-and-output-weights --ckpt-format torch_dcp {TP} 2 "
                f"--no-gradient-accumulation-fusion"
            ),
            (
                "--use-torch-fsdp2 --untie-embeddings-and-output-weights --ckpt-format torch_dcp "
                "--no-gradient-accumulation-fusion"
            ),
        ),
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
        ("0.15.0", f"{EXPERTS} {EP} 2 --fp16", f"{EXPERTS} {EP} 2 --bf16"),
        ("0.15.0", f"{EXPERTS} {EP} 4 --fp16", f"{EXPERTS} --fp16"),
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
        ("0.14.0", f"--enable-cuda-graph {SELECTIVE} layernorm", f"--external-cuda-graph {SELECTIVE} layernorm"),
        ("0.14.0", f"--external-cuda-graph {FULL}", "--external-cuda-graph"),
        (
            "0.15.0",
            f"{GRAPHS} transformer_engine {SELECTIVE} layernorm",
            f"{GRAPHS} transformer_engine --cuda-graph-scope attn {SELECTIVE} layernorm",
        ),
        ("0.15.0", f"{GRAPHS} transformer_engine --cuda-graph-scope attn {SELECTIVE} core_attn", ""),
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
    """Read a job for a prediction; experts and graphs may have a shape of their own."""
    return job(words, version=version, for_prediction=True)


@pytest.mark.parametrize(
    ("version", "refused", "taken"), [case for cases in CASES.values() for case in cases], ids=lambda text: text[:60]
)
def test_refusals_are_megatrons(version: str, refused: str, taken: str) -> None:
    """Each line is refused, and the line beside it, which differs in what the rule needs, is read."""
    assert read(taken, version).own
    with pytest.raises(MegatronError):
        read(refused, version)
