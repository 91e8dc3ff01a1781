"""How many tokens the tokenizer knows, found without loading it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipette_launch.errors import FileFormatError, MegatronError
from pipette_launch.facts import files
from pipette_launch.megatron.flags import Arguments, release_of

GPT2_TOKENS = 50257
TIKTOKEN_DEFAULT_TOKENS = 2**17
SENTENCEPIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
NOT_GPT = ("BertWordPieceLowerCase", "BertWordPieceCase", "MultimodalTokenizer", "NullMultimodalTokenizer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """Tokens before padding, and what they are padded to a multiple of (times TP)."""

    size: int
    divisible_by: int
    is_certain: bool
    """Whether Megatron's tokenizer is known to count exactly this many."""
    note: str = ""
    """What was assumed, for the user."""


def read_vocabulary(arguments: Arguments) -> Vocabulary:
    """Read the vocabulary from flags, from the tokenizer's files, or from what the tokenizer is known to have.

    Raises:
        MegatronError: the tokenizer is unknown and no flag gives a size.

    """
    padded = arguments.get("padded_vocab_size")
    if padded is not None:
        return Vocabulary(size=arguments.size("padded_vocab_size"), divisible_by=1, is_certain=True)
    divisible_by = arguments.size("make_vocab_size_divisible_by", default=128)
    if arguments.get("pad_vocab_size") is False:
        divisible_by = 1
    kind = arguments.get("tokenizer_type")
    if kind is None and arguments.get("vocab_file") is None and arguments.get("vocab_size") is not None:
        # A script with a tokenizer of its own: the flag is all there is to go by.
        return Vocabulary(size=arguments.size("vocab_size"), divisible_by=divisible_by, is_certain=True)
    # NVIDIA's pretrain_gpt.py names this tokenizer where the user names none.
    kind = kind or "GPT2BPETokenizer"
    size, is_certain = _count(arguments, kind)
    note = (
        "" if is_certain else f"assumed a vocabulary of {size} tokens for {kind}; --padded-vocab-size says it exactly"
    )
    return Vocabulary(size=size, divisible_by=divisible_by, is_certain=is_certain, note=note)


def _count(arguments: Arguments, kind: str) -> tuple[int, bool]:
    """Tokens, and whether that is certain."""
    if kind in NOT_GPT:
        raise MegatronError(
            f"{arguments.shown('tokenizer_type')}: not a decoder-only language model; it is not planned"
        )
    given = arguments.get("vocab_size")
    if kind == "NullTokenizer":
        if given is None:
            raise MegatronError("--tokenizer-type NullTokenizer needs --vocab-size")
        # One id for the end of a document on top, until the flag came to include it.
        return int(given) + (1 if release_of(arguments.version) < (0, 18) else 0), True
    if kind == "TikTokenizer":
        return int(given or TIKTOKEN_DEFAULT_TOKENS), True
    if kind == "GPT2BPETokenizer":
        try:
            return len(_json(Path(arguments.get("vocab_file")))), True
        except (FileFormatError, TypeError):
            return GPT2_TOKENS, False
    path = arguments.get("tokenizer_model")
    if path is not None and kind in SENTENCEPIECE:
        # Only SentencePieceTokenizer adds tokens of its own, which depend on what the model lacks.
        counted, is_exact = _sentencepiece_pieces(Path(path)), kind != "SentencePieceTokenizer"
    else:
        counted = None if path is None else _tokenizer_json_tokens(Path(path))
        is_exact = kind == "HuggingFaceTokenizer"
    if counted:
        return counted, is_exact
    if given is not None:
        return int(given), False
    raise MegatronError(
        f"{arguments.shown('tokenizer_type')} with {arguments.shown('tokenizer_model')}: its vocabulary cannot be "
        f"counted without loading it; add --padded-vocab-size N, as Megatron prints it at the start"
    )


def _tokenizer_json_tokens(path: Path) -> int | None:
    """Distinct tokens of a Hugging Face tokenizer that lies on disk."""
    try:
        tokenizer = _json(path / "tokenizer.json" if path.is_dir() else path)
        vocabulary = tokenizer["model"]["vocab"]
        # Unigram models list [token, score] pairs; the others map tokens to ids.
        tokens = set(vocabulary) if isinstance(vocabulary, dict) else {token for token, _ in vocabulary}
        return len(tokens | {added["content"] for added in tokenizer.get("added_tokens", ())})
    except (FileFormatError, AttributeError, OSError, ValueError, KeyError, TypeError):
        return None


def _json(path: Path) -> Any:
    return files.parse(files.read_bytes(path), str(path))


def _sentencepiece_pieces(path: Path) -> int | None:
    """Count the pieces of a SentencePiece model: field 1 of its protobuf message, repeated."""
    try:
        data = files.read_bytes(path)
        place, pieces = 0, 0
        while place < len(data):
            tag, place = _varint(data, place)
            if tag & 7 != 2:  # the pieces come first, and every field up to them is length-delimited
                break
            length, place = _varint(data, place)
            place += length
            pieces += tag >> 3 == 1
    except (FileFormatError, IndexError):
        return None
    return pieces if place <= len(data) else None


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """One protobuf number and the place behind it; raises IndexError where the data end within it, or it never does."""
    number = 0
    for shift in range(0, 64, 7):
        byte = data[place]
        number |= (byte & 0x7F) << shift
        place += 1
        if byte < 0x80:
            return number, place
    raise IndexError("a number of more than 64 bits")
