"""Megatron's own checks accept the layouts that we propose, and refuse those that we refuse."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipette_launch.facts import Job, Layout, Recompute
from pipette_launch.facts.co_location import Domains
from pipette_launch.megatron import read_job, script_version, write_arguments
from pipette_launch.megatron.flags import Arguments
from pipette_launch.megatron.rules.broken import Rules
from pipette_launch.megatron.rules.judge import broken_rule
from pipette_launch.search.layouts import base_layouts

CHECKOUT = os.environ.get("MEGATRON_LM_DIR", "")
WORLD_SIZE = 16
SAMPLES = 25
BASE = (
    "--hidden-size 256 --num-attention-heads 8 --seq-length 128 --max-position-embeddings 128 --vocab-size 1000 "
    "--tokenizer-type NullTokenizer --micro-batch-size 1 --global-batch-size 48 --train-iters 10 --lr 1e-4 --bf16 "
    "--no-rope-fusion"
)
EXPERTS = (
    "--num-experts 8 --moe-ffn-hidden-size 96 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type none"
)
KINDS = {
    "dense": "--num-layers 6",
    "swiglu": "--num-layers 8 --swiglu --group-query-attention --num-query-groups 2 --disable-bias-linear",
    "experts": f"--num-layers 6 {EXPERTS} --moe-shared-expert-intermediate-size 64 --disable-bias-linear",
    "experts-with-biases": f"--num-layers 4 {EXPERTS} --moe-layer-freq ([0]*1+[1]*3)",
    "latent": (
        f"--num-layers 5 --multi-latent-attention --q-lora-rank 64 --kv-lora-rank 32 --qk-head-dim 16 "
        f"--qk-pos-emb-head-dim 16 --v-head-dim 16 --position-embedding-type rope --disable-bias-linear "
        f"--mtp-num-layers 1 {EXPERTS}"
    ),
    "swapped": f"--num-layers 6 {EXPERTS} --disable-bias-linear --use-tp-pp-dp-mapping",
}
"""Command lines by the kind of model."""
IN_CORE = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "sequence_parallel",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "microbatch_group_size_per_vp_stage",
    "pipeline_model_parallel_layout",
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "add_bias_linear",
    "mtp_num_layers",
    "moe_router_topk",
    "moe_grouped_gemm",
    "moe_token_dispatcher_type",
    "moe_shared_expert_intermediate_size",
)
"""Destinations that are fields of TransformerConfig too."""
SAID = ("tp", "pp", "dp", "cp", "ep", "etp", "vpp", "microbatch_group_size", "micro_batch_size", "sequence_parallel")
SAID += ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather", "use_tp_pp_dp_mapping")
"""Fields of a layout that NVIDIA's script says back."""
LATENT = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
REFUSED_BY_CORE = (
    "tp does not divide num_attention_heads",
    "tp is not a divisor or multiple of num_query_groups",
    "micro_batch_size*dp does not divide global_batch_size",
    "--use-tp-pp-dp-mapping needs as many expert replicas",
    "experts with biases need etp = 1",
    "expert parallelism needs experts",
    "recompute of moe_act needs",
    "recompute of mla_up_proj needs",
    "pp*vpp does not divide",
)
"""Beginnings of our reasons that megatron-core checks itself; others fail in NVIDIA's script, or while training."""


def job_of(kind: str, version: str) -> tuple[list[str], Job]:
    """A command line and what it asks for."""
    argv = f"{BASE} {KINDS[kind]}".split()
    return argv, read_job(argv, world_size=WORLD_SIZE, megatron_version=version, device_kind="cuda")


