"""Commands of the workers: the warm-up with its options, and the user's script."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pipette_launch import defaults, megatron
from pipette_launch.errors import MegatronError, UsageError
from pipette_launch.facts import ComputeCase, Host, Job, files, schedule
from pipette_launch.facts.co_location import Domains
from pipette_launch.facts.messages import RunScript
from pipette_launch.launch.options import Options
from pipette_launch.probe.messages import TINY_BYTES, WarmupOrder

SIZE_LIMITS_BYTES = {"cpu": (64 << 10, 2 << 20), "cuda": (1 << 20, 64 << 20)}
"""(smallest, largest) size in bytes of a measured message. Latency dominates smaller messages, and larger messages are
no faster per byte."""
LEAST_REACH = 32
"""Least ratio of the largest message size to the smallest; a fit of latency and bandwidth needs distant sizes."""
PATCH_RUNNER = "pipette_patches.run"
SCHEDULES = "schedules"
"""Name of the patch that runs pipeline schedules which Megatron lacks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerCommand:
    """The command that runs on every slot (device) of this node."""

    entrypoint: str | Callable[..., Any]
    arguments: tuple[str, ...]
    environment: dict[str, str]
    """Environment variables that the workers get besides the agent's own variables."""


# -- the warm-up --------------------------------------------------------------------------------------------------


def probe_options(
    job: Job, hosts: tuple[Host, ...], *, options: Options, known: Path | None, num_training: int
) -> WarmupOrder:
    """Return the options of a warm-up.

    Raises UsageError if the file of --pipette-probe cannot be written, and MegatronError if the script cannot build the
    measured layers. `known` is the file of earlier measurements on these hosts, which may be missing. `num_training`
    hosts will train, and the others stand by.
    """
    if options.probe_to is not None:
        # Check before the warm-up that the file can be written, because an error later would lose the measurements.
        try:
            files.check_writable(options.probe_to)
        except OSError as error:
            raise UsageError(f"--pipette-probe {options.probe_to}: cannot be written ({error.strerror})") from error
    # Import the search only here, because a start with a cached plan does not search.
    from pipette_launch.search.layouts import base_layouts, compute_cases

    devices = len(hosts[0].devices)
    kind = hosts[0].devices[0].kind
    # First list the compute cases (layers to time) of layouts on the training hosts, then of layouts on all hosts.
    sizes = dict.fromkeys((num_training, len(hosts)))
    domains = Domains(devices_per_host=devices)
    legal = (base_layouts(job, world_size=size * devices, device_kind=kind, domains=domains) for size in sizes)
    cases = tuple(dict.fromkeys(case for one in legal for case in compute_cases(job.own, one.columns)))
    script = own_script(options)
    return WarmupOrder(
        job=job,
        hosts=hosts,
        cases=cases,
        message_sizes_bytes=message_sizes_bytes(job, cases, kind),
        has_adviser=True,
        known=str(known) if known and known.exists() else "",
        budget_s=options.budget_s,
        # The training imports the megatron-core beside the script, so the warm-up must import the same megatron-core.
        script=script,
        script_arguments=options.script_arguments,
        python_path=() if options.is_module else (str(Path(options.script).resolve().parent),),
    )


def links_options(hosts: tuple[Host, ...], *, options: Options) -> WarmupOrder:
    """Return the options of a warm-up that measures only links."""
    least, most = SIZE_LIMITS_BYTES[hosts[0].devices[0].kind]
    return WarmupOrder(
        hosts=hosts,
        message_sizes_bytes=(TINY_BYTES, least, math.isqrt(least * most), most),
        budget_s=min(options.budget_s, defaults.LINKS_BUDGET_S),
    )


def own_script(options: Options) -> tuple[str, ...]:
    """Return Python's arguments that name the job's script.

    Raises MegatronError if the warm-up cannot build layers with the script.
    """
    if not (options.runs_python or options.is_function):
        raise MegatronError("the warm-up measures only Python scripts, so a job with --no-python is not planned")
    if megatron.is_bridge(options.script_arguments, options.script):
        # A recipe does not know Megatron's flags, by which the warm-up sets the sizes of the measured models.
        raise MegatronError(
            "the warm-up cannot measure a Megatron-Bridge recipe; plan it with `pipette plan`, and pass the file "
            "with --pipette-plan"
        )
    return ("-m", options.script) if options.is_module else (options.script,)


def message_sizes_bytes(job: Job, cases: Sequence[ComputeCase], kind: Literal["cuda", "cpu"]) -> tuple[int, ...]:
    """Return one tiny message size, and sizes near the messages that pipeline stages send, within limits.

    A stage sends the activations of one micro-batch: sequence / cp x micro-batch x hidden, divided by tp because TP
    plans use sequence parallelism.
    """
    least, most = SIZE_LIMITS_BYTES[kind]
    model = job.model
    sent = [
        model.seq_length // case.cp * case.micro_batch_size * model.hidden_size * model.dtype_bytes // case.tp
        for case in cases
    ]
    low = min(max(min(sent), least), most // 4)
    high = min(max(*sent, 4 * low, least * LEAST_REACH), most)
    middle = 1 << round(math.log2(math.sqrt(low * high)))
    return tuple(sorted({TINY_BYTES, low, middle, high}))


def warmup(order: Path) -> WorkerCommand:
    """Return the command that runs a warm-up worker on every slot; `order` is the file of the agent's order."""
    arguments = ("-u", "-m", "pipette_launch.probe.run", str(order))
    return WorkerCommand(entrypoint=_python(), arguments=arguments, environment={})


def _python() -> str:
    return os.environ.get("PYTHON_EXEC", sys.executable)


# -- the training -------------------------------------------------------------------------------------------------


def training(
    decision: RunScript, options: Options, script: WorkerCommand, *, folder: Callable[[], Path]
) -> WorkerCommand:
    """Return the command that runs the user's script under a decision; `folder` makes a private folder for a schedule.

    The arguments of `script`, which torchrun would run, end with the script's own arguments.
    """
    head = list(script.arguments[: len(script.arguments) - len(options.script_arguments)])
    tail = list(options.script_arguments if decision.script_arguments is None else decision.script_arguments)
    patches, environment = decision.patches, decision.environment
    if decision.choice is not None and decision.choice.order is not None:
        path = folder() / "schedule.json"
        files.write(path, decision.choice.order)
        patches, environment = (*patches, SCHEDULES), {**environment, schedule.VARIABLE: str(path)}
    if patches:
        # `-u [-m] SCRIPT` becomes `-u -m pipette_patches.run --patch NAME -- [-m] SCRIPT`.
        unbuffered, *module_or_file = head
        named = [word for name in patches for word in ("--patch", name)]
        head = [unbuffered, "-m", PATCH_RUNNER, *named, "--", *module_or_file]
    return replace(script, arguments=(*head, *tail), environment=environment)
