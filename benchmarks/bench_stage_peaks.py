"""Peak memory of pipeline stages: in the real job of all ranks, played by one process, and by the formula.

`MEGATRON_LM_DIR=FOLDER python -m benchmarks.bench_stage_peaks [--only NUMBER ...] [--record]` trains small models with
NVIDIA's scripts over gloo, and plays the first, the middle and the last stage of each layout. `--record` writes
`benchmarks/results/stage_peaks.md`. The scripts need `pybind11`.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from benchmarks.telling import shown
from benchmarks.validation.conditions import conditions
from pipette_launch.errors import PipetteError
from tests.patches.stage_peaks import FIRST_STEP, RELEASE, Case, Peaks, compared

RESULT = Path(__file__).parent / "results" / "stage_peaks.md"
TIMEOUT_S = 600
LIMIT = 0.02
"""Largest difference between played and real peak that issue 42 allows, as a fraction of the real peak."""
MB = 1e6
COMMON = (
    "--hidden-size 256 --num-attention-heads 8 --seq-length 256 --max-position-embeddings 256 --vocab-size 4000 "
    "--tokenizer-type NullTokenizer --lr 1e-4 --train-iters 3 --transformer-impl local --no-persist-layer-norm "
    "--eval-iters 0 --eval-interval 100 --distributed-backend gloo --rerun-mode disabled --micro-batch-size 1 "
    "--global-batch-size 16"
)
LLAMA = (
    "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --ffn-hidden-size 704 "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"
)
GQA = "--group-query-attention --num-query-groups 4"
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 256 --moe-shared-expert-intermediate-size 256 "
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"
)
MLA = (
    "--multi-latent-attention --q-lora-rank 96 --kv-lora-rank 64 --qk-head-dim 32 --qk-pos-emb-head-dim 16 "
    "--v-head-dim 32 --qk-layernorm --moe-layer-freq ([0]*1+[1]*3) --mtp-num-layers 1"
)
HYBRID = (
    "--hybrid-override-pattern *-*-*-*- --is-hybrid-model "
    "--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec"
)
TP2, SP = "--tensor-model-parallel-size 2", "--sequence-parallel"
PP2, PP4 = (f"--pipeline-model-parallel-size {size}" for size in (2, 4))
VPP2 = "--num-virtual-stages-per-pipeline-rank 2"
EP2, ETP1 = "--expert-model-parallel-size 2", "--expert-tensor-parallel-size 1"
DIST = "--use-distributed-optimizer"
OVERLAP = f"{DIST} --overlap-grad-reduce --overlap-param-gather"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
CORE, MLP, MOE = (
    f"--recompute-granularity selective --recompute-modules {name}" for name in ("core_attn", "mlp", "moe")
)


class Model(NamedTuple):
    """A model, the script that trains it, and (number of ranks, flags) of its layouts."""

    name: str
    script: str
    words: str
    layouts: tuple[tuple[int, str], ...]


GPT_SCRIPT, HYBRID_SCRIPT = "pretrain_gpt.py", "pretrain_mamba.py"
MODELS = (
    Model(
        "GPT",
        GPT_SCRIPT,
        "--num-layers 8",
        ((4, PP4), (4, f"{TP2} {SP} {PP2} {CORE}"), (2, f"{PP2} {VPP2}"), (2, f"{OVERLAP} --micro-batch-size 2")),
    ),
    Model(
        "Llama",
        GPT_SCRIPT,
        f"--num-layers 8 {LLAMA} {GQA}",
        (
            (4, f"{TP2} {SP} {DIST}"),
            (4, f"{PP4} {FULL}"),
            (4, f"{PP2} {VPP2} {OVERLAP}"),
            (2, f"{TP2} {MLP} --micro-batch-size 2"),
        ),
    ),
    Model(
        "MoE",
        GPT_SCRIPT,
        f"--num-layers 4 {LLAMA} {GQA} {EXPERTS}",
        ((2, EP2), (4, f"{PP2} {EP2} {DIST}"), (4, f"{TP2} {SP} {EP2} {ETP1} {OVERLAP}"), (2, f"{PP2} {VPP2} {MOE}")),
    ),
    Model(
        "MLA, MoE, MTP",
        GPT_SCRIPT,
        f"--num-layers 4 {LLAMA} {MLA} {EXPERTS}",
        ((2, PP2), (4, f"{PP2} {EP2} {OVERLAP}"), (2, f"{TP2} {SP} {FULL}"), (4, f"{TP2} {SP} {PP2} {EP2} {ETP1}")),
    ),
    Model(
        "hybrid",
        HYBRID_SCRIPT,
        f"--num-layers 8 {LLAMA} {HYBRID}",
        ((2, PP2), (2, f"{TP2} {SP}"), (4, f"{PP2} {DIST} --micro-batch-size 2"), (4, f"{TP2} {SP} {PP2} {MLP}")),
    ),
)


def cases() -> Iterator[tuple[Model, Case]]:
    """Yield every layout with its model."""
    for model in MODELS:
        for world_size, flags in model.layouts:
            yield model, Case(words=tuple(f"{COMMON} {model.words} {flags}".split()), world_size=world_size)


def row(number: int, model: Model, case: Case, pp_rank: int, peaks: Peaks) -> str:
    """Return a line of the table."""
    job, layout = case.job, case.job.own
    counts = f"{layout.num_microbatches(job.batch.global_batch_size)} | {pp_rank + 1} of {layout.pp}"
    real, played, formula = (f"{size / MB:.1f}" for size in (peaks.real, peaks.played, peaks.formula))
    return (
        f"| {number} | {model.name} | {layout.words()} | {counts} | {real} | {played} | "
        f"{100 * peaks.difference:+.2f} | {formula} | {100 * (peaks.formula / peaks.real - 1):+.1f} |"
    )


def report(checkout: Path, only: Sequence[int]) -> Iterator[str]:
    """Yield the lines of the result."""
    releases = ", ".join(f"{name} {version(name)}" for name in ("torch", "megatron-core"))
    yield f"`python -m benchmarks.bench_stage_peaks`, {', '.join(conditions(None).values())}, {releases}"
    yield ""
    yield f"NVIDIA's scripts of core_v{RELEASE} train small models over gloo, in FP32, with 16 samples in a step."
    yield f"A meter of tensors in each rank reads the peak from step {FIRST_STEP} on (real). Then one process plays the"
    yield "first rank of the first, the middle and the last stage with the same meter (played). The formula of the"
    yield "planner counts the tensors of GPU kernels: on a CPU, dropout keeps masks of four bytes, without fusion."
    yield ""
    yield "Two differences are left. gloo's reduce-scatter, which sequence parallelism uses, copies its input in the"
    yield "rank. Under expert parallelism, a rank receives a random number of tokens from other ranks."
    yield ""
    yield "Conditions: mock data, loaded without worker processes. Routers choose experts at random, by"
    yield "`--moe-router-force-load-balancing`. Megatron does not repeat steps (`--rerun-mode disabled`): to repeat a"
    yield "step, Megatron keeps its batches in host memory, which on a CPU is the memory of the device. No layout has"
    yield "context parallelism, because Megatron's own attention refuses it."
    yield ""
    yield "| # | model | layout | micro-batches | stage | real, MB | played, MB | apart, % | formula, MB | apart, % |"
    yield "|--:|---|---|--:|---|--:|--:|--:|--:|--:|"
    worst: list[float] = []
    failed: list[str] = []
    for number, (model, case) in enumerate(cases(), 1):
        if only and number not in only:
            continue
        try:
            with contextlib.redirect_stdout(sys.stderr):
                found = compared(case, checkout / model.script, mocks_data=True, timeout_s=TIMEOUT_S)
        except (AssertionError, PipetteError, RuntimeError, subprocess.TimeoutExpired) as error:
            failed.append(f"Failed: {number}: {error}")
            continue
        for pp_rank, peaks in found.items():
            yield row(number, model, case, pp_rank, peaks)
        worst.append(max(abs(peaks.difference) for peaks in found.values()))
    yield ""
    num_equal = sum(each <= LIMIT for each in worst)
    yield f"**In {num_equal} of {len(worst) + len(failed)} layouts, played and real peaks are at most"
    yield f"{100 * LIMIT:.0f} % apart; the largest difference is {100 * max(worst, default=0):.2f} %.**"
    yield from failed


def main() -> None:
    """Print the report, and write it with --record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_stage_peaks", description=__doc__)
    parser.add_argument("--record", action="store_true", help="write the report into benchmarks/results")
    parser.add_argument("--only", type=int, nargs="+", default=(), help="numbers of the layouts to run")
    args = parser.parse_args()
    checkout = os.environ.get("MEGATRON_LM_DIR")
    if not checkout:
        sys.exit(f"MEGATRON_LM_DIR must name a checkout of Megatron-LM core_v{RELEASE}")
    sys.path.insert(0, checkout)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    from pipette_patches.workload import load

    load("cpu")
    text = shown(report(Path(checkout), args.only))
    if args.record:
        RESULT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
