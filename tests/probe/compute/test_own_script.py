"""The job's own script as a program: the variables with which it runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from facts_for_tests import tiny_job
from probe.workers import tiny_options

from pipette_launch.facts import Layout
from pipette_launch.probe.compute.own_script import OwnScript

NAME = "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.mark.parametrize(
    ("tp", "flags", "expected"), [(1, (), None), (2, (), "1"), (2, ("--use-megatron-fsdp",), None)]
)
def test_a_script_has_the_variables_of_its_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp: int, flags: tuple[str, ...], expected: str | None
) -> None:
    """Megatron's parser demands one queue for tensor parallelism, and refuses it for FSDP; later nothing is left."""
    monkeypatch.delenv(NAME, raising=False)
    seen: list[str | None] = []
    monkeypatch.setattr(sys, "seen", seen, raising=False)
    script = tmp_path / "train.py"
    script.write_text(f"import os, sys\nsys.seen.append(os.environ.get({NAME!r}))\n")
    own = OwnScript.of(tiny_options(tmp_path, hosts=1, devices=1, script=(str(script),)))
    assert own is not None

    own.prepared(tiny_job(2, performance_flags=flags), Layout(tp=tp), single_layers=False)()

    assert [expected] == seen
    assert NAME not in os.environ
