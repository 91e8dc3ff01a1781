"""The GPU check at toy size on a CPU: the same code as on a GPU, so that it cannot rot."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.notebook import WHOLE
from benchmarks.gpu.own_script import CASES
from benchmarks.gpu.supervise import PARTS

pytestmark = [pytest.mark.timeout(600), pytest.mark.processes]
ROOT = Path(__file__).parents[2]
EXPECTED = {
    "engine": {"the main job with Transformer Engine"},
    "script": {case.name for case in CASES[1:]},
}
"""Not possible on a CPU: Transformer Engine, and flags that the example trainer lacks."""


def test_every_part_runs_whole(tmp_path: Path) -> None:
    """Each part leaves its records and a report; nothing is missing that a CPU can do, and losses are torchrun's."""
    done = subprocess.run(
        [ROOT / "scripts" / "gpu-check", "--device", "cpu", "--minutes", "9.5", "--out", tmp_path / "out"],
        env={**os.environ, "PYTHON": sys.executable},
        check=False,
        stdout=subprocess.PIPE,
        text=True,
    )

    assert 0 == done.returncode, done.stdout
    found = {part.name: json.loads((tmp_path / "out" / f"{part.name}.json").read_text()) for part in PARTS}
    for name, part in found.items():
        assert WHOLE == part["ended"]
        assert EXPECTED.get(name, set()) == {one["what"] for one in part["missing"]}
    text = (tmp_path / "out" / "gpu-check.md").read_text()
    assert "| cold |" in text
    assert text.count("24 of 24 to the digit") >= 2
    assert 3 == text.count("6 of 6 losses are torchrun's to the digit")
    assert "schedule zb-1p, placement [1, 0]: 6 of 6" in text
    assert "2 ranks by gloo in the place of gloo, staged, tp1 pp2 dp1 vpp2 mbs1, schedule 1f1b" in text
    assert "out of memory: the host's memory is exhausted" in text
    assert "2 ranks met, sent messages around the ring and reduced by gloo in the place of gloo, staged" in text
    assert {"skipped"} == {record["outcome"] for record in found["tests"]["records"]}
