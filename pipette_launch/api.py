"""The functions, results and errors of `import pipette_launch`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from pipette_launch.errors import (
    ClusterError,
    FactError,
    FileFormatError,
    MegatronError,
    PipetteError,
    PlanError,
    ProbeError,
    UsageError,
)
from pipette_launch.facts import Measurements, Plan, files
from pipette_launch.facts.prediction import Prediction
from pipette_launch.planning.machines import checked_words
from pipette_launch.planning.plan import plan
from pipette_launch.planning.predict import predict

__all__ = ["load_measurements", "load_plan", "measure", "plan", "predict"]
__all__ += ["Measurements", "Plan", "Prediction"]
__all__ += ["ClusterError", "FactError", "FileFormatError", "MegatronError", "PipetteError", "PlanError"]
__all__ += ["ProbeError", "UsageError"]


def measure(command: Sequence[str]) -> Measurements:
    """Measure this host as `pipette probe` does, in a child process that prints nothing and trains nothing.

    Args:
        command: the words after `pipette probe`: flags of pipette-launch, the script, and the script's own flags, such
            as `["--standalone", "--nproc-per-node", "8", "pretrain_gpt.py", ...]`. If the flags name more hosts, run
            `pipette probe` on the other hosts. This host must be the first, because only the first host has the result.

    Returns:
        Times of layers and messages in seconds, memory in bytes, and the links between hosts and between devices.

    Raises:
        UsageError: pipette-launch cannot read the words of the command.
        ProbeError: measuring failed. The error message has the last line of the child's output.

    """
    words = checked_words(command)
    with TemporaryDirectory(prefix="pipette_measure_") as folder:
        out = Path(folder) / "cluster.json"
        launcher = [sys.executable, "-m", "pipette_launch", "--pipette-probe", str(out), *words]
        done = subprocess.run(launcher, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode == 0 and out.exists():
            return load_measurements(out)
    last = (done.stderr.splitlines() or [f"no measurements, exit code {done.returncode}"])[-1]
    kind = UsageError if done.returncode == UsageError.exit_code else ProbeError
    raise kind(last.removeprefix("pipette-launch: error: "))


def load_plan(path: str | Path) -> Plan:
    """Read a plan file that `pipette plan --out` or a job wrote. Times are in seconds, sizes in bytes.

    `chosen.placement` has the rank of each slot (host and device). The index of a slot is host * devices_per_host +
    device.

    >>> import pipette_launch
    >>> pipette_launch.load_plan("missing.plan.json")
    Traceback (most recent call last):
    pipette_launch.errors.FileFormatError: missing.plan.json: cannot be read (No such file or directory)

    Raises:
        FileFormatError: the file is missing, damaged or not a plan.

    """
    return files.read(Path(path), Plan)


def load_measurements(path: str | Path) -> Measurements:
    """Read a cluster.json that `pipette probe` or a warm-up wrote. Times are in seconds, sizes in bytes.

    Raises:
        FileFormatError: the file is missing, damaged or holds no measurements.

    """
    return files.read(Path(path), Measurements)
