"""`pipette_launch.predict` as seen by a caller."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from megatron_lines import SMALL

import pipette_launch
from pipette_launch.errors import PipetteError
from pipette_launch.planning.predict import predict


def test_the_python_api_is_the_same_function() -> None:
    """`pipette_launch.predict` is `planning.predict.predict`."""
    assert predict is pipette_launch.predict


def test_help_and_dir_show_it() -> None:
    """help() and dir() list the function before its first use, and no internal import."""
    code = "import pipette_launch; assert dir(pipette_launch)[-1] == 'predict'; help(pipette_launch)"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout

    assert "predict(arguments:" in shown
    assert "Predict memory and step time of exactly the configuration" in shown


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({}, "world_size is missing: give this number, or the number of hosts and of devices on each host"),
        ({"world_size": 8, "nodes": 3}, "world_size 8 does not agree with 3 hosts; correct one of them"),
        ({"world_size": 8, "stage": 1, "rank": 1}, "rank and stage exclude each other"),
        (
            {"world_size": 8, "fabric": "uniform"},
            "fabric describes imagined machines: name their device type too, or leave it out",
        ),
        ({"world_size": 8, "gpu": "H100", "device_kind": "cpu"}, "gpu and device_kind exclude each other"),
        (
            {"world_size": 8, "arguments": [*SMALL, "--tensor-model-parallel-size", "16"]},
            "--tensor-model-parallel-size 16 needs a multiple of 16 ranks, but the job has 8; change them",
        ),
    ],
)
def test_errors_name_arguments(said: dict[str, Any], message: str) -> None:
    """Errors use Python's names for our arguments and flags for Megatron's."""
    with pytest.raises(PipetteError) as caught:
        predict(**{"arguments": SMALL, "megatron_version": "0.16.1", **said})

    assert str(caught.value).startswith(message)
