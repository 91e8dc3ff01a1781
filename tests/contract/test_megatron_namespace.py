"""Our reading of a command line is that of Megatron-LM's own parser and checks."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from megatron_lines import SMALL, job

from pipette_launch.errors import MegatronError
from pipette_launch.facts import Job, Layout, Recompute
from pipette_launch.megatron import read_job, script_version, write_arguments
from pipette_launch.megatron.flags import release_of

CHECKOUT = os.environ.get("MEGATRON_LM_DIR", "")
WORLD_SIZE = 8
TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
ETP, FULL_BLOCK = "--expert-tensor-parallel-size", "--recompute-granularity full --recompute-method block"
EXPERTS = "--disable-bias-linear --num-experts 4"
ACCOUNT = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
LEGAL = (
    "",
    f"{TP} 2 --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    f"{TP} 1 --sequence-parallel --recompute-activations",
    f"{PP} 4 --num-layers-per-virtual-pipeline-stage 1 --recompute-num-layers 1 {FULL_BLOCK}",
    f"{PP} 2 --num-virtual-stages-per-pipeline-rank 2 --microbatch-group-size-per-virtual-pipeline-stage 4",
    f"{PP} 2 --pipeline-model-parallel-layout Et|t*3|(tt|)*1ttL",
    f"{PP} 4 --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 3",
    f"{PP} 2 --num-layers 10 {ACCOUNT}",
    f"{PP} 2 --num-layers 10 {ACCOUNT} --num-virtual-stages-per-pipeline-rank 2",
    f"{TP}=4 --context-parallel-size 2 --group-query-attention --num-query-groups 4 --swiglu --bf16",
    "--swiglu --hidden-size 120 --kv-channels 16 --normalization RMSNorm --disable-bias-linear --add-qkv-bias --fp16",
    "--use-rotary-position-embeddings --no-rope-fusion --untie-embeddings-and-output-weights",
    "--num-query-groups 2 --ffn-hidden-size 96 --attention-dropout 0.3",
    f"{EXPERTS} --moe-layer-freq ([0]*1+[1]*7) --expert-model-parallel-size 2 --moe-router-topk 3",
    f"{EXPERTS} --moe-layer-freq 2 --moe-ffn-hidden-size 32 {TP} 2 {ETP} 1 --sequence-parallel",
    "--micro-batch-size 2 --micro-batch-size 4 --recompute-granularity selective --recompute-modules mlp core_attn",
    f"{PP} 2 --use-tp-pp-dp-mapping --encoder-seq-length 32 --padded-vocab-size 1024",
)
ILLEGAL = (
    f"{TP} 3",
    f"{PP} 16",
    f"{PP} 8 --num-layers 12",
    "--num-attention-heads 3",
    f"{TP} 8 --num-attention-heads 4 --kv-channels 16",
    f"{PP} 2 --num-layers-per-virtual-pipeline-stage 3",
    f"{PP} 2 --num-layers-per-virtual-pipeline-stage 2 --num-virtual-stages-per-pipeline-rank 2",
    f"{PP} 2 --pipeline-model-parallel-layout Et|t*3|tt|tL",
    f"{PP} 2 --decoder-first-pipeline-num-layers 0",
    "--overlap-param-gather",
    "--context-parallel-size 8 --seq-length 24",
    "--train-samples 100",
    "--expert-model-parallel-size 2",
    "--recompute-granularity full",
    "--recompute-granularity selective --recompute-method uniform",
    "--seq-length 64",
    "--bf16 --fp16",
    "--num-layers",
    "--num-layers x",
    "--rampup-batch-size 8 8 100",
)
WRITTEN = (
    Layout(tp=2, pp=2, dp=2, etp=2, sequence_parallel=True, micro_batch_size=4),
    Layout(pp=4, dp=2, vpp=2, micro_batch_size=2, use_distributed_optimizer=True, overlap_grad_reduce=True),
    Layout(
        pp=2, dp=4, layers_per_chunk=(3, 5), recompute=Recompute(granularity="full", method="uniform", num_layers=1)
    ),
    Layout(
        pp=2, dp=4, vpp=2, layers_per_chunk=(1, 3, 2, 2), recompute=Recompute(granularity="selective", modules=("mlp",))
    ),
    Layout(tp=8, etp=8),
)


def without_twins(argv: Sequence[str]) -> list[str]:
    """Drop --seq-length where the old word for it is given: Megatron wants only one of the two."""
    return " ".join(argv).replace("--seq-length 32 ", "", 1).split() if "--encoder-seq-length" in argv else [*argv]


def ours(asked: Job) -> dict[str, Any]:
    """A job in the words of Megatron's namespace."""
    own, model = asked.own, asked.model
    fields = ("tp", "pp", "dp", "cp", "ep", "etp", "vpp", "microbatch_group_size", "micro_batch_size")
    switches = ("sequence_parallel", "use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
    shape = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels")
    kinds = ("gated_linear_unit", "normalization", "add_bias_linear", "add_qkv_bias", "attention_dropout", "seq_length")
    experts = ("num_experts", "moe_router_topk", "moe_ffn_hidden_size", "position_embedding_type")
    recompute = own.recompute
    return {
        **{name: getattr(own, name) for name in (*fields, *switches, "use_tp_pp_dp_mapping")},
        **{name: getattr(model, name) for name in (*shape, *kinds, *experts)},
        "chunks": list(own.chunk_layers(model.num_layers)),
        "recompute": [recompute.granularity, recompute.method, recompute.num_layers, list(recompute.modules)],
        "moe_layer_freq": list(model.moe_layer_freq),
        "global_batch_size": asked.batch.global_batch_size,
        "train_iters": asked.train_iters,
        "params_dtype": {"fp32": "torch.float32", "fp16": "torch.float16", "bf16": "torch.bfloat16"}[
            model.params_dtype
        ],
        "untie": model.untie_embeddings_and_output_weights,
    }


def as_list(freq: int | list[int], num_layers: int) -> list[int]:
    """Megatron keeps `--moe-layer-freq N` as a number; its block spec expands it like this."""
    return [int(layer % freq == 0) for layer in range(num_layers)] if isinstance(freq, int) else freq


@pytest.fixture(scope="module")
def command_lines() -> list[list[str]]:
    """All command lines, legal ones first, then those that we wrote, then illegal ones."""
    written = [[*write_arguments(SMALL, job=job(), layout=layout)] for layout in WRITTEN]
    return [
        *(without_twins([*SMALL, *words.split()]) for words in LEGAL),
        *written,
        *([*SMALL, *words.split()] for words in ILLEGAL),
    ]


@pytest.fixture(scope="module")
def theirs(command_lines: list[list[str]]) -> list[Any]:
    """What Megatron-LM makes of them, in a process of its own."""
    if not CHECKOUT:
        pytest.skip("MEGATRON_LM_DIR names no checkout of Megatron-LM")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("megatron_namespace.py"))],
        input=json.dumps([(WORLD_SIZE, argv) for argv in command_lines]),
        env={**os.environ, "PYTHONPATH": CHECKOUT, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


@pytest.fixture(scope="module")
def version() -> str:
    """The release of the checkout."""
    return script_version(f"{CHECKOUT}/pretrain_gpt.py", {})


def test_legal_command_lines_agree(command_lines: list[list[str]], theirs: list[Any], version: str) -> None:
    """Every field that we read is the one that Megatron works with, also for command lines that we wrote."""
    for argv, answer in zip(command_lines, theirs[: len(LEGAL) + len(WRITTEN)], strict=False):
        assert isinstance(answer, dict), f"{argv}: {answer}"
        asked = read_job(argv, world_size=WORLD_SIZE, megatron_version=version, device_kind="cuda")
        padded = answer.pop("padded_vocab_size")
        if answer["num_experts"]:
            answer["moe_layer_freq"] = as_list(answer["moe_layer_freq"], answer["num_layers"])
        else:
            answer["moe_ffn_hidden_size"] = asked.model.moe_ffn_hidden_size  # unused by a dense model

        assert ours(asked) == answer, argv
        assert padded in (None, asked.model.padded_vocab_size(asked.own.tp))


def test_written_layouts_are_megatrons(theirs: list[Any]) -> None:
    """What we wrote is, to Megatron, the layout that we meant."""
    for layout, answer in zip(WRITTEN, theirs[len(LEGAL) :], strict=False):
        cut = list(layout.chunk_layers(8))

        assert (layout.tp, layout.pp, layout.dp, layout.vpp, cut) == tuple(
            answer[name] for name in ("tp", "pp", "dp", "vpp", "chunks")
        )


def test_illegal_command_lines_are_refused_by_both(
    command_lines: list[list[str]], theirs: list[Any], version: str
) -> None:
    """What Megatron refuses, a prediction refuses; from 0.18 on Megatron ignores a batch that does not grow evenly."""
    for argv, answer in zip(command_lines[-len(ILLEGAL) :], theirs[-len(ILLEGAL) :], strict=True):
        is_legal = "--rampup-batch-size" in argv and release_of(version) >= (0, 18)
        assert is_legal == isinstance(answer, dict), argv
        with contextlib.nullcontext() if is_legal else pytest.raises(MegatronError):
            read_job(argv, world_size=WORLD_SIZE, megatron_version=version, device_kind="cuda", for_prediction=True)
