"""Text as bytes, cut into samples whose order depends on the seed and nothing else."""

from __future__ import annotations

import functools
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
MAX_OWN_BYTES = 4 << 20
"""Bytes read from the standard library: enough for a short training, and read in an instant."""


def read(data_path: str | None) -> Bytes:
    """Read the file, or, without one, the sources of the Python that runs this, in the order of their names."""
    if data_path is not None:
        return np.fromfile(data_path, dtype=np.uint8)
    parts: list[bytes] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        parts.append(path.read_bytes())
        if sum(map(len, parts)) >= MAX_OWN_BYTES:
            break
    return np.frombuffer(b"".join(parts)[:MAX_OWN_BYTES], dtype=np.uint8)


def checksum(text: Bytes) -> int:
    """A checksum of 32 bits, by which ranks compare their texts."""
    return zlib.crc32(text.tobytes())


def split(text: Bytes, proportions: str) -> tuple[Bytes, Bytes]:
    """Cut the text into training and validation by `--split`, such as `969, 30, 1`; the rest is for tests."""
    weights = [float(part) for part in proportions.replace("/", ",").split(",")]
    ends = [round(len(text) * sum(weights[: i + 1]) / sum(weights)) for i in range(len(weights))]
    return text[: ends[0]], text[ends[0] : ends[1]] if len(ends) > 1 else text[:0]


@dataclass(frozen=True, kw_only=True)
class Samples:
    """A text cut into windows of `seq_length` bytes, each with the byte after it as the last label."""

    text: Bytes
    seq_length: int
    seed: int | None
    """Seed of the shuffle, a new one for each pass over the text; None keeps the order of the text."""

    def __post_init__(self) -> None:
        if self.num_windows < 1:
            raise ValueError(f"{len(self.text)} bytes of text hold no sample of {self.seq_length} + 1 bytes")

    @property
    def num_windows(self) -> int:
        """Samples of one pass."""
        return (len(self.text) - 1) // self.seq_length

    def batch(self, first: int, size: int) -> NDArray[np.int64]:
        """Samples `first` to `first + size` since the start of training, one a row of `seq_length + 1` tokens."""
        starts = [self._window(index) * self.seq_length for index in range(first, first + size)]
        return np.stack([self.text[start : start + self.seq_length + 1] for start in starts]).astype(np.int64)

    def _window(self, index: int) -> int:
        epoch, place = divmod(index, self.num_windows)
        return place if self.seed is None else int(_order(self.seed, epoch, self.num_windows)[place])


@functools.lru_cache(maxsize=2)
def _order(seed: int, epoch: int, size: int) -> NDArray[np.int64]:
    return np.random.default_rng((seed, epoch)).permutation(size)
