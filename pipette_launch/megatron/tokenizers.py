"""Number of tokens of a tokenizer that is not loaded, from flags, files, or the name of a public model."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from pipette_launch.errors import FileFormatError, MegatronError
from pipette_launch.facts import files
from pipette_launch.megatron.flags import Arguments, release_of

NOT_LISTS = (FileFormatError, AttributeError, OSError, ValueError, KeyError, TypeError)
"""Errors while reading a file that is damaged or does not belong to a tokenizer."""
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def snapshot(name: str, environ: Mapping[str, str]) -> Path | None:
    """Return the folder of a model in this machine's Hugging Face cache. Return None if the cache lacks the model.

    `name` is `ORG/NAME`, or only `NAME` for old models. The variables in `environ` set the folder of the cache
    (huggingface_hub, constants.py).
    """
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        return None
    home = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    usual = Path(environ.get("HF_HOME") or home).expanduser() / "hub"
    given = next(filter(None, map(environ.get, ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE"))), usual)
    folder = Path(given).expanduser() / f"models--{name.replace('/', '--')}"
    try:
        revision = files.read_bytes(folder / "refs" / "main").decode("ascii").strip()
    except (FileFormatError, UnicodeError):
        revision = ""
    if revision and "/" not in revision and (folder / "snapshots" / revision).is_dir():
        return folder / "snapshots" / revision
    found = sorted(path for path in folder.glob("snapshots/*") if path.is_dir())
    return max(found, key=os.path.getmtime) if found else None


def hugging_face_tokens(path: Path) -> int | None:
    """Count the distinct tokens of a Hugging Face tokenizer, including tokens that its configuration adds.

    `path` is the folder of the tokenizer, or the path of tokenizer.json.
    """
    folder = path if path.is_dir() else path.parent
    try:
        tokens: set[str] | None = _listed(_read_json(folder / "tokenizer.json" if path.is_dir() else path))
    except NOT_LISTS:
        tokens = _slow_tokens(folder) if path.is_dir() else None
    if tokens is None:
        return None
    try:
        return len(tokens | set(_configured(_read_json(folder / "tokenizer_config.json"))))
    except NOT_LISTS:
        return len(tokens)


def _listed(tokenizer: Any) -> set[str]:
    vocabulary = tokenizer["model"]["vocab"]
    # Unigram models list [token, score] pairs. All other models map tokens to ids.
    tokens = set(vocabulary) if isinstance(vocabulary, dict) else {token for token, _ in vocabulary}
    return tokens | {added["content"] for added in tokenizer.get("added_tokens", ())}


def _slow_tokens(folder: Path) -> set[str] | None:
    """Return the tokens if tokenizer.json is missing: byte pairs in vocab.json, or pieces in tokenizer.model."""
    try:
        added = set(_read_json(folder / "added_tokens.json"))
    except NOT_LISTS:
        added = set()
    try:
        return set(_read_json(folder / "vocab.json")) | added
    except NOT_LISTS:
        pieces = sentencepiece_pieces(folder / "tokenizer.model")
    return set(pieces) | added if pieces else None


def _configured(configuration: Any) -> Iterator[str]:
    """Yield the tokens that the library transformers adds to a vocabulary without these tokens."""
    for added in configuration.get("added_tokens_decoder", {}).values():
        yield added["content"]
    for token in (*map(configuration.get, SPECIAL), *(configuration.get("additional_special_tokens") or ())):
        if token:
            yield token if isinstance(token, str) else token["content"]


def _read_json(path: Path) -> Any:
    return files.parse(files.read_bytes(path), str(path))


def sentencepiece_pieces(path: Path) -> list[str] | None:
    """Read the pieces of a SentencePiece model, a protobuf message in which field 1 of each field 1 is a piece."""
    try:
        data = files.read_bytes(path)
        place, pieces = 0, []
        while place < len(data):
            tag, place = _varint(data, place)
            if tag & 7 != 2:  # pieces come first, and have type 2 (with a length)
                break
            length, place = _varint(data, place)
            if tag >> 3 == 1:
                piece = data[place : place + length]
                size, start = _varint(piece, _varint(piece, 0)[1])
                pieces.append(piece[start : start + size].decode("utf-8", "replace"))
            place += length
    except (FileFormatError, IndexError):
        return None
    return pieces if place <= len(data) else None


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """Return a protobuf number and the index after the number. Raise IndexError if the data end inside the number."""
    number = 0
    for shift in range(0, 64, 7):
        byte = data[place]
        number |= (byte & 0x7F) << shift
        place += 1
        if byte < 0x80:
            return number, place
    raise IndexError("a number of more than 64 bits")


# Vocabularies of public models. Megatron counts `len(tokenizer)` with special tokens, and pads the number itself. The
# `vocab_size` in a model's own config.json is already padded, by another rule. Sources: QwenLM/Qwen3 issues 29 and 885
# (Qwen1.5 to 2.5), QwenLM/Qwen3-VL issue 350 (Qwen2-VL), b4rtaz/distributed-llama pull request 282 (Qwen3),
# deepseek-ai/DeepSeek-MoE issue 14, ggml-org/llama.cpp pull request 3633 (DeepSeek-Coder), vllm-project/vllm pull
# request 51727 (DeepSeek-V4), mosaicml/llm-foundry issue 590 (MPT), facebookresearch/metaseq issue 469 (OPT), recipes
# of NVIDIA/NeMo (Llama, Mixtral, Nemotron). Figures of other models follow their published configurations and may
# differ by a few special tokens.

MODELS = tuple((row["name"], int(row["tokens"])) for row in files.table("pipette_launch.megatron", "vocabularies"))
"""Pattern for the beginning of a model's name (lower case, dashes for all signs), and the number of tokens.

