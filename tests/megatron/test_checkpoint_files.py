"""`--use-checkpoint-args` takes the model from the checkpoint, as Megatron's own reader does."""

from __future__ import annotations

import argparse
import json
import pickle
import zipfile
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron_lines import SMALL, job

from pipette_launch.errors import MegatronError
from pipette_launch.megatron import write_arguments
from pipette_launch.megatron.checkpoint_files import read_saved

RUN = "--micro-batch-size 1 --global-batch-size 32 --train-iters 10 --sequence-parallel --use-checkpoint-args".split()
MIXTRAL: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 224,
    "num_attention_heads": 8,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 16,
    "seq_length": 128,
    "max_position_embeddings": 256,
    "position_embedding_type": "rope",
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "swiglu": True,
    "untie_embeddings_and_output_weights": True,
    "attention_dropout": 0.0,
    "num_experts": 8,
    "moe_layer_freq": [0, 1, 1, 1],
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 96,
    "mtp_num_layers": 1,
    "padded_vocab_size": 1024,
    "tokenizer_type": "HuggingFaceTokenizer",
    "tokenizer_model": "own/model",
    "squared_relu": False,
    "use_distributed_optimizer": False,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
}


def saved(root: Path, kind: str = "torch_dist", **changes: Any) -> str:
    """Write a checkpoint of iteration 10 without tensors, and return the flag that loads it."""
    folder = root / "iter_0000010"
    folder.mkdir(parents=True)
    (root / "latest_checkpointed_iteration.txt").write_text("10")
    name = "common.pt"
    if kind == "torch_dist":
        (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    else:
        for rank in ("mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_001"):
            (folder / rank).mkdir()
        name = "mp_rank_00_000/model_optim_rng.pt"
    state = {"args": argparse.Namespace(**{**MIXTRAL, **changes}), "checkpoint_version": 3.0, "iteration": 10}
    torch.save(state, folder / name)
    return f"--load {root}"


@pytest.mark.parametrize("kind", ["torch_dist", "torch"])
@pytest.mark.parametrize("purpose", ["for_prediction", "for_planning", ""])
def test_the_checkpoint_says_the_model(tmp_path: Path, kind: str, purpose: str) -> None:
    """Every command reads the model from either format, without any flag of the model."""
    read = job(saved(tmp_path, kind), base=RUN, **({purpose: True} if purpose else {}))  # type: ignore[arg-type]
    model = read.model

    assert (4, 64, 224, 8, 2, 16) == (
        model.num_layers,
        model.hidden_size,
        model.ffn_hidden_size,
        model.num_attention_heads,
        model.num_query_groups,
        model.kv_channels,
    )
    assert (128, 256, "rope", "RMSNorm") == (
        model.seq_length,
        model.max_position_embeddings,
        model.position_embedding_type,
        model.normalization,
    )
    assert (8, 2, 96, (0, 1, 1, 1)) == (
        model.num_experts,
        model.moe_router_topk,
        model.moe_ffn_hidden_size,
        model.moe_layer_freq,
    )
    assert (True, False, True, 0.0) == (
        model.gated_linear_unit,
        model.add_bias_linear,
        model.untie_embeddings_and_output_weights,
        model.attention_dropout,
    )
    assert 1024 == model.padded_vocab_size(8)
    assert f"--use-checkpoint-args: {tmp_path / 'iter_0000010'} describes the model" in read.notes


def test_files_of_ranks_name_the_cut_of_the_layers(tmp_path: Path) -> None:
    """The format torch stores the arguments too, so virtual stages and uneven splits are read."""
    cut: dict[str, Any] = {"pipeline_model_parallel_layout": "Et|t*3|tt|ttL", "mtp_num_layers": None}
    load = saved(tmp_path, "torch", **cut, virtual_pipeline_model_parallel_size=2, overlap_grad_reduce=True)
    own = job(load).own

    assert (2, 2, 2, (1, 3, 2, 2), True) == (own.tp, own.pp, own.vpp, own.layers_per_chunk, own.overlap_grad_reduce)
    weights = job(load, "--finetune").own
    assert ((1, 3, 2, 2), False) == (weights.layers_per_chunk, weights.overlap_grad_reduce)


@pytest.mark.parametrize(
    ("words", "field", "value", "overruled"),
    [
        ("--num-layers 2", "num_layers", 2, ""),
        ("--seq-length 64", "seq_length", 64, ""),
        ("--normalization LayerNorm", "normalization", "RMSNorm", "--normalization LayerNorm"),
        ("--num-query-groups 4", "num_query_groups", 2, "--num-query-groups 4"),
        ("--num-experts=4", "num_experts", 8, "--num-experts=4"),
        ("--disable-bias-linear --swiglu", "gated_linear_unit", True, ""),
        ("--squared-relu", "gated_linear_unit", True, "--squared-relu"),
        ("--position-embedding-type none", "position_embedding_type", "rope", "--position-embedding-type none"),
        ("--padded-vocab-size 2048", "vocab_size", 2048, ""),
    ],
)
def test_who_wins(tmp_path: Path, words: str, field: str, value: object, overruled: str) -> None:
    """Sizes that the user gives stay, as in Megatron; a note names the flags that the checkpoint overrides."""
    load = saved(tmp_path, moe_layer_freq=1)
    read = job(load, words, base=RUN)

    assert value == getattr(read.model, field)
    told = f", instead of your {overruled}" if overruled else ""
    assert f"--use-checkpoint-args: {tmp_path / 'iter_0000010'} describes the model{told}" in read.notes


@pytest.mark.parametrize(("version", "depths", "topk"), [("0.16.1", 0, 2), ("0.17.0", 1, 2), ("0.20.0", 1, 2)])
def test_releases_take_different_flags(tmp_path: Path, version: str, depths: int, topk: int) -> None:
    """Multi-token prediction depths are taken from 0.17 on."""
    read = job(saved(tmp_path), base=RUN, version=version)

    assert (depths, topk) == (read.model.mtp_num_layers, read.model.moe_router_topk)


def test_patterns_of_older_runs_are_read(tmp_path: Path) -> None:
    """From 0.17 on the layers of a hybrid model have a new name, and override the number of layers."""
    load = saved(tmp_path, hybrid_override_pattern="M-M*", num_experts=None, mamba_head_dim=16, mamba_num_groups=2)
    for version in ("0.16.1", "0.18.0"):
        read = job(load, base=RUN, version=version, for_prediction=True)
        assert read.model.hybrid
        assert "M-M*" == read.model.hybrid.pattern


def test_a_cut_of_a_saved_pattern_is_written_as_a_pattern(tmp_path: Path) -> None:
    """Megatron prefers the user's pattern to the checkpoint's, so the split is written as a pattern."""
    load = saved(tmp_path, hybrid_layer_pattern="M-M|*", num_experts=None, mamba_head_dim=16, mamba_num_groups=2)
    words = [*RUN, *load.split(), "--pipeline-model-parallel-size", "2"]
    read = job(base=words, version="0.18.0", for_prediction=True)

    assert (3, 1) == read.own.layers_per_chunk
    assert tuple(words) == write_arguments(words, job=read, layout=read.own)
    even = write_arguments(words, job=read, layout=replace(read.own, layers_per_chunk=()))
    assert ("--hybrid-layer-pattern", "M-|M*") == even[len(words) :]
    whole = write_arguments(words, job=read, layout=replace(read.own, layers_per_chunk=(), pp=1, dp=8))
    assert "--pipeline-model-parallel-layout" not in whole


def test_the_tokenizer_is_the_checkpoints_unless_it_must_not(tmp_path: Path) -> None:
    """`--no-use-tokenizer-model-from-checkpoint-args` keeps the user's tokenizer if no padded size was saved."""
    load = saved(tmp_path, padded_vocab_size=None, tokenizer_model="meta-llama/Llama-3.1-8B")
    mine = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model Qwen/Qwen2.5-7B"

    assert 128256 == job(load, mine, base=RUN).model.vocab_size
    assert 151665 == job(load, mine, "--no-use-tokenizer-model-from-checkpoint-args", base=RUN).model.vocab_size


@pytest.mark.parametrize("purpose", ["for_prediction", "for_planning", ""])
def test_a_checkpoint_elsewhere_is_one_sentence(tmp_path: Path, purpose: str) -> None:
    """Without the checkpoint the error names the missing flags; with all flags the job is read with a note."""
    asked: Any = {purpose: True} if purpose else {}
    with pytest.raises(MegatronError) as error:
        job("--load /lustre/ckpt", base=RUN, **asked)

    assert str(error.value).startswith("the command line lacks --num-layers, --hidden-size, --num-attention-heads")
    said = (
        "--use-checkpoint-args finds no checkpoint at --load /lustre/ckpt here, so the flags alone describe the model"
    )
    assert str(error.value).endswith(said)
    assert said in job("--use-checkpoint-args --load /lustre/ckpt", base=SMALL, **asked).notes
    folder = tmp_path / "iter_0000010"
    folder.mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    with pytest.raises(MegatronError, match=f"can read no arguments in {folder}, so the flags alone"):
        job(f"--load {tmp_path}", base=RUN, **asked)
    with pytest.raises(MegatronError, match="--use-checkpoint-args needs --load or --pretrained-checkpoint; add one"):
        job(base=RUN, **asked)


def test_pretrained_weights_say_the_model_too(tmp_path: Path) -> None:
    """Pretrained weights are used while the folder of --load is empty, as at the start of a fine-tuning."""
    named = saved(tmp_path).replace("--load", "--pretrained-checkpoint")

    assert 4 == job(named, f"--load {tmp_path / 'new'}", base=RUN).model.num_layers


def test_without_the_flag_the_checkpoint_says_nothing(tmp_path: Path) -> None:
    """Without the flag Megatron builds the model of the flags."""
    assert 8 == job(saved(tmp_path, num_experts=None), base=SMALL).model.num_layers


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "64"},
        {"swiglu": 1},
        {"normalization": ["RMSNorm"]},
        {"moe_layer_freq": [[0], 1]},
        {"num_query_groups": 2.0},
    ],
)
def test_values_of_another_type_are_left_out(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Values that no parser would have stored are ignored."""
    (name,) = changes
    read = job(saved(tmp_path, **changes), f"--{name.replace('_', '-')} 64" if name == "hidden_size" else "", base=RUN)

    assert 64 == read.model.hidden_size


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 40), 1 << 40),
    st.floats(allow_nan=False),
    st.text(max_size=5).map(lambda text: f"v{text}"),
    st.lists(st.integers(0, 300) | st.sampled_from(["v1", "v2"]), max_size=5),
)


@given(
    st.dictionaries(st.from_regex(r"n[a-z]{1,5}", fullmatch=True), VALUES, min_size=1, max_size=12), st.integers(2, 5)
)
def test_plain_values_are_read_as_they_were_pickled(values: dict[str, Any], protocol: int) -> None:
    """Every pickle protocol is read, with repeated words and lists of any length."""
    with TemporaryDirectory() as folder:
        with zipfile.ZipFile(Path(folder) / "common.pt", "w") as archive:
            archive.writestr("common/data.pkl", pickle.dumps({"args": values}, protocol=protocol))
        read, _ = read_saved(Path(folder))

    assert values == {name: read[name] for name in values}


def test_nothing_of_a_pickle_runs(tmp_path: Path) -> None:
    """A pickle that would write a file when loaded is read, and writes no file."""

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    with zipfile.ZipFile(tmp_path / "common.pt", "w") as archive:
        archive.writestr("common/data.pkl", pickle.dumps({"evil": Evil(), "num_layers": 3}, protocol=2))

    assert 3 == read_saved(tmp_path)[0]["num_layers"]
    assert not (tmp_path / "ran").exists()
