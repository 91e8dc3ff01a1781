"""What `import pipette_launch` offers: the commands of `pipette` as functions, and files of ours as facts."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from pipette_launch.defaults import SEARCH_BUDGET_S, SEED
from pipette_launch.errors import ProbeError, UsageError
from pipette_launch.facts import Measurements, Plan, files
from pipette_launch.facts.fabric import FabricSpec
from pipette_launch.facts.known_devices import DeviceFile
from pipette_launch.facts.prediction import Comparison
from pipette_launch.forecast import checked_words, for_python, predict
from pipette_launch.tools import planning
from pipette_launch.tools.compare import of_files
from pipette_launch.tools.probe import launcher_command

__all__ = ["compare", "load_measurements", "load_plan", "measure", "plan", "predict"]
PLAN_ARGUMENTS = {
    "--cluster": "cluster",
    "--fabric": "fabric",
    "--fix": "fix",
    "--gpu": "gpu",
    "--gpus-per-node": "gpus_per_node",
    "--megatron-version": "megatron_version",
    "--nodes": "nodes",
    "--world-size": "world_size",
}
"""What the flags of `pipette plan` are called in Python, where its errors name them."""


@for_python(PLAN_ARGUMENTS)
def plan(
    arguments: Sequence[str],
    *,
    gpu: str | Path | DeviceFile | None = None,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    world_size: int | None = None,
    cluster: str | Path | Measurements | None = None,
    fabric: str | Path | FabricSpec | None = None,
    fix: Sequence[str] = (),
    budget_s: float = SEARCH_BUDGET_S,
    seed: int = SEED,
    megatron_version: str | None = None,
) -> Plan:
    """Choose layout, schedule and placement for a Megatron command line, as `pipette plan` does; write nothing.

    >>> import pipette_launch
    >>> words = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    >>> words += " --vocab-size 1000 --tokenizer-type NullTokenizer --micro-batch-size 1 --global-batch-size 8"
    >>> words += " --train-iters 10"
    >>> plan = pipette_launch.plan(words.split(), gpu="h100-sxm", nodes=1, fix=["tp", "pp"], megatron_version="0.16.1")
    >>> plan.chosen.layout.tp, plan.chosen.layout.pp, len(plan.chosen.placement)
    (1, 1, 8)

    Args:
        arguments: the words behind the script's name, as the job would be given them.
        gpu: imagine hosts with this device: a name such as `h100-sxm`, or a file of kind `device`; else `cluster`.
        nodes: hosts of the job.
        gpus_per_node: devices and ranks on each; None for as many as is usual for `gpu`.
        world_size: ranks of the job; may take the place of `nodes` or `gpus_per_node`.
        cluster: a cluster.json of `pipette probe`, or its contents.
        fabric: what lies between hosts of `gpu`: a file of kind `fabric`, or `uniform`, `fat-tree-2:1` and the like.
        fix: parts of the layout that stay as they are: `tp`, `pp`, `mbs`, `recompute` and the like.
        budget_s: processor time that the search may take, in seconds.
        seed: of the search's random numbers; equal arguments give equal plans where the budget is not the limit.
        megatron_version: as `0.16.1`; None for the one that a script here would import, else the newest known.

    Returns:
        The plan, times in seconds and sizes in bytes; `chosen.placement` has the slot of each rank.

    Raises:
        UsageError: neither or both of `gpu` and `cluster`, or a size, a name or the budget makes no sense.
        PlanError: no layout is legal and fits; the error says what binds and what would help.
        PipetteError: the flags make no sense or cannot be planned, a file is damaged, or a name is unknown.

    """
    request = planning.PlanningRequest(
        arguments=tuple(checked_words(arguments)),
        gpu=gpu,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        world_size=world_size,
        cluster=Path(cluster) if isinstance(cluster, str) else cluster,
        fabric=fabric,
        fix=tuple(fix.split(",") if isinstance(fix, str) else fix),
        budget_s=budget_s,
        seed=seed,
        megatron_version=megatron_version,
    )
    return planning.planned(planning.problem_of(request), request)


def measure(command: Sequence[str]) -> Measurements:
    """Measure this host as `pipette probe` does, in a child process that prints nothing here; train nothing.

    Args:
        command: the words behind `pipette probe`: flags of pipette-launch, the script, and its own flags, such as
            `["--standalone", "--nproc-per-node", "8", "pretrain_gpt.py", ...]`. Flags that name more hosts wait for
            `pipette probe` on those, and this host must be the first of them, which alone has the result.

    Returns:
        Layer times and times of messages in seconds, memory in bytes; links from each host or device to each.

    Raises:
        UsageError: the words make no sense.
        ProbeError: the measuring failed; the error has the last line that it wrote.

    """
    words = checked_words(command)
    with TemporaryDirectory(prefix="pipette_measure_") as folder:
        out = Path(folder) / "cluster.json"
        done = subprocess.run(
            launcher_command(str(out), words), check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        if done.returncode == 0 and out.exists():
            return load_measurements(out)
    last = (done.stderr.splitlines() or [f"no measurements, exit code {done.returncode}"])[-1]
    kind = UsageError if done.returncode == UsageError.exit_code else ProbeError
    raise kind(last.removeprefix("pipette-launch: error: "))


def load_plan(path: str | Path) -> Plan:
    """Read a plan file, as `pipette plan --out` and a job write it; times in seconds, sizes in bytes.

    `chosen.placement` has one entry for each rank: the slot it sits on, which is host * devices_per_host + device.

    >>> import pipette_launch
    >>> pipette_launch.load_plan("missing.plan.json")
    Traceback (most recent call last):
    pipette_launch.errors.FileFormatError: missing.plan.json: cannot be read (No such file or directory)

    Raises:
        FileFormatError: the file is damaged, no plan, or not there.

    """
    return files.read(Path(path), Plan)


def load_measurements(path: str | Path) -> Measurements:
    """Read a cluster.json, as `pipette probe` and a warm-up write it; times in seconds, sizes in bytes.

    Raises:
        FileFormatError: the file is damaged, holds no measurements, or is not there.

    """
    return files.read(Path(path), Measurements)


def compare(paths: Sequence[str | Path]) -> Comparison:
    """Set plan files side by side, as `pipette compare` does.

    Args:
        paths: two plan files or more; ranks that moved are counted against the first.

    Returns:
        One entry for each file, in their order; `notes` says which plans are for another job or other machines.

    Raises:
        UsageError: fewer than two files.
        FileFormatError: a file is damaged, no plan, or not there.

    """
    if isinstance(paths, str | Path) or len(paths) < 2:
        raise UsageError(f"paths must be two plan files or more, got {paths!r}")
    return of_files([Path(path) for path in paths])
