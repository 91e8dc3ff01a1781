"""Number of tokens of a job's tokenizer, found without loading it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipette_launch.errors import FileFormatError, MegatronError
from pipette_launch.megatron.flags import Arguments, release_of
from pipette_launch.megatron.tokenizers.files import hugging_face_tokens, read_json, sentencepiece_pieces, snapshot
from pipette_launch.megatron.tokenizers.known_models import LLAMA_1_OR_2, known_tokens

GPT2_TOKENS = 50257
TIKTOKEN_DEFAULT_TOKENS = 2**17
SENTENCEPIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
HUGGING_FACE = ("HuggingFaceTokenizer", "SFTTokenizer")
NOT_GPT = ("BertWordPieceLowerCase", "BertWordPieceCase", "MultimodalTokenizer", "NullMultimodalTokenizer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """Tokens before padding, and the number (times TP) to whose multiple Megatron pads them."""

    size: int
    divisible_by: int
    is_certain: bool
    """Megatron's tokenizer is known to count exactly this number."""
    note: str = ""
    """The assumption, for the user; empty where the number is certain."""


def read_vocabulary(arguments: Arguments, environ: Mapping[str, str] = os.environ) -> Vocabulary:
    """Read the vocabulary from flags, from the tokenizer's files, or from the name of a public model.

    Args:
        arguments: the user's own.
        environ: of this process, whose variables place the cache of Hugging Face's hub.

    Raises:
        MegatronError: the tokenizer is unknown and no flag gives a size.

    """
    if arguments.get("padded_vocab_size") is not None:
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
    size = _exact_count(arguments, kind, environ)
    if size is not None:
        return Vocabulary(size=size, divisible_by=divisible_by, is_certain=True)
    size, note = _assumed_count(arguments, kind, environ)
    return Vocabulary(size=size, divisible_by=divisible_by, is_certain=False, note=note)


def _exact_count(arguments: Arguments, kind: str, environ: Mapping[str, str]) -> int | None:
    """Tokens as Megatron will count them; None where flags and files do not say.

    Raises:
        MegatronError: Megatron would refuse the flags, or the tokenizer belongs to no decoder-only language model.

    """
    if kind in NOT_GPT:
        raise MegatronError(
            f"{arguments.shown('tokenizer_type')}: not a decoder-only language model; it is not planned"
        )
    given, path = arguments.get("vocab_size"), arguments.get("tokenizer_model")
    if kind == "NullTokenizer":
        if given is None:
            raise MegatronError("--tokenizer-type NullTokenizer needs --vocab-size")
        # One id for the end of a document on top, until the flag came to include it.
        return arguments.size("vocab_size") + (1 if release_of(arguments.version) < (0, 18) else 0)
    if kind == "TikTokenizer":
        return arguments.size("vocab_size", default=TIKTOKEN_DEFAULT_TOKENS)
    if kind == "GPT2BPETokenizer":
        try:
            return len(read_json(Path(arguments.get("vocab_file"))))
        except (FileFormatError, TypeError):
            return None
    return _counted(path, kind, environ) if path and _adds_nothing(arguments, kind) else None


def _adds_nothing(arguments: Arguments, kind: str) -> bool:
    """Return True if Megatron takes the tokenizer's own tokens and no more.

    Special tokens of the user's own count from 0.17 on, where the flag that names them was read for such tokenizers.
    Before, SentencePieceTokenizer added those that a model lacks (tokenizer.py of core_v0.16).
    """
    names_special = any(arguments.get(dest) for dest in ("special_tokens", "tokenizer_special_tokens"))
    if release_of(arguments.version) < (0, 17):
        return kind in (*HUGGING_FACE, *SENTENCEPIECE[1:])
    return kind in (*HUGGING_FACE, *SENTENCEPIECE) and not names_special


def _counted(path: str, kind: str, environ: Mapping[str, str]) -> int | None:
    """Tokens in files on this machine, of a path or of a name in the hub's cache."""
    place = Path(path) if Path(path).exists() else snapshot(path, environ)
    if place is None:
        return None
    if kind not in SENTENCEPIECE:
        return hugging_face_tokens(place)
    pieces = sentencepiece_pieces(place)
    return len(pieces) if pieces else None


def _assumed_count(arguments: Arguments, kind: str, environ: Mapping[str, str]) -> tuple[int, str]:
    """Tokens that are likely, and a note on why.

    Raises:
        MegatronError: nothing says how many there are.

    """
    path = arguments.get("tokenizer_model") or ""
    counted = _counted(path, kind, environ) if path else None
    if counted:
        return counted, f"assumed a vocabulary of {counted} tokens for {kind}, as {path} holds without added ones"
    if arguments.get("vocab_size") is not None:
        size = arguments.size("vocab_size")
        return size, f"assumed a vocabulary of {size} tokens for {kind}, as --vocab-size says"
    known = known_tokens(path)
    if known:
        return known[1], (
            f"{path} was not read on this machine: assumed a vocabulary of {known[1]} tokens, as the public {known[0]} "
            f"has; --vocab-size N corrects it"
        )
    usual = {"GPT2BPETokenizer": GPT2_TOKENS, "Llama2Tokenizer": LLAMA_1_OR_2}.get(kind)
    # A file that is there and cannot be read is no reason to assume another.
    if usual and not (path and Path(path).exists()):
        return usual, f"assumed a vocabulary of {usual} tokens for {kind}; --vocab-size N corrects it"
    files = f"with {arguments.shown('tokenizer_model')}" if path else "without --tokenizer-model"
    raise MegatronError(
        f"{arguments.shown('tokenizer_type')} {files}: its vocabulary cannot be "
        f"counted on this machine; add --vocab-size N, which Megatron itself does not read for this tokenizer"
    )
