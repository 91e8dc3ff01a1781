"""Findings of a worker process, so that the tests' own process has no megatron-core and no process groups."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PATH = os.pathsep.join(str(ROOT / folder) for folder in (".", "patches", "tests"))


def findings_of(worker: str, *words: str, timeout_s: float = 200, **variables: str) -> dict[str, Any]:
    """Run a worker of this folder, and return the JSON of its last line."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(worker)), *words],
        env={**os.environ, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1", **variables},
        stdin=subprocess.PIPE,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    assert 0 == done.returncode, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
