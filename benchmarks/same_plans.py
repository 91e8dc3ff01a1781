"""Plans and predictions of 32 jobs, written as files, to hold that a change of the code changes none of them.

`python -m benchmarks.same_plans DIR` writes one document a job into DIR. A second run, after the change, with
`--against DIR` prints each document that differs and exits with 1.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
COMMON = (
    "--tokenizer-type NullTokenizer --train-iters 100 --bf16 --transformer-impl transformer_engine --use-flash-attn"
)
SHAPES = {
    "2b": "--num-layers 24 --hidden-size 2560 --num-attention-heads 32 --seq-length 2048 --max-position-embeddings 2048"
    " --vocab-size 50257 --micro-batch-size 2",
    "7b": "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --seq-length 4096"
    " --max-position-embeddings 4096 --vocab-size 32000 --swiglu --disable-bias-linear --normalization RMSNorm"
    " --untie-embeddings-and-output-weights --position-embedding-type rope --micro-batch-size 1",
    "70b": "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --group-query-attention"
    " --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --vocab-size 128256 --swiglu"
    " --disable-bias-linear --normalization RMSNorm --untie-embeddings-and-output-weights"
    " --position-embedding-type rope --micro-batch-size 1",
    "175b": "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048"
    " --max-position-embeddings 2048 --vocab-size 51200 --micro-batch-size 1",
    "8x7b": "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32"
    " --group-query-attention --num-query-groups 8 --seq-length 4096 --max-position-embeddings 4096 --vocab-size 32000"
    " --swiglu --disable-bias-linear --normalization RMSNorm --untie-embeddings-and-output-weights"
    " --position-embedding-type rope --micro-batch-size 1 --num-experts 8 --moe-router-topk 2 --moe-grouped-gemm"
    " --moe-token-dispatcher-type alltoall --expert-model-parallel-size 8",
    "fine": "--num-layers 28 --hidden-size 2048 --ffn-hidden-size 10944 --moe-ffn-hidden-size 1408"
    " --num-attention-heads 16 --seq-length 4096 --max-position-embeddings 4096 --vocab-size 102400 --swiglu"
    " --disable-bias-linear --normalization RMSNorm --untie-embeddings-and-output-weights"
    " --position-embedding-type rope --micro-batch-size 1 --num-experts 64 --moe-router-topk 6"
    " --moe-shared-expert-intermediate-size 2816 --moe-grouped-gemm --expert-model-parallel-size 8"
    " --moe-layer-freq ([0]+[1]*27)",
    "mla": "--num-layers 27 --hidden-size 2048 --ffn-hidden-size 10944 --moe-ffn-hidden-size 1408"
    " --num-attention-heads 16 --seq-length 4096 --max-position-embeddings 4096 --vocab-size 102400 --swiglu"
    " --disable-bias-linear --normalization RMSNorm --untie-embeddings-and-output-weights"
    " --position-embedding-type rope --micro-batch-size 1 --num-experts 64 --moe-router-topk 6 --moe-grouped-gemm"
    " --multi-latent-attention --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128"
    " --expert-model-parallel-size 4",
    "hybrid": "--num-layers 48 --hidden-size 4096 --num-attention-heads 32 --group-query-attention"
    " --num-query-groups 8 --seq-length 4096 --max-position-embeddings 4096 --vocab-size 128000"
    " --position-embedding-type none --normalization RMSNorm --micro-batch-size 1 --is-hybrid-model"
    " --hybrid-override-pattern " + 6 * "M-M-M*-M",
}
FABRIC = "examples/fat-tree.json"
JOBS: Mapping[str, tuple[str, str, str]] = {
    # name: (machines and options of the command, shape, further flags)
    "2b-1": ("plan --gpu A100-80GB --nodes 1", "2b", "--global-batch-size 64"),
    "2b-4-pcie": ("plan --gpu A100-80GB --nodes 4 --fabric fat-tree-4:1", "2b", "--global-batch-size 256"),
    "2b-own": (
        "plan --gpu A100-80GB --nodes 2",
        "2b",
        "--global-batch-size 128 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --sequence-parallel",
    ),
    "2b-fix": (
        "plan --gpu A100-80GB --nodes 2 --fix tp,pp",
        "2b",
        "--global-batch-size 128 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4",
    ),
    "2b-schedules": ("plan --gpu A100-80GB --nodes 2 --schedules all", "2b", "--global-batch-size 32"),
    "7b-2": ("plan --gpu H100 --nodes 2", "7b", "--global-batch-size 128"),
    "7b-16": ("plan --gpu H100 --nodes 16", "7b", "--global-batch-size 512"),
    "7b-16-fabric": (f"plan --gpu H100 --nodes 16 --fabric {FABRIC}", "7b", "--global-batch-size 512"),
    "7b-dist": (
        "plan --gpu H100 --nodes 4 --fabric fat-tree-2:1",
        "7b",
        "--global-batch-size 256 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ),
    "7b-fp8": ("plan --gpu H100 --nodes 4", "7b", "--global-batch-size 256 --fp8-format hybrid"),
    "7b-recompute": (
        "plan --gpu A100-40GB --nodes 4",
        "7b",
        "--global-batch-size 256 --recompute-activations --use-distributed-optimizer",
    ),
    "7b-fsdp": (
        "plan --gpu H100 --nodes 4",
        "7b",
        (
            "--global-batch-size 128 --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"
            " --use-distributed-optimizer --no-gradient-accumulation-fusion --ckpt-format fsdp_dtensor"
        ),
    ),
    "70b-16": ("plan --gpu H100 --nodes 16", "70b", "--global-batch-size 512 --use-distributed-optimizer"),
    "70b-64": (
        "plan --gpu H100 --nodes 64 --fabric fat-tree-4:1",
        "70b",
        "--global-batch-size 1024 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ),
    "70b-cp": (
        "plan --gpu H100 --nodes 16",
        "70b",
        "--global-batch-size 128 --use-distributed-optimizer --context-parallel-size 4",
    ),
    "70b-layout": (
        "plan --gpu H100 --nodes 8 --fix pp",
        "70b",
        (
            "--global-batch-size 256 --use-distributed-optimizer --pipeline-model-parallel-size 8"
            " --tensor-model-parallel-size 8 --sequence-parallel"
        ),
    ),
    "175b-16": ("plan --gpu A100-80GB --nodes 16", "175b", "--global-batch-size 1536 --use-distributed-optimizer"),
    "175b-64": ("plan --gpu A100-80GB --nodes 64 --fabric fat-tree-2:1", "175b", "--global-batch-size 1536"),
    "8x7b-8": ("plan --gpu H100 --nodes 8", "8x7b", "--global-batch-size 256 --use-distributed-optimizer"),
    "8x7b-16": (
        "plan --gpu H100 --nodes 16 --fabric fat-tree-4:1",
        "8x7b",
        "--global-batch-size 512 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ),
    "fine-4": ("plan --gpu H100 --nodes 4", "fine", "--global-batch-size 256 --use-distributed-optimizer"),
    "fine-4-a100": (
        "plan --gpu A100-80GB --nodes 4",
        "fine",
        "--global-batch-size 256 --use-distributed-optimizer --tensor-model-parallel-size 2 --sequence-parallel",
    ),
    "mla-4": ("plan --gpu H100 --nodes 4", "mla", "--global-batch-size 256 --use-distributed-optimizer"),
    "hybrid-2": ("plan --gpu H100 --nodes 2", "hybrid", "--global-batch-size 128"),
    "hybrid-8": (
        "plan --gpu H100 --nodes 8",
        "hybrid",
        "--global-batch-size 256 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ),
    "measured-3": (
        "plan --cluster tests/data/jobs/three-hosts/cluster.json",
        "2b",
        "--global-batch-size 96",
    ),
    "predict-2b": (
        "predict --gpu A100-80GB --nodes 1",
        "2b",
        "--global-batch-size 64 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4",
    ),
    "predict-7b": ("predict --gpu H100 --nodes 2", "7b", "--global-batch-size 128 --use-distributed-optimizer"),
    "predict-70b": (
        "predict --gpu H100 --nodes 16",
        "70b",
        (
            "--global-batch-size 512 --use-distributed-optimizer --tensor-model-parallel-size 8"
            " --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 5 --sequence-parallel"
            " --overlap-grad-reduce --overlap-param-gather"
        ),
    ),
    "predict-175b": (
        "predict --gpu A100-80GB --nodes 64",
        "175b",
        (
            "--global-batch-size 1536 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16"
            " --recompute-activations --sequence-parallel"
        ),
    ),
    "predict-8x7b": (
        "predict --gpu H100 --nodes 8",
        "8x7b",
        (
            "--global-batch-size 256 --use-distributed-optimizer --tensor-model-parallel-size 2 --sequence-parallel"
            " --pipeline-model-parallel-size 4"
        ),
    ),
    "predict-hybrid": (
        "predict --gpu H100 --nodes 4",
        "hybrid",
        "--global-batch-size 128 --tensor-model-parallel-size 4 --sequence-parallel",
    ),
}
PASSING = {"key", "made_at", "solve_s"}
"""Fields that differ from run to run."""


def _document(name: str) -> str:
    command, shape, more = JOBS[name]
    verb, *options = command.split()
    budget = ["--budget", "600"] if verb == "plan" else []
    program = [str(Path(sys.executable).with_name("pipette")), verb, *options, *budget, "--json", "--megatron-version"]
    line = [*program, "0.16.1", "pretrain_gpt.py", *SHAPES[shape].split(), *COMMON.split(), *more.split()]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    if not done.stdout:
        return f"exit code {done.returncode}\n{done.stderr}"
    return json.dumps(_kept(json.loads(done.stdout)), indent=1, sort_keys=True)


def _kept(value: Any) -> Any:
    """Return a document without times, without the words of its sentences, and with 10 digits of each number."""
    if isinstance(value, dict):
        return {name: _kept(inner) for name, inner in value.items() if name not in PASSING}
    if isinstance(value, str) and value.count(" ") > 2:
        return "(a sentence)"
    if isinstance(value, float):
        return float(f"{value:.10g}")
    return [_kept(inner) for inner in value] if isinstance(value, list) else value


def main() -> int:
    """Write the documents, or compare them with documents of an earlier run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--only", nargs="*", choices=sorted(JOBS))
    options = parser.parse_args()
    if options.folder:
        shutil.rmtree(options.folder, ignore_errors=True)
        options.folder.mkdir(parents=True)
    differing = 0
    for name in options.only or JOBS:
        text = _document(name)
        if options.folder:
            (options.folder / f"{name}.json").write_text(text)
        if options.against and (before := (options.against / f"{name}.json").read_text()) != text:
            differing += 1
            pairs = zip(before.splitlines(), text.splitlines(), strict=False)
            first = next((pair for pair in pairs if pair[0] != pair[1]), (before[-80:], text[-80:]))
            print(f"{name} differs: {first[0].strip()!r} became {first[1].strip()!r}")
    print(f"{len(options.only or JOBS)} jobs, {differing} differ")
    return 1 if differing else 0


if __name__ == "__main__":
    raise SystemExit(main())