The first pattern that matches counts. So a model distilled from one family into another comes before both families.
"""


def known_tokens(named: str) -> tuple[str, int] | None:
    """Return the part of a hub name or path that names a public model, and the model's number of tokens, or None.

    Parts that begin with a model's name are preferred to parts that contain a model's name, and later parts to earlier
    parts. `named` may be a path on another machine: `/lustre/models/my-Llama-3.1-8B/tokenizer.model`.
    """
    parts = PurePosixPath(named).parts[::-1]
    # The hub's cache joins organisation and name by two dashes. Names of Megatron-Bridge have 2p5 for 2.5.
    names = [re.sub(r"[^a-z0-9]+|(?<=\d)p(?=\d)", "-", part.rpartition("--")[2].lower()).strip("-") for part in parts]
    for start in ("", r".*?(?<![a-z0-9])"):
        for part, name in zip(parts, names, strict=True):
            for pattern, tokens in MODELS:
                found = re.match(f"{start}({pattern})", name)
                if found:
                    return found[1] if start else part, tokens
    return None


GPT2_TOKENS, LLAMA_2_TOKENS, BERT_TOKENS = 50257, 32000, 30524
TIKTOKEN_DEFAULT_TOKENS = 2**17
SENTENCEPIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
HUGGING_FACE = ("HuggingFaceTokenizer", "SFTTokenizer")
WORD_PIECES = ("BertWordPieceLowerCase", "BertWordPieceCase")
NOT_GPT = (*WORD_PIECES, "MultimodalTokenizer", "NullMultimodalTokenizer")
"""Tokenizers of models that are not decoder-only language models."""


class Vocabulary(NamedTuple):
    """Number of tokens of a tokenizer, and the padding of this number."""

    size: int
    """Number of tokens before padding."""
    divisible_by: int
    """Megatron pads `size` to a multiple of `divisible_by` times TP."""
    note: str = ""
    """Assumption about the number of tokens, for the user.

    The text is empty if Megatron counts exactly `size` tokens.
    """


def read_vocabulary(arguments: Arguments, environ: Mapping[str, str] = os.environ) -> Vocabulary:
    """Read the vocabulary from flags, from the tokenizer's files, or from the name of a public model.

    Raise MegatronError if the tokenizer is unknown and no flag gives a size.
    """
    if arguments.get("padded_vocab_size") is not None:
        return Vocabulary(arguments.size("padded_vocab_size"), divisible_by=1)
    is_padded = arguments.get("pad_vocab_size") is not False
    divisible_by = arguments.size("make_vocab_size_divisible_by", default=128) if is_padded else 1
    kind = arguments.get("tokenizer_type")
    if kind is None and arguments.get("vocab_file") is None and arguments.get("vocab_size") is not None:
        # The script has its own tokenizer, and only `--vocab-size` describes it.
        return Vocabulary(arguments.size("vocab_size"), divisible_by)
    if kind is None:
        # Defaults of NVIDIA's pretrain_bert.py and pretrain_gpt.py.
        kind = WORD_PIECES[0] if str(arguments.get("vocab_file")).endswith(".txt") else "GPT2BPETokenizer"
    size, note = _exact_count(arguments, kind, environ), ""
    if size is None:
        size, note = _assumed_count(arguments, kind, environ)
    return Vocabulary(size, divisible_by, note)


def _exact_count(arguments: Arguments, kind: str, environ: Mapping[str, str]) -> int | None:
    """Return the number of tokens that Megatron will count. Return None if flags and files do not give the number."""
    given, path = arguments.get("vocab_size"), arguments.get("tokenizer_model")
    release = release_of(arguments.version)
    if kind == "NullTokenizer":
        if given is None:
            raise MegatronError("--tokenizer-type NullTokenizer needs --vocab-size")
        # Before 0.18 the tokenizer adds one token for the end of a document.
        return arguments.size("vocab_size") + (1 if release < (0, 18) else 0)
    if kind == "TikTokenizer":
        return arguments.size("vocab_size", default=TIKTOKEN_DEFAULT_TOKENS)
    if kind == "GPT2BPETokenizer":
        try:
            return len(_read_json(Path(arguments.get("vocab_file"))))
        except (FileFormatError, TypeError):
            return None
    # From 0.17 on Megatron adds the user's own special tokens. Before 0.17, SentencePieceTokenizer added special tokens
    # that a model lacks (tokenizer.py of core_v0.16).
    if release < (0, 17):
        adds_nothing = kind in (*HUGGING_FACE, *SENTENCEPIECE[1:])
    else:
        names_special = any(map(arguments.get, ("special_tokens", "tokenizer_special_tokens")))
        adds_nothing = kind in (*HUGGING_FACE, *SENTENCEPIECE) and not names_special
    return _counted(path, kind, environ) if path and adds_nothing else None


def _counted(path: str, kind: str, environ: Mapping[str, str]) -> int | None:
    """Count the tokens in files on this machine, at a path or under a name in the hub's cache."""
    place = Path(path) if Path(path).exists() else snapshot(path, environ)
    if place is None:
        return None
    if kind not in SENTENCEPIECE:
        return hugging_face_tokens(place)
    pieces = sentencepiece_pieces(place)
    return len(pieces) if pieces else None


