"""Every layout that a plan may choose is one that Megatron takes, written into the job's own command line."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipette_launch.errors import MegatronError
from pipette_launch.facts import Layout
from pipette_launch.megatron import read_job, write_arguments
from pipette_launch.megatron.flags import releases
from pipette_launch.megatron.rules.broken import Rules
from pipette_launch.megatron.rules.judge import broken_rule
from pipette_launch.search.layouts.enumerate import Cuts, cuts

BASE = (
    "--num-layers 12 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --max-position-embeddings 256 "
    "--micro-batch-size 1 --global-batch-size 48 --bf16 --tokenizer-type NullTokenizer --vocab-size 32000 --lr 1e-4 "
    "--train-iters 10 --disable-bias-linear"
)
EXPERTS = "--num-experts 8 --moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 96 --moe-router-topk 2"
MODELS = (
    "--swiglu",
    "--group-query-attention --num-query-groups 2 --position-embedding-type rope",
    EXPERTS,
    (
        f"{EXPERTS} --moe-grouped-gemm --moe-shared-expert-intermediate-size 64 --mtp-num-layers 1 "
        f"--position-embedding-type rope"
    ),
    (
        f"{EXPERTS} --multi-latent-attention --q-lora-rank 64 --kv-lora-rank 32 --qk-head-dim 16 "
        f"--qk-pos-emb-head-dim 16 --v-head-dim 16 --position-embedding-type rope --no-rope-fusion"
    ),
)
FLAGS = (
    "--overlap-p2p-communication-warmup-flush",
    "--no-overlap-p2p-communication",
    "--overlap-moe-expert-parallel-comm",
    "--tp-comm-overlap",
    "--num-distributed-optimizer-instances 2",
    "--use-tp-pp-dp-mapping",
    "--cp-comm-type a2a",
    "--cp-comm-type p2p a2a",
    "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
    "--attention-dropout 0 --hidden-dropout 0",
    "--cuda-graph-impl local",
    "--cuda-graph-impl transformer_engine",
    "--enable-cuda-graph",
    "--external-cuda-graph",
    "--defer-embedding-wgrad-compute",
    "--cpu-offloading-num-layers 2",
    "--fp8-format hybrid",
    "--fp8-format e4m3 --fp8-recipe tensorwise --first-last-layers-bf16 --num-layers-at-start-in-bf16 4",
    (
        "--distribute-saved-activations --tensor-model-parallel-size 2 --recompute-granularity full "
        "--recompute-method block --recompute-num-layers 1"
    ),
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "--use-distributed-optimizer --use-precision-aware-optimizer",
    "--optimizer sgd",
    "--optimizer muon",
    (
        "--use-megatron-fsdp --use-distributed-optimizer --data-parallel-sharding-strategy optim_grads_params "
        "--ckpt-format fsdp_dtensor"
    ),
    "--use-torch-fsdp2 --untie-embeddings-and-output-weights --no-gradient-accumulation-fusion",
    "--ckpt-format torch --disable-gloo-process-groups",
    "--eval-global-batch-size 16",
    "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    "--recompute-granularity selective --recompute-modules core_attn",
)
SAMPLES = 6
"""Layouts of each job that are written and read back."""


def sampled(found: Cuts, rng: random.Random) -> list[Layout]:
    """Take some variants of some cuts."""
    rows = np.array(sorted(rng.sample(range(len(found)), min(SAMPLES, len(found)))), dtype=np.int64)
    if not len(rows):
        return []
    _, columns = found.spread(rows)
    return [columns.layout(row) for row in rng.sample(range(len(columns)), min(SAMPLES, len(columns)))]


@settings(max_examples=120, deadline=None)
@given(
    model=st.sampled_from(MODELS),
    flags=st.lists(st.sampled_from(FLAGS), max_size=3, unique=True),
    version=st.sampled_from(releases()),
    world_size=st.sampled_from((4, 8, 12, 16)),
    seed=st.integers(0, 1 << 16),
)
def test_no_plan_breaks_a_rule(model: str, flags: list[str], version: str, world_size: int, seed: int) -> None:
    """A listed layout breaks no rule, and the command line that says it is read as that layout, without complaint."""
    words = f"{BASE} {model} {' '.join(flags)}".split()
    release = f"{version}.0"

    def read(argv: tuple[str, ...] | list[str], **options: bool) -> Layout:
        job = read_job(argv, world_size=world_size, megatron_version=release, device_kind="cuda", **options)
        assert not [note for note in job.notes if "does not stop" in note]
        return job.own

    try:
        job = read_job(
            words,
            world_size=world_size,
            megatron_version=release,
            device_kind="cuda",
            for_planning=True,
            without_probes=True,
        )
    except MegatronError:
        assume(False)
    rules = Rules.of(job, device_kind="cuda")
    found = cuts(job, world_size=world_size, devices_per_host=4, device_kind="cuda")
    for layout in sampled(found, random.Random(seed)):
        assert broken_rule(rules, layout) is None
        assert layout == read(write_arguments(words, job=job, layout=layout), for_prediction=True)
