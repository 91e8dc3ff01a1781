"""Tokens of a tokenizer whose files lie on this machine, counted without loading it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pipette_launch.errors import FileFormatError, MegatronError
from pipette_launch.facts import files
from pipette_launch.megatron.flags import Arguments, release_of

NOT_LISTS = (FileFormatError, AttributeError, OSError, ValueError, KeyError, TypeError)
"""Errors of reading a file that is damaged or no tokenizer's."""
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def snapshot(name: str, environ: Mapping[str, str]) -> Path | None:
    """Return the folder in which the hub's cache of this machine keeps a model; None where it does not.

    Args:
        name: `ORG/NAME`, or `NAME` alone as of old models.
        environ: of this process, whose variables place the cache (huggingface_hub, constants.py).

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
    """Count the distinct tokens of a Hugging Face tokenizer, those that its configuration adds included.

    Args:
        path: its folder, or its tokenizer.json.

    """
    folder = path if path.is_dir() else path.parent
    try:
        tokens = _listed(read_json(folder / "tokenizer.json" if path.is_dir() else path))
    except NOT_LISTS:
        tokens = None
    if tokens is None and path.is_dir():
        tokens = _slow_tokens(folder)
    if tokens is None:
        return None
    try:
        return len(tokens | set(_configured(read_json(folder / "tokenizer_config.json"))))
    except NOT_LISTS:
        return len(tokens)


def _listed(tokenizer: Any) -> set[str]:
    vocabulary = tokenizer["model"]["vocab"]
    # Unigram models list [token, score] pairs; the others map tokens to ids.
    tokens = set(vocabulary) if isinstance(vocabulary, dict) else {token for token, _ in vocabulary}
    return tokens | {added["content"] for added in tokenizer.get("added_tokens", ())}


def _slow_tokens(folder: Path) -> set[str] | None:
    """Tokens of a tokenizer without tokenizer.json: byte pairs in vocab.json, or pieces in tokenizer.model."""
    try:
        return set(read_json(folder / "vocab.json")) | set(_read_or_empty(folder / "added_tokens.json"))
    except NOT_LISTS:
        pieces = sentencepiece_pieces(folder / "tokenizer.model")
    return set(pieces) | set(_read_or_empty(folder / "added_tokens.json")) if pieces else None


def _configured(configuration: Any) -> Iterator[str]:
    """Tokens that transformers adds where the vocabulary lacks them."""
    for added in configuration.get("added_tokens_decoder", {}).values():
        yield added["content"]
    for token in (*map(configuration.get, SPECIAL), *(configuration.get("additional_special_tokens") or ())):
        if token:
            yield token if isinstance(token, str) else token["content"]


def _read_or_empty(path: Path) -> Any:
    try:
        return read_json(path)
    except NOT_LISTS:
        return {}


def read_json(path: Path) -> Any:
    """Contents of a JSON file; raises FileFormatError for any other."""
    return files.parse(files.read_bytes(path), str(path))


def sentencepiece_pieces(path: Path) -> list[str] | None:
    """Read the pieces of a SentencePiece model: field 1 of its protobuf message, repeated, with the text in field 1."""
    try:
        data = files.read_bytes(path)
        place, pieces = 0, []
        while place < len(data):
            tag, place = _varint(data, place)
            if tag & 7 != 2:  # the pieces come first, and every field up to them is length-delimited
                break
            length, place = _varint(data, place)
            if tag >> 3 == 1:
                pieces.append(_text(data[place : place + length]))
            place += length
    except (FileFormatError, IndexError):
        return None
    return pieces if place <= len(data) else None


def _text(piece: bytes) -> str:
    _, place = _varint(piece, 0)
    length, place = _varint(piece, place)
    return piece[place : place + length].decode("utf-8", "replace")


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


LLAMA_1_OR_2, LLAMA_3 = 32000, 128256
MODELS: tuple[tuple[str, int], ...] = (
    # The first pattern that matches counts, so models distilled from two families stand before both.
    (r"deepseek-r1-distill-llama", LLAMA_3),
    (r"deepseek-r1-distill-qwen", 151665),
    (r"deepseek-r1-0528-qwen3", 151669),
    (r"deepseek-v4", 129280),
    (r"deepseek-?(v3|r1|prover-v2-671b)", 128815),
    (r"deepseek-?(v2|coder-v2|prover-v1)", 100002),
    (r"deepseek-coder", 32022),
    (r"deepseek-(llm|moe|math)", 100015),
    (r"code-?llama", 32016),
    (r"(meta-)?llama-?(7|13|30|33|65)b", LLAMA_1_OR_2),
    (r"(meta-)?llama-?(8|405)b", LLAMA_3),
    (r"(meta-)?llama-?4(?!\d*b)", 201135),
    (r"(meta-)?llama-?3(?!\d*b)", LLAMA_3),
    (r"(meta-)?llama-?[12](?!\d*b)(?!\d)", LLAMA_1_OR_2),
    (r"tinyllama|vicuna|open-?llama", LLAMA_1_OR_2),
    (r"mistral-nemo|mistral-small-(24b|3|4)|ministral|magistral|devstral|pixtral|mistral-large-3", 131072),
    (r"mistral-(large|small)|codestral|mathstral", 32768),
    (r"mistral-7b-(instruct-)?v0-?3", 32768),
    (r"mistral-7b|mistral-v0-?[12]", 32000),
    (r"mixtral-8x22b-(instruct|v0-?3)", 32768),
    (r"mixtral", 32000),
    (r"qwen-?3-?[5-9](?!\d*b)", 248077),
    (r"qwen-?3", 151669),
    (r"qwen-?2-?5(?!\d*b)", 151665),
    (r"qwen-?2-vl", 151657),
    (r"qwen-?(1-?5|2)(?!\d)", 151646),
    (r"(qwq|qvq)-", 151665),
    (r"qwen-(1-8b|7b|14b|72b)", 151851),
    (r"gemma-?[34]n?(?![\db])", 262145),
    (r"(code|recurrent)?gemma", 256000),
    (r"(distil)?gpt-?2|falcon-rw|gpt-neo-(125m|1-3b|2-7b)|dialogpt", 50257),
    (r"gpt-j", 50400),
    (r"gpt-neox|pythia|mamba2?-(130m|370m|780m|790m|1-3b|1-4b|2-7b|2-8b)|mpt-|redpajama-incite|dolly-v2", 50277),
    (r"gpt-oss", 200019),
    (r"phi-(1|1-5|2)$", 50295),
    (r"phi-4-(mini|multimodal)", 200029),
    (r"phi-4", 100352),
    (r"phi-3-small", 100352),
    (r"phi-3(-5)?-", 32011),
    (r"(nvidia-)?nemotron-?(4|3-8b|3-22b|15b|340b)", 256000),
    (r"(nvidia-)?nemotron-(h|nano|3|5)", 131072),
    (r"minitron", 256000),
    (r"kimi-(k2|vl|linear)|moonlight", 163840),
    (r"glm-?5", 154880),
    (r"glm-?4-?[5-9](?!\d*b)", 151365),
    (r"glm-?4", 151343),
    (r"chatglm3", 64798),
    (r"falcon3", 131072),
    (r"falcon-(7b|11b|40b|180b|2)", 65024),
    (r"bloomz?(-|$)", 250680),
    (r"granite-.*code|starcoder|smollm2?(-|$)", 49152),
    (r"granite-4", 100352),
    (r"granite-3", 49155),
    (r"smollm3", LLAMA_3),
    (r"olmo-?(2|3)", 100278),
    (r"olmo", 50280),
    (r"yi-(1-5-)?(6b|9b|34b)", 64000),
    (r"baichuan-?2", 125696),
    (r"baichuan", 64000),
    (r"internlm2", 92544),
    (r"opt-(iml-)?(125m|350m|1-3b|2-7b|6-7b|13b|30b|66b|175b)", 50265),
    (r"(c4ai-)?command-[ar]|aya-(23|expanse)", 255029),
    (r"stablelm-2", 100289),
    (r"dbrx", 100277),
    (r"ernie-4-5", 103424),
    (r"exaone-(3|4|deep)", 102400),
    (r"seed-oss", 155136),
    (r"jamba", 65536),
    (r"minimax", 200064),
    (r"(ling|ring)-(mini|flash|1t)", 157184),
    (r"(ling|ring)-(lite|plus)", 126464),
    (r"mimo-(7b|v2)", 151680),
    (r"longcat", 131072),
    (r"hunyuan-a13b", 128167),
    (r"zephyr-7b", 32000),
    (r"(nemotron|mt-nlg-plus).*256k.*model$", 256000),
    (r"grok-1|apertus", 131072),
)
"""Beginnings of a model's name, in lower case with dashes for all signs, and the tokens of its tokenizer."""


def known_tokens(named: str) -> tuple[str, int] | None:
    """Return the part of a hub name or path that names a public model, and the tokens of its tokenizer.

    Parts that begin with a model's name come before parts that contain it, and later parts before earlier ones.

    Args:
        named: `meta-llama/Llama-3.1-8B`, or `/lustre/models/my-Llama-3.1-8B/tokenizer.model` on a machine elsewhere.

    """
    parts = PurePosixPath(named).parts[::-1]
    # The hub's own cache joins organisation and name by two dashes; names of Megatron-Bridge have 2p5 for 2.5.
    names = [re.sub(r"[^a-z0-9]+|(?<=\d)p(?=\d)", "-", part.rpartition("--")[2].lower()).strip("-") for part in parts]
    for start in ("", r".*?(?<![a-z0-9])"):
        for part, name in zip(parts, names, strict=True):
            for pattern, tokens in MODELS:
                found = re.match(f"{start}({pattern})", name)
                if found:
                    return found[1] if start else part, tokens
    return None


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
