"""Runs a worker of these tests in several processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def answers(worker: str, *words: str | Path, size: int, timeout_s: float, num_lines: int) -> list[dict[str, Any]]:
    """Run `worker` under torchrun with `size` ranks; returns the JSON objects that it prints, a line each."""
    paths = (ROOT, ROOT / "patches", ROOT / "tests" / "patches", ROOT / "tests")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)),
            *(ROOT / "tests" / "patches" / worker, *words),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "TORCHDYNAMO_DISABLE": "1"},
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert num_lines == len(found), done.stderr[-4000:]
    return found
