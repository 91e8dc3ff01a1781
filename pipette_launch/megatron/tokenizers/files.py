"""Tokens of a tokenizer whose files lie on this machine, counted without loading it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipette_launch.errors import FileFormatError
from pipette_launch.facts import files

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
