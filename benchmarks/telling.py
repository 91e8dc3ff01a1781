"""Parts of every report: the processor's name, and lines that are printed at once and kept as a text."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from pathlib import Path


def processor() -> str:
    """Return the processor's name."""
    try:
        told = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or "unknown processor"
    names = [line.partition(":")[2].strip() for line in told.splitlines() if line.startswith("model name")]
    return names[0] if names else "unknown processor"


def shown(lines: Iterable[str]) -> str:
    """Print each line when it is there; return all of them as the text of a file."""
    kept = []
    for line in lines:
        print(line, flush=True)
        kept.append(f"{line}\n")
    return "".join(kept)
