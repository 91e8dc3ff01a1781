"""What the workers run: torchrun's own command, with the plan's arguments put in."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipette_launch.agent.controller import WorkerCommand
from pipette_launch.errors import UsageError
from pipette_launch.facts import files, schedule
from pipette_launch.probe.messages import TINY_BYTES, WarmupOrder

if TYPE_CHECKING:
    from pipette_launch.facts import ComputeCase, Host, Job
    from pipette_launch.facts.health import DeviceCondition
    from pipette_launch.facts.messages import Decision
    from pipette_launch.launch.options import Options

CLUSTER = "cluster.json"
SIZE_LIMITS_BYTES = {"cpu": (64 << 10, 2 << 20), "cuda": (1 << 20, 64 << 20)}
"""Below the first a message is mostly latency; one beyond the second says no more about bandwidth."""
LEAST_REACH = 32
"""The largest message is at least so many times the least: a line needs points that lie apart."""


def warmup_order(decision: Decision) -> WarmupOrder:
    """Return the orders of the warm-up that a decision asks for."""
    return files.loads(WarmupOrder, decision.probe_options, "the warm-up's orders")


def probe_options(
    job: Job,
    hosts: tuple[Host, ...],
    *,
    options: Options,
    folder: Path,
    known: Path | None = None,
    conditions: Sequence[DeviceCondition] = (),
    num_training: int | None = None,
) -> WarmupOrder:
    """Write the orders of a warm-up.

    Args:
        job: the model, the batch and the user's own layout.
        hosts: as they take part, with equally many devices each.
        options: budget, and where the script lies.
        folder: a private one, where the first worker leaves what was measured.
        known: what was measured on these hosts before, if anything was.
        conditions: of the hosts' devices, in slot order; empty = not known.
        num_training: so many of the hosts will train, and the others stand by; None for all.

    Raises:
        UsageError: the file of --pipette-probe cannot be written.

    """
    if options.probe_to is not None:
        # Before the warm-up, whose measurements would be lost.
        try:
            files.check_writable(options.probe_to)
        except OSError as error:
            raise UsageError(f"--pipette-probe {options.probe_to}: cannot be written ({error.strerror})") from error
    # The search is imported where it is used: a start from the cache does without it.
    from pipette_launch.search.layouts import compute_cases, cuts

    devices = len(hosts[0].devices)
    kind = hosts[0].devices[0].kind
    # What those will compute that train; then what plans for all would, in which the adviser looks for links.
    sizes = dict.fromkeys((len(hosts) if num_training is None else num_training, len(hosts)))
    legal = (cuts(job, world_size=size * devices, devices_per_host=devices, device_kind=kind) for size in sizes)
    cases = tuple(dict.fromkeys(case for one in legal for case in compute_cases(job.own, one.columns)))
    return WarmupOrder(
        job=job,
        hosts=hosts,
        cases=cases,
        output=str(folder / CLUSTER),
        progress_dir=str(folder / "progress"),
        message_sizes_bytes=message_sizes_bytes(job, cases, kind),
        adviser=adviser_words(options),
        known=str(known) if known and known.exists() else "",
        budget_s=options.budget_s,
        conditions=tuple(conditions),
        # A megatron-core beside the script is the one that will train, so it is the one to measure.
        python_path=() if options.is_module else (str(Path(options.script).resolve().parent),),
    )


def message_sizes_bytes(job: Job, cases: Sequence[ComputeCase], kind: Literal["cuda", "cpu"]) -> tuple[int, ...]:
    """Sizes around what plans send from stage to stage, within limits, and a tiny one.

    A stage sends the activations of one micro-batch: sequence / cp x micro-batch x hidden, cut by tp where sequence
    parallelism is on, as it is wherever tp splits.
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