def _assumed_count(arguments: Arguments, kind: str, environ: Mapping[str, str]) -> tuple[int, str]:
    """Return the probable number of tokens, and a note that gives the reason.

    Raise MegatronError if nothing indicates the number.
    """
    path = arguments.get("tokenizer_model") or ""
    counted = _counted(path, kind, environ) if path else None
    if counted:
        return counted, f"assumed a vocabulary of {counted} tokens for {kind}, as in {path} without added tokens"
    if arguments.get("vocab_size") is not None:
        size = arguments.size("vocab_size")
        return size, f"assumed a vocabulary of {size} tokens for {kind}, from --vocab-size"
    known = known_tokens(path)
    if known:
        note = (
            f"{path} was not read on this machine: assumed a vocabulary of {known[1]} tokens, like the public "
            f"{known[0]}; --vocab-size N corrects it"
        )
        return known[1], note
    lines = Path(arguments.get("vocab_file") or "")
    if kind in WORD_PIECES and lines.is_file():
        # Megatron adds tokens for the beginning and the end of a text.
        size = len(files.read_bytes(lines).splitlines()) + 2 + (arguments.get("vocab_extra_ids") or 0)
        return size, f"assumed a vocabulary of {size} tokens for {kind}, from {lines}"
    usual = {"GPT2BPETokenizer": GPT2_TOKENS, "Llama2Tokenizer": LLAMA_2_TOKENS, WORD_PIECES[0]: BERT_TOKENS}.get(kind)
    # Do not guess if the file exists but cannot be read.
    if usual and not (path and Path(path).exists()):
        return usual, f"assumed a vocabulary of {usual} tokens for {kind}; --vocab-size N corrects it"
    file = f"with {arguments.shown('tokenizer_model')}" if path else "without --tokenizer-model"
    raise MegatronError(
        f"{arguments.shown('tokenizer_type')} {file}: the vocabulary cannot be counted on this machine; "
        f"add --vocab-size N, which Megatron itself does not read for this tokenizer"
    )
