"""What callers of `pipette_launch.predict` see of it, and what it says to them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from megatron_lines import SMALL

import pipette_launch
from pipette_launch.errors import PipetteError
from pipette_launch.forecast import predict
from pipette_launch.forecast.prediction import ARGUMENTS
from pipette_launch.tools.main import parser


def test_the_python_api_is_the_same_function() -> None:
    """`pipette_launch.predict` is found where it is used."""
    assert predict is pipette_launch.predict


def test_help_and_dir_show_it() -> None:
    """In a fresh interpreter, before anyone has used it; and dir() shows nothing that is only imported."""
    code = "import pipette_launch; assert dir(pipette_launch)[-1] == 'predict'; help(pipette_launch)"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout

    assert "predict(arguments:" in shown
    assert "Predict memory and step time of exactly the configuration" in shown


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({}, "on how many ranks does it run? Say world_size N, or num_hosts N and devices_per_host N"),
        ({"world_size": 8, "num_hosts": 3}, "world_size 8 is not a multiple of num_hosts 3"),
        ({"world_size": 8, "stage": 1, "rank": 1}, "rank and stage exclude each other"),
        ({"world_size": 8, "fabric": "uniform"}, "fabric describes imagined machines; name their devices with gpu, or"),
        ({"world_size": 8, "gpu": "H100", "device_kind": "cpu"}, "gpu and device_kind cpu exclude each other"),
        (
            {"world_size": 8, "arguments": [*SMALL, "--tensor-model-parallel-size", "16"]},
            "--tensor-model-parallel-size 16 needs a multiple of 16 ranks, but the job has 8; change them, or num",
        ),
    ],
)
def test_errors_name_arguments(said: dict[str, Any], message: str) -> None:
    """Ours by their names in Python; Megatron's flags stay flags, for that is how they were passed."""
    with pytest.raises(PipetteError) as caught:
        predict(**{"arguments": SMALL, "megatron_version": "0.16.1", **said})

    assert str(caught.value).startswith(message)


def test_every_flag_of_the_command_has_its_argument() -> None:
    """A new flag of `pipette predict` gets its name in Python, too."""
    commands = next(action for action in parser()._actions if action.dest == "command")
    flags = {flag for action in commands.choices["predict"]._actions for flag in action.option_strings}

    assert {"-h", "--help", "--json", "-m", "--module", "--nproc_per_node"} == flags - set(ARGUMENTS)