def emitted(kind: str, version: str) -> tuple[list[str], Job, list[Layout]]:
    """Layouts that we would propose, some of each kind of cut and saver."""
    argv, job = job_of(kind, version)
    rng = random.Random(kind)
    found = base_layouts(job, world_size=WORLD_SIZE, domains=Domains(devices_per_host=8), device_kind="cuda")
    rows = np.array(sorted(rng.sample(range(len(found)), SAMPLES)), dtype=np.int64)
    _, columns = found.variants(rows)
    layouts = [columns.layout(row) for row in rng.sample(range(len(columns)), SAMPLES)]
    uneven = [
        found.columns.layout(row) for row in np.flatnonzero(found.columns.layers_per_chunk)[:: max(1, len(found) // 40)]
    ]
    return argv, job, [*layouts, *uneven]


def refused(kind: str, version: str) -> tuple[list[str], Job, list[Layout]]:
    """Layouts that break one of the rules that megatron-core has too."""
    argv, job = job_of(kind, version)
    rules = Rules.of(job, device_kind="cuda")
    sizes = [1, 2, 4, 8, 16]
    found: dict[str, list[Layout]] = {}
    for tp, pp, ep, etp, mbs, swapped in product(sizes, sizes, sizes, sizes, (1, 7), (False, True)):
        if tp * pp > WORLD_SIZE or WORLD_SIZE % (pp * ep * etp):
            continue
        layout = Layout(
            tp=tp, pp=pp, dp=WORLD_SIZE // (tp * pp), ep=ep, etp=etp, micro_batch_size=mbs, sequence_parallel=tp > 1,
            use_tp_pp_dp_mapping=swapped,
        )  # fmt: skip
        for modules in ((), ("moe_act",), ("mla_up_proj",)):
            recompute = Recompute(granularity="selective", modules=modules) if modules else layout.recompute
            each = replace(layout, recompute=recompute)
            broken = broken_rule(rules, each)
            reason = next((words for words in REFUSED_BY_CORE if broken and broken.reason.startswith(words)), None)
            if reason:
                found.setdefault(reason, []).append(each)
    rng = random.Random(kind)
    return argv, job, [layout for each in found.values() for layout in rng.sample(each, min(6, len(each)))]


def in_core_words(argv: list[str], job: Job, layout: Layout) -> dict[str, Any]:
    """A layout, written as a command line, as megatron-core's own configuration takes it."""
    written = Arguments.parse(write_arguments(argv, job=job, layout=layout), job.megatron_version)
    model = job.model
    ends = {
        "num_layers_in_first_pipeline_stage": written.get("decoder_first_pipeline_num_layers"),
        "num_layers_in_last_pipeline_stage": written.get("decoder_last_pipeline_num_layers"),
    }
    latent = {name: written.get(name) for name in LATENT} if model.latent_attention else {}
    experts = {"num_moe_experts": model.num_experts, "moe_ffn_hidden_size": model.moe_ffn_hidden_size}
    return {
        **{name: written.get(name) for name in IN_CORE},
        **ends,
        **latent,
        **(experts if model.num_experts else {}),
        "expert_tensor_parallel_size": written.size("expert_tensor_parallel_size", default=layout.tp),
        "num_query_groups": model.num_query_groups,
        "gated_linear_unit": model.gated_linear_unit,
        "ffn_hidden_size": model.ffn_hidden_size,
        "latent": bool(latent),
        "vpp": layout.vpp,
        "world_size": WORLD_SIZE,
        "use_tp_pp_dp_mapping": bool(written.get("use_tp_pp_dp_mapping")),
        "global_batch_size": written.size("global_batch_size"),
        "micro_batch_size": written.size("micro_batch_size"),
        "ddp": {
            name: bool(written.get(name))
            for name in ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
        },
    }


def asked(program: str, samples: list[Any], **environment: str) -> list[Any]:
    """Answers of a program beside this file, run in a process of its own."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(program))],
        input=json.dumps(samples),
        env={**os.environ, "PYTHONWARNINGS": "ignore", "CUDA_DEVICE_MAX_CONNECTIONS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


@pytest.fixture(scope="module")
def core_version() -> str:
    """The release of the installed megatron-core."""
    return metadata.version("megatron-core")


def test_megatron_core_agrees(core_version: str) -> None:
    """Its configuration and process groups take every proposed layout, as meant, and none that we refuse."""
    proposed = [emitted(kind, core_version) for kind in KINDS]
    dropped = [refused(kind, core_version) for kind in KINDS]
    samples = [in_core_words(argv, job, layout) for argv, job, layouts in (*proposed, *dropped) for layout in layouts]
    answers = iter(asked("layout_configs.py", samples))
    meant = [[*layout.chunk_layers(job.model.num_layers)] for _, job, layouts in proposed for layout in layouts]

    assert meant == [next(answers) for _ in meant]
    taken = [
        (layout.words(), broken_rule(Rules.of(job, device_kind="cuda"), layout))
        for _, job, layouts in dropped
        for layout in layouts
        if not isinstance(next(answers), str)
    ]
    assert [] == taken


def test_megatrons_script_agrees() -> None:
    """NVIDIA's own parser and checks take every proposed layout, as meant."""
    if not CHECKOUT:
        pytest.skip("MEGATRON_LM_DIR names no checkout of Megatron-LM")
    version = script_version(f"{CHECKOUT}/pretrain_gpt.py", {})
    # The script takes half a second for each.
    proposed = [(argv, job, some[::6]) for argv, job, some in (emitted(kind, version) for kind in KINDS)]
    lines = [(WORLD_SIZE, write_arguments(argv, job=job, layout=one)) for argv, job, some in proposed for one in some]
    answers = iter(asked("megatron_namespace.py", lines, PYTHONPATH=CHECKOUT))
    for _, job, layouts in proposed:
        for layout in layouts:
            answer = next(answers)

            assert isinstance(answer, dict), f"{layout}: {answer}"
            assert [*layout.chunk_layers(job.model.num_layers)] == answer["chunks"]
            assert {name: getattr(layout, name) for name in SAID} == {name: answer[name] for name in SAID}
