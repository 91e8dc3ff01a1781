"""A checkpoint holds the model's layers, not a schedule's chunks: what one schedule writes, any other goes on from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.timeout(200), pytest.mark.processes]
ROOT = Path(__file__).parents[3]
FOLDED = {"vpp": 2, "layers": 8, "named_weights": True}


@pytest.mark.parametrize(
    ("names", "options"),
    [
        (["", "v-half", "interleaved-zb", ""], {**FOLDED, "tied": True}),
        (["v-min", "gis", ""], {**FOLDED, "distributed_optimizer": True}),
    ],
    ids=["tied", "distributed optimizer"],
)
def test_training_goes_on_under_another_schedule(tmp_path: Path, names: list[str], options: dict[str, Any]) -> None:
    """Each step starts from the checkpoint of the one before; losses are those of Megatron's own without any."""
    paths = (ROOT, ROOT / "patches", ROOT / "tests" / "patches")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"),
            *(ROOT / "tests" / "patches" / "checkpoint_worker.py", tmp_path, json.dumps(names), json.dumps(options)),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "TORCHDYNAMO_DISABLE": "1"},
        check=False,
        capture_output=True,
        text=True,
        timeout=180,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 1, done.stderr[-4000:]
    found = json.loads(lines[0])

    assert len(names) == len(found["parts"])
    assert len(set(found["whole"])) == len(names)
    assert found["whole"] == pytest.approx(found["parts"], rel=1e-6)