def adviser_words(options: Options) -> tuple[str, ...]:
    """Say what starts the adviser, but for its two files: it judges plans as the planner will."""
    settings = {"--margin": options.margin, "--memory-margin": options.memory_margin, "--seed": options.seed}
    words = [word for name, value in settings.items() for word in (name, str(value))]
    return (os.environ.get("PYTHON_EXEC", sys.executable), "-m", "pipette_launch.launch.measuring_advice", *words)


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from pipette_launch.facts.messages import Decision
    from pipette_launch.launch.options import Options

PATCH_RUNNER = "pipette_patches.run"
WANDB_NOTES = "WANDB_NOTES"
NOTES_HEAD = "pipette-launch: "
SCHEDULES = "schedules"
"""The patch that executes schedules beside Megatron's own."""


def warmup(options_file: Path) -> WorkerCommand:
    """Run one probe worker on every slot."""
    return WorkerCommand(
        entrypoint=os.environ.get("PYTHON_EXEC", sys.executable),
        arguments=("-u", "-m", "pipette_launch.probe.run", str(options_file)),
        # Not another number of threads than in training: torchrun sets it for several workers, and leaves one alone.
        environment={},
    )


def order_check(device_kind: str, tp: int, ranks: Sequence[int]) -> WorkerCommand:
    """Check NCCL on every device of a node, in the order that training gives them to these ranks.

    It is checked among all of them, and among the `tp` ranks of each tensor-parallel group.
    """
    return WorkerCommand(
        entrypoint=os.environ.get("PYTHON_EXEC", sys.executable),
        arguments=("-u", "-m", "pipette_launch.probe.order_check", device_kind, str(tp), *map(str, ranks)),
        environment={},
    )


def training(
    decision: Decision,
    options: Options,
    entrypoint: str | Callable[..., Any],
    arguments: Sequence[str],
    *,
    folder: Path,
) -> WorkerCommand:
    """Run the user's script under a decision.

    Args:
        decision: what to put in.
        options: the script as the user named it.
        entrypoint: torchrun's own program for the workers.
        arguments: torchrun's own arguments for it; they end with the script's.
        folder: a private one of this node, for the pipeline's schedule where the script runs under a patch.

    """
    given = len(options.script_arguments)
    head = list(arguments[: len(arguments) - given])
    tail = list(options.script_arguments if decision.script_arguments is None else decision.script_arguments)
    patches, environment = decision.patches, {**_wandb_notes(decision, options), **decision.environment}
    if decision.choice is not None and decision.choice.order is not None:
        path = folder / "schedule.json"
        files.write(path, decision.choice.order)
        patches, environment = (*patches, SCHEDULES), {**environment, schedule.VARIABLE: str(path)}
    if patches:
        head = _patched(head, patches)
    return WorkerCommand(entrypoint=entrypoint, arguments=(*head, *tail), environment=environment)


def _wandb_notes(decision: Decision, options: Options) -> dict[str, str]:
    """Let Megatron's own W&B run say which plan it follows: `wandb.init` takes its notes from this variable."""
    plan, choice = decision.plan, decision.choice
    wants = any(word.partition("=")[0] == "--wandb-project" for word in options.script_arguments)
    # Those of the attempt before are in the agent's own variables.
    is_users = not os.environ.get(WANDB_NOTES, NOTES_HEAD).startswith(NOTES_HEAD)
    if plan is None or decision.phase != "train" or not wants or is_users:
        return {}
    # Imported when it is needed: most jobs do without it.
    from pipette_launch.report import chosen_line

    runs = replace(plan, chosen=choice or plan.own, keeps_own=choice is None)
    return {WANDB_NOTES: f"{NOTES_HEAD}{chosen_line(runs)}"}


def _patched(head: Sequence[str], patches: Sequence[str]) -> list[str]:
    """`-u [-m] SCRIPT` becomes `-u -m pipette_patches.run --patch NAME -- [-m] SCRIPT`."""
    unbuffered, *script = head
    named = [word for name in patches for word in ("--patch", name)]
    return [unbuffered, "-m", PATCH_RUNNER, *named, "--", *script]
