"""Runs a worker of these tests in several processes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import warm

ROOT = Path(__file__).parents[2]


def answers(worker: str, *words: str | Path, size: int, timeout_s: float, num_lines: int) -> list[dict[str, Any]]:
    """Run `worker` under torchrun with `size` ranks; returns the JSON objects that it prints, a line each."""
    script = (ROOT / "tests" / "patches" / worker, *words)
    done = subprocess.run(
        warm.torchrun("--standalone", f"--nproc-per-node={size}", script=script),
        env=warm.environment([ROOT, ROOT / "patches", ROOT / "tests" / "patches", ROOT / "tests"]),
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert num_lines == len(found), done.stderr[-4000:]
    return found
