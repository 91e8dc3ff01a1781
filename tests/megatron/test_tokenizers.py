"""Vocabularies are counted from flags and files, and a note marks each guess."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipette_launch.errors import MegatronError
from pipette_launch.megatron.flags import Arguments
from pipette_launch.megatron.tokenizers import Vocabulary, read_vocabulary


def vocabulary(words: str, version: str = "0.16.1", **environ: str) -> Vocabulary:
    """Return the vocabulary of some flags; the hub cache is empty unless variables set its folder."""
    return read_vocabulary(Arguments.parse(words.split(), version), {"HF_HOME": "/nowhere", **environ})


@pytest.mark.parametrize(
    ("words", "version", "size", "divisible_by", "is_certain"),
    [
        ("--tokenizer-type NullTokenizer --vocab-size 1000", "0.17.0", 1001, 128, True),
        ("--tokenizer-type NullTokenizer --vocab-size 1000", "0.18.0", 1000, 128, True),
        ("--padded-vocab-size 5000 --vocab-size 10", "0.16.1", 5000, 1, True),
        ("--vocab-size 256 --make-vocab-size-divisible-by 64", "0.16.1", 256, 64, True),
        ("--vocab-size 256 --no-pad-vocab-size", "0.18.0", 256, 1, True),
        ("--tokenizer-type TikTokenizer", "0.16.1", 131072, 128, True),
        ("", "0.16.1", 50257, 128, False),
        ("--tokenizer-type GPT2BPETokenizer --vocab-file /nowhere", "0.16.1", 50257, 128, False),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model some/name --vocab-size 9", "0.16.1", 9, 128, False),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model /cluster/tokenizer.model", "0.16.1", 32000, 128, False),
        ("--vocab-file /nowhere/vocab.txt", "0.16.1", 30524, 128, False),
    ],
)
def test_flags_are_enough(words: str, version: str, size: int, divisible_by: int, is_certain: bool) -> None:
    """Flags, or the kind of tokenizer, give the number."""
    found = vocabulary(words, version)

    assert (size, divisible_by, is_certain) == (found.size, found.divisible_by, not found.note)


@pytest.mark.parametrize(
    "words",
    [
        "--tokenizer-type NullTokenizer",
        "--tokenizer-type BertWordPieceCase",
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model some/name",
        "--tokenizer-type SentencePieceTokenizer --tokenizer-model /nowhere/my.model",
        "--tokenizer-type SFTTokenizer --tokenizer-model /lustre/users/yi-chen/opt-out/phi-fit",
        "--tokenizer-type HuggingFaceTokenizer",
        *(f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model /data/llama-{size}b" for size in (1, 2, 3, 4, 70)),
    ],
)
def test_unknown_vocabularies_are_refused(words: str) -> None:
    """The error names the tokenizer if there is no clue to its size."""
    with pytest.raises(MegatronError, match=r"Tokenizer|WordPiece"):
        vocabulary(words)


def test_lines_of_a_word_piece_vocabulary_are_counted(tmp_path: Path) -> None:
    """Megatron adds two tokens of its own and the extra tokens of a flag."""
    tmp_path.joinpath("vocab.txt").write_text("[PAD]\n[CLS]\na\n")

    assert 8 == vocabulary(f"--vocab-file {tmp_path}/vocab.txt --vocab-extra-ids 3").size


def test_files_are_counted(tmp_path: Path) -> None:
    """Files of GPT-2, Hugging Face (both kinds) and SentencePiece are counted."""
    tmp_path.joinpath("vocab.json").write_text(json.dumps({str(i): i for i in range(70)}))
    tmp_path.joinpath("tokenizer.json").write_text(
        json.dumps({"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"content": "b"}, {"content": "<s>"}]})
    )
    unigram = {"model": {"vocab": [["a", 0.5], ["b", 0.5]]}}
    tmp_path.joinpath("unigram.json").write_text(json.dumps(unigram))
    piece = b"\x0a\x05\x0a\x03abc"  # field 1: a message that holds field 1: "abc"
    trainer = b"\x12\x02\x08\x01"  # field 2
    tmp_path.joinpath("pieces.model").write_bytes(piece * 300 + trainer)

    hugging_face = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model"
    assert vocabulary(f"--vocab-file {tmp_path}/vocab.json").size == 70
    assert vocabulary(f"{hugging_face} {tmp_path}").size == 3
    assert vocabulary(f"{hugging_face} {tmp_path}/unigram.json").size == 2
    assert vocabulary(f"--tokenizer-type Llama2Tokenizer --tokenizer-model {tmp_path}/pieces.model").size == 300


@pytest.mark.parametrize("content", [b"", b"\x0a\xff", b"\x0a", b"\x00" * 9])
def test_damaged_sentencepiece_files_are_not_counted(tmp_path: Path, content: bytes) -> None:
    """A SentencePiece file that ends early, or another file, gives no number."""
    path = tmp_path / "pieces.model"
    path.write_bytes(content)

    with pytest.raises(MegatronError, match="add --vocab-size N"):
        vocabulary(f"--tokenizer-type Llama2Tokenizer --tokenizer-model {path}")


HF = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model"


@pytest.mark.parametrize(
    ("named", "tokens"),
    [
        ("meta-llama/Llama-3.1-70B", 128256),
        ("/lustre/models/Llama-3.1-8B-Instruct", 128256),
        ("/lustre/hub/models--meta-llama--Meta-Llama-3.1-8B-Instruct/snapshots/5206a32e0bd3067aef1ce90f55/", 128256),
        ("/data/Meta-Llama-3-8B/original/tokenizer.json", 128256),
        ("unsloth/Llama-4-Scout-17B-16E-Instruct", 201135),
        ("NousResearch/Llama-2-7b-hf", 32000),
        ("huggyllama/llama-30b", 32000),
        ("mistralai/Mistral-7B-v0.1", 32000),
        ("mistralai/Mistral-7B-Instruct-v0.3", 32768),
        ("mistralai/Mixtral-8x7B-v0.1", 32000),
        ("mistralai/Mixtral-8x22B-Instruct-v0.1", 32768),
        ("mistralai/Mistral-Nemo-Base-2407", 131072),
        ("Qwen/Qwen1.5-72B", 151646),
        ("Qwen/Qwen2-57B-A14B", 151646),
        ("/mnt/qwen2_5_72b", 151665),
        ("Qwen/Qwen3-30B-A3B", 151669),
        ("Qwen/Qwen3.5-397B-A17B", 248077),
        ("deepseek-ai/DeepSeek-V2-Lite", 100002),
        ("deepseek-ai/DeepSeek-V3-Base", 128815),
        ("unsloth/DeepSeek-R1-Distill-Qwen-7B", 151665),
        ("google/gemma-2-9b", 256000),
        ("google/gemma-3-27b-it", 262145),
        ("gpt2", 50257),
        ("EleutherAI/gpt-neox-20b", 50277),
        ("microsoft/phi-2", 50295),
        ("nvidia/Nemotron-4-340B-Base", 256000),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 131072),
        ("openai/gpt-oss-120b", 200019),
        ("moonshotai/Kimi-K2-Base", 163840),
        ("zai-org/GLM-4.5-Air", 151365),
        ("zai-org/glm-4-9b", 151343),
        ("tiiuae/falcon-40b", 65024),
        ("tiiuae/falcon-rw-1b", 50257),
        ("/data/llama-405b", 128256),
        ("/data/qwen2p5_7b", 151665),
        ("/data/llama3p2_1b", 128256),
        ("bigscience/bloom", 250680),
        ("ibm-granite/granite-3b-code-base-2k", 49152),
        ("NousResearch/Hermes-3-Llama-3.1-8B", 128256),
        ("/home/yi/exp7/run-qwen2.5-14b-v2/hf", 151665),
        ("/data/nemotron_2_256k.model", 256000),
    ],
)
def test_names_of_public_models_are_enough(named: str, tokens: int) -> None:
    """A hub name or a path on another machine gives the number; a note says how to correct it."""
    found = vocabulary(f"{HF} {named}")

    assert (tokens, False) == (found.size, not found.note)
    assert found.note.startswith(
        f"{named} was not read on this machine: assumed a vocabulary of {tokens} tokens, like the"
    )
    assert found.note.endswith("; --vocab-size N corrects it")
    assert 7 == vocabulary(f"{HF} {named} --vocab-size 7").size


def cached(root: Path, name: str, revision: str, vocabulary: dict[str, int], *, refs: bool = True) -> Path:
    """Write a tokenizer as the hub's cache stores it: a snapshot whose files are links to blobs."""
    model = root / f"models--{name.replace('/', '--')}"
    snapshot = model / "snapshots" / revision
    for folder in (snapshot, model / "blobs", model / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    (model / "blobs" / revision).write_text(json.dumps({"model": {"vocab": vocabulary}}))
    (snapshot / "tokenizer.json").symlink_to(model / "blobs" / revision)
    if refs:
        (model / "refs" / "main").write_text(revision)
    return snapshot


@pytest.mark.parametrize(
    ("variable", "below"), [("HF_HOME", "hub"), ("HF_HUB_CACHE", ""), ("XDG_CACHE_HOME", "huggingface/hub")]
)
@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-70B", "gpt2", "own/model"])
def test_the_hub_cache_of_this_machine_is_read(tmp_path: Path, variable: str, below: str, name: str) -> None:
    """The snapshot of `main` counts before the table of public models."""
    cached(tmp_path / below, name, "old", {"a": 0})
    cached(tmp_path / below, name, "new", {"a": 0, "b": 1, "c": 2})
    cached(tmp_path / below, name, "other", {"a": 0, "b": 1}, refs=False)
    words = Arguments.parse(f"{HF} {name}".split(), "0.16.1")
    found = read_vocabulary(words, {variable: str(tmp_path)})

    assert (3, "") == (found.size, found.note)


def test_a_snapshot_without_a_main_is_read(tmp_path: Path) -> None:
    """A snapshot without a `main` is read: some tools fetch a revision by its hash."""
    cached(tmp_path, "own/model", "abc", {"a": 0, "b": 1}, refs=False)

    assert 2 == vocabulary(f"{HF} own/model", HF_HUB_CACHE=str(tmp_path)).size


def test_tokens_of_the_configuration_count(tmp_path: Path) -> None:
    """Tokens that transformers adds count once each, with or without tokenizer.json."""
    configuration = {
        "added_tokens_decoder": {"2": {"content": "<x>"}, "0": {"content": "a"}},
        "bos_token": "<s>",
        "pad_token": {"content": "<pad>"},
        "eos_token": None,
        "additional_special_tokens": ["<x>", "<y>"],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(configuration))
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1}))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<z>": 2}))

    # a b <z>, and <x> <s> <pad> <y>
    assert 7 == vocabulary(f"{HF} {tmp_path}").size
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    # a, and <x> <s> <pad> <y>
    assert 5 == vocabulary(f"{HF} {tmp_path}").size


@pytest.mark.parametrize(
    ("kind", "version", "more", "is_certain"),
    [
        ("HuggingFaceTokenizer", "0.16.1", "", True),
        ("SFTTokenizer", "0.16.1", "", True),
        ("GPTSentencePieceTokenizer", "0.16.1", "", True),
        ("SentencePieceTokenizer", "0.16.1", "", False),
        ("SentencePieceTokenizer", "0.17.0", "", True),
        ("Llama2Tokenizer", "0.18.0", "--tokenizer-special-tokens <x>", False),
        ("HuggingFaceTokenizer", "0.18.0", "--tokenizer-special-tokens <x>", False),
    ],
)
def test_added_tokens_make_a_count_uncertain(
    tmp_path: Path, kind: str, version: str, more: str, is_certain: bool
) -> None:
    """Before 0.17 SentencePieceTokenizer adds tokens; from 0.17 on other tokenizers add the tokens of flags."""
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}}))
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x05\x0a\x03abc" * 2)
    path = tmp_path / ("tokenizer.model" if "Piece" in kind or "Llama" in kind else "tokenizer.json")
    found = vocabulary(f"--tokenizer-type {kind} --tokenizer-model {path} {more}", version)

    assert (2, is_certain) == (found.size, not found.note)
