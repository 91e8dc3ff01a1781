"""Vocabularies are counted from flags and files, and guesses say so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipette_launch.errors import MegatronError
from pipette_launch.megatron.flags import Arguments
from pipette_launch.megatron.vocabulary import Vocabulary, read_vocabulary


def vocabulary(words: str, version: str = "0.16.1") -> Vocabulary:
    """The vocabulary of some flags."""
    return read_vocabulary(Arguments.parse(words.split(), version))


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
    ],
)
def test_flags_are_enough(words: str, version: str, size: int, divisible_by: int, is_certain: bool) -> None:
    """Sizes that flags give, or that a tokenizer is known for."""
    found = vocabulary(words, version)

    assert (size, divisible_by, is_certain) == (found.size, found.divisible_by, found.is_certain)
    assert bool(found.note) == (not is_certain)


@pytest.mark.parametrize(
    "words",
    [
        "--tokenizer-type NullTokenizer",
        "--tokenizer-type BertWordPieceCase --vocab-size 9",
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model some/name",
        "--tokenizer-type Llama2Tokenizer --tokenizer-model /nowhere",
    ],
)
def test_unknown_vocabularies_are_refused(words: str) -> None:
    """Where nothing says how many, the tokenizer is named."""
    with pytest.raises(MegatronError, match=r"Tokenizer|WordPiece"):
        vocabulary(words)


def test_files_are_counted(tmp_path: Path) -> None:
    """A GPT-2 vocabulary, a Hugging Face tokenizer of either kind, and a SentencePiece model."""
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
    """A file that ends too early or is none gives no number."""
    path = tmp_path / "pieces.model"
    path.write_bytes(content)

    with pytest.raises(MegatronError, match="--padded-vocab-size"):
        vocabulary(f"--tokenizer-type Llama2Tokenizer --tokenizer-model {path}")
