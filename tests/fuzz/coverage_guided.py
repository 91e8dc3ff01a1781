"""Runs one reader on inputs that reach new code, until it fails or the time is over; needs `pip install atheris`."""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

import atheris  # type: ignore[import-not-found]

with atheris.instrument_imports(include=["pipette_launch"]):
    from fuzz.mutate import changed
    from fuzz.readers import DOCUMENTS, FOUND, READERS, SEEDS, read


def main(name: str, seconds: str) -> None:
    """Fuzz the reader of this name; an input that it fails on is kept in its folder of `corpus`."""
    found = FOUND / name
    found.mkdir(parents=True, exist_ok=True)

    def mutated(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        made = changed(data, rng) if name in DOCUMENTS and rng.random() < 0.8 else b""
        return made[:max_size] or atheris.Mutate(data, max_size)

    with tempfile.TemporaryDirectory() as work:
        for index, seed in enumerate((*SEEDS[name], *(path.read_bytes() for path in sorted(found.iterdir())))):
            (Path(work) / str(index)).write_bytes(seed)
        limits = ["-max_len=20000", f"-max_total_time={seconds}", "-timeout=10", "-rss_limit_mb=2048"]
        words = [sys.argv[0], work, *limits, f"-artifact_prefix={found}/", "-print_final_stats=1"]
        atheris.Setup(words, lambda data: read(name, data), custom_mutator=mutated)
        atheris.Fuzz()


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in READERS:
        sys.exit(f"usage: scripts/fuzz READER SECONDS; readers are {', '.join(READERS)}")
    main(*sys.argv[1:])
